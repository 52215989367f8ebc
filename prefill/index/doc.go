// Package index remembers which prompts each candidate has computed, to say how
// much of the next one it need not compute again.
//
// A prompt is cut into blocks, and a block's Key covers everything from the
// prompt's start to the block's end. So a flat table of keys is a radix tree:
// whoever holds a block of a prompt should hold those before it, and one walk
// over the keys finds for every candidate how far it gets.
//
// The owner calls Match, reserves a candidate, and calls Speculate with it: the
// blocks count from then on. The probe's end is told by Confirm, Drop or Linger.
// The index mirrors what the engines' caches do, each candidate with an order of
// use and a capacity of its own, inside a bound on the bytes of all.
//
// Nothing here reads a clock, locks or allocates on the way of a request, but
// for the table's own growth. An Index has one owner; Match alone changes
// nothing and may run beside itself.
package index

// Package index remembers which prompts each candidate has computed, to say how much of the next one it need not
// compute again.
//
// A prompt is cut into blocks, and a block's Key covers everything from the prompt's start to the block's end. So a
// flat table of keys is a radix tree: an engine that holds a block of a prompt should hold the blocks before it, and
// one walk over the keys finds for every candidate how far it gets.
//
// The owner calls Match, reserves a candidate, and calls Speculate with it: the blocks count from then on. When the
// probe ends, the owner calls Confirm, Drop or Linger. The index mirrors what the engines' caches do, each candidate
// with an order of use and a capacity of its own, inside a bound on the bytes of all.
//
// Nothing here reads a clock or locks, and nothing allocates during a request, except when the table grows. An Index
// has one owner. Only Match changes nothing, so several calls of it may run at the same time.
package index

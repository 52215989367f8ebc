// Package index remembers which prompts each candidate has computed, and predicts how much of the
// next prompt it has cached.
//
// A prompt is cut into blocks, and a block's Key covers everything from the prompt's start to the
// block's end. A flat table of keys therefore works like a radix tree: an engine that holds a block
// should also hold the blocks before it. One walk over a prompt's keys finds, for every candidate,
// the number of its first blocks that are cached.
//
// The owner calls Match, chooses a candidate, and calls Speculate: from then on the candidate
// counts as holding the blocks. When the probe ends, the owner calls Confirm, Drop or ExpireSoon.
// Each candidate has its own capacity and evicts by its own order of use, like an engine's cache; a
// bound on memory holds for all together.
//
// The package reads no clock, has no lock, and allocates only when the index grows. An Index has
// one owner. Match only reads, so several calls of Match may run at the same time.
package index

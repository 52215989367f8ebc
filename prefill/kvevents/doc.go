// Package kvevents follows the KV events by which an engine reports changes of its own prefix
// cache, over ZeroMQ and in the format of vLLM. With them the prefix index knows exactly which
// blocks the engine holds.
//
// A Stream is a connection to the publisher of one rank, which is dialled again whenever it ends.
// It turns the engine's block hashes into keys of the index, checks the sequence numbers, and
// requests the batches that it missed. If the publisher no longer has them, it drops all blocks of
// the candidate, because some may have been removed: a wrong prediction of a hit does more harm
// than no prediction.
package kvevents

// Package kvevents follows the KV events by which an engine reports changes of its own prefix cache, over ZeroMQ and in
// the format of vLLM. With these events the prefix index knows exactly which blocks the engine holds; without them, it
// only knows what earlier answers showed.
//
// A Stream is a connection to the publisher of one rank, which is dialled again whenever it ends. The stream turns the
// engine's block hashes into keys of the index, checks the sequence numbers, and requests the batches that it missed. If
// the publisher no longer has them, the stream drops all blocks of the candidate, because some may have been removed: a
// wrong prediction of a hit does more harm than no prediction.
package kvevents

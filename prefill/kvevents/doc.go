// Package kvevents follows what an engine says of its own prefix cache: a stream of KV events over ZeroMQ, in the
// format that vLLM publishes. With it the prefix index knows exactly what the engine holds; without it, only what
// earlier answers showed.
//
// A Stream is one connection to one rank's publisher, dialled again whenever it ends. It turns the engine's block
// hashes into the index's own keys, follows the sequence numbers, and asks for the batches that it missed. If these
// cannot be had, it empties what is known of the candidate: to promise a hit that is not there is worse than to
// promise none.
package kvevents

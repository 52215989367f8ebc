// Package kvevents follows what an engine says of its own prefix cache: a
// stream of KV events over ZeroMQ, in the shape that vLLM publishes. From it
// the prefix index knows exactly what the engine holds, instead of what its cache
// was last seen to compute.
//
// A Stream is one connection to one rank's publisher, dialled again whenever it
// ends. It turns the engine's block hashes into the index's own keys, follows
// the sequence numbers, asks for what it missed, and when that cannot be had
// says that the candidate is cold: a promise that may be wrong is worse than none.
package kvevents

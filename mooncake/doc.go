// Package mooncake builds and reads the messages between evenkeel and a pair of prefill and decode
// engines: from a client's JSON body the request for each engine, and from the prefill engine's
// answer the hand-off, which only one decode request may use.
//
// It is pure: no clock, no I/O, no goroutine, no log.
package mooncake

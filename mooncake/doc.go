// Package mooncake builds and reads the messages between evenkeel and a pair of prefill and decode engines. It scans a client's
// JSON body, and builds from it the request for each engine. It checks the answer of the prefill engine, and makes sure that only
// one decode request uses its hand-off.
//
// The package is pure: no clock, no I/O, no goroutine, no log.
package mooncake

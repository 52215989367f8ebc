// Package mooncake speaks the wire contract between evenkeel and a pair of
// prefill and decode engines: it scans a client's JSON body, splices from it
// what each engine gets, checks what a probe returned, and guards the handoff
// until one decode request consumes it.
//
// The package is pure: no clock, no I/O, no goroutine, no log.
package mooncake

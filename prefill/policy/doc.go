// Package policy decides which of the prefill candidates takes a request, from their indicators and the request
// alone.
//
// It is pure: no clock, no I/O, no lock. The tier, the simulator and `check` fill a slice of Candidates and call the
// same Policy.
package policy

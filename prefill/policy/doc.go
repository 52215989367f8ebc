// Package policy chooses the prefill candidate for a request. A choice depends only on the request
// and on the indicators of the candidates.
//
// The package is pure: it has no clock, no I/O and no lock. The proxy, the simulator and `check`
// all fill a slice of Engines and call the same Policy.
package policy

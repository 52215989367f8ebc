// Package geo connects the dispatchers of several regions: which other dispatchers there
// are and their state (peer.go, probe.go, link.go), what they send each other and how
// it is verified (hop.go, keys.go, verifier.go), the way of one request to a peer and back
// (forward.go), and what that cost (receipt.go).
//
// A dispatcher is one evenkeel process with the engines of its region; a peer is
// another dispatcher. Package geo/policy decides where a request goes, from what the Node
// knows. One lock guards what a Node knows; it is never held during I/O. Clock and Link give
// a Node its time and its way to each peer, so that a simulation
// can drive the same Node.
package geo

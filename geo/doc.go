// Package geo is the live side of several regions: who the other dispatchers
// are and how they are (peer.go, probe.go, link.go), what one sends another and how
// it is believed (hop.go, keys.go, door.go), one request's way to a peer and back
// (forward.go), and what that cost (receipt.go).
//
// A dispatcher is one evenkeel process with the engines of its region, a peer
// another one. Where a request goes is geo/policy's to say: a Node asks it with
// what it knows. What a Node knows is behind one lock, never held over I/O. It is
// given its time and its way to each peer, Clock and Link, so that a simulation
// drives the same Node.
package geo

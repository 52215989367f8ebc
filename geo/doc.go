// Package geo connects the proxies of several regions. A proxy is one evenkeel process with the
// engines of its region; a peer is another proxy. The package holds the peers and their state
// (peer.go, probe.go, link.go), the headers between proxies and their verification (hop.go,
// keys.go, verifier.go), the forwarding of a request to a peer (forward.go), and the cost of each
// forward (receipt.go).
//
// Package geo/policy decides where a request goes, by the state in Peers. One lock guards this
// state; it is never held during I/O. Peers takes the time from a Clock and reaches each peer by a
// Link, so that a simulation can drive the same Peers.
package geo

// Package policy decides where a request of one region goes: to a local replica,
// to a peer dispatcher in another region, or nowhere yet.
//
// The owner of an arrival queue passes what it knows of every Place to Begin, which begins a
// round, and then calls Next for its requests in order of arrival. Each call returns a
// Decision, and the round counts it before the next call:
//
//	p.Begin(places, drain)
//	for _, r := range waiting {
//		if p.Done() {
//			break // no other request can go anywhere
//		}
//		switch d := p.Next(r); d.Act {
//		case policy.Send, policy.Forward: // to places[d.Place]
//		case policy.Hold: // it stays in the queue; those behind it may pass
//		}
//	}
//
// Server and simulator call the same functions. No function here reads a clock or takes a
// lock, and a round allocates only if it is larger than all before it. A Policy
// has scratch memory of its own: one goroutine at a time may use it.
//
// Times are float64 milliseconds. Names that end in At are moments,
// counted from any fixed moment that the caller chooses.
package policy

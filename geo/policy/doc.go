// Package policy decides where a request of one region goes: to a local replica,
// to a peer dispatcher in another region, or nowhere yet.
//
// The owner of an arrival queue tells what it knows of every Place, begins a
// round and asks for its requests in order of arrival; each answer is a
// Decision, and the round charges it before it answers for the next one:
//
//	p.Begin(places, drain)
//	for _, r := range waiting {
//		if p.Done() {
//			break // nobody else can go anywhere
//		}
//		switch d := p.Next(r); d.Act {
//		case policy.Send, policy.Forward: // to places[d.Place]
//		case policy.Hold: // it stays in the queue; those behind it may pass
//		}
//	}
//
// Server and simulator call the same functions. Nothing here reads a clock,
// locks, or allocates once a round has been as large as the next one. A Policy
// has scratch of its own: one goroutine at a time may use it.
//
// Times are float64 milliseconds. Those that end in At
// count from whatever moment the caller likes, always the same.
package policy

// Package policy decides where a request of one region goes: to a local replica,
// to a peer proxy in another region, or nowhere yet.
//
// The owner of an arrival queue passes the state of every Candidate to Begin, which begins a round.
// It then calls Next for the waiting requests in order of arrival. Each call returns a Decision,
// which later calls of the round take into account:
//
//	p.Begin(candidates, departureGapMs)
//	for _, r := range waiting {
//		if p.Done() {
//			break // no other request can go anywhere
//		}
//		switch d := p.Next(r); d.Act {
//		case policy.Send, policy.Forward: // to candidates[d.Candidate]
//		case policy.Hold: // it stays in the queue; later requests may still be sent
//		}
//	}
//
// No function reads a clock or takes a lock. A round allocates only if it has more candidates than
// every earlier one.
//
// Durations are float64 milliseconds. Names that end in At are times, in ms since any start that
// the caller chooses.
package policy

package board

import (
	"time"

	"evenkeel/engine/circuit"
)

// Spared ranks. A rank whose engine refuses requests (429 or 503) stays empty, and policies prefer empty ranks. So without a remedy, such a
// rank would get every next request and refuse it. Therefore a rank that has refused several requests in a row is spared: for one second it
// gets no request, if another rank takes requests. Then one request is its trial. If the rank refuses this request, too, the time doubles,
// up to 30 s. The first event of a request that the rank got after it was spared ends the sparing. If all ranks would be spared, none is,
// because all requests would then fail for certain.

// updateRefusals records whether the engine of a rank refused a request that has ended, or had begun it. If neither is true, the end of the
// request says nothing about the rank.
func (b *board) updateRefusals(s *slotRecord, refused bool, now time.Time) {
	r := s.rank
	switch {
	case refused:
		if nowSpared := r.refusals.Fail(s.id, now); nowSpared {
			b.decideNow = true // from the next decision on, the rank gets no requests (updateSpared)
			b.emit(Effect{Kind: EffectSpared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}, Duration: r.refusals.OutageLength()})
		}
		b.updateFirstEventWatch() // streams must now report their first events, because one of them ends the row of refusals
	case s.started: // an engine that begins a request has not refused it
		b.recordAccepted(s)
	default:
		r.refusals.Neutral(s.id)
	}
}

// recordAccepted records that the engine of a rank took a request. This ends a row of refusals. If the rank was spared after several
// refusals, so that it gets no requests but a trial, it returns to service. But a request that it got before it was spared proves nothing,
// and is ignored.
func (b *board) recordAccepted(s *slotRecord) {
	r := s.rank
	inService := r.refusals.InService()
	if inService && r.refusals.Failures() == 0 { // the rank has refused none of its last requests
		return
	}
	if !inService {
		if s.boundAt.Before(r.refusals.OutSince()) {
			return
		}
		b.decideNow = true // waiting entries may go to the rank again
		b.emit(Effect{Kind: EffectUnspared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}})
	}
	r.refusals.Succeed()
	r.spared = false
	b.updateFirstEventWatch() // one rank fewer refuses requests, so streams may no longer have to report their first events
}

// updateFirstEventWatch counts the ranks whose last requests were refused, and emits the sum of this number and of the number of suspected
// pairs of engines. While the sum is above 0, each stream must report its first event to the board.
func (b *board) updateFirstEventWatch() {
	b.refusingRanks = 0
	for _, r := range b.ranks {
		if !r.refusals.InService() || r.refusals.Failures() > 0 {
			b.refusingRanks++
		}
	}
	b.emit(Effect{Kind: EffectWatchFirstEvents, Group: GroupKey{Model: b.model}, Count: b.pairs.Suspects() + b.refusingRanks})
}

// updateSpared sets which ranks get no requests from now on (spared): their engines refuse them, or
// lose hand-offs (pairs.go). retrySparedAt becomes the time at which the first of them may get a
// trial. If no rank that takes requests would be left, updateSpared spares none.
func (b *board) updateSpared(now time.Time) {
	b.retrySparedAt = time.Time{}
	if b.refusingRanks == 0 && b.pairs.Suspects() == 0 && !b.anySpared {
		return
	}
	anyTakes := false
	b.anySpared = false
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			losesHandoffs := !b.pairs.AllowsEngine(r.Engine, now)
			r.spared = losesHandoffs || !r.refusals.Allows(now)
			b.anySpared = b.anySpared || r.spared
			if losesHandoffs {
				b.retrySparedAt = earlier(b.retrySparedAt, now.Add(circuit.FirstOut))
			}
			anyTakes = anyTakes || r.takesRequests() && r.usableSlots() > 0 // a rank that is spared now does not take requests
			if at := r.refusals.TrialAt(); at.After(now) {
				b.retrySparedAt = earlier(b.retrySparedAt, at)
			}
		}
	}
	b.retrySparedAt = earlier(b.retrySparedAt, b.pairs.NextTrial(now))
	if anyTakes {
		return // at least one rank takes requests, so the others may be spared
	}
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			r.spared = false
		}
	}
}

// beginTrialIfDue records that a rank gets a request. If the rank is due for a trial, this request is the trial, and the rank gets no other
// request until the trial is answered. Perhaps no rank is left then that takes requests, so updateSpared must run once more: retrySparedAt
// makes the next Tick due now.
func (b *board) beginTrialIfDue(r *rank, id uint64, now time.Time) {
	if r.onTrial(now) {
		r.refusals.Send(id, now)
		b.retrySparedAt = now
	}
}

// takesRequests says whether the rank takes requests: it is up, and it is not spared.
func (r *rank) takesRequests() bool { return r.Up && !r.spared }

// onTrial says whether a spared rank may get one request as a trial, which shows whether its engine still refuses requests.
func (r *rank) onTrial(now time.Time) bool { return !r.refusals.InService() && r.refusals.Allows(now) }

package board

import (
	"time"

	"evenkeel/engine/circuit"
)

// Spared ranks. A rank whose engine refuses requests (429 or 503) stays empty, and policies prefer
// empty ranks, so it would get every next request. Therefore a rank that has refused several in a
// row is spared: for one second it gets no request, if another rank takes requests. Then one
// request is its trial. If it refuses this, too, the time doubles, up to 30 s. The first event of a
// request that it got after it was spared ends the sparing. If all ranks would be spared, none is,
// because all requests would then fail for certain.

func (b *board) updateRefusals(s *slotRecord, refused bool, now time.Time) {
	r := s.rank
	switch {
	case refused:
		if nowSpared := r.refusals.Fail(s.id, now); nowSpared {
			b.decideNow = true
			b.emit(Effect{Kind: EffectSpared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}, Duration: r.refusals.OutageLength()})
		}
		b.updateFirstEventWatch() // a first event ends the row of refusals
	case s.started: // an engine that begins a request has not refused it
		b.recordAccepted(s)
	default:
		r.refusals.Neutral(s.id)
	}
}

// recordAccepted ends a row of refusals. A request that the rank got before it was spared proves
// nothing.
func (b *board) recordAccepted(s *slotRecord) {
	r := s.rank
	inService := r.refusals.InService()
	if inService && r.refusals.Failures() == 0 {
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
	b.updateFirstEventWatch()
}

// updateFirstEventWatch: while the emitted sum is above 0, each stream must report its first event.
func (b *board) updateFirstEventWatch() {
	b.refusingRanks = 0
	for _, r := range b.ranks {
		if !r.refusals.InService() || r.refusals.Failures() > 0 {
			b.refusingRanks++
		}
	}
	b.emit(Effect{Kind: EffectWatchFirstEvents, Group: GroupKey{Model: b.model}, Count: b.pairs.Suspects() + b.refusingRanks})
}

// updateSpared sets which ranks get no requests from now on, because their engines refuse them or
// lose hand-offs (pairs.go).
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
			anyTakes = anyTakes || r.takesRequests() && r.usableSlots() > 0 // takesRequests reads r.spared
			if at := r.refusals.TrialAt(); at.After(now) {
				b.retrySparedAt = earlier(b.retrySparedAt, at)
			}
		}
	}
	b.retrySparedAt = earlier(b.retrySparedAt, b.pairs.NextTrial(now))
	if anyTakes {
		return
	}
	for _, g := range b.groups {
		for _, r := range g.steppingRanks {
			r.spared = false
		}
	}
}

// beginTrialIfDue: until a trial is answered, the rank gets no other request. Perhaps no rank is
// left that takes any, so updateSpared must run once more: retrySparedAt makes the next Tick due
// now.
func (b *board) beginTrialIfDue(r *rank, id uint64, now time.Time) {
	if r.onTrial(now) {
		r.refusals.Send(id, now)
		b.retrySparedAt = now
	}
}

func (r *rank) takesRequests() bool { return r.Up && !r.spared }

func (r *rank) onTrial(now time.Time) bool { return !r.refusals.InService() && r.refusals.Allows(now) }

package board

import "time"

// Spared ranks. A rank whose engine refuses requests (429 or 503) stays empty, and policies prefer empty ranks. Without a remedy, such a
// rank would get and refuse every next request. So a rank that has refused several requests in a row is spared: it gets none for one
// second, if another rank takes requests. Then one request is its trial. If the trial is refused, too, the time doubles, up to 30 s.
// The first event of a request that the rank got after it was spared brings it back into service. If all ranks would be spared, none
// is, because the requests would then fail for certain.

// updateRefusals records for the rank of a request that has ended whether its engine refused the request or had begun it. If neither is
// true, the end says nothing about the rank.
func (b *board) updateRefusals(s *slotRecord, refused bool, now time.Time) {
	r := s.rank
	switch {
	case refused:
		if r.refusals.Fail(s.id, now) {
			b.changed = true
			b.emit(Effect{Kind: EffectSpared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}, Duration: r.refusals.Out()})
		}
		b.watch()
	case s.started:
		b.accepted(s)
	default:
		r.refusals.Neutral(s.id)
	}
}

// accepted records that the engine of a rank took a request, which ends a row of refusals. If the rank is spared, a request that it got
// before it was spared proves nothing.
func (b *board) accepted(s *slotRecord) {
	r := s.rank
	inService := r.refusals.In()
	if inService && r.refusals.Failures() == 0 {
		return
	}
	if sparedSince := r.refusals.Until().Add(-r.refusals.Out()); !inService && s.since.Before(sparedSince) {
		return
	}
	if !inService {
		b.changed = true
		b.emit(Effect{Kind: EffectUnspared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}})
	}
	r.refusals.Succeed()
	r.spared = false
	b.watch()
}

// watch counts the ranks whose last requests were refused. While there is such a rank, or a suspected pair, its effect makes every stream
// report its first event to the board.
func (b *board) watch() {
	b.refusing = 0
	for _, r := range b.ranks {
		if !r.refusals.In() || r.refusals.Failures() > 0 {
			b.refusing++
		}
	}
	b.emit(Effect{Kind: EffectWatchFirstEvents, Group: GroupKey{Model: b.model}, Count: len(b.pairs.links) + b.refusing})
}

// spare sets which ranks get no requests from now on (rank.spared), and the time at which the first of them may be tried (wakeSpared). If
// no other rank would be left that takes requests, it spares none.
func (b *board) spare(now time.Time) {
	b.wakeSpared = time.Time{}
	if b.refusing == 0 {
		return
	}
	anyTakes := false
	for _, g := range b.groups {
		for _, r := range g.ranks {
			r.spared = !r.refusals.Allows(now)
			anyTakes = anyTakes || r.takes() && r.usable() > 0
			if at := r.refusals.Until(); at.After(now) && (b.wakeSpared.IsZero() || at.Before(b.wakeSpared)) {
				b.wakeSpared = at
			}
		}
	}
	if anyTakes {
		return
	}
	for _, g := range b.groups {
		for _, r := range g.ranks {
			r.spared = false
		}
	}
}

// send records that a rank gets a request. If the rank is on trial, this request is its trial, and the rank gets no other until the trial
// is answered. Because no other rank may be left that takes requests, spare must run once more: wakeSpared makes the next Tick due now.
func (b *board) send(r *rank, id uint64, now time.Time) {
	if r.onTrial(now) {
		r.refusals.Send(id, now)
		b.wakeSpared = now
	}
}

// takes says whether the rank takes requests: it is up, and not spared.
func (r *rank) takes() bool { return r.Up && !r.spared }

// onTrial says whether a rank that was spared may get one request, which shows whether the rank still refuses requests.
func (r *rank) onTrial(now time.Time) bool { return !r.refusals.In() && r.refusals.Allows(now) }

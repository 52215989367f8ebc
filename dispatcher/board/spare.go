package board

import "time"

// A rank whose engine refuses its requests (429 or 503) stays empty, and an empty rank is the first choice for the next request.
// So a rank that has refused several requests in a row is spared: while another rank takes requests, it gets none for one second.
// Then one request tries the rank. If it is refused, too, the time doubles, up to 30 s. The first event of a request that the rank
// got since it was spared ends this. If all ranks would be spared, no rank is: a request that may fail is better than one that must.

// updateRefusals takes in what became of a request that gives its slot back: it was refused, it had begun, or neither, which says
// nothing of the rank.
func (b *board) updateRefusals(c *charge, refused bool, now time.Time) {
	r := c.rank
	switch {
	case refused:
		if r.refusals.Fail(c.id, now) {
			b.changed = true
			b.emit(Effect{Kind: EffectSpared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}, Lasts: r.refusals.Out()})
		}
		b.watch()
	case c.started:
		b.accepted(c)
	default:
		r.refusals.Neutral(c.id)
	}
}

// accepted records that the engine of a rank took a request, which ends a row of refusals. For a spared rank, a request that it got
// before it was spared proves nothing.
func (b *board) accepted(c *charge) {
	r := c.rank
	switch inService := r.refusals.In(); {
	case inService && r.refusals.Failures() == 0, !inService && c.since.Before(r.refusals.Until().Add(-r.refusals.Out())):
		return
	case !inService:
		b.changed = true
		b.emit(Effect{Kind: EffectUnspared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}})
	}
	r.refusals.Succeed()
	r.spared = false
	b.watch()
}

// watch counts the ranks whose last requests were refused. Its effect makes streams report first events while there is such a rank, or
// a suspected pair.
func (b *board) watch() {
	b.refusing = 0
	for _, r := range b.ranks {
		if !r.refusals.In() || r.refusals.Failures() > 0 {
			b.refusing++
		}
	}
	b.emit(Effect{Kind: EffectWatch, Group: GroupKey{Model: b.model}, Count: len(b.pairs.suspects) + b.refusing})
}

// spare sets which ranks get no requests from now on (spared), and wakeSpared, when the first of them may be tried. If no other rank is
// left that takes requests, no rank is spared.
func (b *board) spare(now time.Time) {
	b.wakeSpared = time.Time{}
	if b.refusing == 0 {
		return
	}
	others := false
	for _, g := range b.groups {
		for _, r := range g.ranks {
			r.spared = !r.refusals.Allows(now)
			others = others || r.takes() && r.usable() > 0
			if at := r.refusals.Until(); at.After(now) && (b.wakeSpared.IsZero() || at.Before(b.wakeSpared)) {
				b.wakeSpared = at
			}
		}
	}
	if others {
		return
	}
	for _, g := range b.groups {
		for _, r := range g.ranks {
			r.spared = false
		}
	}
}

// send records that a rank gets a request. If the rank was spared, this request tries it, and the rank is spared until the request is
// answered. Then all ranks may be spared, so the board looks at the pool once more.
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

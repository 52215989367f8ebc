package board

import "time"

// A rank whose engine refuses what it gets (429 or 503) has nothing to do, and an empty rank is the first choice for each next request.
// So a rank that has refused several requests in a row is spared: it gets none while another rank takes any, for a second, and for
// twice as long each time the one request that then tries it is refused, too, 30 s at most. The first event of a request that it got
// since then ends this. If all ranks are spared, none is: a request that may fail is better than one that must.

// tried takes in how a request fared whose slot is given back: refused, or begun.
func (b *board) tried(c *charge, refused bool, now time.Time) {
	r := c.rank
	switch {
	case refused:
		if r.refusals.Fail(c.id, now) {
			b.changed = true
			b.emit(Effect{Kind: EffectSpared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}, Lasts: r.refusals.Out()})
		}
		b.watch()
	case c.started:
		b.took(c)
	default:
		r.refusals.Neutral(c.id)
	}
}

// took notes that the engine of a rank took a request. One that it got before it was spared says nothing.
func (b *board) took(c *charge) {
	r := c.rank
	switch in := r.refusals.In(); {
	case in && r.refusals.Failures() == 0, !in && c.since.Before(r.refusals.Until().Add(-r.refusals.Out())):
		return
	case !in:
		b.changed = true
		b.emit(Effect{Kind: EffectUnspared, Group: GroupKey{Model: b.model}, Names: [2]string{r.Name}})
	}
	r.refusals.Succeed()
	r.spared = false
	b.watch()
}

// watch counts the ranks that have refused something, and has streams tell of first events while there is one, or a pair is suspected.
func (b *board) watch() {
	b.refusing = 0
	for _, r := range b.ranks {
		if !r.refusals.In() || r.refusals.Failures() > 0 {
			b.refusing++
		}
	}
	b.emit(Effect{Kind: EffectWatch, Group: GroupKey{Model: b.model}, Count: len(b.pairs.suspects) + b.refusing})
}

// spare notes which ranks get nothing from now on, and when the first of them may be tried.
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

// send tells of a request that a rank gets. If the rank was spared, this request tries it. Then it may be that all ranks are spared, so
// the board looks once more for those that wait.
func (b *board) send(r *rank, id uint64, now time.Time) {
	if r.onTrial(now) {
		r.refusals.Send(id, now)
		b.wakeSpared = now
	}
}

// takes says whether the rank takes requests: it is up, and not spared.
func (r *rank) takes() bool { return r.Up && !r.spared }

// onTrial says whether the rank may have one request, which tells whether it refuses them still.
func (r *rank) onTrial(now time.Time) bool { return !r.refusals.In() && r.refusals.Allows(now) }

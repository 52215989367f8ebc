package dispatcher

import (
	"time"
)

// holdCheck is how long after a tick held entries are looked at again where
// nobody tells how long a step takes.
const holdCheck = 50 * time.Millisecond

// watchHeld has a tick once a step while a policy holds entries back (algorithm
// 6.3). The pulse tells of steps; a timer a little longer than one stands in
// where it does not.
func (b *board) watchHeld(now time.Time) {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.held = 0
		}
		if g.held == 0 {
			continue
		}
		wait := holdCheck
		if s := b.step(g); s > 0 {
			wait = s + s/2
		}
		if at := now.Add(wait); b.heldUntil.IsZero() || at.Before(b.heldUntil) {
			b.heldUntil = at
		}
	}
}

// step is how long one of the group takes, 0 where nobody knows.
func (b *board) step(g *group) time.Duration {
	m, _, _ := g.steps.model()
	return time.Duration(g.steps.stepMs(m, g.most) * float32(time.Millisecond))
}

// hear takes in the steps of a group that its streams told of.
func (b *board) hear(g *group, told []step) {
	if len(told) == 0 {
		return
	}
	b.refreshGroup(g)
	last := len(told) - 1
	for i, s := range told {
		load := g.most
		if i < last {
			load = 0 // it is the past's, and nobody looked then
		}
		g.steps.add(s.length, load)
	}
	b.emit(effect{kind: effectLeastStep, group: g, lasts: max(leastStep, time.Duration(tooShort*float64(g.steps.typical)))})
	b.stepped = b.stepped || g.held > 0
}

// rest ends the step under way when nothing of the group runs any more.
func (b *board) rest(g *group) {
	if !g.barrier {
		return
	}
	for _, r := range g.ranks {
		if len(r.slots) > 0 {
			return
		}
	}
	b.emit(effect{kind: effectRest, group: g})
	g.steps.load = 0
}

// cost is what the rank holds as its group's barrier feels it: KV tokens, more
// on a rank that is slower than the others.
func (r *rank) cost() int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return r.kv
	}
	return int64(float64(r.kv) * float64(r.Cost))
}

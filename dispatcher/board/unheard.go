package board

import (
	"math"
	"time"
)

// Unheard answers. An engine may tell nothing of an answer before its end, because the answer comes in one piece or the engine
// holds the text back. The board lets the KV of such an answer grow by the pace of the streams of its group, until the engine's
// own count settles it. The pace is what a request gets in a second on average, so that it holds for steps that bring several
// tokens and for groups without a barrier, too.

const (
	// paceEvery is the least time between two looks at the streams of a group: some steps, so that a look costs little.
	paceEvery = 100 * time.Millisecond
	// paceMemory is how long a look counts: after it, it weighs a third.
	paceMemory = 10 * time.Second
)

// tempo is how fast the streams of a group come on.
type tempo struct {
	at      time.Time // of the last look
	tokens  float64   // that streams got, of which older ones count less
	seconds float64   // that they ran for, likewise, added up
}

// perSecond is how many tokens a request gets in a second; 0: nothing is known of that.
func (t *tempo) perSecond() float64 {
	if t.seconds == 0 {
		return 0
	}
	return t.tokens / t.seconds
}

// learn takes in what so many streams got together between two looks.
func (t *tempo) learn(streams int, tokens int64, between time.Duration) {
	if streams == 0 {
		return
	}
	old := math.Exp(-between.Seconds() / paceMemory.Seconds())
	t.tokens = t.tokens*old + float64(tokens)
	t.seconds = t.seconds*old + float64(streams)*between.Seconds()
}

// unheard is an answer of which nothing is told before its end.
type unheard struct {
	most   int32   // tokens that it may have; 0: its tokens are told
	tokens float64 // that it is thought to have by now
	first  uint32  // number of the group's step in which it got the first of them; 0: it has none
	seen   int32   // of an answer that is heard, its tokens at the last look
}

// listen looks at the streams of each group, and lets what is not heard grow as they did.
func (b *board) listen(now time.Time) {
	for _, g := range b.groups {
		between := now.Sub(g.tempo.at)
		if between < paceEvery {
			continue
		}
		if g.tempo.at.IsZero() {
			between = 0
		}
		g.tempo.at = now
		streams, tokens, silent := 0, int64(0), 0
		for _, r := range g.ranks {
			for _, slot := range r.slots {
				c := &b.ledger.table[slot]
				if c.unheard.most = b.counts.unheard(slot); c.unheard.most > 0 {
					silent++
					continue
				}
				n := b.counts.generated(slot)
				if c.unheard.seen > 0 { // else it began after the last look
					streams++
					tokens += int64(n - c.unheard.seen)
				}
				c.unheard.seen = n
			}
		}
		g.tempo.learn(streams, tokens, between)
		if silent > 0 {
			b.grow(g, between, now, g.barrier && streams > 0)
		}
	}
}

// grow gives each unheard answer of a group what it may have got since the last look. One whose prompt the rank computes has none
// before that is done: a step takes as much of a prompt as the rank's budget. Where steps are told, they take it off.
func (b *board) grow(g *group, between time.Duration, now time.Time, told bool) {
	perSecond := g.tempo.perSecond()
	for _, r := range g.ranks {
		budget := int64(perSecond * between.Seconds() * float64(r.StepBudget()))
		for _, slot := range r.slots {
			c := &b.ledger.table[slot]
			if c.unheard.most == 0 || c.waits {
				continue
			}
			if c.left > 0 && !told {
				n := min(budget, int64(c.left))
				c.left, r.backlog, budget = c.left-int32(n), r.backlog-n, budget-n
			}
			if c.left > 0 {
				continue
			}
			if c.unheard.first == 0 {
				c.unheard.first, c.unheard.tokens = g.last.Number+1, 1
			}
			run := min(between, now.Sub(c.since)) // it may have come after the last look
			c.unheard.tokens = min(c.unheard.tokens+perSecond*run.Seconds(), float64(c.unheard.most))
		}
	}
}

// generated is how many tokens a slot has got, as far as that is told or thought.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if c := &b.ledger.table[slot]; c.unheard.most > 0 {
		n = max(n, int32(c.unheard.tokens))
	}
	return n
}

// settleUnheard says how many tokens an answer was thought to have, once its engine has counted them. An answer in a group
// without streams teaches how fast that group is.
func (b *board) settleUnheard(c *charge, o Outcome, generated int32, now time.Time) {
	if c.unheard.most == 0 || o.Kind != Finished || generated <= 0 {
		return
	}
	b.emit(Effect{Kind: EffectThought, Thought: max(1, c.unheard.tokens), Count: int(generated)})
	if g := c.rank.group; g != nil && g.tempo.seconds == 0 {
		g.tempo.learn(1, int64(generated), now.Sub(c.since))
	}
}

package board

import (
	"math"
	"time"
)

// Unheard answers. An engine may report nothing of an answer before its end, because the answer comes in one piece or the engine
// holds the text back. The board estimates that the KV of such an answer grows as fast as that of the other streams of the group,
// until the engine's own count comes at the end. The pace is the mean number of tokens that a request gets in a second. So it is also
// right for steps that bring several tokens, and for groups without a barrier.

const (
	// paceEvery is the least time between two looks at the streams of a group. It is as long as several steps, so that looks cost little.
	paceEvery = 100 * time.Millisecond
	// paceMemory is how fast old looks fade: a look that is this old weighs about a third (1/e).
	paceMemory = 10 * time.Second
)

// tempo is how fast the streams of a group get tokens.
type tempo struct {
	at      time.Time // of the last look
	tokens  float64   // sum of the tokens that streams got, older tokens fading
	seconds float64   // sum of the seconds that all streams ran, fading likewise
}

// perSecond returns how many tokens a request gets in a second; 0: not known.
func (t *tempo) perSecond() float64 {
	if t.seconds == 0 {
		return 0
	}
	return t.tokens / t.seconds
}

// learn takes in how many tokens so many streams together got between two looks.
func (t *tempo) learn(streams int, tokens int64, between time.Duration) {
	if streams == 0 {
		return
	}
	fade := math.Exp(-between.Seconds() / paceMemory.Seconds())
	t.tokens = t.tokens*fade + float64(tokens)
	t.seconds = t.seconds*fade + float64(streams)*between.Seconds()
}

// unheard is the estimate for an answer whose engine reports nothing before its end.
type unheard struct {
	most       int32   // tokens that the answer may have; 0: its tokens are reported as they come
	tokens     float64 // estimate of the tokens that it has by now
	first      uint32  // number of the group's step in which it got the first token, by the estimate; 0: it has none yet
	atLastLook int32   // if its tokens are reported: how many there were at the last look
}

// listen looks at the streams of each group, and lets the estimates of unheard answers grow at their pace.
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
				if c.unheard.atLastLook > 0 { // else it had no token at the last look
					streams++
					tokens += int64(n - c.unheard.atLastLook)
				}
				c.unheard.atLastLook = n
			}
		}
		g.tempo.learn(streams, tokens, between)
		if silent > 0 {
			b.grow(g, between, now, g.barrier && streams > 0)
		}
	}
}

// grow adds to each unheard answer of a group the tokens that it may have got since the last look. An answer whose prompt a mixed rank
// still computes gets none, and each step takes at most the rank's budget off the prompt. If the group's steps are reported
// (stepsReported), compute does that, else grow does.
func (b *board) grow(g *group, between time.Duration, now time.Time, stepsReported bool) {
	perSecond := g.tempo.perSecond()
	for _, r := range g.ranks {
		budget := int64(perSecond * between.Seconds() * float64(r.StepBudget()))
		for _, slot := range r.slots {
			c := &b.ledger.table[slot]
			if c.unheard.most == 0 || c.waits {
				continue
			}
			if c.promptLeft > 0 && !stepsReported {
				n := min(budget, int64(c.promptLeft))
				c.promptLeft, r.backlog, budget = c.promptLeft-int32(n), r.backlog-n, budget-n
			}
			if c.promptLeft > 0 {
				continue
			}
			if c.unheard.first == 0 {
				c.unheard.first, c.unheard.tokens = g.last.Number+1, 1
			}
			ran := min(between, now.Sub(c.since)) // the request may have been bound after the last look
			c.unheard.tokens = min(c.unheard.tokens+perSecond*ran.Seconds(), float64(c.unheard.most))
		}
	}
}

// generated returns how many tokens a slot has got: the reported number or, for an unheard answer, the estimate if that is larger.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if c := &b.ledger.table[slot]; c.unheard.most > 0 {
		n = max(n, int32(c.unheard.tokens))
	}
	return n
}

// settleUnheard emits how many tokens an unheard answer had by the estimate, now that its engine has counted them. If the group has no
// streams to learn the pace from, the answer itself teaches it.
func (b *board) settleUnheard(c *charge, o Outcome, generated int32, now time.Time) {
	if c.unheard.most == 0 || o.Kind != Finished || generated <= 0 {
		return
	}
	b.emit(Effect{Kind: EffectThought, Thought: max(1, c.unheard.tokens), Count: int(generated)})
	if g := c.rank.group; g != nil && g.tempo.seconds == 0 {
		g.tempo.learn(1, int64(generated), now.Sub(c.since))
	}
}

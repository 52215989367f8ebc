package board

import (
	"math"
	"time"
)

// Unheard answers. An engine may report nothing of an answer before its end, because the answer comes in one piece or the engine holds the
// text back. Until the engine reports the number of tokens at the end, the board assumes that such an answer grows as fast as the other
// answers of the group: by the mean number of tokens that a request gets per second. This also suits engines that generate several tokens
// per step, and groups without a barrier.

const (
	// paceEvery is the least time between two looks at the streams of a group. It is as long as several steps, because each look costs
	// time.
	paceEvery = 100 * time.Millisecond
	// paceMemory is the age at which an old look counts for about a third (1/e) in the mean.
	paceMemory = 10 * time.Second
)

// tokenRate is how fast the streams of a group get tokens.
type tokenRate struct {
	at      time.Time // of the last look
	tokens  float64   // sum of the tokens that streams got; older tokens count for less
	seconds float64   // sum of the seconds that the streams ran; older seconds count for less
}

// perSecond returns how many tokens a request gets in a second; 0: not known.
func (r *tokenRate) perSecond() float64 {
	if r.seconds == 0 {
		return 0
	}
	return r.tokens / r.seconds
}

// learn adds the tokens that so many streams together got in the time between two looks.
func (r *tokenRate) learn(streams int, tokens int64, between time.Duration) {
	if streams == 0 {
		return
	}
	fade := math.Exp(-between.Seconds() / paceMemory.Seconds())
	r.tokens = r.tokens*fade + float64(tokens)
	r.seconds = r.seconds*fade + float64(streams)*between.Seconds()
}

// estimated is the estimate for an answer whose engine reports nothing before its end.
type estimated struct {
	most       int32   // upper bound of the answer's tokens; 0: its tokens are reported as they come
	tokens     float64 // estimate of the tokens that it has by now
	first      uint32  // number of the group's step in which it got its first token, by the estimate; 0: it has none yet
	atLastLook int32   // for an answer whose tokens are reported as they come: the tokens that it had at the last look
}

// listen measures how fast the streams of each group grow, and lets the estimates of its unheard answers grow as fast.
func (b *board) listen(now time.Time) {
	for _, g := range b.groups {
		between := now.Sub(g.rate.at)
		if between < paceEvery {
			continue
		}
		if firstLook := g.rate.at.IsZero(); firstLook {
			between = 0 // there is no look before to measure from
		}
		g.rate.at = now
		streams, tokens, silent := b.lookAt(g)
		g.rate.learn(streams, tokens, between)
		if silent > 0 {
			stepsReported := g.barrier && streams > 0
			b.grow(g, between, now, stepsReported)
		}
	}
}

// lookAt counts the streams of a group that had a token at the last look, the tokens that they got since, and the unheard (silent) answers.
// For each slot, it notes what the next look and grow need.
func (b *board) lookAt(g *group) (streams int, tokens int64, silent int) {
	for _, r := range g.ranks {
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			s.estimated.most = b.counts.unheard(slot)
			if s.estimated.most > 0 {
				silent++
				continue
			}
			n := b.counts.generated(slot)
			if s.estimated.atLastLook > 0 {
				streams++
				tokens += int64(n - s.estimated.atLastLook)
			}
			s.estimated.atLastLook = n
		}
	}
	return streams, tokens, silent
}

// grow adds to each unheard answer of a group the tokens that it may have got since the last look. While a mixed rank still computes the
// prompt of an answer, the answer gets none. If the group's steps are reported (stepsReported), the method compute estimates how much of
// the prompt is computed. Otherwise grow does, with the rank's token budget for each step.
func (b *board) grow(g *group, between time.Duration, now time.Time, stepsReported bool) {
	perSecond := g.rate.perSecond() // tokens of one request, and about as many steps, because a step brings about one token per request
	for _, r := range g.ranks {
		budget := int64(perSecond * between.Seconds() * float64(r.StepBudget())) // of prompt tokens
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			if heard := s.estimated.most == 0; heard || s.waits {
				continue
			}
			if s.promptLeft > 0 && !stepsReported {
				n := min(budget, int64(s.promptLeft))
				s.promptLeft -= int32(n)
				r.backlog -= n
				budget -= n
			}
			if s.promptLeft > 0 {
				continue
			}
			if s.estimated.first == 0 {
				s.estimated.first, s.estimated.tokens = g.last.Number+1, 1
			}
			ran := min(between, now.Sub(s.since)) // the request may have been bound after the last look
			s.estimated.tokens = min(s.estimated.tokens+perSecond*ran.Seconds(), float64(s.estimated.most))
		}
	}
}

// generated returns how many tokens the answer of a slot has: the reported number or, for an unheard answer, the estimate if it is larger.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if s := &b.slots.records[slot]; s.estimated.most > 0 {
		n = max(n, int32(s.estimated.tokens))
	}
	return n
}

// settleUnheard emits the estimate for an unheard answer, together with the number of tokens that its engine reported at the end. If the
// group has no streams from which the pace can be learned, it learns the pace from this answer.
func (b *board) settleUnheard(s *slotRecord, o Outcome, generated int32, now time.Time) {
	heard := s.estimated.most == 0
	if heard || o.Kind != Finished || generated <= 0 { // an answer that was cut off, or without tokens, has no number to compare with
		return
	}
	b.emit(Effect{Kind: EffectEstimate, EstimatedTokens: max(1, s.estimated.tokens), Count: int(generated)})
	if g := s.rank.group; g != nil && g.rate.seconds == 0 {
		g.rate.learn(1, int64(generated), now.Sub(s.since))
	}
}

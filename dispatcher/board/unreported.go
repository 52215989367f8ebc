package board

import (
	"math"
	"time"
)

// Unreported answers. An engine may report nothing of an answer before its end, because the answer comes in one piece or the engine holds
// the text back. Until the engine reports the number of tokens at the end, the board assumes that such an answer grows as fast as the other
// answers of the group: by the mean number of tokens that a request gets per second. This also suits engines that generate several tokens
// per step, and groups without a barrier.

const (
	// measureEvery is the least time between two measurements of the streams of a group. It is as long as several steps, because each
	// measurement costs time.
	measureEvery = 100 * time.Millisecond
	// rateMemory is the age at which an old measurement counts for about a third (1/e) in the mean.
	rateMemory = 10 * time.Second
)

// tokenRate is how fast the streams of a group get tokens.
type tokenRate struct {
	measuredAt time.Time // time of the last measurement; zero: there was none
	tokens     float64   // sum of the tokens that streams got; older tokens count for less
	seconds    float64   // sum of the seconds that the streams ran; older seconds count for less
}

// perSecond returns how many tokens a request gets in a second; 0: not known.
func (r *tokenRate) perSecond() float64 {
	if r.seconds == 0 {
		return 0
	}
	return r.tokens / r.seconds
}

// add adds the tokens that so many streams together got in the given time.
func (r *tokenRate) add(streams int, tokens int64, in time.Duration) {
	if streams == 0 { // the old rate stays, and does not fade, while no stream runs
		return
	}
	fade := math.Exp(-in.Seconds() / rateMemory.Seconds())
	r.tokens = r.tokens*fade + float64(tokens)
	r.seconds = r.seconds*fade + float64(streams)*in.Seconds()
}

// estimate is the estimate for an answer whose engine reports nothing before its end.
type estimate struct {
	maxTokens      int32   // upper bound of the answer's tokens; 0: its tokens are reported as they come
	tokens         float64 // estimate of the tokens that it has by now
	firstStep      uint32  // number of the group's step in which it got its first token, by the estimate; 0: it has none yet
	tokensMeasured int32   // for an answer whose tokens are reported as they come: the tokens that it had at the last measurement
}

// unreported says whether the engine reports the tokens of the answer only at its end.
func (s *slotRecord) unreported() bool { return s.estimate.maxTokens > 0 }

// measureTokenRate measures how fast the streams of each group get tokens, and lets the estimates of its unreported answers grow as fast.
func (b *board) measureTokenRate(now time.Time) {
	for _, g := range b.groups {
		between := now.Sub(g.tokenRate.measuredAt)
		if between < measureEvery {
			continue
		}
		if first := g.tokenRate.measuredAt.IsZero(); first {
			between = 0 // there is no earlier measurement from which tokens could be counted
		}
		g.tokenRate.measuredAt = now
		streams, tokens, unreported := b.countStreamTokens(g)
		g.tokenRate.add(streams, tokens, between)
		if unreported > 0 {
			stepsReported := g.barrier && streams > 0
			b.growEstimates(g, between, now, stepsReported)
		}
	}
}

// countStreamTokens counts the streams of a group that had a token at the last measurement, the tokens that they got since, and the
// unreported answers. For each slot, it notes what the next measurement and growEstimates need.
func (b *board) countStreamTokens(g *group) (streams int, tokens int64, unreported int) {
	for _, r := range g.steppingRanks {
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			s.estimate.maxTokens = b.counts.maxUnreported(slot)
			if s.unreported() {
				unreported++
				continue
			}
			n := b.counts.generated(slot)
			if s.estimate.tokensMeasured > 0 {
				streams++
				tokens += int64(n - s.estimate.tokensMeasured)
			}
			s.estimate.tokensMeasured = n
		}
	}
	return streams, tokens, unreported
}

// growEstimates adds to each unreported answer of a group the tokens that it may have got since the last measurement (between). While a
// mixed rank still computes the prompt of an answer, the answer gets none. How much of the prompt is computed is estimated here, by the
// rank's token budget for each step, unless the steps of the group are reported (stepsReported): then estimatePromptProgress does it.
func (b *board) growEstimates(g *group, between time.Duration, now time.Time, stepsReported bool) {
	perSecond := g.tokenRate.perSecond() // tokens of one request, and about as many steps, because a step brings about one token per request
	for _, r := range g.steppingRanks {
		budget := int64(perSecond * between.Seconds() * float64(r.StepBudget())) // of prompt tokens
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			if !s.unreported() || s.inEngineQueue {
				continue
			}
			if !stepsReported {
				budget -= r.computePrompt(s, budget)
			}
			if s.promptLeft > 0 {
				continue
			}
			if s.estimate.firstStep == 0 { // its prompt is complete, so it gets its first token now
				s.estimate.firstStep, s.estimate.tokens = g.lastStep.Number+1, 1
			}
			ran := min(between, now.Sub(s.boundAt)) // the request may have been bound after the last measurement
			s.estimate.tokens = min(s.estimate.tokens+perSecond*ran.Seconds(), float64(s.estimate.maxTokens))
		}
	}
}

// generated returns how many tokens the answer of a slot has: the reported number or, for an unreported answer, the estimate if it is
// larger.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if s := &b.slots.records[slot]; s.unreported() {
		n = max(n, int32(s.estimate.tokens))
	}
	return n
}

// emitEstimate emits the estimate for an unreported answer that has ended, together with the number of tokens that its engine reported. If
// the group has no streams from which the token rate can be measured, the answer counts as a stream.
func (b *board) emitEstimate(s *slotRecord, o Outcome, generated int32, now time.Time) {
	if !s.unreported() || o.Kind != Finished || generated <= 0 {
		return // an answer that was cut off, or without tokens, has no number to compare with
	}
	b.emit(Effect{Kind: EffectEstimate, EstimatedTokens: max(1, s.estimate.tokens), Count: int(generated)})
	if g := s.rank.group; g != nil && g.tokenRate.seconds == 0 {
		g.tokenRate.add(1, int64(generated), now.Sub(s.boundAt))
	}
}

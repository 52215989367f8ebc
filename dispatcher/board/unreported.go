package board

import (
	"math"
	"time"
)

// Unreported answers. An engine may report nothing about an answer before its end, because the answer comes in one piece or the engine
// holds the text back. Only at the end does it report the number of tokens. Until then, the board assumes that such an answer grows as fast
// as the other answers of the group: by the mean number of tokens that a request gets per second. This also suits engines that generate
// several tokens per step, and groups without a barrier.

const (
	// measureEvery is the shortest time between two measurements of the streams of a group. It is as long as several steps, because
	// each measurement takes time.
	measureEvery = 100 * time.Millisecond
	// rateMemory is the age at which a measurement counts for only about a third (1/e) in the mean.
	rateMemory = 10 * time.Second
)

// tokenRate is the mean number of tokens per second that a stream of the group gets.
type tokenRate struct {
	measuredAt time.Time // time of the last measurement; zero: there was none
	tokens     float64   // sum of the tokens that streams got; older tokens count for less
	seconds    float64   // sum of the seconds that the streams ran; older seconds count for less
}

// perSecond returns how many tokens one request gets per second; 0: not known.
func (r *tokenRate) perSecond() float64 {
	if r.seconds == 0 {
		return 0
	}
	return r.tokens / r.seconds
}

// add adds a measurement: the number of tokens that this many streams together got in the elapsed time. Older measurements lose weight with
// this time.
func (r *tokenRate) add(streams int, tokens int64, elapsed time.Duration) {
	if streams == 0 { // without streams, the old measurements keep their weight
		return
	}
	fade := math.Exp(-elapsed.Seconds() / rateMemory.Seconds())
	r.tokens = r.tokens*fade + float64(tokens)
	r.seconds = r.seconds*fade + float64(streams)*elapsed.Seconds()
}

// estimate has what the board assumes about an answer whose engine reports nothing before its end.
type estimate struct {
	maxTokens int32   // largest possible number of tokens of the answer; 0: its tokens are reported as they come
	tokens    float64 // number of tokens that the answer has by now
	// firstStep is the number of the group's step that brought the first token of the answer; 0: it has no token yet.
	firstStep uint32
	// tokensMeasured is the number of tokens at the last measurement, for an answer whose tokens are reported as they come.
	tokensMeasured int32
}

// unreported says whether the engine reports the tokens of the answer only at its end.
func (s *slotRecord) unreported() bool { return s.estimate.maxTokens > 0 }

// measureTokenRate measures how fast the streams of each group get tokens. Engines report the tokens of an unreported answer only at its
// end, so the board estimates them: measureTokenRate lets these estimates grow as fast as the streams.
func (b *board) measureTokenRate(now time.Time) {
	for _, g := range b.groups {
		elapsed := now.Sub(g.tokenRate.measuredAt)
		if elapsed < measureEvery {
			continue // the last measurement is still recent
		}
		if first := g.tokenRate.measuredAt.IsZero(); first { // the time since the last measurement is not known
			elapsed = 0
		}
		g.tokenRate.measuredAt = now
		streams, tokens, unreported := b.countStreamTokens(g)
		g.tokenRate.add(streams, tokens, elapsed)
		if unreported > 0 {
			// In a barrier group with streams, recordSteps estimates at each reported step how much of the prompts is computed.
			estimatePrompts := !g.barrier || streams == 0
			b.growEstimates(g, elapsed, now, estimatePrompts)
		}
	}
}

// countStreamTokens counts the streams of a group that had a token at the last measurement, and the tokens that these streams got since
// then. It also counts the unreported answers: those whose engines report the tokens only at the end. It stores in each slot's record what
// the next measurement and growEstimates need.
func (b *board) countStreamTokens(g *group) (streams int, tokens int64, unreported int) {
	for _, r := range g.steppingRanks {
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			s.estimate.maxTokens = b.counts.maxUnreported(slot) // 0: the answer is not an unreported one
			if s.unreported() {
				unreported++
				continue
			}
			n := b.counts.generated(slot)
			if s.estimate.tokensMeasured > 0 { // otherwise it is not known for which part of the time the stream ran
				streams++
				tokens += int64(n - s.estimate.tokensMeasured)
			}
			s.estimate.tokensMeasured = n
		}
	}
	return streams, tokens, unreported
}

// growEstimates adds to each unreported answer of a group the tokens that it has probably got in the time elapsed since the last
// measurement. An answer gets none while it waits in the engine's queue, or while a mixed rank still computes its prompt. If
// estimatePrompts is true, growEstimates first estimates how much of the prompts is computed, by the rank's token budget for each step.
func (b *board) growEstimates(g *group, elapsed time.Duration, now time.Time, estimatePrompts bool) {
	tokensPerSecond := g.tokenRate.perSecond() // tokens of one request
	stepsPerSecond := tokensPerSecond          // a step brings about one token per request
	for _, r := range g.steppingRanks {
		// Number of prompt tokens that the rank can have computed in this time.
		budget := int64(stepsPerSecond * elapsed.Seconds() * float64(r.StepBudget()))
		for _, slot := range r.slots {
			s := &b.slots.records[slot]
			if !s.unreported() || s.inEngineQueue {
				continue
			}
			if estimatePrompts {
				budget -= r.computePrompt(s, budget)
			}
			if s.promptLeft > 0 {
				continue // the prompt is not complete
			}
			// The request may have been bound after the last measurement. The time in which its prompt was computed is not left
			// out: it is not known, and it is a part of one measurement only.
			ran := min(elapsed, now.Sub(s.boundAt))
			s.estimate.addTokens(tokensPerSecond*ran.Seconds(), g.lastStep.Number+1)
		}
	}
}

// addTokens adds tokens to the estimate of an answer whose prompt is computed, up to the largest possible number. nextStep is the number of
// the step after the last reported one. An answer without tokens first gets one, in this step, because earlier steps computed its prompt.
func (e *estimate) addTokens(tokens float64, nextStep uint32) {
	if e.firstStep == 0 {
		e.firstStep, e.tokens = nextStep, 1
	}
	e.tokens = min(e.tokens+tokens, float64(e.maxTokens))
}

// generated returns how many tokens the answer of a slot has: the reported number or, for an unreported answer, the estimate if that is
// larger.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if s := &b.slots.records[slot]; s.unreported() {
		n = max(n, int32(s.estimate.tokens))
	}
	return n
}

// emitEstimate emits the last estimate for an unreported answer that has ended. The engine reports the number of its tokens only now, so
// the error of the estimate can be measured. If no stream of the group has shown how many tokens a request gets per second (tokenRate), the
// rate of this answer is taken instead: its tokens, divided by the time since it was bound.
func (b *board) emitEstimate(s *slotRecord, o Outcome, generated int32, now time.Time) {
	if !s.unreported() || o.Kind != Finished || generated <= 0 {
		return // no number to compare with: the answer was cut off, or has no tokens
	}
	estimated := max(1, s.estimate.tokens) // the answer has at least one token
	b.emit(Effect{Kind: EffectEstimate, EstimatedTokens: estimated, Count: int(generated)})
	if g := s.rank.group; g != nil && g.tokenRate.seconds == 0 {
		g.tokenRate.add(1, int64(generated), now.Sub(s.boundAt))
	}
}

package board

import (
	"math"
	"time"
)

// Unreported answers. An engine may report the tokens of an answer only at its end, because the
// answer comes in one piece or the engine holds the text back. Until then, the board assumes that
// it grows as fast as the other answers of the group, by tokens per second. This also suits engines
// with several tokens per step, and groups without a barrier.

const (
	// measureEvery is several steps long, because each measurement takes time.
	measureEvery = 100 * time.Millisecond
	// rateMemory is the age at which a measurement counts for about a third (1/e).
	rateMemory = 10 * time.Second
)

// tokenRate is the mean number of tokens per second of a stream.
type tokenRate struct {
	measuredAt time.Time // zero: no measurement yet
	tokens     float64   // of all streams; older ones count for less
	seconds    float64   // of all streams; older ones count for less
}

// perSecond is 0 if not known.
func (r *tokenRate) perSecond() float64 {
	if r.seconds == 0 {
		return 0
	}
	return r.tokens / r.seconds
}

// add adds the tokens that the streams together got in the elapsed time.
func (r *tokenRate) add(streams int, tokens int64, elapsed time.Duration) {
	if streams == 0 { // the old measurements keep their weight
		return
	}
	fade := math.Exp(-elapsed.Seconds() / rateMemory.Seconds())
	r.tokens = r.tokens*fade + float64(tokens)
	r.seconds = r.seconds*fade + float64(streams)*elapsed.Seconds()
}

// estimate is what the board assumes about an unreported answer.
type estimate struct {
	maxTokens int32 // bound of the answer; 0: reported as it comes
	tokens    float64
	// firstStep brought the first token; 0: none came.
	firstStep uint32
	// tokensMeasured is for a reported answer: its tokens at the last measurement.
	tokensMeasured int32
}

func (s *slotRecord) unreported() bool { return s.estimate.maxTokens > 0 }

func (b *board) measureTokenRate(now time.Time) {
	for _, g := range b.groups {
		elapsed := now.Sub(g.tokenRate.measuredAt)
		if elapsed < measureEvery {
			continue
		}
		if first := g.tokenRate.measuredAt.IsZero(); first { // the elapsed time is not known
			elapsed = 0
		}
		g.tokenRate.measuredAt = now
		streams, tokens, unreported := b.countStreamTokens(g)
		g.tokenRate.add(streams, tokens, elapsed)
		if unreported > 0 {
			// In a barrier group with streams, recordSteps estimates the prompts at each step.
			estimatePrompts := !g.barrier || streams == 0
			b.growEstimates(g, elapsed, now, estimatePrompts)
		}
	}
}

// countStreamTokens counts the streams that had a token at the last measurement, and their tokens
// since then. It also counts the unreported answers.
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
			if s.estimate.tokensMeasured > 0 { // otherwise it is not known how long the stream ran
				streams++
				tokens += int64(n - s.estimate.tokensMeasured)
			}
			s.estimate.tokensMeasured = n
		}
	}
	return streams, tokens, unreported
}

// growEstimates adds the tokens that each unreported answer has probably got in the elapsed time.
// It gets none in the engine's queue, or while a mixed rank computes its prompt. estimatePrompts:
// estimate first how much of the prompts is computed.
func (b *board) growEstimates(g *group, elapsed time.Duration, now time.Time, estimatePrompts bool) {
	tokensPerSecond := g.tokenRate.perSecond()
	stepsPerSecond := tokensPerSecond // a step brings about one token per request
	for _, r := range g.steppingRanks {
		// Prompt tokens that the rank can have computed.
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
				continue
			}
			// The request may have been bound after the last measurement. The time of its prompt is not left
			// out: it is not known, and part of one measurement only.
			ran := min(elapsed, now.Sub(s.boundAt))
			s.estimate.addTokens(tokensPerSecond*ran.Seconds(), g.lastStep.Number+1)
		}
	}
}

// addTokens: the first token comes in nextStep, because earlier steps computed the prompt.
func (e *estimate) addTokens(tokens float64, nextStep uint32) {
	if e.firstStep == 0 {
		e.firstStep, e.tokens = nextStep, 1
	}
	e.tokens = min(e.tokens+tokens, float64(e.maxTokens))
}

// generated is the estimate for an unreported answer, if that is larger.
func (b *board) generated(slot int32) int32 {
	n := b.counts.generated(slot)
	if s := &b.slots.records[slot]; s.unreported() {
		n = max(n, int32(s.estimate.tokens))
	}
	return n
}

// emitEstimate emits the last estimate, so that its error can be measured. While no stream has
// shown a tokenRate, the rate of this answer is taken.
func (b *board) emitEstimate(s *slotRecord, o Outcome, generated int32, now time.Time) {
	if !s.unreported() || o.Kind != Finished || generated <= 0 {
		return
	}
	estimated := max(1, s.estimate.tokens)
	b.emit(Effect{Kind: EffectEstimate, EstimatedTokens: estimated, Count: int(generated)})
	if g := s.rank.group; g != nil && g.tokenRate.seconds == 0 {
		g.tokenRate.add(1, int64(generated), now.Sub(s.boundAt))
	}
}

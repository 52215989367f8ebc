package board

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher/step"
)

// LeastStep is the shortest time between two tokens that counts as a step, until the usual length
// is known.
const LeastStep = time.Millisecond

func (b *board) scheduleHeld() {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.heldEntries = 0 // all held entries have left the pool
		}
		if g.heldEntries > 0 {
			b.recheckHeldAt = earlier(b.recheckHeldAt, g.recheckHeldAt)
		}
	}
}

// stepMs is the mean length of a step or, if none was measured, that of the model at the present
// loads; 0: not known.
func (g *group) stepMs() float32 {
	m, _, _ := g.steps.Model()
	return g.steps.Ms(m, g.largestLoad)
}

// recordSteps teaches the step model what the ranks did in the step before the reported ones. It
// also emits the shortest time that counts as a step from now on, by which the group's step
// detector tells a new step from delayed tokens of the last one.
func (b *board) recordSteps(g *group, reported []Step) {
	if len(reported) == 0 {
		return
	}
	b.refreshGroupLoads(g)
	newTokens := g.generated() - g.generatedAtLastStep
	g.generatedAtLastStep += newTokens
	for _, s := range reported {
		follows := g.lastStep.Number != 0 && s.Number == g.lastStep.Number+1
		if follows && len(reported) == 1 { // otherwise newTokens is the sum over several steps
			b.learnLastStep(g, newTokens)
		}
		b.countStep(g, s)
	}
	for _, r := range g.steppingRanks {
		r.dropEndedBefore(g.lastStep.Number) // these were in no step that is still to be learned
	}
	b.emit(Effect{Kind: EffectLeastStep, Group: b.key(g), Duration: max(LeastStep, g.steps.Least())})
	// A policy may decide in each step to send held entries.
	b.heldGroupStepped = b.heldGroupStepped || g.heldEntries > 0
}

func (b *board) countStep(g *group, s Step) {
	g.lastStep = s
	if b.ranksPrefill {
		waiting := b.awaitingFirstToken(g)
		promptTokens := b.estimatePromptProgress(g, s.Number)
		g.recentSteps.add(waiting, promptTokens, s.Length)
	}
	g.steps.Add(s.Length)
}

// generated counts the tokens of ended requests, and of those on ranks that are not down.
func (g *group) generated() int64 {
	sum := g.endedTokens
	for _, r := range g.steppingRanks {
		sum += r.runningTokens()
	}
	return sum
}

// learnLastStep teaches the step model the last step of a group, in which its requests got
// newTokens. The work of each rank is multiplied by its Cost, because the same work takes longer on
// slower hardware.
func (b *board) learnLastStep(g *group, newTokens int64) {
	g.stepRanks = g.stepRanks[:0]
	// requests counts those that the step decoded, and those whose prompt it completed.
	requests, promptsSure := 0, true
	for _, r := range g.steppingRanks {
		work := b.reconstructWork(r, g.lastStep.Number)
		requests += work.requests
		promptsSure = promptsSure && work.promptSure
		promptTokens := min(work.prompt, int64(r.StepBudget())) // an estimate, but never above the budget
		g.stepRanks = append(g.stepRanks, step.Rank{
			Requests: float64(work.decodes) * r.costFactor(), KV: float64(r.scaleByCost(work.kv)),
			Prompt: float64(promptTokens) * r.costFactor(),
		})
	}
	if promptsSure {
		tokensPerRequest := float64(newTokens) / float64(max(1, requests))
		g.steps.Learn(step.Sample{Ranks: g.stepRanks, Tokens: tokensPerRequest, Length: g.lastStep.Length})
	}
}

type rankWork struct {
	requests   int   // those that got a token
	decodes    int   // those that the step decoded
	kv         int64 // KV tokens that the step read
	prompt     int64 // prompt tokens computed, on a mixed rank
	promptSure bool  // false: the number of prompt tokens is not known
}

// addRequest adds a request that got a token. prefilled: the step computed the end of its prompt.
func (w *rankWork) addRequest(kv int64, prefilled bool) {
	w.requests++
	if !prefilled {
		w.kv += kv
		w.decodes++
	}
}

// reconstructWork returns what a rank did in a step, once the next step is reported. Only now is it
// known which requests it computed: those that had their first token by its end, and did not get
// their last one before it. Of the requests that are charged now, some still waited in the engine's
// queue, and others of the step have been released. The KV of running requests is about as it was.
//
// On a mixed rank, the step with a first token computed the end of that prompt. The rest of prompts
// is estimated.
func (b *board) reconstructWork(r *rank, number uint32) rankWork {
	otherKV := r.Others + r.kvFromOtherRanks // of requests without a slot here; each step reads it
	work := rankWork{kv: otherKV, promptSure: true}
	for i, slot := range r.slots {
		s := &b.slots.records[slot]
		// The estimate is for an answer whose tokens the engine reports only at its end.
		firstStep := cmp.Or(b.counts.firstStep(slot), s.estimate.firstStep)
		if firstStep != 0 && !isAfter(firstStep, number) {
			work.addRequest(r.running[i].Tokens(), r.Mixed && firstStep == number)
		}
		if r.Mixed {
			tokens, sure := s.computedIn(number, firstStep)
			work.prompt, work.promptSure = work.prompt+tokens, work.promptSure && sure
		}
	}
	for i := range r.recentlyEnded {
		work.addEnded(&r.recentlyEnded[i], number, r.Mixed)
	}
	return work
}

func (w *rankWork) addEnded(ended *endedRequest, number uint32, mixed bool) {
	begun, over := !isAfter(ended.firstStep, number), isAfter(number, ended.lastStep)
	if begun && !over {
		w.addRequest(ended.kv, mixed && ended.firstStep == number)
	}
	if ended.firstStep == number {
		w.prompt += ended.promptInFirstStep
	}
}

// isAfter compares step numbers, which begin anew after the largest uint32.
func isAfter(x, y uint32) bool { return int32(x-y) > 0 }

// rememberEnded stores a request that is about to be released, until the step model has learned its
// last step. recentlyEnded does not grow, because a tick must not allocate. If more requests end in
// one step, it is cleared, and the model could learn little from such a step.
func (b *board) rememberEnded(slot, generated int32, firstStep, lastStep uint32) {
	if firstStep == 0 {
		return
	}
	s := &b.slots.records[slot]
	if g := s.rank.group; g != nil {
		g.learnFromEnded(s, generated, firstStep, lastStep)
	}
	r, kv := s.rank, int64(s.prompt)+int64(generated)
	// The other ranks of the engine were charged, too (unpinned.go). That their parts are missing when
	// its last step is learned is a small error.
	if s.engineChoosesRank {
		kv /= r.kvParts
	}
	if len(r.recentlyEnded) == cap(r.recentlyEnded) {
		r.recentlyEnded = r.recentlyEnded[:0]
	}
	promptInFirstStep := int64(0)
	if r.Mixed { // earlier steps are usually learned already
		promptInFirstStep, _ = s.computedIn(firstStep, firstStep)
	}
	r.recentlyEnded = append(r.recentlyEnded, endedRequest{
		firstStep: firstStep, lastStep: lastStep, kv: kv, promptInFirstStep: promptInFirstStep,
	})
}

// learnFromEnded also learns the delay of the first token, and for how many steps tokens came. From
// both, a rank computes how many requests it may get beyond its slots. Requests that were bound
// before their prefill are apart: their delay is a prefill, and that of the others the copy of
// their KV.
func (g *group) learnFromEnded(s *slotRecord, generated int32, firstStep, lastStep uint32) {
	g.endedTokens += int64(generated)
	if s.boundBeforePrefill {
		g.prefillDelay.learn(s.boundAtStep, firstStep, lastStep)
	} else { // also on mixed ranks, which do not use this delay
		g.handoffDelay.learn(s.boundAtStep, firstStep, lastStep)
	}
}

func (r *rank) dropEndedBefore(number uint32) {
	remaining := r.recentlyEnded[:0]
	for _, ended := range r.recentlyEnded {
		if !isAfter(number, ended.lastStep) {
			remaining = append(remaining, ended)
		}
	}
	r.recentlyEnded = remaining
}

// endStepsIfIdle ends the current step of a group in which nothing decodes. The next step comes
// after a pause, so its length is not known. EffectGroupIdle makes the next token begin a new step.
func (b *board) endStepsIfIdle(g *group) {
	if !g.barrier || len(g.allRanks) == 0 {
		return
	}
	for _, r := range g.steppingRanks {
		if r.notDecodingSlots > 0 {
			b.markDecoding(r) // a first event may have come
		}
		if len(r.slots) > r.notDecodingSlots {
			return
		}
	}
	b.emit(Effect{Kind: EffectGroupIdle, Group: b.key(g)})
	g.lastStep = Step{}
	// The step model learns nothing from a step that no other follows at once.
	for _, r := range g.steppingRanks {
		r.recentlyEnded = r.recentlyEnded[:0]
	}
}

func (r *rank) decodingKV() int64 { return r.kv - r.notDecodingKV }

// stepLoad is the KV tokens that a step reads, plus weight tokens for each decoding request, times
// Cost.
func (r *rank) stepLoad(weight int64) int64 {
	return r.scaleByCost(r.decodingKV() + weight*int64(len(r.slots)-r.notDecodingSlots))
}

func (r *rank) scaleByCost(kv int64) int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return kv
	}
	return int64(float64(kv) * float64(r.Cost))
}

// costFactor is the step time per KV token, as a multiple of the mean of the group.
func (r *rank) costFactor() float64 { return float64(cmp.Or(r.Cost, 1)) }

// requestWeight is how many KV tokens lengthen a step as much as one more request. It may be an
// assumption while it cannot be measured.
func (g *group) requestWeight() int64 { return int64(math.Round(g.steps.Weight())) }

// knownRequestWeight is 0 while requestWeight is only assumed.
func (g *group) knownRequestWeight() int64 { return int64(math.Round(g.steps.KnownWeight())) }

// promptTokenMs is step.UsualOwnPromptMs while neither the steps nor the config give the number.
func (g *group) promptTokenMs(m *step.Model) float64 {
	if g.givenWeights != nil { // a 0 in a given model means that prompt tokens cost no time
		return m.OwnPromptMs
	}
	return cmp.Or(m.OwnPromptMs, step.UsualOwnPromptMs)
}

func (g *group) policyWeights() step.RequestCost {
	if g.givenWeights != nil {
		return *g.givenWeights
	}
	return step.SplitWeight(g.steps.Weight())
}

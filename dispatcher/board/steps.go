package board

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher/step"
)

// LeastStep is the shortest time between two tokens that counts as a step of a group, until the usual length of its steps is known.
const LeastStep = time.Millisecond

// scheduleHeld sets recheckHeldAt to the earliest time at which the policy of any group wants to decide again about entries that it holds
// back.
func (b *board) scheduleHeld() {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.heldEntries = 0 // all entries that the last decision held back have left the pool
		}
		if g.heldEntries > 0 {
			b.recheckHeldAt = earlier(b.recheckHeldAt, g.recheckHeldAt)
		}
	}
}

// stepMs returns the mean length of a step of the group or, if none was measured, the length at the present loads by the step model in
// force, in ms; 0: not known.
func (g *group) stepMs() float32 {
	m, _, _ := g.steps.Model()
	return g.steps.Ms(m, g.largestLoad)
}

// recordSteps records the new steps of a group (countStep), and teaches the step model what the ranks did in the step before them. Requests
// that have ended are kept until the step that brought their last tokens is learned, or cannot be learned any more. recordSteps also emits
// the shortest time that counts as a step from now on, by which the group's step detector tells a new step from delayed tokens of the last
// one.
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
		b.countStep(g, s) // s becomes g.lastStep
	}
	for _, r := range g.steppingRanks {
		r.dropEndedBefore(g.lastStep.Number) // these were in no step that is still to be learned
	}
	b.emit(Effect{Kind: EffectLeastStep, Group: b.key(g), Duration: max(LeastStep, g.steps.Least())})
	b.heldGroupStepped = b.heldGroupStepped || g.heldEntries > 0 // a policy may decide in each step to send held entries
}

// countStep makes s the last step of a group, and counts its length. If the ranks of the group also prefill, it estimates which prompts
// they compute next. It also counts, for the means over about the last minute (recentSteps), how many requests wait for their first token.
func (b *board) countStep(g *group, s Step) {
	g.lastStep = s
	if b.ranksPrefill {
		waiting := b.awaitingFirstToken(g)
		promptTokens := b.estimatePromptProgress(g, s.Number)
		g.recentSteps.add(waiting, promptTokens, s.Length)
	}
	g.steps.Add(s.Length)
}

// generated returns how many tokens the requests of the group have generated so far: those that run on ranks that are not down, and all
// that have ended.
func (g *group) generated() int64 {
	sum := g.endedTokens
	for _, r := range g.steppingRanks {
		sum += r.runningTokens()
	}
	return sum
}

// learnLastStep teaches the step model what the ranks of a group did in the last step. newTokens is the number of tokens that the requests
// of the group got in this step. It teaches nothing if the board cannot tell how many prompt tokens the step computed (promptSure is
// false). The work of each rank is multiplied by its Cost, because the same work takes longer on slower hardware.
func (b *board) learnLastStep(g *group, newTokens int64) {
	g.stepRanks = g.stepRanks[:0]
	// Every request that got a token counts in requests: the step decoded it (work.decodes), or completed its prompt.
	requests, promptsSure := 0, true
	for _, r := range g.steppingRanks {
		work := b.reconstructWork(r, g.lastStep.Number)
		requests += work.requests
		promptsSure = promptsSure && work.promptSure
		promptTokens := min(work.prompt, int64(r.StepBudget())) // an estimate, but never above the budget of a step
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

// rankWork is what one rank did in a step.
type rankWork struct {
	requests   int   // number of requests that got a token
	decodes    int   // number of these requests that the step decoded
	kv         int64 // KV tokens that the step read
	prompt     int64 // prompt tokens that the step computed, on a mixed rank
	promptSure bool  // false: the board cannot tell how many prompt tokens the step computed
}

// addRequest adds a request that got a token in the step. kv is the number of its KV tokens. prefilled: the step computed the end of its
// prompt instead of decoding the request.
func (w *rankWork) addRequest(kv int64, prefilled bool) {
	w.requests++
	if !prefilled {
		w.kv += kv
		w.decodes++
	}
}

// reconstructWork returns what a rank did in the step with this number. The next step has just been reported: only now can the board tell
// which requests the step computed. These are the requests that had their first token by the end of the step, and did not get their last
// token before it. The requests that are charged now are not the same. A request that was just bound may still wait in the engine's queue,
// and a request that was in the step may have been released. The KV of running requests is taken as it is now, which is about as it was.
//
// On a mixed rank, which also prefills, the step that brought the first token of an answer computed the end of its prompt. How much of
// other prompts it computed is estimated. promptSure is false if one of these estimates has turned out to be wrong.
func (b *board) reconstructWork(r *rank, number uint32) rankWork {
	otherKV := r.Others + r.kvFromOtherRanks // KV of requests that have no slot here; each step reads it, too
	work := rankWork{kv: otherKV, promptSure: true}
	for i, slot := range r.slots {
		s := &b.slots.records[slot]
		// The estimate has the first step of an answer whose tokens the engine reports only at its end.
		firstStep := cmp.Or(b.counts.firstStep(slot), s.estimate.firstStep)
		if firstStep != 0 && !isAfter(firstStep, number) { // the answer had its first token by the end of the step
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

// addEnded adds a request that has no slot any more, if it was in the step with this number. mixed: the rank also prefills.
func (w *rankWork) addEnded(ended *endedRequest, number uint32, mixed bool) {
	begun, over := !isAfter(ended.firstStep, number), isAfter(number, ended.lastStep)
	if begun && !over {
		w.addRequest(ended.kv, mixed && ended.firstStep == number)
	}
	if ended.firstStep == number {
		w.prompt += ended.promptInFirstStep
	}
}

// isAfter says whether the step with the number x comes after the step with the number y. Numbers begin anew after the largest uint32, so
// the sign of their difference decides.
func isAfter(x, y uint32) bool { return int32(x-y) > 0 }

// rememberEnded stores a request that is about to be released, because the step model must still learn its last step. It also lets the
// group learn from the request. firstStep and lastStep are the numbers of the steps that brought the first and the last tokens of the
// answer; firstStep 0: no token came.
//
// The list recentlyEnded has room for all slots of the rank and does not grow, because a tick must not allocate. If more requests end in
// one step, the list is cleared: the model can learn little from such a step.
func (b *board) rememberEnded(slot, generated int32, firstStep, lastStep uint32) {
	if firstStep == 0 {
		return // the request was in no step
	}
	s := &b.slots.records[slot]
	if g := s.rank.group; g != nil {
		g.learnFromEnded(s, generated, firstStep, lastStep)
	}
	r, kv := s.rank, int64(s.prompt)+int64(generated)
	// The engine may have run the request on any of its ranks, so its KV was charged in equal parts to all of them. Only the part of
	// this rank is remembered. That the parts of the others are missing when its last step is learned is a small error.
	if s.engineChoosesRank {
		kv /= r.kvParts
	}
	if len(r.recentlyEnded) == cap(r.recentlyEnded) { // more requests ended in one step than the rank has room for
		r.recentlyEnded = r.recentlyEnded[:0]
	}
	promptInFirstStep := int64(0)
	if r.Mixed { // the rank computed the end of the prompt in firstStep; earlier steps are usually learned already
		promptInFirstStep, _ = s.computedIn(firstStep, firstStep)
	}
	r.recentlyEnded = append(r.recentlyEnded, endedRequest{
		firstStep: firstStep, lastStep: lastStep, kv: kv, promptInFirstStep: promptInFirstStep,
	})
}

// learnFromEnded adds the tokens of a request that is about to be released to endedTokens. It also learns two numbers from the request: how
// many steps passed between its binding and its first token (the delay), and how many steps then brought tokens. From both, a rank computes
// how many requests it may get beyond its slots. Requests that were bound before their prefill are learned apart, because their delay is
// the time of a prefill, and that of other requests the time in which their KV is copied.
func (g *group) learnFromEnded(s *slotRecord, generated int32, firstStep, lastStep uint32) {
	g.endedTokens += int64(generated)
	if s.boundBeforePrefill {
		g.prefillDelay.learn(s.boundAtStep, firstStep, lastStep)
	} else { // also on mixed ranks, which get no hand-offs, but they do not use this delay
		g.handoffDelay.learn(s.boundAtStep, firstStep, lastStep)
	}
}

// dropEndedBefore drops those requests from recentlyEnded that got their last token before the step with this number.
func (r *rank) dropEndedBefore(number uint32) {
	remaining := r.recentlyEnded[:0]
	for _, ended := range r.recentlyEnded {
		if !isAfter(number, ended.lastStep) {
			remaining = append(remaining, ended)
		}
	}
	r.recentlyEnded = remaining
}

// endStepsIfIdle ends the current step of a group if none of its requests decodes any more. The next step then comes after a pause, so its
// length is not known. EffectGroupIdle makes the next token begin a new step.
func (b *board) endStepsIfIdle(g *group) {
	if !g.barrier || len(g.allRanks) == 0 { // the group has no common steps, or has left the board
		return
	}
	for _, r := range g.steppingRanks {
		if r.notDecodingSlots > 0 {
			b.markDecoding(r) // updates notDecodingSlots, because the first event of a request may have come
		}
		if len(r.slots) > r.notDecodingSlots { // a request still decodes
			return
		}
	}
	b.emit(Effect{Kind: EffectGroupIdle, Group: b.key(g)})
	g.lastStep = Step{}
	// The step model learns nothing from a step that no other step follows at once, so it needs no requests that ended in this one.
	for _, r := range g.steppingRanks {
		r.recentlyEnded = r.recentlyEnded[:0]
	}
}

// decodingKV returns the KV tokens that a decode step of the rank reads. The KV of requests that do not decode yet is left out.
func (r *rank) decodingKV() int64 { return r.kv - r.notDecodingKV }

// stepLoad returns the load of the rank in a step of its group, in KV tokens: the KV tokens that the step reads, plus weight tokens for
// each request that decodes, times the rank's Cost.
func (r *rank) stepLoad(weight int64) int64 {
	return r.scaleByCost(r.decodingKV() + weight*int64(len(r.slots)-r.notDecodingSlots))
}

// scaleByCost multiplies a number of KV tokens by the rank's Cost, so that the loads of ranks with unequal hardware can be compared.
func (r *rank) scaleByCost(kv int64) int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return kv
	}
	return int64(float64(kv) * float64(r.Cost))
}

// costFactor returns the step time that a KV token costs on the rank, as a multiple of the mean of its group.
func (r *rank) costFactor() float64 { return float64(cmp.Or(r.Cost, 1)) }

// requestWeight returns how many KV tokens lengthen a step as much as one more request. The number may be an assumption while it cannot be
// measured from the steps.
func (g *group) requestWeight() int64 { return int64(math.Round(g.steps.Weight())) }

// knownRequestWeight returns requestWeight if the number was measured or configured, and 0 if it is only assumed. The status and the
// estimates of step lengths use it.
func (g *group) knownRequestWeight() int64 { return int64(math.Round(g.steps.KnownWeight())) }

// promptTokenMs returns how many ms one prompt token adds to a step on the rank that computes it. It is step.UsualOwnPromptMs while neither
// the steps nor the config give the number.
func (g *group) promptTokenMs(m *step.Model) float64 {
	if g.givenWeights != nil { // the model was given by an event, and a 0 in it means that prompt tokens cost no time
		return m.OwnPromptMs
	}
	return cmp.Or(m.OwnPromptMs, step.UsualOwnPromptMs)
}

// policyWeights returns how many KV tokens policies count for each request, beside the request's own KV: a part in the load of its rank
// (Request), and a part on the rank with the most requests (Row).
func (g *group) policyWeights() step.RequestCost {
	if g.givenWeights != nil {
		return *g.givenWeights
	}
	return step.SplitWeight(g.steps.Weight())
}

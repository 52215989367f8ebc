package board

import (
	"cmp"
	"math"
	"time"

	"evenkeel/dispatcher/step"
)

// LeastStep is the shortest time that counts as a step while the steps of a group are not known yet.
const LeastStep = time.Millisecond

// scheduleHeld sets recheckHeldAt to the earliest time at which a policy wants to decide again about entries that it holds back.
func (b *board) scheduleHeld() {
	for _, g := range b.groups {
		if b.pool.Len() == 0 {
			g.heldEntries = 0 // the entries that the last decision held back have left the pool
		}
		if g.heldEntries > 0 {
			b.recheckHeldAt = earlier(b.recheckHeldAt, g.recheckHeldAt)
		}
	}
}

// stepMs returns how long a step of the group takes by the model in force, in ms; 0: not known.
func (g *group) stepMs() float32 {
	m, _, _ := g.steps.Model()
	return g.steps.Ms(m, g.largestLoad)
}

// recordSteps takes in new steps of a group, and teaches the step model what the ranks did in the step before. It also emits the shortest
// time that counts as a step from now on.
//
// The board learns which requests a step computed only when the next step is reported: the requests that had got their first token by the
// end of the step, and had not got their last token before it. The charged requests differ from these. A request that was just bound may
// still wait in the engine's queue, and a request that got its last token in the step is still charged when the step is reported.
func (b *board) recordSteps(g *group, reported []Step) {
	if len(reported) == 0 {
		return
	}
	b.refreshGroup(g)
	before := g.tokensAtStep
	g.tokensAtStep = g.generated()
	for _, s := range reported {
		follows := g.lastStep.Number != 0 && s.Number == g.lastStep.Number+1
		if follows && len(reported) == 1 { // else the token counts are sums over several steps
			if requests, sure := b.reconstructLastStep(g); sure {
				tokensPerRequest := float64(g.tokensAtStep-before) / float64(max(1, requests))
				g.steps.Learn(step.Sample{Ranks: g.stepRanks, Tokens: tokensPerRequest, Length: g.lastStep.Length})
			}
		}
		g.lastStep = s
		if b.mixed {
			g.recentSteps.add(b.awaitingFirstToken(g), b.estimatePromptProgress(g, s.Number), s.Length)
		}
		g.steps.Add(s.Length)
	}
	for _, r := range g.steppingRanks {
		r.dropEndedBefore(g.lastStep.Number)
	}
	b.emit(Effect{Kind: EffectLeastStep, Group: b.key(g), Duration: max(LeastStep, g.steps.Least())})
	b.heldGroupStepped = b.heldGroupStepped || g.heldEntries > 0 // a policy may send held entries with any step
}

// generated returns how many tokens all requests of the group have got so far.
func (g *group) generated() int64 {
	sum := g.endedTokens
	for _, r := range g.steppingRanks {
		sum += r.runningTokens()
	}
	return sum
}

// reconstructLastStep writes to g.stepRanks what each rank of the group did in the last step, scaled by the rank's Cost. It returns how
// many requests got a token in this step. sure is false if the board cannot tell how many prompt tokens the step computed.
func (b *board) reconstructLastStep(g *group) (requests int, sure bool) {
	g.stepRanks, sure = g.stepRanks[:0], true
	last := g.lastStep.Number
	for _, r := range g.steppingRanks {
		kv, decodes, prompt := r.Others+r.kvFromOtherRanks, 0, int64(0)
		addRequest := func(firstStep uint32, tokens int64) {
			requests++
			if !r.Mixed || firstStep != last { // else the step computed the request's prompt, and did not decode the request
				kv += tokens
				decodes++
			}
		}
		for i, slot := range r.slots {
			firstStep := cmp.Or(b.counts.firstStep(slot), b.slots.records[slot].estimate.firstStep)
			if firstStep != 0 && !laterStep(firstStep, last) { // the request had its first token by the end of the step
				addRequest(firstStep, r.running[i].Tokens())
			}
			if r.Mixed {
				n, known := b.slots.records[slot].computedIn(last, firstStep)
				prompt, sure = prompt+n, sure && known
			}
		}
		for _, ended := range r.recentlyEnded {
			if begun, over := !laterStep(ended.firstStep, last), laterStep(last, ended.lastStep); begun && !over {
				addRequest(ended.firstStep, ended.kv)
			}
			if ended.firstStep == last {
				prompt += ended.promptInFirstStep
			}
		}
		g.stepRanks = append(g.stepRanks, step.Rank{
			Requests: float64(decodes) * r.costFactor(), KV: float64(r.scaleByCost(kv)),
			Prompt: float64(min(prompt, int64(r.StepBudget()))) * r.costFactor(),
		})
	}
	return requests, sure
}

// laterStep says whether step number x is later than y. Numbers begin anew after the largest uint32, so their difference decides.
func laterStep(x, y uint32) bool { return int32(x-y) > 0 }

// rememberEnded remembers a request that is about to be released, because the step model still needs it for steps that are not complete.
// Its group learns from it, too. firstStep and lastStep are the numbers of the steps that brought its first and its last tokens; firstStep
// 0: no token came. The list of remembered requests (recentlyEnded) never grows beyond its capacity, which has room for the rank's slots:
// the tick must not allocate. If more requests leave in one step, the list is cleared, because the model can learn little from such a step.
func (b *board) rememberEnded(slot, generated int32, firstStep, lastStep uint32) {
	if firstStep == 0 {
		return // it was in no step
	}
	s := &b.slots.records[slot]
	if g := s.rank.group; g != nil {
		g.learnFromEnded(s, generated, firstStep, lastStep)
	}
	r, kv := s.rank, int64(s.prompt)+int64(generated)
	if s.unpinned { // only this rank's part counts; in this one step, the parts of the other ranks are missing
		kv /= r.kvParts
	}
	if len(r.recentlyEnded) == cap(r.recentlyEnded) {
		r.recentlyEnded = r.recentlyEnded[:0]
	}
	prompt := int64(0)
	if r.Mixed {
		prompt, _ = s.computedIn(firstStep, firstStep)
	}
	r.recentlyEnded = append(r.recentlyEnded, endedRequest{firstStep: firstStep, lastStep: lastStep, kv: kv, promptInFirstStep: prompt})
}

// learnFromEnded adds the tokens of a request that is about to be released to those of the ended requests, and learns for how many steps
// the request had no token yet.
func (g *group) learnFromEnded(s *slotRecord, generated int32, firstStep, lastStep uint32) {
	g.endedTokens += int64(generated)
	if s.early {
		g.prefillDelay.learn(s.boundAtStep, firstStep, lastStep)
	} else {
		g.handoffDelay.learn(s.boundAtStep, firstStep, lastStep)
	}
}

// dropEndedBefore drops the remembered requests that got their last token before the step with this number.
func (r *rank) dropEndedBefore(number uint32) {
	remaining := r.recentlyEnded[:0]
	for _, ended := range r.recentlyEnded {
		if !laterStep(number, ended.lastStep) {
			remaining = append(remaining, ended)
		}
	}
	r.recentlyEnded = remaining
}

// endStepsIfIdle ends the current step of a group if none of its requests decodes any more: the next step then follows no other, so its
// length is not known. It emits EffectGroupIdle, so that the next token begins a new step.
func (b *board) endStepsIfIdle(g *group) {
	if !g.barrier || len(g.allRanks) == 0 { // the group has no common steps, or has left the board
		return
	}
	for _, r := range g.steppingRanks {
		if r.notDecodingSlots > 0 {
			b.markDecoding(r)
		}
		if len(r.slots) > r.notDecodingSlots { // a request still decodes
			return
		}
	}
	b.emit(Effect{Kind: EffectGroupIdle, Group: b.key(g)})
	g.lastStep = Step{}
	for _, r := range g.steppingRanks {
		r.recentlyEnded = r.recentlyEnded[:0]
	}
}

// decodingKV returns the KV tokens that the rank's steps read. Those of requests that do not decode yet are left out.
func (r *rank) decodingKV() int64 { return r.kv - r.notDecodingKV }

// stepLoad returns the load of the rank in the group's steps, in KV tokens: the tokens that its steps read plus weight tokens for each
// request that decodes, times the rank's Cost.
func (r *rank) stepLoad(weight int64) int64 {
	return r.scaleByCost(r.decodingKV() + weight*int64(len(r.slots)-r.notDecodingSlots))
}

// scaleByCost multiplies KV tokens by what a KV token costs on the rank, so that the loads of unequal ranks can be compared.
func (r *rank) scaleByCost(kv int64) int64 {
	if r.Cost == 0 || r.Cost == 1 {
		return kv
	}
	return int64(float64(kv) * float64(r.Cost))
}

// costFactor returns what a KV token costs on the rank, as a multiple of the group's mean.
func (r *rank) costFactor() float64 { return float64(cmp.Or(r.Cost, 1)) }

// requestWeight returns how many KV tokens lengthen a step as much as one request does. The number may be an assumption, while the steps do
// not show it.
func (g *group) requestWeight() int64 { return int64(math.Round(g.steps.Weight())) }

// knownWeight returns requestWeight as far as it was measured or configured, without assumptions. The status and the estimates of a step's
// length use it.
func (g *group) knownWeight() int64 { return int64(math.Round(g.steps.KnownWeight())) }

// promptTokenMs returns how many ms a prompt token adds to a step on the rank that computes it: step.UsualOwnMs while neither the steps nor
// the config give the number.
func (g *group) promptTokenMs(m *step.Model) float64 {
	if g.givenWeights != nil { // the model was set, too, and its 0 means that prompt tokens cost nothing
		return m.OwnPromptMs
	}
	return cmp.Or(m.OwnPromptMs, step.UsualOwnPromptMs)
}

// policyWeights returns how many KV tokens policies count for a request, beside its own: on its rank, and on the rank with most requests.
func (g *group) policyWeights() step.RequestCost {
	if g.givenWeights != nil {
		return *g.givenWeights
	}
	return step.SplitWeight(g.steps.Weight())
}

package board

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// Mixed ranks are those of aggregated engines: they prefill and decode. An entry for a mixed rank
// comes without a hand-off, and the rank computes the part of the prompt that is not in its prefix
// cache. The KV of the whole prompt is charged when the entry is bound, but no decode step reads it
// before the first event of the answer. The backlog of a rank is the number of prompt tokens that
// it has yet to compute.

// Hit is a part of a prompt in a rank's prefix cache.
type Hit = policy.Hit

// presumedBudget is the assumed Worker.Budget, if that is not known.
const presumedBudget = 2048

// uncached is at least 1, because an engine always computes the last token of a prompt.
func (w *waitingEntry) uncached(rank int32) int32 {
	for _, h := range w.Hits {
		if h.Worker == rank {
			return max(1, w.prompt()-clampTokens(h.Tokens))
		}
	}
	return max(1, w.prompt())
}

// index is the position in promptsToCompute.
func (b *board) addPrompt(r *rank, slot, tokens int32, index int) {
	b.slots.records[slot].promptLeft = tokens
	r.backlog += int64(tokens)
	r.promptsToCompute = slices.Insert(r.promptsToCompute, index, slot)
}

// dropPromptLeft: the rank has computed the rest of the prompt, or never will.
func (b *board) dropPromptLeft(r *rank, slot int32) {
	if at := slices.Index(r.promptsToCompute, slot); at >= 0 {
		r.promptsToCompute = slices.Delete(r.promptsToCompute, at, at+1)
	}
	s := &b.slots.records[slot]
	r.backlog -= int64(s.promptLeft)
	s.promptLeft = 0
}

// computeMs estimates how long the rank takes to compute its backlog; 0: not known. It assumes that
// all ranks of the group compute as many prompt tokens in the same steps.
func (r *rank) computeMs() float32 {
	m, _, _ := r.group.steps.Model()
	decodeMs := r.group.steps.Ms(m, r.group.largestLoad)
	if decodeMs <= 0 || m.OwnPromptMs+m.SharedPromptMs+m.PrefillMs <= 0 {
		return 0
	}
	// OwnPromptMs is per prompt token of this rank, on the mean hardware of the group; costFactor is
	// above 1 for slower hardware. SharedPromptMs is per prompt token of the mean over all ranks.
	promptTokens := max(1, r.promptTokensPerStep())
	promptStepMs := float64(decodeMs) + m.PrefillMs + (m.OwnPromptMs*r.costFactor()+m.SharedPromptMs)*float64(promptTokens)
	promptSteps := math.Ceil(float64(r.backlog) / float64(promptTokens))
	// Decode steps come before the first step with prompts, and between two such steps.
	if r.AfterPrompts {
		decodeSteps := float64(r.group.promptRest) + (promptSteps-1)*float64(max(0, r.Interval-1))
		return float32(promptStepMs*promptSteps + float64(decodeMs)*max(0, decodeSteps))
	}
	// Only every Interval-th step computes prompts.
	return float32(promptStepMs * promptSteps * float64(max(1, r.Interval)))
}

// promptTokensPerStep is the budget less one token for each request that decodes.
func (r *rank) promptTokensPerStep() int { return r.StepBudget() - (len(r.slots) - r.notDecodingSlots) }

// estimatePromptProgress estimates which prompt tokens a group computes in the step that begins
// now, after lastStep. Requests that are sent later cannot be in this step.
func (b *board) estimatePromptProgress(g *group, lastStep uint32) (tokens int64) {
	busy := uint64(0)
	if !slices.ContainsFunc(g.steppingRanks, func(r *rank) bool { return len(r.slots) > r.notDecodingSlots }) {
		g.promptRest = 0 // nothing would be done in these steps
	}
	rest := max(0, g.promptRest-1)
	for _, r := range g.steppingRanks {
		budget := 0
		// Without AfterPrompts, the board does not know in which steps an engine with an Interval
		// computes prompts. It assumes those that follow a multiple of Interval.
		computesPrompts := r.Interval <= 1 || lastStep%uint32(r.Interval) == 0
		if r.AfterPrompts {
			computesPrompts = g.promptRest == 0
		}
		if computesPrompts {
			budget = r.promptTokensPerStep()
		}
		r.computePrompts(b, int64(budget), lastStep+1)
		tokens += r.stepPromptTokens
		if r.stepPromptTokens > 0 {
			busy++
			if r.AfterPrompts {
				rest = max(rest, r.Interval-1)
			}
		}
	}
	g.promptRest = rest
	g.roundCounts.steps++
	if busy > 0 {
		g.roundCounts.prefillSteps++
		g.roundCounts.ranksInPrefillSteps += uint64(len(g.steppingRanks))
		g.roundCounts.idleInPrefillSteps += uint64(len(g.steppingRanks)) - busy
	}
	return tokens
}

// StepBudget is Budget, or presumedBudget if that is not known.
func (w *Worker) StepBudget() int {
	if w.Budget > 0 {
		return w.Budget
	}
	return presumedBudget
}

func (r *rank) computePrompts(b *board, budget int64, step uint32) {
	r.stepPromptTokens = 0
	for _, slot := range r.promptsToCompute {
		s := &b.slots.records[slot]
		if s.promptLeft <= 0 {
			continue // complete by the estimate; markDecoding removes it when the first event comes
		}
		computed := r.computePrompt(s, budget) // 0 if the budget is used up
		s.progress.addStep(step, int32(computed))
		r.stepPromptTokens += computed
		budget -= computed
	}
}

func (r *rank) computePrompt(s *slotRecord, budget int64) (computed int64) {
	computed = max(0, min(budget, int64(s.promptLeft)))
	s.promptLeft -= int32(computed)
	r.backlog -= computed
	return computed
}

// promptProgress says in which steps a prompt was computed, by the board's estimate.
type promptProgress struct {
	inLastStep   int32
	inStepBefore int32
	earlier      int32  // computed before these two steps
	lastStep     uint32 // last step with an estimate; moves on until the prompt is complete
}

// addStep keeps the last two steps apart, because the estimate may be one step ahead of the step
// from which the board learns.
func (k *promptProgress) addStep(number uint32, tokens int32) {
	k.earlier += k.inStepBefore
	k.inStepBefore = k.inLastStep
	k.inLastStep, k.lastStep = tokens, number
}

// computedBefore returns how many prompt tokens were computed before the given step, which brought
// the first token of the answer. If lastStep is not later, its tokens count as computed in the
// given step, because this step must have computed something.
func (k *promptProgress) computedBefore(step uint32) int32 {
	if estimateIsAhead := k.lastStep == step+1; estimateIsAhead {
		return k.earlier
	}
	return k.earlier + k.inStepBefore
}

// computedIn returns how many prompt tokens a past step computed. firstStep brought the first token
// of the answer (0: none came), so it computed the whole rest of the prompt, whatever the estimate
// said. For earlier steps, the estimate decides. sure is false if by the estimate this step
// finished the prompt, but it brought no token.
func (s *slotRecord) computedIn(step, firstStep uint32) (tokens int64, sure bool) {
	k := &s.progress
	if s.tokensBeforePreemption > 0 { // firstStep is from before the preemption
		return k.estimateFor(step), true
	}
	switch {
	case firstStep == step:
		return int64(max(0, s.newTokens-k.computedBefore(step))), true
	case firstStep != 0 && !isAfter(firstStep, step):
		return 0, true
	case k.lastStep == step && k.inLastStep > 0: // by the estimate, this step finished the prompt
		return 0, false
	}
	return k.estimateFor(step), true
}

func (k *promptProgress) estimateFor(step uint32) int64 {
	switch step {
	case k.lastStep:
		return int64(k.inLastStep)
	case k.lastStep - 1:
		return int64(k.inStepBefore)
	}
	return 0
}

// requeuePreempted records a preemption for lack of KV room. The engine preempts the decoding
// request that it admitted last, and computes its prompt and generated tokens again, before all
// other prompts.
func (b *board) requeuePreempted(r *rank) {
	b.refreshLoad(r)
	newest := int32(-1) // -1: no request decodes
	for _, slot := range r.slots {
		s := &b.slots.records[slot]
		if decodes := !s.notDecoding; decodes && (newest < 0 || b.slots.records[newest].boundBefore(s)) {
			newest = slot
		}
	}
	if newest < 0 {
		return // all prompts are still to be computed, so a preemption changes nothing
	}
	s := &b.slots.records[newest]
	request := &r.running[s.pos]
	s.notDecoding, s.tokensBeforePreemption, s.progress = true, request.Generated, promptProgress{}
	r.notDecodingSlots++
	r.notDecodingKV += int64(s.prompt)                    // markDecoding takes off the same number
	b.addPrompt(r, newest, s.prompt+request.Generated, 0) // before all other prompts
}

// storeHoldReport stores what a policy reports about the entries that it holds back. First are
// those for which a rank had room for the first time.
func (b *board) storeHoldReport(g *group, report policy.HoldReport, now time.Time) {
	for _, id := range report.First {
		if w, ok := b.waiting[id]; ok {
			w.sendableSince = now
			b.waiting[id] = w
		}
	}
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	g.roundCounts.heldSince, g.roundCounts.maxHold = now.Add(-seconds(report.HeldS)), seconds(report.MaxHoldS)
	g.recheckHeldAt = time.Time{}
	// Rounded up to whole µs: if the board decided too early, the policy would hold the entries back
	// again.
	if !math.IsInf(report.NextMs, 1) {
		g.recheckHeldAt = now.Add(time.Duration(max(1, math.Ceil(report.NextMs*1000))) * time.Microsecond)
	}
}

func (b *board) countRound(g *group) {
	busy := 0
	for _, r := range g.steppingRanks {
		if r.backlog > 0 {
			busy++
		}
	}
	g.roundCounts.rounds++
	g.roundCounts.ranksFilled += uint64(busy)
	b.emit(Effect{Kind: EffectSent, Group: b.key(g), Label: b.label(g), Count: busy})
}

// details: HeldMs is -1 if no rank had room yet. UrgentInMs is 0 if the entry is urgent already or
// never will be; policy.Entry.Urgent tells the two apart.
func (w *waitingEntry) details(now time.Time) policy.EntryDetails {
	details := policy.EntryDetails{Hits: w.Hits, HeldMs: -1}
	if !w.sendableSince.IsZero() {
		details.HeldMs = float64(now.Sub(w.sendableSince)) / float64(time.Millisecond)
	}
	if at := w.Entry.UrgentAt(); at.After(now) {
		details.UrgentInMs = float64(at.Sub(now)) / float64(time.Millisecond)
	}
	return details
}

// awaitingFirstToken counts the requests on the group's ranks and in its share of the pool, without
// entries that a policy holds back.
func (b *board) awaitingFirstToken(g *group) float64 {
	onRanks := 0
	for _, r := range g.steppingRanks {
		// A preempted request does not decode either, but it had its first token before.
		onRanks += r.notDecodingSlots - b.preemptedRequests(r)
	}
	return float64(max(0, onRanks)) + b.poolShare()
}

func (b *board) preemptedRequests(r *rank) (n int) {
	for _, slot := range r.promptsToCompute {
		if b.slots.records[slot].tokensBeforePreemption > 0 {
			n++
		}
	}
	return n
}

// poolShare divides the entries that no policy holds back among the groups that take requests.
func (b *board) poolShare() float64 {
	groups, heldEntries := 0, 0
	for _, other := range b.groups {
		// Not the sum, because several groups may hold the same entry back.
		heldEntries = max(heldEntries, other.heldEntries)
		if slices.ContainsFunc(other.steppingRanks, (*rank).takesRequests) {
			groups++
		}
	}
	notHeld := max(0, b.pool.Len()-heldEntries) // heldEntries may be out of date
	// If no group takes requests, the whole pool counts for each.
	return float64(notHeld) / float64(max(1, groups))
}

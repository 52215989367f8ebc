package board

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// Mixed ranks are those of aggregated engines: they prefill and decode. An entry for a mixed rank comes without a hand-off, and the rank
// computes the part of the prompt that is not in its prefix cache. When the entry is bound, a slot and the KV of the whole prompt are
// charged to the rank, but no decode step reads that KV before the first event of the answer. The backlog of a rank is the number of prompt
// tokens that it has yet to compute. A policy that holds requests back and sends them together, in rounds, keeps the backlogs of the ranks
// equal.

// Hit says that a rank has the first Tokens tokens of an entry's prompt in its prefix cache.
type Hit = policy.Hit

// presumedBudget is the number of tokens that a step of a rank is assumed to compute at most, if Worker.Budget is not known.
const presumedBudget = 2048

// uncached returns how many tokens of the prompt a rank has to compute, because they are not in its prefix cache. It is at least 1, because
// an engine always computes the last token.
func (w *waitingEntry) uncached(rank int32) int32 {
	for _, h := range w.Hits {
		if h.Worker == rank {
			return max(1, w.prompt()-clampTokens(h.Tokens))
		}
	}
	return max(1, w.prompt())
}

// addPrompt adds tokens of a request's prompt to the rank's backlog. index is the position of the request in the order in which the rank
// computes prompts.
func (b *board) addPrompt(r *rank, slot, tokens int32, index int) {
	b.slots.records[slot].promptLeft = tokens
	r.backlog += int64(tokens)
	r.promptsToCompute = slices.Insert(r.promptsToCompute, index, slot)
}

// dropPromptLeft takes the rest of a request's prompt out of the rank's backlog, because the rank has computed it or never will.
func (b *board) dropPromptLeft(r *rank, slot int32) {
	if at := slices.Index(r.promptsToCompute, slot); at >= 0 {
		r.promptsToCompute = slices.Delete(r.promptsToCompute, at, at+1)
	}
	s := &b.slots.records[slot]
	r.backlog -= int64(s.promptLeft)
	s.promptLeft = 0
}

// computeMs estimates how long the rank takes to compute its backlog of prompts, in ms; 0: the cost of prompts or the length of steps is
// not known. It assumes that all ranks of the group compute prompts in the same steps.
func (r *rank) computeMs() float32 {
	m, _, _ := r.group.steps.Model()
	decodeMs := r.group.steps.Ms(m, r.group.largestLoad)
	if decodeMs <= 0 || m.OwnPromptMs+m.SharedPromptMs+m.PrefillMs <= 0 {
		return 0
	}
	// A step that computes prompts takes longer than a decode step: by PrefillMs, by OwnPromptMs for each prompt token of this rank,
	// and by SharedPromptMs for each prompt token of the mean over all ranks. All ranks are assumed to compute as many prompt tokens as
	// this one. OwnPromptMs is for a rank with the mean hardware of the group, and costFactor is above 1 for slower hardware.
	promptTokens := max(1, r.promptTokensPerStep())
	promptStepMs := float64(decodeMs) + m.PrefillMs + (m.OwnPromptMs*r.costFactor()+m.SharedPromptMs)*float64(promptTokens)
	promptSteps := math.Ceil(float64(r.backlog) / float64(promptTokens))
	if r.AfterPrompts { // decode steps come before the first step with prompts, and between two such steps
		decodeSteps := float64(r.group.promptRest) + (promptSteps-1)*float64(max(0, r.Interval-1))
		return float32(promptStepMs*promptSteps + float64(decodeMs)*max(0, decodeSteps))
	}
	return float32(promptStepMs * promptSteps * float64(max(1, r.Interval))) // only every Interval-th step computes prompts
}

// promptTokensPerStep returns how many prompt tokens one step of the rank can compute: the token budget of a step less one token for each
// request that decodes.
func (r *rank) promptTokensPerStep() int { return r.StepBudget() - (len(r.slots) - r.notDecodingSlots) }

// estimatePromptProgress estimates which prompt tokens the ranks of a group compute in the step that begins now. It takes these tokens off
// the backlogs, counts the step in roundCounts, and returns the number of tokens. lastStep is the number of the previous step, which has
// just been reported. Each rank computes prompts in the order of arrival. Requests that are sent from now on cannot be in this step any
// more.
func (b *board) estimatePromptProgress(g *group, lastStep uint32) (tokens int64) {
	busy := uint64(0)
	if !slices.ContainsFunc(g.steppingRanks, func(r *rank) bool { return len(r.slots) > r.notDecodingSlots }) {
		g.promptRest = 0 // nothing decodes, so nothing would be done in these steps
	}
	rest := max(0, g.promptRest-1)
	for _, r := range g.steppingRanks {
		budget := 0
		// An engine may compute prompts only in every Interval-th step. Without AfterPrompts, the board does not know in which ones,
		// and assumes those that follow a multiple of Interval.
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

// StepBudget returns the largest number of tokens that one step of a mixed rank computes: Budget, or presumedBudget if Budget is 0.
func (w *Worker) StepBudget() int {
	if w.Budget > 0 {
		return w.Budget
	}
	return presumedBudget
}

// computePrompts counts up to budget prompt tokens of the rank as computed in the step with the number step. It begins with the prompt that
// comes first in promptsToCompute. stepPromptTokens becomes the number of these tokens.
func (r *rank) computePrompts(b *board, budget int64, step uint32) {
	r.stepPromptTokens = 0
	for _, slot := range r.promptsToCompute {
		s := &b.slots.records[slot]
		if s.promptLeft <= 0 {
			continue // by the estimate, the prompt is complete; markDecoding removes it from the list when the first event comes
		}
		computed := r.computePrompt(s, budget) // 0 if the budget is used up
		s.progress.addStep(step, int32(computed))
		r.stepPromptTokens += computed
		budget -= computed
	}
}

// computePrompt counts up to budget tokens of one request's prompt as computed, and returns how many tokens it counted: 0 if the budget is
// below 0.
func (r *rank) computePrompt(s *slotRecord, budget int64) (computed int64) {
	computed = max(0, min(budget, int64(s.promptLeft)))
	s.promptLeft -= int32(computed)
	r.backlog -= computed
	return computed
}

// promptProgress says in which steps the tokens of a prompt were computed, by the board's estimate.
type promptProgress struct {
	inLastStep   int32  // prompt tokens computed in lastStep
	inStepBefore int32  // prompt tokens computed in the step before lastStep
	earlier      int32  // prompt tokens computed in all steps before these two
	lastStep     uint32 // number of the last step for which the estimate was made; it moves on until the prompt is complete
}

// addStep records that the next step, with this number, computed so many tokens of the prompt. The tokens of the last two steps are kept
// apart, because the board later learns from each step, and the estimate may then be one step ahead of the step from which it learns.
func (k *promptProgress) addStep(number uint32, tokens int32) {
	k.earlier += k.inStepBefore
	k.inStepBefore = k.inLastStep
	k.inLastStep, k.lastStep = tokens, number
}

// computedBefore returns how many prompt tokens were computed before the given step, which brought the first token of the answer and so
// finished the prompt. By the board's estimate, inLastStep tokens were computed in lastStep, inStepBefore in the step before lastStep, and
// earlier in all steps before these two. If lastStep is not later than the given step, its tokens count as computed in the given step,
// because this step must have computed something.
func (k *promptProgress) computedBefore(step uint32) int32 {
	if estimateIsAhead := k.lastStep == step+1; estimateIsAhead { // then inStepBefore tokens were computed in the given step
		return k.earlier
	}
	return k.earlier + k.inStepBefore
}

// computedIn returns how many tokens of a request's prompt a past step computed. firstStep is the number of the step that brought the first
// token of the answer; 0: no token has come. The step firstStep computed the whole rest of the prompt, whatever the board had estimated.
// For steps before it, the board's estimate decides (s.progress). A new estimate is made for each step until the prompt is complete.
//
// sure is false if the board estimates that this step finished the prompt, but the step brought no token, so the estimate is wrong.
func (s *slotRecord) computedIn(step, firstStep uint32) (tokens int64, sure bool) {
	k := &s.progress
	if s.tokensBeforePreemption > 0 { // firstStep is from before the preemption, so only the estimate is left
		return k.estimateFor(step), true
	}
	switch {
	case firstStep == step: // this step brought the first token, so it computed all that earlier steps had not
		return int64(max(0, s.newTokens-k.computedBefore(step))), true
	case firstStep != 0 && !isAfter(firstStep, step): // the prompt was complete before this step
		return 0, true
	case k.lastStep == step && k.inLastStep > 0: // by the estimate, this step finished the prompt: none was made for a later step
		return 0, false
	}
	return k.estimateFor(step), true
}

// estimateFor returns how many tokens of the prompt a step computed, by the board's estimate. It has the tokens of two steps: of the last
// step for which the estimate was made, and of the step before it. For any other step, the result is 0.
func (k *promptProgress) estimateFor(step uint32) int64 {
	switch step {
	case k.lastStep:
		return int64(k.inLastStep)
	case k.lastStep - 1:
		return int64(k.inStepBefore)
	}
	return 0
}

// requeuePreempted records that the rank's engine ran out of KV room and preempted a request: the decoding request that it admitted last.
// It will compute this request's prompt and generated tokens again, before all other prompts. Until then, the request counts as not
// decoding, and nothing of its prompt as computed.
func (b *board) requeuePreempted(r *rank) {
	b.refreshLoad(r)
	newest := int32(-1) // slot of the decoding request that was bound last; -1: no request decodes
	for _, slot := range r.slots {
		s := &b.slots.records[slot]
		if decodes := !s.notDecoding; decodes && (newest < 0 || b.slots.records[newest].boundBefore(s)) {
			newest = slot
		}
	}
	if newest < 0 {
		return // the engine still has to compute the prompts of all requests, so a preemption changes nothing
	}
	s := &b.slots.records[newest]
	request := &r.running[s.pos]
	s.notDecoding, s.tokensBeforePreemption, s.progress = true, request.Generated, promptProgress{}
	r.notDecodingSlots++
	r.notDecodingKV += int64(s.prompt)                    // markDecoding takes off the same number when the request decodes again
	b.addPrompt(r, newest, s.prompt+request.Generated, 0) // at index 0, before all other prompts
}

// storeHoldReport stores the report of a policy that holds entries back, to send them together. The report has the entries for which a rank
// had room in this round for the first time (First), the time for which the oldest entry has been held, and the time at which the policy
// wants to decide again.
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
	// The time is rounded up to whole µs: if the board decided too early, the policy would hold the entries back once more.
	if !math.IsInf(report.NextMs, 1) {
		g.recheckHeldAt = now.Add(time.Duration(max(1, math.Ceil(report.NextMs*1000))) * time.Microsecond)
	}
}

// countRound counts one round: a policy has sent requests that it had held back together to a mixed group. It emits how many ranks of the
// group now have a prompt to compute.
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

// details returns what policies read about a waiting entry in addition to policy.Entry. HeldMs is -1 if no rank had room for the entry yet.
// UrgentInMs is 0 if the entry is urgent already or never will be; policy.Entry.Urgent tells the two apart.
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

// awaitingFirstToken returns how many requests wait for their first token, on the ranks of the group or in the pool. Entries that a policy
// holds back do not count. The other entries of the pool are divided equally among the groups that take requests.
func (b *board) awaitingFirstToken(g *group) float64 {
	onRanks := 0
	for _, r := range g.steppingRanks {
		// A preempted request does not decode either, while its prompt is computed again. But it had its first token before.
		onRanks += r.notDecodingSlots - b.preemptedRequests(r)
	}
	return float64(max(0, onRanks)) + b.poolShare()
}

// preemptedRequests returns how many of the prompts that the rank has yet to compute are of requests that its engine has preempted.
func (b *board) preemptedRequests(r *rank) (n int) {
	for _, slot := range r.promptsToCompute {
		if b.slots.records[slot].tokensBeforePreemption > 0 {
			n++
		}
	}
	return n
}

// poolShare returns how many entries of the pool wait for each group that takes requests, if they are divided equally among these groups.
// Entries that a policy holds back do not count.
func (b *board) poolShare() float64 {
	groups, heldEntries := 0, 0
	for _, other := range b.groups {
		// The largest number and not the sum, because several groups may hold the same entry back.
		heldEntries = max(heldEntries, other.heldEntries)
		if slices.ContainsFunc(other.steppingRanks, (*rank).takesRequests) {
			groups++
		}
	}
	notHeld := max(0, b.pool.Len()-heldEntries)       // heldEntries is of the last decisions, so it may be larger than the pool is now
	return float64(notHeld) / float64(max(1, groups)) // if no group takes requests, the whole pool counts for each group
}

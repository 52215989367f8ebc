package board

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// Mixed ranks prefill and decode. An entry comes without a hand-off, and its rank computes the part of the prompt that is not in its prefix
// cache. When the entry is bound, a slot and the KV of the whole prompt are charged to the rank, but no decode step reads that KV before
// the first event. The backlog of a rank is the number of prompt tokens that it has yet to compute. A policy that sends requests in
// rounds keeps the backlogs of the ranks equal.

// Hit says how many tokens of an entry's prompt a rank has in its prefix cache.
type Hit = policy.Hit

// presumedBudget is how many tokens a step of a rank is assumed to take if Worker.Budget is not known.
const presumedBudget = 2048

// uncached returns how many tokens of the prompt a rank has to compute. It is at least 1, because an engine always computes the last token.
func (w *waitingEntry) uncached(rank int32) int32 {
	for _, h := range w.Hits {
		if h.Worker == rank {
			return max(1, w.prompt()-tokens(h.Tokens))
		}
	}
	return max(1, w.prompt())
}

// addPrompt adds so many tokens of a request's prompt to those that the rank has yet to compute. index is the request's position in the
// order in which the rank computes them.
func (b *board) addPrompt(r *rank, slot, tokens int32, index int) {
	b.slots.records[slot].promptLeft = tokens
	r.backlog += int64(tokens)
	r.toCompute = slices.Insert(r.toCompute, index, slot)
}

// dropPrompt takes the rest of a request's prompt out of the rank's backlog, because it is computed or never will be.
func (b *board) dropPrompt(r *rank, slot int32) {
	if at := slices.Index(r.toCompute, slot); at >= 0 {
		r.toCompute = slices.Delete(r.toCompute, at, at+1)
	}
	s := &b.slots.records[slot]
	r.backlog -= int64(s.promptLeft)
	s.promptLeft = 0
}

// computeMs estimates how long the rank takes to compute its backlog of prompts, in ms, if all ranks of its group compute prompts in the
// same steps; 0: the cost of prompts or the length of steps is not known.
func (r *rank) computeMs() float32 {
	m, _, _ := r.group.steps.Model()
	decodeMs := r.group.steps.Ms(m, r.group.largestLoad)
	if decodeMs <= 0 || m.OwnMs+m.SharedMs+m.PrefillMs <= 0 {
		return 0
	}
	budget := max(1, r.StepBudget()-(len(r.slots)-r.unreadSlots)) // prompt tokens per step: each request that decodes takes one token
	stepMs := float64(decodeMs) + m.PrefillMs + (m.OwnMs*r.slowness()+m.SharedMs)*float64(budget)
	promptSteps := math.Ceil(float64(r.backlog) / float64(budget))
	return float32(stepMs * promptSteps * float64(max(1, r.Interval))) // one of Interval steps computes prompts
}

// compute estimates which prompt tokens the ranks compute in the step that begins now. It takes them off the backlogs, and returns their
// sum. number is the number of the step before, which has just been reported. Each rank computes its token budget less one token for each
// request that decodes, in the order of arrival. Requests that are sent from now on cannot be in this step any more.
func (b *board) compute(g *group, number uint32) (tokens int64) {
	busy := uint64(0)
	for _, r := range g.ranks {
		budget := 0
		if r.Interval <= 1 || number%uint32(r.Interval) == 0 {
			budget = r.StepBudget() - (len(r.slots) - r.unreadSlots) // each request that decodes takes one token of it
		}
		r.computeStep(b, int64(budget), number+1)
		tokens += r.stepPrompt
		if r.stepPrompt > 0 {
			busy++
		}
	}
	g.gathered.steps++
	if busy > 0 {
		g.gathered.prefills++
		g.gathered.ranks += uint64(len(g.ranks))
		g.gathered.idle += uint64(len(g.ranks)) - busy
	}
	return tokens
}

// StepBudget returns how many tokens a step of a mixed rank takes: Budget, or presumedBudget if that is not known.
func (w *Worker) StepBudget() int {
	if w.Budget > 0 {
		return w.Budget
	}
	return presumedBudget
}

// computeStep counts up to budget tokens of the rank's prompts as computed in the step with the number step, first prompts first.
// stepPrompt becomes the sum of these tokens.
func (r *rank) computeStep(b *board, budget int64, step uint32) {
	r.stepPrompt = 0
	for _, slot := range r.toCompute {
		s := &b.slots.records[slot]
		if s.promptLeft <= 0 {
			continue
		}
		n := max(0, min(budget, int64(s.promptLeft)))
		s.promptLeft -= int32(n)
		s.chunks = chunks{before: s.chunks.before + s.chunks.last, last: s.chunks.this, this: int32(n), step: step}
		r.backlog -= n
		r.stepPrompt += n
		budget -= n
	}
}

// chunks says, by the board's estimate, in which steps the tokens of a prompt were computed.
type chunks struct {
	this   int32  // tokens in the step with the number step
	last   int32  // tokens in the step before that one
	before int32  // tokens in all earlier steps
	step   uint32 // number of the last step that computed a part of the prompt
}

// computedBefore returns how many tokens were computed before the given step, which finished the prompt. If the estimate has the last
// chunk (this) in an earlier step, this chunk counts as computed in the given step.
func (k *chunks) computedBefore(step uint32) int32 {
	if k.step == step+1 { // the estimate has a chunk after the step that finished the prompt; the chunk before it was in that step
		return k.before
	}
	return k.before + k.last
}

// computedIn returns how many tokens of a request's prompt a past step computed. joined is the number of the step that brought the
// request's first token; 0: no token has come. The step joined computed the rest of the prompt, whatever the board had estimated.
//
// sure is false if, by the board's estimate, the step computed the last part of the prompt so far, although it brought no token.
func (s *slotRecord) computedIn(step, joined uint32) (tokens int64, sure bool) {
	k := &s.chunks
	switch {
	case s.tokensBefore > 0: // joined is about the time before the preemption, so there is only the board's estimate
		if k.step == step {
			return int64(k.this), true
		}
	case joined == step:
		return int64(max(0, s.newTokens-k.computedBefore(step))), true
	case joined != 0 && !laterStep(joined, step): // the prompt was complete before this step
		return 0, true
	case k.step == step && k.this > 0: // the step brought no token, so how much of the prompt it computed is not certain
		return 0, false
	}
	if k.step == step+1 { // the estimate has already gone on by one step
		return int64(k.last), true
	}
	return 0, true
}

// computeAgain records that the rank's engine ran out of KV room and preempted a request. The engine takes the one that it admitted last,
// and will compute its prompt and the tokens that it had generated again.
func (b *board) computeAgain(r *rank) {
	b.refresh(r)
	last := int32(-1)
	for _, slot := range r.slots {
		s := &b.slots.records[slot]
		if decodes := !s.unread; decodes && (last < 0 || b.slots.records[last].older(s)) {
			last = slot
		}
	}
	if last < 0 {
		return // no request decodes, so the prompts of all will be computed in any case
	}
	s := &b.slots.records[last]
	request := &r.running[s.pos]
	s.unread, s.tokensBefore, s.chunks = true, request.Generated, chunks{}
	r.unreadSlots++
	r.unreadKV += int64(s.prompt)
	b.addPrompt(r, last, s.prompt+request.Generated, 0)
}

// takeReport stores the report of a policy that holds entries back, to send them together. The report says which entries could have been
// sent for the first time in this round, since when the policy has held the first entry, and when it wants to decide again.
func (b *board) takeReport(g *group, report policy.Gathered, now time.Time) {
	for _, id := range report.First {
		if w, ok := b.waiting[id]; ok {
			w.since = now
			b.waiting[id] = w
		}
	}
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	g.gathered.heldSince, g.gathered.maxHold = now.Add(-seconds(report.HeldS)), seconds(report.MaxHoldS)
	g.wakeHeld = time.Time{}
	if !math.IsInf(report.NextMs, 1) { // rounded up to whole µs, because a moment too early the policy would hold the entries once more
		g.wakeHeld = now.Add(time.Duration(max(1, math.Ceil(report.NextMs*1000))) * time.Microsecond)
	}
}

// countRound counts that a policy has sent requests together to a mixed group, and emits how many ranks now have a prompt to compute.
func (b *board) countRound(g *group) {
	busy := 0
	for _, r := range g.ranks {
		if r.backlog > 0 {
			busy++
		}
	}
	g.gathered.rounds++
	g.gathered.filled += uint64(busy)
	b.emit(Effect{Kind: EffectSent, Group: b.key(g), Label: b.label(g), Count: busy})
}

// details returns what policies read of a waiting entry beside policy.Entry. HeldMs is -1 if the entry could not be sent yet.
func (w *waitingEntry) details(now time.Time) policy.EntryDetails {
	details := policy.EntryDetails{Hits: w.Hits, HeldMs: -1}
	if !w.since.IsZero() {
		details.HeldMs = float64(now.Sub(w.since)) / float64(time.Millisecond)
	}
	if at := w.Entry.UrgentAt(); at.After(now) {
		details.UrgentInMs = float64(at.Sub(now)) / float64(time.Millisecond)
	}
	return details
}

// awaiting returns how many requests wait for their first token, on the group's ranks or in the pool. Entries that a policy holds back do
// not count. The other entries of the pool are divided equally among the groups that take requests.
func (b *board) awaiting(g *group) float64 {
	onRanks := 0
	for _, r := range g.ranks {
		onRanks += r.unreadSlots
		for _, slot := range r.toCompute {
			if b.slots.records[slot].tokensBefore > 0 { // it had its first token before it was preempted
				onRanks--
			}
		}
	}
	groups, held := 0, 0
	for _, other := range b.groups {
		held = max(held, other.held) // not a sum: all groups decide about the same pool, so several may hold the same entry
		if slices.ContainsFunc(other.ranks, (*rank).takes) {
			groups++
		}
	}
	// With no group that takes requests, the whole pool counts.
	return float64(max(0, onRanks)) + float64(max(0, b.pool.Len()-held))/float64(max(1, groups))
}

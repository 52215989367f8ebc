package board

import (
	"math"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
)

// Mixed ranks prefill and decode. An entry comes without a hand-off, and its rank computes the part of the prompt that is not
// in its prefix cache. A slot and the KV of the whole prompt are charged when the entry is bound. As for early ranks,
// no step reads that KV before the first event. The backlog of a rank is the prompt tokens that it has yet to
// compute. A policy that sends requests in rounds keeps the backlogs of the ranks level.

// Hit is what a rank holds of an entry's prompt.
type Hit = policy.Hit

// presumedBudget is how many tokens a step of a rank is assumed to take if Worker.Budget is not known.
const presumedBudget = 2048

// uncached returns how many tokens of the prompt a rank has to compute. An engine always computes the last token.
func (w *entrant) uncached(rank int32) int32 {
	for _, h := range w.hits {
		if h.Worker == rank {
			return max(1, w.prompt()-tokens(h.Tokens))
		}
	}
	return max(1, w.prompt())
}

// addPrompt adds a request to those whose prompts the rank has yet to compute: so many tokens of it. at is the request's place in their
// order.
func (b *board) addPrompt(r *rank, slot, tokens int32, at int) {
	b.ledger.table[slot].promptLeft = tokens
	r.backlog += int64(tokens)
	r.toCompute = slices.Insert(r.toCompute, at, slot)
}

// dropPrompt takes what is left of a request's prompt out of the rank's backlog: it is computed, or will not be.
func (b *board) dropPrompt(r *rank, slot int32) {
	if at := slices.Index(r.toCompute, slot); at >= 0 {
		r.toCompute = slices.Delete(r.toCompute, at, at+1)
	}
	c := &b.ledger.table[slot]
	r.backlog -= int64(c.promptLeft)
	c.promptLeft = 0
}

// computeMs returns how long the rank takes for all prompts that it has yet to compute, in ms, if all ranks of its group compute
// prompts meanwhile; 0: the cost of prompts or the length of steps is not known.
func (r *rank) computeMs() float32 {
	m, _, _ := r.group.steps.Model()
	decodes := r.group.steps.Ms(m, r.group.largestLoad)
	if decodes <= 0 || m.OwnMs+m.SharedMs+m.PrefillMs <= 0 {
		return 0
	}
	budget := max(1, r.StepBudget()-(len(r.slots)-r.unreadSlots))
	step := float64(decodes) + m.PrefillMs + (m.OwnMs*r.slowness()+m.SharedMs)*float64(budget)
	return float32(step * math.Ceil(float64(r.backlog)/float64(budget)) * float64(max(1, r.Interval)))
}

// compute takes the tokens off the ranks' backlogs that they compute in the step that begins, and returns their sum. number is that of
// the step before, which has just been reported. Each rank computes its token budget less one token for each request that decodes, in
// the order of arrival. Requests that are sent now find the remaining backlog before them: they cannot be in this step any more.
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

// computeStep takes up to budget tokens off the prompts that the rank has yet to compute, in their order, as computed in the step with
// the number step. stepPrompt becomes their sum.
func (r *rank) computeStep(b *board, budget int64, step uint32) {
	r.stepPrompt = 0
	for _, slot := range r.toCompute {
		c := &b.ledger.table[slot]
		if c.promptLeft <= 0 {
			continue
		}
		n := max(0, min(budget, int64(c.promptLeft)))
		c.promptLeft -= int32(n)
		c.chunks = chunks{before: c.chunks.before + c.chunks.last, last: c.chunks.this, this: int32(n), step: step}
		r.backlog, r.stepPrompt, budget = r.backlog-n, r.stepPrompt+n, budget-n
	}
}

// chunks are how many tokens of a prompt have been computed, as the board estimates it: this in the step with the number step,
// last in the step before, and before in all earlier steps.
type chunks struct {
	before, last, this int32
	step               uint32
}

// computedBefore returns how many tokens were computed before the given step, which finished the prompt. If the first token came later
// than the board expected, the chunk that the board took for the last one counts as computed in the given step.
func (k *chunks) computedBefore(step uint32) int32 {
	if k.step == step+1 {
		return k.before
	}
	return k.before + k.last
}

// computedIn returns how many tokens of a request's prompt a past step computed. joined is the step that brought the request's first
// token: this step computed all that was left of the prompt, whatever the board had estimated, and however late the request came
// into the engine's queue.
//
// sure is false if the step finished the prompt by the board's estimate, but brought no first token.
func (c *charge) computedIn(step, joined uint32) (tokens int64, sure bool) {
	k := &c.chunks
	switch {
	case c.tokensBefore > 0: // joined is the step of its first token before the preemption, so only the estimate is left
		if k.step == step {
			return int64(k.this), true
		}
	case joined == step:
		return int64(max(0, c.newTokens-k.computedBefore(step))), true
	case joined != 0 && !laterStep(joined, step):
		return 0, true
	case k.step == step && k.this > 0:
		return 0, false
	}
	if k.step == step+1 {
		return int64(k.last), true
	}
	return 0, true
}

// computeAgain records that the rank's engine ran out of KV room and preempted the last admitted request: its prompt and the tokens that
// it had generated are computed again.
func (b *board) computeAgain(r *rank) {
	b.refresh(r)
	last := int32(-1)
	for _, slot := range r.slots {
		if c := &b.ledger.table[slot]; !c.unread && (last < 0 || b.ledger.table[last].older(c)) {
			last = slot
		}
	}
	if last < 0 {
		return
	}
	c := &b.ledger.table[last]
	request := &r.running[c.pos]
	c.unread, c.tokensBefore, c.chunks = true, request.Generated, chunks{}
	r.unreadSlots++
	r.unreadKV += int64(c.prompt)
	b.addPrompt(r, last, c.prompt+request.Generated, 0)
}

// takeReport takes over what a policy reports of its round: which entries could be sent for the first time, since when the first of the
// held ones could have been, and when the policy wants to decide again.
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
	if !math.IsInf(report.NextMs, 1) { // rounded up to whole µs, so that the policy does not decide a moment too early
		g.wakeHeld = now.Add(time.Duration(max(1, math.Ceil(report.NextMs*1000))) * time.Microsecond)
	}
}

// countRound counts a round that was sent, and emits how many ranks have a prompt to compute then.
func (b *board) countRound(g *group) {
	n := 0
	for _, r := range g.ranks {
		if r.backlog > 0 {
			n++
		}
	}
	g.gathered.rounds++
	g.gathered.filled += uint64(n)
	b.emit(Effect{Kind: EffectSent, Group: b.key(g), Label: b.label(g), Count: n})
}

// wait returns what policies read of a waiting entry beside policy.Entry.
func (w *entrant) wait(now time.Time) policy.Wait {
	e := policy.Wait{Hits: w.hits, HeldMs: -1, Express: w.entry.Express}
	if !w.since.IsZero() {
		e.HeldMs = float64(now.Sub(w.since)) / float64(time.Millisecond)
	}
	if at := w.entry.UrgentAt(); at.After(now) {
		e.UrgentInMs = float64(at.Sub(now)) / float64(time.Millisecond)
	}
	return e
}

// awaiting returns how many requests wait for their first token on a group's ranks or in the pool. Held entries do not count. The other
// entries of the pool are divided equally among the groups that take requests.
func (b *board) awaiting(g *group) float64 {
	onRanks := 0
	for _, r := range g.ranks {
		onRanks += r.unreadSlots
		for _, slot := range r.toCompute {
			if b.ledger.table[slot].tokensBefore > 0 { // it was preempted and already had its first token
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

package virtual

import (
	"slices"

	"evenkeel/dispatcher/step"
)

// Mixed simulates a group of ranks that prefill and decode, and whose steps wait for the slowest rank. In each step, a rank computes at
// most Budget tokens: first for running requests, in the order of their admission, and then for waiting requests, as real engines do.
type Mixed struct {
	Law          step.Law
	Budget       int32 // most tokens that a rank computes in a step
	Slots        int   // most requests that run on a rank at a time
	KVCapacity   int64 // KV tokens of a rank; 0: unlimited
	Block        int64 // tokens per KV block, of which a request holds whole ones; 0 and 1: single tokens
	Interval     int64 // prompts are computed only in every Interval-th step; 0 and 1: in each step
	AfterPrompts bool  // the Interval begins anew with each step in which a rank computes prompts, as in SGLang
	PrefillFirst bool  // a rank that computes a prompt decodes nothing in the same step, as in SGLang
	Delay        int   // number of steps for which new prompts wait until each rank has one, as in SGLang 0.5.23; 0: they do not wait

	Ranks    []MixedRank
	RankWork []step.Rank // work of each rank in the step that began last
	Step     int64       // number of the step in progress or, if there is none, of the next step
	Ends     float64     // when the step in progress ends, in ms of virtual time; Never: no step is in progress

	VaryStepMs func(ms float64) float64 // changes the length that the Law gives for a step, in ms; nil: no change
	// Cached returns how many prompt tokens are in the rank's prefix cache when it admits the request.
	Cached   func(rank int, q *MixedRequest) int32
	Token    func(rank int, q *MixedRequest) // called for each token that a request gets
	Finished func(rank int, q *MixedRequest) // called when a request has got its last token and has left its rank
	Computed func(rank int, q *MixedRequest) // called when a step has computed a part of a prompt; may be nil

	Prefilling  int   // number of ranks that compute prompts in the step that began last
	Preemptions int   // number of requests preempted so far
	rest        int64 // number of steps, from the next one on, without prompts because of AfterPrompts
	heldSteps   int   // number of steps in a row for which new prompts have waited because of Delay
}

// MixedRank is a rank that prefills and decodes: the requests in its engine's queue, and those that run.
type MixedRank struct {
	Waiting     []MixedRequest // requests in the engine's queue, first come, first served
	Running     []MixedRequest // running requests in the order of admission
	KV          int64          // KV tokens of the running requests, each rounded up to whole blocks
	leftWaiting bool           // in its last step with prompts, the rank could not admit all waiting requests
}

// MixedRequest is a request on a rank that prefills and decodes.
type MixedRequest struct {
	Job       int32 // identifies the request for the caller
	Slot      int32 // index of its slot on the board, as in board.Counts
	Prompt    int32 // prompt tokens
	Left      int32 // tokens that the request will still generate
	Gen       int32 // tokens generated so far
	computed  int32 // how many of the toCompute tokens are computed or were cached
	toCompute int32 // tokens to compute before the next token: the prompt and, after a preemption, the answer so far
	scheduled int32 // tokens that the step in progress computes for the request

	firstStep uint32 // number of the step of its first token, as the group reported it (StepCounter.Number); 0: no token yet
}

// isPrefilling says whether tokens of the request are left to compute, so that it does not decode yet.
func (q *MixedRequest) isPrefilling() bool { return q.computed < q.toCompute }

// Done returns how many tokens of the prompt are computed or were cached. After a preemption, it includes tokens of the answer.
func (q *MixedRequest) Done() int { return int(q.computed) }

// kvTokens returns the KV tokens of the request's prompt and answer so far, even if not all are computed yet.
func (q *MixedRequest) kvTokens() int64 { return int64(q.Prompt) + int64(q.Gen) }

// Add puts a request at the end of a rank's queue.
func (g *Mixed) Add(rank int, q MixedRequest) {
	q.toCompute = q.Prompt
	g.Ranks[rank].Waiting = append(g.Ranks[rank].Waiting, q)
}

// Drop takes a request away from a rank, whether it waits or runs, and frees its KV. It does nothing if the rank does not have the request.
func (g *Mixed) Drop(rank int, job int32) {
	r := &g.Ranks[rank]
	isJob := func(q MixedRequest) bool { return q.Job == job }
	r.Waiting = slices.DeleteFunc(r.Waiting, isJob)
	if i := slices.IndexFunc(r.Running, isJob); i >= 0 {
		r.KV -= g.wholeBlocks(r.Running[i].kvTokens())
		r.Running = slices.Delete(r.Running, i, i+1)
	}
}

// Begin begins a step if none is in progress and a rank has work. now is the present time in ms.
func (g *Mixed) Begin(now float64) {
	if g.Ends < Never { // a step is in progress
		return
	}
	if !slices.ContainsFunc(g.Ranks, func(r MixedRank) bool { return r.hasDecoding() }) {
		g.rest = 0 // SGLang's loop goes on at once where no rank has anything to do
	}
	newPrompts := g.decideNewPrompts()
	busy := false
	g.Prefilling, g.RankWork = 0, g.RankWork[:0]
	for i := range g.Ranks {
		work := g.schedule(i, newPrompts)
		g.RankWork = append(g.RankWork, work)
		busy = busy || work.Requests > 0 || work.Prompt > 0
		if work.Prompt > 0 {
			g.Prefilling++
		}
	}
	if busy { // otherwise no step begins
		g.rest = max(0, g.rest-1)
		if g.Prefilling > 0 && g.AfterPrompts {
			g.rest = max(0, g.Interval-1)
		}
		ms := g.Law.Ms(g.RankWork)
		if g.VaryStepMs != nil {
			ms = g.VaryStepMs(ms)
		}
		g.Ends = now + ms
	}
}

// mayCompute says whether a rank computes prompts in this step, by the Interval. vLLM ignores the Interval on a rank that decodes no
// request, and as long as requests wait that did not fit into the rank's last step with prompts.
func (g *Mixed) mayCompute(r *MixedRank) bool {
	if g.AfterPrompts {
		return g.rest == 0
	}
	inInterval := g.Interval <= 1 || g.Step%g.Interval == 0
	return inInterval || r.leftWaiting || !r.hasDecoding()
}

// decideNewPrompts says whether ranks may begin new prompts in this step. With Delay, new prompts wait until each rank has one, because a
// prompt on one rank makes the step of all ranks longer. They wait for at most Delay-1 steps in a row, and only while a rank decodes.
// decideNewPrompts counts these steps, so it must be called once per step.
func (g *Mixed) decideNewPrompts() bool {
	if g.Delay == 0 { // new prompts never wait
		return true
	}
	withNewPrompt := 0 // number of ranks
	for i := range g.Ranks {
		if g.hasNewPrompt(i) {
			withNewPrompt++
		}
	}
	if withNewPrompt == 0 { // there is nothing to wait for, and heldSteps does not change
		return true
	}
	mayWait := withNewPrompt < len(g.Ranks) && g.heldSteps < g.Delay-1
	// If no rank decodes, a wait would only leave the ranks idle.
	if mayWait && slices.ContainsFunc(g.Ranks, func(r MixedRank) bool { return r.hasDecoding() }) {
		g.heldSteps++
		return false
	}
	g.heldSteps = 0
	return true
}

// hasDecoding says whether any request on the rank decodes.
func (r *MixedRank) hasDecoding() bool {
	return slices.ContainsFunc(r.Running, func(q MixedRequest) bool { return !q.isPrefilling() })
}

// hasUncomputedPrompt says whether the prompt of any running request is not computed yet.
func (r *MixedRank) hasUncomputedPrompt() bool {
	return slices.ContainsFunc(r.Running, func(q MixedRequest) bool { return q.isPrefilling() })
}

// hasNewPrompt says whether the i-th rank has a prompt to compute now: it has begun one, or could admit a request.
func (g *Mixed) hasNewPrompt(i int) bool {
	r := &g.Ranks[i]
	return r.hasUncomputedPrompt() || g.canAdmit(r)
}

// canAdmit says whether a rank has a slot and KV room for the first request that waits, with its whole prompt.
func (g *Mixed) canAdmit(r *MixedRank) bool {
	return len(r.Waiting) > 0 && len(r.Running) < g.Slots && g.hasRoomFor(r, &r.Waiting[0])
}

// hasRoomFor says whether a rank has KV room for a request and its next token, in addition to the next tokens of the running requests. A
// rank without running requests takes any request, because a request that is too large would otherwise wait forever.
func (g *Mixed) hasRoomFor(r *MixedRank, q *MixedRequest) bool {
	unlimited, empty := g.KVCapacity == 0, len(r.Running) == 0
	return unlimited || empty || r.KV+g.kvGrowth(r)+g.wholeBlocks(q.kvTokens()+1) <= g.KVCapacity
}

// wholeBlocks returns how many KV tokens a request with so many tokens takes, in whole blocks.
func (g *Mixed) wholeBlocks(tokens int64) int64 {
	if g.Block <= 1 {
		return tokens
	}
	return (tokens + g.Block - 1) / g.Block * g.Block
}

// kvGrowth returns by how many KV tokens the rank's KV grows when each running request gets its next token.
func (g *Mixed) kvGrowth(r *MixedRank) (kv int64) {
	if g.Block <= 1 {
		return int64(len(r.Running))
	}
	for i := range r.Running {
		if r.Running[i].kvTokens()%g.Block == 0 { // the request's last block is full, so its next token needs a new block
			kv += g.Block
		}
	}
	return kv
}

// schedule decides the work of the i-th rank in the step that begins, and returns it. It first preempts requests if KV room is short. The
// token budget goes first to the running requests. If newPrompts is true, the rest goes to requests that the rank admits now. With
// Interval, a rank may compute prompts only in every Interval-th step. In the steps between, it only decodes, except if it has nothing to
// decode, or if its last step with prompts has left requests waiting (see mayCompute).
func (g *Mixed) schedule(i int, newPrompts bool) (work step.Rank) {
	r := &g.Ranks[i]
	mayCompute := g.mayCompute(r)
	preempted := g.preempt(r)
	mayAdmit := newPrompts && mayCompute && !preempted // a rank that preempts a request admits none in the same step
	// With PrefillFirst, a rank that computes a prompt decodes nothing in the same step.
	prefillOnly := g.PrefillFirst && mayCompute && (r.hasUncomputedPrompt() || mayAdmit && g.canAdmit(r))
	work, budget := r.scheduleRunning(g.Budget, mayCompute, !prefillOnly)
	if mayAdmit {
		work.Prompt += g.admit(i, budget)
	}
	// mayCompute reads leftWaiting in later steps. A step that may not compute prompts admits no request, so it does not show whether
	// all of them fit.
	if mayCompute {
		r.leftWaiting = len(r.Waiting) > 0
	}
	return work
}

// scheduleRunning divides the token budget of a step among the running requests, in the order of their admission. With mayCompute, a
// request that is still prefilling gets as many tokens of its prompt as the budget has left. With mayDecode, any other request gets one
// token. scheduleRunning sets scheduled of each request, the number of tokens that the step computes for it. It returns the work, and the
// budget that is left.
func (r *MixedRank) scheduleRunning(budget int32, mayCompute, mayDecode bool) (work step.Rank, left int32) {
	for k := range r.Running {
		q := &r.Running[k]
		q.scheduled = 0
		switch {
		case q.isPrefilling():
			if mayCompute {
				q.scheduled = min(budget, q.toCompute-q.computed)
				work.Prompt += float64(q.scheduled)
			}
		case budget > 0 && mayDecode:
			q.scheduled = 1
			work.Requests++
			work.KV += float64(q.kvTokens())
		}
		budget -= q.scheduled
	}
	return work, budget
}

// admit lets waiting requests of the i-th rank run, as long as the rank has slots, KV room and token budget (budget) left. It returns how
// many tokens of their prompts the step computes.
func (g *Mixed) admit(i int, budget int32) (tokens float64) {
	r := &g.Ranks[i]
	for budget > 0 && g.canAdmit(r) {
		q := r.Waiting[0]
		r.Waiting = slices.Delete(r.Waiting, 0, 1)
		q.computed = min(q.toCompute-1, g.Cached(i, &q)) // the last token is always computed, because the next token follows from it
		q.scheduled = min(budget, q.toCompute-q.computed)
		tokens += float64(q.scheduled)
		budget -= q.scheduled
		r.KV += g.wholeBlocks(q.kvTokens())
		r.Running = append(r.Running, q)
	}
	return tokens
}

// preempt puts running requests back into the queue, the last admitted first, while the rank has no KV room for the next tokens of all
// running requests. One request always stays, so that the rank can go on. The KV of preempted requests is lost and will be computed again.
// preempted says whether any request was preempted.
func (g *Mixed) preempt(r *MixedRank) (preempted bool) {
	for g.KVCapacity > 0 && len(r.Running) > 1 && r.KV+g.kvGrowth(r) > g.KVCapacity {
		q := r.Running[len(r.Running)-1]
		r.Running = r.Running[:len(r.Running)-1]
		r.KV -= g.wholeBlocks(q.kvTokens())
		q.computed, q.toCompute = 0, q.Prompt+q.Gen
		r.Waiting = slices.Insert(r.Waiting, 0, q)
		g.Preemptions++
		preempted = true
	}
	return preempted
}

// Finish ends the step in progress. Each request that decoded, or whose prompt is now computed, gets a token. Requests that have all their
// tokens leave.
func (g *Mixed) Finish() {
	for i := range g.Ranks {
		r := &g.Ranks[i]
		remaining := r.Running[:0] // reuses the memory of Running: it never grows past the request that is looked at
		for k := range r.Running {
			q := &r.Running[k]
			kvBefore := g.wholeBlocks(q.kvTokens())
			g.advance(i, q)
			r.KV += g.wholeBlocks(q.kvTokens()) - kvBefore // the next token may need a new block
			if q.Left > 0 {
				remaining = append(remaining, *q)
				continue
			}
			r.KV -= g.wholeBlocks(q.kvTokens())
			g.Finished(i, q)
		}
		r.Running = remaining
	}
	g.Step++
	g.Ends = Never
}

// advance updates a request by the tokens that the step has computed for it (scheduled). If nothing is left to compute, the request gets
// its next token. scheduled then becomes 0. In a request that is still prefilling it stays, until schedule sets it anew for the next step.
func (g *Mixed) advance(rank int, q *MixedRequest) {
	if q.isPrefilling() {
		q.computed += q.scheduled
		if q.scheduled > 0 && g.Computed != nil {
			g.Computed(rank, q)
		}
	}
	if q.scheduled == 0 || q.isPrefilling() { // the request had no part in the step, or its prompt is not fully computed yet
		return
	}
	q.scheduled = 0
	q.Gen++
	q.Left--
	g.Token(rank, q)
}

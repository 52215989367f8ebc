package virtual

import (
	"slices"

	"evenkeel/dispatcher/step"
)

// Mixed simulates a group of ranks that prefill and decode, and whose steps wait for the slowest
// rank. In each step, a rank computes at most Budget tokens: first for running requests, in the
// order of their admission, then for waiting ones, as real engines do.
type Mixed struct {
	Law          step.Law
	Budget       int32 // most tokens that a rank computes in a step
	Slots        int   // most running requests of a rank
	KVCapacity   int64 // KV tokens of a rank; 0: unlimited
	Block        int64 // tokens per KV block; 0 and 1: single tokens
	Interval     int64 // prompts are computed only in every Interval-th step; 0 and 1: in each step
	AfterPrompts bool  // the Interval begins anew with each step with prompts, as in SGLang
	PrefillFirst bool  // a rank that computes a prompt decodes nothing in the same step, as in SGLang
	Delay        int   // steps for which new prompts wait until each rank has one, as in SGLang 0.5.23; 0: they do not wait

	Ranks    []MixedRank
	RankWork []step.Rank // work of each rank in the step that began last
	Step     int64       // number of the step in progress or, if there is none, of the next step
	Ends     float64     // when the step in progress ends, in ms of virtual time; Never: there is none

	VaryStepMs func(ms float64) float64 // changes the length that the Law gives; nil: no change
	// Cached returns how many prompt tokens are in the rank's prefix cache at the admission.
	Cached   func(rank int, q *MixedRequest) int32
	Token    func(rank int, q *MixedRequest) // called for each token that a request gets
	Finished func(rank int, q *MixedRequest) // called when a request has got its last token and has left its rank
	Computed func(rank int, q *MixedRequest) // called when a step has computed a part of a prompt; may be nil

	Prefilling  int   // ranks that compute prompts in the step that began last
	Preemptions int   // number of requests preempted so far
	rest        int64 // steps, from the next one on, without prompts because of AfterPrompts
	heldSteps   int   // steps in a row for which new prompts have waited because of Delay
}

// MixedRank is a rank that prefills and decodes.
type MixedRank struct {
	Waiting     []MixedRequest // in the engine's queue, first come, first served
	Running     []MixedRequest // in the order of admission
	KV          int64          // KV tokens of the running requests, in whole blocks
	leftWaiting bool           // in its last step with prompts, the rank could not admit all waiting requests
}

// MixedRequest is a request on such a rank.
type MixedRequest struct {
	Job       int32 // identifies the request for the caller
	Slot      int32 // index of its slot, as in board.Counts
	Prompt    int32 // tokens
	Left      int32 // tokens that the request will still generate
	Gen       int32 // tokens generated so far
	computed  int32 // how many of the toCompute tokens are computed or were cached
	toCompute int32 // tokens to compute before the next token: the prompt and, after a preemption, the answer
	scheduled int32 // tokens that the step in progress computes

	firstStep uint32 // step of its first token (StepCounter.Number); 0: no token yet
}

func (q *MixedRequest) isPrefilling() bool { return q.computed < q.toCompute }

// Done returns how many prompt tokens are computed or were cached; after a preemption, it includes
// tokens of the answer.
func (q *MixedRequest) Done() int { return int(q.computed) }

// kvTokens includes tokens that are not computed yet.
func (q *MixedRequest) kvTokens() int64 { return int64(q.Prompt) + int64(q.Gen) }

// Add puts a request at the end of a rank's queue.
func (g *Mixed) Add(rank int, q MixedRequest) {
	q.toCompute = q.Prompt
	g.Ranks[rank].Waiting = append(g.Ranks[rank].Waiting, q)
}

// Drop takes a request away from a rank, whether it waits or runs, if it is there.
func (g *Mixed) Drop(rank int, job int32) {
	r := &g.Ranks[rank]
	isJob := func(q MixedRequest) bool { return q.Job == job }
	r.Waiting = slices.DeleteFunc(r.Waiting, isJob)
	if i := slices.IndexFunc(r.Running, isJob); i >= 0 {
		r.KV -= g.wholeBlocks(r.Running[i].kvTokens())
		r.Running = slices.Delete(r.Running, i, i+1)
	}
}

// Begin begins a step if none is in progress and a rank has work.
func (g *Mixed) Begin(now float64) {
	if g.Ends < Never {
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
	if busy {
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

// mayCompute says whether the rank may compute prompts by the Interval. vLLM ignores the Interval
// on a rank that decodes no request, and as long as requests wait that did not fit into the rank's
// last step with prompts.
func (g *Mixed) mayCompute(r *MixedRank) bool {
	if g.AfterPrompts {
		return g.rest == 0
	}
	inInterval := g.Interval <= 1 || g.Step%g.Interval == 0
	return inInterval || r.leftWaiting || !r.hasDecoding()
}

// decideNewPrompts says whether ranks may begin new prompts. With Delay, they wait until each rank
// has one, because a prompt on one rank makes the step of all ranks longer: for at most Delay-1
// steps in a row, and only while a rank decodes. It must be called once per step.
func (g *Mixed) decideNewPrompts() bool {
	if g.Delay == 0 {
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
	if mayWait && slices.ContainsFunc(g.Ranks, func(r MixedRank) bool { return r.hasDecoding() }) {
		g.heldSteps++
		return false
	}
	g.heldSteps = 0
	return true
}

func (r *MixedRank) hasDecoding() bool {
	return slices.ContainsFunc(r.Running, func(q MixedRequest) bool { return !q.isPrefilling() })
}

func (r *MixedRank) hasUncomputedPrompt() bool {
	return slices.ContainsFunc(r.Running, func(q MixedRequest) bool { return q.isPrefilling() })
}

func (g *Mixed) hasNewPrompt(i int) bool {
	r := &g.Ranks[i]
	return r.hasUncomputedPrompt() || g.canAdmit(r)
}

func (g *Mixed) canAdmit(r *MixedRank) bool {
	return len(r.Waiting) > 0 && len(r.Running) < g.Slots && g.hasRoomFor(r, &r.Waiting[0])
}

// A rank without running requests takes any request, because one that is too large would otherwise
// wait forever.
func (g *Mixed) hasRoomFor(r *MixedRank, q *MixedRequest) bool {
	unlimited, empty := g.KVCapacity == 0, len(r.Running) == 0
	return unlimited || empty || r.KV+g.kvGrowth(r)+g.wholeBlocks(q.kvTokens()+1) <= g.KVCapacity
}

func (g *Mixed) wholeBlocks(tokens int64) int64 {
	if g.Block <= 1 {
		return tokens
	}
	return (tokens + g.Block - 1) / g.Block * g.Block
}

// kvGrowth is that of the next token of each running request.
func (g *Mixed) kvGrowth(r *MixedRank) (kv int64) {
	if g.Block <= 1 {
		return int64(len(r.Running))
	}
	for i := range r.Running {
		if r.Running[i].kvTokens()%g.Block == 0 { // the next token needs a new block
			kv += g.Block
		}
	}
	return kv
}

func (g *Mixed) schedule(i int, newPrompts bool) (work step.Rank) {
	r := &g.Ranks[i]
	mayCompute := g.mayCompute(r)
	preempted := g.preempt(r)
	mayAdmit := newPrompts && mayCompute && !preempted // a rank that preempts a request admits none in the same step
	prefillOnly := g.PrefillFirst && mayCompute && (r.hasUncomputedPrompt() || mayAdmit && g.canAdmit(r))
	work, budget := r.scheduleRunning(g.Budget, mayCompute, !prefillOnly)
	if mayAdmit {
		work.Prompt += g.admit(i, budget)
	}
	// A step that may not compute prompts does not show whether all waiting requests fit.
	if mayCompute {
		r.leftWaiting = len(r.Waiting) > 0
	}
	return work
}

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

func (g *Mixed) admit(i int, budget int32) (tokens float64) {
	r := &g.Ranks[i]
	for budget > 0 && g.canAdmit(r) {
		q := r.Waiting[0]
		r.Waiting = slices.Delete(r.Waiting, 0, 1)
		q.computed = min(q.toCompute-1, g.Cached(i, &q)) // the last token is always computed, because the next one follows from it
		q.scheduled = min(budget, q.toCompute-q.computed)
		tokens += float64(q.scheduled)
		budget -= q.scheduled
		r.KV += g.wholeBlocks(q.kvTokens())
		r.Running = append(r.Running, q)
	}
	return tokens
}

// preempt puts running requests back into the queue, the last admitted first. One always stays, so
// that the rank can go on. The KV of preempted requests is lost.
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

// Finish ends the step in progress. Each request that decoded, or whose prompt is now computed,
// gets a token.
func (g *Mixed) Finish() {
	for i := range g.Ranks {
		r := &g.Ranks[i]
		remaining := r.Running[:0] // reuses the memory of Running: it never grows past the request that is looked at
		for k := range r.Running {
			q := &r.Running[k]
			kvBefore := g.wholeBlocks(q.kvTokens())
			g.advance(i, q)
			r.KV += g.wholeBlocks(q.kvTokens()) - kvBefore
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

// In a request that is still prefilling, scheduled stays until schedule sets it anew.
func (g *Mixed) advance(rank int, q *MixedRequest) {
	if q.isPrefilling() {
		q.computed += q.scheduled
		if q.scheduled > 0 && g.Computed != nil {
			g.Computed(rank, q)
		}
	}
	if q.scheduled == 0 || q.isPrefilling() {
		return
	}
	q.scheduled = 0
	q.Gen++
	q.Left--
	g.Token(rank, q)
}

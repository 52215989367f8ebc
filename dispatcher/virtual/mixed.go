package virtual

import (
	"slices"

	"evenkeel/dispatcher/step"
)

// Mixed is a group of ranks behind one barrier that prefill and decode, with a scheduler like that of engines: in each step a rank
// computes at most Budget tokens, first of the requests that run, in the order of their admission, then of those that wait.
type Mixed struct {
	Law      step.Law
	Budget   int32 // most tokens that a rank computes in a step
	Slots    int   // most requests that run on a rank
	Room     int64 // KV tokens of a rank; 0: unlimited
	Block    int64 // tokens of a KV block, since a request holds whole blocks; 0 and 1: single tokens
	Interval int64 // prompts are computed only in each step whose number is a multiple of this; 0 and 1: in each step
	First    bool  // a rank that can compute a prompt does not decode in that step, as those of SGLang
	Delay    int   // steps for which no prompt is begun until each rank has one, as SGLang 0.5.23 holds them; 0: they are not held

	Ranks []MixedRank
	Does  []step.Rank // what each rank does in the step that began last
	Step  int64       // number of the step in progress, else of the next one
	Ends  float64     // when the step in progress ends, in ms of virtual time; Never: no step is in progress

	Lasts    func(ms float64) float64      // how long a step takes for which the law says so many ms; nil: as long
	Cached   func(rank int, w *Work) int32 // tokens of its prompt that the rank holds when it is admitted
	Token    func(rank int, w *Work)       // it got one
	Finished func(rank int, w *Work)       // it got its last one, and has left
	Computed func(rank int, w *Work)       // the step has computed tokens that were due; nil: nobody wants to know

	Prefilling  int // ranks that compute prompts in this step
	Preemptions int // so far
	heldSteps   int // steps in a row for which prompts have been held
}

// MixedRank is one rank of a Mixed group.
type MixedRank struct {
	Waiting     []Work // first come first served
	Running     []Work // in the order of admission
	KV          int64  // tokens of what runs, in whole blocks
	leftWaiting bool   // after its last step that could compute prompts, requests still waited
}

// Work is a request on a mixed rank.
type Work struct {
	Job       int32 // whatever whoever drives the ranks calls it by
	Slot      int32 // the board's
	Prompt    int32 // tokens
	Left      int32 // tokens that it will still get
	Gen       int32 // that it got
	done      int32 // of what is due, computed or cached
	due       int32 // to be computed before its next token: the prompt, or after a preemption also what it got
	scheduled int32 // tokens of it in this step

	joinedStep uint32 // step that its group was told of when its first token came; 0: it has none
}

// computing says whether its prompt is not computed yet.
func (w *Work) computing() bool { return w.done < w.due }

// Done is how many tokens of its prompt, and after a preemption of its answer, are computed or were cached.
func (w *Work) Done() int { return int(w.done) }

func (w *Work) tokens() int64 { return int64(w.Prompt) + int64(w.Gen) }

// Add gives a request to a rank.
func (g *Mixed) Add(rank int, w Work) {
	w.due = w.Prompt
	g.Ranks[rank].Waiting = append(g.Ranks[rank].Waiting, w)
}

// Drop takes a request away from a rank, wherever it is.
func (g *Mixed) Drop(rank int, job int32) {
	r := &g.Ranks[rank]
	isJob := func(w Work) bool { return w.Job == job }
	r.Waiting = slices.DeleteFunc(r.Waiting, isJob)
	if i := slices.IndexFunc(r.Running, isJob); i >= 0 {
		r.KV -= g.holds(r.Running[i].tokens())
		r.Running = slices.Delete(r.Running, i, i+1)
	}
}

// Begin begins a step if none is in progress and a rank has something to do. now is in ms.
func (g *Mixed) Begin(now float64) {
	if g.Ends < Never {
		return
	}
	mayBegin := g.mayBegin()
	busy := false
	g.Prefilling, g.Does = 0, g.Does[:0]
	for i := range g.Ranks {
		does := g.schedule(i, mayBegin)
		g.Does = append(g.Does, does)
		busy = busy || does.Requests > 0 || does.Prompt > 0
		if does.Prompt > 0 {
			g.Prefilling++
		}
	}
	if busy {
		ms := g.Law.Ms(g.Does)
		if g.Lasts != nil {
			ms = g.Lasts(ms)
		}
		g.Ends = now + ms
	}
}

// aligned says whether the interval lets a rank compute prompts in this step: if the step's number is a multiple of it, if the rank decodes
// nothing, or if its last step with prompts left requests waiting.
func (g *Mixed) aligned(r *MixedRank) bool {
	return g.Interval <= 1 || g.Step%g.Interval == 0 || r.leftWaiting || !r.decodes()
}

// mayBegin says whether ranks may begin new prompts in this step; prompts that were begun go on. A prompt on one rank makes the step of all
// ranks longer, so prompts wait until each rank has one: for at most Delay-1 steps in a row, and only while a rank decodes. mayBegin
// counts these steps, so it is called once a step.
func (g *Mixed) mayBegin() bool {
	if g.Delay == 0 {
		return true
	}
	withNewPrompt := 0
	for i := range g.Ranks {
		if g.hasNewPrompt(i) {
			withNewPrompt++
		}
	}
	if withNewPrompt == 0 {
		return true
	}
	if withNewPrompt < len(g.Ranks) && g.heldSteps < g.Delay-1 &&
		slices.ContainsFunc(g.Ranks, func(r MixedRank) bool { return r.decodes() }) {
		g.heldSteps++
		return false
	}
	g.heldSteps = 0
	return true
}

func (r *MixedRank) decodes() bool {
	return slices.ContainsFunc(r.Running, func(w Work) bool { return !w.computing() })
}

func (r *MixedRank) computes() bool {
	return slices.ContainsFunc(r.Running, func(w Work) bool { return w.computing() })
}

// hasNewPrompt says whether a rank has a prompt to compute now: one that it has begun, or one that it could admit.
func (g *Mixed) hasNewPrompt(i int) bool {
	r := &g.Ranks[i]
	return r.computes() || g.admits(r)
}

// admits says whether a rank has a slot and KV room for the first request that waits, with its whole prompt.
func (g *Mixed) admits(r *MixedRank) bool {
	return len(r.Waiting) > 0 && len(r.Running) < g.Slots && g.fits(r, &r.Waiting[0])
}

// fits says whether a rank has KV room for a request and its next token, beside the next tokens of those that run. A rank on which
// nothing runs takes any request.
func (g *Mixed) fits(r *MixedRank, w *Work) bool {
	return g.Room == 0 || len(r.Running) == 0 || r.KV+g.growth(r)+g.holds(w.tokens()+1) <= g.Room
}

// holds returns how much KV so many tokens of a request take: whole blocks.
func (g *Mixed) holds(tokens int64) int64 {
	if g.Block <= 1 {
		return tokens
	}
	return (tokens + g.Block - 1) / g.Block * g.Block
}

// growth returns by how much the KV of a rank grows with the next token of each request that runs.
func (g *Mixed) growth(r *MixedRank) (kv int64) {
	if g.Block <= 1 {
		return int64(len(r.Running))
	}
	for i := range r.Running {
		if r.Running[i].tokens()%g.Block == 0 {
			kv += g.Block
		}
	}
	return kv
}

// schedule decides what a rank does in the step that begins, and returns it. The token budget goes first to the requests that run, in
// the order of their admission, and what is left of it to requests that are now admitted. mayBegin says whether requests may be
// admitted. scheduled of each request is set to the tokens that the step computes of it.
func (g *Mixed) schedule(i int, mayBegin bool) (does step.Rank) {
	r := &g.Ranks[i]
	mayCompute := g.aligned(r)
	mayBegin = !g.preempt(r) && mayCompute && mayBegin // nothing is admitted in the step of a preemption
	for k := range r.Running {
		r.Running[k].scheduled = 0
	}
	// With First, a rank that computes a prompt does not decode in the same step.
	prefillOnly := g.First && mayCompute && (r.computes() || mayBegin && g.admits(r))
	budget := g.Budget
	for k := range r.Running {
		w := &r.Running[k]
		switch {
		case w.computing():
			if mayCompute {
				w.scheduled = min(budget, w.due-w.done)
				does.Prompt += float64(w.scheduled)
			}
		case budget > 0 && !prefillOnly:
			w.scheduled = 1
			does.Requests++
			does.KV += float64(w.tokens())
		}
		budget -= w.scheduled
	}
	for mayBegin && budget > 0 && g.admits(r) {
		w := r.Waiting[0]
		r.Waiting = slices.Delete(r.Waiting, 0, 1)
		w.done = min(w.due-1, g.Cached(i, &w))
		w.scheduled = min(budget, w.due-w.done)
		does.Prompt += float64(w.scheduled)
		budget -= w.scheduled
		r.KV += g.holds(w.tokens())
		r.Running = append(r.Running, w)
	}
	if mayCompute {
		r.leftWaiting = len(r.Waiting) > 0
	}
	return does
}

// preempt puts the last admitted requests back into the queue while the rank has no KV room for the next tokens of those that run. Their
// tokens are all computed again. preempted says whether there were such requests.
func (g *Mixed) preempt(r *MixedRank) (preempted bool) {
	for g.Room > 0 && len(r.Running) > 1 && r.KV+g.growth(r) > g.Room {
		w := r.Running[len(r.Running)-1]
		r.Running = r.Running[:len(r.Running)-1]
		r.KV -= g.holds(w.tokens())
		w.done, w.due = 0, w.Prompt+w.Gen
		r.Waiting = slices.Insert(r.Waiting, 0, w)
		g.Preemptions++
		preempted = true
	}
	return preempted
}

// Finish ends the step in progress. Requests that decoded, and those whose prompt is now computed, get a token. Requests that have all
// their tokens leave.
func (g *Mixed) Finish() {
	for i := range g.Ranks {
		r := &g.Ranks[i]
		remaining := r.Running[:0]
		for k := range r.Running {
			w := &r.Running[k]
			before := g.holds(w.tokens())
			g.advance(i, w)
			r.KV += g.holds(w.tokens()) - before
			if w.Left > 0 {
				remaining = append(remaining, *w)
				continue
			}
			r.KV -= g.holds(w.tokens())
			g.Finished(i, w)
		}
		r.Running = remaining
	}
	g.Step++
	g.Ends = Never
}

// advance updates a request by what the step has computed of it.
func (g *Mixed) advance(rank int, w *Work) {
	if w.computing() {
		if w.done += w.scheduled; w.scheduled > 0 && g.Computed != nil {
			g.Computed(rank, w)
		}
	}
	if w.scheduled == 0 || w.computing() {
		return
	}
	w.scheduled = 0
	w.Gen++
	w.Left--
	g.Token(rank, w)
}

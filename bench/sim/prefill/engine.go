package prefill

import (
	"container/heap"
	"math"
	"time"

	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

// Engines are the simulated prefill ranks, all alike.
type Engines struct {
	Ranks    int
	Capacity int64          // KV tokens of a rank
	Line     policy.Latency // how long a prefill takes
	Hold     time.Duration
	Decode   *Decode // nil: they only prefill
	Slow     float64 // times as long as it should is what the first of several takes; 0: once
}

// Decode makes engines decode what they prefilled, in the steps in which they
// prefill: C0, C1 for each KV token that is decoded over, and a chunk of the
// prompt in front.
type Decode struct {
	C0, C1 time.Duration
	Chunk  int // tokens of prompts that a step computes at most
}

// engine is one rank. It takes prompts first come, first served, one at a time.
type engine struct {
	*Engines
	cache *cache

	queue   []*job
	current *job
	left    int   // tokens of current that were not computed before this step
	chunk   int   // of them, what this step computes
	waiting int64 // tokens to be computed of those in the queue, as the tier thinks
	running bool  // in a step, until ends
	ends    time.Duration
	steps   int64
	decodes decodes
	slow    float64 // what a step takes, in times of what it should
	kv      int64   // tokens that are decoded over
}

// admit queues a request.
func (e *engine) admit(j *job, now time.Duration) {
	e.queue = append(e.queue, j)
	e.waiting += int64(j.prompt - j.expected)
	e.start(now)
}

// start begins a step if there is something to do and none runs.
func (e *engine) start(now time.Duration) {
	if e.running {
		return
	}
	if e.current == nil && len(e.queue) > 0 {
		e.startPrefill(e.queue[0], now)
	}
	if e.current == nil && len(e.decodes) == 0 {
		return
	}
	ms := 0.0
	e.chunk = 0
	if j := e.current; j != nil {
		if e.chunk = e.left; e.Decode != nil {
			e.chunk = min(e.left, e.Decode.Chunk)
		}
		if e.left == j.fresh {
			ms = e.Line.T0Ms
		}
		ms += e.Line.TPMs*float64(e.chunk) + e.Line.Beta2*policy.Attention(float64(e.chunk), float64(j.prompt-e.left))
	}
	length := time.Duration(math.Round(ms * 1e6))
	if e.Decode != nil {
		length += e.Decode.C0 + e.Decode.C1*time.Duration(e.kv)
	}
	e.running, e.ends = true, now+time.Duration(e.slow*float64(length))
}

// startPrefill takes up a prompt, unless its KV has no room yet.
func (e *engine) startPrefill(j *job, now time.Duration) {
	found := e.cache.match(j.blocks)
	if !e.cache.pin(j.blocks, j.nameless) {
		return
	}
	e.queue = e.queue[1:]
	e.waiting -= int64(j.prompt - j.expected)
	j.cached = min(found*blockTokens, (j.prompt-1)/blockTokens*blockTokens)
	j.fresh = j.prompt - j.cached
	j.began = now
	e.current, e.left = j, j.fresh
}

// end ends the step: what was prefilled with it, nil for none, and who got the
// last token.
func (e *engine) end(now time.Duration) (prefilled *job, finished []*job) {
	e.running = false
	e.steps++
	e.kv += int64(len(e.decodes))
	for len(e.decodes) > 0 && e.decodes[0].last <= e.steps {
		j := heap.Pop(&e.decodes).(*job)
		e.kv -= int64(j.prompt + j.output)
		finished = append(finished, j)
	}
	j := e.current
	if j == nil {
		return nil, finished
	}
	if e.left -= e.chunk; e.left > 0 {
		return nil, finished
	}
	e.current = nil
	j.first = now
	switch {
	case e.Decode == nil:
	case j.output <= 1:
		finished = append(finished, j)
	default:
		j.last = e.steps + int64(j.output) - 1
		e.kv += int64(j.prompt + 1)
		heap.Push(&e.decodes, j)
	}
	return j, finished
}

// free gives a request's KV back.
func (e *engine) free(j *job) { e.cache.unpin(j.blocks, j.nameless) }

// load is how many tokens of prompts are still to be computed, those of the
// present step included.
func (e *engine) load() int64 {
	load := e.waiting
	if e.current != nil {
		load += int64(e.left)
	}
	return load
}

// sample is what a scrape finds.
func (e *engine) sample() prefill.Sample {
	running := len(e.decodes)
	if e.current != nil {
		running++
	}
	usage := float64(e.cache.pinned()) / float64(e.cache.capacity)
	return prefill.Sample{
		KVUsage: usage, KVHeld: usage,
		Running: float64(running), Waiting: float64(len(e.queue)),
	}
}

// decodes is a heap by the step of the last token.
type decodes []*job

// Len and the others are for container/heap.
func (d decodes) Len() int { return len(d) }
func (d decodes) Less(i, j int) bool {
	return d[i].last < d[j].last || d[i].last == d[j].last && d[i].number < d[j].number
}
func (d decodes) Swap(i, j int) { d[i], d[j] = d[j], d[i] }
func (d *decodes) Push(x any)   { *d = append(*d, x.(*job)) }
func (d *decodes) Pop() any {
	last := len(*d) - 1
	j := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	return j
}

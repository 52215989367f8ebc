// Package prompts is the half of a reference engine's rank that computes prompts.
package prompts

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/stand"
)

// Job is a prompt that waits for or is in prefill.
type Job struct {
	Ctx  context.Context // of the request: it ends when the client leaves
	IDs  []int32
	Salt string
	More time.Duration // beyond the prompt: tokens after the first
	// Done is called once by the rank when the KV is there. It owns the blocks, to be given back by
	// free.
	Done func(cached int, free func())
}

// Config says how large and how fast a rank is.
type Config struct {
	Blocks      int // of KV
	Cache       int // blocks that the prefix cache keeps
	Concurrency int // prompts computed at once
	Base        time.Duration
	PerToken    time.Duration // not cached
	Core        *stand.Gate   // where prompts wait while the engine's core stands still; nil: it never does
}

// Rank computes prompts first come first served. A prompt waits until
// its KV blocks are free, and everyone behind it too.
type Rank struct {
	cfg   Config
	Cache *cache.Cache // nil: none

	mu    sync.Mutex // of queue
	queue []*Job
	work  chan struct{} // a token: the queue may hold more

	Used  atomic.Int64  // KV blocks
	freed chan struct{} // nudged when Used falls

	Running, Waiting    atomic.Int64
	Bootstrap, Inflight atomic.Int64 // that wait for a decode engine to register, and whose KV is being written
	Queries, Hits       atomic.Int64 // tokens
	Asked, Pulled       atomic.Int64 // tokens looked for in other engines, and those that came from there
}

// New is a rank that has nothing to do.
func New(cfg Config, events *cache.Events) *Rank {
	return &Rank{cfg: cfg, work: make(chan struct{}, 1), freed: make(chan struct{}, 1), Cache: cache.New(cfg.Cache, events)}
}

// Add puts a prompt into the queue.
func (r *Rank) Add(j *Job) {
	r.Waiting.Add(1)
	r.mu.Lock()
	r.queue = append(r.queue, j)
	r.mu.Unlock()
	nudge(r.work)
}

// Run is one of the rank's workers. A prompt that follows another starts when
// that one was due to end, not when the worker woke up.
func (r *Rank) Run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var ended time.Time
	for {
		j := r.next()
		if j == nil {
			ended = time.Time{}
			select {
			case <-r.work:
				continue
			case <-ctx.Done():
				return
			}
		}
		need := int64(cache.Blocks(len(j.IDs)))
		waited, ok := r.reserve(j.Ctx, need)
		if waited {
			ended = time.Time{}
		}
		if !ok {
			r.Waiting.Add(-1)
			continue
		}
		r.Waiting.Add(-1)
		r.Running.Add(1)
		cached, bad := r.lookUp(j)
		start := time.Now()
		if !ended.IsZero() && r.cfg.Concurrency == 1 {
			start = ended
		}
		ended = start.Add(r.cfg.Base + time.Duration(len(j.IDs)-cached)*r.cfg.PerToken + j.More)
		timer.Reset(time.Until(ended))
		free := func() { r.Used.Add(-need); nudge(r.freed) }
		select {
		case <-timer.C:
			if r.cfg.Core != nil && r.cfg.Core.Wait(ctx) {
				ended = time.Time{} // prompts that were not computed meanwhile are not made up for
			}
			r.Running.Add(-1)
			r.Cache.Add(j.Salt, j.IDs, bad)
			j.Done(cached, free)
		case <-j.Ctx.Done(): // aborted: freed at once
			r.Running.Add(-1)
			free()
			ended = time.Time{}
		}
	}
}

func (r *Rank) next() *Job {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) > 0 {
		j := r.queue[0]
		r.queue[0] = nil
		r.queue = r.queue[1:]
		if j.Ctx.Err() == nil {
			if len(r.queue) > 0 {
				nudge(r.work) // for the other workers
			}
			return j
		}
		r.Waiting.Add(-1)
	}
	return nil
}

// reserve waits for blocks. A prompt larger than the cache gets it alone.
func (r *Rank) reserve(ctx context.Context, need int64) (waited, ok bool) {
	for {
		used := r.Used.Load()
		if used == 0 || used+need <= int64(r.cfg.Blocks) {
			if r.Used.CompareAndSwap(used, used+need) {
				return waited, true
			}
			continue
		}
		waited = true
		select {
		case <-r.freed:
		case <-ctx.Done():
			nudge(r.freed) // another worker may have waited for it
			return true, false
		}
	}
}

func (r *Rank) lookUp(j *Job) (cached int, bad bool) {
	if r.Cache == nil {
		return 0, false // not a query
	}
	cached, bad = r.Cache.Match(j.Salt, j.IDs)
	r.Queries.Add(int64(len(j.IDs)))
	r.Hits.Add(int64(cached))
	return cached, bad
}

func nudge(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

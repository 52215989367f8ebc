package refengine

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/refengine/cache"
)

// prefillJob is a prompt that waits for or is in prefill.
type prefillJob struct {
	ctx  context.Context // of the request: it ends when the client leaves
	ids  []int32
	salt string
	more time.Duration // beyond the prompt: tokens after the first
	// done is called once by the rank when the KV is there. It owns the blocks, to be given back by free.
	done func(cached int, free func())
}

// prefillRank computes prompts first come first served. A prompt waits until
// its KV blocks are free, and everyone behind it too.
type prefillRank struct {
	cfg   Config
	cache *cache.Cache // nil: none

	mu    sync.Mutex // of queue
	queue []*prefillJob
	work  chan struct{} // a token: the queue may hold more

	used  atomic.Int64  // KV blocks
	freed chan struct{} // nudged when used falls

	running, waiting atomic.Int64
	queries, hits    atomic.Int64 // tokens
	asked, pulled    atomic.Int64 // tokens looked for in other engines, and those that came from there
}

func newPrefillRank(cfg Config, events *cache.Events) *prefillRank {
	return &prefillRank{cfg: cfg, work: make(chan struct{}, 1), freed: make(chan struct{}, 1), cache: cache.New(cfg.PrefixCache, events)}
}

func (r *prefillRank) add(j *prefillJob) {
	r.waiting.Add(1)
	r.mu.Lock()
	r.queue = append(r.queue, j)
	r.mu.Unlock()
	nudge(r.work)
}

// run is one of the rank's workers. A prompt that follows another starts when
// that one was due to end, not when the worker woke up.
func (r *prefillRank) run(ctx context.Context) {
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
		need := int64(blocks(len(j.ids)))
		waited, ok := r.reserve(j.ctx, need)
		if waited {
			ended = time.Time{}
		}
		if !ok {
			r.waiting.Add(-1)
			continue
		}
		r.waiting.Add(-1)
		r.running.Add(1)
		cached, bad := r.lookUp(j)
		start := time.Now()
		if !ended.IsZero() && r.cfg.PrefillConcurrency == 1 {
			start = ended
		}
		ended = start.Add(r.cfg.PrefillBase + time.Duration(len(j.ids)-cached)*r.cfg.PrefillPerToken + j.more)
		timer.Reset(time.Until(ended))
		free := func() { r.used.Add(-need); nudge(r.freed) }
		select {
		case <-timer.C:
			r.running.Add(-1)
			r.cache.Add(j.salt, j.ids, bad)
			j.done(cached, free)
		case <-j.ctx.Done(): // aborted: freed at once
			r.running.Add(-1)
			free()
			ended = time.Time{}
		}
	}
}

func (r *prefillRank) next() *prefillJob {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) > 0 {
		j := r.queue[0]
		r.queue[0] = nil
		r.queue = r.queue[1:]
		if j.ctx.Err() == nil {
			if len(r.queue) > 0 {
				nudge(r.work) // for the other workers
			}
			return j
		}
		r.waiting.Add(-1)
	}
	return nil
}

// reserve waits for blocks. A prompt larger than the cache gets it alone.
func (r *prefillRank) reserve(ctx context.Context, need int64) (waited, ok bool) {
	for {
		used := r.used.Load()
		if used == 0 || used+need <= int64(r.cfg.KVTokens/blockSize) {
			if r.used.CompareAndSwap(used, used+need) {
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

func (r *prefillRank) lookUp(j *prefillJob) (cached int, bad bool) {
	if r.cache == nil {
		return 0, false // not a query
	}
	cached, bad = r.cache.Match(j.salt, j.ids)
	r.queries.Add(int64(len(j.ids)))
	r.hits.Add(int64(cached))
	return cached, bad
}

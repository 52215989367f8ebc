package refengine

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"evenkeel/bench/refengine/cache"
	"evenkeel/bench/refengine/steplog"
)

// job is a request in the decode group.
type job struct {
	rank    int
	prompt  int  // tokens
	remote  bool // its KV comes from a prefill engine
	ids     []int32
	salt    string
	beyond  bool // its proxy knows that the rank has no slot for it
	granted chan struct{}
	wake    chan struct{} // nudged when made or end changed

	made atomic.Int64 // tokens of the answer so far
	end  atomic.Int32

	cached atomic.Int64 // of a local prefill: tokens it found in the prefix cache

	// The group's own.
	phase phase
	want  int // tokens after which it is finished
	local bool
}

type phase uint8

const (
	queued  phase = iota // waits for KV blocks
	pulling              // holds blocks, the KV is on its way
	ready                // holds blocks, waits for a slot
	running
	gone
)

// The values of job.end.
const (
	goingOn int32 = iota
	finished
	recomputed // preempted, and the recompute scheduler gives it back
)

func newJob(rank int, ids []int32, salt string, remote bool, want int) *job {
	return &job{rank: rank, prompt: len(ids), ids: ids, salt: salt, remote: remote, want: want, granted: make(chan struct{}), wake: make(chan struct{}, 1)}
}

func (j *job) kvTokens() int { return j.prompt + int(j.made.Load()) }

// message is what a connection tells the group.
type message struct {
	kind  messageKind
	job   *job
	want  int  // landed: the answer's length is known once the KV is
	local bool // landed: nothing came, prefill here
}

type messageKind uint8

const (
	submit messageKind = iota
	landed
	cancel
)

// group is a decode deployment: ranks that step together. Its goroutine alone
// touches the ranks.
type group struct {
	cfg      Config
	count    *counters
	log      *steplog.Log
	inbox    *mailbox[message]
	spare    []message
	ranks    []decodeRank
	caches   []*cache.Cache     // by rank; nil: none
	loads    []steplog.RankLoad // scratch of a step
	step     int64
	prefills time.Duration // local prefill time of the step being put together
}

type decodeRank struct {
	waiting []*job // arrival order, phases queued to ready
	running []*job // order of admission
	pressed bool   // preempted in this step
	gauges  gauges
}

// gauges are what /metrics and /stats read.
type gauges struct {
	running, waiting, deferred, kvBlocks, most, generated atomic.Int64
}

func newGroup(cfg Config, count *counters, log *steplog.Log) *group {
	return &group{cfg: cfg, count: count, log: log, inbox: newMailbox[message](),
		ranks: make([]decodeRank, cfg.DPSize), loads: make([]steplog.RankLoad, cfg.DPSize), caches: make([]*cache.Cache, cfg.DPSize)}
}

// run is the clock. A step's end is the last one's end plus its length, not a
// sleep from now, so that late wake-ups do not add up.
func (g *group) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var next time.Time // end of the last step; zero when the group was idle
	for {
		g.receive()
		g.preempt()
		g.admit()
		length, busy := g.measure()
		g.publish()
		if !busy {
			next = time.Time{}
			select {
			case <-g.inbox.wake:
			case <-ctx.Done():
				return
			}
			continue
		}
		if next.IsZero() {
			next = time.Now()
		}
		start := next
		next = start.Add(length)
		timer.Reset(time.Until(next))
		for waiting := true; waiting; {
			select {
			case <-timer.C:
				waiting = false
			case <-g.inbox.wake:
				g.receive()
				g.publish()
			case <-ctx.Done():
				return
			}
		}
		g.step++
		g.log.Add(steplog.Step{Number: g.step, Start: start, Length: length, Late: time.Since(next), Ranks: g.loads})
		g.generate()
	}
}

func (g *group) receive() {
	mail := g.inbox.swap(g.spare)
	for _, m := range mail {
		r := &g.ranks[m.job.rank]
		switch m.kind {
		case submit:
			r.waiting = append(r.waiting, m.job)
			present := int64(len(r.waiting) + len(r.running))
			if present > int64(g.cfg.Slots) && !m.job.beyond {
				g.count.OverAdmitted.Add(1)
			}
			r.gauges.most.Store(max(r.gauges.most.Load(), present))
		case landed:
			m.job.want, m.job.local = m.want, m.local
			if m.job.phase == pulling {
				m.job.phase = ready
			}
		case cancel:
			r.remove(m.job)
		}
	}
	clear(mail)
	g.spare = mail
}

func (r *decodeRank) remove(j *job) {
	drop := func(jobs []*job) []*job {
		if i := slices.Index(jobs, j); i >= 0 {
			return slices.Delete(jobs, i, i+1)
		}
		return jobs
	}
	r.waiting, r.running = drop(r.waiting), drop(r.running)
	j.phase = gone
}

// used counts the KV blocks a rank's requests hold.
func (r *decodeRank) used() int {
	n := 0
	for _, j := range r.running {
		n += blocks(j.kvTokens())
	}
	for _, j := range r.waiting {
		if j.phase != queued {
			n += blocks(j.kvTokens())
		}
	}
	return n
}

// preempt makes room for the tokens of the coming step: while a rank's KV does
// not fit, its most recently admitted request goes, never its only one.
func (g *group) preempt() {
	for i := range g.ranks {
		r := &g.ranks[i]
		r.pressed = false
		for len(r.running) > 1 && r.used()+r.growth(g.cfg) > g.cfg.KVTokens/blockSize {
			last := len(r.running) - 1
			j := r.running[last]
			r.running[last] = nil
			r.running = r.running[:last]
			r.pressed = true
			g.count.Preemptions.Add(1)
			if g.cfg.RecomputeEnable {
				j.phase = gone
				j.end.Store(recomputed)
				nudge(j.wake)
				continue
			}
			j.phase, j.remote = queued, false // recomputed in place when blocks are free, invisible but for the time
			r.waiting = slices.Insert(r.waiting, 0, j)
		}
	}
}

// growth counts the blocks that the coming step's tokens open.
func (r *decodeRank) growth(cfg Config) (n int) {
	for _, j := range r.running {
		n += blocks(j.kvTokens()+cfg.TokensPerChunk) - blocks(j.kvTokens())
	}
	return n
}

// admit gives out KV blocks and slots, first come first served. A request
// whose KV is on its way lets others overtake; one that finds no blocks does
// not. A rank that had to preempt admits nobody in that step.
func (g *group) admit() {
	g.prefills = 0
	for i := range g.ranks {
		r := &g.ranks[i]
		if r.pressed {
			continue
		}
		free := g.cfg.KVTokens/blockSize - r.used() - r.growth(g.cfg)
		var prefills time.Duration
		kept := r.waiting[:0]
		blocked := false
		for _, j := range r.waiting {
			if j.phase == queued && !blocked {
				g.grant(r, j, &free, len(kept) == 0 && len(r.running) == 0)
				blocked = j.phase == queued
			}
			if j.phase != ready || len(r.running) >= g.cfg.Slots {
				kept = append(kept, j)
				continue
			}
			if j.local {
				g.count.LocalPrefills.Add(1)
				prefills += g.prefill(j)
				j.local = false
			}
			j.phase = running
			r.running = append(r.running, j)
		}
		clear(r.waiting[len(kept):])
		r.waiting = kept
		g.prefills = max(g.prefills, prefills)
	}
}

// prefill computes a prompt on its decode rank and returns what that adds to the
// step, of all ranks of the group.
func (g *group) prefill(j *job) time.Duration {
	cached, bad := g.caches[j.rank].Match(j.salt, j.ids)
	j.cached.Store(int64(cached))
	g.caches[j.rank].Add(j.salt, j.ids, bad)
	return g.cfg.PrefillBase + time.Duration(j.kvTokens()-cached)*g.cfg.PrefillPerToken
}

// grant gives a queued request its KV blocks, if they and, for a local
// prefill, a slot are free. One that is alone on its rank always gets them.
func (g *group) grant(r *decodeRank, j *job, free *int, alone bool) {
	need := blocks(j.kvTokens() + g.cfg.TokensPerChunk)
	if need > *free && !alone {
		return
	}
	if (!j.remote || g.cfg.Connector == NIXLPull) && len(r.running) >= g.cfg.Slots { // vLLM does not look at waiting requests while it is full
		return
	}
	*free -= need
	if j.remote {
		j.phase = pulling
		close(j.granted)
	} else {
		j.phase, j.local = ready, true
	}
}

// measure notes the load of the step that starts and says how long it takes.
func (g *group) measure() (length time.Duration, busy bool) {
	most := 0
	for i := range g.ranks {
		r := &g.ranks[i]
		load := steplog.RankLoad{Running: len(r.running)}
		for _, j := range r.running {
			load.KVTokens += j.kvTokens()
		}
		g.loads[i] = load
		most = max(most, load.KVTokens)
		busy = busy || load.Running > 0
	}
	return g.cfg.C0 + time.Duration(most)*g.cfg.C1 + g.prefills, busy
}

func (g *group) publish() {
	for i := range g.ranks {
		r := &g.ranks[i]
		pullers := 0
		for _, j := range r.waiting {
			if j.phase == pulling {
				pullers++
			}
		}
		r.gauges.running.Store(int64(len(r.running)))
		r.gauges.waiting.Store(int64(len(r.waiting)))
		r.gauges.deferred.Store(int64(pullers))
		r.gauges.kvBlocks.Store(int64(r.used()))
	}
}

// generate gives every running request its tokens. A finished one has left its
// slot before its last chunk can be written.
func (g *group) generate() {
	var leaving []*job
	for i := range g.ranks {
		r := &g.ranks[i]
		kept := r.running[:0]
		for _, j := range r.running {
			made := int(j.made.Load())
			n := min(g.cfg.TokensPerChunk, j.want-made)
			g.count.Tokens.Add(int64(n))
			r.gauges.generated.Add(int64(n))
			if made+n < j.want {
				j.made.Store(int64(made + n))
				nudge(j.wake)
				kept = append(kept, j)
				continue
			}
			leaving = append(leaving, j)
		}
		clear(r.running[len(kept):])
		r.running = kept
	}
	if len(leaving) == 0 {
		return
	}
	g.publish()
	for _, j := range leaving {
		j.phase = gone
		j.made.Store(int64(j.want))
		j.end.Store(finished)
		nudge(j.wake)
	}
}

// Package group is the half of a reference engine that decodes: ranks that step together, with slots and KV blocks
// of their own. The ranks of an aggregated engine compute the prompts, too.
package group

import (
	"context"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/stand"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/dispatcher/step"
)

// Job is a request in the decode group. What is exported is the connection's, and set before Submit, or safe to read.
type Job struct {
	rank    int
	prompt  int  // tokens
	remote  bool // its KV comes from a prefill engine
	ids     []int32
	salt    string
	Beyond  bool          // its proxy knows that the rank has no slot for it
	Keeps   bool          // its blocks stay when it is finished, until it is cancelled
	Granted chan struct{} // closed when it has KV blocks
	Wake    chan struct{} // nudged when Made or End changed

	Made atomic.Int64 // tokens of the answer so far
	End  atomic.Int32

	Cached atomic.Int64 // of a local prefill: tokens it found in the prefix cache

	// The group's own.
	phase  phase
	want   int // tokens after which it is finished
	local  bool
	turn   float64   // when in a step it gets its token: 1 at the end
	number int32     // on mixed ranks
	last   time.Time // when it got its last token
}

type phase uint8

const (
	queued  phase = iota // waits for KV blocks
	pulling              // holds blocks, the KV is on its way
	ready                // holds blocks, waits for a slot
	running
	gone
)

// The values of Job.End.
const (
	GoingOn int32 = iota
	Finished
	Recomputed // preempted, and the recompute scheduler gives it back
)

// NewJob is a request that decodes want tokens. remote: its KV comes from a prefill engine.
func NewJob(rank int, ids []int32, salt string, remote bool, want int) *Job {
	return &Job{rank: rank, prompt: len(ids), ids: ids, salt: salt, remote: remote, want: want, Granted: make(chan struct{}), Wake: make(chan struct{}, 1)}
}

func (j *Job) kvTokens() int { return j.prompt + int(j.Made.Load()) }

// message is what a connection tells the group.
type message struct {
	kind  messageKind
	job   *Job
	want  int  // landed: the answer's length is known once the KV is
	local bool // landed: nothing came, prefill here
}

type messageKind uint8

const (
	submit messageKind = iota
	landed
	cancel
	strand // its client has left, and its blocks stay
)

// Config says how large and how fast the ranks are.
type Config struct {
	Ranks          int
	Slots          int // of a rank
	Blocks         int // of KV, of a rank
	TokensPerChunk int
	C0, C1         time.Duration // of a step, and of each KV token of the slowest rank
	CR             time.Duration // of each request of the slowest rank
	CM             time.Duration // of each request of the rank with most requests
	CS             time.Duration // of each request of all ranks, divided by how many ranks there are
	Form           step.Form     // which of these pad, and for whom
	Captured       int           // the largest graph; 0: there are none
	Law            *step.Law     // what a step takes in place of all of these; nil: they say
	Mixed          *Mixed        // the ranks compute prompts between their decodes; nil: prefill engines do
	Phase          time.Duration // steps end so long after whole multiples of C0; 0: the first begins when a request comes
	FirstAtOnce    bool          // a first token does not wait for the end of a step
	Spread         bool          // the tokens of a step come one after the other while it runs, and not all at its end
	Recompute      bool          // a preempted request is given back
	PrefillBase    time.Duration // of a prompt that is computed here, and of a step of mixed ranks that compute some
	PrefillPer     time.Duration // of a token of it that is not cached
	Waits          Waits
	Core           *stand.Gate // where the group waits while the engine's core stands still; nil: it never does
}

// Waits is what a request waits for whose KV is to come from a prefill engine.
type Waits int

// The engines differ in it.
const (
	WaitsForBlocks Waits = iota
	WaitsForSlot         // of NIXL: vLLM does not look at waiting requests while all slots run
	WaitsForPlace        // of SGLang, which has more slots than run, for those whose KV is on its way
)

// Counts are told what happens.
type Counts struct {
	OverAdmitted, Preemptions, LocalPrefills, Tokens *atomic.Int64
}

// Group is a decode deployment: ranks that step together. Its goroutine alone
// touches the ranks.
type Group struct {
	cfg      Config
	count    Counts
	log      *steplog.Log
	inbox    *mailbox[message]
	spare    []message
	ranks    []decodeRank
	mixed    *mixed             // what the ranks do, where they compute prompts; nil: they only decode
	caches   []*cache.Cache     // by rank; nil: none
	loads    []steplog.RankLoad // scratch of a step
	does     []step.Rank        // likewise
	waits    []float64          // ms for which each rank waits for the others in the step
	law      step.Law
	step     int64
	turns    int           // requests that have been given one
	prefills time.Duration // local prefill time of the step being put together
}

type decodeRank struct {
	waiting  []*Job        // arrival order, phases queued to ready
	running  []*Job        // order of admission
	stranded []*Job        // hold blocks for nobody
	answered []*Job        // are finished, and hold blocks for a next turn
	pressed  bool          // preempted in this step
	prefills time.Duration // its own part of the group's
	gauges   Gauges
}

// New is a group without requests. caches are those of the ranks, nil for one that has none.
func New(cfg Config, count Counts, log *steplog.Log, caches []*cache.Cache) *Group {
	g := &Group{cfg: cfg, count: count, log: log, inbox: newMailbox[message](),
		ranks: make([]decodeRank, cfg.Ranks), loads: make([]steplog.RankLoad, cfg.Ranks), does: make([]step.Rank, cfg.Ranks), law: cfg.law(), caches: caches}
	if cfg.Mixed != nil {
		g.mixed = newMixed(g)
	}
	return g
}

// Submit has a request wait for KV blocks and a slot.
func (g *Group) Submit(j *Job) { g.inbox.post(message{kind: submit, job: j}) }

// Landed says that a remote request's KV is there, or that nothing came (local). want is the length of its answer, which is known
// once the KV is.
func (g *Group) Landed(j *Job, want int, local bool) {
	g.inbox.post(message{kind: landed, job: j, want: want, local: local})
}

// Cancel forgets a request.
func (g *Group) Cancel(j *Job) { g.inbox.post(message{kind: cancel, job: j}) }

// Strand keeps the blocks of a request whose client has left, until it is cancelled.
func (g *Group) Strand(j *Job) { g.inbox.post(message{kind: strand, job: j}) }

// Gauges are those of a rank.
func (g *Group) Gauges(rank int) *Gauges { return &g.ranks[rank].gauges }

// Run is the clock. A step's end is the last one's end plus its length, not a
// sleep from now, so that late wake-ups do not add up.
func (g *Group) Run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var next time.Time // end of the last step; zero when the group was idle
	for {
		if g.stands(ctx) {
			next = time.Time{} // steps that were not made are not made up for
		}
		g.receive()
		length, busy := g.begin()
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
			next = g.cfg.firstStep(time.Now())
		}
		start := next
		next = start.Add(length)
		at := 0.0 // requests whose turn is not later have their token of this step
		for waiting := true; waiting; {
			to := g.turnAfter(at)
			timer.Reset(time.Until(start.Add(time.Duration(to * float64(length)))))
			select {
			case <-timer.C:
				if waiting = to < 1; waiting {
					g.generate(func(j *Job) bool { return j.turn > at && j.turn <= to })
					at = to
				}
			case <-g.inbox.wake:
				g.stands(ctx)
				g.receive()
				if g.cfg.FirstAtOnce {
					g.admit()
					g.first()
				}
				g.publish()
			case <-ctx.Done():
				return
			}
		}
		g.stands(ctx)
		g.step++
		g.log.Add(steplog.Step{Number: g.step, Start: start, Length: length, Late: time.Since(next), Ranks: g.loads})
		if g.mixed != nil {
			g.leave(g.mixed.end())
			continue
		}
		g.waited()
		g.generate(func(j *Job) bool { return j.turn > at })
	}
}

// begin says what the step does that starts, and how long it takes.
func (g *Group) begin() (length time.Duration, busy bool) {
	if g.mixed != nil {
		return g.mixed.begin()
	}
	g.preempt()
	g.admit()
	g.first()
	return g.measure()
}

// turnAfter is the next turn in a step: 1 is its end.
func (g *Group) turnAfter(at float64) float64 {
	next := 1.0
	if g.cfg.Spread {
		for i := range g.ranks {
			for _, j := range g.ranks[i].running {
				if j.turn > at {
					next = min(next, j.turn)
				}
			}
		}
	}
	return next
}

// giveTurn says when in each step a request gets its token. Multiples of the golden ratio leave no large gap between the turns of
// requests that run together, however many these are.
func (g *Group) giveTurn(j *Job) {
	if j.turn = 1; g.cfg.Spread {
		g.turns++
		_, j.turn = math.Modf(float64(g.turns) * math.Phi)
	}
}

// stands waits while the engine's core stands still, and says whether it did.
func (g *Group) stands(ctx context.Context) bool { return g.cfg.Core != nil && g.cfg.Core.Wait(ctx) }

// first gives those that were admitted their first token, where it does not wait for a step.
func (g *Group) first() {
	if g.cfg.FirstAtOnce {
		g.generate(func(j *Job) bool { return j.Made.Load() == 0 })
	}
}

// firstStep is when the step begins, or has begun, that runs when a request comes to an idle group.
func (c Config) firstStep(now time.Time) time.Time {
	if c.Phase == 0 {
		return now
	}
	return now.Add(-(time.Duration(now.UnixNano()) - c.Phase) % c.C0)
}

func (g *Group) receive() {
	mail := g.inbox.swap(g.spare)
	for _, m := range mail {
		r := &g.ranks[m.job.rank]
		if g.mixed != nil {
			g.mixed.receive(m, r)
			continue
		}
		switch m.kind {
		case submit:
			r.waiting = append(r.waiting, m.job)
			present := int64(len(r.waiting) + len(r.running))
			if present > int64(g.cfg.Slots) && !m.job.Beyond && r.within() > g.cfg.Slots {
				g.count.OverAdmitted.Add(1)
			}
			r.gauges.Most.Store(max(r.gauges.Most.Load(), present))
		case landed:
			m.job.want, m.job.local = m.want, m.local
			if m.job.phase == pulling {
				m.job.phase = ready
			}
		case strand:
			if slices.Contains(r.waiting, m.job) {
				r.remove(m.job)
				r.stranded = append(r.stranded, m.job)
			}
		case cancel:
			r.remove(m.job)
		}
	}
	clear(mail)
	g.spare = mail
}

// within is how many requests are there for which the proxy saw a slot. One that it sent beyond the
// slots may come before another that it sent earlier.
func (r *decodeRank) within() (n int) {
	for _, jobs := range [...][]*Job{r.waiting, r.running} {
		for _, j := range jobs {
			if !j.Beyond {
				n++
			}
		}
	}
	return n
}

func (r *decodeRank) remove(j *Job) {
	drop := func(jobs []*Job) []*Job {
		if i := slices.Index(jobs, j); i >= 0 {
			return slices.Delete(jobs, i, i+1)
		}
		return jobs
	}
	r.waiting, r.running, r.stranded, r.answered = drop(r.waiting), drop(r.running), drop(r.stranded), drop(r.answered)
	j.phase = gone
}

// used counts the KV blocks a rank's requests hold.
func (r *decodeRank) used() int {
	n := r.kept()
	for _, j := range r.answered {
		n += cache.Blocks(j.prompt + j.want)
	}
	for _, j := range r.running {
		n += cache.Blocks(j.kvTokens())
	}
	for _, j := range r.waiting {
		if j.phase != queued {
			n += cache.Blocks(j.kvTokens())
		}
	}
	return n
}

// kept counts the KV blocks that are held for nobody.
func (r *decodeRank) kept() (n int) {
	for _, j := range r.stranded {
		n += cache.Blocks(j.kvTokens())
	}
	return n
}

// preempt makes room for the tokens of the coming step: while a rank's KV does
// not fit, its most recently admitted request goes, never its only one.
func (g *Group) preempt() {
	for i := range g.ranks {
		r := &g.ranks[i]
		r.pressed = false
		for len(r.running) > 1 && r.used()+r.growth(g.cfg) > g.cfg.Blocks {
			last := len(r.running) - 1
			j := r.running[last]
			r.running[last] = nil
			r.running = r.running[:last]
			r.pressed = true
			g.count.Preemptions.Add(1)
			if g.cfg.Recompute {
				j.phase = gone
				j.End.Store(Recomputed)
				nudge(j.Wake)
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
		n += cache.Blocks(j.kvTokens()+cfg.TokensPerChunk) - cache.Blocks(j.kvTokens())
	}
	return n
}

// admit gives out KV blocks and slots, first come first served. A request
// whose KV is on its way lets others overtake; one that finds no blocks does
// not. A rank that had to preempt admits nobody in that step.
func (g *Group) admit() {
	g.prefills = 0
	for i := range g.ranks {
		r := &g.ranks[i]
		r.prefills = 0
		if r.pressed {
			continue
		}
		free := g.cfg.Blocks - r.used() - r.growth(g.cfg)
		var prefills time.Duration
		kept := r.waiting[:0]
		blocked := false
		for _, j := range r.waiting {
			if j.phase == queued && !blocked {
				g.grant(r, j, &free, len(kept) == 0 && len(r.running)+len(r.stranded)+len(r.answered) == 0)
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
			g.giveTurn(j)
			r.running = append(r.running, j)
		}
		clear(r.waiting[len(kept):])
		r.waiting, r.prefills = kept, prefills
		g.prefills = max(g.prefills, prefills)
	}
}

// prefill computes a prompt on its decode rank and returns what that adds to the
// step, of all ranks of the group.
func (g *Group) prefill(j *Job) time.Duration {
	cached, bad := g.caches[j.rank].Match(j.salt, j.ids)
	j.Cached.Store(int64(cached))
	g.caches[j.rank].Add(j.salt, j.ids, bad)
	return g.cfg.PrefillBase + time.Duration(j.kvTokens()-cached)*g.cfg.PrefillPer
}

// grant gives a queued request its KV blocks, if they and, for a local
// prefill, a slot are free. One that is alone on its rank always gets them.
func (g *Group) grant(r *decodeRank, j *Job, free *int, alone bool) {
	need := cache.Blocks(j.kvTokens() + g.cfg.TokensPerChunk)
	if need > *free && !alone {
		return
	}
	if r.full(g.cfg, j.remote) {
		return
	}
	*free -= need
	if j.remote {
		j.phase = pulling
		close(j.Granted)
	} else {
		j.phase, j.local = ready, true
	}
}

// full says whether slots keep a request from its blocks. SGLang has two more for each that runs, unless it has many.
func (r *decodeRank) full(cfg Config, remote bool) bool {
	switch {
	case !remote || cfg.Waits == WaitsForSlot:
		return len(r.running) >= cfg.Slots
	case cfg.Waits == WaitsForBlocks:
		return false
	}
	slots := cfg.Slots
	if slots <= 32 {
		slots *= 3
	}
	held := len(r.running)
	for _, j := range r.waiting {
		if j.phase != queued {
			held++
		}
	}
	return held >= slots
}

// measure notes the load of the step that starts and says how long it takes.
func (g *Group) measure() (length time.Duration, busy bool) {
	for i := range g.ranks {
		r := &g.ranks[i]
		load := steplog.RankLoad{Running: len(r.running)}
		for _, j := range r.running {
			load.KVTokens += j.kvTokens()
		}
		g.loads[i] = load
		g.does[i] = step.Rank{Requests: float64(load.Running), KV: float64(load.KVTokens)}
		busy = busy || load.Running > 0
	}
	g.waits = g.law.AppendWaits(g.waits[:0], g.does)
	for i := range g.ranks {
		g.waits[i] += ms(g.prefills - g.ranks[i].prefills)
	}
	return time.Duration(math.Round(g.law.Ms(g.does)*float64(time.Millisecond))) + g.prefills, busy
}

// waited counts what the barrier of the step that ends has cost each rank.
func (g *Group) waited() {
	if len(g.ranks) == 1 {
		return
	}
	most := 0.0
	for i := range g.does {
		most = max(most, g.does[i].KV)
	}
	for i := range g.ranks {
		to, kv := &g.ranks[i].gauges, g.does[i].KV
		to.Steps.Add(1)
		to.WaitNanos.Add(int64(math.Round(g.waits[i] * float64(time.Millisecond))))
		to.Pairs.Add(int64(kv))
		to.FewerPairs.Add(int64(most - kv))
	}
}

func (g *Group) publish() {
	for i := range g.ranks {
		r := &g.ranks[i]
		if g.mixed != nil {
			g.mixed.publish(i, &r.gauges)
			continue
		}
		pullers := 0
		for _, j := range r.waiting {
			if j.phase == pulling {
				pullers++
			}
		}
		r.gauges.Running.Store(int64(len(r.running)))
		r.gauges.Waiting.Store(int64(len(r.waiting)))
		r.gauges.Deferred.Store(int64(pullers))
		r.gauges.KVBlocks.Store(int64(r.used()))
		r.gauges.Stranded.Store(int64(r.kept()))
	}
}

// generate gives running requests that are due their tokens. A finished one has left
// its slot before its last chunk can be written.
func (g *Group) generate(due func(*Job) bool) {
	var leaving []*Job
	now := time.Now()
	for i := range g.ranks {
		r := &g.ranks[i]
		kept := r.running[:0]
		for _, j := range r.running {
			if !due(j) {
				kept = append(kept, j)
				continue
			}
			made := int(j.Made.Load())
			n := min(g.cfg.TokensPerChunk, j.want-made)
			g.count.Tokens.Add(int64(n))
			r.gauges.given(j, n, now)
			if made+n < j.want {
				j.Made.Store(int64(made + n))
				nudge(j.Wake)
				kept = append(kept, j)
				continue
			}
			r.gauges.ended(j, j.want)
			if j.Keeps {
				r.answered = append(r.answered, j)
			}
			leaving = append(leaving, j)
		}
		clear(r.running[len(kept):])
		r.running = kept
	}
	g.leave(leaving)
}

// leave tells requests that they are finished, once their slots are free.
func (g *Group) leave(leaving []*Job) {
	if len(leaving) == 0 {
		return
	}
	g.publish()
	for _, j := range leaving {
		j.phase = gone
		j.Made.Store(int64(j.want))
		j.End.Store(Finished)
		nudge(j.Wake)
	}
}

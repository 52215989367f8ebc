// Package group is the half of a reference engine that decodes: ranks that step together, with
// slots and KV blocks of their own. The ranks of an aggregated engine compute the prompts, too.
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

// New is a group without requests. caches are those of the ranks, nil for one that has none.
func New(cfg Config, count Counts, log *steplog.Log, caches []*cache.Cache) *Group {
	g := &Group{cfg: cfg, count: count, log: log, inbox: newMailbox[message](),
		ranks: make([]decodeRank, cfg.Ranks), loads: make([]steplog.RankLoad, cfg.Ranks), does: make([]step.Rank, cfg.Ranks), law: cfg.law(),
		caches: caches}
	if cfg.Mixed != nil {
		g.mixed = newMixed(g)
	}
	return g
}

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

// giveTurn says when in each step a request gets its token. Multiples of the golden ratio leave no
// large gap between the turns of requests that run together, however many these are.
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

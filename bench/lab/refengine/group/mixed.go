package group

import (
	"math"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/virtual"
)

// Mixed says how ranks compute prompts between their decodes.
type Mixed struct {
	Budget   int           // tokens of a rank in a step, of prompts and of answers
	Interval int           // prompts are computed in every so many steps
	First    bool          // a rank does not decode while it can compute a prompt
	Delay    int           // steps for which no prompt is begun until each rank has one; 0: none is held
	Shared   time.Duration // of a step, for each token of a prompt: the part that all ranks compute together
}

// mixed has ranks scheduled as in virtual time, and tells their requests.
type mixed struct {
	virtual.Mixed
	group   *Group
	jobs    map[int32]*Job
	last    int32     // number of a request
	leaving []*Job    // finished by the step that ends
	now     time.Time // when that ends
}

func newMixed(g *Group) *mixed {
	cfg, how := g.cfg, g.cfg.Mixed
	m := &mixed{group: g, jobs: map[int32]*Job{}}
	m.Mixed = virtual.Mixed{
		Law:    cfg.law(),
		Budget: int32(how.Budget), Slots: cfg.Slots, KVCapacity: int64(cfg.Blocks) * cache.BlockSize, Block: cache.BlockSize,
		Interval: int64(how.Interval), AfterPrompts: how.First, PrefillFirst: how.First, Delay: how.Delay,
		Ranks: make([]virtual.MixedRank, cfg.Ranks), Ends: virtual.Never,
		Cached: m.cached, Computed: m.computed, Token: m.token, Finished: m.finished,
	}
	return m
}

// law is what a step of the group takes.
func (c *Config) law() step.Law {
	if c.Law != nil {
		return *c.Law
	}
	l := step.Law{
		Model: step.Model{C0Ms: ms(c.C0), RequestMs: ms(c.CR), C1Ms: ms(c.C1)}, Form: c.Form, MostRowsMs: ms(c.CM), MeanRowsMs: ms(c.CS),
		Sizes: step.Captured(c.Captured),
	}
	if c.Mixed != nil {
		l.OwnPromptMs, l.SharedPromptMs, l.PrefillMs = ms(c.PrefillPer), ms(c.Mixed.Shared), ms(c.PrefillBase)
	}
	return l
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// receive takes a message. Only requests that are computed here come, and no KV lands.
func (m *mixed) receive(of message, r *decodeRank) {
	j := of.job
	switch of.kind {
	case submit:
		m.last++
		j.number = m.last
		m.jobs[j.number] = j
		m.Add(j.rank, virtual.MixedRequest{Job: j.number, Prompt: int32(j.prompt), Left: int32(j.want)})
		on := &m.Ranks[j.rank]
		present := int64(len(on.Waiting) + len(on.Running))
		if present > int64(m.Slots) && !j.Beyond {
			m.group.count.OverAdmitted.Add(1)
		}
		r.gauges.Most.Store(max(r.gauges.Most.Load(), present))
	case cancel:
		m.Drop(j.rank, j.number)
		delete(m.jobs, j.number)
		j.phase = gone
	case landed, strand:
	}
}

func (m *mixed) begin() (length time.Duration, busy bool) {
	before := m.Preemptions
	m.Begin(0)
	m.group.count.Preemptions.Add(int64(m.Preemptions - before))
	if m.Ends == virtual.Never {
		return 0, false
	}
	for i, does := range m.RankWork {
		m.group.loads[i] = steplog.RankLoad{Running: int(does.Requests), KVTokens: int(does.KV), Prefill: int(does.Prompt)}
	}
	return time.Duration(math.Round(m.Ends * float64(time.Millisecond))), true
}

// end returns the requests that the step has finished.
func (m *mixed) end() []*Job {
	clear(m.leaving)
	m.leaving = m.leaving[:0]
	m.now = time.Now()
	m.Finish()
	return m.leaving
}

// cached looks a prompt up when it is admitted. Usage and metrics tell of the first time only.
func (m *mixed) cached(rank int, w *virtual.MixedRequest) int32 {
	j, of := m.jobs[w.Job], m.group.caches[rank]
	n, _ := of.Match(j.salt, j.ids)
	if j.phase == queued && of != nil {
		gauges := &m.group.ranks[rank].gauges
		gauges.Queries.Add(int64(j.prompt))
		gauges.Hits.Add(int64(n))
		j.Cached.Store(int64(n))
	}
	j.phase = running
	return int32(n)
}

// computed has the blocks of a chunk in the prefix cache once the step ends that computed it.
func (m *mixed) computed(rank int, w *virtual.MixedRequest) {
	j := m.jobs[w.Job]
	m.group.caches[rank].Add(j.salt, j.ids[:min(w.Done(), j.prompt)], false)
}

func (m *mixed) token(rank int, w *virtual.MixedRequest) {
	m.group.count.Tokens.Add(1)
	j := m.jobs[w.Job]
	m.group.ranks[rank].gauges.given(j, 1, m.now)
	if w.Left > 0 {
		j.Made.Store(int64(w.Gen))
		nudge(j.Wake)
	}
}

func (m *mixed) finished(rank int, w *virtual.MixedRequest) {
	m.group.ranks[rank].gauges.ended(m.jobs[w.Job], int(w.Gen))
	m.leaving = append(m.leaving, m.jobs[w.Job])
	delete(m.jobs, w.Job)
}

func (m *mixed) publish(rank int, to *Gauges) {
	r := &m.Ranks[rank]
	to.Running.Store(int64(len(r.Running)))
	to.Waiting.Store(int64(len(r.Waiting)))
	to.KVBlocks.Store(r.KV / cache.BlockSize)
}

package prefill

import (
	"fmt"
	"slices"
	"time"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/policy"
	"evenkeel/prefill/queue"
	"evenkeel/prefill/steer"
)

// CandidateStatus is what the admin API shows of a candidate.
type CandidateStatus struct {
	ID              string   `json:"id"`
	Instance        string   `json:"instance"`
	Models          []string `json:"models"`
	Aggregated      bool     `json:"aggregated,omitempty"` // it is a group of ranks that prefill and decode: it has no KV gate, and is asked for no gauges
	State           string   `json:"state"`                // open, closed (KV gate), out (circuit), unknown (its models), down, removed
	GateOpen        bool     `json:"gate_open"`
	Inflight        int      `json:"inflight_requests"`
	QueuedNewTokens int64    `json:"queued_new_tokens"`
	KVTokens        int64    `json:"kv_tokens"`
	CapacityTokens  int64    `json:"capacity_tokens"` // 0: unknown
	Pooled          int      `json:"pooled"`
	Dispatched      int      `json:"dispatched"`
	Orphans         int      `json:"orphans"`
	OwnUsage        float64  `json:"kv_usage_own"`
	ScrapedUsage    *float64 `json:"kv_usage_scraped"` // null: not known, or stale
	Stale           bool     `json:"gauges_stale"`     // its last scrapes failed: the proxy uses its own accounts, and prefers engines that tell their gauges
	Foreign         float64  `json:"foreign_requests"`
	ScrapeMisses    int      `json:"scrape_misses"`

	Batch       float64  `json:"bs"`
	BacklogMs   float64  `json:"backlog_ms"`
	OthersMs    float64  `json:"backlog_others_ms"` // the part of backlog_ms that other proxies and strangers sent
	ResidualMs  float64  `json:"residual_ms"`       // that its prefills lately took beyond their prediction; below 0: less
	Waiting     float64  `json:"waiting"`           // requests in the engine's queue; waiting and running include ours since the scrape
	Running     float64  `json:"running"`
	HeldTokens  int64    `json:"held_tokens"`
	ScrapeAgeMs *float64 `json:"scrape_age_ms"` // of what the engine said of itself; null: nothing yet
	AnswerAgeMs *float64 `json:"answer_age_ms"` // of its last answer to a probe; null: none yet
	OldestMs    *float64 `json:"oldest_ms"`     // since its oldest unanswered probe was sent; null: none
	CanStart    bool     `json:"can_start"`     // one more probe
	DecodeFull  bool     `json:"decode_full"`   // what it prefills would wait for a decode slot in its region; with engines of several regions only
	RTTMs       float64  `json:"rtt_ms"`
	CacheStatus
	FaultStatus

	sums   ledger.Sums
	missed uint64
}

// FaultStatus is what failed at a candidate lately.
type FaultStatus struct {
	Failures int    `json:"failures"`        // in a row
	Fault    string `json:"fault,omitempty"` // what the last one was
}

// CacheStatus is what is thought of a candidate's prefix cache.
type CacheStatus struct {
	IndexBlocks     int             `json:"index_blocks"`               // blocks that the candidate holds by the prefix index
	Mode            string          `json:"mode"`                       // of its part of the index: approximate, or precise where prompts are token ids
	Events          *EventsStatus   `json:"kv_events,omitempty"`        // nil: it publishes none
	HitShare        float64         `json:"hit_share"`                  // of prompt tokens, lately found in its cache
	Mispredicted    float64         `json:"mispredicted_share"`         // of the tokens lately predicted to be in its cache
	CapacitySuspect cache.Suspicion `json:"capacity_suspect,omitempty"` // less, more: its cache does not look as large as its capacity

	accuracy cache.Accuracy
}

// Status returns the candidates in configured order, removed ones last.
func (t *Tier) Status() []CandidateStatus {
	s, _ := t.status()
	return s
}

// status is Status, and the audit at the same moment: its Drift is final, without what the candidates hold.
func (t *Tier) status() ([]CandidateStatus, ledger.Audit) {
	t.lock()
	defer t.unlock()
	ordered := make([]*candidate, 0, len(t.candidates))
	for _, c := range t.candidates {
		ordered = append(ordered, c)
	}
	slices.SortFunc(ordered, func(audit, b *candidate) int {
		switch {
		case audit.configured == b.configured:
			return audit.order - b.order
		case audit.configured:
			return -1
		}
		return 1
	})
	audit := t.ledger.Audit()
	all := make([]CandidateStatus, 0, len(ordered))
	for _, c := range ordered {
		audit.Drift -= int64(c.account.Held())
		all = append(all, t.choose.describeCandidate(c))
	}
	return all, audit
}

// describeCandidate copies what is known of a candidate. The times of its backlog are those of prefills of its first
// model.
func (d *chooser) describeCandidate(c *candidate) CandidateStatus {
	a := &c.account
	line := policy.Line{}
	if len(c.Models) > 0 {
		line, _ = d.line(c.Models[0], c)
	}
	backlog, others := d.backlog(c, line, 0)
	waiting, running := a.Queue()
	return CandidateStatus{
		ID:              c.ID,
		Instance:        c.Instance,
		Models:          c.Models,
		Aggregated:      c.Mixed,
		State:           c.word(d.now),
		GateOpen:        !a.Closed(d.now),
		Inflight:        a.Leases[ledger.Probing],
		QueuedNewTokens: a.NewTokens,
		KVTokens:        a.KVTokens(),
		CapacityTokens:  a.Capacity(),
		Pooled:          a.Leases[ledger.Pooled],
		Dispatched:      a.Leases[ledger.Dispatched],
		Orphans:         a.Leases[ledger.Orphaned],
		OwnUsage:        a.Own(),
		ScrapedUsage:    finite(a.GaugeUsage(d.now)),
		Stale:           a.Stale(),
		missed:          a.Missed,
		Foreign:         a.Foreign,
		ScrapeMisses:    a.Misses,
		FaultStatus:     FaultStatus{c.circuit.Failures(), c.fault},
		Batch:           a.Batch(d.now),
		BacklogMs:       backlog,
		OthersMs:        others,
		ResidualMs:      c.residual.Ms(d.now),
		Waiting:         waiting,
		Running:         running,
		HeldTokens:      a.KVTokens() - a.Tokens[ledger.Probing],
		ScrapeAgeMs:     age(d.now, a.Sampled),
		AnswerAgeMs:     age(d.now, a.AnsweredAt),
		OldestMs:        age(d.now, a.OldestSent()),
		CanStart:        d.canStart(&Request{}, c),
		DecodeFull:      d.decodeFull(c),
		RTTMs:           c.rttMs(),
		CacheStatus: CacheStatus{
			IndexBlocks: c.cache.Held(), Mode: c.cache.Mode(d.now), Events: c.eventsStatus(),
			HitShare: c.cache.Accuracy.Hits(), Mispredicted: c.cache.Accuracy.Off(), CapacitySuspect: c.cache.Accuracy.Suspect,
			accuracy: c.cache.Accuracy,
		},
		sums: a.Sums,
	}
}

// age is how long ago a moment was, in ms; nil for one that never was.
func age(now, then time.Time) *float64 {
	if then.IsZero() {
		return nil
	}
	ms := float64(now.Sub(then)) / float64(time.Millisecond)
	return &ms
}

// Overview is the tier as operators see it.
type Overview struct {
	Policy     string            `json:"policy"`
	Policies   []string          `json:"policies"`         // names of all policies
	Waiting    int               `json:"waiting_requests"` // without batch
	Candidates []CandidateStatus `json:"candidates"`
	Ranks      []RankEvents      `json:"ranks,omitempty"` // that prefill and decode, and whose KV events are followed
	Lines      []LineStatus      `json:"lines"`
	Index      IndexStatus       `json:"index"`
}

// RankEvents is what KV events say of the cache of one rank that prefills and decodes. Such a rank is a part of a
// candidate, and has a cache of its own.
type RankEvents struct {
	ID     string       `json:"id"`
	Mode   string       `json:"mode"` // of its part of the index: approximate, or precise where prompts are token ids
	Events EventsStatus `json:"kv_events"`
}

// LineStatus is how long prefills take, as learned.
type LineStatus struct {
	Model    string  `json:"model"`
	Hardware string  `json:"hardware"`
	Known    bool    `json:"known"` // false: the line is only the one that learning starts from
	TPMs     float64 `json:"tp_ms"`
	T0Ms     float64 `json:"t0_ms"`
	Beta2Ms  float64 `json:"beta2_ms"`

	// What each request of others that runs beside adds, such as a decode.
	BesideTPMs float64 `json:"beside_tp_ms"`
	BesideT0Ms float64 `json:"beside_t0_ms"`

	R2      float64 `json:"r2"`
	Samples int     `json:"samples"`
}

// IndexStatus is how much the prefix index remembers.
type IndexStatus struct {
	Bytes           int64  `json:"bytes"`
	Blocks          int    `json:"blocks"`
	PromptTokens    uint64 `json:"prompt_tokens"` // of all requests so far, and of them hits
	PredictedTokens uint64 `json:"predicted_hit_tokens"`
	ActualTokens    uint64 `json:"actual_hit_tokens"`
}

// Overview copies what the tier knows.
func (t *Tier) Overview() Overview {
	o := Overview{Candidates: t.Status(), Ranks: t.ranks(), Lines: []LineStatus{}}
	t.lock()
	defer t.unlock()
	o.Policy, o.Policies, o.Waiting = t.steer.Usual().String(), t.steer.Names(), t.queue.Len()-t.queue.ByPriority()[queue.Batch]
	for _, of := range t.fit.All() {
		law, known := t.fit.Law(of.Model, of.Hardware)
		o.Lines = append(o.Lines,
			LineStatus{
				Model: of.Model, Hardware: of.Hardware, Known: known, TPMs: law.TPMs, T0Ms: law.T0Ms, Beta2Ms: law.Beta2,
				BesideTPMs: law.BesideTPMs, BesideT0Ms: law.BesideT0Ms, R2: of.R2(), Samples: of.Samples(),
			})
	}
	stats, tokens := t.cache.Stats(), &t.cache.Totals
	o.Index = IndexStatus{
		Bytes: stats.Bytes, Blocks: stats.Entries, PromptTokens: tokens.Prompt, PredictedTokens: tokens.Predicted,
		ActualTokens: tokens.Actual,
	}
	return o
}

// ranks are the ranks that prefill and decode, and whose KV events are followed.
func (t *Tier) ranks() []RankEvents {
	if t.cfg.Ranks == nil {
		return nil
	}
	return t.cfg.Ranks.Events()
}

// HotspotClass is a class of requests with the same long prefix, which is watched because it may ask too much of the engines that hold it.
type HotspotClass = steer.HotspotClass

// Hotspots lists the classes of requests that are watched, the most frequent
// first.
func (t *Tier) Hotspots() []HotspotClass {
	t.lock()
	defer t.unlock()
	if t.steer.Hotspots == nil {
		return []HotspotClass{}
	}
	return t.steer.Hotspots.List(t.now)
}

// Scored is what one policy would do with a request.
type Scored struct {
	Policy    string       `json:"policy"`
	Candidate string       `json:"candidate"`
	Scores    []policy.Row `json:"scores"` // the chosen first, then by score
}

// mostRows bounds the candidates of a score table.
const mostRows = 64

// Score asks every policy about a request, without sending or booking it.
func (t *Tier) Score(r Request) ([]Scored, error) {
	t.lock()
	defer t.unlock()
	if err := t.servable(r.Model); err != nil {
		return nil, err
	}
	m := t.models[r.Model]
	eligible, _ := t.choose.filterCircuit(&Request{}, m.servers)
	eligible = t.choose.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, fmt.Errorf("%w: no prefill engine is left to score for model %q; see GET /prefill", ErrKVExhausted, r.Model)
	}
	t.choose.look(m, &r, eligible)
	var all []Scored
	for _, name := range t.steer.Names() {
		p, err := t.steer.Named(name)
		if err != nil {
			return nil, err
		}
		choice := p.Choose(&policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}, t.choose.view)
		all = append(all, Scored{name, t.choose.view[choice.Index].ID, p.Explain(t.choose.view, choice.Index, mostRows)})
	}
	return all, nil
}

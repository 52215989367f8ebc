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

// CandidateStatus is the state of a candidate in the admin API.
type CandidateStatus struct {
	ID              string   `json:"id"`
	Instance        string   `json:"instance"`
	Models          []string `json:"models"`
	Aggregated      bool     `json:"aggregated,omitempty"` // a group of ranks that prefill and decode, without KV gate and gauges
	State           string   `json:"state"`                // open, closed (KV gate), out (circuit), unknown (no models named), down, removed
	GateOpen        bool     `json:"gate_open"`
	Inflight        int      `json:"inflight_requests"`
	QueuedNewTokens int64    `json:"queued_new_tokens"`
	KVTokens        int64    `json:"kv_tokens"`
	CapacityTokens  int64    `json:"capacity_tokens"` // KV tokens that fit on the candidate; 0: unknown
	Pooled          int      `json:"pooled"`
	Dispatched      int      `json:"dispatched"`
	Orphans         int      `json:"orphans"`
	OwnUsage        float64  `json:"kv_usage_own"`
	ScrapedUsage    *float64 `json:"kv_usage_scraped"` // share of the KV cache in use, as the engine's gauge shows; null: not known, or stale
	Stale           bool     `json:"gauges_stale"`     // the last scrapes failed, so that the proxy prefers other engines
	Foreign         float64  `json:"foreign_requests"`
	ScrapeMisses    int      `json:"scrape_misses"`

	Batch       float64  `json:"bs"`
	BacklogMs   float64  `json:"backlog_ms"`
	OthersMs    float64  `json:"backlog_others_ms"` // the part of backlog_ms for prompts that other proxies and clients sent
	ResidualMs  float64  `json:"residual_ms"`       // ms by which recent prefills took longer than predicted; negative: shorter
	Waiting     float64  `json:"waiting"`           // requests in the engine's queue; probes since the scrape count here and in running
	Running     float64  `json:"running"`
	HeldTokens  int64    `json:"held_tokens"`
	ScrapeAgeMs *float64 `json:"scrape_age_ms"` // age of the last good scrape in ms; null: none yet
	AnswerAgeMs *float64 `json:"answer_age_ms"` // ms since the engine last answered a probe; null: none yet
	OldestMs    *float64 `json:"oldest_ms"`     // ms since the oldest unanswered probe was sent; null: no probe is unanswered
	CanStart    bool     `json:"can_start"`     // one more probe may be sent to the candidate
	DecodeFull  bool     `json:"decode_full"`   // its prompts would wait for a decode slot; only set with engines in several regions
	RTTMs       float64  `json:"rtt_ms"`
	CacheStatus
	FaultStatus

	sums   ledger.Sums
	missed uint64
}

// FaultStatus shows the recent failures of a candidate.
type FaultStatus struct {
	Failures int    `json:"failures"`        // failed probes in a row
	Fault    string `json:"fault,omitempty"` // description of the last failure
	// LosesHandoffs: its hand-offs do not arrive at decode engines that work with others, so it gets
	// one prompt at times, as a trial.
	LosesHandoffs bool `json:"loses_handoffs,omitempty"`
}

// CacheStatus shows the prediction of a candidate's prefix cache.
type CacheStatus struct {
	IndexBlocks     int             `json:"index_blocks"`               // blocks that the candidate holds, according to the prefix index
	Mode            string          `json:"mode"`                       // approximate (from answers) or precise (from KV events)
	Events          *EventsStatus   `json:"kv_events,omitempty"`        // state of the candidate's KV events; nil: it publishes none
	HitShare        float64         `json:"hit_share"`                  // share of recent prompt tokens that the engine found in its cache
	Mispredicted    float64         `json:"mispredicted_share"`         // recent error of predicted cache hits, as a share of these hits
	CapacitySuspect cache.Suspicion `json:"capacity_suspect,omitempty"` // less or more: the cache seems smaller or larger than the capacity

	accuracy cache.Accuracy
}

// Status returns the candidates in configured order, removed ones last.
func (s *Scheduler) Status() []CandidateStatus {
	list, _ := s.status()
	return list
}

// status returns Status and the audit at the same time: charges that candidates still hold are no
// drift.
func (s *Scheduler) status() ([]CandidateStatus, ledger.Audit) {
	s.lock()
	defer s.unlock()
	ordered := make([]*candidate, 0, len(s.candidates))
	for _, c := range s.candidates {
		ordered = append(ordered, c)
	}
	slices.SortFunc(ordered, func(a, b *candidate) int {
		switch {
		case a.configured == b.configured:
			return a.order - b.order
		case a.configured:
			return -1
		}
		return 1
	})
	audit := s.ledger.Audit()
	all := make([]CandidateStatus, 0, len(ordered))
	for _, c := range ordered {
		audit.Drift -= int64(c.load.HeldPrompts())
		all = append(all, s.choose.describeCandidate(c))
	}
	return all, audit
}

// describeCandidate computes the backlog with the prefill times of the candidate's first model.
// CanStart is for a request that names no model and stays in this region.
func (d *chooser) describeCandidate(c *candidate) CandidateStatus {
	load := &c.load
	unansweredProbes, unansweredTokens := load.Leases[ledger.Probing], load.Tokens[ledger.Probing]
	latency := policy.Latency{}
	if len(c.Models) > 0 {
		latency, _ = d.latencyFor(c.Models[0], c)
	}
	backlog, othersPart := d.backlogMs(c, latency, 0) // no further probes
	waiting, running := load.RequestCounts()
	return CandidateStatus{
		ID:         c.ID,
		Instance:   c.Instance,
		Models:     c.Models,
		Aggregated: c.Aggregated,
		State:      c.stateName(d.now),

		Inflight:        unansweredProbes,
		QueuedNewTokens: load.NewTokens,
		KVTokens:        load.KVTokens(),
		HeldTokens:      load.KVTokens() - unansweredTokens, // only of prompts that are prefilled
		Pooled:          load.Leases[ledger.Pooled],
		Dispatched:      load.Leases[ledger.Dispatched],
		Orphans:         load.Leases[ledger.Orphaned],
		sums:            load.Sums,

		GateOpen:       !load.Closed(d.now),
		CapacityTokens: load.Capacity(),
		OwnUsage:       load.CountedUsage(),
		ScrapedUsage:   finiteOrNil(load.GaugeUsage(d.now)),

		Stale:        load.Stale(),
		ScrapeMisses: load.FailedInRow,
		missed:       load.FailedScrapes, // since the start
		ScrapeAgeMs:  age(d.now, load.SampledAt),
		RTTMs:        c.rttMs(),
		Waiting:      waiting,
		Running:      running,
		Foreign:      load.ObservedOthers, // OthersMs is a time

		Batch:       load.BatchSize(d.now),
		BacklogMs:   backlog,
		OthersMs:    othersPart,
		ResidualMs:  c.residual.Ms(d.now),
		CanStart:    d.canStart(&Request{}, c),
		DecodeFull:  d.lacksAnyDecodeSlot(c),
		AnswerAgeMs: age(d.now, load.AnsweredAt),
		OldestMs:    age(d.now, load.OldestSent()),
		FaultStatus: FaultStatus{c.circuit.Failures(), c.lastFault, !c.trialAt.IsZero()},

		CacheStatus: CacheStatus{
			IndexBlocks: c.cache.Held(), Mode: c.cache.Mode(d.now), Events: c.eventsStatus(),
			HitShare: c.cache.Accuracy.HitShare(), Mispredicted: c.cache.Accuracy.ErrorShare(), CapacitySuspect: c.cache.Accuracy.Suspect,
			accuracy: c.cache.Accuracy,
		},
	}
}

// age is in ms; nil: `then` is zero.
func age(now, then time.Time) *float64 {
	if then.IsZero() {
		return nil
	}
	ms := float64(now.Sub(then)) / float64(time.Millisecond)
	return &ms
}

// Overview is the state of the scheduler in the admin API.
type Overview struct {
	Policy     string            `json:"policy"`
	Policies   []string          `json:"policies"`         // names of all policies
	Waiting    int               `json:"waiting_requests"` // requests in the arrival queues, without batch
	Candidates []CandidateStatus `json:"candidates"`
	Ranks      []RankEvents      `json:"ranks,omitempty"` // ranks that prefill and decode, and whose KV events are followed
	Lines      []LineStatus      `json:"lines"`
	Index      IndexStatus       `json:"index"`
}

// RankEvents is the state of the KV events of one rank that prefills and decodes. Such a rank is a
// part of a candidate, and has its own prefix cache.
type RankEvents struct {
	ID     string       `json:"id"`
	Mode   string       `json:"mode"` // approximate (from answers) or precise (from KV events)
	Events EventsStatus `json:"kv_events"`
}

// LineStatus is the learned latency of prefills of one model on one kind of engine.
type LineStatus struct {
	Model    string  `json:"model"`
	Hardware string  `json:"hardware"`
	Known    bool    `json:"known"` // false: nothing is learned yet, and the latency is the configured one
	TPMs     float64 `json:"tp_ms"`
	T0Ms     float64 `json:"t0_ms"`
	Beta2Ms  float64 `json:"beta2_ms"`

	// How much longer a prompt takes for each request that runs beside it, such as a decode: per token
	// (in ms/token), and per prompt (ms).
	BesideTPMs float64 `json:"beside_tp_ms"`
	BesideT0Ms float64 `json:"beside_t0_ms"`

	R2      float64 `json:"r2"`
	Samples int     `json:"samples"`
}

// IndexStatus shows the size of the prefix index and its success.
type IndexStatus struct {
	Bytes           int64  `json:"bytes"`
	Blocks          int    `json:"blocks"`
	PromptTokens    uint64 `json:"prompt_tokens"` // prompt tokens of all requests since the start; the hits are part of them
	PredictedTokens uint64 `json:"predicted_hit_tokens"`
	ActualTokens    uint64 `json:"actual_hit_tokens"`
}

// Overview has one line for each model and kind of hardware.
func (s *Scheduler) Overview() Overview {
	o := Overview{Candidates: s.Status(), Ranks: s.ranks(), Lines: []LineStatus{}}
	s.lock()
	defer s.unlock()
	o.Policy = s.steering.Default().String()
	o.Policies = s.steering.Names()
	o.Waiting = s.queue.Len() - s.queue.ByPriority()[queue.Batch] // Len counts batch requests, too
	for _, learned := range s.fit.All() {
		fitted, known := s.fit.Latency(learned.Model, learned.Hardware)
		o.Lines = append(o.Lines, LineStatus{
			Model: learned.Model, Hardware: learned.Hardware, Known: known,
			TPMs: fitted.TPMs, T0Ms: fitted.T0Ms, Beta2Ms: fitted.Beta2, // ms per new token, per prompt, and per token pair of attention
			BesideTPMs: fitted.ConcurrentTPMs, BesideT0Ms: fitted.ConcurrentT0Ms,
			R2: learned.R2(), Samples: learned.Samples(),
		})
	}
	stats, tokens := s.cache.Stats(), &s.cache.Totals
	o.Index = IndexStatus{
		Bytes: stats.Bytes, Blocks: stats.Entries, PromptTokens: tokens.Prompt, PredictedTokens: tokens.Predicted,
		ActualTokens: tokens.Actual,
	}
	return o
}

func (s *Scheduler) ranks() []RankEvents {
	if s.cfg.Ranks == nil {
		return nil
	}
	return s.cfg.Ranks.Events()
}

// HotspotClass is a watched class: requests that share a long prefix, and may overload the engines
// that hold it.
type HotspotClass = steer.HotspotClass

// Hotspots lists the watched classes, the most frequent first.
func (s *Scheduler) Hotspots() []HotspotClass {
	s.lock()
	defer s.unlock()
	if s.steering.Hotspots == nil {
		return []HotspotClass{}
	}
	return s.steering.Hotspots.List(s.now)
}

// Scored is the choice that one policy would make for a request.
type Scored struct {
	Policy    string       `json:"policy"`
	Candidate string       `json:"candidate"`
	Scores    []policy.Row `json:"scores"` // the chosen candidate first, the others by score
}

const maxScoreRows = 64

// Score returns the choice of every policy for a request, without sending or charging it.
func (s *Scheduler) Score(r Request) ([]Scored, error) {
	s.lock()
	defer s.unlock()
	if err := s.checkServable(&r); err != nil {
		return nil, err
	}
	m := s.models[r.Model]
	eligible, _ := s.choose.filterCircuit(&Request{Model: r.Model}, m.candidates) // engines to which r may not go are scored, too
	if len(eligible) == 0 {
		return nil, fmt.Errorf("%w for model %q: none of the %d that serve it takes requests now; see GET /prefill",
			ErrUnavailable, r.Model, len(m.candidates))
	}
	eligible = s.choose.filterGate(eligible)
	if len(eligible) == 0 {
		return nil, fmt.Errorf("%w: no prefill engine is left to score for model %q; see GET /prefill", ErrKVExhausted, r.Model)
	}
	s.choose.fillView(m, &r, eligible)
	var all []Scored
	for _, name := range s.steering.Names() {
		p, err := s.steering.Named(name)
		if err != nil {
			return nil, err
		}
		choice := p.Choose(&policy.Query{ID: r.ID, Key: r.Session, Cursor: m.cursor}, s.choose.view)
		all = append(all, Scored{name, s.choose.view[choice.Index].ID, p.Explain(s.choose.view, choice.Index, maxScoreRows)})
	}
	return all, nil
}

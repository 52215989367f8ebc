package board

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/predictor"
)

// Status describes the boards for GET /status and for metrics.
type Status struct {
	Policy string        `json:"policy"` // of barrier groups
	Models []ModelStatus `json:"models"`
	Drift  DriftStatus   `json:"audit_drift"`
}

// DriftStatus is the total that was charged to ranks, less the total that was released, less what
// is still charged. Any number but zero is a bug in evenkeel.
type DriftStatus struct {
	Slots    int64 `json:"slots"`
	KVTokens int64 `json:"kv_tokens"`
}

// ModelStatus describes the board of one model.
type ModelStatus struct {
	Model         string         `json:"model"`
	Pool          int            `json:"pool"`
	OldestSeconds float64        `json:"oldest_seconds"`
	PoolAges      []int          `json:"pool_ages"` // by the classes of PoolAgeSeconds
	Ticks         uint64         `json:"ticks"`
	Finished      uint64         `json:"finished"`
	Cancelled     uint64         `json:"cancelled"`
	Failed        uint64         `json:"failed"`
	OutputTokens  int64          `json:"output_tokens"` // of all requests that have ended
	Groups        []GroupStatus  `json:"groups"`
	Workers       []WorkerStatus `json:"workers"`
	Pairs         []PairStatus   `json:"pairs,omitempty"` // that lose hand-offs
	// NoneArriveSince: since then no hand-off arrives anywhere, so nobody can be blamed; zero: not so.
	NoneArriveSince time.Time         `json:"no_handoff_arrives_since,omitzero"`
	Predictors      []PredictorStatus `json:"predictors,omitempty"`
}

// PredictorStatus says how much a predictor has learned, and how good its predictions were.
type PredictorStatus struct {
	Kind         string      `json:"kind"`
	Outputs      int         `json:"outputs"` // finished requests whose lengths it remembers
	Keys         int         `json:"keys,omitempty"`
	Drift        DriftReport `json:"drift"`          // of the last lengths from the table in use
	DriftFromFit DriftReport `json:"drift_from_fit"` // from the fit file (predictor.file)

	Scores *predictor.Scores `json:"scores,omitempty"` // nil: no policy used a prediction

	rows []predictor.Row // sample of predictions for Score
}

// DriftReport compares the last output lengths with an older distribution.
type DriftReport struct {
	Distance float64 `json:"distance"` // largest difference of the cumulative distributions, 0 to 1
	Critical float64 `json:"critical"` // chance alone exceeds this in one of a thousand comparisons
	Drifted  bool    `json:"drifted"`
}

// GroupStatus describes a group of ranks.
type GroupStatus struct {
	GroupLoads
	Held   int   `json:"held"`   // entries held back by the last decision, although a slot was free
	Budget int32 `json:"budget"` // placement changes that the policy may try in its next round

	Step *StepStatus `json:"step,omitempty"` // nil without a barrier: no common steps

	Rounds *RoundStatus `json:"rounds,omitempty"` // nil if the ranks do not prefill

	Steps StepHistogram `json:"-"`
}

// GroupLoads says how equal the loads of a group are.
type GroupLoads struct {
	Name           string `json:"name"`                      // empty: no barrier
	Barrier        bool   `json:"barrier"`                   // each step waits for the slowest rank
	Policy         string `json:"policy"`                    // decides now; may be the fallback
	FallbackRounds int    `json:"fallback_rounds"`           // rounds that the fallback still decides
	FallbackReason string `json:"fallback_reason,omitempty"` // slow: it computed for too long; blocked: a round took over a second
	// SteppingRanks are those that are not down. The loads below are theirs.
	SteppingRanks int     `json:"stepping_ranks"`
	KVTokens      int64   `json:"kv_tokens"`
	MeanTokens    float64 `json:"mean_tokens"`
	LeastTokens   int64   `json:"least_tokens"`
	MostTokens    int64   `json:"most_tokens"`
	// ImbalanceTokens sums, over the ranks, the largest KV load less the KV load of the rank.
	ImbalanceTokens int64 `json:"imbalance_tokens"`
	// IdleShare is imbalance_tokens divided by ranks times the largest load, 0 to 1.
	IdleShare float64 `json:"idle_share"`
}

// RoundStatus describes how held requests were sent to mixed ranks (roundCounts).
type RoundStatus struct {
	Sent         uint64  `json:"sent"`         // rounds
	RanksFilled  float64 `json:"ranks_filled"` // mean of the ranks with a prompt just after a round
	Steps        uint64  `json:"steps"`
	PrefillSteps uint64  `json:"prefill_steps"` // with a prompt on at least one rank
	EmptyShare   float64 `json:"empty_share"`   // mean share of ranks without a prompt, 0 to 1
	// MostBacklog is the largest backlog of a rank, in prompt tokens.
	MostBacklog int64   `json:"most_backlog_tokens"`
	MeanBacklog float64 `json:"mean_backlog_tokens"`
	HeldS       float64 `json:"held_seconds"`     // of the oldest held entry; 0: none
	MaxHoldS    float64 `json:"max_hold_seconds"` // longest hold that the policy allows
}

// StepStatus says how long the steps of a group take, and how much of this time imbalance costs.
type StepStatus struct {
	// MeanMs is the mean length or, if none was measured, that of the model at the present loads; 0:
	// unknown.
	MeanMs float32 `json:"mean_ms"`
	C0Ms   float64 `json:"c0_ms"` // of a step without load, by the step model
	C1Ms   float64 `json:"c1_ms"` // per KV token on the fullest rank; 0: unknown
	// RequestMs is what a request on the fullest rank adds beside its KV; 0: not surely known yet.
	RequestMs   float64 `json:"request_ms"`
	OwnPromptMs float64 `json:"own_prefill_ms"` // per prompt token of the slowest rank; 0: unknown
	// SharedPromptMs is per prompt token on any rank, times the number of ranks.
	SharedPromptMs float64 `json:"shared_prefill_ms"`
	PrefillMs      float64 `json:"prefill_step_ms"` // added if any rank computes a prompt
	// RequestTokens is how many KV tokens policies count for each request beside its own KV: half in
	// the load of its rank, and half on the rank with the most requests. It is set even while no step
	// model is in use.
	RequestTokens int64 `json:"request_tokens"`
	// Source is learned or configured; empty: there is no model.
	Source string `json:"source"`
	// Bottleneck says which ranks a step waits for: the fullest one, or one with the most KV and one
	// with the most requests. Empty: not known.
	Bottleneck step.Bottleneck `json:"requests_of"`
	Samples    uint64          `json:"samples"` // steps from which the model was learned
	// R2 is the share of the variance that the learned model explains, 0 to 1, even if it is not in
	// use.
	R2 float64 `json:"r2"`
	// ModelMs is for the present loads; 0: there is no model.
	ModelMs   float64 `json:"model_ms"`
	LostShare float64 `json:"lost_share"`    // share of model_ms that imbalance costs, 0 to 1
	LostMs    float64 `json:"lost_ms"`       // the same in ms
	Says      string  `json:"says"`          // a sentence with lost_share; empty: no model
	Why       string  `json:"why,omitempty"` // why there is no model

	// SyncWaitMs is the mean wait of a rank for the others before a step, between the last two reads
	// of the engines' metrics. 0: not reported, or no step.
	SyncWaitMs float64 `json:"sync_wait_ms,omitempty"`
}

// StepHistogram is the histogram of step times behind the metric evenkeel_step_seconds.
type StepHistogram = step.Histogram

// WorkerStatus describes one decode rank. Its counts begin when the rank joins the fleet.
type WorkerStatus struct {
	ID      int32  `json:"id"`
	Name    string `json:"name"`
	Group   string `json:"group"`
	Barrier bool   `json:"barrier"`
	// State is absent, down, late, out, starting, up, paused, halted, unowned, broken, lost, draining
	// or odd. The fleet fills in State and Why.
	State string `json:"state,omitempty"`
	Why   string `json:"why,omitempty"`
	Up    bool   `json:"up"`
	// Down: the engine does not answer, or goes on without this rank, so the rank takes no part in
	// steps.
	Down    bool `json:"down"`
	Removed bool `json:"removed"` // left the fleet, but some slots are not released yet
	Slots   int  `json:"slots"`
	Limit   int  `json:"limit"` // slots that may be used now; 0 while the rank is not up
	// Used may be above slots under a policy that sends requests at once or ahead.
	Used int `json:"used"`
	// InEngineQueue counts the used slots whose requests wait in the engine's own queue.
	InEngineQueue int    `json:"beyond_slots"`
	Running       int    `json:"running"`
	Transferring  int    `json:"transferring"` // have a slot, but no first event yet
	Output        int64  `json:"output_tokens"`
	Answers       uint64 `json:"answers"`               // complete
	Empty         uint64 `json:"empty_answers"`         // complete, but without any text
	NoUsage       uint64 `json:"answers_without_usage"` // complete, but without token usage
	KVTokens      int64  `json:"kv_tokens"`
	// Unread is the part of kv_tokens that no decode step reads yet.
	Unread int64 `json:"unread_kv_tokens,omitempty"`
	// Others is the KV of requests of other proxies, above 0 only for a while after a takeover of the
	// rank.
	Others   int64 `json:"others_kv_tokens"`
	Capacity int64 `json:"capacity"` // KV tokens; 0: unlimited
	// Tight: after preemptions, the rank gets less KV than usual for a minute.
	Tight   bool   `json:"tight"`
	Early   bool   `json:"early,omitempty"` // requests get a slot before their prefill
	Bound   int    `json:"bound,omitempty"` // got a slot before their prefill, no event yet
	Mixed   bool   `json:"mixed,omitempty"`
	Backlog int64  `json:"backlog_tokens,omitempty"`
	Prompts uint64 `json:"prompts,omitempty"` // sent so far
	// Orphans is the KV that the engine may still hold of requests that ended before it was written.
	Orphans int64 `json:"orphan_kv_tokens,omitempty"`
	// Kept is the KV of ended answers that the engine keeps.
	Kept  int64 `json:"kept_kv_tokens,omitempty"`
	Keeps bool  `json:"keeps,omitempty"`
	// Lists is shown with the rank's engine in GET /status.
	Lists *Names `json:"-"`
}

// Loads has only the loads of all ranks, in no order, so that it can be read often.
type Loads struct {
	Ranks        []Load // in the fleet and not down
	Pool         int    // waiting entries of all boards
	OutputTokens int64  // of all ended and running requests
}

// Load is the present load of one rank, and its answers.
type Load struct {
	Worker         int32
	Running        int
	KVTokens       int64
	Output         int64  // tokens of all answers
	Answers, Empty uint64 // complete answers; those of them without any text
}

// Status copies the state of all boards. The caller applies Counts just before. The boards then
// forget these Counts, because the next event would take them for present ones.
func (l *Boards) Status(now time.Time) Status {
	defer l.forgetCounts()
	s := Status{Policy: l.policyName, Models: make([]ModelStatus, 0, len(l.boards))}
	for _, b := range l.inOrder {
		s.Models = append(s.Models, b.status(now))
		slots, kvTokens := b.drift()
		s.Drift.Slots += slots
		s.Drift.KVTokens += kvTokens
	}
	return s
}

// Loads uses Counts as Status does.
func (l *Boards) Loads() Loads {
	defer l.forgetCounts()
	ranks := 0
	for _, b := range l.inOrder {
		ranks += len(b.ranks)
	}
	all := Loads{Ranks: make([]Load, 0, ranks)}
	for _, b := range l.inOrder {
		all.Pool += b.pool.Len()
		all.OutputTokens += b.outputTokens // of ended answers
		b.refreshAllLoads()
		for _, r := range b.ranks {
			runningTokens := r.runningTokens()
			all.OutputTokens += runningTokens
			if r.present && !r.Down { // others count only in the sum of output tokens
				all.Ranks = append(all.Ranks, Load{
					Worker: r.ID, Running: b.begunAnswers(r), KVTokens: r.kv, Output: r.outputTokens + runningTokens,
					Answers: r.answers, Empty: r.emptyAnswers,
				})
			}
		}
	}
	return all
}

// refreshAllLoads must run before any load is read, because the update of one rank may charge KV to
// other ranks (unpinned.go).
func (b *board) refreshAllLoads() {
	for _, r := range b.ranks {
		b.refreshLoad(r)
	}
}

func (r *rank) runningTokens() (tokens int64) {
	for i := range r.running {
		tokens += int64(r.running[i].Generated)
	}
	return tokens
}

func (b *board) begunAnswers(r *rank) (n int) {
	for _, slot := range r.slots {
		if b.hasBegun(slot) {
			n++
		}
	}
	return n
}

func (b *board) status(now time.Time) ModelStatus {
	m := ModelStatus{
		Model: b.model, Pool: b.pool.Len(), OldestSeconds: b.pool.Oldest(now).Seconds(), Ticks: b.ticks,
		Finished: b.outcomes[Finished], Cancelled: b.outcomes[Cancelled], Failed: b.outcomes[Failed], OutputTokens: b.outputTokens,
		Groups: make([]GroupStatus, 0, len(b.groups)), Workers: make([]WorkerStatus, 0, len(b.ranks)),
	}
	m.PoolAges = b.poolAges(now)
	b.refreshAllLoads()
	for _, r := range b.ranks {
		m.Workers = append(m.Workers, b.rankStatus(r, now))
	}
	slices.SortFunc(m.Workers, func(x, y WorkerStatus) int { return cmp.Compare(x.ID, y.ID) })
	for _, g := range b.groups {
		m.Groups = append(m.Groups, g.status(now))
	}
	m.Predictors, m.Pairs = b.predictorStatuses(), b.pairs.status()
	m.NoneArriveSince = b.pairs.NoneArrivesSince()
	return m
}

// PoolAgeSeconds are the upper bounds of the classes of ModelStatus.PoolAges; the last class has
// none.
var PoolAgeSeconds = []float64{0.1, 0.3, 1, 3, 10, 30}

func (b *board) poolAges(now time.Time) []int {
	ages := make([]int, len(PoolAgeSeconds)+1)
	for _, e := range b.pool.Entries() {
		at, _ := slices.BinarySearch(PoolAgeSeconds, e.Wait(now).Seconds())
		ages[at]++
	}
	return ages
}

// rankStatus needs loads that are up to date (refreshLoad).
func (b *board) rankStatus(r *rank, now time.Time) WorkerStatus {
	w := WorkerStatus{
		ID: r.ID, Name: r.Name, Group: r.Group, Barrier: r.Barrier, Lists: r.Lists,
		Up: r.Up && r.present, Down: r.Down, Removed: !r.present,
		Slots: r.Slots, Used: len(r.slots), InEngineQueue: r.engineQueued,
		KVTokens: r.kv - r.Others, // the KV of other proxies is shown apart
		Others:   r.Others, Capacity: r.Capacity,
		Unread:  r.notDecodingKV,
		Tight:   r.pressure.isTight(now),
		Orphans: r.orphanedKV, Kept: r.keptKV.Tokens(), Keeps: r.KeepsKVFor > 0,
		Early: r.Early,
		Mixed: r.Mixed, Backlog: r.backlog, Prompts: r.promptsSent,
		Answers: r.answers, Empty: r.emptyAnswers, NoUsage: r.answersWithoutUsage,
		Output: r.outputTokens + r.runningTokens(),
	}
	if w.Up {
		w.Limit = r.usableSlots()
	}
	for _, slot := range r.slots {
		if b.hasBegun(slot) {
			w.Running++
		} else if b.slots.records[slot].boundBeforePrefill {
			w.Bound++
		}
	}
	w.Transferring = w.Used - w.Running // with those in Bound
	return w
}

// status needs loads that are up to date (refreshLoad). One balance is of the KV tokens that steps
// read, the other of the loads, which also count requests and unequal hardware, and decide how long
// a step takes.
func (g *group) status(now time.Time) GroupStatus {
	s := GroupStatus{Held: g.heldEntries, Budget: g.searchBudget.evaluations()}
	s.Name, s.Barrier, s.Policy, s.FallbackRounds = g.name, g.barrier, g.policyInForce().name, g.fallbackRounds
	if g.fallbackRounds > 0 {
		s.FallbackReason = g.fallbackReason
	}
	var kv, loads policy.Balance
	requestWeight := g.knownRequestWeight()
	for _, r := range g.steppingRanks {
		kv.Add(r.decodingKV())
		loads.Add(r.stepLoad(requestWeight))
		s.KVTokens += r.kv
	}
	s.SteppingRanks, s.MeanTokens, s.LeastTokens, s.MostTokens = kv.Ranks, kv.Mean(), kv.Min, kv.Max
	if g.barrier {
		s.ImbalanceTokens, s.IdleShare = kv.Imbalance(), kv.IdleShare()
		s.Step, s.Steps = g.stepStatus(loads), g.steps.Histogram()
	}
	// In a model, all ranks are mixed or none is.
	if isMixed := len(g.steppingRanks) > 0 && g.steppingRanks[0].Mixed; isMixed {
		s.Rounds = g.roundStatus(now)
	}
	return s
}

func (g *group) roundStatus(now time.Time) *RoundStatus {
	counts := &g.roundCounts
	s := &RoundStatus{
		Sent: counts.rounds, RanksFilled: float64(counts.ranksFilled) / float64(max(1, counts.rounds)), Steps: counts.steps,
		PrefillSteps: counts.prefillSteps,
		EmptyShare:   float64(counts.idleInPrefillSteps) / float64(max(1, counts.ranksInPrefillSteps)), MaxHoldS: counts.maxHold.Seconds(),
	}
	if g.heldEntries > 0 {
		s.HeldS = max(0, now.Sub(counts.heldSince).Seconds())
	}
	for _, r := range g.steppingRanks {
		s.MostBacklog = max(s.MostBacklog, r.backlog)
		s.MeanBacklog += float64(r.backlog) / float64(len(g.steppingRanks))
	}
	return s
}

// stepStatus computes what imbalance costs: the step length at the present loads, less that with
// equal loads, by the step model without the costs of prompts. loads has the stepLoad of each rank.
func (g *group) stepStatus(loads policy.Balance) *StepStatus {
	m, source, r2 := g.steps.Model()
	s := &StepStatus{
		MeanMs: g.steps.Ms(m, loads.Max), C0Ms: m.C0Ms, C1Ms: m.C1Ms, RequestMs: m.RequestMs,
		OwnPromptMs: m.OwnPromptMs, SharedPromptMs: m.SharedPromptMs, PrefillMs: m.PrefillMs,
		RequestTokens: g.requestWeight(), Bottleneck: g.steps.Bottleneck(), Source: source, Samples: g.steps.Samples(), R2: r2,
	}
	if source == "" {
		s.Why = g.steps.WhyNoModel(r2)
	} else {
		s.ModelMs, s.LostShare = loads.StepMs(m.C0Ms, m.C1Ms), loads.LostShare(m.C0Ms, m.C1Ms)
		s.LostMs = s.ModelMs - loads.IdealStepMs(m.C0Ms, m.C1Ms)
		s.Says = fmt.Sprintf("this imbalance costs you %.1f %% of every step", 100*s.LostShare)
	}
	return s
}

// predictorStatuses is sorted by kind. A kind that policies use also gets the rows of all groups
// with such a policy, because they all use its one table.
func (b *board) predictorStatuses() []PredictorStatus {
	var all []PredictorStatus
	for key, learned := range b.predictors {
		if key.Model != b.model {
			continue
		}
		tables := learned.Tables
		p := PredictorStatus{
			Kind: string(key.Kind), Outputs: tables.counts.Outputs, Keys: tables.counts.Keys,
			Drift: driftReport(tables.driftFromTable), DriftFromFit: driftReport(tables.driftFromFit),
		}
		for _, g := range b.groups {
			if g.chosenPolicy.predictor == learned {
				p.rows = append(p.rows, g.forecast.Rows()...)
			}
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(x, y PredictorStatus) int { return cmp.Compare(x.Kind, y.Kind) })
	return all
}

func driftReport(d predictor.Drift) DriftReport {
	return DriftReport{Distance: d.Distance, Critical: d.Critical, Drifted: d.Drifted()}
}

// Score computes the scores of the predictors. Boards.Status leaves this out, because it takes too
// long for the goroutine that owns the boards.
func (s *Status) Score() {
	for i := range s.Models {
		for j := range s.Models[i].Predictors {
			if p := &s.Models[i].Predictors[j]; len(p.rows) > 0 {
				scores := predictor.Score(p.rows)
				p.Scores, p.rows = &scores, nil
			}
		}
	}
}

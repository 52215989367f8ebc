package board

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/verdict"
	"evenkeel/predictor"
)

// Status describes the boards for GET /status and for metrics.
type Status struct {
	Policy string        `json:"policy"` // of barrier groups
	Models []ModelStatus `json:"models"`
	Drift  DriftStatus   `json:"audit_drift"`
}

// DriftStatus is the result of a check of the accounts: what was charged, less what was released, less what is still charged. Any number
// but zero is a bug.
type DriftStatus struct {
	Slots    int64 `json:"slots"`
	KVTokens int64 `json:"kv_tokens"`
}

// ModelStatus describes the board of one model.
type ModelStatus struct {
	Model         string         `json:"model"`
	Pool          int            `json:"pool"`
	OldestSeconds float64        `json:"oldest_seconds"`
	PoolAges      []int          `json:"pool_ages"` // entries in each age class of PoolAgeSeconds; the last number is of the oldest entries
	Ticks         uint64         `json:"ticks"`
	Finished      uint64         `json:"finished"`
	Cancelled     uint64         `json:"cancelled"`
	Failed        uint64         `json:"failed"`
	OutputTokens  int64          `json:"output_tokens"` // of all requests that have ended
	Groups        []GroupStatus  `json:"groups"`
	Workers       []WorkerStatus `json:"workers"`
	Pairs         []PairStatus   `json:"pairs,omitempty"` // pairs of engines whose hand-offs have failed since one last worked
	// Predictors describe what is learned about the lengths of the model's answers, one for each kind of predictor.
	Predictors []PredictorStatus `json:"predictors,omitempty"`
}

// PredictorStatus says what a predictor has learned about output lengths, and how good its predictions were that policies used.
type PredictorStatus struct {
	Kind         string      `json:"kind"`
	Outputs      int         `json:"outputs"` // finished requests that it remembers
	Keys         int         `json:"keys,omitempty"`
	Drift        DriftReport `json:"drift"`          // difference of the last outputs from the table in use
	DriftFromFit DriftReport `json:"drift_from_fit"` // difference of the last outputs from the fit file

	Scores *predictor.Scores `json:"scores,omitempty"` // nil: no policy used a prediction

	rows []predictor.Row // a sample of predictions, from which Score computes Scores
}

// DriftReport says how much the output lengths have changed.
type DriftReport struct {
	Distance float64 `json:"distance"` // largest difference between the two cumulative distributions
	Critical float64 `json:"critical"` // by chance alone, Distance is larger than this once in a thousand times
	Drifted  bool    `json:"drifted"`
}

// GroupStatus describes a group of ranks about which a policy decides.
type GroupStatus struct {
	GroupLoads
	Held   int   `json:"held"`   // entries that the last decision held back although a slot was free for them
	Budget int32 `json:"budget"` // evaluations that the policy may spend on the next tick

	Step *StepStatus `json:"step,omitempty"` // nil without barrier

	GroupReports

	Steps StepHistogram `json:"-"`
}

// GroupReports has the reports about a group that only some groups have.
type GroupReports struct {
	Rounds *RoundStatus  `json:"rounds,omitempty"` // nil where the ranks do not prefill
	Twin   *verdict.Twin `json:"twin,omitempty"`   // nil without dispatch.twin, and before its first verdict
}

// GroupLoads describes a group, and how equal the loads of its ranks are.
type GroupLoads struct {
	Name            string  `json:"name"`            // empty for the ranks of a model that have no barrier: they are one group
	Barrier         bool    `json:"barrier"`         // its ranks step together: each step waits for the slowest rank
	Policy          string  `json:"policy"`          // in force now
	FallbackRounds  int     `json:"fallback_rounds"` // above 0: the policy was too slow, and the fallback decides this many more rounds
	SteppingRanks   int     `json:"stepping_ranks"`  // all but those whose engine is down; the loads below are theirs
	KVTokens        int64   `json:"kv_tokens"`       // of all these ranks
	MeanTokens      float64 `json:"mean_tokens"`
	LeastTokens     int64   `json:"least_tokens"`
	MostTokens      int64   `json:"most_tokens"`
	ImbalanceTokens int64   `json:"imbalance_tokens"` // sum over the ranks of the largest load less the rank's own load
	IdleShare       float64 `json:"idle_share"`       // imbalance_tokens as a share of the KV tokens if all ranks had the largest load
}

// RoundStatus describes how requests were sent to ranks that prefill and decode: together, in rounds.
type RoundStatus struct {
	Sent         uint64  `json:"sent"`                // rounds
	RanksFilled  float64 `json:"ranks_filled"`        // mean number of ranks that had a prompt to compute when a round was sent
	Steps        uint64  `json:"steps"`               // steps that were reported
	PrefillSteps uint64  `json:"prefill_steps"`       // steps in which a rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`         // mean share of the ranks that computed no prompt in such a step
	MostBacklog  int64   `json:"most_backlog_tokens"` // prompt tokens that the rank with the most of them has yet to compute
	MeanBacklog  float64 `json:"mean_backlog_tokens"`
	HeldS        float64 `json:"held_seconds"`     // since the first held entry could have been sent; 0: none is held
	MaxHoldS     float64 `json:"max_hold_seconds"` // the policy holds no request longer than this
}

// StepStatus says how long the steps of a group take, and how much of this time imbalance costs.
type StepStatus struct {
	MeanMs         float32         `json:"mean_ms"`           // 0 = unknown
	C0Ms           float64         `json:"c0_ms"`             // of the model in force
	C1Ms           float64         `json:"c1_ms"`             // time that a KV token of the fullest rank adds; 0 = unknown
	RequestMs      float64         `json:"request_ms"`        // time that a request of the fullest rank adds; 0 = not sure yet
	OwnPromptMs    float64         `json:"own_prefill_ms"`    // time that a prompt token adds if the slowest rank computes it; 0 = unknown
	SharedPromptMs float64         `json:"shared_prefill_ms"` // time that a prompt token of any rank adds, times the number of ranks
	PrefillMs      float64         `json:"prefill_step_ms"`   // time that a step takes longer if any rank computes a prompt
	RequestTokens  int64           `json:"request_tokens"`    // a request counts as this many KV tokens for policies, even while no model is good enough to be used: half in the load of its rank, and half on the rank with most requests
	Source         string          `json:"source"`            // learned or configured, empty: no model
	Bottleneck     step.Bottleneck `json:"requests_of"`       // ranks that a step waits for: the fullest rank, or two ranks, one with the most KV and one with the most requests; empty: the steps do not show it
	Samples        uint64          `json:"samples"`           // steps regressed
	R2             float64         `json:"r2"`                // of the learned model, in force or not
	ModelMs        float64         `json:"model_ms"`          // a step at the present loads by the model in force; 0 = no model
	LostShare      float64         `json:"lost_share"`        // the part of ModelMs that imbalance costs, 0 to 1
	LostMs         float64         `json:"lost_ms"`           // the part of ModelMs that imbalance costs, in ms
	Says           string          `json:"says"`              // LostShare in a sentence; empty while there is no model
	Why            string          `json:"why,omitempty"`     // why there is no model

	SyncWaitMs float64 `json:"sync_wait_ms,omitempty"` // mean time that a rank waited for the others before a step, by its engine's metrics, between their last two readings; 0: no engine reports it, or there was no step between them
}

// StepHistogram has the values of the metric evenkeel_step_seconds.
type StepHistogram = step.Histogram

// WorkerStatus describes one decode rank.
type WorkerStatus struct {
	ID            int32  `json:"id"`
	Name          string `json:"name"`
	Group         string `json:"group"`
	Barrier       bool   `json:"barrier"`
	State         string `json:"state,omitempty"` // absent, down, late, out, starting, up, paused, halted, unowned, broken, lost, draining or odd; the fleet fills it in
	Why           string `json:"why,omitempty"`   // why it takes no requests; the fleet fills it in
	Up            bool   `json:"up"`
	Down          bool   `json:"down"`    // its engine does not answer or goes on without it, so it does not step with its group
	Removed       bool   `json:"removed"` // no longer in the fleet, but some of its slots are not released yet
	Slots         int    `json:"slots"`
	Limit         int    `json:"limit"`        // slots that may be used now; 0 while the rank is not up
	Used          int    `json:"used"`         // may be above slots under an immediate policy, or because of beyond_slots
	InEngineQueue int    `json:"beyond_slots"` // used slots whose requests wait in the engine's own queue, because no slot or no KV room is free
	Running       int    `json:"running"`
	Transferring  int    `json:"transferring"`          // admitted, no event seen yet
	Output        int64  `json:"output_tokens"`         // of all answers since the rank joined the fleet
	Answers       uint64 `json:"answers"`               // complete answers since the rank joined the fleet
	Empty         uint64 `json:"empty_answers"`         // complete answers that the engine ended without any text
	NoUsage       uint64 `json:"answers_without_usage"` // complete answers for which the engine reported no token usage
	KVTokens      int64  `json:"kv_tokens"`
	Unread        int64  `json:"unread_kv_tokens,omitempty"` // the part of KVTokens for requests that do not decode yet, which no step reads
	Others        int64  `json:"others_kv_tokens"`           // of requests of other proxies, just after this proxy has taken over the rank
	Capacity      int64  `json:"capacity"`                   // KV tokens, 0 = unlimited
	Tight         bool   `json:"tight"`                      // its engine preempted requests, so it is kept emptier for a while
	Early         bool   `json:"early,omitempty"`            // its requests are bound before their prefill
	Bound         int    `json:"bound,omitempty"`            // requests that were bound before their prefill and have no event yet
	Mixed         bool   `json:"mixed,omitempty"`            // it prefills and decodes
	Backlog       int64  `json:"backlog_tokens,omitempty"`   // prompt tokens that it has yet to compute
	Prompts       uint64 `json:"prompts,omitempty"`          // prompts that were sent to it so far, if it is mixed
	Orphans       int64  `json:"orphan_kv_tokens,omitempty"` // of requests that ended before their KV had come, which its engine may still hold
	Kept          int64  `json:"kept_kv_tokens,omitempty"`   // of ended answers, which its engine keeps for the next turns of their chats
	Keeps         bool   `json:"keeps,omitempty"`            // its engine keeps the KV of ended answers
	Lists         *Names `json:"-"`                          // model names that requests may ask for; /status shows those of its engine
}

// Loads is a short status of all boards that costs as little as possible. The ranks are in no order.
type Loads struct {
	Ranks        []Load // ranks of the fleet that are not down
	Pool         int    // entries that wait
	OutputTokens int64  // of all requests that have ended or are running
}

// Load has the present load of one decode rank, and its answers since it joined the fleet.
type Load struct {
	Worker         int32
	Running        int
	KVTokens       int64
	Output         int64  // tokens of all its answers
	Answers, Empty uint64 // complete answers, and those of them that the engine ended without any text
}

// Status returns a copy of what the boards hold. It uses the Counts that were applied just before.
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

// Loads returns the loads of the ranks. It uses the Counts that were applied just before.
func (l *Boards) Loads() Loads {
	defer l.forgetCounts()
	ranks := 0
	for _, b := range l.inOrder {
		ranks += len(b.ranks)
	}
	all := Loads{Ranks: make([]Load, 0, ranks)}
	for _, b := range l.inOrder {
		all.Pool += b.pool.Len()
		all.OutputTokens += b.outputTokens
		b.refreshAll()
		for _, r := range b.ranks {
			output := r.runningTokens()
			all.OutputTokens += output
			if r.present && !r.Down {
				all.Ranks = append(all.Ranks, Load{
					Worker: r.ID, Running: b.begunAnswers(r), KVTokens: r.kv, Output: r.outputTokens + output,
					Answers: r.answers, Empty: r.emptyAnswers,
				})
			}
		}
	}
	return all
}

// refreshAll refreshes all ranks. This must be done before any load is read, because the refresh of a rank may charge KV to other ranks.
func (b *board) refreshAll() {
	for _, r := range b.ranks {
		b.refresh(r)
	}
}

// runningTokens returns how many tokens the answers have that the rank still generates.
func (r *rank) runningTokens() (tokens int64) {
	for i := range r.running {
		tokens += int64(r.running[i].Generated)
	}
	return tokens
}

// begunAnswers returns how many of the answers that a rank generates have begun.
func (b *board) begunAnswers(r *rank) (n int) {
	for _, slot := range r.slots {
		if b.hasBegun(slot) {
			n++
		}
	}
	return n
}

// status returns the status of the board, and refreshes all its ranks before.
func (b *board) status(now time.Time) ModelStatus {
	m := ModelStatus{
		Model: b.model, Pool: b.pool.Len(), OldestSeconds: b.pool.Oldest(now).Seconds(), Ticks: b.ticks,
		Finished: b.outcomes[Finished], Cancelled: b.outcomes[Cancelled], Failed: b.outcomes[Failed], OutputTokens: b.outputTokens,
		Groups: make([]GroupStatus, 0, len(b.groups)), Workers: make([]WorkerStatus, 0, len(b.ranks)),
	}
	m.PoolAges = b.poolAges(now)
	b.refreshAll()
	for _, r := range b.ranks {
		m.Workers = append(m.Workers, b.rankStatus(r, now))
	}
	slices.SortFunc(m.Workers, func(x, y WorkerStatus) int { return cmp.Compare(x.ID, y.ID) })
	for _, g := range b.groups {
		m.Groups = append(m.Groups, g.status(now))
	}
	m.Predictors, m.Pairs = b.predictorStatuses(), b.pairs.status()
	return m
}

// PoolAgeSeconds are the upper bounds of the age classes of ModelStatus.PoolAges, in s; the last class has no bound.
var PoolAgeSeconds = []float64{0.1, 0.3, 1, 3, 10, 30}

// poolAges returns how many entries wait, by age: up to each of PoolAgeSeconds, and longer.
func (b *board) poolAges(now time.Time) []int {
	ages := make([]int, len(PoolAgeSeconds)+1)
	for _, e := range b.pool.Entries() {
		at, _ := slices.BinarySearch(PoolAgeSeconds, e.Wait(now).Seconds())
		ages[at]++
	}
	return ages
}

// rankStatus returns the status of a rank, which must have been refreshed.
func (b *board) rankStatus(r *rank, now time.Time) WorkerStatus {
	w := WorkerStatus{
		Lists: r.Lists,
		ID:    r.ID, Name: r.Name, Group: r.Group, Barrier: r.Barrier, Up: r.Up && r.present, Down: r.Down, Removed: !r.present,
		Slots: r.Slots, Used: len(r.slots), InEngineQueue: r.engineQueued, KVTokens: r.kv - r.Others, Others: r.Others, Capacity: r.Capacity,
		Tight: r.pressure.isTight(now),
		Early: r.Early, Orphans: r.orphanedKV, Mixed: r.Mixed, Backlog: r.backlog, Prompts: r.promptsSent, Unread: r.notDecodingKV,
		Kept: r.keptKV.Tokens(), Keeps: r.KeepsKVFor > 0,
	}
	if w.Up {
		w.Limit = r.usableSlots()
	}
	for _, slot := range r.slots {
		if b.hasBegun(slot) {
			w.Running++
		} else if b.slots.records[slot].early {
			w.Bound++
		}
	}
	w.Transferring, w.Output = w.Used-w.Running, r.outputTokens+r.runningTokens()
	w.Answers, w.Empty, w.NoUsage = r.answers, r.emptyAnswers, r.answersWithoutUsage
	return w
}

// status returns the status of the group, whose ranks must have been refreshed.
func (g *group) status(now time.Time) GroupStatus {
	s := GroupStatus{Held: g.heldEntries, Budget: g.searchBudget.evaluations()}
	s.Name, s.Barrier, s.Policy, s.FallbackRounds = g.name, g.barrier, g.policyInForce().name, g.fallbackRounds
	var kv, cost policy.Balance
	weight := g.knownWeight()
	for _, r := range g.steppingRanks {
		kv.Add(r.decodingKV())
		cost.Add(r.stepLoad(weight))
		s.KVTokens += r.kv
	}
	s.SteppingRanks, s.MeanTokens, s.LeastTokens, s.MostTokens = kv.Ranks, kv.Mean(), kv.Min, kv.Max
	if g.barrier {
		s.ImbalanceTokens, s.IdleShare = kv.Imbalance(), kv.IdleShare()
		s.Step, s.Steps = g.stepStatus(cost), g.steps.Histogram()
	}
	if isMixed := len(g.steppingRanks) > 0 && g.steppingRanks[0].Mixed; isMixed { // all ranks of a model are, or none is
		s.Rounds = g.roundStatus(now)
	}
	return s
}

// roundStatus returns how many rounds were sent to a mixed group, how they filled its ranks with prompts, for how long requests are held
// back now, and how equal the backlogs of prompts on its ranks are.
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

// stepStatus returns the status of the group's steps. loads has the loads of the ranks as rank.stepLoad returns them.
func (g *group) stepStatus(loads policy.Balance) *StepStatus {
	m, source, r2 := g.steps.Model()
	s := &StepStatus{
		MeanMs: g.steps.Ms(m, loads.Max), C0Ms: m.C0Ms, C1Ms: m.C1Ms, RequestMs: m.RequestMs,
		OwnPromptMs: m.OwnPromptMs, SharedPromptMs: m.SharedPromptMs, PrefillMs: m.PrefillMs,
		RequestTokens: g.requestWeight(), Bottleneck: g.steps.Bottleneck(), Source: source, Samples: g.steps.Samples(), R2: r2,
	}
	if source == "" { // there is no model
		s.Why = g.steps.WhyNoModel(r2)
	} else {
		s.ModelMs, s.LostShare = loads.StepMs(m.C0Ms, m.C1Ms), loads.LostShare(m.C0Ms, m.C1Ms)
		s.LostMs = s.ModelMs - loads.IdealStepMs(m.C0Ms, m.C1Ms)
		s.Says = fmt.Sprintf("this imbalance costs you %.1f %% of every step", 100*s.LostShare)
	}
	return s
}

// predictorStatuses reports every kind of predictor that is learned for the board's model, sorted by kind. The report of the kind that a
// group's policy uses also has the group's forecasts with their outcomes (rows). Status.Score computes the scores from them later.
func (b *board) predictorStatuses() []PredictorStatus {
	var all []PredictorStatus
	for key, learned := range b.predictors {
		if key.Model != b.model {
			continue
		}
		tables := learned.Tables
		p := PredictorStatus{
			Kind: string(key.Kind), Outputs: tables.counts.Outputs, Keys: tables.counts.Keys,
			Drift: driftReport(tables.drift), DriftFromFit: driftReport(tables.fromFit),
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

// driftReport returns the form of a drift in which users see it.
func driftReport(d predictor.Drift) DriftReport {
	return DriftReport{Distance: d.Distance, Critical: d.Critical, Drifted: d.Drifted()}
}

// Score computes the scores of the predictors. It is not part of Boards.Status, because it takes too long for the goroutine that owns the
// boards and decides.
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

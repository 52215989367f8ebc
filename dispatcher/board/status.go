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
	Policy string        `json:"policy"` // name of the policy of barrier groups, whose ranks step together
	Models []ModelStatus `json:"models"`
	Drift  DriftStatus   `json:"audit_drift"`
}

// DriftStatus is the result of an audit of slots and KV tokens: the total that was charged to
// ranks, less the total that was released, less what is still charged. Any number but zero is a bug
// in evenkeel.
type DriftStatus struct {
	Slots    int64 `json:"slots"`
	KVTokens int64 `json:"kv_tokens"`
}

// ModelStatus describes the board of one model: its pool of waiting entries, its groups and its
// ranks.
type ModelStatus struct {
	Model         string         `json:"model"`
	Pool          int            `json:"pool"`
	OldestSeconds float64        `json:"oldest_seconds"`
	PoolAges      []int          `json:"pool_ages"` // waiting entries in each age class of PoolAgeSeconds; the last class has no upper bound
	Ticks         uint64         `json:"ticks"`
	Finished      uint64         `json:"finished"`
	Cancelled     uint64         `json:"cancelled"`
	Failed        uint64         `json:"failed"`
	OutputTokens  int64          `json:"output_tokens"` // tokens of the answers of all requests that have ended
	Groups        []GroupStatus  `json:"groups"`
	Workers       []WorkerStatus `json:"workers"`
	Pairs         []PairStatus   `json:"pairs,omitempty"` // engines, and pairs of engines, that lose hand-offs
	// NoneArriveSince is since when hand-offs are lost and none arrives anywhere, so that nobody can
	// be blamed; zero: this is not so.
	NoneArriveSince time.Time `json:"no_handoff_arrives_since,omitzero"`
	// Predictors has one report for each kind of predictor that learns the lengths of the model's
	// answers.
	Predictors []PredictorStatus `json:"predictors,omitempty"`
}

// PredictorStatus says from how many answers a predictor of output lengths has learned, and how
// good the predictions were that policies got from it.
type PredictorStatus struct {
	Kind         string      `json:"kind"`
	Outputs      int         `json:"outputs"` // number of finished requests whose output lengths the predictor remembers
	Keys         int         `json:"keys,omitempty"`
	Drift        DriftReport `json:"drift"`          // difference between the last output lengths and the table in use
	DriftFromFit DriftReport `json:"drift_from_fit"` // difference between the last output lengths and the fit file (predictor.file)

	Scores *predictor.Scores `json:"scores,omitempty"` // nil: no policy used a prediction

	rows []predictor.Row // a sample of predictions, from which Score computes Scores
}

// DriftReport compares the distribution of the last output lengths with an older one: that of the
// table in use, or of the fit file.
type DriftReport struct {
	Distance float64 `json:"distance"` // largest difference between the two cumulative distributions, 0 to 1
	Critical float64 `json:"critical"` // without any change, chance alone makes Distance larger than this in one of a thousand comparisons
	Drifted  bool    `json:"drifted"`
}

// GroupStatus describes a group of ranks for which one policy decides.
type GroupStatus struct {
	GroupLoads
	Held   int   `json:"held"`   // entries that the last decision held back although a slot was free for them
	Budget int32 `json:"budget"` // number of placement changes that the policy may try in its next round

	Step *StepStatus `json:"step,omitempty"` // nil for ranks without a barrier, which have no common steps

	Rounds *RoundStatus `json:"rounds,omitempty"` // nil if the ranks of the group do not prefill

	Steps StepHistogram `json:"-"`
}

// GroupLoads describes a group, and how equal the loads of its ranks are.
type GroupLoads struct {
	Name           string `json:"name"`                      // empty for the group of all ranks of a model that have no barrier
	Barrier        bool   `json:"barrier"`                   // true: the ranks of the group step together, so each step waits for the slowest rank
	Policy         string `json:"policy"`                    // name of the policy that decides now, which may be the fallback
	FallbackRounds int    `json:"fallback_rounds"`           // above 0: the policy was too slow, and the fallback decides this many more rounds
	FallbackReason string `json:"fallback_reason,omitempty"` // slow: it computed for too long; blocked: it waited for more than a second
	// SteppingRanks is the number of ranks of the group whose engines are not down. The loads below
	// are those of these ranks.
	SteppingRanks int     `json:"stepping_ranks"`
	KVTokens      int64   `json:"kv_tokens"` // KV tokens on all ranks of the group whose engines are not down
	MeanTokens    float64 `json:"mean_tokens"`
	LeastTokens   int64   `json:"least_tokens"`
	MostTokens    int64   `json:"most_tokens"`
	// ImbalanceTokens is the sum over the ranks: the largest KV load of any rank less the KV load of
	// this rank.
	ImbalanceTokens int64 `json:"imbalance_tokens"`
	// IdleShare is imbalance_tokens divided by the KV tokens that the group would hold if every rank
	// had the largest load, 0 to 1.
	IdleShare float64 `json:"idle_share"`
}

// RoundStatus describes how requests were sent to ranks that prefill and decode. The policy holds
// requests back and sends them together, in a round, so that several ranks compute prompts in the
// same steps.
type RoundStatus struct {
	Sent         uint64  `json:"sent"`          // rounds in which held requests were sent together
	RanksFilled  float64 `json:"ranks_filled"`  // mean number of ranks that had a prompt to compute just after a round was sent
	Steps        uint64  `json:"steps"`         // steps of the group so far
	PrefillSteps uint64  `json:"prefill_steps"` // steps in which at least one rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // mean share of the ranks that computed no prompt in a prefill step, 0 to 1
	// MostBacklog is the largest backlog of any rank, in prompt tokens that the rank has yet to
	// compute.
	MostBacklog int64   `json:"most_backlog_tokens"`
	MeanBacklog float64 `json:"mean_backlog_tokens"`
	HeldS       float64 `json:"held_seconds"`     // seconds for which the policy has held back the oldest held entry; 0: no entry is held
	MaxHoldS    float64 `json:"max_hold_seconds"` // longest time for which the policy holds a request back, in seconds
}

// StepStatus says how long the steps of a group take, and how much of this time imbalance costs.
type StepStatus struct {
	// MeanMs is the mean length of a step or, if none was measured, the length at the present loads by
	// the step model in use; 0: unknown.
	MeanMs float32 `json:"mean_ms"`
	C0Ms   float64 `json:"c0_ms"` // part of the step time that does not depend on the load, by the step model in use
	C1Ms   float64 `json:"c1_ms"` // time that one KV token on the fullest rank adds to a step; 0: unknown
	// RequestMs is the time that one request on the fullest rank adds to a step beside its KV tokens;
	// 0: the steps do not surely show it yet.
	RequestMs   float64 `json:"request_ms"`
	OwnPromptMs float64 `json:"own_prefill_ms"` // time that one prompt token adds to a step if the slowest rank computes it; 0: unknown
	// SharedPromptMs is the time that one prompt token on any rank adds to a step, times the number of
	// ranks.
	SharedPromptMs float64 `json:"shared_prefill_ms"`
	PrefillMs      float64 `json:"prefill_step_ms"` // time that a step takes longer if any rank computes a prompt in it
	// RequestTokens is how many KV tokens policies count for each request beside the request's own KV:
	// half in the load of its rank, and half on the rank with the most requests. It is set even while
	// no step model is good enough to be used.
	RequestTokens int64 `json:"request_tokens"`
	// Source is where the step model in use comes from: learned or configured. Empty: there is no
	// model.
	Source string `json:"source"`
	// Bottleneck says which ranks a step waits for: the fullest rank, or two ranks, one with the most
	// KV and one with the most requests. Empty: the steps do not show it.
	Bottleneck step.Bottleneck `json:"requests_of"`
	Samples    uint64          `json:"samples"` // number of steps from which the step model was learned
	// R2 is the share of the variance of step times that the learned model explains, 0 to 1, even if
	// that model is not in use.
	R2 float64 `json:"r2"`
	// ModelMs is the length of a step at the present loads by the step model in use; 0: there is no
	// model.
	ModelMs   float64 `json:"model_ms"`
	LostShare float64 `json:"lost_share"`    // share of model_ms that the imbalance of the ranks costs, 0 to 1
	LostMs    float64 `json:"lost_ms"`       // part of model_ms that the imbalance of the ranks costs, in ms
	Says      string  `json:"says"`          // a sentence with lost_share in percent; empty while there is no step model
	Why       string  `json:"why,omitempty"` // reason for which there is no step model; empty: there is one

	// SyncWaitMs is the mean time for which a rank waited for the other ranks before a step, between
	// the last two reads of the engines' metrics. 0: no engine reports the time, or there was no step
	// between the two reads.
	SyncWaitMs float64 `json:"sync_wait_ms,omitempty"`
}

// StepHistogram is the histogram of step times behind the metric evenkeel_step_seconds.
type StepHistogram = step.Histogram

// WorkerStatus describes one decode rank. Its counts of tokens and answers begin when the rank
// joins the fleet.
type WorkerStatus struct {
	ID      int32  `json:"id"`
	Name    string `json:"name"`
	Group   string `json:"group"`
	Barrier bool   `json:"barrier"`
	// State is absent, down, late, out, starting, up, paused, halted, unowned, broken, lost, draining
	// or odd. The fleet fills this field in, and not the board.
	State string `json:"state,omitempty"`
	Why   string `json:"why,omitempty"` // reason for which the rank takes no requests; the fleet fills this field in
	Up    bool   `json:"up"`
	// Down: the rank's engine does not answer, or goes on without this rank, so the rank takes no part
	// in the steps of its group.
	Down    bool `json:"down"`
	Removed bool `json:"removed"` // true: the rank has left the fleet, but some of its slots are not released yet
	Slots   int  `json:"slots"`
	Limit   int  `json:"limit"` // number of slots that may be used now; 0 while the rank is not up
	// Used is the number of requests that have slots. It can be above slots under a policy that sends
	// every request to its rank at once or ahead of slots that come free.
	Used int `json:"used"`
	// InEngineQueue is the number of used slots whose requests wait in the engine's own queue, because
	// no slot or no KV room is free for them.
	InEngineQueue int    `json:"beyond_slots"`
	Running       int    `json:"running"`
	Transferring  int    `json:"transferring"`          // requests that have a slot but no first event of their answer yet
	Output        int64  `json:"output_tokens"`         // tokens of all answers of the rank since it joined the fleet
	Answers       uint64 `json:"answers"`               // complete answers since the rank joined the fleet
	Empty         uint64 `json:"empty_answers"`         // complete answers that the engine ended without any text
	NoUsage       uint64 `json:"answers_without_usage"` // complete answers for which the engine reported no token usage
	KVTokens      int64  `json:"kv_tokens"`
	// Unread is the part of kv_tokens that belongs to requests that do not decode yet, so that no
	// decode step reads it.
	Unread int64 `json:"unread_kv_tokens,omitempty"`
	// Others is the number of KV tokens on the rank of requests that other proxies sent. It is above 0
	// only for a while after this proxy has taken over the rank.
	Others   int64 `json:"others_kv_tokens"`
	Capacity int64 `json:"capacity"` // KV tokens that the rank has room for; 0: unlimited
	// Tight: the engine preempted requests for lack of KV room, so for a minute the rank gets less KV
	// than usual.
	Tight   bool   `json:"tight"`
	Early   bool   `json:"early,omitempty"`          // true: requests get a slot of this rank before their prefill
	Bound   int    `json:"bound,omitempty"`          // requests that got a slot before their prefill and have no event yet
	Mixed   bool   `json:"mixed,omitempty"`          // true: the rank prefills and decodes, because its engine is aggregated
	Backlog int64  `json:"backlog_tokens,omitempty"` // prompt tokens that the rank has yet to compute
	Prompts uint64 `json:"prompts,omitempty"`        // prompts that were sent to the rank so far; 0 if it does not prefill
	// Orphans is the number of KV tokens of requests that ended before a prefill engine had written
	// their KV. The rank's engine may still hold room for them.
	Orphans int64 `json:"orphan_kv_tokens,omitempty"`
	// Kept is the number of KV tokens of ended answers that the rank's engine keeps for the next turns
	// of their chats.
	Kept  int64 `json:"kept_kv_tokens,omitempty"`
	Keeps bool  `json:"keeps,omitempty"` // true: the rank's engine keeps the KV of ended answers for the next turns of their chats
	// Lists has the model names that requests may ask for on this rank. GET /status shows them with
	// the rank's engine instead.
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

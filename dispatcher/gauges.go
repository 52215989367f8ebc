package dispatcher

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/dispatcher/board"
	"evenkeel/predictor"
)

// gauges reads one Status at each scrape.
type gauges struct{ d *Dispatcher }

var (
	rankLabels   = []string{"group", "rank"}
	descKVTokens = prometheus.NewDesc("evenkeel_rank_kv_tokens", "KV tokens that the requests of this proxy hold on the rank, by the "+
		"proxy's own count: the prompts, and what their streams brought so far. A rank whose engine is down has no series of evenkeel_rank_*.",
		rankLabels, nil)
	descCapacity = prometheus.NewDesc("evenkeel_rank_kv_capacity_tokens",
		"KV tokens that the rank has room for, as configured or as its engine says. If neither is known, there is no series.", rankLabels, nil)
	descSlots = prometheus.NewDesc("evenkeel_rank_slots", "Slots of the rank, by state. used can be above the configured slots under an "+
		"immediate policy, and by a few where requests are sent ahead of slots that come free. free is 0 on a rank that takes nothing new, "+
		"because it drains or its engine is out.", append(rankLabels, "state"), nil)
	descRunning = prometheus.NewDesc("evenkeel_rank_running",
		"Requests on the rank whose first event has come. The others still pull their KV.", rankLabels, nil)
	descScraped = prometheus.NewDesc("evenkeel_rank_scraped_requests", "Requests on the rank by the engine's own metrics, read at every "+
		"tenth health check, in its batch (running) or in its queue (waiting). If running differs from evenkeel_rank_running for minutes, other "+
		"clients use the engine, or it goes on with requests that have ended for evenkeel. There is no series while the engine's metrics cannot "+
		"be read.", append(rankLabels, "state"), nil)
	descUsage = prometheus.NewDesc("evenkeel_rank_kv_usage_ratio", "Share of the rank's KV memory in use. own: by the proxy's own "+
		"count, where the rank's room is known. scraped: by the engine's gauge, read at every tenth health check; it may also count what its "+
		"prefix cache keeps. There is no scraped series while the engine's metrics cannot be read.", append(rankLabels, "source"), nil)
	descNoUsage = prometheus.NewDesc("evenkeel_rank_answers_without_usage_total", "Complete answers of the rank for which its engine "+
		"reported no token usage. Their tokens are the proxy's own count, in limits and in the load of ranks.", rankLabels, nil)
	descInEngineQueue = prometheus.NewDesc("evenkeel_rank_beyond_slots", "Requests in the queue of the rank's engine, which were sent "+
		"ahead of a slot that comes free. They are among the used slots.", rankLabels, nil)
	descBound = prometheus.NewDesc("evenkeel_rank_bound", "Requests on the rank that were bound before their prefill and have no event "+
		"yet. Only ranks whose connector binds so early have this series.", rankLabels, nil)
	descBacklog = prometheus.NewDesc("evenkeel_rank_backlog_tokens", "Prompt tokens that were sent to the rank and that it has yet to "+
		"compute, by the proxy's own count. Only ranks that prefill and decode have this series.", rankLabels, nil)
	descOrphans = prometheus.NewDesc("evenkeel_bind_orphan_tokens", "KV tokens of requests that left the rank before a prefill engine had "+
		"written them. The engine may keep them until it restarts. The proxy does not use this room until the engine's process is another one, "+
		"or its gauges show that less is in use.", rankLabels, nil)
	descKept = prometheus.NewDesc("evenkeel_rank_kept_tokens", "KV tokens of answers that have ended, which the rank's engine keeps "+
		"for the next turns of their chats, by the proxy's own count. The proxy does not use this room. Only ranks whose profile has hand_back: "+
		"counted have this series.", rankLabels, nil)
	descImbalance = prometheus.NewDesc("evenkeel_imbalance_tokens",
		"Sum, over the ranks of the group, of the largest KV load less the rank's own load. Ranks whose engine is down do not count.",
		rankLabels[:1], nil)
	descIdle = prometheus.NewDesc("evenkeel_idle_share_ratio", "evenkeel_imbalance_tokens divided by the number of ranks times the "+
		"largest load: the share of a step that ranks wait for the fullest rank.", rankLabels[:1], nil)
	descPool = prometheus.NewDesc("evenkeel_pool_entries",
		"Requests that wait for a decode rank. Their prefill has finished, or it waits for the rank.", nil, nil)
	descPoolOldest = prometheus.NewDesc("evenkeel_pool_oldest_seconds", "Longest time that one of the requests in the pool has waited.", nil,
		nil)
	descDriftSlots = describeDrift("slots")
	descDriftKV    = describeDrift("kv_tokens")

	descBacklogImbalance = prometheus.NewDesc("evenkeel_backlog_imbalance_ratio", "Largest backlog of a rank of the group "+
		"(evenkeel_rank_backlog_tokens) divided by the mean backlog. 1: all ranks have the same. There is no series while no rank has any.",
		rankLabels[:1], nil)
	descRounds = prometheus.NewDesc("evenkeel_rounds_total", "Rounds that were sent to the ranks of a group that prefills and decodes. "+
		"Requests that go beside a round, because they lengthen no step, are no rounds.", rankLabels[:1], nil)
	descPrefillSteps = prometheus.NewDesc("evenkeel_prefill_steps_total", "Steps of the group in which a rank computed a prompt, by "+
		"the proxy's own count, among the steps of evenkeel_step_seconds. Only groups that prefill and decode have this series.",
		rankLabels[:1], nil)

	descHeld = prometheus.NewDesc("evenkeel_held_entries",
		"Requests that the policy held back in its last decision, although they had a slot.", rankLabels[:1], nil)
	descStep = prometheus.NewDesc("evenkeel_step_seconds", "Time between two steps of the group, as measured from its streams.",
		rankLabels[:1], nil)
	descLost = prometheus.NewDesc("evenkeel_step_lost_ratio",
		"Share of a step that is lost to imbalance, by the step model. There is no series while there is no step model.", rankLabels[:1], nil)
	descC0 = prometheus.NewDesc("evenkeel_step_model_c0_seconds",
		"Step model: the part of a step's time that does not depend on the load.", modelLabels, nil)
	descC1 = prometheus.NewDesc("evenkeel_step_model_c1_seconds",
		"Step model: the time that one KV token of the fullest rank adds to a step.", modelLabels, nil)
	descRequest = prometheus.NewDesc("evenkeel_step_model_request_seconds", "Step model: the time that one request of the fullest "+
		"rank adds to a step beside its KV tokens. It is 0 until the steps surely show that there is such a time.", modelLabels, nil)
	descOwnPrefill = prometheus.NewDesc("evenkeel_step_model_own_prefill_seconds", "Step model: the time that one prompt token adds to a "+
		"step if the slowest rank computes it. There is no series until steps with a prefill are known.", modelLabels, nil)
	descSharedPrefill = prometheus.NewDesc("evenkeel_step_model_shared_prefill_seconds", "Step model: the time that the prompt tokens of "+
		"all ranks add to a step, for each token that a rank computes in the mean. There is no series until steps with a prefill are "+
		"known.", modelLabels, nil)
	descPrefillStep = prometheus.NewDesc("evenkeel_step_model_prefill_step_seconds", "Step model: the time that a step takes longer if "+
		"any rank computes a prompt. There is no series until steps with a prefill are known.", modelLabels, nil)
	descOutput = prometheus.NewDesc("evenkeel_rank_output_tokens_total",
		"Tokens of the rank's answers. evenkeel_rank_running divided by the rate of this metric is the time per token on the rank, in seconds.",
		rankLabels, nil)
	descAnswers = prometheus.NewDesc("evenkeel_rank_answers_total", "Complete answers of the rank.", rankLabels, nil)
	descEmpty   = prometheus.NewDesc("evenkeel_rank_empty_answers_total",
		"Complete answers of the rank that its engine ended without any text. If only one rank has many, its weights or its GPU may be broken.",
		rankLabels, nil)
	descR2 = prometheus.NewDesc("evenkeel_step_model_r2_ratio",
		"Share of the variance of step times that the learned step model explains. The model is used from 0.3 on.", rankLabels[:1], nil)
	descBudget = prometheus.NewDesc("evenkeel_tick_budget_evaluations", "Evaluations that the policy may spend on the next tick.",
		rankLabels[:1], nil)

	descQuarantined = prometheus.NewDesc("evenkeel_pairs_quarantined",
		"Engines that lose their hand-offs, and pairs of a prefill and a decode engine whose hand-offs are lost although both serve "+
			"with others. They get no hand-offs but a trial.", nil, nil)

	descOutputs = prometheus.NewDesc("evenkeel_predictor_outputs", "Finished answers that predictions come from.", predictorLabels, nil)
	descBrier   = prometheus.NewDesc("evenkeel_predictor_brier",
		"Mean squared error of the predicted probabilities that a request ends within the horizon.", predictorLabels, nil)
	descAUC = prometheus.NewDesc("evenkeel_predictor_auc",
		"Probability that a request that ended within the horizon had been given a larger probability than one that did not.", predictorLabels,
		nil)
	descMAE = prometheus.NewDesc("evenkeel_predictor_mae_tokens",
		"Mean error of the predicted remaining length, for requests that ended within the horizon.", predictorLabels, nil)
	descDrift = prometheus.NewDesc("evenkeel_predictor_drift_ratio", "Largest difference between two distributions: that of the last 256 "+
		"outputs, and that of the table in force (against table) or of the fit file (against fit).", append(predictorLabels, "against"), nil)
	descDriftMax = prometheus.NewDesc("evenkeel_predictor_drift_critical_ratio", "Drift that chance alone exceeds once in a thousand times.",
		append(predictorLabels, "against"), nil)
)

var (
	modelLabels     = []string{"group", "source"}
	predictorLabels = []string{"model", "kind"}
)

// describeDrift describes evenkeel_audit_drift, which the prefill tier exports with other values of
// kind.
func describeDrift(kind string) *prometheus.Desc {
	return prometheus.NewDesc("evenkeel_audit_drift", "Load that was charged, less load that was released, less load that is held, by the "+
		"proxy's own accounts. A hand-off counts as drift if its request has ended without giving it back. Any value but 0 is a bug in evenkeel.",
		nil, prometheus.Labels{"kind": kind})
}

func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descKVTokens, descCapacity, descSlots, descRunning, descOutput, descAnswers, descEmpty, descNoUsage, descScraped, descUsage,
		descInEngineQueue, descBound, descBacklog, descBacklogImbalance, descRounds, descPrefillSteps,
		descOrphans, descKept, descImbalance, descIdle, descPool, descPoolOldest, descDriftSlots, descDriftKV,
		descHeld, descStep, descLost, descC0, descC1, descRequest, descOwnPrefill, descSharedPrefill, descPrefillStep, descR2, descBudget,
		descQuarantined, descOutputs, descBrier, descAUC, descMAE, descDrift, descDriftMax,
	} {
		ch <- d
	}
	for _, more := range g.d.metrics.groupGauges {
		for _, d := range more.descs {
			ch <- d
		}
	}
}

// Collect sends nothing if the dispatcher does not answer within a second.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	status := g.d.Status(ctx)
	if ctx.Err() != nil {
		return // missing gauges show the operator that the dispatcher is stuck, and old values would hide it
	}
	s := sender{ch: ch, names: labelsOf(status)}
	entries, oldest, quarantined := 0, 0.0, 0
	for _, m := range status.Models {
		entries += m.Pool
		for _, p := range m.Pairs {
			if p.Quarantined {
				quarantined++
			}
		}
		oldest = max(oldest, m.OldestSeconds)
		for _, w := range m.Workers {
			if w.Down {
				continue // a zero would count in every mean over ranks
			}
			engine, known := g.engineMetrics(w.ID)
			s.sendRank(w, s.names.group(m.Model, w.Group), engine, known)
		}
		for _, group := range m.Groups {
			if group.Barrier { // ranks without a barrier have no common steps
				label := s.names.group(m.Model, group.Name)
				s.sendGroup(group, label)
				for _, more := range g.d.metrics.groupGauges {
					more.send(ch, &group, label)
				}
			}
		}
		for _, p := range m.Predictors {
			s.sendPredictor(m.Model, p)
		}
	}
	s.gauge(descPool, float64(entries))
	s.gauge(descQuarantined, float64(quarantined))
	s.gauge(descPoolOldest, oldest)
	s.gauge(descDriftSlots, float64(status.Drift.Slots))
	s.gauge(descDriftKV, float64(status.Drift.KVTokens))
}

type sender struct {
	ch    chan<- prometheus.Metric
	names labels
}

func (s sender) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (s sender) counter(d *prometheus.Desc, v float64, labels ...string) {
	s.ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

// sendRank sends the metrics of one rank. known is false if its engine has reported nothing.
func (s sender) sendRank(w board.WorkerStatus, group string, engine EngineMetrics, known bool) {
	rank := s.names.rank(w)
	s.gauge(descKVTokens, float64(w.KVTokens), group, rank)
	if w.Capacity > 0 {
		s.gauge(descCapacity, float64(w.Capacity), group, rank)
		s.gauge(descUsage, float64(w.KVTokens+w.Kept)/float64(w.Capacity), group, rank, "own")
	}
	if known {
		gaugeIfReported := func(d *prometheus.Desc, v float64, what string) {
			if v >= 0 { // below 0: the engine does not report this value
				s.gauge(d, v, group, rank, what)
			}
		}
		gaugeIfReported(descScraped, engine.Running, "running")
		gaugeIfReported(descScraped, engine.Waiting, "waiting")
		gaugeIfReported(descUsage, engine.KVShare, "scraped")
	}
	s.gauge(descSlots, float64(max(0, w.Limit-w.Used)), group, rank, "free")
	s.gauge(descSlots, float64(w.Used), group, rank, "used")
	s.gauge(descRunning, float64(w.Running), group, rank)
	s.counter(descOutput, float64(w.Output), group, rank)
	s.counter(descAnswers, float64(w.Answers), group, rank)
	s.counter(descEmpty, float64(w.Empty), group, rank)
	s.counter(descNoUsage, float64(w.NoUsage), group, rank)
	s.gauge(descInEngineQueue, float64(w.InEngineQueue), group, rank)
	if w.Mixed { // no prefill engine writes KV into the rank
		s.gauge(descBacklog, float64(w.Backlog), group, rank)
	} else { // the KV of requests that ended before a prefill engine had written it may stay on the rank
		s.gauge(descOrphans, float64(w.Orphans), group, rank)
	}
	if w.Early { // Bound counts requests without an event
		s.gauge(descBound, float64(w.Bound), group, rank)
	}
	if w.Keeps {
		s.gauge(descKept, float64(w.Kept), group, rank)
	}
}

// sendGroup leaves out the step model while there is none. It sends R2 even then, because it shows
// why a learned model is not in use.
func (s sender) sendGroup(g board.GroupStatus, group string) {
	s.gauge(descImbalance, float64(g.ImbalanceTokens), group)
	s.gauge(descIdle, g.IdleShare, group)
	s.gauge(descHeld, float64(g.Held), group)
	s.gauge(descBudget, float64(g.Budget), group)
	s.ch <- prometheus.MustNewConstHistogram(descStep, g.Steps.Count, g.Steps.Seconds, g.Steps.Buckets, group)
	s.gauge(descR2, g.Step.R2, group)
	if rounds := g.Rounds; rounds != nil {
		s.counter(descRounds, float64(rounds.Sent), group)
		s.counter(descPrefillSteps, float64(rounds.PrefillSteps), group)
		if rounds.MeanBacklog > 0 {
			s.gauge(descBacklogImbalance, float64(rounds.MostBacklog)/rounds.MeanBacklog, group)
		}
	}
	if step := g.Step; step.Source != "" {
		s.gauge(descC0, step.C0Ms/1000, group, step.Source)
		s.gauge(descC1, step.C1Ms/1000, group, step.Source)
		s.gauge(descRequest, step.RequestMs/1000, group, step.Source)
		if step.OwnPromptMs+step.SharedPromptMs > 0 {
			s.gauge(descOwnPrefill, step.OwnPromptMs/1000, group, step.Source)
			s.gauge(descSharedPrefill, step.SharedPromptMs/1000, group, step.Source)
			s.gauge(descPrefillStep, step.PrefillMs/1000, group, step.Source)
		}
		s.gauge(descLost, step.LostShare, group) // share of a step that is lost because loads differ
	}
}

// sendPredictor leaves out scores that are not defined yet.
func (s sender) sendPredictor(model string, p board.PredictorStatus) {
	s.gauge(descOutputs, float64(p.Outputs), model, p.Kind)
	s.gauge(descDrift, p.Drift.Distance, model, p.Kind, "table")
	s.gauge(descDriftMax, p.Drift.Critical, model, p.Kind, "table")
	s.gauge(descDrift, p.DriftFromFit.Distance, model, p.Kind, "fit")
	s.gauge(descDriftMax, p.DriftFromFit.Critical, model, p.Kind, "fit")
	if p.Scores == nil {
		return
	}
	gaugeIfDefined := func(d *prometheus.Desc, v predictor.Figure) {
		if v.Defined() {
			s.gauge(d, float64(v), model, p.Kind)
		}
	}
	gaugeIfDefined(descBrier, p.Scores.Brier)
	gaugeIfDefined(descAUC, p.Scores.AUC)
	gaugeIfDefined(descMAE, p.Scores.ConditionalMAE)
}

func (g gauges) engineMetrics(worker int32) (s EngineMetrics, ok bool) {
	if g.d.cfg.EngineMetrics == nil {
		return s, false
	}
	return g.d.cfg.EngineMetrics(worker)
}

// labels makes unique label values from the names of groups and workers: one duplicate series would
// make the whole scrape fail.
type labels struct {
	models map[string]map[string]bool // models that have a group, by its name
	names  map[string]int             // number of workers, by their name
}

func labelsOf(s board.Status) labels {
	l := labels{models: map[string]map[string]bool{}, names: map[string]int{}}
	for _, m := range s.Models {
		for _, w := range m.Workers {
			if l.models[w.Group] == nil {
				l.models[w.Group] = map[string]bool{}
			}
			l.models[w.Group][m.Model] = true
			l.names[w.Name]++
		}
	}
	return l
}

// group returns NAME or, if groups of several models have this name, MODEL/NAME.
func (l labels) group(model, name string) string {
	if len(l.models[name]) > 1 {
		return model + "/" + name
	}
	return name
}

// rank returns NAME or, if it is empty or several ranks have it, NAME#ID.
func (l labels) rank(w board.WorkerStatus) string {
	if w.Name == "" || l.names[w.Name] > 1 {
		return fmt.Sprintf("%s#%d", w.Name, w.ID)
	}
	return w.Name
}

package prefill

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/index"
	"evenkeel/prefill/steer"
)

// metrics are counted when events happen. Metrics that show a state are read by Collect.
type metrics struct {
	decisions       *prometheus.CounterVec
	decisionSeconds prometheus.Histogram
	canaries        *prometheus.CounterVec
	probeSeconds    *prometheus.HistogramVec
	queueWait       prometheus.Histogram
	batchWait       prometheus.Histogram
	displaced       prometheus.Counter
	attempts        *prometheus.CounterVec
	filterSkipped   *prometheus.CounterVec
	policyErrors    *prometheus.CounterVec
	budgetExhausted prometheus.Counter
	misprediction   *prometheus.HistogramVec
	hotFiltered     prometheus.Counter
	affinity        *prometheus.CounterVec

	answered   prometheus.Counter // series of attempts for answered probes: nearly all
	lastChoice struct {           // most choices have the same labels as the last one, and need no look-up
		policy, reason string
		count          prometheus.Counter
	}
}

// In the help texts, an orphan is a hand-off that no decode engine will fetch, and a canary is a
// probe that passes the closed KV gate.
func newMetrics(policies []string) *metrics {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "evenkeel_" + name, Help: help}
	}
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Name: "evenkeel_" + name, Help: help, Buckets: buckets}
	}
	m := &metrics{
		decisions: prometheus.NewCounterVec(counter("prefill_decisions_total",
			"Choices of a prefill engine. policy: the policy chose. only: there was one candidate. canary: a trial probe. affinity: its session "+
				"was there. fallback: no score was a number, so lmetric chose."), []string{"policy", "reason"}),
		decisionSeconds: prometheus.NewHistogram(histogram("prefill_decision_seconds",
			"Time to choose a prefill engine and charge it.", prometheus.ExponentialBucketsRange(1e-6, 1e-2, 13))),
		canaries: prometheus.NewCounterVec(counter("prefill_canaries_total",
			"Probes that were sent to an engine whose KV gate only orphans keep closed."), []string{"candidate", "outcome"}),
		probeSeconds: prometheus.NewHistogramVec(histogram("prefill_probe_seconds",
			"Time from the choice of a prefill engine to the end of the probe.", prometheus.ExponentialBuckets(0.005, 2, 16)),
			[]string{"candidate", "outcome"}),
		queueWait: prometheus.NewHistogram(histogram("prefill_queue_wait_seconds",
			"Time in the arrival queue of requests that got an engine. Batch requests do not count.", prometheus.ExponentialBuckets(0.0001, 3, 13))),
		batchWait: prometheus.NewHistogram(histogram("prefill_batch_wait_seconds",
			"Time for which batch requests were held back before they got an engine. Their count is how many ran.",
			prometheus.ExponentialBuckets(0.01, 4, 9))),
		displaced: prometheus.NewCounter(counter("prefill_queue_displaced_total",
			"Requests that left a full arrival queue with a 429, for a request of a higher priority or of a key that had fewer there.")),
		attempts: prometheus.NewCounterVec(counter("prefill_attempts_total",
			"Probes, by how they ended. lost: written and never answered. dropped: the client left, or the engine refused the request."),
			[]string{"outcome"}),
		filterSkipped: prometheus.NewCounterVec(counter("prefill_filter_skipped_total",
			"Choices in which a filter was ignored because it would have left no candidate."), []string{"filter"}),
		policyErrors: prometheus.NewCounterVec(counter("prefill_policy_errors_total",
			"Candidates whose score was not a finite number, for example after a division by 0. They ranked last."), []string{"policy"}),
		budgetExhausted: prometheus.NewCounter(counter("prefill_retry_budget_exhausted_total",
			"Retries that were refused because retries are too large a share of all requests (prefill.retry.budget).")),
		misprediction: prometheus.NewHistogramVec(histogram("prefix_misprediction_tokens",
			"Difference between the predicted and the actual cache hits of a prompt. Prompts without a difference do not count.",
			prometheus.ExponentialBuckets(16, 2, 14)), []string{"direction"}),
		hotFiltered: prometheus.NewCounter(counter("hotspot_filtered_requests_total",
			"Requests that were kept off the engines that hold their prefix.")),
		affinity: prometheus.NewCounterVec(counter("affinity_total",
			"Requests of a session, by whether they went to the engine of the session's last request."), []string{"outcome"}),
	}
	m.createSeries(policies)
	return m
}

// createSeries makes the series whose labels have few values. If a counter only came into existence
// with its first event, its value would never increase from 0 to 1, and no alert would see this
// event.
func (m *metrics) createSeries(policies []string) {
	for _, outcome := range []string{probeAnswered, probeFailed, probeLost, probeDropped} {
		m.attempts.WithLabelValues(outcome)
	}
	m.answered = m.attempts.WithLabelValues(probeAnswered)
	for _, filter := range []string{circuitFilter, freshFilter, instanceFilter, excludedFilter, stalledFilter, staleFilter,
		hotspotFilter, policyFilter} {
		m.filterSkipped.WithLabelValues(filter)
	}
	for _, outcome := range []string{steer.Kept, steer.Overloaded, steer.Gone, steer.New} {
		m.affinity.WithLabelValues(outcome)
	}
	for _, policy := range policies {
		m.policyErrors.WithLabelValues(policy)
	}
}

// How a probe ended, as metrics name it.
const (
	probeAnswered = "answered"
	probeFailed   = "failed"
	probeLost     = "lost"    // written, and not answered
	probeDropped  = "dropped" // the client left, or the engine refused the request
)

// The filters that are skipped if they would leave no candidate, as metrics name them.
const (
	circuitFilter  = "circuit"
	freshFilter    = "fresh"
	instanceFilter = "instance"
	excludedFilter = "excluded"
	stalledFilter  = "stalled"
	staleFilter    = "stale"
	hotspotFilter  = "hotspot"
	policyFilter   = "policy"
)

// countChoice must be called under the scheduler's lock, which m.lastChoice needs.
func (m *metrics) countChoice(policy, reason string) {
	last := &m.lastChoice
	sameLabels := last.count != nil && last.policy == policy && last.reason == reason
	if !sameLabels {
		last.policy, last.reason, last.count = policy, reason, m.decisions.WithLabelValues(policy, reason)
	}
	last.count.Inc()
}

func (m *metrics) observeHitError(v cache.Verdict) {
	switch {
	case !v.Compared: // the engine did not report its hit
	case v.ErrorTokens > 0:
		m.misprediction.WithLabelValues("over").Observe(float64(v.ErrorTokens))
	case v.ErrorTokens < 0:
		m.misprediction.WithLabelValues("under").Observe(float64(-v.ErrorTokens))
	}
}

func (m *metrics) dropCandidate(candidate string) {
	label := prometheus.Labels{"candidate": candidate}
	m.canaries.DeletePartialMatch(label)
	m.probeSeconds.DeletePartialMatch(label)
}

func (m *metrics) register(r prometheus.Registerer, s *Scheduler) error {
	for _, c := range []prometheus.Collector{m.decisions, m.decisionSeconds, m.canaries, m.probeSeconds, m.queueWait, m.batchWait, m.displaced,
		m.attempts, m.filterSkipped, m.policyErrors, m.budgetExhausted, m.misprediction, m.hotFiltered, m.affinity, s} {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("prefill: register metrics: %w; give each tier its own registry", err)
		}
	}
	return nil
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("evenkeel_"+name, help, labels, nil)
}

var (
	candidatesDesc = describe("prefill_candidates", "Prefill ranks, by state. closed: the KV gate is closed. out: the circuit breaker is "+
		"open. unknown: the engine has not named its models yet.", "state")
	inflightDesc  = describe("prefill_inflight_requests", "Probes that have no answer yet.", "candidate")
	newTokensDesc = describe("prefill_queued_new_tokens", "Tokens that the unanswered probes compute: their prompts less the cache hits.",
		"candidate")
	heldDesc = describe("prefill_held_tokens",
		"Prompt tokens whose KV the engine holds for hand-offs, by where the hand-offs are. orphan: no decode engine will fetch it.", "candidate",
		"state")
	usageDesc = describe("prefill_kv_usage_ratio", "Share of the KV cache in use. own: by the proxy's own accounts. scraped: by the "+
		"engine's gauge. There is no scraped series while the gauge cannot be read.", "candidate", "source")
	gateDesc   = describe("prefill_gate_open", "1 while new probes may be sent.", "candidate")
	missesDesc = describe("prefill_scrape_misses_total",
		"Scrapes of a prefill engine's gauges that failed or took longer than prefill.scrape.timeout.", "candidate")
	handoffsDesc = describe("handoffs", "Hand-offs whose KV prefill engines hold, by where they are. orphan: no decode engine will fetch it, "+
		"so it stays until the engine's timeout.", "state")
	queueDesc = describe("prefill_queue_requests",
		"Requests in the arrival queue, by priority. batch: requests that take only the time that others leave. Each leg of a request counts. "+
			"Retries do not count.", "priority")
	expiredDesc = describe("handoffs_expired_total", "Hand-offs whose engine freed their KV at its own timeout.")
	misusesDesc = describe("prefill_double_releases_total",
		"Calls that would end or move a prefill that has ended already. Such a call changes nothing, but it is a bug in evenkeel.")
	promptDesc = describe("prefix_prompt_tokens_total", "Prompt tokens of requests that got a prefill engine.")
	hitDesc    = describe("prefix_hit_tokens_total",
		"Prompt tokens in the engine's prefix cache. predicted: by the proxy's index. actual: by the engines' own count.", "source")
	feedbackDesc = describe("prefix_feedback_available", "1 if the model's engines report cached tokens. If 0, start them with "+
		"--enable-prompt-tokens-details. At most 64 models are named; model other is the mean of the rest.", "model")
	indexBytesDesc = describe("prefix_index_bytes", "Memory of the prefix index.")
	entriesDesc    = describe("prefix_index_entries", "Blocks in the prefix index.")
	evictionsDesc  = describe("prefix_index_evictions_total", "Blocks of one engine that the index dropped. bytes: the index had no memory. "+
		"capacity: the engine cannot hold more. ttl: the outcome stayed unknown. removed: the engine said so, or restarted. cold: a gap in its "+
		"events. failed: the probe failed.", "reason")
	tpDesc = describe("calibration_prefill_seconds_per_token", "Fitted time of a new prompt token. hardware is the profile.", "model",
		"hardware")
	r2Desc  = describe("calibration_r2_ratio", "Share of the prefill times that the fit explains.", "model", "hardware")
	hotDesc = describe("hotspot_classes", "Classes of requests with more load than the engines that hold their prefix can take. alarm: "+
		"nothing is done yet. filter: kept off these engines.", "state")
	suspectDesc = describe("prefix_capacity_suspect", "1 if the engine's prefix cache holds less or more than its capacity says: more than a "+
		"fifth of the predicted hits were not there, or more than a fifth of the hits were not predicted because the index had forgotten them. "+
		"Logged once, with the shares.", "candidate", "holds")
	mispredictedDesc = describe("prefix_misprediction_ratio", "Predicted hits that were not there, plus hits that were not predicted, as a "+
		"share of the predicted tokens, of recent prompts. Above 0.1, the capacity, the block size or the token counts of prompts are wrong.")
	preciseDesc = describe("kv_events_precise", "1 while a candidate's KV events can be relied on. 0: the connection is broken, the events "+
		"cannot be read, or the engine answered probes for 30 s without an event. Then its cache is known from answers alone.", "candidate")
	batchesDesc = describe("kv_events_batches_total", "Batches of KV events that were taken in.", "candidate")
	gapsDesc    = describe("kv_events_gaps_total", "Gaps in the numbers of KV events. replayed: the engine sent them again. cold: it could "+
		"not, and all that was known of its cache was dropped.", "candidate", "result")
	lagDesc = describe("kv_events_lag_seconds", "Age of the last batch of KV events when it was taken in, by the engine's clock.",
		"candidate")
	driftDesc = prometheus.NewDesc("evenkeel_audit_drift",
		"Load that was charged, less load that was released, less load that is held, by the proxy's own accounts. A hand-off counts as drift if "+
			"its request has ended without giving it back. Any value but 0 is a bug in evenkeel.", nil, prometheus.Labels{"kind": "handoffs"})
)

// series writes the metrics of one Prometheus scrape of this proxy.
type series chan<- prometheus.Metric

func (s series) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (s series) count(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

// maxNamedModels bounds the models with their own series. LoRA adapters are models, too, and there
// may be thousands.
const maxNamedModels = 64

// other is the label of all further models.
const other = "other"

// exportByModel exports a value for each model, sorted by rank (0 if absent) and name. The models
// after the first maxNamedModels share a series with their mean.
func (s series) exportByModel(d *prometheus.Desc, rank map[string]int, values map[string]float64) {
	names := slices.SortedFunc(maps.Keys(values), func(a, b string) int { return cmp.Or(cmp.Compare(rank[a], rank[b]), cmp.Compare(a, b)) })
	named := min(len(names), maxNamedModels)
	for _, name := range names[:named] {
		s.gauge(d, values[name], name)
	}
	if rest := names[named:]; len(rest) > 0 {
		sum := 0.0
		for _, name := range rest {
			sum += values[name]
		}
		s.gauge(d, sum/float64(len(rest)), other)
	}
}

func boolGauge(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// exportLearned must be called under the scheduler's lock.
func (s series) exportLearned(scheduler *state, now time.Time) {
	tokens, stats := &scheduler.cache.Totals, scheduler.cache.Stats()
	s.count(promptDesc, float64(tokens.Prompt))
	s.count(hitDesc, float64(tokens.Predicted), "predicted")
	s.count(hitDesc, float64(tokens.Actual), "actual")
	s.gauge(indexBytesDesc, float64(stats.Bytes))
	s.gauge(entriesDesc, float64(stats.Entries))
	for reason, n := range stats.Evictions {
		s.count(evictionsDesc, float64(n), index.Reason(reason).String())
	}
	// Base models come first, then LoRA adapters, which have rank 0. A model that is named "other"
	// comes last.
	const first, last = -1, 1
	rank := map[string]int{other: last}
	for _, c := range scheduler.candidates {
		rank[c.Board] = first // a board has the name of its base model
	}
	reportsCachedTokens := map[string]float64{}
	for model, reports := range scheduler.cache.Feedback() {
		reportsCachedTokens[model] = boolGauge(reports)
	}
	s.exportByModel(feedbackDesc, rank, reportsCachedTokens)
	for _, fitted := range scheduler.fit.All() {
		if latency, known := fitted.Latency(); known {
			s.gauge(tpDesc, latency.TPMs/1000, fitted.Model, fitted.Hardware)
			s.gauge(r2Desc, fitted.R2(), fitted.Model, fitted.Hardware)
		}
	}
	if h := scheduler.steering.Hotspots; h != nil { // nil: hotspots are not detected
		classes := h.States(now)
		s.gauge(hotDesc, float64(classes[steer.Alarm]), string(steer.Alarm))
		s.gauge(hotDesc, float64(classes[steer.Filter]), string(steer.Filter))
	}
}

// finiteOrNil is for JSON, which cannot represent NaN and the infinities.
func finiteOrNil(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

package prefill

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"evenkeel/prefill/cache"
	"evenkeel/prefill/ledger"
	"evenkeel/prefill/queue"
)

// Collect implements prometheus.Collector. It reads the state in three parts, which may differ by a
// moment, because each takes a lock of its own.
func (s *Scheduler) Collect(ch chan<- prometheus.Metric) {
	out := series(ch)
	states, handoffs := map[string]int{}, [ledger.Phases]int{}
	status, audit := s.status()
	for _, c := range status {
		states[c.State]++
		out.gauge(inflightDesc, float64(c.Inflight), c.ID)
		out.gauge(newTokensDesc, float64(c.QueuedNewTokens), c.ID)
		out.gauge(gateDesc, boolGauge(c.GateOpen), c.ID)
		out.count(missesDesc, float64(c.missed), c.ID)
		if c.CapacityTokens > 0 { // otherwise the share is not known
			out.gauge(usageDesc, c.OwnUsage, c.ID, "own")
		}
		if c.ScrapedUsage != nil {
			out.gauge(usageDesc, *c.ScrapedUsage, c.ID, "scraped")
		}
		for p := ledger.Pooled; p < ledger.Phases; p++ { // the phases in which there is a hand-off
			out.gauge(heldDesc, float64(c.sums.Tokens[p]), c.ID, p.String())
			handoffs[p] += c.sums.Leases[p]
		}
	}
	out.exportCaches(status)
	for _, r := range s.ranks() {
		out.exportEvents(&r.Events, r.Mode, r.ID)
	}
	for _, state := range candidateStates {
		out.gauge(candidatesDesc, float64(states[state]), state)
	}
	for p := ledger.Pooled; p < ledger.Phases; p++ {
		out.gauge(handoffsDesc, float64(handoffs[p]), p.String())
	}
	out.gauge(driftDesc, float64(audit.Drift))
	out.count(expiredDesc, float64(audit.Expired))
	out.count(misusesDesc, float64(audit.Misuses))
	s.mu.Lock()
	defer s.mu.Unlock()
	queued := s.queue.ByPriority()
	queued[0] += 0 // so that priority 0 always has a series
	for priority, n := range queued {
		label := strconv.Itoa(priority)
		if priority == queue.Batch {
			label = "batch"
		}
		out.gauge(queueDesc, float64(n), label)
	}
	out.exportLearned(&s.state, s.clock())
}

// Describe implements prometheus.Collector.
func (s *Scheduler) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{candidatesDesc, inflightDesc, newTokensDesc, heldDesc, usageDesc,
		gateDesc, missesDesc, handoffsDesc, queueDesc, expiredDesc, misusesDesc, driftDesc,
		suspectDesc, mispredictedDesc, preciseDesc, batchesDesc, gapsDesc, lagDesc,
		promptDesc, hitDesc, feedbackDesc, indexBytesDesc, entriesDesc, evictionsDesc, tpDesc, r2Desc, hotDesc} {
		ch <- d
	}
}

// exportCaches exports how well the prefix caches are predicted. The share of wrong predictions is
// one for all candidates.
func (s series) exportCaches(status []CandidateStatus) {
	var all cache.Accuracy
	for _, c := range status {
		all.AddErrors(&c.accuracy)
		for _, suspicion := range []cache.Suspicion{cache.HoldsLess, cache.HoldsMore} {
			s.gauge(suspectDesc, boolGauge(c.CapacitySuspect == suspicion), c.ID, string(suspicion))
		}
		if c.Events != nil {
			s.exportEvents(c.Events, c.Mode, c.ID)
		}
	}
	s.gauge(mispredictedDesc, all.ErrorShare())
}

func (s series) exportEvents(e *EventsStatus, mode, id string) {
	s.gauge(preciseDesc, boolGauge(mode == cache.Precise), id)
	s.count(batchesDesc, float64(e.Batches), id)
	s.count(gapsDesc, float64(e.GapsReplayed), id, "replayed")
	s.count(gapsDesc, float64(e.GapsCold), id, "cold")
	s.gauge(lagDesc, e.LagMs/1000, id)
}

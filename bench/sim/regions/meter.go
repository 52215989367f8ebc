package regions

import (
	"slices"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/stats"
)

// The metrics that only regions have, beside those that report names.
const (
	E2EMean    report.Metric = "e2e_mean_ms"
	E2EP90     report.Metric = "e2e_p90_ms"
	Forwards   report.Metric = "forwards"
	Fallbacks  report.Metric = "fallbacks"
	Busy       report.Metric = "peer_busy" // forwards that a peer refused for its queue
	Egress     report.Metric = "egress_bytes"
	EgressUSD  report.Metric = "egress_usd"
	Spread     report.Metric = "spread" // most outstanding requests of a replica over the mean, over time
	Lost       report.Metric = "lost"   // streams that broke after their first token
	Violations report.Metric = "violations"
)

// meter collects what the measured part shows.
type meter struct {
	s          *simulation
	ttft, e2e  []float64
	hit        float64
	prompt     float64
	forwards   int
	bytes      float64
	fallbacks  int
	busy       int
	preempted  int
	violations int
	sent       int
	outcomes   [lost + 1]int
	spread     float64
	samples    int
}

func (m *meter) measured(at float64) bool { return at >= m.s.scenario.warmMs() }

func (m *meter) first(ttft, now float64) {
	if m.measured(now) {
		m.ttft = append(m.ttft, ttft)
	}
}

func (m *meter) ended(r *request, how outcome, now float64) {
	m.outcomes[how]++
	if !m.measured(now) || how != ok {
		return
	}
	m.e2e = append(m.e2e, now-r.sentAt)
	if r.abroad {
		m.bytes += float64(bytesPerEvent * r.output)
	}
}

func (m *meter) forward(r *request, now float64) {
	if m.measured(now) {
		m.forwards++
		m.bytes += float64(requestBytes + bytesPerToken*r.tokens)
	}
}

// count adds one to a count, unless the warm-up is not over.
func (m *meter) count(n *int, now float64) {
	if m.measured(now) {
		*n++
	}
}

// sample looks how even the replicas are.
func (m *meter) sample() {
	most, sum, n := 0, 0, 0
	for _, r := range m.s.replicas {
		held := len(r.batch) + len(r.waiting)
		most, sum, n = max(most, held), sum+held, n+1
	}
	if sum > 0 && m.measured(m.s.now) {
		m.spread += float64(most*n) / float64(sum)
		m.samples++
	}
	m.s.after(1000, m.sample)
}

// result is what one seed gave.
func (m *meter) result() report.Sample {
	made := 0.0
	for _, r := range m.s.replicas {
		made += r.made
	}
	out := report.Sample{
		report.TokensPerS: made / m.s.scenario.MeasureS,
		Forwards:          float64(m.forwards), Fallbacks: float64(m.fallbacks), Busy: float64(m.busy), Egress: m.bytes,
		EgressUSD: m.bytes / 1e9 * m.s.scenario.USDPerGB, report.Preempted: float64(m.preempted),
		report.OK: float64(m.outcomes[ok]), report.Failed: float64(m.outcomes[failed]), Lost: float64(m.outcomes[lost]),
		Violations: float64(m.violations),
	}
	if m.prompt > 0 {
		out[report.HitRatio] = m.hit / m.prompt
	}
	if m.samples > 0 {
		out[Spread] = m.spread / float64(m.samples)
	}
	put(out, m.ttft, report.TTFTMean, report.TTFTP50, report.TTFTP90, report.TTFTP99)
	put(out, m.e2e, E2EMean, report.E2EP50, E2EP90, report.E2EP99)
	return out
}

// put adds mean and percentiles, by nearest rank.
func put(out report.Sample, values []float64, mean, p50, p90, p99 report.Metric) {
	if len(values) == 0 {
		return
	}
	slices.Sort(values)
	at := func(share float64) float64 { return values[min(len(values)-1, int(share*float64(len(values))))] }
	out[mean], out[p50], out[p90], out[p99] = stats.Mean(values), at(0.50), at(0.90), at(0.99)
}

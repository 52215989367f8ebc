package prefill

import (
	"slices"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/internal/stats"
)

// meter measures what arrived after a warm-up, until the last arrival.
type meter struct {
	jobs     []*job
	from     int // the first that is measured
	first    time.Duration
	last     time.Duration
	busy     time.Duration // of all engines in that time
	ranks    int
	samples  int
	unevenly float64
}

func newMeter(jobs []*job, from, ranks int) *meter {
	return &meter{jobs: jobs, from: from, first: jobs[from].arrived, last: jobs[len(jobs)-1].arrived, ranks: ranks}
}

// prefilled takes the time that an engine spent on a prompt.
func (m *meter) prefilled(j *job) {
	m.busy += max(0, min(j.first, m.last)-max(j.began, m.first))
}

// look takes the engines' loads.
func (m *meter) look(now time.Duration, engines []*engine) {
	if now < m.first || now > m.last {
		return
	}
	largest, sum := int64(0), int64(0)
	for _, e := range engines {
		load := e.load()
		largest, sum = max(largest, load), sum+load
	}
	m.samples++
	m.unevenly += float64(largest*int64(len(engines)) - sum)
}

func (m *meter) sample() report.Sample {
	s := report.Sample{}
	var ttft, tpot, hot []float64
	var prompt, cached, expected, off int
	for _, j := range m.jobs[m.from:] {
		ms := millis(j.first - j.arrived)
		ttft = append(ttft, ms)
		if j.hot {
			hot = append(hot, ms)
		}
		if j.last > 0 {
			tpot = append(tpot, millis(j.finished-j.first)/float64(j.output-1))
		}
		prompt, cached, expected = prompt+j.prompt, cached+j.cached, expected+j.expected
		off += max(j.cached-j.expected, j.expected-j.cached)
	}
	slices.Sort(ttft)
	s[report.TTFTMean], s[report.TTFTP50], s[report.TTFTP90], s[report.TTFTP99] = stats.Mean(ttft), stats.Percentile(ttft, 0.5),
		stats.Percentile(ttft, 0.9),
		stats.Percentile(ttft, 0.99)
	s[report.HitRatio] = float64(cached) / float64(prompt)
	s[report.HitError] = float64(off) / float64(max(1, expected))
	s[report.Utilisation] = m.busy.Seconds() / float64(m.ranks) / (m.last - m.first).Seconds()
	s[report.Uneven] = m.unevenly / float64(max(1, m.samples))
	s[report.OK], s[report.Failed] = float64(len(m.jobs)), 0
	if len(tpot) > 0 {
		slices.Sort(tpot)
		s[report.TPOTMean], s[report.TPOTP95] = stats.Mean(tpot), stats.Percentile(tpot, 0.95)
	}
	if len(hot) > 0 {
		s[report.BurstMean] = stats.Mean(hot)
	}
	return s
}

func millis(d time.Duration) float64 { return float64(d) / 1e6 }

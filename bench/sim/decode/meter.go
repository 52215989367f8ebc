package decode

import (
	"math"
	"slices"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/step"
	"evenkeel/dispatcher/virtual"
	"evenkeel/internal/stats"
)

// ticksKnown bounds how many rounds are timed.
const ticksKnown = 1 << 20

// meter measures from when so many requests are done until the last request has arrived: then the
// load is no longer held up. Waits are counted to their end, or starvation would be invisible.
type meter struct {
	warm      int // requests to be done first
	measuring bool
	over      bool
	from, to  float64

	done, failed, preempted int

	steps                                                                     int
	imbalance, spread, idle, held, running, ms, kvMs, kvExcess, requestExcess float64
	idealMs, tokens                                                           float64
	ttft, tpot, e2e                                                           []float64
	poolWaitMax, waitMax, waitSum                                             float64
	seats                                                                     int
	ticks                                                                     []float64 // us
	loads                                                                     []int64
	does                                                                      []step.Rank

	keep bool // the steps of the first group, for plots
	kept []report.Step
}

// warmShare is of how many requests one is done before anything is measured.
const warmShare = 8

// phase follows the run: arrived says that no request is still to come.
func (m *meter) phase(now float64, arrived bool) {
	if !m.measuring && !m.over && m.done >= m.warm {
		m.measuring, m.from = true, now
	}
	if arrived && !m.over {
		m.over, m.measuring, m.to = true, false, now
	}
}

// warmed says whether waits count already.
func (m *meter) warmed() bool { return m.done >= m.warm }

// timed measures how long a round takes on this machine.
func (m *meter) timed(round func()) {
	start := time.Now()
	round()
	m.tick(time.Since(start))
}

func (m *meter) tick(took time.Duration) {
	if len(m.ticks) < ticksKnown {
		m.ticks = append(m.ticks, float64(took.Nanoseconds())/1e3)
	}
}

func (m *meter) admitted(wait float64) {
	if m.warmed() {
		m.poolWaitMax = max(m.poolWaitMax, wait)
	}
}

func (m *meter) seated(wait float64) {
	if m.warmed() {
		m.waitMax = max(m.waitMax, wait)
		m.waitSum += wait
		m.seats++
	}
}

func (m *meter) generated(tokens int) {
	if m.measuring {
		m.tokens += float64(tokens)
	}
}

func (m *meter) firstToken(ms float64) {
	if m.measuring {
		m.ttft = append(m.ttft, ms)
	}
}

func (m *meter) finished(now float64, q *job) {
	m.done++
	if !m.measuring {
		return
	}
	m.e2e = append(m.e2e, now-q.arrival)
	if q.output > 1 && !math.IsNaN(q.first) { // those that were there from the start have no first token
		m.tpot = append(m.tpot, (now-q.first)/float64(q.output-1))
	}
}

// step measures the step that begins and returns how long it takes.
func (m *meter) step(g *virtual.Group, first bool, now float64) float64 {
	m.loads, m.does = m.loads[:0], m.does[:0]
	running, mostRunning, largest, costly, sumCost := 0, 0, 0.0, 0.0, 0.0 // loads as steps feel them
	for _, w := range g.Ranks {
		tokens, n := w.Load(g.Step)
		m.loads = append(m.loads, tokens)
		m.does = append(m.does, step.Rank{Requests: float64(n), KV: float64(tokens)})
		running, mostRunning = running+n, max(mostRunning, n)
		load := w.StepLoad(tokens, n)
		largest = max(largest, load)
		costly += load
		sumCost += 1 / w.Cost
	}
	most, least, sum := slices.Max(m.loads), slices.Min(m.loads), int64(0)
	for _, l := range m.loads {
		sum += l
	}
	imbalance := float64(int64(len(m.loads))*most - sum)
	kvMs := g.Law.C1Ms * largest
	ms := g.Law.C0Ms + kvMs
	if !g.Law.Plain() {
		ms = g.Law.Ms(m.does)
	}
	if m.keep && first {
		m.keepStep(g, now, ms)
	}
	if !m.measuring {
		return ms
	}
	m.steps++
	m.imbalance += imbalance
	m.spread += float64(most - least)
	if most > 0 {
		m.idle += 1 - costly/(float64(len(m.loads))*largest)
	}
	m.held += float64(sum)
	m.running += float64(running)
	if sum > 0 && running > 0 {
		ranks := float64(len(m.loads))
		m.kvExcess += ranks*float64(most)/float64(sum) - 1
		m.requestExcess += ranks*float64(mostRunning)/float64(running) - 1
	}
	m.ms += ms
	m.kvMs += kvMs
	level := g.Law.Level()
	m.idealMs += level.C0Ms + (level.C1Ms*float64(sum)+level.RequestMs*float64(running))/sumCost
	return ms
}

func (m *meter) keepStep(g *virtual.Group, now, ms float64) {
	s := report.Step{Start: millis(now), Length: millis(ms)}
	for i, w := range g.Ranks {
		_, n := w.Load(g.Step)
		s.Running = append(s.Running, n)
		s.KVTokens = append(s.KVTokens, int(m.loads[i]))
	}
	m.kept = append(m.kept, s)
}

func millis(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// sample is what the run gave, and the bound: the same steps, were all level.
func (m *meter) sample() (run, bound report.Sample) {
	run, bound = report.Sample{}, report.Sample{}
	run[report.OK], run[report.Failed] = float64(m.done), float64(m.failed)
	run[report.PoolWaitMax], run[report.WaitMax] = m.poolWaitMax, m.waitMax
	run[report.WaitMean] = m.waitSum / float64(m.seats)
	run[report.Preempted] = float64(m.preempted)
	run[report.TTFTMean] = stats.Mean(m.ttft)
	slices.Sort(m.ticks)
	run[report.TickP99], run[report.TickMean] = stats.Percentile(m.ticks, 0.99), stats.Mean(m.ticks)
	for _, q := range []struct {
		values []float64
		name   report.Metric
		p      float64
	}{
		{m.ttft, report.TTFTP50, 0.50}, {m.ttft, report.TTFTP99, 0.99},
		{m.tpot, report.TPOTP50, 0.50}, {m.tpot, report.TPOTP95, 0.95},
		{m.e2e, report.E2EP50, 0.50}, {m.e2e, report.E2EP99, 0.99},
	} {
		slices.Sort(q.values)
		run[q.name] = stats.Percentile(q.values, q.p)
	}
	if m.steps == 0 {
		return run, bound
	}
	n := float64(m.steps)
	run[report.Imbalance], run[report.MaxMinusMin], run[report.IdleShare] = m.imbalance/n, m.spread/n, m.idle/n
	run[report.TokensPerS] = m.tokens / (m.to - m.from) * 1000
	run[report.StepMean], run[report.KVShare] = m.ms/n, m.kvMs/m.ms
	run[report.KVTokens], run[report.Running] = m.held/n, m.running/n
	run[report.KVExcess], run[report.RequestExcess] = m.kvExcess/n, m.requestExcess/n
	run[report.WindowS], run[report.Steps] = (m.to-m.from)/1000, n

	bound[report.Imbalance], bound[report.MaxMinusMin], bound[report.IdleShare] = 0, 0, 0
	bound[report.StepMean] = m.idealMs / n
	bound[report.TokensPerS] = run[report.TokensPerS] * m.ms / m.idealMs
	return run, bound
}

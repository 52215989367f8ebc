package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// figure is what policies are compared by.
type figure struct {
	metric report.Metric
	name   string
	more   bool // is better
}

var (
	throughput = figure{report.TokensPerS, "tokens/s", true}
	pace       = figure{report.TPOTP95, "TPOT p95", false}
	first      = figure{report.TTFTP99, "TTFT p99", false}
)

// best is the best of the set on a load; NaN where it was not measured.
func (t *trials) best(load int, f figure) float64 { return t.bestBut(load, f, -1) }

// bestBut is that without a policy.
func (t *trials) bestBut(load int, f figure, without int) float64 {
	best := math.NaN()
	for p := range set {
		if x := t.of[load][p].of(f.metric); p != without && (math.IsNaN(best) || f.more == (x > best)) {
			best = x
		}
	}
	return best
}

// shares is a policy's figure as a multiple of the best, load by load; NaN where there is none.
func (t *trials) shares(policy int, f figure) []float64 {
	if known := t.known[share{policy, f}]; known != nil {
		return known
	}
	out := make([]float64, len(t.loads))
	for i := range t.loads {
		out[i] = t.of[i][policy].of(f.metric) / t.best(i, f)
	}
	t.known[share{policy, f}] = out
	return out
}

// share is which shares.
type share struct {
	policy int
	of     figure
}

// geomean is that of the values drawn; those that are no number do not count.
func geomean(values []float64, drawn []int) float64 {
	list := make([]float64, len(drawn))
	for k, i := range drawn {
		list[k] = values[i]
	}
	return stats.GeometricMean(list)
}

func all(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

// interval is the geomean with the ends of its 95 % interval.
func interval(values []float64) string {
	low, high := stats.Bootstrap(len(values), 0.95, func(drawn []int) float64 { return geomean(values, drawn) })
	return fmt.Sprintf("%.4f (%.4f to %.4f)", geomean(values, all(len(values))), low, high)
}

// worst is the load with the worst share, and the share that all but a twentieth of the loads keep.
func worst(shares []float64, more bool) (at int, share, twentieth float64) {
	order := slices.DeleteFunc(all(len(shares)), func(i int) bool { return math.IsNaN(shares[i]) })
	slices.SortFunc(order, func(a, b int) int {
		if more {
			a, b = b, a
		}
		return cmp.Compare(shares[b], shares[a])
	})
	return order[0], shares[order[0]], shares[order[len(order)/20]]
}

func (t *trials) tables() string {
	var b strings.Builder
	fmt.Fprintf(&b, "`go run ./bench/claims/regret -seed %d -loads %d`: %d loads, %d policies.\n\n", t.seed, len(t.loads), len(t.loads),
		len(t.policies))
	b.WriteString(draw.Ranges() + "\n" + t.gains() + "\n")
	for _, f := range []figure{throughput, first, pace} {
		b.WriteString(t.table(f) + "\n")
	}
	b.WriteString(t.bars() + "\n" + t.losses() + "\n" + t.spread())
	return b.String()
}

func (t *trials) name(policy int) string {
	if name := t.policies[policy]; !slices.Contains(set, name) {
		return "`" + name + "`, not in the set"
	}
	return "`" + t.policies[policy] + "`"
}

func (t *trials) table(f figure) string {
	beyond := "95th percentile"
	if f.more {
		beyond = "5th percentile"
	}
	m := page.Markdown{Head: []string{f.name + ", times the best", "geometric mean (95 % interval)", beyond, "worst", "its load"}}
	if f.more {
		m.Head = append(m.Head, "idle share above the least, worst, points", "its load", "loads more than 1 % behind",
			"preempted, of 1,000 requests", "a tick, times that of `evenkeel`")
	}
	for p := range t.policies {
		shares := t.shares(p, f)
		at, least, twentieth := worst(shares, f.more)
		row := []string{t.name(p), interval(shares), fmt.Sprintf("%.3f", twentieth), fmt.Sprintf("%.3f", least), fmt.Sprint(t.loads[at].Number)}
		if f.more {
			behind := 0
			for _, s := range shares {
				if s < 0.99 {
					behind++
				}
			}
			idle, load := t.idle(p)
			row = append(row, fmt.Sprintf("%.1f", 100*idle), fmt.Sprint(t.loads[load].Number), fmt.Sprint(behind),
				fmt.Sprintf("%.1f", 1000*t.total(p, report.Preempted)/t.total(p, report.OK)), fmt.Sprintf("%.2f", t.tick(p)))
		}
		m.Add(row...)
	}
	shares := make([]float64, len(t.loads))
	for i := range shares {
		shares[i] = t.bestBut(i, f, theDefault) / t.best(i, f)
	}
	at, least, twentieth := worst(shares, f.more)
	row := []string{"the best of the others, on each load", interval(shares), fmt.Sprintf("%.3f", twentieth), fmt.Sprintf("%.3f", least),
		fmt.Sprint(t.loads[at].Number)}
	m.Add(append(row, slices.Repeat([]string{""}, len(m.Head)-len(row))...)...)
	return m.String()
}

// idle is by how much a policy's idle share lies above the least of the set, on the worst load.
func (t *trials) idle(policy int) (most float64, load int) {
	for i := range t.loads {
		if above := t.idleAbove(i, policy); above > most {
			most, load = above, i
		}
	}
	return most, load
}

func (t *trials) idleAbove(load, policy int) float64 {
	return t.of[load][policy].of(report.IdleShare) - t.best(load, figure{metric: report.IdleShare})
}

// tick is what a policy's tick costs beside the default's, in the geometric mean.
func (t *trials) tick(policy int) float64 {
	ratios := make([]float64, len(t.loads))
	for i := range ratios {
		ratios[i] = t.of[i][policy].of(report.TickMean) / t.of[i][theDefault].of(report.TickMean)
	}
	return geomean(ratios, all(len(ratios)))
}

// total is a sum over all loads.
func (t *trials) total(policy int, m report.Metric) (sum float64) {
	for i := range t.loads {
		sum += t.of[i][policy].of(m)
	}
	return sum
}

var theDefault = slices.Index(set, "evenkeel")

// aim is what the default is to reach beside the best.
type aim struct {
	what  string
	of    func(policy int, drawn []int) float64
	limit float64
	more  bool
	show  string
}

func (t *trials) aims() []aim {
	return []aim{
		{"tokens/s, geometric mean", func(p int, drawn []int) float64 { return geomean(t.shares(p, throughput), drawn) }, 0.997, true, "%.3f"},
		{"tokens/s, worst", func(p int, drawn []int) float64 { return least(t.shares(p, throughput), drawn) }, 0.95, true, "%.3f"},
		{"TTFT p99, geometric mean", func(p int, drawn []int) float64 { return geomean(t.shares(p, first), drawn) }, 1.15, false, "%.2f"},
		{"TPOT p95, geometric mean", func(p int, drawn []int) float64 { return geomean(t.shares(p, pace), drawn) }, 1.02, false, "%.2f"},
		{
			"TTFT p50 in closed loops, times that of `jsq-kv`, geometric mean",
			func(p int, drawn []int) float64 { return geomean(t.closedMedian(p), drawn) }, 1.15, false, "%.2f",
		},
	}
}

// closedMedian is a policy's median time to the first token in closed loops, as a multiple of that
// under jsq-kv, load by load.
func (t *trials) closedMedian(policy int) []float64 {
	out := make([]float64, len(t.loads))
	beside := slices.Index(t.policies, "jsq-kv")
	for i := range out {
		out[i] = t.of[i][policy].of(report.TTFTP50) / t.of[i][beside].of(report.TTFTP50)
		if t.loads[i].Rho > 0 {
			out[i] = math.NaN()
		}
	}
	return out
}

// bars is what the default is to reach, and whether it does.
func (t *trials) bars() string {
	m := page.Markdown{Head: []string{"`evenkeel` beside the best", "result", "95 % interval"}, Text: 3}
	for _, l := range t.laws() {
		m.Head = append(m.Head, l.name)
	}
	m.Head = append(m.Head, "aim", "verdict")
	for _, bar := range t.aims() {
		everything := all(len(t.loads))
		is, limit := fmt.Sprintf(bar.show, bar.of(theDefault, everything)), fmt.Sprintf(bar.show, bar.limit)
		low, high := stats.Bootstrap(len(t.loads), 0.95, func(drawn []int) float64 { return bar.of(theDefault, drawn) })
		row := []string{bar.what, is, fmt.Sprintf(bar.show+" to "+bar.show, low, high)}
		for _, l := range t.laws() {
			row = append(row, fmt.Sprintf(bar.show, bar.of(theDefault, l.loads)))
		}
		wants, verdict := "at most "+limit, "**not met**"
		if bar.more {
			wants = "at least " + limit
		}
		if met(is, limit, bar.more) {
			verdict = "met"
		}
		m.Add(append(row, wants, verdict)...)
	}
	return m.String()
}

// met compares what is printed.
func met(is, limit string, more bool) bool {
	var x, y float64
	_, _ = fmt.Sscan(is, &x)
	_, _ = fmt.Sscan(limit, &y)
	return x == y || !math.IsNaN(x) && more == (x > y)
}

// least of the values drawn.
func least(values []float64, drawn []int) float64 {
	low := math.Inf(1)
	for _, i := range drawn {
		low = min(low, values[i])
	}
	return low
}

// losses are the loads on which the default is furthest behind in tokens/s, and in idle share.
func (t *trials) losses() string {
	figures := [...]figure{throughput, {metric: report.IdleShare}}
	var tables [len(figures)]string
	for k, f := range figures {
		title := "where `evenkeel` is furthest behind in tokens/s"
		behind := func(load, policy int) float64 { return -t.shares(policy, throughput)[load] }
		if k > 0 {
			title, behind = "where it idles most above the least", t.idleAbove
		}
		m := page.Markdown{Head: []string{title, "tokens/s, times the best", "idle, %", "preempted, of 1,000", "best", "its idle, %",
			"preempted"}}
		order := all(len(t.loads))
		slices.SortFunc(order, func(a, b int) int { return cmp.Compare(behind(b, theDefault), behind(a, theDefault)) })
		for _, i := range order[:min(lossesShown, len(order))] {
			best := t.best(i, f)
			winner := slices.IndexFunc(t.policies, func(p string) bool { return t.of[i][slices.Index(t.policies, p)].of(f.metric) == best })
			idle := func(p int) string { return fmt.Sprintf("%.1f", 100*t.of[i][p].of(report.IdleShare)) }
			preempted := func(p int) string {
				return fmt.Sprintf("%.0f", 1000*t.of[i][p].of(report.Preempted)/t.of[i][p].of(report.OK))
			}
			m.Add(t.loads[i].String(), fmt.Sprintf("%.3f", t.shares(theDefault, throughput)[i]), idle(theDefault), preempted(theDefault),
				"`"+t.policies[winner]+"`", idle(winner), preempted(winner))
		}
		tables[k] = m.String()
	}
	return strings.Join(tables[:], "\n")
}

const lossesShown = 3

// spread says how far to believe a share: the same requests begun elsewhere.
func (t *trials) spread() string {
	m := page.Markdown{Head: []string{"the same requests, begun elsewhere: tokens/s differ by, %", "median", "95th percentile", "most",
		"its load"}}
	diffs := func(name string, value func(load int) float64) {
		d := make([]float64, len(t.loads))
		for i := range d {
			d[i] = 100 * math.Abs(value(i)-1)
		}
		at, most, twentieth := worst(d, false)
		slices.Sort(d)
		m.Add(name, fmt.Sprintf("%.2f", stats.Median(d)), fmt.Sprintf("%.2f", twentieth), fmt.Sprintf("%.2f", most),
			fmt.Sprint(t.loads[at].Number))
	}
	ratio := func(k, load int) float64 {
		return t.shifted[load][k].of(report.TokensPerS) / t.of[load][slices.Index(t.policies, t.shifts[k])].of(report.TokensPerS)
	}
	for k, name := range t.shifts {
		diffs("`"+name+"`", func(load int) float64 { return ratio(k, load) })
	}
	diffs("`"+t.shifts[1]+"` over `"+t.shifts[0]+"`", func(load int) float64 { return ratio(1, load) / ratio(0, load) })
	steps := make([]float64, len(t.loads))
	for i := range steps {
		steps[i] = t.of[i][theDefault].of(report.Steps)
	}
	slices.Sort(steps)
	return m.String() + fmt.Sprintf("\nMeasured under `evenkeel`: %.0f to %.0f steps of all groups, %.0f in the median.\n", steps[0],
		steps[len(steps)-1], stats.Median(steps))
}

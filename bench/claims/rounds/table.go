package main

import (
	"fmt"
	"math"
	"strings"

	"evenkeel/bench/sim/mixed"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// trials are all policies on the loads of a seed.
type trials struct {
	seed     uint64
	policies []mixed.Contender
	loads    []*mixed.Load
	of       [][]mixed.Outcome // by load, then by policy
}

// spread is a figure over the loads: its geometric mean, its least and its largest.
type spread struct{ mean, least, most float64 }

func over(values []float64) spread {
	s := spread{stats.GeometricMean(values), math.Inf(1), math.Inf(-1)}
	for _, v := range values {
		s.least, s.most = min(s.least, v), max(s.most, v)
	}
	return s
}

// ratios of a figure under a policy to that under another one, on the loads that are asked for.
func (t *trials) ratios(p, q int, figure func(o *mixed.Outcome) float64, on func(i int) bool) spread {
	var all []float64
	for i := range t.loads {
		x, y := figure(&t.of[i][p]), figure(&t.of[i][q])
		if x > 0 && y > 0 && (on == nil || on(i)) { // loads of one-token answers have no time per token
			all = append(all, x/y)
		}
	}
	return over(all)
}

func tokens(o *mixed.Outcome) float64 { return o.Tokens }
func ttft(o *mixed.Outcome) float64   { return o.TTFT }
func ttft99(o *mixed.Outcome) float64 { return o.TTFT99 }
func tpot50(o *mixed.Outcome) float64 { return o.TPOT50 }
func tpot95(o *mixed.Outcome) float64 { return o.TPOT95 }

// ofTheBest is a policy's tokens/s as a share of those of the best of the set, on each load.
func (t *trials) ofTheBest(p int) spread {
	var all []float64
	for i := range t.loads {
		best := 0.0
		for k := range set {
			best = max(best, t.of[i][k].Tokens)
		}
		all = append(all, t.of[i][p].Tokens/best)
	}
	return over(all)
}

// gainsLittle says whether a policy makes less than 2 % more tokens/s than the base.
func (t *trials) gainsLittle(p int) func(i int) bool {
	return func(i int) bool { return t.of[i][p].Tokens < 1.02*t.of[i][base].Tokens }
}

func (t *trials) table() string {
	m := page.Markdown{Head: []string{"policy", "tokens/s (worst, best)", "of the best: mean, worst", "mean TTFT", "TTFT p99", "TPOT p50", "TPOT p95 (worst)",
		"mean TTFT where tokens/s gain under 2 % (worst)", "steps with a prefill", "ranks that have none in them"}, Text: 1}
	for p := range t.policies {
		gain, best := t.ratios(p, base, tokens, nil), t.ofTheBest(p)
		slow, little := t.ratios(p, base, tpot95, nil), t.ratios(p, base, ttft, t.gainsLittle(p))
		var steps, empty float64
		for i := range t.loads {
			steps += t.of[i][p].Prefill / float64(len(t.loads))
			empty += t.of[i][p].Empty / float64(len(t.loads))
		}
		m.Add(t.policies[p].Name, fmt.Sprintf("%.3f (%.2f, %.2f)", gain.mean, gain.least, gain.most), fmt.Sprintf("%.3f, %.3f", best.mean, best.least),
			page.Ratio(t.ratios(p, base, ttft, nil).mean), page.Ratio(t.ratios(p, base, ttft99, nil).mean), page.Ratio(t.ratios(p, base, tpot50, nil).mean),
			fmt.Sprintf("%.2f (%.2f)", slow.mean, slow.most), fmt.Sprintf("%.2f (%.2f)", little.mean, little.most),
			fmt.Sprintf("%.0f %%", 100*steps), fmt.Sprintf("%.0f %%", 100*empty))
	}
	return m.String()
}

// aims are what rounds must reach, and what they do.
func (t *trials) aims(m *page.Markdown) {
	p := 0
	for t.policies[p].Name != ours {
		p++
	}
	gain, best := t.ratios(p, base, tokens, nil), t.ofTheBest(p)
	first, little := t.ratios(p, base, ttft, nil), t.ratios(p, base, ttft, t.gainsLittle(p))
	slow := t.ratios(p, base, tpot95, nil)
	row := func(what, aim string, got string, met bool) {
		verdict := "met"
		if !met {
			verdict = "**not met**"
		}
		m.Add(what, aim, fmt.Sprint(t.seed), got, verdict)
	}
	pair := func(a, b float64) string { return fmt.Sprintf("%.3f, %.3f", a, b) }
	row("tokens/s against least tokens: mean, worst", "1.10, 0.95", pair(gain.mean, gain.least), gain.mean >= 1.10 && gain.least >= 0.95)
	row("tokens/s as a share of the best: mean, worst", "0.975, 0.87", pair(best.mean, best.least), best.mean >= 0.975 && best.least >= 0.87)
	tail := t.ratios(p, base, ttft99, nil)
	row("TTFT against least tokens: mean, p99", "0.85, 0.70", pair(first.mean, tail.mean), first.mean <= 0.85 && tail.mean <= 0.70)
	row("mean TTFT where tokens/s gain under 2 %: mean, worst", "1.15, 1.8", pair(little.mean, little.most), little.mean <= 1.15 && little.most <= 1.8)
	row("TPOT p95 against least tokens: mean, worst", "0.85, 1.10", pair(slow.mean, slow.most), slow.mean <= 0.85 && slow.most <= 1.10)
}

func (o *options) tables(all []*trials) string {
	m := page.Markdown{Head: []string{"what", "at least, at most", "seed", "got", ""}, Text: 4}
	var b strings.Builder
	for _, t := range all {
		t.aims(&m)
	}
	b.WriteString(m.String())
	for _, t := range all {
		cut, some := 0, 0
		for i := range t.loads {
			for p := range t.policies {
				if cut += t.of[i][p].Unended; t.of[i][p].Unended > 0 {
					some++
				}
			}
		}
		fmt.Fprintf(&b, "\n%d loads of seed %d, as multiples of least tokens; geometric means. "+
			"%d requests of %d runs had not ended when they were no longer waited for.\n\n%s", len(t.loads), t.seed, cut, some, t.table())
	}
	return b.String()
}

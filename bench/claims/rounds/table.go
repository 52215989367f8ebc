package main

import (
	"fmt"
	"math"
	"slices"
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

// ofBases are a policy's tokens/s as a share of those of vLLM's own balancing or of least tokens,
// whichever makes more.
func (t *trials) ofBases(p int) spread {
	var all []float64
	for i := range t.loads {
		all = append(all, t.of[i][p].Tokens/max(t.of[i][base].Tokens, t.of[i][beside].Tokens))
	}
	return over(all)
}

// named is the index of a policy.
func (t *trials) named(name string) int {
	return slices.IndexFunc(t.policies, func(c mixed.Contender) bool { return c.Name == name })
}

// deployed says whether a load has the law of a deployment.
func (t *trials) deployed(i int) bool { return t.loads[i].Of != "" }

// gainsLittle says whether a policy makes less than 2 % more tokens/s than the base.
func (t *trials) gainsLittle(p int) func(i int) bool {
	return func(i int) bool { return t.of[i][p].Tokens < 1.02*t.of[i][base].Tokens }
}

func (t *trials) table() string {
	m := page.Markdown{Head: []string{
		"policy", "tokens/s (worst, best)", "laws of deployments", "published ranges", "of the best: mean, worst", "mean TTFT (worst)",
		"TTFT p99", "TPOT p50", "TPOT p95 (worst)",
		"mean TTFT where tokens/s gain under 2 % (worst)", "steps with a prefill", "ranks that have none in them",
	}, Text: 1}
	published := func(i int) bool { return !t.deployed(i) }
	for p := range t.policies {
		gain, best, first := t.ratios(p, base, tokens, nil), t.ofTheBest(p), t.ratios(p, base, ttft, nil)
		slow, little := t.ratios(p, base, tpot95, nil), t.ratios(p, base, ttft, t.gainsLittle(p))
		var steps, empty float64
		for i := range t.loads {
			steps += t.of[i][p].Prefill / float64(len(t.loads))
			empty += t.of[i][p].Empty / float64(len(t.loads))
		}
		m.Add(t.policies[p].Name, fmt.Sprintf("%.3f (%.2f, %.2f)", gain.mean, gain.least, gain.most),
			fmt.Sprintf("%.3f", t.ratios(p, base, tokens, t.deployed).mean), fmt.Sprintf("%.3f", t.ratios(p, base, tokens, published).mean),
			fmt.Sprintf("%.3f, %.3f", best.mean, best.least),
			fmt.Sprintf("%.2f (%.2f)", first.mean, first.most), page.Ratio(t.ratios(p, base, ttft99, nil).mean),
			page.Ratio(t.ratios(p, base, tpot50, nil).mean),
			fmt.Sprintf("%.2f (%.2f)", slow.mean, slow.most), fmt.Sprintf("%.2f (%.2f)", little.mean, little.most),
			fmt.Sprintf("%.0f %%", 100*steps), fmt.Sprintf("%.0f %%", 100*empty))
	}
	return m.String()
}

// aims are what rounds must reach, and what they do.
func (t *trials) aims(m *page.Markdown) {
	p := t.named(ours)
	before, floor := t.ratios(p, t.named("rounds, whatever waits"), tokens, nil), t.ofBases(p)
	first, little := t.ratios(p, base, ttft, nil), t.ratios(p, base, ttft, t.gainsLittle(p))
	slow := t.ratios(p, base, tpot95, nil)
	row := func(what, aim, got string, met bool) {
		verdict := "met"
		if !met {
			verdict = "**not met**"
		}
		m.Add(what, aim, fmt.Sprint(t.seed), got, verdict)
	}
	pair := func(a, b float64) string { return fmt.Sprintf("%.2f, %.2f", a, b) }
	row("tokens/s beside rounds that hold whatever waits: mean", "0.97", fmt.Sprintf("%.3f", before.mean), before.mean >= 0.97)
	row("tokens/s beside the better of vLLM's own and least tokens: worst", "0.97", fmt.Sprintf("%.3f", floor.least), floor.least >= 0.97)
	row("mean TTFT against vLLM's own: mean, worst", "0.80, 3.00", pair(first.mean, first.most), first.mean < 0.8 && first.most <= 3)
	row("mean TTFT where tokens/s gain under 2 %: mean, worst", "1.20, 2.00", pair(little.mean, little.most),
		little.mean <= 1.2 && little.most <= 2)
	row("TPOT p95 against vLLM's own: mean, worst", "0.80, 1.10", pair(slow.mean, slow.most), slow.mean <= 0.8 && slow.most <= 1.1)
}

// worstLoads names the loads on which rounds do worst.
func (t *trials) worstLoads() string {
	p := t.named(ours)
	slowest, least := 0, 0
	for i := range t.loads {
		if t.of[i][p].TTFT/t.of[i][base].TTFT > t.of[slowest][p].TTFT/t.of[slowest][base].TTFT {
			slowest = i
		}
		if t.of[i][p].Tokens/t.of[i][base].Tokens < t.of[least][p].Tokens/t.of[least][base].Tokens {
			least = i
		}
	}
	say := func(i int) string {
		of, b := &t.of[i][p], &t.of[i][base]
		return fmt.Sprintf("load %s: %.2f of the tokens/s, mean TTFT %.0f ms for %.0f, TPOT p95 %.0f ms for %.0f",
			t.loads[i], of.Tokens/b.Tokens, of.TTFT, b.TTFT, of.TPOT95, b.TPOT95)
	}
	return fmt.Sprintf("Rounds beside vLLM's own, where the first token takes longest: %s.\nWhere they make fewest tokens: %s.\n",
		say(slowest), say(least))
}

func (o options) tables(all []*trials) string {
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
		fmt.Fprintf(&b, "\n%d loads of seed %d, as multiples of vLLM's own balancing; geometric means. "+
			"%d requests of %d runs had not ended when they were no longer waited for.\n\n%s\n%s", len(t.loads), t.seed, cut, some, t.table(),
			t.worstLoads())
	}
	return b.String()
}

package main

import (
	"fmt"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// judged is a row with all its loads.
type judged struct {
	row
	law   *laws.Entry
	pairs []pair

	again   pair   // the load with the least gain, played once more
	changed string // with what
}

// figures are what is told of a deployment.
var figures = []struct {
	title string
	of    report.Metric
}{{"tokens/s, %", report.TokensPerS}, {"mean TTFT, %", report.TTFTMean}, {"TPOT p95, %", report.TPOTP95}}

// ratios are what evenkeel has of a figure, as a share of what the engine has by itself. Loads that lack it are left out.
func (j *judged) ratios(m report.Metric) (all []float64) {
	for _, p := range j.pairs {
		if x, y := p.ours[m], p.theirs[m]; x > 0 && y > 0 {
			all = append(all, x/y)
		}
	}
	return all
}

// gain is by how much there are more tokens/s, in percent.
func (p *pair) gain() float64 {
	return 100 * (p.ours[report.TokensPerS]/p.theirs[report.TokensPerS] - 1)
}

// worst is the load with the least gain in tokens/s.
func (j *judged) worst() *pair {
	least := &j.pairs[0]
	for i := range j.pairs {
		if p := &j.pairs[i]; p.gain() < least.gain() {
			least = p
		}
	}
	return least
}

// percent is by how much some ratios are above 1 in the geometric mean.
func percent(ratios []float64) float64 { return 100 * (stats.GeometricMean(ratios) - 1) }

func interval(ratios []float64) string {
	low, high := stats.Bootstrap(len(ratios), 0.95, func(drawn []int) float64 {
		some := make([]float64, len(drawn))
		for i, k := range drawn {
			some[i] = ratios[k]
		}
		return percent(some)
	})
	return fmt.Sprintf("%+.1f (%+.1f to %+.1f)", percent(ratios), low, high)
}

// names of a row: the model with its engine and GPUs, and what its ranks do.
func (j *judged) names() (deployment, ranks string) {
	model, _, _ := strings.Cut(j.law.Name(), ",")
	ranks = "decode"
	if j.both {
		ranks = "prefill and decode"
	}
	return fmt.Sprintf("%s, %s, %d %s", model, map[string]string{"vllm": "vLLM", "sglang": "SGLang"}[j.law.Engine], j.law.Ranks, j.law.GPU), ranks
}

// The ranks of which a step's length is told, so that everybody can compute it from laws.json.
const levelRequests, levelKV = 32, 64_000

func tables(all []judged, seed uint64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Seed %d, %d loads for each deployment. A level step has %d requests with %d KV tokens in all on each rank.\n\n",
		seed, len(all[0].pairs), levelRequests, levelKV)
	m := page.Markdown{Head: []string{"deployment", "a level step, ms"}, Text: 2}
	for _, f := range figures {
		m.Head = append(m.Head, f.title)
	}
	m.Head = append(m.Head, "loads with over 2 % fewer tokens/s", "the least, tokens/s, %", "its ranks", "form")
	for i := range all {
		j := &all[i]
		deployment, ranks := j.names()
		cells := []string{deployment, fmt.Sprintf("%.1f", j.law.Level(levelRequests, levelKV))}
		for _, f := range figures {
			cells = append(cells, interval(j.ratios(f.of)))
		}
		fewer := 0
		for _, x := range j.ratios(report.TokensPerS) {
			if x < 0.98 {
				fewer++
			}
		}
		m.Add(append(cells, fmt.Sprint(fewer), fmt.Sprintf("%+.1f", j.worst().gain()), ranks, j.law.Form().String())...)
	}
	fmt.Fprintf(&b, "%v\n", &m)
	w := page.Markdown{Head: []string{"where it gains least", "tokens/s, %", "played again: tokens/s, %", "how", "its ranks", "the load"}, Text: 3}
	for i := range all {
		deployment, ranks := all[i].names()
		least := all[i].worst()
		w.Add(deployment, fmt.Sprintf("%+.1f", least.gain()), fmt.Sprintf("%+.1f", all[i].again.gain()), all[i].changed, ranks, least.load.String())
	}
	fmt.Fprintf(&b, "%v", &w)
	return b.String()
}

// short is the table of README.
func short(all []judged) string {
	m := page.Markdown{Head: []string{"model, engine, GPUs", "tokens/s, %", "mean TTFT, %", "TPOT p95, %", "its ranks"}, Text: 1}
	for i := range all {
		j := &all[i]
		deployment, ranks := j.names()
		m.Add(deployment, interval(j.ratios(report.TokensPerS)), whole(j.ratios(report.TTFTMean)), whole(j.ratios(report.TPOTP95)), ranks)
	}
	return m.String()
}

// whole is by how much some ratios are above 1, without decimals.
func whole(ratios []float64) string { return fmt.Sprintf("%+.0f", percent(ratios)) }

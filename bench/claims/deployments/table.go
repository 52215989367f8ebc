package main

import (
	"fmt"
	"slices"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// The matches of a plan, in its order.
const (
	started = iota
	atTheirs
	atOurs
	small
	matches = small
)

// judged is a row with all its loads.
type judged struct {
	row
	law   *laws.Entry
	plan  plan                // empty if its ranks decode
	pairs [matches + 1][]pair // of each match of the plan; of ranks that decode, none with smallBudget

	again   pair   // the load with the least gain, played once more
	changed string // with what
}

// ratios are what evenkeel has of a figure, as a share of what the engine has by itself. Loads that
// lack it are left out.
func (j *judged) ratios(match int, m report.Metric) (all []float64) {
	for _, p := range j.pairs[match] {
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

// worst is the load with the least gain in tokens/s over the tuned engine.
func (j *judged) worst() *pair {
	pairs := j.pairs[atTheirs] // as started, SGLang has small steps, and some loads are far too much for it
	least := &pairs[0]
	for i := range pairs {
		if p := &pairs[i]; p.gain() < least.gain() {
			least = p
		}
	}
	return least
}

// names of a row: the model with its engine and GPUs, and what its ranks do.
func (j *judged) names() (deployment, ranks string) {
	if j.both {
		return j.law.Title(), "prefill and decode"
	}
	return j.law.Title(), "decode"
}

// longer are the loads on which the mean TTFT is longer by more than 20 %.
func (j *judged) longer() string {
	return j.of(report.TTFTMean, func(x float64) bool { return x > 1.2 })
}

// fewer are those with over 2 % fewer tokens/s. Two runs of one policy differ by less on nearly all
// loads.
func (j *judged) fewer() string {
	return j.of(report.TokensPerS, func(x float64) bool { return x < 0.98 })
}

func (j *judged) of(m report.Metric, is func(x float64) bool) string {
	n := 0
	for _, x := range j.ratios(started, m) {
		if is(x) {
			n++
		}
	}
	return fmt.Sprint(n)
}

// median is by how much some ratios are above 1. One load that is too much for its ranks moves a
// mean of times to the first token by much.
func median(ratios []float64, digits int) string {
	ratios = slices.Sorted(slices.Values(ratios))
	return fmt.Sprintf("%+.*f", digits, page.Rounded(100*(stats.Percentile(ratios, 0.5)-1), digits)+0) // no -0
}

// The ranks of which a step's length is told, so that everybody can compute it from laws.json.
const levelRequests, levelKV = 32, 64_000

func tables(all []judged, seed uint64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "Seed %d, %d loads for each deployment. A level step has %d requests with %d KV tokens in all on each rank.\n\n",
		seed, len(all[0].pairs[started]), levelRequests, levelKV)
	m := page.Markdown{Head: []string{
		"deployment", "a level step, ms", "tokens/s, %", "median", "loads with over 2 % fewer",
		"mean TTFT, %", "median", "loads with over 20 % longer", "TPOT p95, %", "its ranks", "form",
	}, Text: 2}
	for i := range all {
		j := &all[i]
		deployment, ranks := j.names()
		tokens, ttft := j.ratios(started, report.TokensPerS), j.ratios(started, report.TTFTMean)
		m.Add(deployment, fmt.Sprintf("%.1f", j.law.Level(levelRequests, levelKV)), page.Percents(tokens), median(tokens, 1),
			j.fewer(), page.Percents(ttft), median(ttft, 0), j.longer(), page.Percents(j.ratios(started, report.TPOTP95)), ranks,
			j.law.Form().String())
	}
	fmt.Fprintf(&b, "%v\n", &m)
	fmt.Fprintf(&b, "%v\n", tuned(all))
	w := page.Markdown{
		Head: []string{"where it gains least over the tuned engine", "tokens/s, %", "played again: tokens/s, %", "how", "its ranks", "the load"}, Text: 3,
	}
	for i := range all {
		deployment, ranks := all[i].names()
		least := all[i].worst()
		w.Add(deployment, fmt.Sprintf("%+.1f", least.gain()), fmt.Sprintf("%+.1f", all[i].again.gain()), all[i].changed, ranks,
			least.load.String())
	}
	fmt.Fprintf(&b, "%v", &w)
	return b.String()
}

// tuned is the table of the engines that prefill and decode, with the flags that were best on other
// loads.
func tuned(all []judged) *page.Markdown {
	m := &page.Markdown{Head: []string{
		"flags of both", "tokens/s, %", "mean TTFT, %", "median", "TPOT p95, %", "the deployment", "flags of the engine alone",
		"of the engine behind evenkeel",
	}, Text: 4}
	for i := range all {
		j := &all[i]
		if !j.both {
			continue
		}
		for k, how := range []string{
			started: "none", atTheirs: "most tokens/s of the engine, and TTFT as short", atOurs: "most tokens/s of `evenkeel`, and TTFT as short",
			small: fmt.Sprintf("%d tokens in a step", smallBudget),
		} {
			ttft, of := j.ratios(k, report.TTFTMean), j.plan.all()[k]
			m.Add(how, page.Percents(j.ratios(k, report.TokensPerS)), page.Percents(ttft), median(ttft, 0),
				page.Percents(j.ratios(k, report.TPOTP95)), j.law.Title(), of.theirs.flags(j.law), of.ours.flags(j.law))
		}
	}
	return m
}

// short is the table of README.
func short(all []judged) string {
	m := page.Markdown{Head: []string{
		"model, engine, GPUs", "tokens/s, %, at the engine's TTFT", "TTFT, %", "tokens/s, %, at evenkeel's TTFT", "TTFT, %",
		"its ranks", "at the engine's TTFT: engine; with evenkeel", "at evenkeel's TTFT",
	}, Text: 3}
	for i := range all {
		j := &all[i]
		deployment, ranks := j.names()
		row, with := []string{deployment}, []string{ranks}
		for _, k := range []int{atTheirs, atOurs} {
			row = append(row, page.Percents(j.ratios(k, report.TokensPerS)), median(j.ratios(k, report.TTFTMean), 0))
			if !j.both {
				with = append(with, "-")
				continue
			}
			of := j.plan.all()[k]
			with = append(with, of.theirs.words()+"; "+of.ours.words())
		}
		m.Add(append(row, with...)...)
	}
	return m.String()
}

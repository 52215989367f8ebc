package main

import (
	"fmt"
	"slices"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
)

// rivals are whom people ask about: what they run today. Of the first one more is shown.
var rivals = []string{vllmOwn, sglangOwn, "jsq-kv"}

// kvShares are the limits of the classes by the share of a step that reading KV takes on the
// fullest rank.
var kvShares = []float64{0, 0.1, 0.3, 1}

// gains is by how much the default beats what people run, by the kind of load.
func (t *trials) gains() string {
	m := page.Markdown{Text: 1, Head: []string{
		"loads", "how many", "vLLM's own, `jsq`: tokens/s, %", "TPOT p95, %", "TTFT p50, times", "TTFT p99, times",
		fmt.Sprintf("loads with over %.0f %% fewer tokens/s", 100*lost),
		"SGLang's own, `rr`: tokens/s, %", "TPOT p95, %", "`jsq-kv`: tokens/s, %", "TPOT p95, %",
	}}
	t.gain(&m, "all", all(len(t.loads)))
	for _, l := range t.laws() {
		t.gain(&m, l.name, l.loads)
	}
	for _, c := range draw.Classes() {
		t.gain(&m, c.Name, slices.DeleteFunc(all(len(t.loads)), func(i int) bool { return !c.Has(t.loads[i]) }))
	}
	rival := slices.Index(t.policies, rivals[0])
	for k, from := range kvShares[:len(kvShares)-1] {
		to := kvShares[k+1]
		t.gain(&m, fmt.Sprintf("KV is %.0f to %.0f %% of a step", 100*from, 100*to), slices.DeleteFunc(all(len(t.loads)), func(i int) bool {
			share := t.of[i][rival].of(report.KVShare)
			return share < from || share >= to
		}))
	}
	return m.String()
}

// law is the loads that have the laws of their steps from the same source.
type law struct {
	name  string
	loads []int
}

func (t *trials) laws() []law {
	deployed := func(i int) bool { return t.loads[i].Of != "" }
	return []law{
		{"laws of deployments", slices.DeleteFunc(all(len(t.loads)), func(i int) bool { return !deployed(i) })},
		{"laws from published ranges", slices.DeleteFunc(all(len(t.loads)), deployed)},
	}
}

// gain adds what the default has on some loads, as a geometric mean.
func (t *trials) gain(m *page.Markdown, name string, loads []int) {
	row := []string{name, fmt.Sprint(len(loads))}
	if len(loads) == 0 {
		m.Add(row...)
		return
	}
	times := func(rival int, of report.Metric) []float64 {
		values := make([]float64, len(t.loads))
		for i := range values {
			values[i] = t.of[i][theDefault].of(of) / t.of[i][rival].of(of)
		}
		return values
	}
	percent := func(values []float64) string {
		some := make([]float64, len(loads))
		for k, at := range loads {
			some[k] = values[at]
		}
		return page.Percents(some)
	}
	for k, name := range rivals {
		rival := slices.Index(t.policies, name)
		tokens := times(rival, report.TokensPerS)
		row = append(row, percent(tokens), percent(times(rival, report.TPOTP95)))
		if k > 0 {
			continue
		}
		fewer := 0
		for _, i := range loads {
			if tokens[i] < 1-lost {
				fewer++
			}
		}
		for _, of := range []report.Metric{report.TTFTP50, report.TTFTP99} {
			row = append(row, fmt.Sprintf("%.2f", geomean(times(rival, of), loads)))
		}
		row = append(row, fmt.Sprint(fewer))
	}
	m.Add(row...)
}

// lost is the share of the tokens/s by which the default must be behind on a load, to have lost
// there. Two runs of one policy differ by less on nearly all loads.
const lost = 0.02

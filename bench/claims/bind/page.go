package main

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"math"
	"strconv"
	"strings"

	"evenkeel/bench/lab/report"
)

// book is what was run.
type book struct {
	options
	samples       *samples
	scenarios     []*scenario
	runs, missing int
}

// found is what the page says of the runs: how many there were, and the verdicts.
func (b *book) found() string { return b.extent() + "\n" + b.verdicts() }

// extent says what was run.
func (b *book) extent() string {
	var t strings.Builder
	for _, p := range b.parts {
		requests := "as many requests as the ranks need"
		if p.requests > 0 {
			requests = report.Grouped(float64(p.requests), 0) + " requests"
		}
		seeds := "one seed"
		if p.seeds > 1 {
			seeds = fmt.Sprintf("%d seeds", p.seeds)
		}
		fmt.Fprintf(&t, "- %s; %s ranks x %s slots; loads %s; prefills of %s steps; %s of %s\n",
			strings.Join(p.traces, ", "), list(p.ranks), list(p.slots), strings.Join(p.loads, ", "), strings.ReplaceAll(list(p.steps), ",", ", "),
			seeds, requests)
	}
	what, rest := "All", ""
	if b.missing > 0 {
		what = fmt.Sprintf("**%s**", report.Grouped(float64(b.runs-b.missing), 0))
		rest = " Each row of the CSV says of how many seeds it is. A scenario without a row was not run."
	}
	return fmt.Sprintf("%s of the %s runs of this grid were done.%s\n\n%s", what, report.Grouped(float64(b.runs), 0), rest, t.String())
}

// unknown stands where nothing can be said.
const unknown = "–"

// leastDifference of idle shares is one that a share is taken of.
const leastDifference = 0.005

// means are those of a metric of some arms, over the seeds that all of them have.
func (b *book) means(s *scenario, steps float64, m report.Metric, which ...int) (of []float64, ok bool) {
	of = make([]float64, len(which))
	n := 0
	for seed := 1; seed <= s.seeds; seed++ {
		var values []float64
		for _, arm := range which {
			c := s.cell(steps, arm)
			c.Seed = seed
			if v, ok := b.samples.of[c][m]; ok {
				values = append(values, v)
			}
		}
		if len(values) < len(which) {
			continue
		}
		n++
		for i, v := range values {
			of[i] += v
		}
	}
	for i := range of {
		of[i] /= float64(n)
	}
	return of, n > 0
}

// gains are by how much `evenkeel` is less idle than jsq-kv, late and at arrival.
func (b *book) gains(s *scenario, steps float64) (late, arrival float64, ok bool) {
	idle, ok := b.means(s, steps, report.IdleShare, lateKV, lateNow, arrivalKV, arrivalNow)
	if !ok {
		return 0, 0, false
	}
	return idle[0] - idle[1], idle[2] - idle[3], true
}

// kept is a share, if there is something to keep.
func (b *book) kept(s *scenario, steps float64) (share float64, ok bool) {
	late, arrival, ok := b.gains(s, steps)
	return arrival / late, ok && late >= leastDifference
}

// lost is the share of the late tokens/s that an arm is below.
func (b *book) lost(s *scenario, steps float64, arm int) (share float64, ok bool) {
	of, ok := b.means(s, steps, report.TokensPerS, lateNow, arm)
	if !ok {
		return 0, false
	}
	return 1 - of[1]/of[0], true
}

// foreseen is the share of the time in which a slot is said to stand empty.
func foreseen(s *scenario, steps float64) float64 {
	src, err := source(s.trace)
	if err != nil {
		return math.NaN()
	}
	return steps / (steps + src.output)
}

// columns of the CSV, each with the deviation between seeds.
var columns = []struct {
	head   string
	metric report.Metric
	scale  float64
	digits int
}{
	{"idle_percent", report.IdleShare, 100, 1},
	{"tokens_per_s", report.TokensPerS, 1, 0},
	{"tpot_p95_ms", report.TPOTP95, 1, 1},
	{"ttft_p50_ms", report.TTFTP50, 1, 0},
	{"ttft_p99_ms", report.TTFTP99, 1, 0},
}

// csv has a row for each arm of each scenario. What is bound late in a closed loop has one, for all
// prefills.
func (b *book) csv() []byte {
	var text bytes.Buffer
	w := csv.NewWriter(&text)
	head := []string{"trace", "ranks", "slots", "load", "steps", "bound_and_policy", "seeds"}
	for _, c := range columns {
		head = append(head, c.head, c.head+"_sd")
	}
	_ = w.Write(head) // into memory
	for _, s := range b.scenarios {
		for _, steps := range s.steps {
			for i, a := range arms {
				var found []report.Sample
				for c := s.cell(steps, i); c.Seed < s.seeds; {
					c.Seed++
					if sample, ok := b.samples.of[c]; ok && c.Steps == steps {
						found = append(found, sample)
					}
				}
				if len(found) == 0 {
					continue
				}
				of := report.Summarize(found...)
				row := []string{s.trace, strconv.Itoa(s.ranks), strconv.Itoa(s.slots), s.load, fmt.Sprint(steps), strings.ReplaceAll(a.name, "`", ""),
					strconv.Itoa(len(found))}
				for _, c := range columns {
					mean, deviation := "", ""
					if v, ok := of[c.metric]; ok {
						mean = strconv.FormatFloat(v.Mean*c.scale, 'f', c.digits, 64)
						if v.SD > 0 {
							deviation = strconv.FormatFloat(v.SD*c.scale, 'f', c.digits, 64)
						}
					}
					row = append(row, mean, deviation)
				}
				_ = w.Write(row)
			}
		}
	}
	w.Flush()
	return text.Bytes()
}

package main

import (
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/tools/page"
	"evenkeel/internal/stats"
)

// term is a coefficient of the law, in ms.
type term int

// The law: step = c0 + the largest of the ranks' (c1 * KV tokens + cr * requests + pl * prompt
// tokens) + ps * the prompt tokens of all ranks / ranks.
const (
	c0 term = iota
	c1
	cr
	pl
	ps
	terms
)

var termNames = [terms]string{"c0", "c1", "cr", "pl", "ps"}

// about is what each term is for.
var about = [terms]string{
	"ms, any step", "ms per 1,000 KV tokens of the slowest rank", "ms per request of the slowest rank",
	"ms per prompt token of the slowest rank",
	"ms per prompt token of all ranks, divided by the ranks",
}

// law is how long a step takes.
type law struct {
	of, off [terms]float64 // ms, and the standard error of each
	known   bool
	r2      float64
	steps   int
	left    int // steps that were left out
}

// slowest is what the rank had to do that a step waited for, by the law.
func (l *law) slowest(s *step) (most part) {
	worst := math.Inf(-1)
	for _, r := range s.ranks {
		if ms := l.of[c1]*r.kv + l.of[cr]*r.decodes + l.of[pl]*r.prompt; ms > worst {
			most, worst = r, ms
		}
	}
	return most
}

// row is what a step weighs each term with.
func (l *law) row(s *step) []float64 {
	r, all := l.slowest(s), 0.0
	for _, rank := range s.ranks {
		all += rank.prompt
	}
	return []float64{c0: 1, c1: r.kv, cr: r.decodes, pl: r.prompt, ps: all / ranks.Count}
}

const (
	rounds = 3 // in which the slowest rank of each step is found by the law so far
	sure   = 4 // standard errors: a term that is nearer to 0 is 0
	farOff = 4 // standard deviations: a step that is so far from the law was disturbed by something else
)

// fit fits the law to steps, without the terms that they do not tell.
func fit(all []step) law {
	for use := []term{c0, c1, cr, pl, ps}; len(use) > 1; {
		l, r := fitTerms(all, use)
		at := len(use) - 1 // no step tells the last one from the others
		if l.known {
			at = weakest(r)
		}
		if at == 0 {
			return l
		}
		use = slices.Delete(use, at, at+1)
	}
	return law{}
}

// fitTerms fits these terms.
func fitTerms(all []step, use []term) (l law, r stats.Regression) {
	l.of = [terms]float64{c1: 0.005, pl: 0.2, ps: 0.1} // to begin with, for the slowest rank
	kept := all
	for range rounds {
		var ok bool
		if r, ok = l.regress(kept, use); !ok {
			return law{}, r
		}
		l = law{known: true, r2: r.R2, steps: len(kept), left: len(all) - len(kept)}
		for i, t := range use {
			l.of[t], l.off[t] = r.Of[i], r.Error[i]
		}
		kept = l.usual(all)
	}
	return l, r
}

// regress fits the terms that are in use, with the slowest ranks by the law so far.
func (l *law) regress(steps []step, use []term) (stats.Regression, bool) {
	rows, y := make([][]float64, len(steps)), make([]float64, len(steps))
	for i := range steps {
		row := l.row(&steps[i])
		for _, t := range use {
			rows[i] = append(rows[i], row[t])
		}
		y[i] = ms(steps[i].length)
	}
	return stats.Regress(rows, y)
}

// weakest is the column of the term that is the least sure, or 0 if all are sure. The constant
// always stays.
func weakest(r stats.Regression) (at int) {
	least := float64(sure)
	for i := 1; i < len(r.Of); i++ {
		if t := r.Of[i] / r.Error[i]; t < least {
			at, least = i, t
		}
	}
	return at
}

// at is how long a step takes.
func (l *law) at(s *step) (ms float64) {
	for t, x := range l.row(s) {
		ms += l.of[t] * x
	}
	return ms
}

// usual are the steps that are not far off the law.
func (l *law) usual(all []step) (kept []step) {
	off := make([]float64, len(all))
	for i := range all {
		off[i] = ms(all[i].length) - l.at(&all[i])
	}
	most := farOff * stats.Deviation(off)
	for i, o := range off {
		if math.Abs(o) <= most {
			kept = append(kept, all[i])
		}
	}
	return kept
}

// config is the law as dispatch.step_model has it.
func (l *law) config() string {
	if !l.known {
		return "{}"
	}
	return fmt.Sprintf("{c0_ms: %.6g, c1_ms: %.6g, request_ms: %.6g, own_prefill_ms: %.6g, shared_prefill_ms: %.6g}", l.of[c0], l.of[c1],
		l.of[cr], l.of[pl], l.of[ps])
}

// writeLaws prints the law that was measured first, and that of all steps.
func writeLaws(out io.Writer, first, all law) {
	fmt.Fprintf(out, "The law of all steps was fitted to %d steps and explains %.2f of their variance (R2); %d more were far off and were "+
		"left out. The law that\n"+
		"was measured first, and that evenkeel was given, was fitted to %d steps (R2 %.2f).\n\n", all.steps, all.r2, all.left, first.steps,
		first.r2)
	t := page.Markdown{Head: []string{"term", "measured first", "of all steps", "what it is"}, Text: 1}
	for i, name := range termNames {
		cell := func(l law) string {
			if l.of[i] == 0 {
				return "0"
			}
			scale := 1.0
			if term(i) == c1 {
				scale = 1000
			}
			return fmt.Sprintf("%.3f ± %.3f", scale*l.of[i], 2*scale*l.off[i])
		}
		t.Add(page.Code(name), cell(first), cell(all), about[i])
	}
	fmt.Fprintf(out, "%v\nThe ± is two standard errors. A term that is nearer to 0 than %d standard errors is 0.\n", &t, sure)
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

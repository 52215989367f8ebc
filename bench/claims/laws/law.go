package main

import (
	"errors"
	"fmt"
	"io"
	"math"

	"evenkeel/internal/stats"
)

// cell is how long a step took with so many requests and KV tokens on each rank.
type cell struct {
	requests int
	kv, ms   float64
}

// beside is what prompts of so many tokens cost a step, on a share of the ranks.
type beside struct {
	tokens, rounds int
	share, ms      float64
}

// found is what was measured and what it tells.
type found struct {
	cells  []cell
	beside []beside

	decode  stats.Regression // constant, requests, KV tokens
	prompts stats.Regression // constant, tokens of the slowest rank, tokens of all ranks divided by their number
	alone   bool             // one rank: its own tokens and those of all are the same
	known   bool             // what prompts cost
}

var errSingular = errors.New("the law cannot be told from these: take at least two different numbers of -requests and two of -contexts")

// fit tells what a step without prompts takes.
func (l *found) fit() error {
	rows, y := make([][]float64, len(l.cells)), make([]float64, len(l.cells))
	for i, c := range l.cells {
		rows[i], y[i] = []float64{1, float64(c.requests), c.kv}, c.ms
	}
	r, ok := stats.Regress(rows, y)
	if !ok {
		return errSingular
	}
	l.decode = r
	return nil
}

// at is what a step takes by the law.
func (l *found) at(requests, kv float64) float64 { return l.decode.At([]float64{1, requests, kv}) }

// fitPrompts tells what prompts take.
func (l *found) fitPrompts() {
	l.alone = true
	for _, p := range l.beside {
		l.alone = l.alone && p.share == 1
	}
	var rows [][]float64
	var y []float64
	for _, p := range l.beside {
		row := []float64{1, float64(p.tokens), float64(p.tokens) * p.share}
		if l.alone {
			row = row[:2]
		}
		rows, y = append(rows, row), append(y, p.ms)
	}
	l.prompts, l.known = stats.Regress(rows, y)
}

// write prints all as a part of a page.
func (l *found) write(out io.Writer, o *options) error {
	d := l.decode
	_, err := fmt.Fprintf(out, "%s, %d ranks. A step without prompts takes, by %d measurements (R2 %.4f):\n\n"+
		"c0 %.2f +- %.2f ms, cr %.4f +- %.4f ms a request, c1 %.4f +- %.4f µs a KV token\n\n", o.client.Model, o.ranks, d.N, d.R2,
		d.Of[0], 2*d.Error[0], d.Of[1], 2*d.Error[1], 1000*d.Of[2], 2000*d.Error[2])
	switch r := l.prompts; {
	case !l.known:
		fmt.Fprint(out, "What prompts cost cannot be told from these -prompts: take two different ones.\n\n")
	case l.alone:
		fmt.Fprintf(out, "A prompt takes (R2 %.4f): %.2f +- %.2f ms, and %.2f +- %.2f µs a token\n\n", r.R2, r.Of[0], 2*r.Error[0], 1000*r.Of[1],
			2000*r.Error[1])
	default:
		fmt.Fprintf(out, "A step with prompts takes more (R2 %.4f): p %.2f +- %.2f ms, "+
			"pl %.2f +- %.2f µs a token of the rank that has most, ps %.2f +- %.2f µs a token of all ranks, divided by their number\n\n",
			r.R2, r.Of[0], 2*r.Error[0], 1000*r.Of[1], 2000*r.Error[1], 1000*r.Of[2], 2000*r.Error[2])
	}
	fmt.Fprint(out, "| requests on each rank | KV tokens on each | step, ms | by the law | off |\n|--:|--:|--:|--:|--:|\n")
	worst := 0.0
	for _, c := range l.cells {
		by := l.at(float64(c.requests), c.kv)
		worst = max(worst, math.Abs(c.ms/by-1))
		fmt.Fprintf(out, "| %d | %.0f | %.2f | %.2f | %+.1f %% |\n", c.requests, c.kv, c.ms, by, 100*(c.ms/by-1))
	}
	fmt.Fprintf(out, "\nThe worst is %.1f %% off. Prompts:\n\n| tokens | on a share of the ranks | rounds | ms more |\n|--:|--:|--:|--:|\n",
		100*worst)
	for _, p := range l.beside {
		fmt.Fprintf(out, "| %d | %.2f | %d | %.2f |\n", p.tokens, p.share, p.rounds, p.ms)
	}
	return err
}

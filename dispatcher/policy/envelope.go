package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// envelope is the projected load of every rank over steps 0..H, the largest of
// the group at each, and how far each rank is below it (algorithm 3). Loads are
// scaled by what a KV token costs on the rank.
type envelope struct {
	columns int     // H + 1
	load    []int64 // P_g(h) at g*columns+h
	top     []int64 // E(h)
	margin  []int64 // of each rank, the smallest over all steps
	held    []int64 // KV tokens a rank holds now, neither scaled nor projected
}

// build starts a round.
func (e *envelope) build(s *Snapshot, horizon int) {
	n := len(s.Workers)
	e.columns = horizon + 1
	e.load, e.top = sized(e.load, n*e.columns), sized(e.top, e.columns)
	e.margin, e.held = sized(e.margin, n), sized(e.held, n)
	clear(e.top)
	for g := range s.Workers {
		w := &s.Workers[g]
		row := e.row(g)
		e.held[g] = w.KVTokens()
		if horizon == 0 {
			row[0] = e.held[g]
		} else {
			Project(row, w.Running)
		}
		for h, x := range row {
			row[h] = subset.Scaled(x, float64(w.Cost))
			e.top[h] = max(e.top[h], row[h])
		}
	}
	e.measure()
}

// row is the projected load of rank g.
func (e *envelope) row(g int) []int64 { return e.load[g*e.columns:][:e.columns] }

// measure finds every rank's margin anew.
func (e *envelope) measure() {
	for g := range e.margin {
		least := int64(math.MaxInt64)
		for h, x := range e.row(g) {
			least = min(least, e.top[h]-x)
		}
		e.margin[g] = least
	}
}

// add charges a scaled size to rank g at every step. The envelope rises with it
// and never falls within a round.
func (e *envelope) add(g int, size int64) {
	rose := false
	for h, x := range e.row(g) {
		x += size
		e.row(g)[h] = x
		if x > e.top[h] {
			e.top[h], rose = x, true
		}
	}
	if rose {
		e.measure()
	} else {
		e.margin[g] -= size
	}
}

// KVTokens is the load of the worker: KV tokens of all it runs.
func (w *Worker) KVTokens() int64 {
	var sum int64
	for i := range w.Running {
		sum += int64(w.Running[i].Prompt) + int64(w.Running[i].Generated)
	}
	return sum
}

// Project writes the projected KV tokens of the running requests at steps
// 0..len(dst)-1: each grows by a token a step until its predicted end Rhat; one
// whose Rhat reaches the horizon never ends inside it.
func Project(dst []int64, running []Request) {
	const one = 1 << 40 // a request is counted above the bits of its tokens
	last := len(dst) - 1
	clear(dst)
	for i := range running {
		r := &running[i]
		at := last // the last step at which it is there
		if r.Rhat < float32(last) {
			at = max(0, int(math.Ceil(float64(r.Rhat)))-1)
		}
		dst[at] += one + int64(r.Prompt) + int64(r.Generated)
	}
	var sum int64
	for h := last; h >= 0; h-- {
		sum += dst[h]
		dst[h] = sum&(one-1) + int64(h)*(sum>>40)
	}
}

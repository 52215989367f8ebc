package policy

import (
	"math"

	"evenkeel/dispatcher/subset"
)

// envelope is the projected load of every rank over steps 0..H, the largest of
// the group at each, and how far each rank is below it. Loads are
// scaled by what a KV token costs on the rank.
type envelope struct {
	columns int     // H + 1
	load    []int64 // P_g(h) at g*columns+h
	top     []int64 // E(h)
	held    []int64 // KV tokens a rank holds now, neither scaled nor projected

	// The horizon margin of each rank as last measured, and the step where it
	// was found. See marginOf.
	least   []int64
	leastAt []int32
}

// build starts a round.
func (e *envelope) build(s *Snapshot, horizon int) {
	n := len(s.Workers)
	e.columns = horizon + 1
	e.load, e.top = sized(e.load, n*e.columns), sized(e.top, e.columns)
	e.least, e.leastAt, e.held = sized(e.least, n), sized(e.leastAt, n), sized(e.held, n)
	clear(e.top)
	for g := range s.Workers {
		w := &s.Workers[g]
		row := e.row(g)
		held := w.KVTokens()
		e.held[g] = held
		if horizon == 0 {
			row[0] = held
		} else {
			Project(row, w.Running)
			if w.Others > 0 {
				for h := range row {
					row[h] += w.Others
				}
			}
		}
		scale(row, w.Cost)
		top := e.top[:len(row)]
		for h, x := range row {
			top[h] = max(top[h], x)
		}
		e.leastAt[g] = none
	}
}

// scale turns KV tokens into what they cost on their rank.
func scale(row []int64, cost float32) {
	if cost == 0 || cost == 1 {
		return
	}
	for h, x := range row {
		row[h] = subset.Scaled(x, float64(cost))
	}
}

// row is the projected load of rank g.
func (e *envelope) row(g int) []int64 { return e.load[g*e.columns:][:e.columns] }

// marginOf is how far rank g stays below the envelope at every step. Margins of
// other ranks only grow within a round, so what was measured still stands while
// it does at the step where it was found.
func (e *envelope) marginOf(g int) int64 {
	if at := int(e.leastAt[g]); at >= 0 && e.top[at]-e.load[g*e.columns+at] == e.least[g] {
		return e.least[g]
	}
	return e.measure(g)
}

// measure finds the margin of rank g anew.
func (e *envelope) measure(g int) int64 {
	row := e.row(g)
	least, at, top := int64(math.MaxInt64), 0, e.top[:len(row)]
	for h, x := range row {
		if m := top[h] - x; m < least {
			least, at = m, h
		}
	}
	e.least[g], e.leastAt[g] = least, int32(at)
	return least
}

// margins writes m_g(h) of rank g.
func (e *envelope) margins(g int, dst []int64) []int64 {
	row := e.row(g)
	dst = dst[:len(row)]
	for h, t := range e.top[:len(row)] {
		dst[h] = t - row[h]
	}
	return dst
}

// add charges a scaled size to rank g at every step. The envelope rises with it
// and never falls within a round.
func (e *envelope) add(g int, size int64) {
	row := e.row(g)
	top := e.top[:len(row)]
	for h, x := range row {
		x += size
		row[h] = x
		top[h] = max(top[h], x)
	}
	e.leastAt[g] = none
}

// KVTokens are those that the worker holds: of all it runs, and of what is
// bound to it and does not decode yet.
func (w *Worker) KVTokens() int64 {
	held := w.Others
	for i := range w.Running {
		r := &w.Running[i]
		held += r.Tokens()
	}
	return held
}

// Project writes the projected KV tokens of the running requests at steps
// 0..len(dst)-1: each grows by a token a step until its predicted end Rhat. One whose Rhat reaches the
// horizon, or is unknown, never ends inside it.
func Project(dst []int64, running []Request) {
	const one = 1 << 40 // a request is counted above the bits of its tokens
	last := len(dst) - 1
	clear(dst)
	horizon := float32(last)
	for i := range running {
		r := &running[i]
		at := last // the last step at which it is there
		if r.Rhat < horizon && r.Rhat > 0 {
			at = int(r.Rhat)
			if float32(at) == r.Rhat {
				at--
			}
		}
		dst[at] += one + r.Tokens()
	}
	var sum int64
	for h := last; h >= 0; h-- {
		sum += dst[h]
		dst[h] = sum&(one-1) + int64(h)*(sum>>40)
	}
}

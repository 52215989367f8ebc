// Package decision says what a request's rank was chosen on: the round as it was, and the ranks that were
// nearly as good.
package decision

import "math"

// A Trace is what a rank was chosen on: the round as it was, and the best of
// the ranks that could have had the entry. Slots have them with Config.Explain.
type Trace struct {
	Tick     uint64
	Waiting  int   // entries of the pool the round saw, this one among them
	KVTokens int64 // of the chosen rank before the round
	Fullest  int64 // KV tokens of the group's fullest rank then
	Able     int   // ranks that could have had it
	Less     bool  // smaller scores are better

	best  [mostAlternatives]Alternative
	count int
}

// An Alternative is a rank as the policy compared it, others of its round being where
// they were put.
type Alternative struct {
	Worker   int32
	Name     string
	Score    float64 // NaN: the policy does not compare, or a round was too large to ask about
	KVTokens int64   // before the round
	Free     int32   // slots then
}

// mostWeighed are the ranks that grounds name.
const mostAlternatives = 8

// Best are the ranks that could have had it, the best first; the chosen one is
// among them, or the assignment was moved off a pair that fails.
func (g *Trace) Best() []Alternative {
	if g == nil {
		return nil
	}
	return g.best[:g.count]
}

// Keep takes a rank into the list if it is one of the best, or the chosen one.
func (o *Trace) Keep(c Alternative, chosen int32) {
	at := o.count
	for at > 0 && o.before(&c, &o.best[at-1]) {
		at--
	}
	switch {
	case o.count < mostAlternatives:
		o.count++
	case at == mostAlternatives:
		if c.Worker != chosen {
			return
		}
		at--
	case o.best[mostAlternatives-1].Worker == chosen: // it stays, though last
		if at == mostAlternatives-1 {
			return
		}
		copy(o.best[at+1:mostAlternatives-1], o.best[at:mostAlternatives-2])
		o.best[at] = c
		return
	}
	copy(o.best[at+1:o.count], o.best[at:o.count-1])
	o.best[at] = c
}

func (o *Trace) before(a, b *Alternative) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score:
		return a.KVTokens < b.KVTokens
	case o.Less:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}

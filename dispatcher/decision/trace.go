// Package decision has the trace of a decision: why a request got its rank, by the state of the round and the ranks that were
// nearly as good.
package decision

import "math"

// A Trace says why a rank was chosen for an entry: it has the state of the round, and the best of
// the ranks that could have taken the entry. Slots have traces if Config.Explain is set.
type Trace struct {
	Tick     uint64
	Waiting  int   // entries that the policy saw in the round, with this entry
	KVTokens int64 // KV tokens of the chosen rank before the round
	Fullest  int64 // KV tokens of the group's fullest rank before the round
	Able     int   // how many ranks could have taken the entry
	Less     bool  // smaller scores are better

	best  [mostAlternatives]Alternative
	count int
}

// An Alternative is a rank that could have taken the entry. Its score is for the entry on this rank, with the other entries of the
// round where they were put.
type Alternative struct {
	Worker   int32
	Name     string
	Score    float64 // NaN: the policy has no scores, or the round was too large to compute them
	KVTokens int64   // KV tokens before the round
	Free     int32   // free slots before the round
}

// mostAlternatives is how many ranks a trace keeps.
const mostAlternatives = 8

// Best returns the kept ranks, the best first. The chosen rank is
// among them, unless the board moved the assignment off a pair that fails.
func (o *Trace) Best() []Alternative {
	if o == nil {
		return nil
	}
	return o.best[:o.count]
}

// Keep adds a rank to the list if it is one of the best, or the chosen rank.
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
	case o.best[mostAlternatives-1].Worker == chosen: // the chosen rank stays in the list, as the last
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

// before says whether alternative a is better than b: by the score or, in a tie or without scores, by fewer KV tokens.
func (o *Trace) before(a, b *Alternative) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score:
		return a.KVTokens < b.KVTokens
	case o.Less:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}

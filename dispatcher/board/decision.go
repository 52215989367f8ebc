package board

import "math"

// Explanation shows why a rank was chosen for an entry: the state of the round, and the ranks that were nearly as good. Slots have traces
// if Config.Explain is set.
type Explanation struct {
	Tick          uint64
	Waiting       int   // entries that the policy saw in the round, with this entry
	KVTokens      int64 // KV tokens of the chosen rank before the round
	Fullest       int64 // KV tokens of the group's fullest rank before the round
	Able          int   // how many ranks could have taken the entry
	LowerIsBetter bool  // smaller scores are better

	best  [mostAlternatives]Alternative
	count int
}

// An Alternative is a rank that could have taken the entry. Its score assumes that the other entries of the round stay on their ranks.
type Alternative struct {
	Worker   int32
	Name     string
	Score    float64 // NaN: the policy has no scores, or the round was too large to compute them
	KVTokens int64   // KV tokens before the round
	Free     int32   // free slots before the round
}

// mostAlternatives is how many ranks a trace keeps.
const mostAlternatives = 8

// Best returns the best ranks of those that could have taken the entry, the best first. The chosen rank is among them, unless the board
// moved the entry to another rank because hand-offs between its prefill engine and the chosen rank's engine fail.
func (e *Explanation) Best() []Alternative {
	if e == nil {
		return nil
	}
	return e.best[:e.count]
}

// Keep adds a rank to the list if it is one of the best, or the chosen rank. If the list is full, the worst rank that is not the chosen one
// drops out.
func (e *Explanation) Keep(c Alternative, chosen int32) {
	const last = mostAlternatives - 1
	at := e.count // index at which the rank belongs
	for at > 0 && e.isBetter(&c, &e.best[at-1]) {
		at--
	}
	drop := last // index that becomes free
	if e.count < mostAlternatives {
		drop = e.count // no rank drops out
		e.count++
	} else if e.best[last].Worker == chosen {
		drop = last - 1 // the chosen rank stays, although it is the worst
	}
	if c.Worker == chosen {
		at = min(at, drop) // it is kept even if it is worse than all others
	}
	if at > drop {
		return // the rank is worse than all that stay
	}
	copy(e.best[at+1:drop+1], e.best[at:drop])
	e.best[at] = c
}

// isBetter says whether alternative a is better than b: by the score or, in a tie or without scores, by fewer KV tokens.
func (e *Explanation) isBetter(a, b *Alternative) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score: // without scores, all are NaN
		return a.KVTokens < b.KVTokens
	case e.LowerIsBetter:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}

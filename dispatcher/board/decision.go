package board

import "math"

// Explanation shows why a policy chose a rank for an entry. Slots have one only if Config.Explain
// is set.
type Explanation struct {
	Tick          uint64
	Waiting       int   // entries that the policy saw, with this one
	KVTokens      int64 // of the chosen rank, before the round
	Fullest       int64 // KV tokens of the fullest rank, before the round
	Able          int   // ranks that could have taken the entry
	LowerIsBetter bool  // of Score

	best  [mostAlternatives]Alternative
	count int
}

// An Alternative is a rank that could have taken the entry. Its Score assumes that all other
// entries of the round go where the policy sent them.
type Alternative struct {
	Worker   int32
	Name     string
	Score    float64 // NaN: the policy has no scores, or the round was too large
	KVTokens int64   // before the round
	Free     int32   // free slots before the round
}

const mostAlternatives = 8

// Best returns the best ranks for the entry, the best first. The chosen rank is among them, unless
// the board moved the entry because hand-offs to it fail.
func (e *Explanation) Best() []Alternative {
	if e == nil {
		return nil
	}
	return e.best[:e.count]
}

// Keep adds a rank to the sorted list. If the list is full, the worst one drops out, but never the
// chosen one.
func (e *Explanation) Keep(c Alternative, chosen int32) {
	at := e.count // index at which c belongs by its score
	for at > 0 && e.isBetter(&c, &e.best[at-1]) {
		at--
	}
	free := e.makeRoom(chosen) // index that drops out or is new
	if c.Worker == chosen {
		at = min(at, free) // kept even if it is worse than all others
	}
	if at > free {
		return
	}
	// The worse ranks move down by one, over the index free.
	copy(e.best[at+1:free+1], e.best[at:free])
	e.best[at] = c
}

func (e *Explanation) makeRoom(chosen int32) int {
	const last = mostAlternatives - 1
	switch {
	case e.count < mostAlternatives:
		e.count++
		return e.count - 1
	case e.best[last].Worker == chosen:
		return last - 1
	}
	return last
}

// isBetter compares KV tokens in a tie or without scores.
func (e *Explanation) isBetter(a, b *Alternative) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score: // without scores, all are NaN
		return a.KVTokens < b.KVTokens
	case e.LowerIsBetter:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}

package board

import "math"

// Explanation shows why a policy chose a rank for an entry: the state of the group before the round, and the ranks that were nearly as
// good. Slots have one only if Config.Explain is set.
type Explanation struct {
	Tick          uint64
	Waiting       int   // number of entries that the policy saw in the round, this one included
	KVTokens      int64 // KV tokens of the chosen rank before the round
	Fullest       int64 // KV tokens of the group's fullest rank before the round
	Able          int   // number of ranks that could have taken the entry
	LowerIsBetter bool  // whether a smaller Score is better

	best  [mostAlternatives]Alternative
	count int
}

// An Alternative is a rank that could have taken the entry. Its Score assumes that all other entries of the round go to the ranks that the
// policy chose.
type Alternative struct {
	Worker   int32
	Name     string
	Score    float64 // how good the policy finds the rank; NaN: the policy has no scores, or the round was too large to compute them
	KVTokens int64   // KV tokens on the rank before the round
	Free     int32   // free slots of the rank before the round
}

// mostAlternatives is the largest number of ranks that an Explanation keeps.
const mostAlternatives = 8

// Best returns the best of the ranks that could have taken the entry, the best first. The chosen rank is among them. The one exception is
// an entry that the board moved to another rank, because hand-offs to the chosen rank fail.
func (e *Explanation) Best() []Alternative {
	if e == nil {
		return nil
	}
	return e.best[:e.count]
}

// Keep adds a rank to the list, which is sorted, the best rank first. If the list is full, the worst rank drops out, or the new rank is not
// added because it is the worst. The rank that the policy chose (chosen) always stays: if it is the worst, the second worst drops out.
func (e *Explanation) Keep(c Alternative, chosen int32) {
	at := e.count // index at which c belongs by its score
	for at > 0 && e.isBetter(&c, &e.best[at-1]) {
		at--
	}
	free := e.makeRoom(chosen) // index of the rank that drops out or, while the list is not full, the new last index (e.count grows)
	if c.Worker == chosen {
		at = min(at, free) // the chosen rank is kept even if it is worse than all others
	}
	if at > free {
		return // c is not better than the rank that would drop out
	}
	copy(e.best[at+1:free+1], e.best[at:free]) // moves the worse ranks down by one, over the index free
	e.best[at] = c
}

// makeRoom returns the index in the list that becomes free for one more rank. While the list is not full, it makes the list longer by one
// and returns the new last index. Otherwise it returns the index of the worst rank that is not the chosen one.
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

// isBetter says whether alternative a is better than b: by the score or, in a tie or without scores, by fewer KV tokens.
func (e *Explanation) isBetter(a, b *Alternative) bool {
	switch {
	case math.IsNaN(a.Score) || a.Score == b.Score: // a policy without scores has NaN for all ranks
		return a.KVTokens < b.KVTokens
	case e.LowerIsBetter:
		return a.Score < b.Score
	}
	return a.Score > b.Score
}

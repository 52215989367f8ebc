package policy

import "math"

// candidates are the entries that a round chooses from: the overdue ones first, then the oldest of the others. If enough entries wait,
// there are more candidates than free slots, so that the search has a choice.
type candidates struct {
	all          []candidate
	overdueCount int    // number of overdue candidates, which come first in all
	nextInPool   int    // index in the pool of the first entry that chooseEntries has not looked at
	taken        []bool // by index in the pool: the entry is a candidate, or is held back and must not become one

	extraPerRequest int64   // KV tokens that each request counts for in addition to its prompt, because it grows
	tokensPerWaitMs float64 // KV tokens by which each ms of waiting lowers the cost of placing an entry
}

// candidate is an entry that the round may place, with the values that the search compares.
type candidate struct {
	entry      int32 // index of the entry in the pool
	overdue    bool  // overdue: once placed, it is never replaced by another candidate
	placed     bool
	tokens     int64 // prompt tokens, not scaled by a rank's cost
	load       int64 // load that it adds to a rank where a KV token costs 1, in units of 2^-fixedBits tokens
	waitCredit int64 // how much its wait lowers the cost of placing it, in units of 2^-fixedBits tokens
}

// reset empties the list for a new round. extraPerRequest is how many KV tokens each request counts for in addition to its prompt.
// ageWeight is how many KV tokens each step of waiting takes off the cost of placing an entry. stepMs is the mean time of a step in ms; if
// it is 0 (unknown), waits do not count.
func (k *candidates) reset(s *Snapshot, extraPerRequest int64, ageWeight, stepMs float64) {
	k.all = k.all[:0]
	k.overdueCount, k.nextInPool = 0, 0
	k.taken = sized(k.taken, len(s.Pool))
	clear(k.taken)
	k.extraPerRequest, k.tokensPerWaitMs = extraPerRequest, 0
	if stepMs > 0 {
		k.tokensPerWaitMs = ageWeight / stepMs
	}
}

// add makes the entry with this index in the pool a candidate. Its load includes its expected growth, and its wait credit grows with the
// time that it has waited. Both are whole numbers of 2^-fixedBits tokens.
func (k *candidates) add(s *Snapshot, entry int, isOverdue bool) {
	e := &s.Pool[entry]
	k.taken[entry] = true
	k.all = append(k.all, candidate{
		entry: int32(entry), overdue: isOverdue, tokens: int64(e.Prompt), load: (int64(e.Prompt) + k.extraPerRequest) << fixedBits,
		// The wait credit is at most 2^30 tokens, so that it fits an int64 in these units.
		waitCredit: int64(math.Ldexp(min(k.tokensPerWaitMs*float64(e.WaitMs), 1<<30), fixedBits)),
	})
}

// chooseEntries adds the overdue entries, at most wanted of them, even if no rank has room for them. Then it adds the oldest entries that
// any rank has room for, until there are wanted+extra candidates.
func (k *candidates) chooseEntries(s *Snapshot, overdue []wait, r *ranks, wanted, extra int) {
	const isOverdue = true
	for _, w := range overdue[:min(len(overdue), wanted)] {
		k.add(s, int(w.entry), isOverdue)
	}
	k.overdueCount = len(k.all)
	room := r.largestRoom()
	for ; k.nextInPool < len(s.Pool) && len(k.all) < wanted+extra; k.nextInPool++ {
		if !k.taken[k.nextInPool] && int64(s.Pool[k.nextInPool].Prompt) <= room {
			k.add(s, k.nextInPool, !isOverdue)
		}
	}
}

// addFromPool adds the oldest entry that is no candidate yet and is no larger than room (in tokens). It returns the index of the new
// candidate, or none if there is no such entry. The search begins at nextInPool, because chooseEntries has looked at all entries before it.
// An entry that is skipped here may fit another rank, so nextInPool does not move.
func (k *candidates) addFromPool(s *Snapshot, room int64) int {
	for i := k.nextInPool; i < len(s.Pool); i++ {
		if !k.taken[i] && int64(s.Pool[i].Prompt) <= room {
			const isOverdue = false
			k.add(s, i, isOverdue)
			return len(k.all) - 1
		}
	}
	return none
}

// loadOn returns how much load a candidate (an index in all) adds to rank g, in units of 2^-fixedBits tokens.
func (k *candidates) loadOn(l *loads, candidate int32, g int) int64 {
	return l.scaled(g, k.all[candidate].load)
}

// largestRoom returns the largest KV room, in tokens, of the ranks with a free slot; MinInt64: no rank has a free slot.
func (r *ranks) largestRoom() int64 {
	largest := int64(math.MinInt64)
	for _, g := range r.hadSlots {
		if r.free[g] > 0 {
			largest = max(largest, r.room[g])
		}
	}
	return largest
}

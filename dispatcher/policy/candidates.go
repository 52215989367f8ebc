package policy

import "math"

// candidates are the entries that a round chooses from: the overdue ones first, then the oldest of
// the others. There are more than free slots, if possible, so that the search has a choice.
type candidates struct {
	all          []candidate
	overdueCount int    // number of overdue candidates, which come first in all
	nextInPool   int    // index in the pool of the first entry that chooseEntries has not looked at
	taken        []bool // by index in the pool: a candidate, or held back so that it must not become one

	extraPerRequest int64   // KV tokens in addition to the prompt, because a request grows
	tokensPerWaitMs float64 // KV tokens by which each ms of waiting lowers the cost of placing an entry
}

type candidate struct {
	entry      int32 // index in the pool
	overdue    bool  // once placed, it is never replaced
	placed     bool
	tokens     int64 // prompt tokens, not scaled
	load       int64 // load on a rank where a KV token costs 1, in units of 2^-fixedBits tokens
	waitCredit int64 // by how much its wait lowers the cost, in the same units
}

// reset empties the list for a new round. If stepMs is 0 (unknown), waits do not count.
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

func (k *candidates) add(s *Snapshot, entry int, isOverdue bool) {
	e := &s.Pool[entry]
	k.taken[entry] = true
	k.all = append(k.all, candidate{
		entry: int32(entry), overdue: isOverdue, tokens: int64(e.Prompt), load: (int64(e.Prompt) + k.extraPerRequest) << fixedBits,
		// At most 2^30 tokens, so that the credit fits an int64 in these units.
		waitCredit: int64(math.Ldexp(min(k.tokensPerWaitMs*float64(e.WaitMs), 1<<30), fixedBits)),
	})
}

// chooseEntries adds at most wanted overdue entries, even if no rank has room for them, and then
// the oldest entries with room, until there are wanted+extra.
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

// addFromPool adds the oldest entry that is no candidate yet and no larger than room. An entry that
// is skipped here may fit another rank, so nextInPool does not move.
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

func (k *candidates) loadOn(l *loads, candidate int32, g int) int64 {
	return l.scaled(g, k.all[candidate].load)
}

// largestRoom is that of the ranks with a free slot, in tokens; MinInt64: there is none.
func (r *ranks) largestRoom() int64 {
	largest := int64(math.MinInt64)
	for _, g := range r.hadSlots {
		if r.free[g] > 0 {
			largest = max(largest, r.room[g])
		}
	}
	return largest
}

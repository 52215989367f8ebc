package policy

import (
	"cmp"
	"math"
	"slices"

	"evenkeel/dispatcher/subset"
)

// none is the index that stands for no rank or no entry.
const none = -1

// ranks has the slots and the KV room that the workers of a snapshot still have in this round. Its lists are by rank, in the order of
// Snapshot.Workers.
type ranks struct {
	free      []int32 // slots left; 0 also if the rank gets no more entries in this round
	room      []int64 // KV tokens that still fit under the rank's budget (KVBudget); below 0: the rank holds more than its budget
	openSlots int64   // sum of free over all ranks
	hadSlots  []int32 // ranks that had slots when the round began, ascending; often few, so searches look only at these

	watermark     float64 // share of a rank's KV capacity that is kept empty
	mostRoomOfAll bool    // reserveOnce takes the rank with the most room even if the entry would not fit it when idle

	reserved    int // rank that gets no more entries, so that it empties for an overdue entry; or none
	reservedFor int // index in the pool of the overdue entry for which the rank is reserved; or none
}

// noExtraSlots is the argument extra of load for policies that give a rank no more entries than it has free slots.
const noExtraSlots = 0

// load begins a round: from the snapshot, it sets the free slots of each rank, plus extra, and its KV room. A rank that is down has no
// slots. tokens are the KV tokens that each rank holds. extra is how many entries a rank may get beyond its free slots.
func (r *ranks) load(s *Snapshot, tokens []int64, watermark float64, extra int32) {
	r.reset(len(s.Workers))
	r.watermark = watermark
	for g := range s.Workers {
		w := &s.Workers[g]
		if w.Up {
			r.free[g] = max(0, w.Free+extra)
			r.openSlots += int64(r.free[g])
		}
		if r.free[g] > 0 {
			r.hadSlots = append(r.hadSlots, int32(g))
		}
		r.room[g] = KVBudget(w.Capacity, watermark)
		if r.room[g] != subset.Unlimited {
			r.room[g] -= tokens[g]
		}
	}
}

// loadForEngineQueues is used instead of load by policies that let the engine queue: a rank that is up takes any number of entries, and any
// entry that fits its whole capacity, whatever it holds now. hadSlots stays empty, because these policies look at all ranks.
func (r *ranks) loadForEngineQueues(s *Snapshot) {
	r.reset(len(s.Workers))
	const noWatermark = 0
	for g := range s.Workers {
		if s.Workers[g].Up {
			r.free[g] = math.MaxInt32
			r.openSlots += math.MaxInt32
		}
		r.room[g] = KVBudget(s.Workers[g].Capacity, noWatermark)
	}
}

// reset empties the lists, sizes them for n ranks, and drops the reservation of the last round.
func (r *ranks) reset(n int) {
	r.free, r.room = sized(r.free, n), sized(r.room, n)
	r.hadSlots = r.hadSlots[:0]
	clear(r.free)
	r.openSlots, r.reserved, r.reservedFor = 0, none, none
}

// KVBudget returns how many KV tokens a rank may hold under a policy that keeps a share of its capacity empty (watermark, 0 to 1). A
// capacity of 0 means unlimited.
func KVBudget(capacity int64, watermark float64) int64 {
	if capacity == 0 {
		return subset.Unlimited
	}
	return int64(math.Floor(float64(capacity) * (1 - watermark)))
}

// fits says whether rank g has a free slot and room for so many KV tokens.
func (r *ranks) fits(g int, tokens int64) bool { return r.free[g] > 0 && tokens <= r.room[g] }

// charge takes a slot and KV room of rank g for an entry of so many tokens.
func (r *ranks) charge(g int, tokens int64) {
	r.free[g]--
	r.openSlots--
	if r.room[g] != subset.Unlimited {
		r.room[g] -= tokens
	}
}

// closeRank keeps rank g from getting more entries in this round.
func (r *ranks) closeRank(g int) {
	r.openSlots -= int64(r.free[g])
	r.free[g] = 0
}

// reserveOnce keeps a rank free for an overdue entry that fits no rank; further calls in the same round change nothing. Requests end on the
// reserved rank and none begins, so its room grows from round to round until the entry fits. Among the ranks that could hold the entry when
// idle, it takes the rank with the most room. If no rank could, or with mostRoomOfAll, it takes the rank with the most room of all.
func (r *ranks) reserveOnce(s *Snapshot, entry int) {
	if r.reserved != none { // a rank is reserved already
		return
	}
	tokens := int64(s.Pool[entry].Prompt)
	reservedCouldHold := false // the rank chosen so far could hold the entry when idle
	for g := range r.room {
		if !s.Workers[g].Up { // a rank that is down takes no requests
			continue
		}
		couldHold := !r.mostRoomOfAll && tokens <= KVBudget(s.Workers[g].Capacity, r.watermark)
		onlyThisCould := couldHold && !reservedCouldHold
		alike := couldHold == reservedCouldHold // both ranks could hold the entry, or neither could, so the room decides
		if r.reserved == none || onlyThisCould || alike && r.room[g] > r.room[r.reserved] {
			r.reserved, r.reservedFor = g, entry
			reservedCouldHold = couldHold
		}
	}
	if r.reserved != none {
		r.closeRank(r.reserved)
	}
}

// wait is an overdue entry and its wait.
type wait struct {
	ms    float32
	entry int32 // index of the entry in the pool
}

// appendOverdue appends to dst the entries that the starvation guard takes, the longest wait first; in a tie, in order of arrival.
func appendOverdue(s *Snapshot, dst []wait) []wait {
	for i := range s.Pool {
		if e := &s.Pool[i]; isOverdue(s, e) {
			dst = append(dst, wait{e.WaitMs, int32(i)})
		}
	}
	slices.SortFunc(dst, func(a, b wait) int {
		return cmp.Or(cmp.Compare(b.ms, a.ms), cmp.Compare(a.entry, b.entry))
	})
	return dst
}

// isOverdue says whether the starvation guard takes an entry: the entry is Urgent, or has waited for at least MaxAgeMs.
func isOverdue(s *Snapshot, e *Entry) bool {
	return e.Urgent || s.MaxAgeMs > 0 && e.WaitMs >= s.MaxAgeMs
}

// sized returns a slice of length n with undefined contents. It reuses the memory of old if that is large enough, so that rounds need not
// allocate.
func sized[T any](old []T, n int) []T {
	if cap(old) < n { // a quarter more, so that a slightly larger round later need not allocate again
		return make([]T, n, n+n/4)
	}
	return old[:n]
}

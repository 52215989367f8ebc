package policy

import (
	"cmp"
	"math"
	"slices"

	"evenkeel/dispatcher/subset"
)

// none stands for no rank or no entry.
const none = -1

// ranks has the slots and the KV room that the workers still have in this round, by rank, in the
// order of Snapshot.Workers.
type ranks struct {
	free      []int32 // slots left; 0 also if the rank gets no more entries in this round
	room      []int64 // KV tokens that still fit under KVBudget; below 0: the rank holds more
	openSlots int64   // sum of free over all ranks
	hadSlots  []int32 // ranks that had slots when the round began, ascending; often few, so searches look only at these

	watermark     float64 // share of the KV capacity that is kept empty
	mostRoomOfAll bool    // reserveOnce takes the rank with the most room even if the entry never fits it, see newBR0

	reserved    int // rank that gets no more entries, so that it empties for an overdue entry; or none
	reservedFor int // index in the pool of that entry, or none
}

const noExtraSlots = 0

// load begins a round. tokens are the KV tokens that each rank holds. extra is how many entries a
// rank may get beyond its free slots.
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

// loadForEngineQueues lets a rank that is up take any number of entries, and any entry that fits
// its whole capacity, whatever it holds now. hadSlots stays empty, because these policies look at
// all ranks.
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

func (r *ranks) reset(n int) {
	r.free, r.room = sized(r.free, n), sized(r.room, n)
	r.hadSlots = r.hadSlots[:0]
	clear(r.free)
	r.openSlots, r.reserved, r.reservedFor = 0, none, none
}

// KVBudget returns how many KV tokens a rank may hold if the share watermark of its capacity stays
// empty. A capacity of 0 means unlimited.
func KVBudget(capacity int64, watermark float64) int64 {
	if capacity == 0 {
		return subset.Unlimited
	}
	return int64(math.Floor(float64(capacity) * (1 - watermark)))
}

func (r *ranks) fits(g int, tokens int64) bool { return r.free[g] > 0 && tokens <= r.room[g] }

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

// reserveOnce keeps a rank free for an overdue entry that fits none; further calls in the same
// round change nothing. Requests end on the reserved rank and none begins, so its room grows from
// round to round until the entry fits. It takes the rank with the most room, if possible one that
// could hold the entry when idle.
func (r *ranks) reserveOnce(s *Snapshot, entry int) {
	if r.reserved != none {
		return
	}
	tokens := int64(s.Pool[entry].Prompt)
	reservedCouldHold := false // the rank chosen so far could hold the entry when idle
	for g := range r.room {
		if !s.Workers[g].Up {
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

type wait struct {
	ms    float32
	entry int32 // index in the pool
}

// appendOverdue puts the longest wait first; in a tie, the order of arrival counts.
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

func isOverdue(s *Snapshot, e *Entry) bool {
	return e.Urgent || s.MaxAgeMs > 0 && e.WaitMs >= s.MaxAgeMs
}

// sized returns a slice of length n with undefined contents, in the memory of old if that is large
// enough.
func sized[T any](old []T, n int) []T {
	if cap(old) < n { // a quarter more, so that a slightly larger round need not allocate again
		return make([]T, n, n+n/4)
	}
	return old[:n]
}

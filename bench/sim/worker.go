package sim

import (
	"slices"

	"evenkeel/dispatcher/board"
)

// job is one request of a run. Its number is its place in order of arrival; the
// board knows it by number+1.
type job struct {
	prompt  int32 // tokens of the next or present leg, with those that earlier ones emitted
	output  int32 // tokens in all
	age     int32 // generated in earlier legs
	state   jobState
	key     uint64
	arrival float64 // ms
	entered float64 // the pool, last time
	first   float64 // end of the step of its first token; NaN before
}

type jobState uint8

const (
	jobAhead   jobState = iota // not there yet, or in prefill
	jobWaiting                 // in the pool
	jobPlaced                  // on a rank
	jobDone
	jobFailed // no rank can ever hold it
)

// leg is a request on a rank, as it really is.
type leg struct {
	job    int32
	slot   int32 // the board's
	prompt int32
	gen    int32  // tokens of this leg
	left   int32  // tokens until its end
	pulled bool   // its KV is on the rank, or in flight to it
	begin  int64  // step of its first token, if it has a slot by then
	joined uint32 // step that the group was told of when it got that token; 0: it has none
}

// worker is one rank's engine. The first `active` of its requests hold a slot, the
// others wait in the engine for one, first come first served; only immediate
// policies make them wait there.
type worker struct {
	Rank
	id    int32
	group *group

	up, gone bool // takes work; is no longer part of its group
	active   int
	kv       int64 // KV tokens of everything pulled
	legs     []leg // in order of admission
}

// group is ranks behind one barrier.
type group struct {
	Group
	index   int
	key     board.GroupKey
	workers []*worker // that are part of it, ascending id
	later   []*worker // that will join
	step    int64     // number of the step in progress, else of the next one
	ends    float64   // of the step in progress, ms; +Inf: none
	told    bool      // its law, where that is not learned

	// What its streams tell: the number of the step whose tokens come, and when that was
	// told, NaN if nothing ran before.
	number uint32
	since  float64
	steps  board.Steps
}

// load sums the KV tokens that step k reads, and the requests that decode.
func (w *worker) load(k int64) (tokens int64, running int) {
	for i := range w.active {
		if l := &w.legs[i]; l.begin <= k {
			tokens += int64(l.prompt) + int64(l.gen)
			running++
		}
	}
	return tokens, running
}

// fits says whether there is room for the KV of so many tokens. An idle rank
// takes anything.
func (w *worker) fits(tokens int64) bool {
	return w.Capacity == 0 || w.kv+tokens <= w.Capacity
}

// pull moves KV to the rank for those that wait without, in order, while there
// is room; it returns after the first that has none.
func (w *worker) pull(step int64, transfer int) {
	for i := range w.legs {
		l := &w.legs[i]
		if l.pulled {
			continue
		}
		if !w.fits(int64(l.prompt)) && w.kv > 0 {
			return
		}
		l.pulled, l.begin = true, step+int64(transfer)
		w.kv += int64(l.prompt)
	}
}

// victim is the request that KV overflow takes: the last admitted one that
// holds KV, unless it is the only one. ok is false when nothing is to be done.
func (w *worker) victim() (i int, ok bool) {
	if w.Capacity == 0 || w.kv <= w.Capacity {
		return 0, false
	}
	for i = len(w.legs) - 1; i > 0; i-- {
		if w.legs[i].pulled {
			return i, true
		}
	}
	return 0, false
}

// remove takes the i-th request off.
func (w *worker) remove(i int) {
	if l := &w.legs[i]; l.pulled {
		w.kv -= int64(l.prompt) + int64(l.gen)
	}
	if i < w.active {
		w.active--
	}
	w.legs = slices.Delete(w.legs, i, i+1)
}

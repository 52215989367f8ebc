package dispatcher

import (
	"math"
	"sync/atomic"

	"evenkeel/dispatcher/board"
)

// publicPace has the values of a board that any goroutine may read without asking the scheduler: how soon its slots come free, and whether
// it needs reports of first events.
type publicPace struct {
	// suspectedPairsAndRefusingRanks is the number of suspected pairs of engines plus the number of ranks that refuse requests. While
	// it is 0, no engine is avoided, and the board needs no reports of first events.
	suspectedPairsAndRefusingRanks atomic.Int32
	// Number of slots of all ranks that take requests, of free ones among them, and of entries that wait in the pool.
	slots, free, waiting atomic.Int64
	// meanSlotSeconds is the mean time for which a request has its slot, in s, as the bits of a float64.
	meanSlotSeconds atomic.Uint64
	byName          atomic.Pointer[map[string]*publicPace] // values for each model name that only some ranks list
}

// mayHaveQuarantinedPair says whether hand-offs may have to avoid a pair of a prefill and a decode engine. false is certain. true may only
// mean that a pair is suspected, or that a rank refuses requests, because the number counts these, too.
func (p *publicPace) mayHaveQuarantinedPair() bool {
	return p.suspectedPairsAndRefusingRanks.Load() > 0
}

// ofModel returns the values for a model name. If only some ranks list the name, the values count only these ranks, and ownRanks is true.
// Otherwise they count all ranks of the board.
func (p *publicPace) ofModel(name string) (pace *publicPace, ownRanks bool) {
	if byName := p.byName.Load(); byName != nil && (*byName)[name] != nil {
		return (*byName)[name], true
	}
	return p, false
}

// newPublicPace returns the values of a board without ranks: no slots, and a presumed mean time in a slot.
func newPublicPace() *publicPace {
	p := &publicPace{}
	p.meanSlotSeconds.Store(math.Float64bits(board.PresumedSeconds))
	return p
}

// publish stores the values of pace, so that any goroutine can read them. moreRoom says whether Dispatcher.Room may return more than
// before.
func (p *publicPace) publish(pace *board.Throughput) (moreRoom bool) {
	slots, free, waiting := int64(pace.Slots), int64(pace.Free), int64(pace.Waiting)
	slotsBefore := p.slots.Load()
	unlimited := slots == 0 && slotsBefore > 0                                  // no rank takes requests any more; Room then returns no limit
	freeSooner := pace.Seconds < math.Float64frombits(p.meanSlotSeconds.Load()) // requests keep their slots for a shorter time than before
	moreFree := free-waiting > p.free.Load()-p.waiting.Load()
	moreRoom = slots > slotsBefore || unlimited || freeSooner || moreFree
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	p.meanSlotSeconds.Store(math.Float64bits(pace.Seconds))
	return moreRoom
}

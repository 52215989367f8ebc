package dispatcher

import (
	"math"
	"sync/atomic"

	"evenkeel/dispatcher/board"
)

// publicPace has the values of a board that any goroutine may read without asking the scheduler.
type publicPace struct {
	// While suspectedPairsAndRefusingRanks is 0, no engine is avoided, and the board needs no reports
	// of first events.
	suspectedPairsAndRefusingRanks atomic.Int32
	// Slots of all ranks that take requests, free ones among them, and entries in the pool.
	slots, free, waiting atomic.Int64
	// In s, the mean time for which a request has its slot, as the bits of a float64.
	meanSlotSeconds atomic.Uint64
	byName          atomic.Pointer[map[string]*publicPace] // values of each model name that only some ranks list
}

// mayHaveQuarantinedPair may be true without a quarantine, because the number also counts suspected
// pairs and ranks that refuse requests.
func (p *publicPace) mayHaveQuarantinedPair() bool {
	return p.suspectedPairsAndRefusingRanks.Load() > 0
}

// ofModel returns the values for a model name. ownRanks: only some ranks list it, and only these
// count.
func (p *publicPace) ofModel(name string) (pace *publicPace, ownRanks bool) {
	if byName := p.byName.Load(); byName != nil && (*byName)[name] != nil {
		return (*byName)[name], true
	}
	return p, false
}

func newPublicPace() *publicPace {
	p := &publicPace{}
	p.meanSlotSeconds.Store(math.Float64bits(board.PresumedSeconds))
	return p
}

// publish says whether Dispatcher.Room may return more than before.
func (p *publicPace) publish(pace *board.Throughput) (moreRoom bool) {
	slots, free, waiting := int64(pace.Slots), int64(pace.Free), int64(pace.Waiting)
	slotsBefore := p.slots.Load()
	unlimited := slots == 0 && slotsBefore > 0 // no rank takes requests any more; Room then returns no limit
	freeSooner := pace.Seconds < math.Float64frombits(p.meanSlotSeconds.Load())
	moreFree := free-waiting > p.free.Load()-p.waiting.Load()
	moreRoom = slots > slotsBefore || unlimited || freeSooner || moreFree
	p.slots.Store(slots)
	p.free.Store(free)
	p.waiting.Store(waiting)
	p.meanSlotSeconds.Store(math.Float64bits(pace.Seconds))
	return moreRoom
}

package dispatcher

import (
	"math"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Slot is the right to run one request on a decode rank until Release. The exported fields never
// change after the caller gets the slot.
type Slot struct {
	board.Binding
	Decide time.Duration      // duration of the round that chose the rank; not part of Wait
	Trace  *board.Explanation // why this rank was chosen; nil without Config.Explain

	generated atomic.Int32
	firstStep atomic.Uint32 // number of the group's first step in which the request got tokens; 0: none yet
	lastStep  atomic.Uint32 // the same for the last step
	detector  *stepDetector // nil without a barrier
	board     *boardState
	started   atomic.Bool
	released  atomic.Bool
	// The most tokens of an answer that does not stream (MarkNonStreaming); 0: it streams.
	maxUnreported atomic.Int32
}

func (s *Slot) streams() bool { return s.maxUnreported.Load() == 0 }

// newSlot returns an empty slot. With explain, Slot and Trace are one allocation.
func newSlot(e *pool.Entry, explain bool) *Slot {
	if !explain {
		return &Slot{}
	}
	slotWithTrace := &struct {
		Slot
		explanation board.Explanation
	}{}
	slotWithTrace.Trace = &slotWithTrace.explanation
	return &slotWithTrace.Slot
}

// isHeld is false once the slot has been given back. Only the scheduler's goroutine may call it.
func (s *Slot) isHeld() bool { return s.board.slots[s.Slot] == s }

// Progress reports how many tokens the request has generated on this rank. The board counts them as
// KV, and the step detector finds steps by these reports. Progress ignores a number that is not
// larger than the last one. Any goroutine may call it, and it does not allocate.
func (s *Slot) Progress(generated int) {
	for {
		before := s.generated.Load()
		if int32(generated) <= before {
			return
		}
		if s.generated.CompareAndSwap(before, int32(generated)) {
			break
		}
	}
	if s.detector != nil && s.streams() { // tokens that come all at once show no steps
		s.detector.onToken(&s.firstStep, &s.lastStep)
	}
}

// MarkNonStreaming records that the engine reports the tokens of the answer only at the end. Until
// then, the board estimates them by the pace of the group's other streams.
func (s *Slot) MarkNonStreaming(maxTokens int) {
	s.maxUnreported.Store(int32(max(1, min(maxTokens, math.MaxInt32)))) // at least 1, because 0 would mean that the answer streams
}

// Generated returns the largest number that Progress has got.
func (s *Slot) Generated() int { return int(s.generated.Load()) }

// ReportStarted records that the first event of the answer has come: the KV has arrived and the
// rank decodes. Only the first call has an effect.
func (s *Slot) ReportStarted() {
	if s.started.Swap(true) {
		return
	}
	// A board that suspects a pair of engines, or has a rank that refuses requests, gets the first
	// event at once. Any other board sees it later.
	if s.board != nil && s.board.pace.suspectedPairsAndRefusingRanks.Load() > 0 {
		s.board.reportStarted(s)
	}
}

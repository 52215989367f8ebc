package dispatcher

import (
	"math"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

// Slot is the right to run one request on a decode rank, from its admission until Release. The exported fields are set before the caller
// gets the slot, and never change.
type Slot struct {
	board.Binding
	Decide time.Duration      // how long the round took that chose the rank; it is not part of Wait
	Trace  *board.Explanation // why this rank was chosen; nil without Config.Explain

	generated     atomic.Int32
	firstStep     atomic.Uint32 // number of the group's first step in which the request got tokens; 0: it has no token yet
	lastStep      atomic.Uint32 // number of the group's last such step
	detector      *stepDetector // step detector of the rank's group; nil without a barrier
	board         *boardState   // the scheduler's state for the board that the slot belongs to
	started       atomic.Bool
	released      atomic.Bool
	waitsInEngine atomic.Bool  // the request waits in the engine's queue, because the rank has no slot or no KV room for it
	maxUnreported atomic.Int32 // upper bound of the answer's tokens, see MarkNonStreaming; 0: its tokens are reported as they come
}

// newSlot returns an empty slot, with a Trace if explain is set. The slot and its trace are allocated together, as one object.
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

// isHeld says whether the slot is still charged; false: it has been given back. Only the scheduler's goroutine may call it.
func (s *Slot) isHeld() bool { return s.board.slots[s.Slot] == s }

// Progress reports how many tokens the request has generated on this rank so far. The board counts them as KV tokens of the request, and
// the step detector of the group finds the group's steps by these reports. Progress ignores a number that is not larger than the last one.
// Any goroutine may call it, and it does not allocate.
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
	if s.detector != nil && s.maxUnreported.Load() == 0 { // the tokens of an answer that does not stream come together, and show no steps
		s.detector.onToken(&s.firstStep, &s.lastStep)
	}
}

// MarkNonStreaming records that the engine computes the request from now on, but reports its tokens only at the end. Until then, the board
// estimates them by the pace of the group's other streams. maxTokens is an upper bound of the answer's tokens.
func (s *Slot) MarkNonStreaming(maxTokens int) {
	s.maxUnreported.Store(int32(max(1, min(maxTokens, math.MaxInt32)))) // at least 1, because 0 would mean that the answer streams
}

// Generated returns the largest number that Progress has reported.
func (s *Slot) Generated() int { return int(s.generated.Load()) }

// ReportStarted records the first event of the request: the KV has arrived and the rank decodes.
// Before that the request counts as transferring.
func (s *Slot) ReportStarted() {
	s.started.Store(true)
	s.waitsInEngine.Store(false) // the engine had room for the request, even if the board counted none
	// Other boards learn of the first event when they next read the progress of their slots.
	if s.board != nil && s.board.pace.watchedFirstEvents.Load() > 0 {
		s.board.reportStarted(s)
	}
}

// WaitsInEngine says whether the request waits in its engine's queue, because the rank has no slot or no KV room for it yet. While it waits
// there, the missing first event is not a failure of the engine.
func (s *Slot) WaitsInEngine() bool { return s.waitsInEngine.Load() }

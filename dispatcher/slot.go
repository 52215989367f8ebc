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
	Decide time.Duration      // duration of the round of decisions that chose the rank; it is not part of Wait
	Trace  *board.Explanation // why this rank was chosen; nil without Config.Explain

	generated atomic.Int32
	firstStep atomic.Uint32 // number of the group's first step in which the request got tokens; 0: it has no token yet
	lastStep  atomic.Uint32 // number of the group's last step in which the request got tokens; 0: it has no token yet
	detector  *stepDetector // finds the steps of the rank's group; nil without a barrier
	board     *boardState   // what the scheduler keeps for the board of the rank
	started   atomic.Bool
	released  atomic.Bool
	// maxUnreported is the largest possible number of tokens of an answer that does not stream (MarkNonStreaming); 0: it streams.
	maxUnreported atomic.Int32
}

// streams reports whether the engine reports the tokens of the answer as they come, and not only at the end.
func (s *Slot) streams() bool { return s.maxUnreported.Load() == 0 }

// newSlot returns an empty slot for an entry, with memory for a Trace if explain is true. In that case, Slot and Trace are one allocation.
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

// isHeld says whether the slot is still charged to its rank; false: it has been given back. Only the scheduler's goroutine may call it.
func (s *Slot) isHeld() bool { return s.board.slots[s.Slot] == s }

// Progress reports that the request has generated this many tokens on this rank so far. The board counts the tokens as KV of the request,
// and the step detector of the group finds steps by these reports. Progress ignores a number that is not larger than the last one. Any
// goroutine may call it, and it does not allocate.
func (s *Slot) Progress(generated int) {
	for { // until the number is stored, or another goroutine has stored one that is not smaller
		before := s.generated.Load()
		if int32(generated) <= before {
			return
		}
		if s.generated.CompareAndSwap(before, int32(generated)) {
			break
		}
	}
	if s.detector != nil && s.streams() { // the tokens of an answer that does not stream come all at once, so they show no steps
		s.detector.onToken(&s.firstStep, &s.lastStep)
	}
}

// MarkNonStreaming records that the engine now computes the request, but reports the tokens of the answer only at the end. Until then, the
// board estimates the tokens by the pace of the group's other streams. maxTokens is the largest possible number of tokens.
func (s *Slot) MarkNonStreaming(maxTokens int) {
	s.maxUnreported.Store(int32(max(1, min(maxTokens, math.MaxInt32)))) // at least 1, because 0 would mean that the answer streams
}

// Generated returns the largest number of generated tokens that Progress has reported.
func (s *Slot) Generated() int { return int(s.generated.Load()) }

// ReportStarted records that the first event of the answer has come: the KV has arrived and the rank decodes. Before that, the status shows
// the request as transferring. Only the first call has an effect.
func (s *Slot) ReportStarted() {
	if s.started.Swap(true) {
		return
	}
	// A board that suspects a pair of engines, or has a rank that refuses requests, gets the first event at once. Any other board sees
	// it when it next reads the progress of its slots.
	if s.board != nil && s.board.pace.suspectedPairsAndRefusingRanks.Load() > 0 {
		s.board.reportStarted(s)
	}
}

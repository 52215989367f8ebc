package dispatcher

import (
	"math"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/decision"
	"evenkeel/pool"
)

// Slot is a request's place on a decode rank, from its admission until
// Release. The exported fields are set before the caller gets it and never
// change.
type Slot struct {
	board.Bound
	Decide time.Duration   // of Wait, the round that admitted it
	Trace  *decision.Trace // what the rank was chosen on; nil without Config.Explain

	generated atomic.Int32
	stream    streamState   // the group's steps it got tokens in
	detector  *stepDetector // the group's; nil without barrier
	owner     *owned        // whose slot it is
	started   atomic.Bool
	released  atomic.Bool
	waits     atomic.Bool // in the engine's queue, beyond the rank's slots or KV room
	unheard   atomic.Int32
}

func newSlot(e *pool.Entry, explain bool) *Slot {
	if !explain {
		return &Slot{}
	}
	both := &struct {
		Slot
		trace decision.Trace
	}{}
	both.Trace = &both.trace
	return &both.Slot
}

// held says whether it has not been given back. Only the runner asks.
func (s *Slot) held() bool { return s.owner.slots[s.Slot] == s }

// Progress tells how many tokens this leg has generated so far. The tick reads
// it as the request's growth in KV tokens, and its group hears its steps in it;
// a smaller number than before is ignored. It may be called from any goroutine
// and does not allocate.
func (s *Slot) Progress(generated int) {
	for {
		old := s.generated.Load()
		if int32(generated) <= old {
			return
		}
		if s.generated.CompareAndSwap(old, int32(generated)) {
			break
		}
	}
	if s.detector != nil && s.unheard.Load() == 0 {
		s.detector.onToken(&s.stream)
	}
}

// Unheard says that the engine computes the request from now on and tells nothing of its tokens, of which there may be so many,
// before its end. Until Progress tells more, the board lets them grow as the other streams of the group do.
func (s *Slot) Unheard(most int) {
	s.unheard.Store(int32(max(1, min(most, math.MaxInt32))))
}

// Generated is what Progress last told.
func (s *Slot) Generated() int { return int(s.generated.Load()) }

// Started marks the first event: the KV has arrived and the rank decodes.
// Until then the request counts as transferring.
func (s *Slot) Started() {
	s.started.Store(true)
	s.waits.Store(false) // the engine had room for it, whatever the board believes
	if s.owner != nil && s.owner.pace.watched.Load() > 0 {
		s.owner.arrive(s)
	}
}

// Waits says that the request is in its engine's queue, because the rank has no
// slot or no KV room for it yet. That its first event does not come then is no fault of the engine.
func (s *Slot) Waits() bool { return s.waits.Load() }

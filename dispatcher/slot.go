package dispatcher

import (
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/grounds"
	"evenkeel/pool"
)

// Slot is a request's place on a decode rank, from its admission until
// Release. The exported fields are set before the caller gets it and never
// change.
type Slot struct {
	board.Bound
	Decide  time.Duration    // of Wait, the round that admitted it
	Grounds *grounds.Grounds // what the rank was chosen on; nil without Config.Explain

	handsOff bool // its KV comes from a prefill engine that is known

	generated atomic.Int32
	voice     voice  // the group's steps it got tokens in
	pulse     *pulse // the group's; nil without barrier
	owner     *owned // whose slot it is
	started   atomic.Bool
	released  atomic.Bool
	waits     atomic.Bool // in the engine's queue, beyond the rank's slots or KV room

	// Of a request that was bound before its prefill.
	bound      time.Time
	first      atomic.Int64 // ns since owner.since, or later, and
	rest       atomic.Int64 // ns after that, when its first token is predicted now; first 0: as it was when it was bound
	startError atomic.Int64 // twice the steps and 1; 0: unknown
}

func newSlot(e *pool.Entry, explain bool) *Slot {
	s := &Slot{handsOff: e.Prefiller != ""}
	if explain {
		s.Grounds = &grounds.Grounds{}
	}
	return s
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
	if s.pulse != nil {
		s.pulse.beat(&s.voice)
	}
}

// Generated is what Progress last told.
func (s *Slot) Generated() int { return int(s.generated.Load()) }

// Started marks the first event: the KV has arrived and the rank decodes.
// Until then the request counts as transferring.
func (s *Slot) Started() {
	first := !s.started.Swap(true)
	s.waits.Store(false) // the engine had room for it, whatever the board believes
	if s.owner != nil && first && s.Start > 0 {
		if steps, known := s.Bound.StartError(time.Since(s.bound)); known {
			s.startError.Store(int64(steps)<<1 | 1)
		}
	}
	if s.owner != nil && s.handsOff && s.owner.pace.watched.Load() > 0 {
		s.owner.arrive(s)
	}
}

// Foresee tells when the first event is predicted now, of a request that was bound before its
// prefill: so long after a time, or after the present once that time is over. Policies see it from
// the next tick on, until Started. It may be called from any goroutine and does not allocate.
func (s *Slot) Foresee(at time.Time, rest time.Duration) {
	s.rest.Store(int64(rest))
	s.first.Store(max(1, int64(at.Sub(s.owner.since))))
}

// foreseen is what Foresee told last, at a time since owner.since; 0: nothing.
func (s *Slot) foreseen(now time.Duration) time.Duration {
	first := time.Duration(s.first.Load())
	if first == 0 {
		return 0
	}
	return max(first, now) + time.Duration(s.rest.Load())
}

// StartError is by how many steps of the group the first event was predicted too late when the
// request was bound before its prefill, below 0 too early. It is known from Started on.
func (s *Slot) StartError() (steps int, known bool) {
	e := s.startError.Load()
	return int(e >> 1), e != 0
}

// Waits says that the request is in its engine's queue, because the rank has no
// slot or no KV room for it yet. That its first event does not come then is no fault of the engine.
func (s *Slot) Waits() bool { return s.waits.Load() }

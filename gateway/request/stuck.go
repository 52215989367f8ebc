package request

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/lifecycle"
)

// manyTimes is how many times as long as predicted a rank that prefills and decodes may take for a prompt, on top of the first_event_timeout
// of its profile, before its core is asked for signs of life.
const manyTimes = 16

var errStuck = errors.New("its core gave no sign of life for first_event_timeout, and has had the prompt for many times as long as it takes to compute it: there was no event on any of its streams, and no gauge moved")

// allowance is how long a rank may have a prompt before its core is asked for signs of life; 0: nobody knows how long it takes, or nothing
// comes before the whole answer. This is the one place where that is decided.
func allowance(s *stream) time.Duration {
	if s.slot.ComputeMs <= 0 || s.whole || s.muffled {
		return 0
	}
	return s.rank.Profile.FirstEventTimeout + time.Duration(manyTimes*float64(s.slot.ComputeMs)*float64(time.Millisecond))
}

// watchCore ends a call that waits for its first event, if the core of the rank stands still: its prompt takes far longer than it
// should, and for first_event_timeout there was no event on any stream of the rank, and no gauge of it moved. A core that is only slow
// gives such signs, and keeps the request. The request also stays if no rank of another group, or of another engine, takes requests, and
// as long as prefill.retry says no: many requests wait there at once, and the other group is not to get all of them in one moment. A prompt that
// brings cores to a stand meets so many of them, and not all.
// limits.probe_timeout ends the wait in any case.
func watchCore(s *stream) (stop func()) {
	most, quiet := allowance(s), s.rank.Profile.FirstEventTimeout
	if most == 0 || s.job.in.ToDecode != nil {
		return func() {}
	}
	j, avoided, moves := s.job, s.job.avoid.ranks(), s.job.avoid.halted+1
	halted := &atomic.Bool{}
	s.halted = halted
	var mu sync.Mutex
	var timer *time.Timer
	look := func() (again time.Duration) {
		if heard := s.rank.Signs.Last(); heard.After(s.began) && time.Since(heard) < quiet {
			return quiet - time.Since(heard)
		}
		if _, others := j.srv.Engines().Around(s.rank.Worker, avoided); !others {
			return quiet
		}
		if !halted.Load() {
			if _, granted := j.srv.Tier.Retry(moves, 0, errStuck); !granted {
				return quiet / 4
			}
		}
		halted.Store(true)
		s.call.Expire()
		return quiet / 4 // it may not have waited for bytes in this moment
	}
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(most, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer != nil {
			timer.Reset(look())
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		timer.Stop()
		timer = nil
	}
}

// stuck says of a call that was ended because the core stands still why it ended.
func stuck(s *stream, f *failure.Fault) *failure.Fault {
	if f != nil && f.Why == lifecycle.Silent && s.halted != nil && s.halted.Load() {
		f.Why, f.Err = lifecycle.Stuck, errStuck
	}
	return f
}

package loop

import (
	"errors"
	"runtime"
	"sync/atomic"

	"go.uber.org/zap"
)

// maxDefaultLoops bounds the loops on many processors. One loop handles about ten thousand arrivals
// per second.
const maxDefaultLoops = 8

// Default leaves half of the processors to the rest of the program.
func Default() int { return min(maxDefaultLoops, (runtime.GOMAXPROCS(0)+1)/2) }

// A Set holds the loops of a program.
type Set struct {
	loops []*Loop
	calls atomic.Uint64
}

// Start starts n loops, and none on a system without them.
func (s *Set) Start(n int, log *zap.Logger) error {
	for range n {
		l, err := New(log)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		if err != nil {
			s.Close()
			return err
		}
		s.loops = append(s.loops, l)
	}
	return nil
}

// Next returns the loops in turn; nil: there are none, or s is nil.
func (s *Set) Next() *Loop {
	if s == nil || len(s.loops) == 0 {
		return nil
	}
	return s.loops[s.calls.Add(1)%uint64(len(s.loops))]
}

// Close waits until each loop has called the functions that were posted before.
func (s *Set) Close() {
	for _, l := range s.loops {
		l.Close()
	}
}

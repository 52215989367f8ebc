package loop

import (
	"errors"
	"runtime"
	"sync/atomic"

	"go.uber.org/zap"
)

// maxDefaultLoops bounds the default number of loops, however many processors there are. One loop handles about ten thousand arrivals per
// second.
const maxDefaultLoops = 8

// Default returns a good number of loops for the machine: half of the processors, because the rest of the program needs processors, too.
func Default() int { return min(maxDefaultLoops, (runtime.GOMAXPROCS(0)+1)/2) }

// A Set holds the loops of a program.
type Set struct {
	loops []*Loop
	calls atomic.Uint64 // number of calls of Next
}

// Start starts n loops. On a system without loops, the set stays empty.
func (s *Set) Start(n int, log *zap.Logger) error {
	for range n {
		l, err := New(log)
		if errors.Is(err, errors.ErrUnsupported) { // each socket then has a goroutine instead
			return nil
		}
		if err != nil { // no loop is left running
			s.Close()
			return err
		}
		s.loops = append(s.loops, l)
	}
	return nil
}

// Next returns the set's loops in turn, so that each gets the same number of sockets; nil: there are none, or s is nil.
func (s *Set) Next() *Loop {
	if s == nil || len(s.loops) == 0 {
		return nil
	}
	return s.loops[s.calls.Add(1)%uint64(len(s.loops))]
}

// Close ends all loops. It waits until each has called the functions that were posted before.
func (s *Set) Close() {
	for _, l := range s.loops {
		l.Close()
	}
}

package watch

import (
	"context"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"evenkeel/gateway/detect"
)

const (
	pulseInterval = 100 * time.Millisecond
	pulseSlack    = 10 * time.Millisecond // timers are late by some milliseconds on an idle machine, too
)

// pulse measures how late timers of this process fire. It has a goroutine of its own, because a
// look at the proxy may take seconds.
type pulse struct {
	sum, most atomic.Int64 // ns since the last sample: of all timers together, and of the latest one
}

func (p *pulse) run(ctx context.Context) {
	timer := time.NewTimer(pulseInterval)
	defer timer.Stop()
	for began := time.Now(); ; began = time.Now() {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if late := time.Since(began) - pulseInterval; late > pulseSlack {
			p.sum.Add(int64(late))
			p.most.Store(max(p.most.Load(), int64(late)))
		}
		timer.Reset(pulseInterval)
	}
}

// addTo adds to a sample what was measured since the one before, and the processor time used.
func (p *pulse) addTo(s *detect.Sample) {
	s.LateMs = float64(p.sum.Swap(0)) / 1e6
	s.LatestMs = float64(p.most.Swap(0)) / 1e6
	s.Cores = runtime.GOMAXPROCS(0)
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) == nil {
		s.CPUSeconds = time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
	}
}

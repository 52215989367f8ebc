package geo

import (
	"sync"
	"time"
)

// process names the process of this proxy. Answers to probes have the name, and so has every
// request that a peer sends here. If the wall clock is set back, the process gets another name.
// Otherwise a recorded hop could be accepted a second time, because it would not be too old any
// more, and its nonce may be forgotten.
type process struct {
	began time.Time
	// A wall clock that is set back by less does no harm: nonces are kept for longer.
	maxSetBack time.Duration
	wall       func(now time.Time) time.Time // the wall clock

	mu   sync.Mutex
	name string
	// The most by which the wall clock was ahead of the monotonic one since began.
	maxWallMinusMonotonic time.Duration
}

// newProcess names the process. maxSetBack is how much the wall clock may be set back before the
// name changes.
func newProcess(began time.Time, maxSetBack time.Duration) *process {
	return &process{began: began, maxSetBack: maxSetBack, wall: func(now time.Time) time.Time { return now.Round(0) }, name: randomHex()}
}

// nameAt returns the name of the process at the time now. It changes the name if the wall clock was
// set back by more than maxSetBack. A request to this proxy has its time and this name, and the
// Verifier accepts it only for a short time. After the clock was set back, a recorded request would
// be young enough again; with another name, all earlier requests are refused.
func (p *process) nameAt(now time.Time) string {
	// Round(0) drops the monotonic reading, which Sub would prefer.
	byWall := p.wall(now).Sub(p.began.Round(0))
	byMonotonic := now.Sub(p.began) // the same by a clock that is never set
	wallMinusMonotonic := byWall - byMonotonic
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case wallMinusMonotonic > p.maxWallMinusMonotonic:
		// The wall clock was set forward, and a later setting back counts from there.
		p.maxWallMinusMonotonic = wallMinusMonotonic
	case wallMinusMonotonic < p.maxWallMinusMonotonic-p.maxSetBack: // the wall clock was set back
		p.name, p.maxWallMinusMonotonic = randomHex(), wallMinusMonotonic
	}
	return p.name
}

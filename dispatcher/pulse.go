package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// pulse hears the steps of a barrier group in its streams. All requests of a
// group get a token in the same step, so the first stream that speaks twice
// tells that the next step has come: no clock is read for the other events, and
// a stream that is late joins the step it finds.
type pulse struct {
	number atomic.Uint32 // of the step under way, from 1
	least  atomic.Int64  // ns; what comes sooner is a stream that catches up, not a step

	mu    sync.Mutex // taken by whoever tells a step; the others do not wait for it
	base  time.Time
	began time.Duration // since base, when the step was told; 0: nothing ran before it
	steps []board.Step  // told and not yet read

	tell func() // wakes the owner
}

// voice is when a stream spoke: the first step that it got tokens in, and the
// last one. 0: it has none yet.
type voice struct{ first, last atomic.Uint32 }

// stepsMost bounds what waits to be read. An owner that is so late reads the
// rest from the next.
const stepsMost = 64

func newPulse(tell func()) *pulse {
	p := &pulse{base: time.Now(), steps: make([]board.Step, 0, stepsMost), tell: tell}
	p.number.Store(1)
	p.least.Store(int64(board.LeastStep))
	return p
}

// beat tells that a stream got tokens.
func (p *pulse) beat(v *voice) {
	n := p.number.Load()
	switch v.last.Load() {
	case n:
	case 0:
		v.first.Store(n)
		fallthrough
	default:
		v.last.Store(n)
		return
	}
	if !p.mu.TryLock() {
		return // another stream tells the same
	}
	told := p.number.Load() == n && p.next(time.Since(p.base))
	p.mu.Unlock()
	v.last.Store(p.number.Load())
	if told {
		p.tell()
	}
}

// next begins a step at an instant, unless it is too soon.
func (p *pulse) next(at time.Duration) bool {
	s := board.Step{Number: p.number.Load() + 1}
	if p.began > 0 {
		if s.Length = at - p.began; int64(s.Length) < p.least.Load() {
			return false
		}
	}
	p.began = max(at, 1)
	p.number.Store(s.Number)
	if len(p.steps) < stepsMost {
		p.steps = append(p.steps, s)
	}
	return true
}

// read appends the steps told since the last call.
func (p *pulse) read(dst []board.Step) []board.Step {
	p.mu.Lock()
	defer p.mu.Unlock()
	dst = append(dst, p.steps...)
	p.steps = p.steps[:0]
	return dst
}

// pause forgets when the last step began: nothing runs, so the time until the
// next is none of its.
func (p *pulse) pause() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = 0
}

package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// stepDetector finds the steps of a barrier group in its streams. All requests of
// a group get a token in the same step, so the first stream that gets a second one
// shows that the next step has come: no clock is read for the other events, and
// a stream that is late joins the step it finds.
type stepDetector struct {
	number atomic.Uint32 // of the step under way, from 1
	least  atomic.Int64  // ns; what comes sooner is a stream that catches up, not a step

	mu    sync.Mutex // held by the stream that reports a step; the others do not wait for it
	base  time.Time
	began time.Duration // since base, when the step was reported; 0: nothing ran before it
	steps []board.Step  // reported and not yet read

	notify func() // wakes the owner
}

// streamState is the first step that a stream got tokens in, and the last one.
// 0: it has none yet.
type streamState struct{ first, last atomic.Uint32 }

// stepsMost bounds what waits to be read. An owner that is so late reads the
// rest from the next.
const stepsMost = 64

func newStepDetector(notify func()) *stepDetector {
	d := &stepDetector{base: time.Now(), steps: make([]board.Step, 0, stepsMost), notify: notify}
	d.number.Store(1)
	d.least.Store(int64(board.LeastStep))
	return d
}

// onToken reports that a stream got tokens.
func (d *stepDetector) onToken(v *streamState) {
	n := d.number.Load()
	switch v.last.Load() {
	case n:
	case 0:
		v.first.Store(n)
		fallthrough
	default:
		v.last.Store(n)
		return
	}
	if !d.mu.TryLock() {
		return // another stream reports the same
	}
	found := d.number.Load() == n && d.next(time.Since(d.base))
	d.mu.Unlock()
	v.last.Store(d.number.Load())
	if found {
		d.notify()
	}
}

// next begins a step at an instant, unless it is too soon.
func (d *stepDetector) next(at time.Duration) bool {
	s := board.Step{Number: d.number.Load() + 1}
	if d.began > 0 {
		if s.Length = at - d.began; int64(s.Length) < d.least.Load() {
			return false
		}
	}
	d.began = max(at, 1)
	d.number.Store(s.Number)
	if len(d.steps) < stepsMost {
		d.steps = append(d.steps, s)
	}
	return true
}

// read appends the steps that were reported since the last call.
func (d *stepDetector) read(dst []board.Step) []board.Step {
	d.mu.Lock()
	defer d.mu.Unlock()
	dst = append(dst, d.steps...)
	d.steps = d.steps[:0]
	return dst
}

// pause forgets when the last step began: nothing runs, so the time until the
// next is none of its.
func (d *stepDetector) pause() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.began = 0
}

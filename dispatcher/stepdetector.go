package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// stepDetector finds the steps of a barrier group in its streams. All requests of
// a group get a token in the same step. So when a stream that already has a token of the current
// step gets another one, the next step has come. The other streams then find the new number
// and take it over, late streams too, without reading the clock.
type stepDetector struct {
	number atomic.Uint32 // of the step under way, from 1
	least  atomic.Int64  // ns; a token that comes sooner after the step began is of a stream that catches up, not of a new step

	mu    sync.Mutex // held by the stream that reports a step; the others do not wait for it
	base  time.Time
	began time.Duration // when the current step was reported, since base; 0: nothing ran, so the length of the step is not known
	steps []board.Step  // reported and not yet read

	notify func() // wakes the runner, which then reads steps
}

// streamState has the numbers of the first and the last step in which a stream got tokens.
// 0: the stream has no token yet.
type streamState struct{ first, last atomic.Uint32 }

// stepsMost bounds the steps that wait to be read. If the runner is so late that more come, these
// are dropped, and the numbers of the next steps show the gap.
const stepsMost = 64

func newStepDetector(notify func()) *stepDetector {
	d := &stepDetector{base: time.Now(), steps: make([]board.Step, 0, stepsMost), notify: notify}
	d.number.Store(1)
	d.least.Store(int64(board.LeastStep))
	return d
}

// onToken reports that a stream got tokens. If the stream already has tokens of the current step, these are of the next step, and
// onToken begins that step. Otherwise the stream only notes that it has tokens of the current step.
func (d *stepDetector) onToken(stream *streamState) {
	current := d.number.Load()
	switch stream.last.Load() {
	case current: // the tokens are of the next step
	case 0: // the first tokens of the stream
		stream.first.Store(current)
		fallthrough
	default:
		stream.last.Store(current)
		return
	}
	if !d.mu.TryLock() {
		return // another stream is reporting the same step
	}
	begun := d.number.Load() == current && d.begin(time.Since(d.base))
	d.mu.Unlock()
	stream.last.Store(d.number.Load())
	if begun {
		d.notify()
	}
}

// begin begins the next step at an instant, given since d.base. It returns false, and begins nothing, if the current step began less
// than d.least ago.
func (d *stepDetector) begin(at time.Duration) bool {
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

// pause forgets when the current step began: nothing runs any more, so the time until the next
// step is not a step's length.
func (d *stepDetector) pause() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.began = 0
}

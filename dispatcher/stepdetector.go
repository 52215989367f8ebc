package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// stepDetector finds the steps of a barrier group by the tokens of its streams. All requests get a
// token in the same step. So when a stream gets another token although it already has one of the
// current step, the next step has begun. The first stream to which this happens raises the step
// number. The others find the new number, and need not read the clock.
type stepDetector struct {
	currentStep atomic.Uint32 // number of the current step, from 1
	// minLength is the shortest length of a step, in ns. A token that comes sooner begins no new step:
	// its stream only catches up.
	minLength atomic.Int64

	mu    sync.Mutex // held by the stream that begins a step; other streams do not wait for it
	epoch time.Time  // times are measured from here
	// began is when the current step began, since epoch; 0: not known, because the group was idle
	// before.
	began time.Duration
	steps []board.Step // steps that the scheduler has not read yet

	notify func() // wakes the scheduler, which then calls take
}

// maxUnreadSteps bounds steps. If the scheduler is so late that more begin, they are dropped, and
// it sees the gap in their numbers.
const maxUnreadSteps = 64

// newStepDetector numbers steps from 1, because a stream without tokens has the step number 0.
func newStepDetector(notify func()) *stepDetector {
	d := &stepDetector{epoch: time.Now(), steps: make([]board.Step, 0, maxUnreadSteps), notify: notify}
	d.currentStep.Store(1)
	d.minLength.Store(int64(board.LeastStep))
	return d
}

// onToken reports that a stream got tokens, and updates the numbers of the steps of its first and
// its last tokens; 0: it had none yet.
func (d *stepDetector) onToken(streamFirst, streamLast *atomic.Uint32) {
	current := d.currentStep.Load()
	if before := streamLast.Load(); before != current {
		if before == 0 {
			streamFirst.Store(current)
		}
		streamLast.Store(current)
		return
	}
	if !d.mu.TryLock() {
		// Another stream is just beginning the next step, or the scheduler has the lock for a moment.
		// This stream need not wait: it stays one step behind until its next tokens come.
		return
	}
	stillCurrent := d.currentStep.Load() == current // false: another stream was faster
	begun := stillCurrent && d.beginStep(time.Since(d.epoch))
	d.mu.Unlock()
	streamLast.Store(d.currentStep.Load())
	if begun {
		d.notify()
	}
}

// beginStep begins the next step at a time since d.epoch. It returns false and changes nothing if
// the current step would be too short: then tokens were delayed, and come in a burst. The caller
// holds d.mu.
func (d *stepDetector) beginStep(at time.Duration) (begun bool) {
	s := board.Step{Number: d.currentStep.Load() + 1}
	if d.began > 0 { // 0: not known, as after a pause
		s.Length = at - d.began
		if int64(s.Length) < d.minLength.Load() {
			return false
		}
	}
	d.began = max(at, 1) // 0 would mean that the time is not known
	d.currentStep.Store(s.Number)
	if len(d.steps) < maxUnreadSteps {
		d.steps = append(d.steps, s)
	}
	return true
}

func (d *stepDetector) take(dst []board.Step) []board.Step {
	d.mu.Lock()
	defer d.mu.Unlock()
	dst = append(dst, d.steps...)
	d.steps = d.steps[:0]
	return dst
}

// pause is called when no request of the group runs any more, because the time until the next step
// is then not the length of a step.
func (d *stepDetector) pause() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.began = 0
}

package dispatcher

import (
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/dispatcher/board"
)

// stepDetector finds the steps of a barrier group by the tokens of its streams. All requests of a group get a token in the same step. So
// when a stream gets another token although it already has one of the current step, the next step has begun. The first stream to which this
// happens raises the step number. The other streams then find the new number, and need not read the clock.
type stepDetector struct {
	currentStep atomic.Uint32 // number of the current step, from 1
	// minLength is the shortest length of a step, in ns. A token that comes sooner after the start of a step begins no new step: its
	// stream only catches up.
	minLength atomic.Int64

	mu    sync.Mutex // held by the stream that begins a step; other streams do not wait for the lock
	epoch time.Time  // when the detector was made; times are measured from here
	// began is when the current step began, as the time since epoch; 0: not known, because the group was idle before the step.
	began time.Duration
	steps []board.Step // steps that have begun and that the scheduler has not read yet

	notify func() // wakes the scheduler, which then calls take
}

// maxUnreadSteps is the largest number of steps that wait to be read. If the scheduler is so late that more steps begin, the detector drops
// these. The scheduler sees the gap in the step numbers.
const maxUnreadSteps = 64

// newStepDetector returns a detector that calls notify after each step that it finds. Steps are numbered from 1, because a stream without
// tokens has the step number 0. Until minLength is changed, the shortest length of a step is board.LeastStep.
func newStepDetector(notify func()) *stepDetector {
	d := &stepDetector{epoch: time.Now(), steps: make([]board.Step, 0, maxUnreadSteps), notify: notify}
	d.currentStep.Store(1)
	d.minLength.Store(int64(board.LeastStep))
	return d
}

// onToken reports that a stream got tokens. A stream gets tokens once per step. So if it has none of the current step yet, the new tokens
// are of this step. Otherwise they are of the next step, and onToken begins that step, unless another stream is doing so at the same time.
// Tokens that come too soon for a next step (see beginStep) count as tokens of the current step.
//
// streamFirst and streamLast hold the numbers of the steps in which the stream got its first and its last tokens; 0: it had none yet.
// onToken updates them.
func (d *stepDetector) onToken(streamFirst, streamLast *atomic.Uint32) {
	current := d.currentStep.Load()
	if before := streamLast.Load(); before != current { // the stream has no tokens of the current step yet
		if before == 0 { // these are the first tokens of the stream
			streamFirst.Store(current)
		}
		streamLast.Store(current)
		return
	}
	if !d.mu.TryLock() {
		// Another stream is just beginning the next step. This stream need not wait: its streamLast stays one step behind until its
		// next tokens come. If instead the scheduler has the lock for a moment, another stream, or this one with its next tokens,
		// begins the step.
		return
	}
	stillCurrent := d.currentStep.Load() == current // false: another stream began the next step before this one got the lock
	begun := stillCurrent && d.beginStep(time.Since(d.epoch))
	d.mu.Unlock()
	streamLast.Store(d.currentStep.Load()) // the step that this stream or another one has begun, or else the same step as before
	if begun {
		d.notify()
	}
}

// beginStep begins the next step at a time, given as the time since d.epoch. The Length of the next step is the time since the current step
// began; 0 if that is not known. If the Length would be below d.minLength, beginStep returns false and changes nothing: no step is so
// short, so the tokens of earlier steps were delayed, and come in a burst. The caller holds d.mu.
func (d *stepDetector) beginStep(at time.Duration) (begun bool) {
	s := board.Step{Number: d.currentStep.Load() + 1}
	if d.began > 0 { // 0: not known, as before the first step, and after a pause in which the group was idle
		s.Length = at - d.began
		if int64(s.Length) < d.minLength.Load() {
			return false
		}
	}
	d.began = max(at, 1) // at least 1, because 0 would mean that the time is not known
	d.currentStep.Store(s.Number)
	if len(d.steps) < maxUnreadSteps { // otherwise the scheduler is late, and the step is dropped
		d.steps = append(d.steps, s)
	}
	return true
}

// take appends the steps that have begun since the last call to dst, and removes them from the detector.
func (d *stepDetector) take(dst []board.Step) []board.Step {
	d.mu.Lock()
	defer d.mu.Unlock()
	dst = append(dst, d.steps...)
	d.steps = d.steps[:0]
	return dst
}

// pause makes the start time of the current step unknown. It is called when no request of the group runs any more, because the time until
// the next step is then not the length of a step.
func (d *stepDetector) pause() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.began = 0
}

package policy

import "math"

// RTT is a round trip to a peer, from its probes.
type RTT struct {
	alpha float64
	ms    float64
	known bool
}

// leastRTT is the smallest round trip that is believed.
const leastRTT = 0.05

// NewRTT returns an average in which a new sample weighs alpha.
func NewRTT(alpha float64) RTT { return RTT{alpha: alpha} }

// Add takes a probe that was answered after so many ms, of which the peer spent
// procUs at it. One whose connection was dialled for it says more of the dial.
func (r *RTT) Add(ms, procUs float64, dialled bool) {
	if dialled {
		return
	}
	sample := max(leastRTT, ms-procUs/1000)
	if !r.known {
		r.ms, r.known = sample, true
		return
	}
	r.ms += r.alpha * (sample - r.ms)
}

// Ms is the average; known is false before the first sample.
func (r *RTT) Ms() (ms float64, known bool) { return r.ms, r.known }

// Drain is how long it takes an arrival queue to let one request go, while
// there is one that waits.
type Drain struct {
	ms     float64
	lastAt float64
	known  bool
	busy   bool // somebody waited since the last departure
}

const drainAlpha = 0.2

// Departed counts a departure; waiting is how many are still there.
func (d *Drain) Departed(nowAt float64, waiting int) {
	if d.busy {
		gap := nowAt - d.lastAt
		if !d.known {
			d.ms, d.known = gap, true
		} else {
			d.ms += drainAlpha * (gap - d.ms)
		}
	}
	d.lastAt, d.busy = nowAt, waiting > 0
}

// Began says that a request is left in the queue, which could not go when it
// came.
func (d *Drain) Began(nowAt float64) {
	if !d.busy {
		d.lastAt, d.busy = nowAt, true
	}
}

// Ms is the average, 0 before the first.
func (d *Drain) Ms() float64 { return d.ms }

// Distrust is by how much a peer's costs were too small: the median of actual
// less predicted first token, followed in steps.
//
// A distrusted peer gets few requests, so there is little to show that it has become
// better. Therefore each minute without a forward halves the distrust.
type Distrust struct {
	median  float64
	samples int
	lastAt  float64 // when the last one came, or part of it was forgotten
}

const (
	distrustStep  = 10.0 // ms
	distrustFrom  = 100.0
	distrustCount = 20
	distrustHalf  = 60_000.0 // ms
)

// Add takes one forward's actual less its predicted time to first token, in ms.
func (d *Distrust) Add(nowAt, errorMs float64) {
	d.fade(nowAt)
	d.lastAt = nowAt
	d.samples++
	switch {
	case errorMs > d.median:
		d.median += distrustStep
	case errorMs < d.median:
		d.median -= distrustStep
	}
}

// Ms is what min_gain is raised by: 0 unless the peer was clearly too
// optimistic.
func (d *Distrust) Ms(nowAt float64) float64 {
	d.fade(nowAt)
	if d.samples < distrustCount || d.median < distrustFrom {
		return 0
	}
	return d.median
}

func (d *Distrust) fade(nowAt float64) {
	if part := fade(nowAt, &d.lastAt); d.samples > 0 {
		d.median *= part
	}
}

// fade returns which part is left at nowAt of what was held against a peer at
// lastAt, and moves lastAt on by the minutes that are counted in it.
func fade(nowAt float64, lastAt *float64) (part float64) {
	gaps := max(0, math.Floor((nowAt-*lastAt)/distrustHalf))
	*lastAt += gaps * distrustHalf
	return math.Pow(0.5, gaps)
}

// Trust is how many requests may be unanswered at a peer, whatever its probes
// offer: it begins small, grows with each first event that comes in time, and
// shrinks twice as fast with those that come late. A peer that offers more than it
// has gets few requests, and in the end one at a time. Few requests show little of
// a peer that has become better. Therefore each minute without a first event halves
// what the window has shrunk by.
type Trust struct {
	less   int     // than trustFirst
	lastAt float64 // of the last first event or failure, or when part of less was forgotten
}

const (
	trustFirst = 64
	trustMost  = 1 << 16
	trustBlind = 5000.0 // ms to a first event without a prediction
)

// LateMs is after how many ms a first event is late that was predicted for so many
// ms, 0 if there was no prediction.
func LateMs(predictedMs float64) float64 {
	if predictedMs <= 0 {
		predictedMs = trustBlind
	}
	return 2*predictedMs + distrustFrom
}

// Answered takes the time to the first event of a stream and the predicted time, 0
// if there was no prediction.
func (t *Trust) Answered(nowAt, tookMs, predictedMs float64) {
	if tookMs > LateMs(predictedMs) {
		t.Failed(nowAt)
		return
	}
	t.fade(nowAt)
	t.lastAt = nowAt
	t.less = max(t.less-1, trustFirst-trustMost)
}

// Whole takes an answer that came in one piece. It does not tell when the first
// token was there, so it wins back what the peer has lost, and no more.
func (t *Trust) Whole(nowAt float64) {
	t.fade(nowAt)
	if t.less > 0 {
		t.less--
	}
}

// Failed takes a request that the peer did not serve.
func (t *Trust) Failed(nowAt float64) {
	t.fade(nowAt)
	t.lastAt = nowAt
	t.less = min(t.less+2, trustFirst-1)
}

// Window is how many requests may be unanswered, at least one.
func (t *Trust) Window(nowAt float64) int {
	t.fade(nowAt)
	return trustFirst - t.less
}

// fade leaves alone what the peer has earned.
func (t *Trust) fade(nowAt float64) {
	if part := fade(nowAt, &t.lastAt); t.less > 0 {
		t.less = int(float64(t.less) * part)
	}
}

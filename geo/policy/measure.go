package policy

import "math"

// RTT is the average round trip to a peer, from its probes.
type RTT struct {
	alpha float64
	ms    float64
	known bool
}

// leastRTT is the smallest round trip that is believed, in ms.
const leastRTT = 0.05

// NewRTT returns an average in which a new sample weighs alpha.
func NewRTT(alpha float64) RTT { return RTT{alpha: alpha} }

// Add takes a probe that was answered after so many ms, of which the peer needed
// procUs µs to answer. A probe whose connection was dialled for it is ignored, because its time includes the dial.
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

// Drain is the average time between two departures from an arrival queue, while
// requests wait in it.
type Drain struct {
	ms     float64
	lastAt float64
	known  bool
	busy   bool // requests have waited since lastAt
}

const drainAlpha = 0.2

// Departed counts a departure; waiting is how many requests are left in the queue.
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

// Began records that a request stays in the queue, because it could not go when it
// came.
func (d *Drain) Began(nowAt float64) {
	if !d.busy {
		d.lastAt, d.busy = nowAt, true
	}
}

// Ms is the average in ms; 0: no departure came yet while requests waited.
func (d *Drain) Ms() float64 { return d.ms }

// Distrust is by how many ms a peer's predicted costs were too small: the median of the actual less the
// predicted time to the first token. Each sample moves the median by one step.
//
// A distrusted peer gets few requests, so there is little to show that it has become
// better. Therefore each minute without a forward halves the distrust.
type Distrust struct {
	median  float64
	samples int
	lastAt  float64 // when the last sample came, or the median was last halved
}

const (
	distrustStep  = 10.0     // ms
	distrustFrom  = 100.0    // ms
	distrustCount = 20       // samples
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

// Ms is by how many ms min_gain_ms is raised for the peer: 0 below distrustCount samples, or
// if the median is below distrustFrom.
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

// fade returns which part is left at nowAt of the distrust at lastAt: it halves each
// distrustHalf. It moves lastAt on by the whole minutes that it has counted.
func fade(nowAt float64, lastAt *float64) (part float64) {
	gaps := max(0, math.Floor((nowAt-*lastAt)/distrustHalf))
	*lastAt += gaps * distrustHalf
	return math.Pow(0.5, gaps)
}

// Trust is how many requests may be unanswered at a peer, whatever its probes
// offer: it begins small, grows with each first event that comes in time, and
// shrinks twice as fast with each that comes late. A peer that offers more than it
// has gets few requests, and in the end one at a time. Few requests show little of
// a peer that has become better. Therefore each minute without a first event halves
// what the window has shrunk by.
type Trust struct {
	less   int     // by how many the window is below trustFirst; below 0: above it
	lastAt float64 // when the last first event or failure came, or less was last halved
}

const (
	trustFirst = 64
	trustMost  = 1 << 16
	trustBlind = 5000.0 // ms to a first event without a prediction
)

// LateMs is after how many ms a first event is late, given its predicted time; 0: there was
// no prediction.
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

// Whole takes an answer that came in one piece. It does not show when the first
// token was there, so that it only restores the window up to trustFirst.
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

// fade halves less for each minute without a first event, but leaves a window above trustFirst as it is.
func (t *Trust) fade(nowAt float64) {
	if part := fade(nowAt, &t.lastAt); t.less > 0 {
		t.less = int(float64(t.less) * part)
	}
}

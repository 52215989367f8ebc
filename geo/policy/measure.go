package policy

// RTT is a round trip to a peer, from its probes (geo R20).
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
// there is one that waits (geo 5).
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
// less predicted first token, followed in steps (geo R21).
type Distrust struct {
	median  float64
	samples int
}

const (
	distrustStep  = 10.0 // ms
	distrustFrom  = 100.0
	distrustCount = 20
)

// Add takes one forward's actual less its predicted time to first token, in ms.
func (d *Distrust) Add(errorMs float64) {
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
func (d *Distrust) Ms() float64 {
	if d.samples < distrustCount || d.median < distrustFrom {
		return 0
	}
	return d.median
}

package policy

import "math"

// RTT is the average round trip to a peer, measured by probes.
type RTT struct {
	alpha float64
	ms    float64
	known bool
}

// minRTTMs is a lower bound of round trips, in ms. A smaller result means that the peer reported too long a computing time (procUs).
const minRTTMs = 0.05

// NewRTT returns an average in which a new sample has the weight alpha, 0 to 1.
func NewRTT(alpha float64) RTT { return RTT{alpha: alpha} }

// Add adds a probe that was answered after ms milliseconds, of which the peer took procUs microseconds to compute the
// answer. A probe for which a connection was dialled is ignored, because its time includes the dial.
func (r *RTT) Add(ms, procUs float64, dialled bool) {
	if dialled {
		return
	}
	sample := max(minRTTMs, ms-procUs/1000)
	if !r.known { // the first sample is the average
		r.ms, r.known = sample, true
		return
	}
	r.ms += r.alpha * (sample - r.ms)
}

// Ms is the average in ms; known is false before the first sample.
func (r *RTT) Ms() (ms float64, known bool) { return r.ms, r.known }

// DepartureGap is the average time between two departures from an arrival queue, while requests wait in it. It shows how fast the
// queue empties.
type DepartureGap struct {
	ms     float64
	lastAt float64 // time of the last departure, or of the first request's entry into the empty queue
	known  bool    // ms has at least one sample
	busy   bool    // requests have waited since lastAt
}

const departureGapAlpha = 0.2 // weight of a new gap in the average

// Departed adds a departure. waiting is the number of requests that remain in the queue. A gap in which the queue was empty does not
// count, because it shows how rarely requests come.
func (d *DepartureGap) Departed(nowAt float64, waiting int) {
	if d.busy {
		gap := nowAt - d.lastAt
		if !d.known {
			d.ms, d.known = gap, true
		} else {
			d.ms += departureGapAlpha * (gap - d.ms)
		}
	}
	d.lastAt, d.busy = nowAt, waiting > 0
}

// Entered records that a request entered the queue, because it could not be sent at its arrival. If the queue was empty, the gap to
// the next departure counts from now on.
func (d *DepartureGap) Entered(nowAt float64) {
	if !d.busy {
		d.lastAt, d.busy = nowAt, true
	}
}

// Ms is the average in ms; 0: unknown, because no request has departed while others waited.
func (d *DepartureGap) Ms() float64 { return d.ms }

// Distrust is by how many ms the predicted costs of a peer were too low: the median of the actual time to first token less
// the predicted time. Each sample moves the median by one step.
//
// A distrusted peer gets few requests, which could show that it has improved. Each minute without a forward therefore
// halves the distrust. All times nowAt are in ms since one fixed moment.
type Distrust struct {
	median  float64
	samples int
	lastAt  float64 // when the last sample came, or the median was last halved
}

const (
	distrustStepMs     = 10.0     // ms by which a sample moves the median
	distrustMinMs      = 100.0    // ms from which the median has an effect
	distrustMinSamples = 20       // samples from which the median has an effect
	halfLifeMs         = 60_000.0 // ms in which the median halves
)

// Add adds one forward. nowAt is the time, and errorMs the forward's actual less its predicted time to first token, both in ms. The median
// moves one step towards the error. At the true median, as many errors move it up as down.
func (d *Distrust) Add(nowAt, errorMs float64) {
	d.decayMedian(nowAt)
	d.lastAt = nowAt
	d.samples++
	switch {
	case errorMs > d.median:
		d.median += distrustStepMs
	case errorMs < d.median:
		d.median -= distrustStepMs
	}
}

// Ms is by how many ms min_gain_ms is raised for the peer. It is 0 while there are fewer than distrustMinSamples samples,
// or while the median is below distrustMinMs.
func (d *Distrust) Ms(nowAt float64) float64 {
	d.decayMedian(nowAt)
	if d.samples < distrustMinSamples || d.median < distrustMinMs {
		return 0
	}
	return d.median
}

// decayMedian halves the median for each minute that has passed since lastAt.
func (d *Distrust) decayMedian(nowAt float64) {
	var factor float64
	if factor, d.lastAt = halvings(nowAt, d.lastAt); d.samples > 0 { // without a sample there is no median
		d.median *= factor
	}
}

// halvings returns the factor, from 0 to 1, by which a value falls from lastAt to nowAt: it halves once per halfLifeMs. Only whole
// half-lives count. countedUntil is lastAt advanced by them, from where the next call must count.
func halvings(nowAt, lastAt float64) (factor, countedUntil float64) {
	count := max(0, math.Floor((nowAt-lastAt)/halfLifeMs))
	return math.Pow(0.5, count), lastAt + count*halfLifeMs
}

// Trust bounds how many requests may be unanswered at a peer, whatever its probes offer. This window begins at initialWindow. It
// grows by one with each first event of an answer that comes in time, and shrinks by two with each that is late. A peer
// that offers more than it can serve gets fewer and fewer requests, in the end one at a time. So few requests hardly show
// whether the peer has improved. Each minute without a first event therefore halves the amount by which the window has
// shrunk. All times nowAt are in ms since one fixed moment.
type Trust struct {
	belowInitial int     // how far the window is below initialWindow; negative: it is above
	lastAt       float64 // when the last first event or failure came, or belowInitial was last halved
}

const (
	initialWindow       = 64      // unanswered requests that are allowed at a peer of which nothing is known yet
	maxWindow           = 1 << 16 // most unanswered requests that are allowed at a peer
	assumedFirstEventMs = 5000.0  // ms to a first event that are assumed without a prediction
)

// LateMs is the time in ms after which a first event is late. predictedMs is its predicted time; 0: no prediction.
func LateMs(predictedMs float64) float64 {
	if predictedMs <= 0 { // no prediction
		predictedMs = assumedFirstEventMs
	}
	return 2*predictedMs + distrustMinMs
}

// FirstEvent grows the window if the first event of a stream came in time, and shrinks it if the event was late. tookMs is the time to
// the event, predictedMs its predicted time; 0: no prediction.
func (t *Trust) FirstEvent(nowAt, tookMs, predictedMs float64) {
	if tookMs > LateMs(predictedMs) {
		t.Failed(nowAt)
		return
	}
	t.growBack(nowAt) // for the minutes without a first event
	t.lastAt = nowAt
	t.changeWindow(+1)
}

// changeWindow makes the window larger by so many requests, or smaller if the number is negative. It stays between 1 and maxWindow.
func (t *Trust) changeWindow(by int) {
	window := initialWindow - t.belowInitial + by
	t.belowInitial = initialWindow - min(max(window, 1), maxWindow)
}

// WholeAnswer adds an answer that was not a stream. It does not show when the first token was ready. So the window grows by one only if it
// is below initialWindow, and the answer does not count as a first event for growBack.
func (t *Trust) WholeAnswer(nowAt float64) {
	t.growBack(nowAt) // for the minutes without a first event
	if t.belowInitial > 0 {
		t.changeWindow(+1)
	}
}

// Failed shrinks the window by two, because the peer did not serve a request, or served it late.
func (t *Trust) Failed(nowAt float64) {
	t.growBack(nowAt) // for the minutes without a first event
	t.lastAt = nowAt
	t.changeWindow(-2)
}

// Window is how many requests may be unanswered at the peer, at least one.
func (t *Trust) Window(nowAt float64) int {
	t.growBack(nowAt)
	return initialWindow - t.belowInitial
}

// growBack halves belowInitial for each minute without a first event, so that the window grows back. It does not reduce a window that is
// above initialWindow.
func (t *Trust) growBack(nowAt float64) {
	var factor float64
	if factor, t.lastAt = halvings(nowAt, t.lastAt); t.belowInitial > 0 {
		t.belowInitial = int(float64(t.belowInitial) * factor)
	}
}

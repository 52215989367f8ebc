package policy

import "math"

// RTT is the average round trip of probes to a peer.
type RTT struct {
	alpha float64
	ms    float64
	known bool
}

// minRTTMs bounds the round trip if the peer reports too long a computing time.
const minRTTMs = 0.05

// NewRTT takes the weight of a new sample, 0 to 1.
func NewRTT(alpha float64) RTT { return RTT{alpha: alpha} }

// Add adds a probe whose answer the peer computed in procUs microseconds. One with a dial is
// ignored, because its time includes the dial.
func (r *RTT) Add(ms, procUs float64, dialled bool) {
	if dialled {
		return
	}
	sample := max(minRTTMs, ms-procUs/1000)
	if !r.known {
		r.ms, r.known = sample, true
		return
	}
	r.ms += r.alpha * (sample - r.ms)
}

// Ms is not known before the first sample.
func (r *RTT) Ms() (ms float64, known bool) { return r.ms, r.known }

// DepartureGap is the average time between two departures from an arrival queue while requests wait
// in it.
type DepartureGap struct {
	ms     float64
	lastAt float64 // of the last departure, or of the entry into the empty queue
	known  bool
	busy   bool // requests have waited since lastAt
}

const departureGapAlpha = 0.2 // weight of a new gap

// Departed adds a departure, after which so many requests still wait. A gap in which the queue was
// empty does not count, because it only shows how rarely requests come.
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

// Entered records that a request could not be sent at its arrival.
func (d *DepartureGap) Entered(nowAt float64) {
	if !d.busy {
		d.lastAt, d.busy = nowAt, true
	}
}

// Ms is 0 if no request has departed while others waited.
func (d *DepartureGap) Ms() float64 { return d.ms }

// Distrust is the median of the actual less the predicted time to first token of a peer. Each
// sample moves it by one step.
//
// A distrusted peer gets few requests, which could show that it has improved, so each minute
// without a forward halves the distrust. All times nowAt are in ms since one fixed moment.
type Distrust struct {
	median  float64
	samples int
	lastAt  float64 // of the last sample or halving
}

const (
	distrustStepMs     = 10.0     // by which a sample moves the median
	distrustMinMs      = 100.0    // from which the median counts
	distrustMinSamples = 20       // from which the median counts
	halfLifeMs         = 60_000.0 // of the median, in ms
)

// Add adds a forward's actual less its predicted time to first token. At the true median, as many
// errors move it up as down.
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

// Ms is added to min_gain_ms for the peer.
func (d *Distrust) Ms(nowAt float64) float64 {
	d.decayMedian(nowAt)
	if d.samples < distrustMinSamples || d.median < distrustMinMs {
		return 0
	}
	return d.median
}

func (d *Distrust) decayMedian(nowAt float64) {
	var factor float64
	if factor, d.lastAt = halvings(nowAt, d.lastAt); d.samples > 0 {
		d.median *= factor
	}
}

// halvings returns the factor by which a value that halves once per halfLifeMs has fallen. Only
// whole half-lives count; the next call must count from countedUntil.
func halvings(nowAt, lastAt float64) (factor, countedUntil float64) {
	count := max(0, math.Floor((nowAt-lastAt)/halfLifeMs))
	return math.Pow(0.5, count), lastAt + count*halfLifeMs
}

// Trust bounds the unanswered requests at a peer, whatever its probes offer. The window grows by
// one with each first event in time, and shrinks by two with each late one. A peer that offers more
// than it can serve gets fewer and fewer requests, in the end one at a time, which hardly shows
// whether it has improved. So each minute without a first event halves the amount by which the
// window has shrunk. All times nowAt are in ms since one fixed moment.
type Trust struct {
	belowInitial int     // how far below initialWindow; negative: above
	lastAt       float64 // of the last first event, failure or halving
}

const (
	initialWindow       = 64 // of a peer of which nothing is known
	maxWindow           = 1 << 16
	assumedFirstEventMs = 5000.0 // without a prediction
)

// LateMs is the time in ms after which a first event is late; predictedMs 0: no prediction.
func LateMs(predictedMs float64) float64 {
	if predictedMs <= 0 {
		predictedMs = assumedFirstEventMs
	}
	return 2*predictedMs + distrustMinMs
}

// FirstEvent grows the window, or shrinks it if the event was late; predictedMs 0: no prediction.
func (t *Trust) FirstEvent(nowAt, tookMs, predictedMs float64) {
	if tookMs > LateMs(predictedMs) {
		t.Failed(nowAt)
		return
	}
	t.growBack(nowAt)
	t.lastAt = nowAt
	t.changeWindow(+1)
}

// changeWindow keeps the window from 1 to maxWindow.
func (t *Trust) changeWindow(by int) {
	window := initialWindow - t.belowInitial + by
	t.belowInitial = initialWindow - min(max(window, 1), maxWindow)
}

// WholeAnswer was no stream, and does not show when the first token was ready. So it grows the
// window only below initialWindow, and is no first event.
func (t *Trust) WholeAnswer(nowAt float64) {
	t.growBack(nowAt)
	if t.belowInitial > 0 {
		t.changeWindow(+1)
	}
}

// Failed shrinks the window: the peer did not serve a request, or served it late.
func (t *Trust) Failed(nowAt float64) {
	t.growBack(nowAt)
	t.lastAt = nowAt
	t.changeWindow(-2)
}

// Window is how many requests may be unanswered, at least one.
func (t *Trust) Window(nowAt float64) int {
	t.growBack(nowAt)
	return initialWindow - t.belowInitial
}

// growBack halves belowInitial for each minute without a first event. It keeps a window above
// initialWindow.
func (t *Trust) growBack(nowAt float64) {
	var factor float64
	if factor, t.lastAt = halvings(nowAt, t.lastAt); t.belowInitial > 0 {
		t.belowInitial = int(float64(t.belowInitial) * factor)
	}
}

package fit

import (
	"slices"
	"time"
)

// Throughput measures how fast requests for a model arrive, and how long their prefills take.
type Throughput struct {
	windowStart time.Time
	arrivals    int                 // first attempts in the present window
	perS        float64             // weighted mean over the windows that have ended
	hasRate     bool                // a window has ended, so that perS is a mean
	lastMs      [paceProbes]float64 // times to first token, in ms; only the first `probes` are set
	probes      int                 // so far; may be more than paceProbes
	ttftMs      float64             // median of lastMs when the last window ended
	sorted      [paceProbes]float64 // scratch for the median
}

const (
	paceWindow = time.Second
	paceShare  = 0.2 // weight of the last window in the mean
	paceProbes = 64  // for the median
)

// Arrived counts a request, at its first attempt.
func (t *Throughput) Arrived(now time.Time) {
	t.rollWindow(now)
	t.arrivals++
}

// Answered records how long a probe took. The first duration counts as the median until the first
// window ends.
func (t *Throughput) Answered(now time.Time, ms float64) {
	t.lastMs[t.probes%paceProbes] = ms
	if t.probes++; t.probes == 1 {
		t.ttftMs = ms
	}
	t.rollWindow(now)
}

func (t *Throughput) ArrivalsPerS(now time.Time) float64 {
	t.rollWindow(now)
	return t.perS
}

// TTFTMs is the median duration of the last probes in ms; 0: no probe was answered yet.
func (t *Throughput) TTFTMs() float64 { return t.ttftMs }

// rollWindow ends the window if it is at least paceWindow old. Without calls a window becomes
// longer, and its rate is the mean over this time.
func (t *Throughput) rollWindow(now time.Time) {
	if t.windowStart.IsZero() {
		t.windowStart = now
	}
	elapsed := now.Sub(t.windowStart)
	if elapsed < paceWindow {
		return
	}
	arrivalsPerS := float64(t.arrivals) / elapsed.Seconds()
	if t.hasRate {
		arrivalsPerS = t.perS + paceShare*(arrivalsPerS-t.perS)
	}
	t.perS = arrivalsPerS
	t.hasRate = true
	t.arrivals = 0
	t.windowStart = now
	measured := t.lastMs[:min(t.probes, paceProbes)]
	if n := copy(t.sorted[:], measured); n > 0 {
		slices.Sort(t.sorted[:n])
		t.ttftMs = t.sorted[n/2]
	}
}

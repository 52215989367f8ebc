package fit

import (
	"slices"
	"time"
)

// Throughput measures how fast requests for a model arrive, and how long their prefills take.
type Throughput struct {
	since  time.Time           // begin of the present window
	count  int                 // first attempts in the present window
	perS   float64             // weighted mean over the earlier windows
	known  bool                // at least one window has ended
	last   [paceProbes]float64 // ring of the last probes' durations in ms
	next   int                 // number of probes so far; its index in the ring is written next
	ttftMs float64             // median of last when the last window ended
	sorted [paceProbes]float64 // scratch for the median
}

const (
	paceWindow = time.Second
	paceShare  = 0.2 // weight of the last window in the mean
	paceProbes = 64  // probes in the median
)

// Arrived counts a request, at its first attempt.
func (p *Throughput) Arrived(now time.Time) {
	p.roll(now)
	p.count++
}

// Answered records how long a probe took.
func (p *Throughput) Answered(now time.Time, ms float64) {
	p.last[p.next%paceProbes] = ms
	if p.next++; p.next == 1 {
		p.ttftMs = ms
	}
	p.roll(now)
}

// ArrivalsPerS is the recent number of new requests per second.
func (p *Throughput) ArrivalsPerS(now time.Time) float64 {
	p.roll(now)
	return p.perS
}

// TTFTMs is the median duration of the last probes in ms; 0: no probe was answered yet.
func (p *Throughput) TTFTMs() float64 { return p.ttftMs }

// roll ends the window if it is at least one second old. Without calls a window becomes longer; its rate is then the mean
// over the longer time.
func (p *Throughput) roll(now time.Time) {
	if p.since.IsZero() {
		p.since = now
	}
	elapsed := now.Sub(p.since)
	if elapsed < paceWindow {
		return
	}
	rate := float64(p.count) / elapsed.Seconds()
	if p.known {
		rate = p.perS + paceShare*(rate-p.perS)
	}
	p.perS, p.known, p.count, p.since = rate, true, 0, now
	if n := copy(p.sorted[:], p.last[:min(p.next, paceProbes)]); n > 0 {
		slices.Sort(p.sorted[:n])
		p.ttftMs = p.sorted[n/2]
	}
}

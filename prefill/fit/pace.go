package fit

import (
	"slices"
	"time"
)

// Pace is how fast requests for a model arrive, and how soon their prefills
// answer.
type Pace struct {
	since  time.Time // begin of the window that is counted now
	count  int
	perS   float64 // mean over the windows before
	known  bool
	last   [paceProbes]float64 // ms, the latest at next-1
	next   int
	ttftMs float64 // median of last, computed at the end of the last window
	sorted [paceProbes]float64
}

const (
	paceWindow = time.Second
	paceShare  = 0.2 // weight of the last window in the mean
	paceProbes = 64  // probes that the median is taken over
)

// Arrived counts a first attempt.
func (p *Pace) Arrived(now time.Time) {
	p.roll(now)
	p.count++
}

// Answered records how long a probe took.
func (p *Pace) Answered(now time.Time, ms float64) {
	p.last[p.next%paceProbes] = ms
	if p.next++; p.next == 1 {
		p.ttftMs = ms
	}
	p.roll(now)
}

// ArrivalsPerS is how many first attempts come per second.
func (p *Pace) ArrivalsPerS(now time.Time) float64 {
	p.roll(now)
	return p.perS
}

// TTFTMs is the median time of the last probes; 0: none was answered yet.
func (p *Pace) TTFTMs() float64 { return p.ttftMs }

// roll ends the window once a second is over. A window ends only when it is looked at, so it may be longer; its rate
// is then over that longer time.
func (p *Pace) roll(now time.Time) {
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

package prefill

import (
	"slices"
	"time"
)

// pace is how fast requests for a model arrive, and how soon their prefills
// answer.
type pace struct {
	since  time.Time // of the window that is counted now
	count  int
	perS   float64 // of the windows before
	known  bool
	last   [paceProbes]float64 // ms, the latest at next-1
	next   int
	ttftMs float64 // median of those, as of the last window
	sorted [paceProbes]float64
}

const (
	paceWindow = time.Second
	paceShare  = 0.2 // of the last window in the mean
	paceProbes = 64  // that the median is of
)

func (p *pace) arrived(now time.Time) {
	p.turn(now)
	p.count++
}

func (p *pace) answered(now time.Time, ms float64) {
	p.last[p.next%paceProbes] = ms
	if p.next++; p.next == 1 {
		p.ttftMs = ms
	}
	p.turn(now)
}

func (p *pace) arrivalsPerS(now time.Time) float64 {
	p.turn(now)
	return p.perS
}

// turn ends the window once it is over. One that nobody looked at for long was
// long: what came in it came so slowly.
func (p *pace) turn(now time.Time) {
	if p.since.IsZero() {
		p.since = now
	}
	d := now.Sub(p.since)
	if d < paceWindow {
		return
	}
	rate := float64(p.count) / d.Seconds()
	if p.known {
		rate = p.perS + paceShare*(rate-p.perS)
	}
	p.perS, p.known, p.count, p.since = rate, true, 0, now
	if n := copy(p.sorted[:], p.last[:min(p.next, paceProbes)]); n > 0 {
		slices.Sort(p.sorted[:n])
		p.ttftMs = p.sorted[n/2]
	}
}

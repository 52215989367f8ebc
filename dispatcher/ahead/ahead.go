// Package ahead learns how many requests a rank may get beyond its slots: as many as end on the rank
// while new ones are on their way to it.
package ahead

import "math"

// Lag learns for how many steps a bound request has a slot and gets no token yet, the lag, and for how many steps it
// then gets tokens. The lag is the least of many requests, because the lag of a request that waited in the engine's queue
// also has that wait.
type Lag struct {
	lastMin, thisMin int32   // least lag of the window of requests before, and of the present one, in steps
	seen             int     // requests that ended
	stay             float64 // mean number of steps in which a request gets tokens
}

// A window is a number of requests; before the first is over, no request is sent ahead. Each request moves the
// mean stay by stayWeight of the difference.
const (
	window     = 64
	stayWeight = 1.0 / 64
)

// Ended learns from a request that has ended how many steps passed before its first token (its lag), and for how many steps it got
// tokens (its stay). bound is the number of the step that was reported last before the request was
// bound; first and last are the steps that brought its first and its last token.
func (l *Lag) Ended(bound, first, last uint32) {
	if !known(bound, first) {
		return
	}
	lag, stay := int32(first-bound-1), float64(last-first)+1 // the lag is 0 if the next step brought its first token
	if l.seen == 0 {
		l.stay = stay
	}
	if l.seen%window == 0 {
		l.lastMin, l.thisMin = l.thisMin, lag // a new window begins, and the minimum of the one before is kept
	}
	l.thisMin = min(l.thisMin, lag)
	l.stay += stayWeight * (stay - l.stay)
	l.seen++
}

// known says whether the two numbers can be compared: a step had been reported when the request was bound, and the steps were not
// numbered anew before its first token.
func known(bound, first uint32) bool { return bound != 0 && int32(first-bound) > 0 }

// Slots returns how many of the requests that run on a rank will end within the lag: the requests that may be sent ahead.
func (l *Lag) Slots(running int) int {
	if l.seen < window {
		return 0
	}
	steps := float64(l.thisMin)
	if l.seen >= 2*window {
		steps = min(steps, float64(l.lastMin))
	}
	return int(math.Round(float64(running) * steps / (steps + l.stay)))
}

// Lead learns for how many steps a request that was bound before its prefill gets no token, and for how
// many it then gets tokens, both as means. If too many requests are sent beyond the slots, they wait for slots, which
// makes the first mean longer, but by less than would keep their number as high. So the number falls until no request waits.
type Lead struct {
	seen        int
	steps, stay float64
}

// Ended learns from a request that has ended, as Lag.Ended does.
func (l *Lead) Ended(bound, first, last uint32) {
	if !known(bound, first) {
		return
	}
	steps, stay := float64(first-bound-1), float64(last-first)+1
	weight := stayWeight
	if l.seen == 0 {
		weight = 1
	}
	l.steps += weight * (steps - l.steps)
	l.stay += weight * (stay - l.stay)
	l.seen++
}

// Slots returns how many requests a rank may have beyond its slots, at most a quarter of their number.
func (l *Lead) Slots(slots int) int {
	if l.seen < window {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*l.steps/(l.steps+l.stay))))
}

package board

import "math"

// The types of this file learn how many requests a rank may get beyond its slots (ahead.go). A new request gets its first token only some
// steps after it was sent. As many requests as end on the rank during these steps may be sent beyond its slots, so that no slot stays
// empty.

// lag learns for how many steps a bound request gets no token yet (its lag), and for how many steps it then gets tokens (its stay). It uses
// the least lag of many requests, because the lag of a request that waited in the engine's queue includes this wait.
type lag struct {
	lastMin, thisMin int32   // least lag of the requests in the last complete window, and in the present one, in steps
	seen             int     // requests that ended
	stay             float64 // mean number of steps in which a request gets tokens
}

const (
	lagWindow  = 64       // requests over which a least lag is taken; no request is sent ahead before so many have ended
	stayWeight = 1.0 / 64 // each request moves a mean by this share of its difference from the mean
)

// ended learns the lag and the stay of a request that has ended. bound is the number of the step that was reported last before the request
// was bound. first and last are the numbers of the steps that brought its first and its last token.
func (l *lag) ended(bound, first, last uint32) {
	if !comparableSteps(bound, first) {
		return
	}
	steps, stay := int32(first-bound-1), float64(last-first)+1 // the lag is 0 steps if the next step brought its first token
	if l.seen == 0 {
		l.stay = stay
	}
	if l.seen%lagWindow == 0 {
		l.lastMin, l.thisMin = l.thisMin, steps // a new window begins
	}
	l.thisMin = min(l.thisMin, steps)
	l.stay += stayWeight * (stay - l.stay)
	l.seen++
}

// comparableSteps says whether the two step numbers can be compared: a step had been reported when the request was bound, and the numbers
// did not begin again before its first token.
func comparableSteps(bound, first uint32) bool { return bound != 0 && int32(first-bound) > 0 }

// slots returns how many requests may be sent to a rank beyond its slots: as many as probably end there within the lag of a new request.
func (l *lag) slots(running int) int {
	if l.seen < lagWindow {
		return 0
	}
	steps := float64(l.thisMin)
	if l.seen > lagWindow { // otherwise no window is complete but the present one
		steps = min(steps, float64(l.lastMin))
	}
	return int(math.Round(float64(running) * steps / (steps + l.stay)))
}

// lead learns for how many steps a request that was bound before its prefill gets no token, and for how many steps it then gets tokens.
// Both are means. Requests that were sent beyond the slots may have to wait for a slot, which raises the first mean and so the number of
// requests that are sent ahead. The mean rises too little to keep this number up, so it falls again until no request waits.
type lead struct {
	seen        int
	steps, stay float64 // mean number of steps without a token, and with tokens
}

// ended learns from a request that has ended, as lag.ended does.
func (l *lead) ended(bound, first, last uint32) {
	if !comparableSteps(bound, first) {
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

// slots returns how many requests a rank with so many slots may have beyond them, at most a quarter of the number of slots.
func (l *lead) slots(slots int) int {
	if l.seen < lagWindow {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*l.steps/(l.steps+l.stay))))
}

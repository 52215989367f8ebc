package board

import "math"

// These types learn how many requests a rank may get beyond its slots (ahead.go). A new request
// gets its first token some steps after it was sent (the delay). So as many may be sent ahead as
// end on the rank during these steps: then no slot stays empty.

// handoffDelay is for requests with a hand-off, whose KV is copied in the delay. It takes the least
// delay of many, because a request that waited in the engine's queue has a longer one.
type handoffDelay struct {
	// leastInLastWindow and leastInThisWindow are over delayWindow requests each, in steps.
	leastInLastWindow, leastInThisWindow int32
	requests                             int     // ended
	meanDecodeSteps                      float64 // steps with tokens
}

const (
	// delayWindow: before so many requests have ended, none is sent ahead.
	delayWindow = 64
	// meanWeight is the share of the difference by which a request moves a mean.
	meanWeight = 1.0 / 64
)

// learn learns from an ended request, by the numbers of steps: the last one reported before it was
// bound, and those that brought its first and last tokens.
func (d *handoffDelay) learn(boundAt, first, last uint32) {
	if !comparableSteps(boundAt, first) {
		return
	}
	// The delay is 0 if the very next step brought the first token.
	delay, decodeSteps := int32(first-boundAt-1), float64(last-first)+1
	if d.requests == 0 {
		d.meanDecodeSteps = decodeSteps
	}
	if d.requests%delayWindow == 0 { // until there is a second window, extraSlots reads only this one
		d.leastInLastWindow, d.leastInThisWindow = d.leastInThisWindow, delay
	}
	d.leastInThisWindow = min(d.leastInThisWindow, delay)
	d.meanDecodeSteps += meanWeight * (decodeSteps - d.meanDecodeSteps)
	d.requests++
}

// comparableSteps: a step had been reported at the binding, and the numbers did not begin anew
// before the first token.
func comparableSteps(boundAt, first uint32) bool { return boundAt != 0 && int32(first-boundAt) > 0 }

// extraSlots is 0 while fewer than delayWindow requests have ended. A request has its slot for its
// delay and its decode steps, so the share delay/(delay+decode steps) of the running ones ends
// within one delay.
func (d *handoffDelay) extraSlots(running int) int {
	if d.requests < delayWindow {
		return 0
	}
	delaySteps := float64(d.leastInThisWindow)
	if d.requests > delayWindow { // otherwise only the present window has a least delay
		delaySteps = min(delaySteps, float64(d.leastInLastWindow))
	}
	return int(math.Round(float64(running) * delaySteps / (delaySteps + d.meanDecodeSteps)))
}

// prefillDelay is for requests that were bound before their prefill. One that was sent beyond the
// slots may also wait for a slot. Its longer delay raises the mean, and so the number that is sent
// ahead, but too little to keep this number up: it falls again until no request waits.
type prefillDelay struct {
	requests                        int     // ended
	meanDelaySteps, meanDecodeSteps float64 // steps without a token, and with tokens
}

func (d *prefillDelay) learn(boundAt, first, last uint32) {
	if !comparableSteps(boundAt, first) {
		return
	}
	delay, decodeSteps := float64(first-boundAt-1), float64(last-first)+1
	weight := meanWeight
	if d.requests == 0 { // the first request sets the means
		weight = 1
	}
	d.meanDelaySteps += weight * (delay - d.meanDelaySteps)
	d.meanDecodeSteps += weight * (decodeSteps - d.meanDecodeSteps)
	d.requests++
}

// extraSlots is the number of slots times the share of time in which a request has no token yet,
// and so needs no slot.
func (d *prefillDelay) extraSlots(slots int) int {
	if d.requests < delayWindow {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*d.meanDelaySteps/(d.meanDelaySteps+d.meanDecodeSteps))))
}

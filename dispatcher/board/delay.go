package board

import "math"

// The types of this file learn how many requests a rank may get beyond its slots (ahead.go). A new request gets its first token only some
// steps after it was sent. As many requests as end on the rank during these steps may be sent beyond its slots, so that no slot stays
// empty.

// handoffDelay learns for how many steps a bound request gets no token yet (its delay), because its KV has to be copied, and for how many
// steps it then gets tokens. It uses the least delay of many requests, because the delay of a request that waited in the engine's queue
// includes this wait.
type handoffDelay struct {
	leastBefore, leastNow int32   // least delay of the requests in the last complete window, and in the present one, in steps
	requests              int     // requests that ended
	meanDecodeSteps       float64 // mean number of steps in which a request gets tokens
}

const (
	delayWindow = 64       // requests over which a least delay is taken; no request is sent ahead before so many have ended
	meanWeight  = 1.0 / 64 // each request moves a mean by this share of its difference from the mean
)

// learn learns the delay and the decode steps of a request that has ended. boundAt is the number of the step that was reported last before
// the request was bound. first and last are the numbers of the steps that brought its first and its last token.
func (d *handoffDelay) learn(boundAt, first, last uint32) {
	if !comparableSteps(boundAt, first) {
		return
	}
	delay, decodeSteps := int32(first-boundAt-1), float64(last-first)+1 // the delay is 0 steps if the next step brought its first token
	if d.requests == 0 {
		d.meanDecodeSteps = decodeSteps
	}
	if d.requests%delayWindow == 0 {
		d.leastBefore, d.leastNow = d.leastNow, delay // a new window begins
	}
	d.leastNow = min(d.leastNow, delay)
	d.meanDecodeSteps += meanWeight * (decodeSteps - d.meanDecodeSteps)
	d.requests++
}

// comparableSteps says whether the two step numbers can be compared: a step had been reported when the request was bound, and the numbers
// did not begin again before its first token.
func comparableSteps(boundAt, first uint32) bool { return boundAt != 0 && int32(first-boundAt) > 0 }

// extraSlots returns how many requests may be sent to a rank beyond its slots: as many of its running requests as probably end within the
// delay of a new request; 0 while too few requests have ended. A request runs for its delay and its decode steps, so the share
// delay/(delay+decode steps) of the running requests ends within one delay.
func (d *handoffDelay) extraSlots(running int) int {
	if d.requests < delayWindow {
		return 0
	}
	delay := float64(d.leastNow)
	if d.requests > delayWindow { // otherwise no window is complete but the present one
		delay = min(delay, float64(d.leastBefore))
	}
	return int(math.Round(float64(running) * delay / (delay + d.meanDecodeSteps)))
}

// prefillDelay learns for how many steps a request that was bound before its prefill gets no token, and for how many steps it then gets
// tokens. Both are means. Requests that were sent beyond the slots may have to wait for a slot, which raises the first mean and so the
// number of requests that are sent ahead. The mean rises too little to keep this number up, so it falls again until no request waits.
type prefillDelay struct {
	requests                        int     // requests that ended
	meanDelaySteps, meanDecodeSteps float64 // mean number of steps without a token, and with tokens
}

// learn learns from a request that has ended, as handoffDelay.learn does.
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

// extraSlots returns how many requests a rank with so many slots may have beyond them, at most a quarter of the number of slots; 0 while
// too few requests have ended. It is the share of their time on the rank in which requests have no token yet and need no slot.
func (d *prefillDelay) extraSlots(slots int) int {
	if d.requests < delayWindow {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*d.meanDelaySteps/(d.meanDelaySteps+d.meanDecodeSteps))))
}

package board

import "math"

// The types of this file learn how many requests a rank may get beyond its slots (ahead.go). A new request gets its first token only some
// steps after it was sent. So as many requests may be sent beyond the slots as end on the rank during these steps: then no slot stays
// empty.

// handoffDelay learns two numbers of steps for requests with a hand-off: the steps from the binding to the first token (the delay), in
// which the KV is copied, and the steps with tokens after that. For the delay it takes the minimum of many requests, because a request that
// waited in the engine's queue has a longer one.
type handoffDelay struct {
	// leastInLastWindow and leastInThisWindow are the least delays, in steps, of the requests in the last complete window of
	// delayWindow requests and in the present one.
	leastInLastWindow, leastInThisWindow int32
	requests                             int     // requests that ended
	meanDecodeSteps                      float64 // mean number of steps in which a request gets tokens
}

const (
	// delayWindow is the number of requests over which a least delay is taken. Before so many have ended, no request is sent ahead.
	delayWindow = 64
	// Each request moves a mean by the share meanWeight of the difference between its own value and the mean.
	meanWeight = 1.0 / 64
)

// learn learns from a request that has ended. boundAt is the number of the step that was reported last before the request was bound. first
// and last are the numbers of the steps that brought its first and its last token.
func (d *handoffDelay) learn(boundAt, first, last uint32) {
	if !comparableSteps(boundAt, first) { // no step had been reported at the binding, or the numbers began anew after it
		return
	}
	delay, decodeSteps := int32(first-boundAt-1), float64(last-first)+1 // the delay is 0 if the very next step brought the first token
	if d.requests == 0 {
		d.meanDecodeSteps = decodeSteps // the first request sets the mean
	}
	if d.requests%delayWindow == 0 { // a new window begins; until there is a second one, extraSlots reads only the present one
		d.leastInLastWindow, d.leastInThisWindow = d.leastInThisWindow, delay
	}
	d.leastInThisWindow = min(d.leastInThisWindow, delay)
	d.meanDecodeSteps += meanWeight * (decodeSteps - d.meanDecodeSteps)
	d.requests++
}

// comparableSteps says whether the delay of a request can be computed from the two step numbers: a step had been reported when the request
// was bound, and the numbers did not begin anew before its first token.
func comparableSteps(boundAt, first uint32) bool { return boundAt != 0 && int32(first-boundAt) > 0 }

// extraSlots returns how many requests may be sent to a rank beyond its slots: as many as probably end on the rank within the delay of a
// new request. The delay is the number of steps in which the KV is copied. The result is 0 while fewer than delayWindow requests have
// ended. A request has its slot for its delay and its decode steps, so the share delay/(delay+decode steps) of the running requests ends
// within one delay.
//
// The delay is the least one of the requests in the present window of delayWindow requests and in the last one. Other requests may have
// longer delays because they waited for a slot.
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

// prefillDelay learns two means for requests that were bound before their prefill: the number of steps without a token (the delay), and the
// number of steps with tokens after that. A request that was sent beyond the slots may also have to wait for a slot. Its longer delay
// raises the mean, and with it the number of requests that are sent ahead. But the mean rises too little to keep this number up, so the
// number falls again until no request waits.
type prefillDelay struct {
	requests                        int     // requests that ended
	meanDelaySteps, meanDecodeSteps float64 // mean number of steps of a request without a token, and with tokens
}

// learn learns from a request that has ended. boundAt is the number of the step that was reported last before the request was bound. first
// and last are the numbers of the steps that brought its first and its last token.
func (d *prefillDelay) learn(boundAt, first, last uint32) {
	if !comparableSteps(boundAt, first) {
		return // the delay of this request is not known
	}
	delay, decodeSteps := float64(first-boundAt-1), float64(last-first)+1 // the delay is 0 if the very next step brought the first token
	weight := meanWeight
	if d.requests == 0 { // the first request sets the means
		weight = 1
	}
	d.meanDelaySteps += weight * (delay - d.meanDelaySteps)
	d.meanDecodeSteps += weight * (decodeSteps - d.meanDecodeSteps)
	d.requests++
}

// extraSlots returns how many requests a rank may have beyond its slots, at most a quarter of the number of slots; 0 while too few requests
// have ended. It is the number of slots times the share of time in which a request has no token yet, and so needs no slot.
func (d *prefillDelay) extraSlots(slots int) int {
	if d.requests < delayWindow {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*d.meanDelaySteps/(d.meanDelaySteps+d.meanDecodeSteps))))
}

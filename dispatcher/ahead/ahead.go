// Package ahead learns how many requests a rank may be sent beyond its slots: as many as will end
// while others are on their way to it.
package ahead

import "math"

// Lag is for how many steps a request that is bound has a slot and gets no token, and for how many
// it gets one. The first is the least of many, for a request that waited in the engine's queue
// says nothing of the way.
type Lag struct {
	least, latest int32 // of the stretch before and of this one
	seen          int
	stay          float64 // steps, in the mean
}

// A stretch is so many requests; before one is over nothing is sent ahead. Each request moves the
// mean stay by stayWeight of the difference.
const (
	stretch    = 64
	stayWeight = 1.0 / 64
)

// Ended learns from a request that was bound when one step was the last that had been told, and
// had its tokens with these.
func (l *Lag) Ended(bound, first, last uint32) {
	if !told(bound, first) {
		return
	}
	steps, stay := int32(first-bound-1), float64(last-first)+1 // with the next step it would lack none
	if l.seen == 0 {
		l.stay = stay
	}
	if l.seen%stretch == 0 {
		l.least, l.latest = l.latest, steps
	}
	l.latest = min(l.latest, steps)
	l.stay += stayWeight * (stay - l.stay)
	l.seen++
}

// told says whether a step had been told when a request was bound, and steps were not numbered anew
// before its first token.
func told(bound, first uint32) bool { return bound != 0 && int32(first-bound) > 0 }

// Slots is how many of the requests that run on a rank will end within the lag.
func (l *Lag) Slots(running int) int {
	if l.seen < stretch {
		return 0
	}
	steps := float64(l.latest)
	if l.seen >= 2*stretch {
		steps = min(steps, float64(l.least))
	}
	return int(math.Round(float64(running) * steps / (steps + l.stay)))
}

// Lead is for how many steps a request that was bound before its prefill gets no token, and for how
// many it gets one, both in the mean. Where too many are sent beyond the slots they wait for one, and
// the first is longer, but by less than what has sent them: the number settles where nobody waits.
type Lead struct {
	seen        int
	steps, stay float64
}

// Ended learns from a request as Lag does.
func (l *Lead) Ended(bound, first, last uint32) {
	if !told(bound, first) {
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

// Slots is how many requests a rank with so many slots may have beyond these, a quarter of them at
// most.
func (l *Lead) Slots(slots int) int {
	if l.seen < stretch {
		return 0
	}
	return min(slots/4, int(math.Round(float64(slots)*l.steps/(l.steps+l.stay))))
}

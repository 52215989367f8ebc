package policy

import (
	"math"
	"slices"
)

// Reservations are the forwards to one peer that its probes have not counted
// yet. Without them all that arrive between two probes would go to the peer
// that looked best in the first.
type Reservations struct {
	forwards []forward
}

type forward struct {
	number    uint64
	writtenAt float64 // +Inf: it is not yet
	tokens    float64
}

// Booked counts a request that is not written yet, by its number.
func (r *Reservations) Booked(number uint64, tokens float64) {
	r.forwards = append(r.forwards, forward{number, math.Inf(1), tokens})
}

// Written says that a booked request is written now, so that the next probe
// counts it.
func (r *Reservations) Written(number uint64, nowAt float64) {
	for i := range r.forwards {
		if f := &r.forwards[i]; f.number == number && math.IsInf(f.writtenAt, 1) {
			f.writtenAt = nowAt
		}
	}
}

// Withdrawn drops a booked request that will not be written any more.
func (r *Reservations) Withdrawn(number uint64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.number == number && math.IsInf(f.writtenAt, 1) })
}

// Answered takes the answer of a probe: what was written before the probe was
// sent is in it.
func (r *Reservations) Answered(sentAt float64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.writtenAt < sentAt })
}

// Expire drops what has waited two probe intervals for an answer, and the round trip that an answer takes.
func (r *Reservations) Expire(nowAt, intervalMs, rttMs float64) {
	r.Answered(nowAt - 2*intervalMs - rttMs)
}

// Forget drops all: the peer is another process.
func (r *Reservations) Forget() { r.forwards = r.forwards[:0] }

// Reserved is how many, and their new tokens.
func (r *Reservations) Reserved() (n int, tokens float64) {
	for i := range r.forwards {
		tokens += r.forwards[i].tokens
	}
	return len(r.forwards), tokens
}

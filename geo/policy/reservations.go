package policy

import (
	"math"
	"slices"
)

// Reservations are the forwards to one peer that its probes have not counted
// yet. Without them, all requests that arrive between two probes would go to the peer
// that looked best in the first probe.
type Reservations struct {
	forwards []forward
}

type forward struct {
	number    uint64
	writtenAt float64 // +Inf: not written yet
	tokens    float64
}

// Booked adds a request that is not written yet, with its number and its new tokens.
func (r *Reservations) Booked(number uint64, tokens float64) {
	r.forwards = append(r.forwards, forward{number, math.Inf(1), tokens})
}

// Written records that a booked request was written now, so that the next probe
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

// Answered drops the forwards that the answer to a probe counts: those that were written before the
// probe was sent.
func (r *Reservations) Answered(sentAt float64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.writtenAt < sentAt })
}

// Expire drops the forwards for which no probe was answered in two probe intervals and a round trip.
func (r *Reservations) Expire(nowAt, intervalMs, rttMs float64) {
	r.Answered(nowAt - 2*intervalMs - rttMs)
}

// Forget drops all forwards, because the peer is another process now.
func (r *Reservations) Forget() { r.forwards = r.forwards[:0] }

// Reserved is how many forwards are reserved, and the sum of their new tokens.
func (r *Reservations) Reserved() (n int, tokens float64) {
	for i := range r.forwards {
		tokens += r.forwards[i].tokens
	}
	return len(r.forwards), tokens
}

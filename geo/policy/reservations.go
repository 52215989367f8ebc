package policy

import (
	"math"
	"slices"
)

// Reservations are the forwards to one peer that its answers to probes do not count yet. Without them, all requests between
// two probes would go to the peer that looked best at the first of these probes.
type Reservations struct {
	forwards []forward
}

type forward struct {
	number    uint64
	writtenAt float64 // when the request was written to the peer; +Inf: not yet
	tokens    float64 // tokens of the prompt that are probably not cached at the peer
}

// Book adds a forward that is not written to the peer yet. tokens is the number of tokens that the peer will have to prefill for it.
func (r *Reservations) Book(number uint64, tokens float64) {
	r.forwards = append(r.forwards, forward{number, math.Inf(1), tokens})
}

// MarkWritten records that a booked forward is written to the peer now. A probe that is sent later counts it.
func (r *Reservations) MarkWritten(number uint64, nowAt float64) {
	for i := range r.forwards {
		if f := &r.forwards[i]; f.number == number && math.IsInf(f.writtenAt, 1) {
			f.writtenAt = nowAt
		}
	}
}

// Withdraw drops a booked forward that will not be written to the peer.
func (r *Reservations) Withdraw(number uint64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.number == number && math.IsInf(f.writtenAt, 1) })
}

// DropCounted drops the forwards that the answer to a probe counts: all that were written before sentAt, when the probe was
// sent.
func (r *Reservations) DropCounted(sentAt float64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.writtenAt < sentAt })
}

// Expire drops the forwards for which no probe was answered in two probe intervals and a round trip.
func (r *Reservations) Expire(nowAt, intervalMs, rttMs float64) {
	r.DropCounted(nowAt - 2*intervalMs - rttMs)
}

// Clear drops all forwards, because the peer has restarted.
func (r *Reservations) Clear() { r.forwards = r.forwards[:0] }

// Reserved returns the number of forwards and the sum of their new tokens.
func (r *Reservations) Reserved() (n int, tokens float64) {
	for i := range r.forwards {
		tokens += r.forwards[i].tokens
	}
	return len(r.forwards), tokens
}

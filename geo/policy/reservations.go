package policy

import (
	"math"
	"slices"
)

// Reservations are the forwards to one peer that its answers to probes do not count yet. Without
// them, all requests between two probes would go to the peer that looked best at the first.
type Reservations struct {
	forwards []forward
}

type forward struct {
	number    uint64
	writtenAt float64 // to the peer; +Inf: not yet
	tokens    float64 // of the prompt, probably not cached there
}

// Book adds a forward that is not written yet.
func (r *Reservations) Book(number uint64, tokens float64) {
	r.forwards = append(r.forwards, forward{number, math.Inf(1), tokens})
}

// MarkWritten records a write: a probe that is sent later counts the forward.
func (r *Reservations) MarkWritten(number uint64, nowAt float64) {
	for i := range r.forwards {
		if f := &r.forwards[i]; f.number == number && math.IsInf(f.writtenAt, 1) {
			f.writtenAt = nowAt
		}
	}
}

// Withdraw drops a forward that will not be written.
func (r *Reservations) Withdraw(number uint64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.number == number && math.IsInf(f.writtenAt, 1) })
}

// DropCounted drops the forwards that were written before the answered probe was sent.
func (r *Reservations) DropCounted(sentAt float64) {
	r.forwards = slices.DeleteFunc(r.forwards, func(f forward) bool { return f.writtenAt < sentAt })
}

// Expire drops forwards if no probe was answered in two intervals and a round trip.
func (r *Reservations) Expire(nowAt, intervalMs, rttMs float64) {
	r.DropCounted(nowAt - 2*intervalMs - rttMs)
}

// Clear is for a peer that has restarted.
func (r *Reservations) Clear() { r.forwards = r.forwards[:0] }

// Reserved sums up the forwards and their new tokens.
func (r *Reservations) Reserved() (n int, tokens float64) {
	for i := range r.forwards {
		tokens += r.forwards[i].tokens
	}
	return len(r.forwards), tokens
}

package policy

// Reservations are the forwards to one peer that its probes have not counted
// yet. Without them all that arrive between two probes would go to the peer
// that looked best in the first (geo R10).
type Reservations struct {
	forwards []forward // by the time they were written
}

type forward struct {
	writtenAt float64
	tokens    float64
}

// Forwarded counts a request with so many new tokens, written now.
func (r *Reservations) Forwarded(nowAt, tokens float64) {
	r.forwards = append(r.forwards, forward{nowAt, tokens})
}

// Answered takes the answer of a probe: what was written before the probe was
// sent is in it.
func (r *Reservations) Answered(sentAt float64) { r.drop(sentAt) }

// Expire drops what has waited two probe intervals for an answer.
func (r *Reservations) Expire(nowAt, intervalMs float64) { r.drop(nowAt - 2*intervalMs) }

func (r *Reservations) drop(before float64) {
	n := 0
	for n < len(r.forwards) && r.forwards[n].writtenAt < before {
		n++
	}
	r.forwards = append(r.forwards[:0], r.forwards[n:]...)
}

// Forget drops all: the peer is another process (geo R11).
func (r *Reservations) Forget() { r.forwards = r.forwards[:0] }

// Reserved is how many, and their new tokens.
func (r *Reservations) Reserved() (n int, tokens float64) {
	for i := range r.forwards {
		tokens += r.forwards[i].tokens
	}
	return len(r.forwards), tokens
}

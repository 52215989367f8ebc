package predictor

import "slices"

// Live keeps a bounded sample of the predictions that a dispatcher has really used, with their
// outcomes. It is not safe for concurrent use: the board owns it.
//
// For each running request, one prediction at a time waits for its outcome. It is known when the
// request ends, or has got more tokens than the horizon. Thereby a long request gives one outcome
// for each horizon.
type Live struct {
	horizon int32     // length of the predictions' horizon, in decode steps
	waiting []awaited // by slot: the prediction whose outcome is not known yet
	rows    []Row     // the last predictions whose outcomes are known, as a ring
	next    int       // index of the oldest row, when the ring is full
	lost    uint64    // predictions that were cut off before their outcomes were known
}

type awaited struct {
	id      uint64 // ID of the request: another one may have the slot by now
	age     int32  // tokens that the request had when the prediction was made
	pending bool   // false: no prediction waits in this slot
	Prediction
}

// NewLive keeps at most rows predictions over a horizon in steps.
func NewLive(horizon, rows int) *Live {
	return &Live{horizon: int32(horizon), rows: make([]Row, 0, max(rows, 1))}
}

// Used records that a prediction was used. It leaves out a new one while an earlier one waits. It
// allocates only for a slot with a higher number than all before.
func (l *Live) Used(slot int32, id uint64, age int32, p Prediction) {
	if missing := int(slot) + 1 - len(l.waiting); missing > 0 {
		l.waiting = append(l.waiting, make([]awaited, missing)...)
	}
	w := &l.waiting[slot]
	if w.pending && w.id == id {
		if age-w.age <= l.horizon { // the request may still end within the horizon of the earlier prediction
			return
		}
		l.resolve(w, age) // the request did not end within that horizon
	}
	// If a prediction about another request still waits here, that one left without a report of its
	// end, and its outcome will never be known.
	*w = awaited{id: id, age: age, pending: true, Prediction: p}
}

// Finished records that a request has ended by itself. output is the number of tokens of its whole
// answer.
func (l *Live) Finished(slot int32, id uint64, output int32) {
	if w := l.pendingFor(slot, id); w != nil {
		l.resolve(w, output)
	}
}

// Censored records that the request was cut off at an age. Beyond the horizon, the outcome is
// known: the request did not end within it. Otherwise the prediction is left out.
func (l *Live) Censored(slot int32, id uint64, age int32) {
	w := l.pendingFor(slot, id)
	if w == nil {
		return
	}
	if age-w.age > l.horizon {
		l.resolve(w, age)
		return
	}
	w.pending = false
	l.lost++
}

func (l *Live) pendingFor(slot int32, id uint64) *awaited {
	isInRange := slot >= 0 && int(slot) < len(l.waiting)
	if !isInRange || !l.waiting[slot].pending || l.waiting[slot].id != id { // with another id, it is about an earlier request
		return nil
	}
	return &l.waiting[slot]
}

// resolve adds a prediction with its outcome. tokens is how many the request has got, as far as
// known.
func (l *Live) resolve(w *awaited, tokens int32) {
	w.pending = false
	sincePrediction := tokens - w.age
	r := Row{P: w.P, Mu: w.Mu, Remaining: float64(sincePrediction), Ended: sincePrediction <= l.horizon}
	if len(l.rows) < cap(l.rows) {
		l.rows = append(l.rows, r)
		return
	}
	l.rows[l.next] = r // the ring is full, so the oldest row goes
	l.next = (l.next + 1) % len(l.rows)
}

// Rows returns a copy, which another goroutine may score. Remaining is exact if Ended is true, and
// otherwise a lower bound.
func (l *Live) Rows() []Row { return slices.Clone(l.rows) }

// Lost returns how many predictions were cut off before their outcomes were known.
func (l *Live) Lost() uint64 { return l.lost }

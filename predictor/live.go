package predictor

import "slices"

// Live keeps a bounded sample of the predictions that a dispatcher really used, with the outcome of each, so
// that they can be scored. It is not for concurrent use; the board owns it.
//
// Of each running request one prediction at a time is awaited. It resolves
// when the request ends or has outlived the horizon, and the next one used
// takes its place, so long requests count once a horizon.
type Live struct {
	horizon int32
	waiting []awaited // by slot
	rows    []Row     // ring of the latest resolved
	next    int
	lost    uint64
}

type awaited struct {
	id      uint64 // of the request; its slot may have changed hands
	age     int32  // at which the prediction was made
	pending bool
	Prediction
}

// NewLive keeps the last rows outcomes of predictions over a horizon.
func NewLive(horizon, rows int) *Live {
	return &Live{horizon: int32(horizon), rows: make([]Row, 0, max(rows, 1))}
}

// Used notes a prediction about the request in a slot at its present age. It
// allocates only when slots beyond all earlier ones come up.
func (l *Live) Used(slot int32, id uint64, age int32, p Prediction) {
	if missing := int(slot) + 1 - len(l.waiting); missing > 0 {
		l.waiting = append(l.waiting, make([]awaited, missing)...)
	}
	w := &l.waiting[slot]
	if w.pending && w.id == id {
		if age-w.age <= l.horizon { // it may still end inside
			return
		}
		l.resolve(w, age)
	}
	*w = awaited{id: id, age: age, pending: true, Prediction: p}
}

// Finished tells that the request in a slot ended by itself, with output
// tokens generated for the client in all.
func (l *Live) Finished(slot int32, id uint64, output int32) {
	if w := l.awaits(slot, id); w != nil {
		l.resolve(w, output)
	}
}

// Censored tells that the request in a slot was cut off at an age. What had
// outlived the horizon by then is known not to have ended in it; anything else
// is not known and left out.
func (l *Live) Censored(slot int32, id uint64, age int32) {
	w := l.awaits(slot, id)
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

// awaits returns the prediction about a request in a slot whose outcome is awaited; nil: there is none.
func (l *Live) awaits(slot int32, id uint64) *awaited {
	if slot < 0 || int(slot) >= len(l.waiting) || !l.waiting[slot].pending || l.waiting[slot].id != id {
		return nil
	}
	return &l.waiting[slot]
}

// resolve books what came of a prediction, given the tokens known to have been generated.
func (l *Live) resolve(w *awaited, tokens int32) {
	w.pending = false
	remaining := tokens - w.age
	r := Row{P: w.P, Mu: w.Mu, Remaining: float64(remaining), Ended: remaining <= l.horizon}
	if len(l.rows) < cap(l.rows) {
		l.rows = append(l.rows, r)
		return
	}
	l.rows[l.next] = r
	l.next = (l.next + 1) % len(l.rows)
}

// Rows returns a copy of the sample, for Score off the board's goroutine.
// Remaining is exact where Ended, else a lower bound.
func (l *Live) Rows() []Row { return slices.Clone(l.rows) }

// Lost counts predictions whose request was cut off before the outcome was known.
func (l *Live) Lost() uint64 { return l.lost }

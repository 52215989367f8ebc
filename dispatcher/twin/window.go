package twin

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Window is stretches that follow each other, and the boards as they were at the end.
type Window struct {
	Stretches []*Stretch
	End       *board.Boards
}

// From is the beginning.
func (w *Window) From() time.Time { return w.Stretches[0].From }

// Inside is how many requests of a model were on ranks or waited for one in the measured part, in the mean.
func (w *Window) Inside(model string) float64 {
	from := w.Measured()
	n := len(from.Boards.Waiting(model))
	for range from.Boards.Charges(model) {
		n++
	}
	begun, at, area, measured := from.From, time.Duration(0), 0.0, false
	step := func(now time.Duration, by int) {
		area += float64(n) * ms(now-at)
		at, n = now, n+by
	}
	ids := map[uint64]bool{}
	for c := range from.Boards.Charges(model) {
		ids[c.ID] = true
	}
	for _, e := range from.Boards.Waiting(model) {
		ids[e.ID] = true
	}
	for _, s := range w.Stretches {
		if measured = measured || s == from; !measured {
			continue
		}
		later, i, k := s.From.Sub(begun), 0, 0
		for i < len(s.came) || k < len(s.left) {
			if k == len(s.left) || i < len(s.came) && s.came[i].at <= s.left[k].at {
				if c := &s.came[i]; c.model == model {
					ids[c.id] = true
					step(c.at+later, 1)
				}
				i++
				continue
			}
			if l := &s.left[k]; ids[l.id] {
				delete(ids, l.id)
				step(l.at+later, -1)
			}
			k++
		}
	}
	lasts := w.To().Sub(begun)
	if lasts <= 0 {
		return 0
	}
	step(lasts, 0)
	return area / ms(lasts)
}

// of is the part of the window in which a model had all the barrier groups that it has at the end, each the same
// all the time; nil: there is none.
func (w *Window) of(model string) *Window {
	last, _ := w.End.Groups(model)
	begin, next := 0, last
	for i := len(w.Stretches) - 1; i >= 0 && begin == 0; i-- {
		there, _ := w.Stretches[i].Boards.Groups(model)
		for _, v := range last {
			from, to := viewOf(there, v.Key), viewOf(next, v.Key)
			if from == nil || to == nil || to.Steps < from.Steps || to.Seconds < from.Seconds { // it is another since, under the same name
				begin = i + 1
			}
		}
		next = there
	}
	if len(last) == 0 || begin == len(w.Stretches) {
		return nil
	}
	return &Window{Stretches: w.Stretches[begin:], End: w.End}
}

func viewOf(all []board.GroupView, key board.GroupKey) *board.GroupView {
	if i := slices.IndexFunc(all, func(v board.GroupView) bool { return v.Key == key }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Measured is the first stretch that is measured. A fifth of the window before it is only run in: what
// another policy would have sent elsewhere is on the ranks until it ends.
func (w *Window) Measured() *Stretch {
	for _, s := range w.Stretches {
		if 5*s.From.Sub(w.From()) >= w.To().Sub(w.From()) {
			return s
		}
	}
	return w.Stretches[0]
}

// To is the end.
func (w *Window) To() time.Time { return w.Stretches[len(w.Stretches)-1].To }

// arrivals are the requests of a model in the order in which they came, on one time.
type arrivals struct {
	stretches []*Stretch // the rest of them
	from      time.Time
	model     string
	at        int // in the first
}

// skip goes on to the next request of the model.
func (a *arrivals) skip() {
	for len(a.stretches) > 0 {
		for all := a.stretches[0].came; a.at < len(all); a.at++ {
			if all[a.at].model == a.model {
				return
			}
		}
		a.stretches, a.at = a.stretches[1:], 0
	}
}

// due is when the next one comes, in ms.
func (a *arrivals) due() (at float64, more bool) {
	if len(a.stretches) == 0 {
		return 0, false
	}
	s := a.stretches[0]
	return ms(s.came[a.at].at + s.From.Sub(a.from)), true
}

// take is the next one.
func (a *arrivals) take() came {
	s := a.stretches[0]
	c, later := s.came[a.at], s.From.Sub(a.from)
	c.at, c.arrival, c.entered = c.at+later, c.arrival+later, c.entered+later
	if c.deadline != 0 {
		c.deadline += later
	}
	a.at++
	a.skip()
	return c
}

package twin

import (
	"cmp"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Window is stretches that follow each other, and the boards as they were at the end.
type Window struct {
	Stretches []*Stretch
	End       *board.Boards
	Heard     time.Time // traffic before this time is in the hours of the account already
	Begun     []*Begun  // states with which replays under other policies may begin
	Lag       int32     // steps from a bind to the first token, used if the window shows none; 0: not known either

	learned map[string]*fates // by model
}

// fates returns what became of a model's requests. It is learned once for all replays of the window.
func (w *Window) fates(model string) *fates {
	if w.learned[model] == nil {
		if w.learned == nil {
			w.learned = map[string]*fates{}
		}
		w.learned[model] = w.learnFates(model)
	}
	return w.learned[model]
}

// From returns when the window begins.
func (w *Window) From() time.Time { return w.Stretches[0].From }

// each calls comes for each arrival of a model, and leaves for each request that left, also of other models, in the order in which they
// happened. The time that leaves gets is since the window began.
func (w *Window) each(model string, comes func(*came), leaves func(time.Duration, *left)) {
	for _, s := range w.Stretches {
		offset, i, k := s.From.Sub(w.From()), 0, 0
		for i < len(s.came) || k < len(s.left) {
			if k == len(s.left) || i < len(s.came) && s.came[i].at <= s.left[k].at {
				if c := &s.came[i]; c.model == model {
					comes(c)
				}
				i++
				continue
			}
			leaves(s.left[k].at+offset, &s.left[k])
			k++
		}
	}
}

// partWithAllGroups returns the part of the window in which a model already had all the barrier groups that it has at the end, without a
// group being removed and added again; nil: there is no such part.
func (w *Window) partWithAllGroups(model string) *Window {
	last, _ := w.End.Groups(model)
	begin, next := 0, last
	for i := len(w.Stretches) - 1; i >= 0 && begin == 0; i-- {
		groups, _ := w.Stretches[i].Boards.Groups(model)
		for _, v := range last {
			from, to := viewOf(groups, v.Key), viewOf(next, v.Key)
			if from == nil || to == nil || to.Steps < from.Steps || to.Seconds < from.Seconds { // the group was missing, or removed and added anew
				begin = i + 1
			}
		}
		next = groups
	}
	if len(last) == 0 || begin == len(w.Stretches) {
		return nil
	}
	return &Window{Stretches: w.Stretches[begin:], End: w.End}
}

// groupsSince returns the groups of a model at the first moment that is not before either of the two times.
func (w *Window) groupsSince(accounted, measured time.Time, model string) []board.GroupView {
	for _, s := range w.Stretches {
		if !s.From.Before(accounted) && !s.From.Before(measured) {
			groups, _ := s.Boards.Groups(model)
			return groups
		}
	}
	return nil
}

// viewOf returns the view of the group with a key; nil: the group is not there.
func viewOf(all []board.GroupView, key board.GroupKey) *board.GroupView {
	if i := slices.IndexFunc(all, func(v board.GroupView) bool { return v.Key == key }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Measured returns the first stretch that is measured. The fifth of the window before it is not measured: until they end, the ranks
// hold requests that another policy would have sent elsewhere.
func (w *Window) Measured() *Stretch {
	for _, s := range w.Stretches {
		if 5*s.From.Sub(w.From()) >= w.To().Sub(w.From()) {
			return s
		}
	}
	return w.Stretches[0]
}

// settled says whether a stretch begins in the first 70 % of the window. In the rest, many answers run whose lengths are not
// known yet.
func (w *Window) settled(s *Stretch) bool { return 10*s.From.Sub(w.From()) <= 7*w.To().Sub(w.From()) }

// fresh returns the part of the window that is measured and settled, and is not in the hours of the account yet.
func (w *Window) fresh() (from, to time.Time) {
	if from = w.Measured().From; from.Before(w.Heard) {
		from = w.Heard
	}
	for _, s := range w.Stretches {
		if w.settled(s) {
			to = s.From
		}
	}
	return from, to
}

// To returns when the window ends.
func (w *Window) To() time.Time { return w.Stretches[len(w.Stretches)-1].To }

// arrivals are the requests of a model in the order in which they came, with times since the window began.
type arrivals struct {
	stretches []*Stretch     // the stretches that still have arrivals to read; the next arrival is in the first one
	from      time.Time      // when the window began
	model     string         // arrivals of other models are skipped
	skipped   map[*came]bool // arrivals to skip
	at        int            // index of the next arrival in the first stretch
}

// skip goes on to the next request of the model.
func (a *arrivals) skip() {
	for len(a.stretches) > 0 {
		for all := a.stretches[0].came; a.at < len(all); a.at++ {
			if c := &all[a.at]; c.model == a.model && !a.skipped[c] {
				return
			}
		}
		a.stretches, a.at = a.stretches[1:], 0
	}
}

// due returns when the next request comes, in ms since the window began.
func (a *arrivals) due() (at float64, more bool) {
	if len(a.stretches) == 0 {
		return 0, false
	}
	s := a.stretches[0]
	return ms(s.came[a.at].at + s.From.Sub(a.from)), true
}

// take returns the next request and goes on.
func (a *arrivals) take() came {
	s := a.stretches[0]
	c, offset := s.came[a.at], s.From.Sub(a.from)
	c.at, c.arrival, c.entered = c.at+offset, c.arrival+offset, c.entered+offset
	if c.deadline != 0 {
		c.deadline += offset
	}
	a.at++
	a.skip()
	return c
}

// learnFates collects what became of a model's requests.
func (w *Window) learnFates(model string) *fates {
	n := 0
	for _, s := range w.Stretches {
		n += len(s.came)
	}
	l := &learner{fates: &fates{answers: make([]answer, 0, n), at: make(map[uint64]int32, n), again: map[*came]bool{}},
		failed: map[failed]int32{}}
	begin := w.Stretches[0].Boards
	for _, c := range begin.Charges(model) {
		l.add(c.ID, answer{key: c.Key, age: c.Age + c.Generated, first: c.Age})
	}
	for _, e := range begin.Waiting(model) {
		l.add(e.ID, answer{key: e.Key, age: int32(e.Age), first: int32(e.Age)})
	}
	w.each(model, l.comes, l.leaves)
	for _, c := range w.End.Charges(model) {
		if a := l.of(c.ID); a != nil {
			a.tokens = c.Age + c.Generated
		}
	}
	l.lengths = learnLengths(len(l.answers), func(yield func(seen) bool) {
		for i := range l.answers {
			if a := &l.answers[i]; a.tokens >= 0 && !yield(seen{a.age, a.tokens, a.left >= 0}) {
				return
			}
		}
	})
	if l.lag = cmp.Or(w.Lag, usualLag); len(l.lags) > 0 {
		slices.Sort(l.lags)
		l.lag = l.lags[len(l.lags)/2]
	}
	return l.fates
}

// Span is the longest window that is replayed.
const Span = 5 * time.Minute

// Begun is the state of a replay under another policy at a moment. The replay of a later window begins with it, as if that
// policy had been in force all along. If a replay began with the real boards, it would first have to work off requests that piled up
// under the policy in force, or it would lack requests that pile up under the other policy, and that for longer than a window
// lasts.
type Begun struct {
	spec   string
	at     time.Time
	boards *board.Boards
	rest   map[uint64]int32 // by ID: tokens that requests still get
}

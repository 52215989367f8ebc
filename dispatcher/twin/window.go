package twin

import (
	"cmp"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Window is the traffic of the last minutes, which is replayed: consecutive segments without gaps between them.
type Window struct {
	Segments          []*Segment
	End               *board.Boards // the boards at the end of the last segment
	HoursUntil        time.Time     // traffic before this time is already counted in the account's hours
	Checkpoints       []*Checkpoint // states of earlier replays, from which replays under other policies may begin
	StepsToFirstToken int32         // steps from binding to first token, assumed if the window shows none; 0: not known

	histories map[string]*history // by model; filled when first needed
}

// history returns what became of a model's requests. It is computed once, and all replays of the window share it.
func (w *Window) history(model string) *history {
	if w.histories[model] == nil {
		if w.histories == nil {
			w.histories = map[string]*history{}
		}
		w.histories[model] = w.learnHistory(model)
	}
	return w.histories[model]
}

// From returns the time at which the window begins.
func (w *Window) From() time.Time { return w.Segments[0].From }

// eachEvent calls onArrival for each arrival of a model, and onDeparture for each request of any model that left, in the order of time.
// onDeparture also gets the time of the departure since the window began, because departure.at counts from the begin of its segment.
func (w *Window) eachEvent(model string, onArrival func(*arrival), onDeparture func(time.Duration, *departure)) {
	for _, s := range w.Segments {
		offset := s.From.Sub(w.From())
		i, k := 0, 0 // indices of the next arrival and of the next departure
		for i < len(s.arrivals) || k < len(s.departures) {
			arrivalIsNext := k == len(s.departures) || i < len(s.arrivals) && s.arrivals[i].at <= s.departures[k].at
			if arrivalIsNext {
				if a := &s.arrivals[i]; a.model == model {
					onArrival(a)
				}
				i++
				continue
			}
			onDeparture(s.departures[k].at+offset, &s.departures[k])
			k++
		}
	}
}

// partWithAllGroups returns the part of the window, up to its end, in which a model had all the barrier groups that it has at the end. A
// group that was removed and added again counts as new. It returns nil if there is no such part.
func (w *Window) partWithAllGroups(model string) *Window {
	atEnd, _ := w.End.Groups(model)
	begin := w.firstWithGroups(model, atEnd)
	if len(atEnd) == 0 || begin == len(w.Segments) { // the model has no group, or one of them is newer than the last segment
		return nil
	}
	return &Window{Segments: w.Segments[begin:], End: w.End}
}

// firstWithGroups returns the index of the first segment from which on the model had these barrier groups, which it has at the end of the
// window. It goes back from the last segment to one in which a group is missing, or was removed and added again; the next segment is the
// result. The boards of a segment are those at its begin.
func (w *Window) firstWithGroups(model string, atEnd []board.GroupView) int {
	later := atEnd // the groups at the end of segment i
	for i := len(w.Segments) - 1; i >= 0; i-- {
		groups, _ := w.Segments[i].Boards.Groups(model)
		for _, v := range atEnd {
			from, to := viewOf(groups, v.Key), viewOf(later, v.Key) // the group at the begin and at the end of segment i
			missing := from == nil || to == nil
			// If the group was removed and added again, its counters began at 0 again, so they fell.
			if missing || to.Steps < from.Steps || to.Seconds < from.Seconds {
				return i + 1
			}
		}
		later = groups
	}
	return 0
}

// groupsSince returns the groups of a model as they were just before the new steps of this window: the steps that its verdict counts and no
// earlier verdict has counted (Verdict.NewSteps). They begin where a segment begins: the first one that begins neither before the end of
// the last verdict's window (judgedUntil) nor before the measured part of this window (measuredFrom). nil: there is no such segment.
func (w *Window) groupsSince(judgedUntil, measuredFrom time.Time, model string) []board.GroupView {
	for _, s := range w.Segments {
		if !s.From.Before(judgedUntil) && !s.From.Before(measuredFrom) {
			groups, _ := s.Boards.Groups(model)
			return groups
		}
	}
	return nil
}

// viewOf returns the group with this key; nil: the list does not have it.
func viewOf(all []board.GroupView, key board.GroupKey) *board.GroupView {
	if i := slices.IndexFunc(all, func(v board.GroupView) bool { return v.Key == key }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Measured returns the first segment whose steps are measured. The first fifth of the window is not measured: there, the ranks still hold
// requests from before the window, which another policy would have sent to other ranks.
func (w *Window) Measured() *Segment {
	for _, s := range w.Segments {
		if 5*s.From.Sub(w.From()) >= w.To().Sub(w.From()) {
			return s
		}
	}
	return w.Segments[0] // all segments begin in the first fifth, so measure all
}

// lengthsKnown says whether a segment begins in the first 70 % of the window. Later in the window, too many answers still run, so their
// lengths are not known.
func (w *Window) lengthsKnown(s *Segment) bool {
	return 10*s.From.Sub(w.From()) <= 7*w.To().Sub(w.From())
}

// newPart returns the part of the window whose steps may be added to the sums over the last hour (account.hours): it is measured, the
// lengths of most answers are known, and no earlier window has added it. It begins where the measured part begins or, if that is later,
// where the part of the last window ended. The lengths are known at the begin of a segment (lengthsKnown), and maybe not until its end. So
// the part ends at the begin of the last segment with known lengths. If there is no such part, to is not after from.
func (w *Window) newPart() (from, to time.Time) {
	if from = w.Measured().From; from.Before(w.HoursUntil) {
		from = w.HoursUntil // earlier windows have added the steps before
	}
	for _, s := range w.Segments {
		if w.lengthsKnown(s) {
			to = s.From // in the end, the begin of the last such segment
		}
	}
	return from, to
}

// To returns the time at which the window ends.
func (w *Window) To() time.Time { return w.Segments[len(w.Segments)-1].To }

// arrivalQueue yields the requests of a model in the order in which they came, with times since the window began.
type arrivalQueue struct {
	segments []*Segment        // the segments that still have arrivals to read; the next arrival is in the first one
	from     time.Time         // when the window began
	model    string            // arrivals of other models are skipped
	skipped  map[*arrival]bool // resumed requests, which the replay itself makes come back
	index    int               // index of the next arrival in the first segment
}

// skipToNext moves on to the next arrival of the model that is not in skipped.
func (a *arrivalQueue) skipToNext() {
	for len(a.segments) > 0 {
		for all := a.segments[0].arrivals; a.index < len(all); a.index++ {
			if next := &all[a.index]; next.model == a.model && !a.skipped[next] {
				return
			}
		}
		a.segments, a.index = a.segments[1:], 0
	}
}

// nextAt returns when the next request comes, in ms since the window began; more is false if no more requests come.
func (a *arrivalQueue) nextAt() (at float64, more bool) {
	if len(a.segments) == 0 {
		return 0, false
	}
	s := a.segments[0]
	return ms(s.arrivals[a.index].at + s.From.Sub(a.from)), true
}

// next returns the next arrival, with times since the window began, and moves on to the arrival after it.
func (a *arrivalQueue) next() arrival {
	s := a.segments[0]
	next, offset := s.arrivals[a.index], s.From.Sub(a.from)
	next.at, next.received, next.entered = next.at+offset, next.received+offset, next.entered+offset
	if next.deadline != 0 {
		next.deadline += offset
	}
	a.index++
	a.skipToNext()
	return next
}

// learnHistory finds out what became of a model's requests: those on ranks or in the pool when the window begins, and those that come
// later. A request whose rank failed may come back, and then counts as the same request. From all requests, learnHistory learns the lengths
// of answers, and the usual number of steps from the binding of a request to its first token. If no request shows this number, it takes
// that of earlier windows or, if that is 0 (not known), usualStepsToFirstToken.
func (w *Window) learnHistory(model string) *history {
	arrivals := 0 // arrivals of all models, as the capacity of the lists below
	for _, s := range w.Segments {
		arrivals += len(s.arrivals)
	}
	l := &historyLearner{
		history:     &history{answers: make([]answer, 0, arrivals), index: make(map[uint64]int32, arrivals), resumptions: map[*arrival]bool{}},
		mayComeBack: map[failedRequest]int32{},
	}
	// Both calls fill answers and index. The second also fills resumptions, mayComeBack and knownSteps.
	l.addPresent(w.Segments[0].Boards, model)
	w.eachEvent(model, l.recordArrival, l.recordDeparture)
	for _, c := range w.End.Charges(model) { // requests that still run at the end of the window get at least as many tokens as they have now
		if a := l.answerOf(c.ID); a != nil {
			a.tokensLastSeen = c.Age + c.Generated // tokens from earlier ranks, and from this one
		}
	}
	l.lengths = estimateLengths(len(l.answers), l.observations) // observations yields the length of each answer when it was last seen
	l.stepsToFirstToken = cmp.Or(w.StepsToFirstToken, usualStepsToFirstToken)
	if len(l.knownSteps) > 0 {
		slices.Sort(l.knownSteps)
		l.stepsToFirstToken = l.knownSteps[len(l.knownSteps)/2] // the median of the observed steps
	}
	return l.history
}

// addPresent adds the requests of a model that are on ranks or in the pool when the window begins. b has the boards at this time.
func (l *historyLearner) addPresent(b *board.Boards, model string) {
	for _, c := range b.Charges(model) { // Age: tokens from earlier ranks; Generated: tokens from the present one
		l.add(c.ID, answer{key: c.Key, tokensAtStart: c.Age + c.Generated, tokensBeforeFirstRank: c.Age})
	}
	for _, e := range b.Waiting(model) {
		l.add(e.ID, answer{key: e.Key, tokensAtStart: int32(e.Age), tokensBeforeFirstRank: int32(e.Age)})
	}
}

// observations yields, for each answer, its length when it was first and last seen, in tokens. It leaves out requests that left before they
// had a slot.
func (l *historyLearner) observations(yield func(observation) bool) {
	for i := range l.answers {
		a := &l.answers[i]
		if a.tokensLastSeen < 0 { // the request left before it had a slot
			continue
		}
		if !yield(observation{from: a.tokensAtStart, to: a.tokensLastSeen, ended: a.leftAt >= 0}) {
			return
		}
	}
}

// Span is the longest window that is replayed. It is also how much traffic the twin keeps.
const Span = 5 * time.Minute

// Checkpoint is the state, at one time, of a replay under a policy that is not in force. The replay of a later window begins with this
// state, as if the policy had been in force all the time. A replay that began with the real boards would give wrong results for longer than
// a window lasts: it would have requests that pile up only under the policy in force, or lack requests that pile up only under the replayed
// policy.
type Checkpoint struct {
	spec      string // the replayed policy, as configured
	at        time.Time
	boards    *board.Boards
	remaining map[uint64]int32 // by request ID: tokens that the request will still generate
}

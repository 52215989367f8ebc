// Package twin computes how long the steps of the last minutes would have taken under another policy. It records what really happened, and
// replays it from a copy of the real boards: the same requests with their real lengths, on simulated engines. The
// length of a simulated step comes from the step model, which was learned from the real steps.
package twin

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Tape records the events of boards in stretches. Each stretch begins with a copy of the boards.
type Tape struct {
	stretch *Stretch           // the present stretch; nil before the first Cut: nothing is recorded
	workers []board.Worker     // of the last SetWorkers event
	bound   map[string][]bound // by model, and by slot: the requests that have slots
	broken  bool               // settings have changed, so that later events cannot be replayed together with earlier ones
	latest  int                // number of requests in the last stretch, to allocate memory for the next one
}

// bound is a request that has a slot.
type bound struct {
	id    uint64
	step  uint32 // number of the step that was reported last when it was bound; 0: none was
	queue bool   // it may have waited in the engine's queue, so the time of its first token shows no lag
}

// Stretch has the arrivals, departures and changes of ranks from one copy of the boards to the next.
type Stretch struct {
	Boards   *board.Boards // copy of the boards at the time From
	From, To time.Time
	AfterGap bool // it does not begin where the last stretch ended, so the twin drops all earlier stretches

	came  []came
	left  []left
	fleet []fleet
}

// came is a request that came to the boards. Times are since the stretch began.
type came struct {
	at             time.Duration // when it came to the boards
	arrival        time.Duration // when the client's request reached the proxy
	entered        time.Duration // when its prefill was finished
	deadline       time.Duration // when its hand-off expires; 0: never
	id, key        uint64
	model, name    string
	prompt, age    int32
	early, discard bool
	hits           []board.Hit
}

// left is a request that has left the boards.
type left struct {
	at        time.Duration // since the stretch began
	id        uint64
	generated int32 // tokens that were generated on its last rank; below 0: it never had a slot
	lag       int32 // number of steps between its binding and the step of its first token; below 0: not known
	failed    bool  // its engine failed, so the request may come back
}

// fleet is a change of the ranks.
type fleet struct {
	at      time.Duration // when the ranks changed, since the stretch began
	workers []board.Worker
}

// mostOfStretch bounds the requests of a stretch: a stretch that reaches it ends early.
const mostOfStretch = 50_000

// mostFleets bounds how often the ranks change in a stretch: a stretch with so many changes ends early.
const mostFleets = 16

// Due says whether the present stretch should end now: it has lasted for the time every, it has too many events, or the settings have
// changed. It also returns true if there is no stretch yet. The caller then copies the boards and calls Cut.
func (t *Tape) Due(now time.Time, every time.Duration) bool {
	s := t.stretch
	return s == nil || t.broken || now.Sub(s.From) >= every || len(s.came) >= mostOfStretch || len(s.left) >= mostOfStretch ||
		len(s.fleet) >= mostFleets
}

// Cut ends the present stretch, and begins the next one with a copy of the boards. It returns the ended stretch; nil: there was none, or it
// cannot be replayed. It must be called after all events of the time now.
func (t *Tape) Cut(now time.Time, copied *board.Boards) (ended *Stretch) {
	if ended = t.stretch; ended != nil {
		ended.To = now
		t.latest = max(len(ended.came), len(ended.left))
	}
	afterGap := ended == nil || t.broken
	if t.broken { // the settings changed within the stretch
		ended = nil
	}
	room := min(mostOfStretch, t.latest+t.latest/4+16)
	t.stretch = &Stretch{Boards: copied, From: now, AfterGap: afterGap, came: make([]came, 0, room), left: make([]left, 0, room)}
	t.broken = false
	return ended
}

// Record records an event. It must be called before the event is applied to the boards.
func (t *Tape) Record(e board.Event, now time.Time) {
	if t.stretch == nil {
		return
	}
	switch e := e.(type) {
	case *board.Enqueue:
		t.recordArrival(e, now)
	case board.Enqueue:
		t.recordArrival(&e, now)
	case *board.Release:
		t.recordLeave(e, now)
	case board.SetWorkers:
		if !slices.Equal(e.Workers, t.workers) { // most SetWorkers events change nothing
			t.stretch.fleet, t.workers = append(t.stretch.fleet, fleet{now.Sub(t.stretch.From), e.Workers}), e.Workers
		}
	case board.SetPolicy, board.Settings, board.SetFit:
		t.broken = true
	}
}

// recordArrival records a request that comes to the boards, with its times since the stretch began.
func (t *Tape) recordArrival(event *board.Enqueue, now time.Time) {
	s, e := t.stretch, event.Entry
	if e.Mixed { // mixed ranks are not replayed
		return
	}
	c := came{
		at: now.Sub(s.From), id: e.ID, key: e.Key, model: e.Model, name: e.Name, prompt: int32(e.Prompt), age: int32(e.Age),
		early: e.Early, discard: e.Discard, hits: event.Hits,
	}
	since := func(t time.Time, otherwise time.Duration) time.Duration { // otherwise: the value for a time that is not known
		if t.IsZero() {
			return otherwise
		}
		return t.Sub(s.From)
	}
	c.entered = since(e.Entered, c.at)
	c.arrival = since(e.Arrival, c.entered)
	c.deadline = since(e.Deadline, 0)
	s.came = append(s.came, c)
}

// Done records an effect of the boards: which requests got slots, and which were refused. It forgets the slots of a model that is gone. It
// records slots even before the first Cut, because their requests may leave within a stretch.
func (t *Tape) Done(e *board.Effect, now time.Time) {
	switch e.Kind {
	case board.EffectGone:
		delete(t.bound, e.Group.Model)
	case board.EffectBind:
		if e.Entry.Mixed {
			return
		}
		if t.bound == nil {
			t.bound = map[string][]bound{}
		}
		slots := t.bound[e.Group.Model]
		for int(e.Bound.Slot) >= len(slots) {
			slots = append(slots, bound{})
		}
		slots[e.Bound.Slot] = bound{id: e.Entry.ID, step: e.Bound.Step, queue: e.Bound.Full}
		t.bound[e.Group.Model] = slots
	case board.EffectRefuse:
		if t.stretch != nil {
			t.stretch.left = append(t.stretch.left, left{at: now.Sub(t.stretch.From), id: e.Entry.ID, generated: -1, lag: -1})
		}
	}
}

// recordLeave records a request that gives its slot back. Its lag is not known if it may have waited in the engine's queue.
func (t *Tape) recordLeave(e *board.Release, now time.Time) {
	slots := t.bound[e.Model]
	if int(e.Slot) >= len(slots) { // the slot was not recorded, as none of a mixed rank is
		return
	}
	b := slots[e.Slot]
	l := left{at: now.Sub(t.stretch.From), id: b.id, generated: e.Generated, lag: -1, failed: e.Outcome.Kind == board.Failed}
	stepsKnown := e.First != 0 && b.step != 0
	if lag := int32(e.First - b.step - 1); stepsKnown && !b.queue && lag >= 0 {
		l.lag = lag
	}
	t.stretch.left = append(t.stretch.left, l)
}

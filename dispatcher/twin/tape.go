// Package twin computes how long the steps of the last minutes would have taken under another policy. It records what really happened, and
// replays it from a copy of the real boards: the same requests with their real lengths, on simulated engines. The length of a simulated
// step comes from the step model, which was learned from the real steps.
package twin

import (
	"slices"
	"time"

	"evenkeel/dispatcher/board"
)

// Tape records what happens to the boards, in segments. Each segment begins with a copy of the boards, from which it can be replayed.
type Tape struct {
	segment         *Segment           // the segment that is being recorded; nil before the first NextSegment: nothing is recorded
	workers         []board.Worker     // the workers of the last SetWorkers event, to see whether the next one changes anything
	bound           map[string][]bound // requests that hold slots, by model and by slot number
	settingsChanged bool               // settings have changed within the segment, so its events cannot be replayed with one configuration
	lastCount       int                // number of arrivals or of departures in the last segment, whichever is larger
}

// bound records a request that holds a slot, until the slot is given back.
type bound struct {
	id            uint64
	stepAtBinding uint32 // number of the last step that the engine had reported when the request was bound; 0: none was reported
	mayQueue      bool   // the request may wait in the engine's queue, so the steps to its first token do not show how fast it starts
}

// Segment is the traffic between two copies of the boards: arrivals, departures and changes of ranks.
type Segment struct {
	Boards   *board.Boards // boards when the segment began (From)
	From, To time.Time
	AfterGap bool // the segment does not begin where the last one ended, so no replay can span both

	arrivals    []arrival
	departures  []departure
	rankChanges []rankChange
}

// arrival is a request that came to the boards. All times are durations since the segment began.
type arrival struct {
	at             time.Duration // when the request came to the boards
	received       time.Duration // when the client's request reached the proxy
	entered        time.Duration // when the request's prefill was finished
	deadline       time.Duration // when the hand-off (the KV that its prefill engine holds) expires; 0: never
	id, key        uint64
	model, name    string
	prompt         int32
	age            int32 // tokens of the answer that earlier ranks have produced; 0: the answer has not begun
	early, discard bool
	hits           []board.Hit
}

// departure is a request that has left the boards.
type departure struct {
	at                time.Duration // when the request left the boards, since the segment began
	id                uint64
	generated         int32 // tokens that were generated on its last rank; below 0: it had no slot since it came to the boards
	stepsToFirstToken int32 // steps between binding and first token, 0: the first token came in the next step; below 0: not known
	failed            bool  // the request's engine failed, so the request may come back for another rank
}

// rankChange is the list of all workers after a change: a rank came, left, or changed its settings.
type rankChange struct {
	at      time.Duration // when the ranks changed, since the segment began
	workers []board.Worker
}

// maxSegmentRequests bounds the memory of a segment: it ends early when it has so many arrivals or so many departures.
const maxSegmentRequests = 50_000

// maxRankChanges bounds the memory of a segment: it ends early when the ranks have changed so often.
const maxRankChanges = 16

// Due says whether the present segment should end now: it is minLength old, it has too many events, or the settings have changed. It is
// also true if there is no segment yet. The caller then copies the boards and calls NextSegment.
func (t *Tape) Due(now time.Time, minLength time.Duration) bool {
	s := t.segment
	if s == nil || t.settingsChanged || now.Sub(s.From) >= minLength {
		return true
	}
	return max(len(s.arrivals), len(s.departures)) >= maxSegmentRequests || len(s.rankChanges) >= maxRankChanges
}

// NextSegment ends the present segment, and begins the next one with a copy of the boards. It returns the ended segment; nil: there was no
// segment, or it cannot be replayed, because the settings changed in it. Call it after all events of the time now are recorded.
func (t *Tape) NextSegment(now time.Time, copied *board.Boards) (ended *Segment) {
	if ended = t.segment; ended != nil {
		ended.To = now
		t.lastCount = max(len(ended.arrivals), len(ended.departures))
	}
	afterGap := ended == nil || t.settingsChanged
	if t.settingsChanged { // no replay can use the segment: its events happened under two different settings
		ended = nil
	}
	// Traffic changes slowly, so expect about as many requests as in the last segment. A quarter more keeps most slices from growing.
	room := min(maxSegmentRequests, t.lastCount+t.lastCount/4+16)
	t.segment = &Segment{
		Boards: copied, From: now, AfterGap: afterGap, arrivals: make([]arrival, 0, room), departures: make([]departure, 0, room),
	}
	t.settingsChanged = false
	return ended
}

// Record records an event for the replay. It must be called before the event is applied to the boards.
func (t *Tape) Record(e board.Event, now time.Time) {
	if t.segment == nil {
		return
	}
	switch e := e.(type) {
	case *board.Enqueue:
		t.recordArrival(e, now)
	case board.Enqueue:
		t.recordArrival(&e, now)
	case *board.Release:
		t.recordDeparture(e, now)
	case board.SetWorkers:
		if !slices.Equal(e.Workers, t.workers) { // most SetWorkers events change nothing
			t.segment.rankChanges = append(t.segment.rankChanges, rankChange{now.Sub(t.segment.From), e.Workers})
			t.workers = e.Workers
		}
	case board.SetPolicy, board.Settings, board.SetFit: // a segment is replayed with one configuration only
		t.settingsChanged = true
	}
}

// recordArrival records a request that comes to the boards, and converts its times to durations since the segment began.
func (t *Tape) recordArrival(event *board.Enqueue, now time.Time) {
	s, e := t.segment, event.Entry
	if e.Aggregated { // requests for ranks that also prefill are left out, because such ranks cannot be replayed
		return
	}
	a := arrival{
		at: now.Sub(s.From), id: e.ID, key: e.Key, model: e.Model, name: e.Name, prompt: int32(e.Prompt), age: int32(e.Age),
		early: e.Early, discard: e.Discard, hits: event.Hits,
	}
	since := func(t time.Time, otherwise time.Duration) time.Duration { // otherwise is returned if the time is not known
		if t.IsZero() {
			return otherwise
		}
		return t.Sub(s.From)
	}
	a.entered = since(e.Entered, a.at)
	a.received = since(e.Arrival, a.entered)
	a.deadline = since(e.Deadline, 0)
	s.arrivals = append(s.arrivals, a)
}

// RecordEffect records an effect of the boards: which requests got slots, and which were refused. It forgets the slots of a model that is
// gone. It records slots even before the first segment begins, because their requests may leave within a later segment.
func (t *Tape) RecordEffect(e *board.Effect, now time.Time) {
	switch e.Kind {
	case board.EffectGone:
		delete(t.bound, e.Group.Model)
	case board.EffectBind:
		if e.Entry.Aggregated { // requests for ranks that also prefill are left out, because such ranks cannot be replayed
			return
		}
		if t.bound == nil {
			t.bound = map[string][]bound{}
		}
		slots := t.bound[e.Group.Model]
		for int(e.Bound.Slot) >= len(slots) { // the slot number is larger than any before
			slots = append(slots, bound{})
		}
		// Full: the rank had no slot or no KV room for the request.
		slots[e.Bound.Slot] = bound{id: e.Entry.ID, stepAtBinding: e.Bound.Step, mayQueue: e.Bound.Full}
		t.bound[e.Group.Model] = slots
	case board.EffectRefuse:
		if t.segment != nil {
			// A refused request never had a slot, so both numbers are below 0.
			refused := departure{at: now.Sub(t.segment.From), id: e.Entry.ID, generated: -1, stepsToFirstToken: -1}
			t.segment.departures = append(t.segment.departures, refused)
		}
	}
}

// recordDeparture records a request that gives its slot back. If the request may have waited in the engine's queue, the steps to its first
// token count as unknown, because they do not show how fast its KV was pulled.
func (t *Tape) recordDeparture(e *board.Release, now time.Time) {
	slots := t.bound[e.Model]
	if int(e.Slot) >= len(slots) { // only slots on decode ranks are recorded, so this slot is on a rank that also prefills
		return
	}
	b := slots[e.Slot]
	d := departure{
		at: now.Sub(t.segment.From), id: b.id, generated: e.Generated, stepsToFirstToken: -1, failed: e.Outcome.Kind == board.Failed,
	}
	stepsKnown := e.FirstStep != 0 && b.stepAtBinding != 0
	// A first token in the next step counts as 0 steps. Below 0, the numbers are inconsistent.
	if waited := int32(e.FirstStep - b.stepAtBinding - 1); stepsKnown && !b.mayQueue && waited >= 0 {
		d.stepsToFirstToken = waited
	}
	t.segment.departures = append(t.segment.departures, d)
}

// Package virtual has decode engines in virtual time, with the server's own boards in front of them. The simulator
// and the twin use it, so that neither has boards or engines of its own.
package virtual

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
)

// Driver owns boards in virtual time, as the dispatcher's runner does in real time: it applies events
// about one model, and carries out their effects. Rounds take no virtual time, so that a policy always has
// its whole budget. Times are ms since Began.
type Driver struct {
	Boards *board.Boards
	Began  time.Time
	Now    float64 // ms
	Model  string
	Counts board.Counts

	Bound     func(e *board.Effect)
	Refused   func(e *board.Effect)
	Other     func(e *board.Effect) // gets all effects but EffectBind, EffectRefuse and EffectRest
	OnDecided func(ms float64)      // called after an event was applied and its rounds were decided
	Timed     func(round func())    // runs a round and measures its time; nil: rounds are not measured

	// For recorders; nil: nothing is recorded.
	OnEvent  func(e board.Event, now time.Time)   // before it is applied to the boards
	OnEffect func(e *board.Effect, now time.Time) // before it is carried out

	tick    board.Tick
	decided board.Decided
	stopped map[string]bool // names of groups in which no request decodes any more, so that the length of their next step is not known
}

// NewDriver returns a driver of the boards for one model.
func NewDriver(b *board.Boards, began time.Time, model string) *Driver {
	return &Driver{
		Boards: b, Began: began, Model: model, Counts: board.Counts{Model: model}, tick: board.Tick{Model: model}, stopped: map[string]bool{},
		Other: func(*board.Effect) {}, OnDecided: func(float64) {},
	}
}

// Instant returns the time that is so many ms after Began.
func (d *Driver) Instant(ms float64) time.Time {
	return d.Began.Add(time.Duration(math.Round(ms * float64(time.Millisecond))))
}

// Apply gives the boards an event, and runs the rounds that follow from it.
func (d *Driver) Apply(e board.Event, ms float64) {
	now := d.Instant(ms)
	if d.OnEvent != nil {
		d.OnEvent(e, now)
	}
	d.carryOut(d.Boards.Apply(e, now), now)
	for d.Boards.Deciding() {
		var effects []board.Effect
		round := func() { effects = d.Boards.Apply(board.Decide{}, now) }
		if d.Timed != nil {
			d.Timed(round)
		} else {
			round()
		}
		d.carryOut(effects, now)
		d.carryOut(d.Boards.Apply(&d.decided, now), now)
	}
	d.OnDecided(ms)
}

// Look applies a Tick, with Counts before it if the tick needs them.
func (d *Driver) Look(ms float64) {
	if d.Boards.Looks(d.Model, d.Instant(ms)) {
		d.Count(ms)
	}
	d.Apply(&d.tick, ms)
}

// Next returns when the boards need a Tick even if nothing happens.
func (d *Driver) Next() float64 {
	if at := d.Boards.Next(); !at.IsZero() {
		return float64(at.Sub(d.Began)) / float64(time.Millisecond)
	}
	return Never
}

// Never is a time that never comes.
var Never = math.Inf(1)

// Count applies the Counts, which hold for the next event.
func (d *Driver) Count(ms float64) { d.Boards.Apply(&d.Counts, d.Instant(ms)) }

func (d *Driver) carryOut(effects []board.Effect, now time.Time) {
	for i := range effects {
		if d.OnEffect != nil {
			d.OnEffect(&effects[i], now)
		}
		switch e := &effects[i]; e.Kind {
		case board.EffectBind:
			d.seat(e.Bound.Slot)
			d.Bound(e)
		case board.EffectRefuse:
			d.Refused(e)
		case board.EffectRest:
			d.stopped[e.Group.Name] = true
		default:
			d.Other(e)
		}
	}
}

// StepCounter counts the steps of a group as its streams would report them: Number is the present step, and Since is when it was
// reported, in ms; NaN: nothing ran before.
type StepCounter struct {
	Key    board.GroupKey
	Number uint32
	Since  float64
	steps  board.Steps
}

func newStepCounter(key board.GroupKey) StepCounter {
	return StepCounter{Key: key, Number: 1, Since: math.NaN(), steps: board.Steps{Group: key}}
}

// heard gives the boards a step of a group.
func (d *Driver) heard(p *StepCounter, now float64) {
	if d.stopped[p.Key.Name] {
		delete(d.stopped, p.Key.Name)
		p.Since = math.NaN()
	}
	told := board.Step{Number: p.Number}
	if !math.IsNaN(p.Since) {
		told.Length = time.Duration(math.Round((now - p.Since) * float64(time.Millisecond)))
	}
	p.Since = now
	p.steps.List = append(p.steps.List[:0], told)
	d.Count(now)
	d.Apply(&p.steps, now)
}

// seat sets the counts of a slot to zero, and makes room for them.
func (d *Driver) seat(slot int32) {
	c := &d.Counts
	for int(slot) >= len(c.Tokens) {
		c.Tokens, c.Began, c.Joined = append(c.Tokens, 0), append(c.Began, false), append(c.Joined, 0)
	}
	c.Tokens[slot], c.Began[slot], c.Joined[slot] = 0, false, 0
}

// progress sets the counts of a slot: how many tokens its stream has brought, and which step brought the first.
func (d *Driver) progress(slot, seen int32, first uint32) {
	d.Counts.Tokens[slot], d.Counts.Began[slot], d.Counts.Joined[slot] = seen, true, first
}

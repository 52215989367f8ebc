// Package virtual has simulated decode engines in virtual time, with the same boards in front of them as in the server. The simulator and
// the twin share it.
package virtual

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
)

// Driver owns boards in virtual time, as the dispatcher's scheduler does in real time: it applies events of one model, and carries out
// their effects. Rounds take no virtual time, so a policy never loses a part of its budget of evaluations. Times are ms since Began.
type Driver struct {
	Boards *board.Boards
	Began  time.Time
	Now    float64 // present time, in ms since Began
	Model  string
	Counts board.Counts // progress of the requests on the ranks, which Count applies

	OnBind        func(e *board.Effect) // gets each EffectBind
	OnRefuse      func(e *board.Effect) // gets each EffectRefuse
	OnOtherEffect func(e *board.Effect) // gets all effects but EffectBind, EffectRefuse and EffectGroupIdle
	OnDecided     func(ms float64)      // called after an event was applied and its rounds were decided
	Timed         func(round func())    // must call round, and may measure its time; nil: rounds are not measured

	// Functions for recorders; nil: nothing is recorded.
	OnEvent  func(e board.Event, now time.Time)   // called before an event is applied to the boards
	OnEffect func(e *board.Effect, now time.Time) // called before an effect is carried out

	tick       board.Tick
	decided    board.Decided
	idleGroups map[string]bool // names of groups in which no request decodes any more, so that the length of their next step is not known
}

// NewDriver returns a driver of the boards for one model.
func NewDriver(b *board.Boards, began time.Time, model string) *Driver {
	return &Driver{
		Boards: b, Began: began, Model: model, Counts: board.Counts{Model: model}, tick: board.Tick{Model: model}, idleGroups: map[string]bool{},
		OnOtherEffect: func(*board.Effect) {}, OnDecided: func(float64) {},
	}
}

// Instant returns the time that is so many ms after Began.
func (d *Driver) Instant(ms float64) time.Time {
	return d.Began.Add(time.Duration(math.Round(ms * float64(time.Millisecond))))
}

// Apply gives the boards an event at the time ms, and runs the rounds of decisions that the event causes.
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

// Tick applies a board.Tick and, if the tick needs them, Counts before it.
func (d *Driver) Tick(ms float64) {
	if d.Boards.NeedsCounts(d.Model, d.Instant(ms)) {
		d.Count(ms)
	}
	d.Apply(&d.tick, ms)
}

// Next returns the time at which the boards need a Tick even if nothing happens, in ms; Never: there is none.
func (d *Driver) Next() float64 {
	if at := d.Boards.Next(); !at.IsZero() {
		return float64(at.Sub(d.Began)) / float64(time.Millisecond)
	}
	return Never
}

// Never is a time that never comes, in ms.
var Never = math.Inf(1)

// Count applies the Counts at the time ms, so that the boards decide with them in the next event.
func (d *Driver) Count(ms float64) { d.Boards.Apply(&d.Counts, d.Instant(ms)) }

// carryOut passes each effect to OnEffect, if it is set. Then it passes EffectBind to OnBind, EffectRefuse to OnRefuse, and the others to
// OnOtherEffect, except EffectGroupIdle, which only marks the group as idle. The counts of a slot begin anew with each EffectBind.
func (d *Driver) carryOut(effects []board.Effect, now time.Time) {
	for i := range effects {
		if d.OnEffect != nil {
			d.OnEffect(&effects[i], now)
		}
		switch e := &effects[i]; e.Kind {
		case board.EffectBind:
			d.resetCounts(e.Bound.Slot)
			d.OnBind(e)
		case board.EffectRefuse:
			d.OnRefuse(e)
		case board.EffectGroupIdle:
			d.idleGroups[e.Group.Name] = true
		default:
			d.OnOtherEffect(e)
		}
	}
}

// StepCounter counts the steps of a group as its streams would report them.
type StepCounter struct {
	Key    board.GroupKey
	Number uint32  // number of the present step
	Since  float64 // when the last step was reported, in ms; NaN: no step was reported since the group was idle
	steps  board.Steps
}

// newStepCounter returns the counter of a group that has reported no step yet.
func newStepCounter(key board.GroupKey) StepCounter {
	return StepCounter{Key: key, Number: 1, Since: math.NaN(), steps: board.Steps{Group: key}}
}

// reportStep gives the boards the present step of a group, as a step detector does. now is the time of the report, in ms. The first step
// that is reported after the group was idle has no length.
func (d *Driver) reportStep(counter *StepCounter, now float64) {
	if d.idleGroups[counter.Key.Name] {
		delete(d.idleGroups, counter.Key.Name)
		counter.Since = math.NaN()
	}
	reported := board.Step{Number: counter.Number}
	if !math.IsNaN(counter.Since) {
		reported.Length = time.Duration(math.Round((now - counter.Since) * float64(time.Millisecond)))
	}
	counter.Since = now
	counter.steps.List = append(counter.steps.List[:0], reported)
	d.Count(now)
	d.Apply(&counter.steps, now)
}

// resetCounts sets the Counts of a slot to zero for a new request, and makes the lists of Counts long enough.
func (d *Driver) resetCounts(slot int32) {
	counts := &d.Counts
	for int(slot) >= len(counts.Tokens) {
		counts.Tokens, counts.Started, counts.FirstStep = append(counts.Tokens, 0), append(counts.Started, false), append(counts.FirstStep, 0)
	}
	counts.Tokens[slot], counts.Started[slot], counts.FirstStep[slot] = 0, false, 0
}

// setCounts sets the Counts of a slot: how many tokens its stream has brought, and the number of the step that brought the first tokens.
func (d *Driver) setCounts(slot, tokens int32, firstStep uint32) {
	d.Counts.Tokens[slot], d.Counts.Started[slot], d.Counts.FirstStep[slot] = tokens, true, firstStep
}

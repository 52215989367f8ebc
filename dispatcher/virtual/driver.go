// Package virtual has simulated decode engines in virtual time. The boards in front of them are the
// same code as in the server.
package virtual

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
)

// Driver runs boards in virtual time, as the dispatcher's scheduler does in real time. Decisions
// take no virtual time, so a policy can always use its whole budget of evaluations. Times are ms
// since Began.
type Driver struct {
	Boards *board.Boards
	Began  time.Time
	Now    float64
	Model  string
	Counts board.Counts // progress of the requests on the ranks; the boards see it when Count is called

	OnBind        func(e *board.Effect) // called for each EffectBind
	OnRefuse      func(e *board.Effect) // called for each EffectRefuse
	OnOtherEffect func(e *board.Effect) // called for all other effects except EffectGroupIdle
	OnDecided     func(ms float64)      // called when all decisions after an event were made; ms is the time of the event
	Timed         func(round func())    // called in place of round to measure it, and must call round; nil: nothing is measured

	tick       board.Tick
	tookNoTime board.Decided   // always zero; a field, so that Apply need not allocate it
	idleGroups map[string]bool // names of groups in which no request decodes; their next step has no known length
}

// NewDriver returns a driver for one model. The caller must set OnBind and OnRefuse.
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

// Apply gives the boards an event at the time ms, carries out its effects, and lets the boards
// decide until they have nothing more to decide.
func (d *Driver) Apply(e board.Event, ms float64) {
	now := d.Instant(ms)
	d.carryOut(d.Boards.Apply(e, now))
	for d.Boards.Deciding() {
		var effects []board.Effect
		round := func() { effects = d.Boards.Apply(board.Decide{}, now) }
		if d.Timed != nil {
			d.Timed(round)
		} else {
			round()
		}
		d.carryOut(effects)
		d.carryOut(d.Boards.Apply(&d.tookNoTime, now)) // ends the round
	}
	d.OnDecided(ms)
}

// Tick lets the boards decide, with current token counts if they need them.
func (d *Driver) Tick(ms float64) {
	if d.Boards.NeedsCounts(d.Model, d.Instant(ms)) {
		d.Count(ms)
	}
	d.Apply(&d.tick, ms)
}

// Next returns when the boards need a Tick even if nothing happens before, in ms, or Never.
func (d *Driver) Next() float64 {
	if at := d.Boards.Next(); !at.IsZero() {
		return float64(at.Sub(d.Began)) / float64(time.Millisecond)
	}
	return Never
}

// Never is a time that never comes, in ms.
var Never = math.Inf(1)

// Count gives the boards the token counts of all requests.
func (d *Driver) Count(ms float64) { d.Boards.Apply(&d.Counts, d.Instant(ms)) }

func (d *Driver) carryOut(effects []board.Effect) {
	for i := range effects {
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

// StepCounter counts the steps of a group as the proxy would detect them from the token streams.
type StepCounter struct {
	Key    board.GroupKey
	Number uint32  // number of the present step, from 1
	Since  float64 // when the last step was reported, in ms; noLastStep: none since the group was last idle
	steps  board.Steps
}

var noLastStep = math.NaN() // as StepCounter.Since

func newStepCounter(key board.GroupKey) StepCounter {
	return StepCounter{Key: key, Number: 1, Since: noLastStep, steps: board.Steps{Group: key}}
}

// reportStep gives the boards the present step, as the server's step detector does. The first step
// after the group was idle has no length.
func (d *Driver) reportStep(counter *StepCounter, now float64) {
	if d.idleGroups[counter.Key.Name] {
		delete(d.idleGroups, counter.Key.Name)
		counter.Since = noLastStep
	}
	reported := board.Step{Number: counter.Number}
	if !math.IsNaN(counter.Since) {
		reported.Length = time.Duration(math.Round((now - counter.Since) * float64(time.Millisecond)))
	}
	counter.Since = now
	counter.steps.List = append(counter.steps.List[:0], reported)
	d.Count(now) // the boards learn from a step together with its tokens
	d.Apply(&counter.steps, now)
}

func (d *Driver) resetCounts(slot int32) {
	counts := &d.Counts
	for int(slot) >= len(counts.Tokens) {
		counts.Tokens, counts.Started, counts.FirstStep = append(counts.Tokens, 0), append(counts.Started, false), append(counts.FirstStep, 0)
	}
	counts.Tokens[slot], counts.Started[slot], counts.FirstStep[slot] = 0, false, 0
}

func (d *Driver) setCounts(slot, tokens int32, firstStep uint32) {
	d.Counts.Tokens[slot], d.Counts.Started[slot], d.Counts.FirstStep[slot] = tokens, true, firstStep
}

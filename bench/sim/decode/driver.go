package decode

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// model is the one that all requests of a run are for.
const model = "sim"

// driver is boards on virtual time that learn: it builds the tables that they ask for.
type driver struct {
	virtual.Engines
	learner board.Learner
	history []arrival // that is learned from first
	learned bool      // something was, since tables were looked at
	builds  float64   // when to look at them although nothing is learned; never: all is in them

	round  func(r *board.Round)  // called with each round; nil: rounds are not observed
	broken func(e *board.Effect) // an assignment that breaks a limit, or a policy that failed
}

func newDriver(cfg board.Config, history []arrival) (*driver, error) {
	b, err := board.New(cfg)
	if err != nil {
		return nil, err
	}
	d := &driver{Engines: virtual.Engines{Driver: virtual.NewDriver(b, began, model)}, history: history, builds: never}
	d.OnOtherEffect, d.OnDecided = d.other, d.told
	return d, nil
}

// began is the instant 0 of every run.
var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func instant(ms float64) time.Time {
	return began.Add(time.Duration(math.Round(ms * float64(time.Millisecond))))
}

// told builds what was learned from an event.
func (d *driver) told(ms float64) {
	if d.learned {
		d.build(ms)
	}
}

// build tells the boards the tables that are due.
func (d *driver) build(ms float64) {
	built, more := d.learner.Rebuild(instant(ms))
	d.learned, d.builds = false, never
	if more {
		d.builds = ms + 1000
	}
	for _, t := range built {
		d.Apply(t, ms)
	}
}

// look is a tick, with the tables that are due by then.
func (d *driver) look(ms float64) {
	d.due(ms)
	d.Tick(ms)
}

func (d *driver) due(ms float64) {
	if d.builds <= ms {
		d.build(ms)
	}
}

func (d *driver) other(e *board.Effect) {
	switch e.Kind {
	case board.EffectRound:
		if d.round != nil {
			d.round(e.Round)
		}
	case board.EffectInvalid:
		d.broken(e)
	case board.EffectFallback:
		if e.Label != board.FallbackInvalid {
			d.broken(e)
		}
	case board.EffectOutputSample:
		d.learner.Learn(&e.Sample)
		d.learned = true
	case board.EffectNewPredictor:
		d.follow(e)
	}
}

// follow learns a subject. What came before the run teaches it first.
func (d *driver) follow(e *board.Effect) {
	if err := d.learner.Follow(e.Predictor, e.Fit); err != nil {
		d.broken(&board.Effect{Kind: board.EffectRejected, Err: err})
	}
	d.learned = true
	for _, a := range d.history {
		d.learner.Learn(&board.OutputSample{Model: e.Predictor.Model, Finished: true, Prompt: a.prompt, Output: a.output, Key: a.key})
	}
	d.history = nil
}

package sim

import (
	"math"
	"time"

	"evenkeel/dispatcher/board"
)

// model is the one that all requests of a run are for.
const model = "sim"

// driver owns boards on virtual time, as the dispatcher's runner does on the clock: it tells
// them events, does what they want done, and builds the tables that they ask for. Rounds take no
// virtual time, so a policy always has its whole budget. Times are ms since the start.
type driver struct {
	boards  *board.Boards
	learner board.Learner
	history []arrival // that is learned from first
	learned bool      // something was, since tables were looked at
	builds  float64   // when to look at them although nothing is learned; never: all is in them
	counts  board.Counts
	tick    board.Tick
	decided board.Decided
	stopped map[string]bool // groups of which nothing runs any more, so that the next step has no length

	bound   func(e *board.Effect)
	refused func(e *board.Effect)
	decides func(took time.Duration) // a round took so long on this machine
	round   func(r *board.Round)     // for those who look at rounds; nil: nobody does
	broken  func(e *board.Effect)    // an assignment that breaks a limit, or a policy that failed
}

func newDriver(cfg board.Config, history []arrival) (*driver, error) {
	b, err := board.New(cfg)
	if err != nil {
		return nil, err
	}
	return &driver{
		boards: b, history: history, counts: board.Counts{Model: model}, tick: board.Tick{Model: model}, stopped: map[string]bool{}, builds: never,
		decides: func(time.Duration) {},
	}, nil
}

// began is the instant 0 of every run.
var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func instant(ms float64) time.Time {
	return began.Add(time.Duration(math.Round(ms * float64(time.Millisecond))))
}

// apply tells the boards an event, and has them decide what follows from it.
func (d *driver) apply(e board.Event, ms float64) {
	now := instant(ms)
	d.carryOut(d.boards.Apply(e, now))
	for d.boards.Deciding() {
		start := time.Now()
		effects := d.boards.Apply(board.Decide{}, now)
		d.decides(time.Since(start))
		d.carryOut(effects)
		d.carryOut(d.boards.Apply(&d.decided, now))
	}
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
		d.apply(t, ms)
	}
}

// look is a tick, with the tables that are due by then.
func (d *driver) look(ms float64) {
	if d.builds <= ms {
		d.build(ms)
	}
	if d.boards.Looks(model, instant(ms)) {
		d.count(ms)
	}
	d.apply(&d.tick, ms)
}

// next is when the boards want to look even if nothing happens.
func (d *driver) next() float64 {
	if at := d.boards.Next(); !at.IsZero() {
		return float64(at.Sub(began)) / float64(time.Millisecond)
	}
	return never
}

// count tells how far the slots are with the event that follows.
func (d *driver) count(ms float64) { d.boards.Apply(&d.counts, instant(ms)) }

func (d *driver) carryOut(effects []board.Effect) {
	for i := range effects {
		switch e := &effects[i]; e.Kind {
		case board.EffectBind:
			d.seat(e.Bound.Slot)
			d.bound(e)
		case board.EffectRefuse:
			d.refused(e)
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
		case board.EffectRest:
			d.stopped[e.Group.Name] = true
		case board.EffectEnding:
			d.learner.Learn(&e.Ending)
			d.learned = true
		case board.EffectSubject:
			d.follow(e)
		}
	}
}

// follow learns a subject. What came before the run teaches it first, unless a fit did.
func (d *driver) follow(e *board.Effect) {
	if err := d.learner.Follow(e.Subject, e.Fit); err != nil {
		d.broken(&board.Effect{Kind: board.EffectRejected, Err: err})
	}
	d.learned = true
	if e.Fit != nil {
		return
	}
	for _, a := range d.history {
		d.learner.Learn(&board.Ending{Model: e.Subject.Model, Finished: true, Prompt: a.prompt, Output: a.output, Key: a.key})
	}
	d.history = nil
}

// seat makes room for the counts of a slot, which begin at nothing.
func (d *driver) seat(slot int32) {
	c := &d.counts
	for int(slot) >= len(c.Tokens) {
		c.Tokens, c.Began, c.Joined = append(c.Tokens, 0), append(c.Began, false), append(c.Joined, 0)
	}
	c.Tokens[slot], c.Began[slot], c.Joined[slot] = 0, false, 0
}

// progress tells of the tokens of a slot: how many were seen, whether any came, and with which step the first did.
func (d *driver) progress(slot, seen int32, came bool, first uint32) {
	d.counts.Tokens[slot], d.counts.Began[slot], d.counts.Joined[slot] = seen, came, first
}

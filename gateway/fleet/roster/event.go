package roster

import (
	"time"

	"evenkeel/engine"
)

// Event is something that happens to engines, or around them.
type Event interface{ apply(r *Roster, a *applying) }

// applying collects the effects of one event.
type applying struct {
	now time.Time
	do  []Effect
}

func (a *applying) add(e Effect) { a.do = append(a.do, e) }

// Apply changes the roster by one event and appends to dst what must be done now.
func (r *Roster) Apply(e Event, now time.Time, dst []Effect) []Effect {
	a := applying{now, dst}
	e.apply(r, &a)
	return a.do
}

// What is a kind of effect.
type What uint8

// The kinds. Each says what the runner must do.
const (
	Restarted        What = iota // report that a prefill engine has another process, and forget what was learned of the process before
	MayHaveRestarted             // report that a prefill engine may have another process, and forget the same
	Forgotten                    // forget the same without a report, because the engine has left, or its process was never seen before
	Watched                      // make the monitor watch the present engines
	StartsSlowly                 // report that an engine's share of the load grows step by step
	GroupBroke                   // report that the ranks of a group get no requests because an engine of the group is down
	Refused                      // report that an engine is refused because of its connector
	GaveBackAnyway               // report that an engine gave an answer back although its profile says that it never does
	DrainOverdue                 // end the calls that a drain covers, because its deadline has passed
)

func (w What) String() string {
	return [...]string{
		"restarted", "may have restarted", "forgotten", "watched", "starts slowly", "group broke", "refused", "gave back anyway", "drain overdue",
	}[w]
}

// Effect is what the runner must do.
type Effect struct {
	What   What
	Engine *Engine
	Text   string // the sign of another process, or why an engine is refused
	Beside string // the engine beside which it cannot serve
	Stop   *Stop
}

func (t Terms) apply(r *Roster, _ *applying)  { r.terms = t }
func (o Owners) apply(r *Roster, _ *applying) { r.owners = o }

// Entered says that an engine comes in, or replaces the engine with its key. Anew: an operator added it, so that its
// drains end.
type Entered struct {
	Engine *Engine
	Anew   bool
}

func (v Entered) apply(r *Roster, a *applying) {
	key := v.Engine.Key()
	if known := r.engines[key] != nil; !known || v.Anew {
		r.endDrains(func(s *Stop) bool { return s.At.Instance == key }) // a drain before this does not hold for it
		if !known {
			r.order = append(r.order, key)
		}
	}
	r.put(v.Engine, a.now)
	a.add(Effect{What: Watched})
}

// Removed says that an operator takes an engine out: its requests finish, and it gets no new ones.
type Removed struct{ Key string }

func (v Removed) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil {
		r.drop(e, false, a.now)
		a.add(Effect{What: Watched})
	}
}

// Left says that an engine is not there any more, by a source of discovery. If another engine has its place by now,
// that one stays.
type Left struct{ Key, Incarnation string }

func (v Left) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		r.drop(e, v.Incarnation != "", a.now)
		a.add(Effect{What: Forgotten, Engine: e})
		a.add(Effect{What: Watched})
	}
}

// Turned says that a source has changed whether an engine gets new work.
type Turned struct {
	Key string
	Found
}

func (v Turned) apply(r *Roster, _ *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		e.Found = v.Found
	}
}

// Health is the state of an engine by its checks. IsRefused: the last connection to it was refused.
type Health struct {
	Key       string
	Status    engine.Status
	IsRefused bool
}

func (v Health) apply(r *Roster, a *applying) {
	e := r.engines[v.Key]
	if e == nil {
		return
	}
	if e.Role == Prefill {
		next, sign := e.processes.Reached(v.Status.Moved != e.Status.Moved && !v.Status.Moved.At.IsZero(), v.IsRefused)
		e.learn(a, Restarted, next, sign)
		next, sign = e.processes.Started(v.Status.StartTime, v.Status.Up && v.Status.Err == nil)
		e.learn(a, Restarted, next, sign)
	}
	e.Status = v.Status
}

// Lived is a start time of a prefill engine's process. It was asked for at the time Asked, and read just now.
type Lived struct {
	Key   string
	Start float64
	Asked time.Time
}

func (v Lived) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.Role == Prefill {
		next, sign := e.processes.Lives(v.Start, v.Asked)
		e.learn(a, Restarted, next, sign)
	}
}

// Handed is a hand-off: the engine id in it, and the process that was the newest when its probe was sent.
type Handed struct {
	Birth
	Candidate, ID string
}

func (v Handed) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		next, _, sign := e.processes.Made(v.Process, v.Candidate, v.ID, a.now)
		e.learn(a, MayHaveRestarted, next, sign)
	}
}

// learn stores what is known of an engine's processes. If sign is not empty, there is a new process, or may be. It reports no restart of
// an engine whose process was never seen.
func (e *Engine) learn(a *applying, what What, next *Processes, sign string) {
	if !e.processes.seen() && len(e.Status.Models) == 0 { // an engine of SGLang tells neither a start nor an id, but models
		what = Forgotten
	}
	if e.processes = next; sign != "" {
		a.add(Effect{What: what, Engine: e, Text: sign})
	}
}

// GaveBack says that a decode engine gave an answer back. If its profile says that it never does, responses and
// messages that it gave back before were taken for complete. It gets none of these any more until it restarts, which
// its metrics show.
type GaveBack struct{ Key string }

func (v GaveBack) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.MustNotGiveBack() {
		e.gaveBack = new(e.Status.StartTime)
		a.add(Effect{What: GaveBackAnyway, Engine: e})
	}
}

// Stopped begins a drain, or changes its deadline.
type Stopped struct{ Stop }

func (v Stopped) apply(r *Roster, _ *applying) {
	s := v.Stop
	if old := r.drains[s.Key()]; old != nil {
		s.Since = old.Since
	}
	r.drains[s.Key()] = &s
}

// Resumed ends a drain.
type Resumed struct{ Key string }

func (v Resumed) apply(r *Roster, _ *applying) { delete(r.drains, v.Key) }

package roster

import (
	"time"

	"evenkeel/engine"
)

// Event is something that happens to engines, or a change of settings or owners.
type Event interface{ apply(r *Roster, a *applying) }

// applying collects the effects of one event.
type applying struct {
	now time.Time
	do  []Effect
}

func (a *applying) add(e Effect) { a.do = append(a.do, e) }

// Apply changes the roster by one event and appends to dst the effects that the runner must carry out.
func (r *Roster) Apply(e Event, now time.Time, dst []Effect) []Effect {
	a := applying{now, dst}
	e.apply(r, &a)
	return a.do
}

// What is the kind of an effect.
type What uint8

// The kinds. Each says what the runner must do.
const (
	Restarted        What = iota // report that a prefill engine has restarted, and forget what was learned of the old process
	MayHaveRestarted             // report that a prefill engine may have restarted, and forget what was learned of the old process
	Forgotten                    // as Restarted, but without a report: the engine has left, or its process is the first one seen
	Watched                      // make the monitor watch the present engines
	StartsSlowly                 // report that an engine's share of the load grows step by step
	GroupBroke                   // report that the ranks of a group get no requests because an engine of the group is down
	Refused                      // report that an engine is refused because of its connector
	GaveBackAnyway               // report that an engine gave a request back although its profile says that it never does
	DrainOverdue                 // end the calls that a drain covers, because its deadline has passed
)

func (w What) String() string {
	return [...]string{
		"restarted", "may have restarted", "forgotten", "watched", "starts slowly", "group broke", "refused", "gave back anyway", "drain overdue",
	}[w]
}

// Effect is something that the runner must do.
type Effect struct {
	What   What
	Engine *Engine
	Text   string // what shows that the engine has restarted, or why it is refused
	Beside string // key of the engine beside which the refused engine cannot serve
	Stop   *Drain
}

func (t Terms) apply(r *Roster, _ *applying)  { r.terms = t }
func (o Owners) apply(r *Roster, _ *applying) { r.owners = o }

// Entered says that an engine is added, or replaces the engine with the same key. Anew: an operator added it, so its drains end.
type Entered struct {
	Engine *Engine
	EndDrains   bool
}

func (v Entered) apply(r *Roster, a *applying) {
	key := v.Engine.Key()
	if known := r.engines[key] != nil; !known || v.EndDrains {
		r.endDrains(func(s *Drain) bool { return s.At.Instance == key }) // drains of an engine that was there before do not apply
		if !known {
			r.order = append(r.order, key)
		}
	}
	r.put(v.Engine, a.now)
	a.add(Effect{What: Watched})
}

// Removed says that an operator removes an engine: its requests finish, and it gets no new ones.
type Removed struct{ Key string }

func (v Removed) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil {
		r.drop(e, false, a.now)
		a.add(Effect{What: Watched})
	}
}

// Left says that a source of discovery does not find an engine any more. If a newer engine (another incarnation) has the address by now,
// the newer engine stays.
type Left struct{ Key, Incarnation string }

func (v Left) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		r.drop(e, v.Incarnation != "", a.now)
		a.add(Effect{What: Forgotten, Engine: e})
		a.add(Effect{What: Watched})
		return
	}
	itself := ProcessID{Incarnation: v.Incarnation, Key: v.Key}
	// If an operator had removed the engine before, the roster learns here that its KV does not exist any more.
	if before, removed := r.left[itself]; removed && v.Incarnation != "" {
		delete(r.left, itself)
		r.dead[v.Incarnation] = before.until
	}
}

// Turned says that a source of discovery has changed whether an engine gets new work.
type Turned struct {
	Key string
	Found
}

func (v Turned) apply(r *Roster, _ *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		e.Found = v.Found
	}
}

// Health is an engine's state according to its health checks. IsRefused: the last connection to the engine was refused.
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
	moved := v.Status.Moved != e.Status.Moved && !v.Status.Moved.At.IsZero()
	if moved {
		r.relocate(e, v.Status.Moved, a.now)
	}
	if e.Role == Prefill {
		next, sign := e.processes.Reached(moved, v.IsRefused)
		e.learn(a, Restarted, next, sign)
		next, sign = e.processes.Started(v.Status.StartTime, v.Status.Up && v.Status.Err == nil)
		e.learn(a, Restarted, next, sign)
	}
	e.Status = v.Status
}

// Located says which hosts an engine has, because its name did not resolve when the engine came in, and does now.
type Located struct {
	Key   string
	Hosts []string
}

func (v Located) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil {
		r.rehost(e, v.Hosts, a.now)
	}
}

// Lived reports the start time of a prefill engine's process, in Unix seconds. The proxy asked for it at the time Asked, and has just read
// it.
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

// Handed reports a hand-off, with its engine id and the newest process that was known when its probe was sent.
type Handed struct {
	ProcessID
	Candidate, ID string
}

func (v Handed) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		next, _, sign := e.processes.Made(v.Process, v.Candidate, v.ID, a.now)
		e.learn(a, MayHaveRestarted, next, sign)
	}
}

// learn replaces the known processes of an engine by next. sign says why there is, or may be, a new process; empty: there is none. For the
// first process of an engine, learn adds the effect Forgotten instead of what, so that no restart is reported.
func (e *Engine) learn(a *applying, what What, next *Processes, sign string) {
	// SGLang reports neither a start time nor an engine id. If it has listed models, a process was there before.
	if !e.processes.seen() && len(e.Status.Models) == 0 {
		what = Forgotten
	}
	e.processes = next
	if sign != "" {
		a.add(Effect{What: what, Engine: e, Text: sign})
	}
}

// GaveBack says that a decode engine gave a request back. If its profile says that it never does, clients may have received incomplete
// responses and messages as complete. The engine gets no more of these until its metrics show that it has restarted.
type GaveBack struct{ Key string }

func (v GaveBack) apply(r *Roster, a *applying) {
	if e := r.engines[v.Key]; e != nil && e.MustNotGiveBack() {
		e.gaveBack = new(e.Status.StartTime)
		a.add(Effect{What: GaveBackAnyway, Engine: e})
	}
}

// Stopped begins a drain, or changes its deadline.
type Stopped struct{ Drain }

func (v Stopped) apply(r *Roster, _ *applying) {
	s := v.Drain
	if old := r.drains[s.Key()]; old != nil {
		s.Since = old.Since
	}
	r.drains[s.Key()] = &s
}

// Resumed ends a drain.
type Resumed struct{ Key string }

func (v Resumed) apply(r *Roster, _ *applying) { delete(r.drains, v.Key) }

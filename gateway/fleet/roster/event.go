package roster

import (
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// Event is something that happens to engines, or a change of settings or owners.
type Event interface{ apply(r *Roster, out *effects) }

type effects struct {
	now  time.Time
	list []Effect
}

func (out *effects) add(e Effect) { out.list = append(out.list, e) }

// Apply appends to dst the effects that the runner must carry out.
func (r *Roster) Apply(e Event, now time.Time, dst []Effect) []Effect {
	out := effects{now, dst}
	e.apply(r, &out)
	return out.list
}

// What is the kind of an effect.
type What uint8

// Kinds of effects. Each comment says what the runner must do.
const (
	// report that a prefill engine has restarted, and forget what was learned of the old process
	Restarted        What = iota
	MayHaveRestarted      // as Restarted, but the engine only may have restarted
	// as Restarted, but without a report: the engine has left, or its process is the first one that
	// was seen
	Forgotten
	WatchEngines   // make the monitor watch the present engines
	StartsSlowly   // report that its share of the load grows step by step
	GroupBroke     // report that a group gets no requests because an engine of it is down
	Refused        // report that the engine has another connector
	GaveBackAnyway // report that an engine gave a request back, which its profile excludes
	DrainOverdue   // end the calls that the drain covers
)

func (w What) String() string {
	return [...]string{
		"restarted", "may have restarted", "forgotten", "watched", "starts slowly", "group broke", "refused", "gave back anyway", "drain overdue",
	}[w]
}

// Effect is something that the runner of the roster must do after an event.
type Effect struct {
	What   What
	Engine *Engine
	Why    string // what shows the restart, or why the engine is refused
	Beside string // key of the engine beside which the refused one cannot serve
	Drain  *Drain
}

func (t Terms) apply(r *Roster, _ *effects)  { r.terms = t }
func (o Owners) apply(r *Roster, _ *effects) { r.owners = o }

// Entered adds an engine, or replaces the one with the same key. EndDrains: an operator has added
// it.
type Entered struct {
	Engine    *Engine
	EndDrains bool
}

func (v Entered) apply(r *Roster, out *effects) {
	key := v.Engine.Key()
	known := r.engines[key] != nil
	if !known || v.EndDrains { // those of an earlier engine do not apply
		r.endDrains(func(s *Drain) bool { return s.At.Instance == key })
	}
	if !known {
		r.order = append(r.order, key)
	}
	r.put(v.Engine, out.now)
	out.add(Effect{What: WatchEngines})
}

// Removed says that an operator removes an engine, whose requests finish.
type Removed struct{ Key string }

func (v Removed) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil {
		r.remove(e, mayStillRun, out.now)
		out.add(Effect{What: WatchEngines})
	}
}

// Left says that discovery does not find an engine any more. A newer engine (another incarnation)
// at the address stays.
type Left struct{ Key, Incarnation string }

func (v Left) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		dead := v.Incarnation != "" // else the engine may still run and be found again
		r.remove(e, dead, out.now)
		out.add(Effect{What: Forgotten, Engine: e})
		out.add(Effect{What: WatchEngines})
		return
	}
	// An operator had removed the engine. Now it is known to be dead.
	if d := r.departed[v.Key]; v.Incarnation != "" && d.incarnation == v.Incarnation {
		d.kv.goneBefore = d.kv.number
		r.departed[v.Key] = d
	}
}

// Turned says that discovery has changed whether an engine gets new work. It does not apply to
// another incarnation.
type Turned struct {
	Key string
	Found
}

func (v Turned) apply(r *Roster, _ *effects) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		e.Found = v.Found
	}
}

// Health is an engine's state by its health checks. IsRefused: the last connection was refused.
type Health struct {
	Key       string
	Status    engine.Status
	IsRefused bool
}

func (v Health) apply(r *Roster, out *effects) {
	e := r.engines[v.Key]
	if e == nil {
		return
	}
	// Status.Moved is the last change of the addresses to which the engine's name resolves; zero:
	// none.
	moved := v.Status.Moved != e.Status.Moved && !v.Status.Moved.At.IsZero()
	if moved {
		r.updateAddresses(e, v.Status.Moved, out.now)
	}
	if e.Role == Prefill { // only hand-offs depend on what an engine still has
		refused, restarted := v.IsRefused && !e.kv.refused, e.kv.restarted(v.Status.StartTime)
		cameUp := v.Status.Up && !e.Status.Up
		why := ""
		switch {
		case moved:
			why = evidenceAddress
		case refused: // no process listens
			why = evidenceRefused
		case restarted && !e.kv.refused: // otherwise it was reported when the process before ended
			why = evidenceStart
		}
		if why != "" {
			r.doubt(e, refused || restarted, why, out)
		} else if restarted || cameUp {
			r.beginGeneration(e, restarted)
		}
		e.kv.refused, e.kv.start = v.IsRefused, max(e.kv.start, v.Status.StartTime)
	}
	e.Status = v.Status
	if e.Profile.Connector == mooncake.SGLang {
		e.Status.Models = addFullNames(v.Status.Models)
	}
}

// doubt begins a generation. It is reported unless nothing was known of the engine before.
func (r *Roster) doubt(e *Engine, gone bool, why string, out *effects) {
	what := MayHaveRestarted
	switch {
	case e.kv.start == 0 && e.kv.engineID == "" && len(e.Status.Models) == 0:
		what = Forgotten
	case gone:
		what = Restarted
	}
	r.beginGeneration(e, gone)
	out.add(Effect{What: what, Engine: e, Why: why})
}

// Located says that the name of the engine did not resolve when it came in, and does now.
type Located struct {
	Key   string
	Hosts []string
}

func (v Located) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil {
		r.replaceHosts(e, v.Hosts, out.now)
	}
}

// Lived is the start time of a process, in Unix seconds, which the proxy has just read.
type Lived struct {
	Key   string
	Start float64
}

func (v Lived) apply(r *Roster, out *effects) {
	e := r.engines[v.Key]
	if e == nil || e.Role != Prefill {
		return
	}
	if e.kv.restarted(v.Start) {
		r.doubt(e, true, evidenceStart, out)
	}
	e.kv.start = max(e.kv.start, v.Start)
}

// Handed is the engine id that a hand-off names. Made was read before its prefill call was written.
type Handed struct {
	Made Generation
	ID   string
}

// apply puts all KV in doubt if the hand-offs before named another engine, that of this hand-off
// included: it may have been made before other doubts arose.
func (v Handed) apply(r *Roster, out *effects) {
	e := r.engines[v.Made.Key]
	if e == nil || v.ID == "" || e.Profile.SharedAddress || v.Made.Number != e.kv.number {
		return
	}
	if id := withoutRank(v.ID); id != e.kv.engineID {
		if e.kv.engineID != "" {
			r.doubt(e, false, evidenceEngineID, out)
		}
		e.kv.engineID = id
	}
}

// GaveBack says that a decode engine ended an answer early for lack of KV memory, although its
// profile excludes it. Clients may have received incomplete responses and messages as complete. The
// engine gets no more of these until its metrics show a restart.
type GaveBack struct{ Key string }

func (v GaveBack) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.MustNotGiveBack() {
		e.gaveBack = new(e.Status.StartTime) // mayGiveBack is true of this process from now on
		out.add(Effect{What: GaveBackAnyway, Engine: e})
	}
}

// Stopped begins a drain, or changes its deadline.
type Stopped struct{ Drain }

func (v Stopped) apply(r *Roster, _ *effects) {
	s := v.Drain
	if old := r.drains[s.Key()]; old != nil { // only the deadline is new
		s.Since = old.Since
	}
	r.drains[s.Key()] = &s
}

// Resumed ends the drain with this key.
type Resumed struct{ Key string }

func (v Resumed) apply(r *Roster, _ *effects) { delete(r.drains, v.Key) }

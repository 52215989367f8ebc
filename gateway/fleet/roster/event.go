package roster

import (
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// Event is something that happens to engines, or a change of settings or owners.
type Event interface{ apply(r *Roster, out *effects) }

// effects collects the effects of one event, which happens at the time now.
type effects struct {
	now  time.Time
	list []Effect
}

func (out *effects) add(e Effect) { out.list = append(out.list, e) }

// Apply changes the roster by one event and appends to dst the effects that the runner must carry out.
func (r *Roster) Apply(e Event, now time.Time, dst []Effect) []Effect {
	out := effects{now, dst}
	e.apply(r, &out)
	return out.list
}

// What is the kind of an effect: it says what the runner must do.
type What uint8

// Kinds of effects: each comment says what the runner must do.
const (
	Restarted        What = iota // report that a prefill engine has restarted, and forget what was learned of the old process
	MayHaveRestarted             // report that a prefill engine may have restarted, and forget what was learned of the old process
	Forgotten                    // as Restarted, but without a report: the engine has left, or its process is the first one that was seen
	WatchEngines                 // make the monitor watch the present engines
	StartsSlowly                 // report that an engine's share of the load grows step by step
	GroupBroke                   // report that the ranks of a group get no requests because an engine of the group is down
	Refused                      // report that an engine is refused because of its connector
	GaveBackAnyway               // report that an engine gave a request back although its profile says that it never does
	DrainOverdue                 // end the calls that a drain covers, because its deadline has passed
)

// String is the kind in a form for people and recordings.
func (w What) String() string {
	return [...]string{
		"restarted", "may have restarted", "forgotten", "watched", "starts slowly", "group broke", "refused", "gave back anyway", "drain overdue",
	}[w]
}

// Effect is something that the runner of the roster must do after an event.
type Effect struct {
	What   What
	Engine *Engine
	Why    string // what shows that the engine has restarted, or why it is refused
	Beside string // key of the engine beside which the refused engine cannot serve
	Drain  *Drain
}

func (t Terms) apply(r *Roster, _ *effects)  { r.terms = t }
func (o Owners) apply(r *Roster, _ *effects) { r.owners = o }

// Entered says that an engine is added, or replaces the engine with the same key. EndDrains says that an operator has added it, so that its
// drains end.
type Entered struct {
	Engine    *Engine
	EndDrains bool
}

// apply adds or replaces the engine. It ends the drains at its address if the engine is new, or if an operator has added it.
func (v Entered) apply(r *Roster, out *effects) {
	key := v.Engine.Key()
	known := r.engines[key] != nil
	if !known || v.EndDrains { // drains of an earlier engine at this address do not apply to a new one
		r.endDrains(func(s *Drain) bool { return s.At.Instance == key })
	}
	if !known {
		r.order = append(r.order, key)
	}
	r.put(v.Engine, out.now)
	out.add(Effect{What: WatchEngines})
}

// Removed says that an operator removes an engine: its requests finish, and it gets no new ones.
type Removed struct{ Key string }

// apply removes the engine, if there is one.
func (v Removed) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil {
		r.remove(e, mayStillRun, out.now)
		out.add(Effect{What: WatchEngines})
	}
}

// Left says that a source of discovery does not find an engine any more. If a newer engine (another incarnation) has the address by now,
// the newer engine stays.
type Left struct{ Key, Incarnation string }

// apply removes the engine if it has the given incarnation. If discovery gives incarnations, the engine and its KV are gone for good. This
// is remembered until the engine's last hand-off has expired, so that its hand-offs are not used. The monitor then stops watching it.
func (v Left) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		dead := v.Incarnation != "" // without an incarnation, the engine may still run and be found again
		r.remove(e, dead, out.now)
		out.add(Effect{What: Forgotten, Engine: e})
		out.add(Effect{What: WatchEngines})
		return
	}
	// An operator had removed the engine before. Now it is known to be dead.
	if d := r.departed[v.Key]; v.Incarnation != "" && d.incarnation == v.Incarnation {
		d.kv.goneBefore = d.kv.number
		r.departed[v.Key] = d
	}
}

// Turned says that a source of discovery has changed whether an engine gets new work. It does not apply to a newer engine (another
// incarnation) at the same address.
type Turned struct {
	Key string
	Found
}

// apply stores what a source of discovery says of the engine now, above all whether the engine gets new work. It does nothing if another
// incarnation, a newer engine, has the address by now.
func (v Turned) apply(r *Roster, _ *effects) {
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

// apply stores the status of the engine. What it shows of a prefill engine may put the KV that the engine made in doubt.
func (v Health) apply(r *Roster, out *effects) {
	e := r.engines[v.Key]
	if e == nil {
		return
	}
	// Status.Moved is the last change of the addresses to which the engine's name resolves; zero: there was none. If it differs from
	// that of the last status, the change is new.
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
		case refused: // no process listens, so the one that did has ended
			why = evidenceRefused
		case restarted && !e.kv.refused: // otherwise it was told of when the process before had ended
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

// doubt begins a generation, and has reported why, unless nothing was known of the engine before.
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

// Located says which hosts an engine has, because its name did not resolve when the engine came in, and does now.
type Located struct {
	Key   string
	Hosts []string
}

// apply replaces the hosts of the engine, if there still is one.
func (v Located) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil {
		r.replaceHosts(e, v.Hosts, out.now)
	}
}

// Lived reports the start time of an engine's process, in Unix seconds, which the proxy has just read.
type Lived struct {
	Key   string
	Start float64
}

// apply records the start time of a prefill engine's process. A later one shows that the engine has restarted.
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

// Handed reports the engine id that a hand-off names. Made is the generation that was read before its
// prefill call was written.
type Handed struct {
	Made Generation
	ID   string
}

// apply puts the KV of the engine in doubt if the hand-offs before named another engine. That includes
// the KV of this hand-off: it may have been made before other doubts arose.
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

// GaveBack says that a decode engine gave a request back: it ended the answer early, because it lacked KV memory. If the engine's profile
// says that it never does, clients may have received incomplete responses and messages as complete. The engine gets no more of these until
// its metrics show that it has restarted.
type GaveBack struct{ Key string }

// apply records which process gave the request back, and has this reported. It does nothing if the profile lets the engine give requests
// back.
func (v GaveBack) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.MustNotGiveBack() {
		e.gaveBack = new(e.Status.StartTime) // mayGiveBack is true of this process from now on
		out.add(Effect{What: GaveBackAnyway, Engine: e})
	}
}

// Stopped begins a drain, or changes its deadline.
type Stopped struct{ Drain }

// apply stores the drain. If the engine or rank drains already, only the deadline changes.
func (v Stopped) apply(r *Roster, _ *effects) {
	s := v.Drain
	if old := r.drains[s.Key()]; old != nil { // the drain began earlier, and only its deadline is new
		s.Since = old.Since
	}
	r.drains[s.Key()] = &s
}

// Resumed ends the drain with this key (Drain.Key), so that the engine or rank gets new work again.
type Resumed struct{ Key string }

func (v Resumed) apply(r *Roster, _ *effects) { delete(r.drains, v.Key) }

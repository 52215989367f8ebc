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

// apply removes the engine, if there is one. Its hand-offs stay valid, because its process may still run.
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
	// If an operator had removed the engine before, it was remembered as an engine that may still run. Now it is known to be dead.
	id := ProcessID{Incarnation: v.Incarnation, Key: v.Key}
	if before, removed := r.departed[id]; removed && v.Incarnation != "" {
		delete(r.departed, id)
		lastHandOffExpires := before.until
		r.endedIncarnations[v.Incarnation] = lastHandOffExpires
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

// apply stores the status of the engine. For a prefill engine, it also records what the status shows of the processes at its address:
// whether the engine's name has another address now (moved), how the connection went, and the start time. Another address, a refused
// connection and a new start time are each evidence of a new process. Then a restart is reported, because the hand-offs of the old process
// are lost. The first process that is seen is no restart.
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
	if e.Role == Prefill { // the processes of engines that decode are not followed
		next, evidence := e.processes.RecordConnection(moved, v.IsRefused, out.now)
		e.setProcesses(out, Restarted, next, evidence) // reports a restart only if there is evidence
		readNow := v.Status.Up && v.Status.Err == nil  // otherwise the start time may be that of an earlier check
		next, evidence = e.processes.RecordStart(v.Status.StartTime, readNow)
		e.setProcesses(out, Restarted, next, evidence)
	}
	e.Status = v.Status
	if e.Profile.Connector == mooncake.SGLang {
		e.Status.Models = addFullNames(v.Status.Models)
	}
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

// Lived reports the start time of a prefill engine's process, in Unix seconds. The proxy asked for it at the time Asked, and has just read
// it.
type Lived struct {
	Key   string
	Start float64
	Asked time.Time
}

// apply records the start time of a prefill engine's process, which the proxy has just read. It may show that the engine has a new process,
// or that a doubted process, one that seemed to be replaced, still runs. Only the hand-offs of prefill engines depend on the process, so
// other engines are left out.
func (v Lived) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.Role == Prefill {
		next, evidence := e.processes.RecordStartRead(v.Start, v.Asked)
		e.setProcesses(out, Restarted, next, evidence)
	}
}

// Handed reports a hand-off. Its engine id (ID) shows which process made it, and so may show that there is a new one. ProcessID has the
// newest process that was known when the probe was sent. Candidate is the ID of the prefill candidate.
type Handed struct {
	ProcessID
	Candidate, ID string
}

// apply records the engine id of the hand-off, which may show that the engine has a new process or that a doubted process still runs.
func (v Handed) apply(r *Roster, out *effects) {
	if e := r.engines[v.Key]; e != nil && e.Incarnation == v.Incarnation {
		next, _, evidence := e.processes.RecordHandoff(v.Process, v.Candidate, v.ID, out.now)
		e.setProcesses(out, MayHaveRestarted, next, evidence)
	}
}

// setProcesses replaces the known processes of an engine by next. evidence says what shows that there is, or may be, a new process; empty:
// nothing does, and the runner has nothing to do. Otherwise setProcesses adds the effect what (Restarted or MayHaveRestarted). It makes the
// runner report a restart, and forget what it learned of the old process. For the first process that is seen of an engine, setProcesses
// adds Forgotten instead, which does the same without a report.
func (e *Engine) setProcesses(out *effects, what What, next *Processes, evidence string) {
	// SGLang reports neither a start time nor an engine id. If it has listed models, a process was there before.
	isFirst := !e.processes.anyObserved() && len(e.Status.Models) == 0
	e.processes = next
	if evidence == "" {
		return
	}
	if isFirst {
		what = Forgotten
	}
	out.add(Effect{What: what, Engine: e, Why: evidence})
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

// Package roster is the fleet as a value: which engines, ranks and models there are, and which of them take requests. It has no
// clock, no lock and no log. The runner beside it, gateway/fleet, applies an Event for each thing that happens, then a Tick, and
// publishes what Derive returns.
package roster

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/owner"
	"evenkeel/prefill"
)

// A Roster is the engines: who they are, which models and ranks they have, whether they are up. Identities outlive health: a rank that
// comes back finds its load. Events change it, and after a Tick Derive returns what follows.
type Roster struct {
	terms   Terms
	owners  Owners
	engines map[string]*Engine   // by role and host:port
	order   []string             // as configured, then as added
	stops   map[string]*Stop     // engines and ranks that drain, by role and id
	pauses  map[string]*Pause    // by group
	broken  map[string]bool      // groups of ranks that prefill and decode of which an engine is down
	hosts   map[string]trust     // from which a prefiller's KV may be pulled
	ids     map[string]int32     // role and rank name → worker id, never reused: engines of two roles may share an address
	numbers int32                // given out
	bygone  map[string]bygone    // ids of ranks whose engine may come back, by incarnation and name
	left    map[int32]leftRank   // ranks of engines that are gone for a while: assignments may be on their way
	dead    map[string]time.Time // incarnations that will not come back, until when a hand-off of theirs may turn up
	added   int                  // engines that ever were
}

// Terms are the settings that the roster goes by.
type Terms struct {
	Region       string // ours
	Started      time.Time
	SlowStart    time.Duration
	ProbeTimeout time.Duration
	KVEvents     prefill.KVEventsConfig
	Beyond       int    // see board.Worker
	Prefer       string // which kind of engines, where a model has both
}

// Owners says which proxy may admit requests to scopes of engines.
type Owners struct {
	Kind   owner.Kind       // of scopes; empty: this proxy is alone
	Scopes map[string]Owned // by name
	Rooms  map[string]Room  // of ranks where another proxy's requests may run, by name
}

// Room is what a rank has for us: of its slots as many as may be used, 0 being all, and the KV tokens of others' requests.
type Room struct {
	Limit  int
	Others int64
}

// Owned is a region or a decode group.
type Owned struct {
	Admits bool
	Fence  *owner.Scope `json:"-"`
}

func (o *Owners) admits(scope string) bool { return o.Kind == "" || o.Scopes[scope].Admits }

// Place is where a call to an engine runs: the monitor's id, and the rank or -1.
type Place struct {
	Instance string
	Rank     int
}

// Stop is a drain: an engine, or one rank of it, that gets no new work.
type Stop struct {
	Role, ID string // host:port, of a rank with /rank behind it
	At       Place  // rank -1: all of the engine
	Since    time.Time
	Deadline time.Time // zero: what runs may take any time
	Passed   bool      // the deadline has; what comes late goes on elsewhere at once
}

// Key is the role and the id.
func (s *Stop) Key() string { return s.Role + " " + s.ID }

// Covers says whether a call at a place runs on what drains.
func (s *Stop) Covers(at Place) bool {
	return s.At.Instance == at.Instance && (s.At.Rank < 0 || s.At.Rank == max(0, at.Rank))
}

// trust is why a hand-off may point decode engines at a host.
type trust struct {
	by    int       // prefill engines that stand for it
	until time.Time // and after the last of them
}

// bygone is a rank's number that waits for its engine.
type bygone struct {
	id int32
	at time.Time
}

// leftRank is a rank of an engine that has left.
type leftRank struct {
	of   *Engine
	rank int
	at   time.Time
}

// rankMemory is how long a rank is known after its engine: far longer than an
// assignment takes to become a call. Calls hold the rank themselves.
const rankMemory = 10 * time.Minute

// New returns a roster without engines.
func New() *Roster {
	return &Roster{
		engines: map[string]*Engine{}, stops: map[string]*Stop{}, pauses: map[string]*Pause{}, hosts: map[string]trust{}, ids: map[string]int32{},
		bygone: map[string]bygone{}, left: map[int32]leftRank{}, dead: map[string]time.Time{},
	}
}

// put takes an engine in, in the place of the one it was before.
func (r *Roster) put(e *Engine, now time.Time) {
	for _, h := range e.trusted() {
		t := r.hosts[h]
		t.by++
		r.hosts[h] = t
	}
	if e.Traffic == nil {
		e.Traffic = &engine.Traffic{}
	}
	if old, ok := r.engines[e.Key()]; ok {
		e.Status, e.standing, e.number = old.Status, old.standing, old.number
		e.board, e.lists, e.named = old.board, old.lists, old.named
		e.processes, e.gaveBack = old.processes, old.gaveBack
		if e.Found == (Found{}) && !e.Own { // an operator describes it anew
			e.Found = old.Found
		}
		r.distrust(old, false, now)
		r.leave(old, now) // it may have had more ranks
		r.fitDrains(e)
	} else {
		r.added++
		e.number, e.processes, e.healthy, e.state = r.added, &Processes{}, Down, Down
	}
	r.engines[e.Key()] = e
	if e.Decodes() {
		for _, rank := range e.Ranks() { // numbered as configured, whoever comes up first
			delete(r.left, r.numberOf(e, rank))
		}
	}
}

// fitDrains has the drains of an engine's ranks fit the ranks that it has now: the only rank is the engine itself.
func (r *Roster) fitDrains(e *Engine) {
	ranks := len(e.Ranks())
	for key, s := range r.stops {
		if s.At.Instance != e.Key() || s.At.Rank < 0 || ranks > 1 && s.At.Rank < ranks {
			continue
		}
		if delete(r.stops, key); s.At.Rank == 0 {
			whole := *s
			whole.ID, whole.At.Rank = e.ID, -1
			r.stops[whole.Key()] = &whole
		}
	}
}

// An engine is who answers at its host:port, and a process that comes back there
// is the same engine: its ranks keep their numbers and find their load. Only a
// source that knows better, as Kubernetes does, tells two engines apart that had
// one address after the other: by their incarnation. Then nothing of the first is
// the second's, least of all its KV.

// drop takes an engine out; its requests finish. dead: there is no such engine any more, and no KV of it.
func (r *Roster) drop(e *Engine, dead bool, now time.Time) {
	delete(r.engines, e.Key())
	r.order = slices.DeleteFunc(r.order, func(key string) bool { return key == e.Key() })
	r.abandon(e.Key())
	r.distrust(e, dead, now)
	r.leave(e, now)
	for _, rank := range e.Ranks() {
		name := e.nameOf(rank)
		if id, ok := r.ids[name]; ok && e.Incarnation != "" {
			delete(r.ids, name)
			r.bygone[e.Incarnation+" "+name] = bygone{id, now}
		}
	}
	if dead && e.Incarnation != "" {
		r.dead[e.Incarnation] = now.Add(r.terms.ProbeTimeout + e.Profile.KVHoldTimeout)
	}
	maps.DeleteFunc(r.bygone, func(_ string, b bygone) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(r.dead, func(_ string, until time.Time) bool { return now.After(until) })
}

// leave keeps the ranks of an engine for the assignments that are on their way.
func (r *Roster) leave(e *Engine, now time.Time) {
	for _, rank := range e.Ranks() {
		if id, ok := r.ids[e.nameOf(rank)]; ok {
			r.left[id] = leftRank{e, rank, now}
		}
	}
}

// numberOf is a rank's identity on the board.
func (r *Roster) numberOf(e *Engine, rank int) int32 {
	name := e.nameOf(rank)
	id, ok := r.ids[name]
	if !ok {
		was := e.Incarnation + " " + name
		b, back := r.bygone[was]
		if id = b.id; !back {
			id = r.numbers
			r.numbers++
		}
		delete(r.bygone, was)
		r.ids[name] = id
	}
	return id
}

// nameOf is a rank's role and name.
func (e *Engine) nameOf(rank int) string { return e.Role + " " + e.At(rank).ID }

// trusted are the hosts from which decode engines may pull because of an engine.
func (e *Engine) trusted() []string {
	if e.Decodes() {
		return nil
	}
	return e.Hosts
}

// distrust forgets the hosts that only this engine stood for: at once where the
// engine is known to be no more, else once its last probe can have answered.
func (r *Roster) distrust(e *Engine, dead bool, now time.Time) {
	for _, h := range e.trusted() {
		t := r.hosts[h]
		t.by--
		if !dead {
			t.until = now.Add(r.terms.ProbeTimeout)
		}
		r.hosts[h] = t
	}
	maps.DeleteFunc(r.hosts, func(_ string, t trust) bool { return t.by == 0 && !now.Before(t.until) })
}

// scopeOf is the scope whose owner admits to an engine: its decode group, or its region.
func (r *Roster) scopeOf(e *Engine, kind owner.Kind) string {
	if kind == owner.Groups {
		return e.Conf.Group
	}
	return cmp.Or(e.Conf.Region, r.terms.Region)
}

// Scopes calls f with the scope of each engine, and with the engine. kind is what scopes there are.
func (r *Roster) Scopes(kind owner.Kind, f func(scope string, e *Engine)) {
	for _, e := range r.engines {
		f(r.scopeOf(e, kind), e)
	}
}

// stopped says whether each rank of an engine drains by itself.
func (r *Roster) stopped(e *Engine) bool {
	return len(r.stops) > 0 && !slices.ContainsFunc(e.Ranks(), func(rank int) bool { return rank < 0 || r.stops[e.rankKey(rank)] == nil })
}

// resume forgets the drains that are meant.
func (r *Roster) resume(meant func(*Stop) bool) {
	for key, s := range r.stops {
		if meant(s) {
			delete(r.stops, key)
		}
	}
}

// abandon forgets the drains of an engine that is gone, but for those whose
// deadline will end what still runs there.
func (r *Roster) abandon(key string) {
	r.resume(func(s *Stop) bool { return s.At.Instance == key && (s.Deadline.IsZero() || s.Passed) })
}

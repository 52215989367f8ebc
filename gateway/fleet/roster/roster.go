// Package roster is the fleet as a value: which engines, ranks and models there are, and which of them take requests.
// It has no clock, no lock and no log. The runner in gateway/fleet applies an Event for each thing that happens, then
// a Tick, and publishes what Derive returns.
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

// A Roster has the engines: their identities, models and ranks, and whether they are up. Identities outlive health: a
// rank that comes back finds its load. Events change the roster, and after a Tick Derive returns the picture that
// follows.
type Roster struct {
	terms        Terms
	owners       Owners
	engines      map[string]*Engine   // by role and host:port
	order        []string             // keys in the order of the config, then of arrival
	drains       map[string]*Stop     // drains of engines and ranks, by role and id
	pauses       map[string]*Pause    // by group
	broken       map[string]bool      // groups of ranks that prefill and decode in which an engine is down
	hosts        map[string]trust     // hosts from which a prefiller's KV may be pulled
	workerIDs    map[string]int32     // worker id by a rank's role and name (two roles may share an address); never reused
	nextWorkerID int32                // how many worker ids were given out
	returnable   map[string]bygone    // worker ids of ranks whose engine may come back, by incarnation and name
	leftRanks    map[int32]leftRank   // ranks of engines that left a short time ago, because assignments may still name them
	dead         map[string]time.Time // incarnations that will not come back, with the time until which a hand-off of theirs may turn up
	engineCount  int                  // how many engines there have been
}

// Terms are the settings on which the roster depends.
type Terms struct {
	Region       string // our own region
	Started      time.Time
	SlowStart    time.Duration
	ProbeTimeout time.Duration
	KVEvents     prefill.KVEventsConfig
	Beyond       int    // see board.Worker
	Prefer       string // which kind of engine is preferred if a model has both
}

// Owners says which proxy may admit requests to scopes of engines.
type Owners struct {
	Kind   owner.Kind       // kind of the scopes; empty: this proxy is alone
	Scopes map[string]Owned // by name
	Rooms  map[string]Room  // room on ranks where requests of another proxy may run, by the rank's name
}

// Room is what this proxy may use of a rank.
type Room struct {
	Limit  int   // slots that this proxy may use; 0: all
	Others int64 // KV tokens that requests of other proxies hold on the rank
}

// Owned is a region or a decode group with its owner.
type Owned struct {
	Admits bool
	Fence  *owner.Scope `json:"-"`
}

func (o *Owners) admits(scope string) bool { return o.Kind == "" || o.Scopes[scope].Admits }

// Place is where a call to an engine runs: the engine's key, and the rank, -1 if it names none.
type Place struct {
	Instance string
	Rank     int
}

// Stop is a drain: an engine, or one rank of it, that gets no new work.
type Stop struct {
	Role, ID string // host:port; for a rank, with /rank behind it
	At       Place  // rank -1: the whole engine
	Since    time.Time
	Deadline time.Time // zero: requests that run may take any time
	Passed   bool      // the deadline has passed; requests that come later go on elsewhere at once
}

// Key is the role and the id.
func (s *Stop) Key() string { return s.Role + " " + s.ID }

// Covers says whether a call at a place runs on the engine or rank that drains.
func (s *Stop) Covers(at Place) bool {
	return s.At.Instance == at.Instance && (s.At.Rank < 0 || s.At.Rank == max(0, at.Rank))
}

// trust is why a hand-off may point decode engines at a host.
type trust struct {
	engines int       // number of prefill engines with this host
	until   time.Time // after the last of these has left, the host is trusted until then
}

// bygone is the worker id of a rank whose engine may come back.
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

// rankMemory is how long a rank is remembered after its engine has left: far longer than an assignment takes to
// become a call. Calls hold the rank themselves.
const rankMemory = 10 * time.Minute

// New returns a roster without engines.
func New() *Roster {
	return &Roster{
		engines: map[string]*Engine{}, drains: map[string]*Stop{}, pauses: map[string]*Pause{}, hosts: map[string]trust{},
		workerIDs:  map[string]int32{},
		returnable: map[string]bygone{}, leftRanks: map[int32]leftRank{}, dead: map[string]time.Time{},
	}
}

// put takes an engine in. It replaces the engine with the same key, if there is one, and takes over its state and what is known of its
// processes.
func (r *Roster) put(e *Engine, now time.Time) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines++
		r.hosts[h] = t
	}
	if e.Traffic == nil {
		e.Traffic = &engine.Traffic{}
	}
	if old, ok := r.engines[e.Key()]; ok {
		e.Status, e.standing, e.number = old.Status, old.standing, old.number
		e.board, e.lists, e.listedModels = old.board, old.lists, old.listedModels
		e.processes, e.gaveBack = old.processes, old.gaveBack
		if e.Found == (Found{}) && !e.Own { // an operator describes the engine anew
			e.Found = old.Found
		}
		r.distrust(old, false, now)
		r.rememberRanks(old, now) // the engine may have had more ranks before
		r.fitDrains(e)
	} else {
		r.engineCount++
		e.number, e.processes, e.healthy, e.state = r.engineCount, &Processes{}, Down, Down
		// What an engine made before it left stays gone when it comes back, so its processes get numbers that none of those before had.
		if _, back := r.dead[e.Incarnation]; back && e.Incarnation != "" {
			e.processes = &Processes{first: r.engineCount << 20}
		}
	}
	r.engines[e.Key()] = e
	if e.Decodes() {
		for _, rank := range e.Ranks() { // numbered in the order of the config, not in that in which they come up
			delete(r.leftRanks, r.workerID(e, rank))
		}
	}
}

// fitDrains changes the drains of an engine's ranks to fit the ranks that it has now. A drain of a rank that it no longer has ends. If it
// has only one rank now, a drain of rank 0 becomes a drain of the engine.
func (r *Roster) fitDrains(e *Engine) {
	ranks := len(e.Ranks())
	for key, s := range r.drains {
		if s.At.Instance != e.Key() || s.At.Rank < 0 || ranks > 1 && s.At.Rank < ranks {
			continue
		}
		if delete(r.drains, key); s.At.Rank == 0 {
			ofEngine := *s
			ofEngine.ID, ofEngine.At.Rank = e.ID, -1
			r.drains[ofEngine.Key()] = &ofEngine
		}
	}
}

// An engine is identified by its host:port, and a process that comes back there is the same engine: its ranks keep
// their numbers and find their load. Only a source that knows more, as Kubernetes does, can tell two engines apart
// that had one address one after the other: by their incarnation. Then nothing of the first belongs to the second,
// and above all not its KV.

// drop takes an engine out; its requests finish. dead says that the engine does not exist any more, and neither does its KV.
func (r *Roster) drop(e *Engine, dead bool, now time.Time) {
	delete(r.engines, e.Key())
	r.order = slices.DeleteFunc(r.order, func(key string) bool { return key == e.Key() })
	r.dropDrains(e.Key())
	r.distrust(e, dead, now)
	r.rememberRanks(e, now)
	for _, rank := range e.Ranks() {
		name := e.nameOf(rank)
		if id, ok := r.workerIDs[name]; ok && e.Incarnation != "" {
			delete(r.workerIDs, name)
			r.returnable[e.Incarnation+" "+name] = bygone{id, now}
		}
	}
	if dead && e.Incarnation != "" {
		r.dead[e.Incarnation] = now.Add(r.terms.ProbeTimeout + e.Profile.KVHoldTimeout)
	}
	maps.DeleteFunc(r.returnable, func(_ string, b bygone) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(r.dead, func(_ string, until time.Time) bool { return now.After(until) })
}

// rememberRanks keeps the ranks of an engine that leaves for rankMemory, because assignments may still name them.
func (r *Roster) rememberRanks(e *Engine, now time.Time) {
	for _, rank := range e.Ranks() {
		if id, ok := r.workerIDs[e.nameOf(rank)]; ok {
			r.leftRanks[id] = leftRank{e, rank, now}
		}
	}
}

// workerID is the id by which the board knows a rank as a worker. A rank that has none gets the one that it had before its engine left, if
// the engine is back, else a new one.
func (r *Roster) workerID(e *Engine, rank int) int32 {
	name := e.nameOf(rank)
	id, ok := r.workerIDs[name]
	if !ok {
		key := e.Incarnation + " " + name
		before, returns := r.returnable[key]
		if id = before.id; !returns {
			id = r.nextWorkerID
			r.nextWorkerID++
		}
		delete(r.returnable, key)
		r.workerIDs[name] = id
	}
	return id
}

// nameOf is a rank's role and name.
func (e *Engine) nameOf(rank int) string { return e.Role + " " + e.At(rank).ID }

// kvHosts are the hosts from which decode engines may pull KV because of an engine. An engine that decodes adds none.
func (e *Engine) kvHosts() []string {
	if e.Decodes() {
		return nil
	}
	return e.Hosts
}

// distrust forgets the hosts from which KV could be pulled only because of this engine: at once if the engine does not exist any more
// (dead), else once its last probe must have been answered.
func (r *Roster) distrust(e *Engine, dead bool, now time.Time) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines--
		if !dead {
			t.until = now.Add(r.terms.ProbeTimeout)
		}
		r.hosts[h] = t
	}
	maps.DeleteFunc(r.hosts, func(_ string, t trust) bool { return t.engines == 0 && !now.Before(t.until) })
}

// scopeOf is the scope whose owner admits to an engine: its decode group, or its region.
func (r *Roster) scopeOf(e *Engine, kind owner.Kind) string {
	if kind == owner.Groups {
		return e.Conf.Group
	}
	return cmp.Or(e.Conf.Region, r.terms.Region)
}

// Scopes calls f with the scope of each engine, and with the engine. kind is the kind of the scopes.
func (r *Roster) Scopes(kind owner.Kind, f func(scope string, e *Engine)) {
	for _, e := range r.engines {
		f(r.scopeOf(e, kind), e)
	}
}

// allRanksDrain says whether every rank of an engine drains, each by a drain of its own.
func (r *Roster) allRanksDrain(e *Engine) bool {
	return len(r.drains) > 0 && !slices.ContainsFunc(e.Ranks(), func(rank int) bool { return rank < 0 || r.drains[e.rankKey(rank)] == nil })
}

// endDrains forgets the drains for which meant is true.
func (r *Roster) endDrains(meant func(*Stop) bool) {
	for key, s := range r.drains {
		if meant(s) {
			delete(r.drains, key)
		}
	}
}

// dropDrains forgets the drains of an engine that is gone. It keeps drains whose deadline is still to come and will end requests that run
// there.
func (r *Roster) dropDrains(key string) {
	r.endDrains(func(s *Stop) bool { return s.At.Instance == key && (s.Deadline.IsZero() || s.Passed) })
}

// Package roster is the fleet as a value: which engines, ranks and models exist, and which of them take requests. It has no clock, lock or
// log. The runner in gateway/fleet applies an Event for each thing that happens and then a Tick, and publishes what Derive returns.
package roster

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/owner"
	"evenkeel/prefill"
)

// A Roster holds the engines: their identities, models and ranks, and whether they are up. A rank keeps its identity while it is down, so
// that it has the same load when it comes back. Events change the roster, and Derive returns what follows for the rest of the proxy.
type Roster struct {
	terms        Terms
	owners       Owners
	engines      map[string]*Engine     // by key: role and host:port
	order        []string               // keys in the order of the config, then of arrival
	drains       map[string]*Drain       // drains of engines and ranks, by role and id
	pauses       map[string]*Pause      // by group
	broken       map[string]bool        // groups of ranks that prefill and decode, in which an engine is down
	hosts        map[string]trust       // hosts from which decode engines may fetch a prefill engine's KV
	workerIDs    map[string]int32       // worker ids, by a rank's role and name, because two roles may share an address; never reused
	nextWorkerID int32                  // the worker id that the next new rank gets
	returnable   map[string]bygone      // worker ids of ranks whose engine may come back, by incarnation and name
	leftRanks    map[int32]leftRank     // ranks of engines that left less than rankMemory ago, by worker id: assignments may still name them
	dead         map[string]time.Time   // incarnations that have ended, with the latest time at which their hand-offs may still turn up
	left         map[ProcessID]departed // engines that may come back, by their ProcessID with process 0
	engineCount  int                    // how many engines have been added so far
}

// Terms are the settings on which the roster depends.
type Terms struct {
	Region       string // the proxy's own region
	Started      time.Time
	SlowStart    time.Duration
	ProbeTimeout time.Duration
	KVEvents     prefill.KVEventsConfig
	Beyond       int    // value of board.Worker.MaxEngineQueue
	Prefer       string // the preferred kind of engine if a model has aggregated and split ones
}

// Owners says whether this proxy may send requests to each scope: a region or a decode group.
type Owners struct {
	Kind   owner.Kind       // kind of the scopes; empty: scopes have no owners, so this proxy may use all engines
	Scopes map[string]Owned // by name
	Quotas  map[string]RankQuota  // ranks on which requests of another proxy may run, by name
}

// Room says how much of a rank this proxy may use.
type RankQuota struct {
	Limit  int   // slots that this proxy may use; 0: all
	Others int64 // KV tokens that requests of other proxies hold on the rank
}

// Owned says whether this proxy owns a region or a decode group.
type Owned struct {
	Admits bool
	Fence  *owner.Scope `json:"-"`
}

func (o *Owners) admits(scope string) bool { return o.Kind == "" || o.Scopes[scope].Admits }

// Location is where a call to an engine runs: the engine's key and the rank; rank -1: the call names no rank.
type Location struct {
	Instance string
	Rank     int
}

// Stop is a drain: an engine, or one rank of it, that gets no new work.
type Drain struct {
	Role, ID string   // host:port; for a rank, with /rank behind it
	At       Location // rank -1: the whole engine
	Since    time.Time
	Deadline time.Time // zero: requests that run may take any time
	Passed   bool      // the deadline has passed, so that calls which start after it are moved elsewhere at once
}

// Key identifies the drain: the role and the id.
func (s *Drain) Key() string { return s.Role + " " + s.ID }

// Covers says whether a place is on the engine or rank that drains.
func (s *Drain) Covers(at Location) bool {
	return s.At.Instance == at.Instance && (s.At.Rank < 0 || s.At.Rank == max(0, at.Rank))
}

// trust says why decode engines may fetch KV from a host that a hand-off names.
type trust struct {
	engines int       // number of prefill engines with this host
	until   time.Time // if these engines have left, the host is trusted until this time
}

// bygone is the worker id of a rank whose engine left at a time, and may come back.
type bygone struct {
	id int32
	at time.Time
}

// departed is what is known of the processes of an engine that has left, and the time until which a hand-off of theirs may turn up.
type departed struct {
	processes *Processes
	until     time.Time
}

// leftRank is a rank of an engine that left at a time.
type leftRank struct {
	of   *Engine
	rank int
	at   time.Time
}

// rankMemory is how long a rank is remembered after its engine has left. It is far longer than the time from an assignment to the call, and
// calls that run hold the rank themselves.
const rankMemory = 10 * time.Minute

// New returns a roster without engines.
func New() *Roster {
	return &Roster{
		engines: map[string]*Engine{}, drains: map[string]*Drain{}, pauses: map[string]*Pause{}, hosts: map[string]trust{},
		workerIDs:  map[string]int32{},
		returnable: map[string]bygone{}, leftRanks: map[int32]leftRank{}, dead: map[string]time.Time{},
		left: map[ProcessID]departed{},
	}
}

// put adds an engine. If there is an engine with the same key, put replaces it, and the new one keeps its state and its known processes.
func (r *Roster) put(e *Engine, now time.Time) {
	r.trust(e)
	if e.Traffic == nil {
		e.Traffic = &engine.Traffic{}
	}
	if old, ok := r.engines[e.Key()]; ok {
		r.replace(old, e, now)
	} else {
		r.number(e, now)
	}
	r.engines[e.Key()] = e
	if e.Decodes() {
		for _, rank := range e.Ranks() { // worker ids follow the order of the config, not the order in which engines come up
			delete(r.leftRanks, r.workerID(e, rank)) // the rank may have left before
		}
	}
}

// replace hands the state and the known processes of an engine (old) to its new description (e). It ends the trust in the hosts of old,
// remembers the ranks of old, and fits the drains to those of e.
func (r *Roster) replace(old, e *Engine, now time.Time) {
	e.Status, e.standing, e.number = old.Status, old.standing, old.number
	e.board, e.lists, e.listedModels = old.board, old.lists, old.listedModels
	e.processes, e.gaveBack = old.processes, old.gaveBack
	if e.Found == (Found{}) && !e.FromNewEntry { // the description is an operator's: it lacks what discovery had found
		e.Found = old.Found
	}
	r.distrust(old, false, now)
	r.rememberRanks(old, now) // the engine may have had more ranks before
	r.fitDrains(e)
}

// number gives an engine that is not in the roster a number, and numbers for its processes. The engine is down until it is found ready.
func (r *Roster) number(e *Engine, now time.Time) {
	r.engineCount++
	e.number, e.healthy, e.state = r.engineCount, Down, Down
	// The KV of an engine that left is gone, even if the engine comes back. So its processes get numbers far above those used before.
	e.processes = &Processes{first: r.engineCount << 20}
	// If the engine was only taken off the list, its process may still be the same. A new process shows by its start time.
	if before, back := r.left[e.itself()]; back && !now.After(before.until) {
		e.processes = before.processes
	}
	delete(r.left, e.itself())
}

// fitDrains changes the drains of an engine's ranks to fit its present ranks. A drain of a rank that no longer exists ends. If the engine
// has only one rank now, a drain of rank 0 becomes a drain of the engine.
func (r *Roster) fitDrains(e *Engine) {
	ranks := len(e.Ranks())
	for key, s := range r.drains {
		isOfRank := s.At.Instance == e.Key() && s.At.Rank >= 0
		fits := ranks > 1 && s.At.Rank < ranks
		if !isOfRank || fits {
			continue
		}
		delete(r.drains, key)
		if s.At.Rank == 0 { // rank 0 is the only rank now, so its drain becomes one of the engine
			ofEngine := *s
			ofEngine.ID, ofEngine.At.Rank = e.ID, -1
			r.drains[ofEngine.Key()] = &ofEngine
		}
	}
}

// An engine is identified by its host:port. A new process at the address is still the same engine, whose ranks keep their numbers and their
// load. Only some sources of discovery, such as Kubernetes, can distinguish two engines that had the same address one after the other, by
// their incarnation. Then the second engine takes over nothing from the first, above all not its KV.

// drop removes an engine; its requests finish. dead says that the engine and its KV do not exist any more.
func (r *Roster) drop(e *Engine, dead bool, now time.Time) {
	delete(r.engines, e.Key())
	r.order = slices.DeleteFunc(r.order, func(key string) bool { return key == e.Key() })
	r.dropDrains(e.Key())
	r.distrust(e, dead, now)
	r.rememberRanks(e, now)
	for _, rank := range e.Ranks() {
		name := e.nameOf(rank)
		if id, ok := r.workerIDs[name]; ok && e.Incarnation != "" { // without incarnations, the next engine at the address keeps the ids
			delete(r.workerIDs, name)
			r.returnable[e.Incarnation+" "+name] = bygone{id, now}
		}
	}
	until := now.Add(r.terms.ProbeTimeout + e.Profile.KVHoldTimeout)
	if dead && e.Incarnation != "" {
		r.dead[e.Incarnation] = until
	} else {
		r.left[e.itself()] = departed{e.processes, until}
	}
	maps.DeleteFunc(r.returnable, func(_ string, b bygone) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(r.dead, func(_ string, until time.Time) bool { return now.After(until) })
	maps.DeleteFunc(r.left, func(_ ProcessID, d departed) bool { return now.After(d.until) })
}

// rememberRanks keeps the ranks of an engine that leaves for rankMemory, because assignments may still name them.
func (r *Roster) rememberRanks(e *Engine, now time.Time) {
	for _, rank := range e.Ranks() {
		if id, ok := r.workerIDs[e.nameOf(rank)]; ok {
			r.leftRanks[id] = leftRank{e, rank, now}
		}
	}
}

// workerID is the id of a rank as a worker of the dispatcher. A rank without an id gets its old id back if its engine had left and came
// back, and otherwise a new id.
func (r *Roster) workerID(e *Engine, rank int) int32 {
	name := e.nameOf(rank)
	id, ok := r.workerIDs[name]
	if !ok {
		key := e.Incarnation + " " + name
		before, returns := r.returnable[key]
		id = before.id
		if !returns {
			id = r.nextWorkerID
			r.nextWorkerID++
		}
		delete(r.returnable, key)
		r.workerIDs[name] = id
	}
	return id
}

// itself is the ProcessID by which the roster remembers an engine that has left, whatever its process.
func (e *Engine) itself() ProcessID { return ProcessID{Incarnation: e.Incarnation, Key: e.Key()} }

// nameOf is a rank's key in workerIDs: its role and name.
func (e *Engine) nameOf(rank int) string { return e.Role + " " + e.At(rank).ID }

// kvHosts returns the hosts from which decode engines may fetch KV of this engine; none if the engine decodes.
func (e *Engine) kvHosts() []string {
	if e.Decodes() {
		return nil
	}
	return e.Hosts
}

// trust lets hand-offs name the hosts of an engine.
func (r *Roster) trust(e *Engine) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines++
		r.hosts[h] = t
	}
}

// relocate replaces the addresses to which an engine's name led before by those to which the name leads now. Otherwise every hand-off that
// names a new address would be refused.
func (r *Roster) relocate(e *Engine, moved engine.Moved, now time.Time) {
	from, to := strings.Split(moved.From, ","), strings.FieldsFunc(moved.To, func(c rune) bool { return c == ',' })
	stay := slices.DeleteFunc(slices.Clone(e.Hosts), func(h string) bool {
		return slices.Contains(from, h) && !slices.Contains(e.Profile.KVHosts, h) // what the config names stays, too
	})
	hosts := slices.Concat(stay, to)
	slices.Sort(hosts)
	r.rehost(e, slices.Compact(hosts), now)
}

// rehost replaces the hosts of an engine.
func (r *Roster) rehost(e *Engine, hosts []string, now time.Time) {
	before := *e
	e.Hosts = hosts
	r.trust(e)
	r.distrust(&before, false, now)
}

// distrust undoes trust for the hosts of an engine. If no other engine has a host, the trust in the host ends at once for an engine that
// does not exist any more (dead), and otherwise after ProbeTimeout, when the engine's last probe has been answered.
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

// scopeOf returns an engine's scope: its decode group or its region, as one proxy owns it.
func (r *Roster) scopeOf(e *Engine, kind owner.Kind) string {
	if kind == owner.Groups {
		return e.Conf.Group
	}
	return cmp.Or(e.Conf.Region, r.terms.Region)
}

// Scopes calls f for each engine, with its scope of that kind.
func (r *Roster) Scopes(kind owner.Kind, f func(scope string, e *Engine)) {
	for _, e := range r.engines {
		f(r.scopeOf(e, kind), e)
	}
}

// allRanksDrain says whether every rank of an engine drains, each by a drain of its own.
func (r *Roster) allRanksDrain(e *Engine) bool {
	return len(r.drains) > 0 && !slices.ContainsFunc(e.Ranks(), func(rank int) bool { return rank < 0 || r.drains[e.rankKey(rank)] == nil })
}

// endDrains ends the drains for which ends is true.
func (r *Roster) endDrains(ends func(*Drain) bool) {
	for key, s := range r.drains {
		if ends(s) {
			delete(r.drains, key)
		}
	}
}

// dropDrains ends the drains of an engine that is gone. It keeps a drain with a future deadline, because the deadline still has to end the
// requests that run on the engine.
func (r *Roster) dropDrains(key string) {
	r.endDrains(func(s *Drain) bool { return s.At.Instance == key && (s.Deadline.IsZero() || s.Passed) })
}

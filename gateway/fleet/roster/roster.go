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
	terms         Terms
	owners        Owners
	engines       map[string]*Engine        // by key: role and host:port
	order         []string                  // keys in the order of the config, then of arrival
	drains        map[string]*Drain         // drains of engines and ranks, by role and host:port or host:port/rank
	pauses        map[string]*Pause         // pauses of whole decode groups; the empty group stands for all engines
	paused        map[string]*pausedEngine  // by host:port, also of engines that have left
	broken        map[string]string         // by aggregated group: an engine that is down or wedged, for which it waits
	hosts         map[string]trust          // hosts from which decode engines may fetch a prefill engine's KV
	workerIDs     map[string]int32          // worker ids by role and name of the rank (two roles may share an address); never reused
	nextWorkerID  int32                     // the worker id that the next new rank gets
	revivableIDs  map[string]revivableID    // worker ids of ranks whose engine may come back, by incarnation and name
	departedRanks map[int32]departedRank    // ranks of engines that left less than rankMemory ago, by worker id
	departed      map[string]departedEngine // engines that have left, by key
	generations   uint64                    // how many generations of KV have begun at all addresses
	engineCount   int                       // how many engines have been added so far
	weights       map[string]uint32         // numbers by Model.AdapterName, see numberWeights
	lastWeights   uint32                    // the number that was given last
}

// Terms are the settings on which the roster depends.
type Terms struct {
	Region       string // the proxy's own region
	Started      time.Time
	SlowStart    time.Duration
	ProbeTimeout time.Duration
	KVEvents     prefill.KVEventsConfig
	Prefer       string // the preferred kind of engine if a model has aggregated and split engines
}

// Owners says whether this proxy may send requests to each scope: a region or a decode group.
type Owners struct {
	Kind   owner.Kind           // kind of the scopes; empty: scopes have no owners, so this proxy may use all engines
	Scopes map[string]Owned     // ownership of each scope, by its name
	Quotas map[string]RankQuota `json:"Rooms"` // quotas of ranks on which requests of another proxy may run, by the rank's name
}

// RankQuota says how much of a rank this proxy may use.
type RankQuota struct {
	Limit  int   // number of slots that this proxy may use; 0: all
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

// Drain is the drain of an engine, or one rank of it, that gets no new work.
type Drain struct {
	Role, ID string   // host:port; for a rank, with /rank behind it
	At       Location // the engine or rank that drains; rank -1: the whole engine
	Since    time.Time
	Deadline time.Time // when calls that still run are moved elsewhere or ended; zero: they may take any time
	Overdue  bool      `json:"Passed"` // the deadline has passed, so calls that start from now on are moved elsewhere at once
}

// Key identifies the drain: the role and the id.
func (s *Drain) Key() string { return s.Role + " " + s.ID }

// Covers says whether a call at a location runs on the engine or rank that drains. A call that names no rank counts as one on rank 0.
func (s *Drain) Covers(at Location) bool {
	return s.At.Instance == at.Instance && (s.At.Rank < 0 || s.At.Rank == max(0, at.Rank))
}

// trust says until when decode engines may fetch KV from a host that a hand-off names.
type trust struct {
	engines int // number of prefill engines with this host
	// trustedUntil is the time until which the host is trusted after these engines have left; zero: no longer than they are there.
	trustedUntil time.Time
}

// revivableID is the worker id of a rank whose engine has left at the time at. If the engine comes back, the rank gets the id again.
type revivableID struct {
	id int32
	at time.Time
}

// departedEngine is an engine that has left. One of its hand-offs may still turn up before the time in
// until.
type departedEngine struct {
	kv          generation
	incarnation string
	until       time.Time
}

// departedRank is a rank of an engine that has left at the time at.
type departedRank struct {
	engine *Engine
	rank   int
	at     time.Time
}

// rankMemory is how long a rank is remembered after its engine has left. It is far longer than the time from the assignment of a request to
// its call. Calls that run have a pointer to the rank, so they do not need the memory.
const rankMemory = 10 * time.Minute

// New returns a roster without engines.
func New() *Roster {
	return &Roster{
		engines: map[string]*Engine{}, drains: map[string]*Drain{}, pauses: map[string]*Pause{},
		paused: map[string]*pausedEngine{}, hosts: map[string]trust{},
		workerIDs:    map[string]int32{},
		revivableIDs: map[string]revivableID{}, departedRanks: map[int32]departedRank{}, departed: map[string]departedEngine{},
	}
}

// put adds an engine. If there is an engine with the same key, put replaces it, and the new one keeps its state.
// put also trusts the hosts of the engine, and gives a worker id to each rank that has none.
func (r *Roster) put(e *Engine, now time.Time) {
	r.trustHosts(e)
	if e.Traffic == nil {
		e.Traffic = &engine.Traffic{}
	}
	if old, known := r.engines[e.Key()]; known {
		r.replace(old, e, now)
	} else {
		r.addNew(e, now)
	}
	r.engines[e.Key()] = e
	if e.Decodes() {
		// Worker ids are assigned here, so that they follow the order of the config and not the order in which engines come up.
		for _, rank := range e.Ranks() {
			id := r.assignWorkerID(e, rank)
			delete(r.departedRanks, id) // a rank that has come back is not a departed one any more
		}
	}
}

// replace puts a new description (e) in the place of an engine (old): e takes over what is known of the engine, such as its state, its
// number in the order of arrival, and which process gave a request back. Its KV is in doubt. The hosts of e are trusted by now: decode engines
// may fetch KV from them. A host that only old has stays trusted until the last probe of the running process is answered. replace also
// remembers the ranks of old, and adapts the drains of ranks to the ranks of e.
func (r *Roster) replace(old, e *Engine, now time.Time) {
	e.Status, e.serviceState, e.arrival = old.Status, old.serviceState, old.arrival
	e.board, e.lists, e.listedModels = old.board, old.lists, old.listedModels
	e.kv, e.gaveBack = old.kv, old.gaveBack
	r.beginGeneration(e, areDifferent(old.Incarnation, e.Incarnation))
	// Found says what discovery has found. It still applies if e lacks it because an operator has described e, or because e is built
	// again after a change of its profile. But a new entry makes the engine one of the config, which discovery does not manage.
	if e.Found == (Found{}) && !e.FromNewEntry {
		e.Found = old.Found
	}
	r.distrustHosts(old, mayStillRun, now) // undoes the trust that old had got; the trust of e counts by itself
	r.rememberRanks(old, now)              // old may have more ranks than e
	r.adaptDrains(e)
}

// addNew prepares an engine that is not in the roster: it sets when the engine came, and begins a
// generation of its KV. The engine counts as down until it is found ready.
func (r *Roster) addNew(e *Engine, now time.Time) {
	r.engineCount++
	e.arrival, e.byHealth, e.state = r.engineCount, Down, Down
	before := r.departed[e.Key()] // the start time of its process shows whether the engine is the one that left
	delete(r.departed, e.Key())
	e.kv = before.kv
	r.beginGeneration(e, areDifferent(before.incarnation, e.Incarnation))
}

// beginGeneration puts the KV that an engine has made in doubt. gone says that it is gone for certain.
func (r *Roster) beginGeneration(e *Engine, gone bool) {
	r.generations++
	e.kv.number, e.kv.engineID = r.generations, ""
	if gone {
		e.kv.goneBefore = e.kv.number
	}
}

// areDifferent says whether two incarnations prove that two engines had the address one after the other.
func areDifferent(a, b string) bool { return a != "" && b != "" && a != b }

// adaptDrains changes the drains of an engine's ranks after the number of its ranks may have changed. A drain of a rank that no longer
// exists ends. If the engine has only one rank now, a drain of rank 0 becomes a drain of the engine.
func (r *Roster) adaptDrains(e *Engine) {
	ranks := len(e.Ranks())
	for key, s := range r.drains {
		isOfRank := s.At.Instance == e.Key() && s.At.Rank >= 0
		rankExists := ranks > 1 && s.At.Rank < ranks // an only rank has no drain of its own
		if !isOfRank || rankExists {
			continue
		}
		delete(r.drains, key)
		if s.At.Rank == 0 { // rank 0 is the only rank now, so its drain becomes one of the engine
			ofEngine := *s
			ofEngine.ID, ofEngine.At.Rank = e.ID, NoRank
			r.drains[ofEngine.Key()] = &ofEngine
		}
	}
}

// An engine is identified by its host:port. A new process at the address is still the same engine, whose ranks keep their numbers and their
// load. Only some sources of discovery, such as Kubernetes, can distinguish two engines that had the same address one after the other, by
// their incarnation. Then the second engine takes over nothing from the first, above all not its KV.

// mayStillRun is passed as the argument dead of remove and distrustHosts if the engine was only taken off the list, or described anew: its
// process may still run.
const mayStillRun = false

// remove takes an engine out of the roster, and ends its drains and the trust in its hosts. Its requests finish. dead says that the engine
// and its KV do not exist any more. remove remembers, for a limited time, the ranks, worker ids and KV of the engine, because
// requests and hand-offs may still name them, and because the engine may come back.
func (r *Roster) remove(e *Engine, dead bool, now time.Time) {
	delete(r.engines, e.Key())
	if dead {
		delete(r.paused, e.ID)
	}
	r.order = slices.DeleteFunc(r.order, func(key string) bool { return key == e.Key() })
	r.endDrainsOf(e.Key())
	r.distrustHosts(e, dead, now)
	r.rememberRanks(e, now)
	r.keepWorkerIDs(e, now)
	r.beginGeneration(e, dead)
	r.departed[e.Key()] = departedEngine{e.kv, e.Incarnation, now.Add(r.terms.ProbeTimeout + e.Profile.KVHoldTimeout)}
	r.forgetLongGone(now)
}

// keepWorkerIDs keeps the worker ids of an engine that leaves, so that its ranks get them again if it comes back. An engine without an
// incarnation is identified by its address alone: the next engine there counts as the same one, so its ids stay in workerIDs.
func (r *Roster) keepWorkerIDs(e *Engine, now time.Time) {
	if e.Incarnation == "" {
		return
	}
	for _, rank := range e.Ranks() {
		name := e.workerKey(rank)
		if id, hasID := r.workerIDs[name]; hasID {
			delete(r.workerIDs, name)
			r.revivableIDs[e.Incarnation+" "+name] = revivableID{id, now}
		}
	}
}

// forgetLongGone forgets the worker ids (keepWorkerIDs) of engines that left long ago, and their KV
// once the last hand-off has expired. Tick does so for ranks (rememberRanks).
func (r *Roster) forgetLongGone(now time.Time) {
	maps.DeleteFunc(r.revivableIDs, func(_ string, b revivableID) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(r.departed, func(_ string, d departedEngine) bool { return now.After(d.until) })
}

// rememberRanks is called for an engine that leaves. It keeps the ranks of the engine for the time rankMemory, because assignments may
// still name them.
func (r *Roster) rememberRanks(e *Engine, now time.Time) {
	for _, rank := range e.Ranks() {
		if id, hasID := r.workerIDs[e.workerKey(rank)]; hasID {
			r.departedRanks[id] = departedRank{e, rank, now}
		}
	}
}

// assignWorkerID returns the id of a rank as a worker of the dispatcher. If the rank has no id, assignWorkerID gives it one: the one that
// it had before, if its engine had left and has come back, and otherwise a new one.
func (r *Roster) assignWorkerID(e *Engine, rank int) int32 {
	name := e.workerKey(rank)
	if id, hasID := r.workerIDs[name]; hasID {
		return id
	}
	key := e.Incarnation + " " + name
	before, returns := r.revivableIDs[key]
	id := before.id
	if !returns {
		id = r.nextWorkerID
		r.nextWorkerID++
	}
	delete(r.revivableIDs, key)
	r.workerIDs[name] = id
	return id
}

// workerKey is a rank's key in workerIDs: its role and name.
func (e *Engine) workerKey(rank int) string { return e.Role + " " + e.At(rank).ID }

// kvHosts returns the hosts from which decode engines may fetch KV of this engine; none if the engine decodes.
func (e *Engine) kvHosts() []string {
	if e.Decodes() {
		return nil
	}
	return e.Hosts
}

// trustHosts lets hand-offs name the hosts of a prefill engine. Each call must be undone by a call of distrustHosts.
func (r *Roster) trustHosts(e *Engine) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines++
		r.hosts[h] = t
	}
}

// updateAddresses is called if the host name of an engine has new addresses. It replaces the old addresses among the engine's hosts by the
// new ones. Otherwise every hand-off that names a new address would be refused.
func (r *Roster) updateAddresses(e *Engine, moved engine.Moved, now time.Time) {
	from, to := strings.Split(moved.From, ","), strings.FieldsFunc(moved.To, func(c rune) bool { return c == ',' }) // no empty address
	otherHosts := slices.DeleteFunc(slices.Clone(e.Hosts), func(h string) bool {
		return slices.Contains(from, h) && !slices.Contains(e.Profile.KVHosts, h) // an address that kv_hosts of the profile lists stays
	})
	hosts := slices.Concat(otherHosts, to)
	slices.Sort(hosts)
	r.replaceHosts(e, slices.Compact(hosts), now)
}

// replaceHosts replaces the hosts of an engine. It trusts the new hosts before it ends the trust in the old ones, so that hosts which are
// in both lists stay trusted all the time.
func (r *Roster) replaceHosts(e *Engine, hosts []string, now time.Time) {
	before := *e
	e.Hosts = hosts
	r.trustHosts(e)
	r.distrustHosts(&before, mayStillRun, now)
}

// distrustHosts undoes trustHosts for an engine. If no other engine has a host, the trust in the host ends: at once if the engine does not
// exist any more (dead), and otherwise after ProbeTimeout, when the engine's last probe has been answered.
func (r *Roster) distrustHosts(e *Engine, dead bool, now time.Time) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines--
		if !dead { // its last probe may still be answered, with a hand-off that names the host
			t.trustedUntil = now.Add(r.terms.ProbeTimeout)
		}
		// After a dead engine, the trust ends now, unless another engine has this host, or has left just before.
		r.hosts[h] = t
	}
	maps.DeleteFunc(r.hosts, func(_ string, t trust) bool { return t.engines == 0 && !now.Before(t.trustedUntil) })
}

// scopeOf returns an engine's scope, the unit that one proxy owns: its decode group if kind is owner.Groups, and otherwise its region.
func (r *Roster) scopeOf(e *Engine, kind owner.Kind) string {
	if kind == owner.Groups {
		return e.Conf.Group
	}
	return cmp.Or(e.Conf.Region, r.terms.Region)
}

// EachScope calls f for each engine, with the engine's scope: its region or its decode group, as kind says. f is called once per engine, so
// it may get the same scope several times.
func (r *Roster) EachScope(kind owner.Kind, f func(scope string, e *Engine)) {
	for _, e := range r.engines {
		f(r.scopeOf(e, kind), e)
	}
}

// allRanksDrain says whether every rank of an engine drains, each by a drain of its own.
func (r *Roster) allRanksDrain(e *Engine) bool {
	if len(r.drains) == 0 { // the usual case, for which the ranks need not be listed
		return false
	}
	takesWork := func(rank int) bool {
		isOnlyRank := rank < 0 // an only rank drains with the engine and not by itself
		return isOnlyRank || r.drains[e.rankDrainKey(rank)] == nil
	}
	return !slices.ContainsFunc(e.Ranks(), takesWork)
}

// endDrains ends the drains for which ends returns true.
func (r *Roster) endDrains(ends func(*Drain) bool) {
	for key, s := range r.drains {
		if ends(s) {
			delete(r.drains, key)
		}
	}
}

// endDrainsOf ends the drains of an engine that is gone. It keeps a drain with a future deadline, because the deadline still has to end the
// requests that run on the engine.
func (r *Roster) endDrainsOf(key string) {
	r.endDrains(func(s *Drain) bool { return s.At.Instance == key && (s.Deadline.IsZero() || s.Overdue) })
}

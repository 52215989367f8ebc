// Package roster is the fleet as a value: which engines, ranks and models exist, and which of them
// take requests. It has no clock, lock or log. The runner in gateway/fleet applies an Event for
// each thing that happens and then a Tick, and publishes what Derive returns.
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

// A Roster holds the engines. A rank keeps its identity while it is down, so that it has the same
// load when it comes back.
type Roster struct {
	terms   Terms
	owners  Owners
	engines map[string]*Engine       // by role and host:port
	order   []string                 // of the config, then of arrival
	drains  map[string]*Drain        // by role and host:port or host:port/rank
	pauses  map[string]*Pause        // of decode groups; the empty group stands for all engines
	paused  map[string]*pausedEngine // by host:port, also of engines that have left
	// by aggregated group: the engine that is down or wedged, for which it waits
	broken map[string]string
	hosts  map[string]trust // from which decode engines may fetch a prefill engine's KV
	// by role and name of the rank (two roles may share an address); never reused
	workerIDs    map[string]int32
	nextWorkerID int32
	// of ranks whose engine may come back, by incarnation and name
	revivableIDs map[string]revivableID
	// of engines that left less than rankMemory ago, by worker id
	departedRanks map[int32]departedRank
	departed      map[string]departedEngine // by key
	generations   uint64                    // of KV, at all addresses
	engineCount   int                       // engines added so far
	weights       map[string]uint32         // by Model.AdapterName, see numberWeights
	lastWeights   uint32
}

// Terms are the settings on which the roster depends.
type Terms struct {
	Region       string
	Started      time.Time
	SlowStart    time.Duration
	ProbeTimeout time.Duration
	KVEvents     prefill.KVEventsConfig
	Prefer       string // the preferred kind if a model has aggregated and split engines
}

// Owners says whether this proxy may send requests to each scope: a region or a decode group.
type Owners struct {
	Kind   owner.Kind           // kind of the scopes; empty: scopes have no owners, so this proxy may use all engines
	Scopes map[string]Owned     // ownership of each scope, by its name
	Quotas map[string]RankQuota `json:"Rooms"` // quotas of ranks on which requests of another proxy may run, by the rank's name
}

// RankQuota says how much of a rank this proxy may use.
type RankQuota struct {
	Limit  int   // slots that this proxy may use; 0: all
	Others int64 // KV tokens of other proxies' requests on the rank
}

// Owned says whether this proxy owns a region or a decode group.
type Owned struct {
	Admits bool
	Fence  *owner.Scope `json:"-"`
}

func (o *Owners) admits(scope string) bool { return o.Kind == "" || o.Scopes[scope].Admits }

// Location is where a call runs; rank -1: the call names no rank.
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

// Covers says whether a call at a location runs on the engine or rank that drains. A call that
// names no rank counts as one on rank 0.
func (s *Drain) Covers(at Location) bool {
	return s.At.Instance == at.Instance && (s.At.Rank < 0 || s.At.Rank == max(0, at.Rank))
}

// trust says whether decode engines may fetch KV from a host that a hand-off names.
type trust struct {
	engines int // prefill engines with this host
	// trustedUntil: until then the host is trusted even without these engines; zero: no longer than
	// they are there.
	trustedUntil time.Time
}

// revivableID is the worker id of a rank whose engine has left, at the time at, and may come back.
type revivableID struct {
	id int32
	at time.Time
}

// departedEngine is an engine that has left. One of its hand-offs may still turn up before until.
type departedEngine struct {
	kv          generation
	incarnation string
	until       time.Time
}

type departedRank struct {
	engine *Engine
	rank   int
	at     time.Time
}

// rankMemory is how long a rank is remembered after its engine has left: far longer than from the
// assignment of a request to its call. Calls that run have a pointer to the rank.
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

// put adds an engine, or replaces the one with the same key, whose state it keeps.
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
		// Worker ids are assigned here, so that they follow the order of the config and not that in which
		// engines come up.
		for _, rank := range e.Ranks() {
			id := r.assignWorkerID(e, rank)
			delete(r.departedRanks, id)
		}
	}
}

// replace puts e in the place of old, and keeps what is known of it. Its KV is in doubt.
func (r *Roster) replace(old, e *Engine, now time.Time) {
	e.Status, e.serviceState, e.arrival = old.Status, old.serviceState, old.arrival
	e.board, e.lists, e.listedModels = old.board, old.lists, old.listedModels
	e.kv, e.gaveBack = old.kv, old.gaveBack
	r.beginGeneration(e, areDifferent(old.Incarnation, e.Incarnation))
	// An operator has described e, or e is built again after a change of its profile, so what
	// discovery found still applies. But a new entry makes the engine one of the config, which
	// discovery does not manage.
	if e.Found == (Found{}) && !e.FromNewEntry {
		e.Found = old.Found
	}
	r.distrustHosts(old, mayStillRun, now) // the trust of e counts by itself
	r.rememberRanks(old, now)              // old may have more ranks
	r.adaptDrains(e)
}

// addNew: the engine counts as down until it is found ready.
func (r *Roster) addNew(e *Engine, now time.Time) {
	r.engineCount++
	e.arrival, e.byHealth, e.state = r.engineCount, Down, Down
	before := r.departed[e.Key()] // shows whether the engine is the one that left
	delete(r.departed, e.Key())
	e.kv = before.kv
	r.beginGeneration(e, areDifferent(before.incarnation, e.Incarnation))
}

// beginGeneration puts the KV that an engine has made in doubt; gone: it is gone for certain.
func (r *Roster) beginGeneration(e *Engine, gone bool) {
	r.generations++
	e.kv.number, e.kv.engineID = r.generations, ""
	if gone {
		e.kv.goneBefore = e.kv.number
	}
}

// areDifferent says whether two engines certainly had the address one after the other.
func areDifferent(a, b string) bool { return a != "" && b != "" && a != b }

// adaptDrains: the number of the engine's ranks may have changed. A drain of a rank that no longer
// exists ends.
func (r *Roster) adaptDrains(e *Engine) {
	ranks := len(e.Ranks())
	for key, s := range r.drains {
		isOfRank := s.At.Instance == e.Key() && s.At.Rank >= 0
		rankExists := ranks > 1 && s.At.Rank < ranks // an only rank has no drain of its own
		if !isOfRank || rankExists {
			continue
		}
		delete(r.drains, key)
		if s.At.Rank == 0 { // it is the only rank now
			ofEngine := *s
			ofEngine.ID, ofEngine.At.Rank = e.ID, NoRank
			r.drains[ofEngine.Key()] = &ofEngine
		}
	}
}

// An engine is identified by its host:port. A new process at the address is still the same engine,
// whose ranks keep their numbers and their load. Only some sources of discovery, such as
// Kubernetes, can distinguish two engines that had the same address one after the other, by their
// incarnation. Then the second engine takes over nothing from the first, above all not its KV.

// mayStillRun as the argument dead: the engine was only taken off the list, or described anew.
const mayStillRun = false

// remove takes an engine out of the roster. Its requests finish. dead: the engine and its KV do not
// exist any more. Ranks, worker ids and KV are remembered for a time: requests and hand-offs may
// still name them, and the engine may come back.
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

// keepWorkerIDs: without an incarnation, the next engine at the address counts as the same one, so
// its ids stay in workerIDs.
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

func (r *Roster) forgetLongGone(now time.Time) {
	maps.DeleteFunc(r.revivableIDs, func(_ string, b revivableID) bool { return now.Sub(b.at) > rankMemory })
	maps.DeleteFunc(r.departed, func(_ string, d departedEngine) bool { return now.After(d.until) })
}

// rememberRanks: assignments may still name the ranks of an engine that leaves.
func (r *Roster) rememberRanks(e *Engine, now time.Time) {
	for _, rank := range e.Ranks() {
		if id, hasID := r.workerIDs[e.workerKey(rank)]; hasID {
			r.departedRanks[id] = departedRank{e, rank, now}
		}
	}
}

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

func (e *Engine) workerKey(rank int) string { return e.Role + " " + e.At(rank).ID }

func (e *Engine) kvHosts() []string {
	if e.Decodes() {
		return nil
	}
	return e.Hosts
}

// trustHosts: each call must be undone by distrustHosts.
func (r *Roster) trustHosts(e *Engine) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines++
		r.hosts[h] = t
	}
}

// updateAddresses: otherwise every hand-off that names a new address would be refused.
func (r *Roster) updateAddresses(e *Engine, moved engine.Moved, now time.Time) {
	// no empty address
	from, to := strings.Split(moved.From, ","), strings.FieldsFunc(moved.To, func(c rune) bool { return c == ',' })
	otherHosts := slices.DeleteFunc(slices.Clone(e.Hosts), func(h string) bool {
		return slices.Contains(from, h) && !slices.Contains(e.Profile.KVHosts, h) // kv_hosts stay
	})
	hosts := slices.Concat(otherHosts, to)
	slices.Sort(hosts)
	r.replaceHosts(e, slices.Compact(hosts), now)
}

// replaceHosts trusts the new hosts before it ends the trust in the old ones, so that hosts in both
// lists stay trusted.
func (r *Roster) replaceHosts(e *Engine, hosts []string, now time.Time) {
	before := *e
	e.Hosts = hosts
	r.trustHosts(e)
	r.distrustHosts(&before, mayStillRun, now)
}

// distrustHosts undoes trustHosts. Without another engine the trust ends: at once if the engine is
// dead, else after ProbeTimeout, because its last probe may still be answered with a hand-off that
// names the host.
func (r *Roster) distrustHosts(e *Engine, dead bool, now time.Time) {
	for _, h := range e.kvHosts() {
		t := r.hosts[h]
		t.engines--
		if !dead {
			t.trustedUntil = now.Add(r.terms.ProbeTimeout)
		}
		// After a dead engine, the trust ends now, unless another engine has this host, or left just
		// before.
		r.hosts[h] = t
	}
	maps.DeleteFunc(r.hosts, func(_ string, t trust) bool { return t.engines == 0 && !now.Before(t.trustedUntil) })
}

// scopeOf returns the unit that one proxy owns.
func (r *Roster) scopeOf(e *Engine, kind owner.Kind) string {
	if kind == owner.Groups {
		return e.Conf.Group
	}
	return cmp.Or(e.Conf.Region, r.terms.Region)
}

// EachScope calls f once per engine, so f may get the same scope several times.
func (r *Roster) EachScope(kind owner.Kind, f func(scope string, e *Engine)) {
	for _, e := range r.engines {
		f(r.scopeOf(e, kind), e)
	}
}

// allRanksDrain: each by a drain of its own.
func (r *Roster) allRanksDrain(e *Engine) bool {
	if len(r.drains) == 0 { // the usual case
		return false
	}
	takesWork := func(rank int) bool {
		isOnlyRank := rank < 0 // an only rank drains with the engine
		return isOnlyRank || r.drains[e.rankDrainKey(rank)] == nil
	}
	return !slices.ContainsFunc(e.Ranks(), takesWork)
}

func (r *Roster) endDrains(ends func(*Drain) bool) {
	for key, s := range r.drains {
		if ends(s) {
			delete(r.drains, key)
		}
	}
}

// endDrainsOf keeps a drain with a future deadline, which still has to end the requests that run.
func (r *Roster) endDrainsOf(key string) {
	r.endDrains(func(s *Drain) bool { return s.At.Instance == key && (s.Deadline.IsZero() || s.Overdue) })
}

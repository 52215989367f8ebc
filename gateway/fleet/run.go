package fleet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/recording"
	"evenkeel/prefill/kvevents"
)

// A Fleet owns the roster: it applies events, and publishes lists of engines and ranks. Requests
// call Now to look up engines.
type Fleet struct {
	deps *Deps
	// says which proxy may use a region or decode group; set before the first engine enters
	Admission *owner.Set

	mu      sync.Mutex // serialises applyUnless, so that the lists published last are the newest
	roster  *roster.Roster
	timer   *time.Timer // calls Publish when a deadline or a step of a slow start is due
	tape    recording.Roster
	current atomic.Pointer[roster.Snapshot]

	anyPrefillCalls atomic.Int64 // so that engines take turns
	pages           sync.Map     // *metricPage values of prefill engines, by instance
	learned
	trackedCalls
}

// New returns a Fleet without engines; see Load.
func New(d Deps) *Fleet {
	f := &Fleet{deps: &d, roster: roster.New()}
	f.learned.deps = &d
	f.trackedCalls.presentFleet, f.trackedCalls.serving, f.trackedCalls.all = f.Now, d.Serving, map[*TrackedCall]struct{}{}
	f.current.Store(&roster.Snapshot{})
	f.timer = time.AfterFunc(time.Hour, f.Publish)
	f.timer.Stop() // applyUnless starts it
	return f
}

// Now returns the current picture. A step that asks several questions must ask them of one picture,
// because two may contradict each other.
func (f *Fleet) Now() *roster.Snapshot { return f.current.Load() }

// Publish applies changed settings, changed owners and the present time.
func (f *Fleet) Publish() { f.apply() }

// OnStatus is the callback of the monitor.
func (f *Fleet) OnStatus(key string, s engine.Status) {
	if e := f.Now().Engine(key); e != nil && s.Up && !hasAddress(e) { // its name may resolve by now
		f.resolveAgain(*e)
	}
	f.apply(roster.Health{Key: key, Status: s, IsRefused: errors.Is(s.Err, syscall.ECONNREFUSED)})
}

// apply: the prefill tier and the dispatcher receive the result before Now returns it, so that an
// admitted request finds its engines there.
func (f *Fleet) apply(events ...roster.Event) {
	notKnown := func() bool { return false }
	f.applyUnless(notKnown, events...)
}

// applyUnless calls alreadyKnown under the lock, because many requests may report the same thing at
// once.
func (f *Fleet) applyUnless(alreadyKnown func() bool, events ...roster.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if alreadyKnown() {
		return
	}
	now := time.Now()
	next, effects := f.step(now, f.withSettings(events))
	f.publishStep(next, effects)
	f.trackedCalls.moveDeserted()
	// A proxy that has ended must start no timer.
	if wait := f.roster.Next(now); wait > 0 && f.deps.Context.Err() == nil {
		f.timer.Reset(wait)
	} else {
		f.timer.Stop()
	}
}

// step is called with f.mu held.
func (f *Fleet) step(now time.Time, events []roster.Event) (next *roster.Snapshot, effects []roster.Effect) {
	for _, e := range events {
		effects = f.roster.Apply(e, now, effects)
	}
	// last, because events may bring in engines of another scope
	owners := ownersOf(f.Admission, f.roster)
	effects = f.roster.Apply(owners, now, effects)
	effects = f.roster.Apply(roster.Tick{}, now, effects)
	next = roster.Derive(f.roster)
	f.tape.Step(now, append(events, owners), effects, next)
	return next, effects
}

// publishStep is called with f.mu held.
func (f *Fleet) publishStep(next *roster.Snapshot, effects []roster.Effect) {
	// Until deps.Publish has returned, Now has the new engines with the old routes: routes admit
	// requests, and a request must find its engines.
	f.current.Store(next.WithRoutes(f.Now()))
	enginesChanged := slices.ContainsFunc(effects, func(e roster.Effect) bool { return e.What == roster.WatchEngines })
	if enginesChanged {
		f.deps.Monitor.Set(instancesToWatch(next.Engines()))
		f.dropPagesOfGone(next)
	}
	f.carryOut(effects)
	f.deps.Publish(next.Candidates, next.Locals, next.Workers)
	f.current.Store(next)
}

// withSettings puts the current settings in front of the events, and completes the engines that
// they bring in.
func (f *Fleet) withSettings(events []roster.Event) []roster.Event {
	events = append([]roster.Event{rosterSettings(f.deps.Settings(), f.deps.Started)}, events...)
	for i, e := range events {
		if plan, ofReload := e.(roster.Planned); ofReload {
			events[i] = withoutGone(plan, f.Now())
		}
		for _, added := range enginesIn(events[i]) {
			key := added.Key()
			added.Traffic = f.deps.Monitor.Traffic(key)
			if added.Role == roster.Decode && added.Profile.HasHandoff() {
				added.Traffic.DistrustCache()
			}
			added.Finder = func(rank int) kvevents.Finder { return publisher{f, key, rank} }
		}
	}
	return events
}

func rosterSettings(s *Settings, started time.Time) roster.Terms {
	return roster.Terms{
		Region: s.Geo.Self.Region, Started: started, SlowStart: s.Health.SlowStart, ProbeTimeout: s.Limits.ProbeTimeout,
		KVEvents: s.Prefill.KVEvents, Prefer: s.Engines.Prefer,
	}
}

// ownersOf: Kind is empty if this proxy shares no engine with others.
func ownersOf(owners *owner.Set, r *roster.Roster) (o roster.Owners) {
	switch {
	case owners.Has(owner.Regions):
		o.Kind = owner.Regions
	case owners.Has(owner.Groups):
		o.Kind = owner.Groups
	default:
		return o
	}
	o.Scopes, o.Quotas = map[string]roster.Owned{}, map[string]roster.RankQuota{}
	r.EachScope(o.Kind, func(scope string, e *roster.Engine) {
		if _, done := o.Scopes[scope]; !done {
			o.Scopes[scope] = roster.Owned{Admits: owners.Admits(scope), Fence: owners.Scope(scope)}
		}
		if !e.Decodes() {
			return
		}
		for _, rank := range e.Ranks() {
			name := e.At(rank).ID
			slotLimit, othersKV := owners.RankQuota(scope, name, e.Slots())
			if slotLimit > 0 || othersKV > 0 { // requests of other proxies may run there, too
				o.Quotas[name] = roster.RankQuota{Limit: slotLimit, Others: othersKV}
			}
		}
	})
	return o
}

// resolveAndApply first resolves the host names of the engines that events bring in.
func (f *Fleet) resolveAndApply(events ...roster.Event) {
	var lookups sync.WaitGroup
	for _, e := range events {
		for _, added := range enginesIn(e) {
			lookups.Go(func() { // before, because hand-offs may name these hosts from then on
				before := f.Now().Engine(added.Key()) // in whose place added comes; nil: none
				f.deps.resolveHosts(added, before)
			})
		}
	}
	lookups.Wait()
	f.apply(events...)
}

// of all lookups for one engine together
const dnsTimeout = 2 * time.Second

// withoutGone drops rebuilt engines that have left since the plan was made. An operator or
// discovery would not remove them a second time.
func withoutGone(p roster.Planned, now *roster.Snapshot) roster.Planned {
	hasLeft := func(e *roster.Engine) bool { return !e.FromNewEntry && now.Engine(e.Key()) == nil }
	p.Set = slices.DeleteFunc(slices.Clone(p.Set), hasLeft)
	return p
}

// resolveHosts sets the hosts that an engine may name: a prefill engine in hand-offs, a decode
// engine in callbacks. Any other host is refused. If a name does not resolve now, the addresses of
// before stay trusted.
func (d *Deps) resolveHosts(e, before *roster.Engine) {
	namesHosts := !e.Decodes() || e.CallsBack()
	if !namesHosts {
		return
	}
	hosts := append([]string{e.Target.URL.Hostname()}, e.Profile.KVHosts...)
	ctx, cancel := context.WithTimeout(d.Context, dnsTimeout)
	defer cancel()
	for _, name := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, name)
		switch {
		case err == nil:
		// before.Hosts has addresses of these names
		case before != nil && slices.Equal(before.Profile.KVHosts, e.Profile.KVHosts):
			addrs = before.Hosts
			d.Log.Warn("the name of an engine does not resolve now; the addresses that it had before stay trusted",
				zap.String("engine", e.Key()), zap.String("host", name), zap.Error(err))
		default:
			d.Log.Warn("the name of an engine does not resolve; hand-offs may name it only by this name, and its callbacks are refused "+
				"unless bind.allow has its address", zap.String("engine", e.Key()), zap.String("host", name), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	slices.Sort(hosts)
	e.Hosts = slices.Compact(hosts)
}

// resolveAgain: the name of the engine did not resolve when it came in, e.g. because the engine did
// not run. e is a copy, because a published engine never changes.
func (f *Fleet) resolveAgain(e roster.Engine) {
	f.deps.resolveHosts(&e, f.Now().Engine(e.Key()))
	if !hasAddress(&e) {
		return
	}
	goneOrLocated := func() bool {
		now := f.Now().Engine(e.Key())
		return now == nil || hasAddress(now)
	}
	f.applyUnless(goneOrLocated, roster.Located{Key: e.Key(), Hosts: e.Hosts})
}

// hasAddress says whether the engine's own name has resolved. Addresses in kv_hosts of its profile
// do not count.
func hasAddress(e *roster.Engine) bool {
	return slices.ContainsFunc(e.Hosts, func(host string) bool {
		_, err := netip.ParseAddr(host)
		return err == nil && (host == e.Target.URL.Hostname() || !slices.Contains(e.Profile.KVHosts, host))
	})
}

type publisher struct {
	fleet *Fleet
	key   string
	rank  int
}

func enginesIn(e roster.Event) []*roster.Engine {
	switch e := e.(type) {
	case roster.Entered:
		return []*roster.Engine{e.Engine}
	case roster.Planned:
		return e.Set
	}
	return nil
}

// carryOut is called with f.mu held.
func (f *Fleet) carryOut(effects []roster.Effect) {
	for _, effect := range effects {
		log, e := f.deps.Log, effect.Engine // nil if the effect concerns no single engine
		switch effect.What {
		case roster.Restarted, roster.MayHaveRestarted:
			what := "a prefill engine has restarted; prompts whose KV no decode engine has fetched yet are prefilled again"
			if effect.What == roster.MayHaveRestarted {
				what = "a prefill engine may have restarted; prompts whose KV no decode engine has fetched yet are prefilled again"
			}
			f.learned.forgetBootstrapAnswers(e.ID)
			log.Warn(what, zap.String("engine", e.Key()), zap.String("sign", effect.Why))
		case roster.Forgotten:
			f.learned.forgetBootstrapAnswers(e.ID)
		case roster.StartsSlowly:
			log.Info("an engine is back or new; its share of the load grows step by step",
				zap.String("engine", e.Key()), zap.Duration("over", f.deps.Settings().Health.SlowStart))
		case roster.GroupBroke:
			log.Warn("an engine is down; the other ranks of its group get no requests until it is back, because the ranks of a group step "+
				"together; "+
				"if these ranks do not, give them groups of their own, or write barrier: none",
				zap.String("engine", e.ID), zap.String("group", e.Conf.Group))
		case roster.Refused:
			log.Error("an engine is refused: "+effect.Why, zap.String("engine", e.Key()), zap.String("beside", effect.Beside))
		case roster.GaveBackAnyway:
			log.Error("ALARM: a decode engine gave a request back, although its profile has gives_back: false; its responses and messages may have "+
				"been "+
				"cut short, and it gets none any more; start the engine without recompute_scheduler_enable, or remove gives_back",
				zap.String("decode", e.ID))
		case roster.DrainOverdue:
			moved := f.MoveCalls(effect.Drain.Covers)
			log.Info("the drain's deadline has passed; answers that still run go on elsewhere, or end",
				zap.String("engine", effect.Drain.ID), zap.String("role", effect.Drain.Role), zap.Int("calls", moved))
		}
	}
}

func instancesToWatch(engines []*roster.Engine) (list []engine.Instance) {
	for _, e := range engines {
		instance := engine.Instance{
			ID: e.Key(), Role: e.Role, Target: e.At(roster.NoRank), Ready: e.Profile.Ready(), Version: e.Profile.VersionPath(),
			Ranks: len(e.Ranks()),
			Held:  e.HeldByPause(),
		}
		if e.Decodes() { // the prefill tier tests prefill engines with clients' requests
			instance.Slots = e.Conf.Slots
			instance.Canary = e.Profile.Canary()
			for _, r := range e.Ranks() {
				instance.Canaries = append(instance.Canaries, e.At(r))
			}
		}
		list = append(list, instance)
	}
	return list
}

// NoteHandoff records the engine id in a hand-off. made was read before the prefill call was
// written.
func (f *Fleet) NoteHandoff(made roster.Generation, engineID string) {
	if f.Now().NamesNothingNew(made, engineID) { // as of nearly every request, which pays for no closure then
		return
	}
	nothingNew := func() bool { return f.Now().NamesNothingNew(made, engineID) }
	f.applyUnless(nothingNew, roster.Handed{Made: made, ID: engineID})
}

// DownSince reports whether an engine is down, or was down at some moment after at.
func (f *Fleet) DownSince(key string, at time.Time) bool {
	s := f.deps.Monitor.Status(key)
	cameUpSince := s.Since.After(at) // it was down just before Since
	return !s.Up || cameUpSince
}

// GaveBack records that a decode engine, given by its key, gave a request back, which its profile
// excludes.
func (f *Fleet) GaveBack(decode string) {
	if e := f.Now().Engine(decode); e != nil && e.MustNotGiveBack() {
		f.apply(roster.GaveBack{Key: decode})
	}
}

// KnownHost says whether hand-offs may tell decode engines to fetch KV from a host.
func (f *Fleet) KnownHost(host string) bool { return f.Now().KnownHost(host, time.Now()) }

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
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/kvevents"
)

// A Fleet owns the roster. It applies events to the roster, and publishes lists of engines and ranks that follow from it. Requests call Now
// to look up engines.
type Fleet struct {
	deps      *Deps
	Admission *owner.Set // says which proxy sends requests to a region or decode group; set before the first engine enters

	mu      sync.Mutex // serialises applyUnless up to the end of Publish, so that the lists published last are the newest
	roster  *roster.Roster
	tick    *time.Timer // calls Publish when a deadline or a step of a slow start is due
	tape    recording.Roster
	current atomic.Pointer[roster.Snapshot]

	asked atomic.Int64 // number of calls of AnyPrefill, so that engines take turns
	pages sync.Map     // *page values: the last metric page of each prefill engine, by instance
	learned
	trackedCalls
}

// New returns a Fleet without engines.
func New(d Deps) *Fleet {
	f := &Fleet{deps: &d, roster: roster.New()}
	f.learned.deps, f.learned.now = &d, f.Now
	f.trackedCalls.now, f.trackedCalls.serving, f.trackedCalls.all = f.Now, d.Serving, map[*TrackedCall]struct{}{}
	f.current.Store(&roster.Snapshot{})
	f.tick = time.AfterFunc(time.Hour, f.Publish)
	f.tick.Stop()
	return f
}

// Now returns the current picture of the fleet. A step that asks several questions must ask them of one picture, because the answers of two
// pictures may contradict each other.
func (f *Fleet) Now() *roster.Snapshot { return f.current.Load() }

// Publish updates the roster after changes of the settings or the owners, or because time has passed.
func (f *Fleet) Publish() { f.apply() }

// OnStatus is the callback of the monitor for an engine whose health has changed.
func (f *Fleet) OnStatus(key string, s engine.Status) {
	if in := f.Now().Engine(key); in != nil && s.Up && !located(in) {
		f.locate(*in)
	}
	f.apply(roster.Health{Key: key, Status: s, IsRefused: errors.Is(s.Err, syscall.ECONNREFUSED)})
}

// apply applies events to the roster, and publishes the result. The prefill tier and the dispatcher receive it before Now returns it, so
// that a request which the API admits finds its engines there.
func (f *Fleet) apply(events ...roster.Event) {
	f.applyUnless(func() bool { return false }, events...)
}

// applyUnless is apply, unless stale reports that the roster already knows the events. It calls stale under the lock, because many requests
// may report the same thing at once.
func (f *Fleet) applyUnless(stale func() bool, events ...roster.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if stale() {
		return
	}
	now := time.Now()
	var effects []roster.Effect
	events = f.completed(events)
	for _, e := range events {
		effects = f.roster.Apply(e, now, effects)
	}
	owners := ownersOf(f.Admission, f.roster)
	effects = f.roster.Apply(owners, now, effects)
	effects = f.roster.Apply(roster.Tick{}, now, effects)
	next := roster.Derive(f.roster)
	f.tape.Step(now, append(events, owners), effects, next)
	f.current.Store(next.WithRoutes(f.Now())) // the new routes are published last: see WithRoutes
	if slices.ContainsFunc(effects, func(e roster.Effect) bool { return e.What == roster.Watched }) {
		f.deps.Monitor.Set(watched(next.Engines()))
		f.forgetPages(next)
	}
	f.carryOut(effects)
	f.deps.Publish(next.Candidates, next.Locals, next.Workers)
	f.current.Store(next)
	f.trackedCalls.moveDesertedProbes()
	if wait := f.roster.Next(now); wait > 0 && f.deps.Context.Err() == nil {
		f.tick.Reset(wait)
	} else {
		f.tick.Stop()
	}
}

// completed returns events with the current settings in front, and gives the engines that they bring in what only the fleet knows.
func (f *Fleet) completed(events []roster.Event) []roster.Event {
	events = append([]roster.Event{termsOf(f.deps.Settings(), f.deps.Started)}, events...)
	for i, e := range events {
		if plan, ok := e.(roster.Planned); ok {
			events[i] = withoutGone(plan, f.Now())
		}
		for _, in := range enters(events[i]) {
			key := in.Key()
			in.Traffic = f.deps.Monitor.Traffic(key)
			in.Finder = func(rank int) kvevents.Finder { return publisher{f, key, rank} }
		}
	}
	return events
}

// termsOf returns the settings that the roster depends on.
func termsOf(s *Settings, started time.Time) roster.Terms {
	return roster.Terms{
		Region: s.Geo.Self.Region, Started: started, SlowStart: s.Health.SlowStart, ProbeTimeout: s.Limits.ProbeTimeout,
		KVEvents: s.Prefill.KVEvents, Beyond: s.Dispatch.Beyond, Prefer: s.Engines.Prefer,
	}
}

// ownersOf returns which proxy may send requests to which engines now, according to a. The Kind is empty if this proxy shares no engine.
func ownersOf(a *owner.Set, r *roster.Roster) (o roster.Owners) {
	switch {
	case a.Has(owner.Regions):
		o.Kind = owner.Regions
	case a.Has(owner.Groups):
		o.Kind = owner.Groups
	default:
		return o
	}
	o.Scopes, o.Quotas = map[string]roster.Owned{}, map[string]roster.RankQuota{}
	r.Scopes(o.Kind, func(scope string, e *roster.Engine) {
		if _, asked := o.Scopes[scope]; !asked {
			o.Scopes[scope] = roster.Owned{Admits: a.Admits(scope), Fence: a.Of(scope)}
		}
		if !e.Decodes() {
			return
		}
		for _, rank := range e.Ranks() {
			name := e.At(rank).ID
			if limit, others := a.Room(scope, name, e.Slots()); limit > 0 || others > 0 {
				o.Quotas[name] = roster.RankQuota{Limit: limit, Others: others}
			}
		}
	})
	return o
}

// enter looks up the host names of the engines that events bring in, and then applies the events.
func (f *Fleet) enter(events ...roster.Event) {
	var lookups sync.WaitGroup
	for _, e := range events {
		for _, in := range enters(e) {
			lookups.Go(func() { // before the first hand-off can name these hosts
				f.deps.learnHosts(in, f.Now().Engine(in.Key()))
			})
		}
	}
	lookups.Wait()
	f.apply(events...)
}

// lookupPatience bounds all DNS lookups for one engine together.
const lookupPatience = 2 * time.Second

// withoutGone returns the plan without the engines that it only builds again, and that have left the fleet since it was made. An operator
// or discovery has removed these, and would not remove them a second time if they came back.
func withoutGone(p roster.Planned, now *roster.Snapshot) roster.Planned {
	p.Set = slices.DeleteFunc(slices.Clone(p.Set), func(in *roster.Engine) bool { return !in.FromNewEntry && now.Engine(in.Key()) == nil })
	return p
}

// learnHosts sets the host names and addresses that an engine may name: a prefill engine in hand-offs, a decode engine in callbacks or
// where it offers KV to prefill engines. They are trusted while the engine is in the fleet. Any other host is refused. before is the engine
// that the fleet has with the same key; nil: none. If a name does not resolve now, the addresses of before stay trusted.
func (d *Deps) learnHosts(in, before *roster.Engine) {
	namesHosts := !in.Decodes() || in.CallsBack() || in.Profile.HandBack == mooncake.HandBackFetched
	if !namesHosts {
		return
	}
	hosts := append([]string{in.Target.URL.Hostname()}, in.Profile.KVHosts...)
	ctx, cancel := context.WithTimeout(d.Context, lookupPatience)
	defer cancel()
	for _, name := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, name)
		switch {
		case err == nil:
		case before != nil && slices.Equal(before.Profile.KVHosts, in.Profile.KVHosts): // before.Hosts are of the same names
			addrs = before.Hosts
			d.Log.Warn("the name of an engine does not resolve now; the addresses that it had before stay trusted",
				zap.String("engine", in.Key()), zap.String("host", name), zap.Error(err))
		default:
			d.Log.Warn("the name of an engine does not resolve; hand-offs may name it only by this name, and its callbacks are refused "+
				"unless bind.allow has its address", zap.String("engine", in.Key()), zap.String("host", name), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	slices.Sort(hosts)
	in.Hosts = slices.Compact(hosts)
}

// locate looks up the hosts of an engine again whose name did not resolve when it came in. Such an engine may not have run then.
func (f *Fleet) locate(in roster.Engine) {
	f.deps.learnHosts(&in, f.Now().Engine(in.Key()))
	if located(&in) {
		f.applyUnless(func() bool {
			now := f.Now().Engine(in.Key())
			return now == nil || located(now)
		}, roster.Located{Key: in.Key(), Hosts: in.Hosts})
	}
}

// located says whether the fleet knows an address of an engine, beside those that kv_hosts of its profile gives.
func located(in *roster.Engine) bool {
	return slices.ContainsFunc(in.Hosts, func(host string) bool {
		_, err := netip.ParseAddr(host)
		return err == nil && (host == in.Target.URL.Hostname() || !slices.Contains(in.Profile.KVHosts, host))
	})
}

// publisher finds where a rank of an engine publishes its KV events.
type publisher struct {
	fleet *Fleet
	key   string
	rank  int
}

// enters returns the engines that an event brings into the fleet.
func enters(e roster.Event) []*roster.Engine {
	switch e := e.(type) {
	case roster.Entered:
		return []*roster.Engine{e.Engine}
	case roster.Planned:
		return e.Set
	}
	return nil
}

// carryOut carries out the effects of the roster. It is called with f.mu held.
func (f *Fleet) carryOut(effects []roster.Effect) {
	for _, e := range effects {
		log, in := f.deps.Log, e.Engine // in is nil for effects that concern no single engine
		switch e.What {
		case roster.Restarted, roster.MayHaveRestarted:
			what := "a prefill engine has restarted; prompts whose KV no decode engine has fetched yet are prefilled again"
			if e.What == roster.MayHaveRestarted {
				what = "a prefill engine may have restarted; prompts whose KV no decode engine has fetched yet are prefilled again, " +
					"unless the earlier process answers once more"
			}
			f.learned.forget(in.ID)
			log.Warn(what, zap.String("engine", in.Key()), zap.String("sign", e.Text))
		case roster.Forgotten:
			f.learned.forget(in.ID)
		case roster.StartsSlowly:
			log.Info("an engine is back or new; its share of the load grows step by step",
				zap.String("engine", in.Key()), zap.Duration("over", f.deps.Settings().Health.SlowStart))
		case roster.GroupBroke:
			log.Warn("an engine is down; the other ranks of its group get no requests until it is back, because the ranks of a group step "+
				"together; "+
				"if these ranks do not, give them groups of their own, or write barrier: none",
				zap.String("engine", in.ID), zap.String("group", in.Conf.Group))
		case roster.Refused:
			log.Error("an engine is refused: "+e.Text, zap.String("engine", in.Key()), zap.String("beside", e.Beside))
		case roster.GaveBackAnyway:
			log.Error("ALARM: a decode engine gave a request back, although its profile has gives_back: false; its responses and messages may have "+
				"been "+
				"cut short, and it gets none any more; start the engine without recompute_scheduler_enable, or remove gives_back",
				zap.String("decode", in.ID))
		case roster.DrainOverdue:
			moved := f.MoveCalls(e.Stop.Covers)
			log.Info("the drain's deadline has passed; answers that still run go on elsewhere, or end",
				zap.String("engine", e.Stop.ID), zap.String("role", e.Stop.Role), zap.Int("calls", moved))
		}
	}
}

// watched returns engines in the form that the monitor needs to watch them.
func watched(engines []*roster.Engine) (list []engine.Instance) {
	for _, in := range engines {
		instance := engine.Instance{
			ID: in.Key(), Role: in.Role, Target: in.At(-1), Ready: in.Profile.Ready(), Version: in.Profile.VersionPath(), Ranks: len(in.Ranks()),
			Held: in.Held(),
		}
		if in.Decodes() { // only decode engines need a canary request: the prefill tier tests prefill engines with clients' requests
			instance.Slots = in.Conf.Slots
			instance.Canary = in.Profile.Canary()
			for _, r := range in.Ranks() {
				instance.Canaries = append(instance.Canaries, in.At(r))
			}
		}
		list = append(list, instance)
	}
	return list
}

// Made returns the engine process that made a hand-off. id is the engine id in the hand-off, and before is the candidate's process when the
// prefill call (probe) was sent. If the hand-off shows something that the roster does not know yet, such as a new process, Made first
// records it there.
func (f *Fleet) MakerOf(before roster.ProcessID, c prefill.Candidate, id string) roster.ProcessID {
	made, known := f.Now().Made(before, c.ID, id)
	if !known {
		f.applyUnless(func() bool {
			_, known := f.Now().Made(before, c.ID, id)
			return known
		}, roster.Handed{ProcessID: before, Candidate: c.ID, ID: id})
		made, _ = f.Now().Made(before, c.ID, id)
	}
	return made
}

// DownSince reports whether an engine is down now, or has been down since the time at.
func (f *Fleet) DownSince(key string, at time.Time) bool {
	s := f.deps.Monitor.Status(key)
	return !s.Up || s.Since.After(at)
}

// GaveBack records that a decode engine gave a request back although its profile says that it never does. decode is the engine's key.
func (f *Fleet) GaveBack(decode string) {
	if e := f.Now().Engine(decode); e != nil && e.MustNotGiveBack() {
		f.apply(roster.GaveBack{Key: decode})
	}
}

// KnownHost says whether hand-offs may tell decode engines to fetch KV from a host.
func (f *Fleet) KnownHost(host string) bool { return f.Now().KnownHost(host, time.Now()) }

package fleet

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/owner"
	"evenkeel/gateway/recording"
	"evenkeel/prefill"
	"evenkeel/prefill/kvevents"
	"evenkeel/prefill/local"
)

// A Fleet keeps the roster. It applies events to the roster, and publishes what follows from them. Requests call Now
// for what they need to know of engines.
type Fleet struct {
	host      *Host
	Admission *owner.Set // which proxy admits to scopes of engines (regions or decode groups); set before the first engine enters

	mu      sync.Mutex // held until all parts that bind requests have the lists, so that the lists published last are the newest
	roster  *roster.Roster
	tick    *time.Timer // applies a Tick when time alone changes something
	tape    recording.Roster
	current atomic.Pointer[Published]

	asked atomic.Int64 // how often a prefill engine was asked for token ids
	pages sync.Map     // of *page: the last metric page of each prefill engine, by instance
	learned
	runs
}

// Host is the proxy as its fleet uses it.
type Host struct {
	Context    context.Context        // ends with the proxy
	Serving    func() context.Context // ends when requests without an answer must end
	Started    time.Time
	Log        *zap.Logger
	Registerer prometheus.Registerer
	Settings   func() *Settings // the current settings
	Client     *engine.Client
	Monitor    *engine.Monitor
	Dispatch   func(context.Context) board.Status
	Publish    func([]prefill.Candidate, []local.Rank, []board.Worker) // to all parts that bind requests
	// Gauged is called with the KV tokens in use on a decode rank, and the time for which they hold.
	// It must not block.
	Gauged func(worker int32, kvTokens int64, at time.Time)
}

// New returns a fleet without engines.
func New(h Host) *Fleet {
	f := &Fleet{host: &h, roster: roster.New()}
	f.learned.host, f.learned.now = &h, f.Now
	f.runs.now, f.runs.serving, f.runs.all = f.Now, h.Serving, map[*Run]struct{}{}
	f.current.Store(&Published{})
	f.tick = time.AfterFunc(time.Hour, f.Publish)
	f.tick.Stop()
	return f
}

// Now is the current picture. If one step asks several questions, it must ask them of the same picture, because
// answers of two pictures need not fit each other.
func (f *Fleet) Now() *Published { return f.current.Load() }

// Publish takes up changes around the roster: of settings, owners, and the time.
func (f *Fleet) Publish() { f.apply() }

// OnStatus is the monitor's callback.
func (f *Fleet) OnStatus(key string, s engine.Status) {
	f.apply(roster.Health{Key: key, Status: s, IsRefused: errors.Is(s.Err, syscall.ECONNREFUSED)})
}

// apply applies events, and publishes what follows. The prefill tier and the dispatcher receive it first: so a
// request that the API admits finds the engines there for which it was admitted.
func (f *Fleet) apply(events ...roster.Event) {
	f.applyUnless(func() bool { return false }, events...)
}

// applyUnless is apply, unless stale reports that the events are not new any more. It asks stale once it holds the lock, because many
// requests may have found the same at once.
func (f *Fleet) applyUnless(stale func() bool, events ...roster.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if stale() {
		return
	}
	now := time.Now()
	var effects []roster.Effect
	events = append([]roster.Event{termsOf(f.host.Settings(), f.host.Started)}, events...)
	for _, e := range events {
		for _, in := range enters(e) {
			key := in.Key()
			in.Traffic = f.host.Monitor.Traffic(key)
			in.Finder = func(rank int) kvevents.Finder { return publisher{f, key, rank} }
		}
		effects = f.roster.Apply(e, now, effects)
	}
	owners := ownersOf(f.Admission, f.roster)
	effects = f.roster.Apply(owners, now, effects)
	effects = f.roster.Apply(roster.Tick{}, now, effects)
	next := roster.Derive(f.roster)
	f.tape.Step(now, append(events, owners), effects, next)
	f.current.Store(next.WithRoutes(f.Now())) // new routes come into force last: see WithRoutes
	if slices.ContainsFunc(effects, func(e roster.Effect) bool { return e.What == roster.Watched }) {
		f.host.Monitor.Set(watched(next.Engines()))
	}
	f.carryOut(effects)
	f.host.Publish(next.Candidates, next.Locals, next.Workers)
	f.current.Store(next)
	f.runs.moveDesertedProbes()
	if wait := f.roster.Next(now); wait > 0 && f.host.Context.Err() == nil {
		f.tick.Reset(wait)
	} else {
		f.tick.Stop()
	}
}

// termsOf returns the settings that the roster depends on.
func termsOf(s *Settings, started time.Time) roster.Terms {
	return roster.Terms{
		Region: s.Geo.Self.Region, Started: started, SlowStart: s.Health.SlowStart, ProbeTimeout: s.Limits.ProbeTimeout,
		KVEvents: s.Prefill.KVEvents, Beyond: s.Dispatch.Beyond, Prefer: s.Engines.Prefer,
	}
}

// ownersOf says which proxy may admit to which engines now, by a, for the engines of the roster. The Kind is empty if this proxy is alone.
func ownersOf(a *owner.Set, r *roster.Roster) (o roster.Owners) {
	switch {
	case a.Has(owner.Regions):
		o.Kind = owner.Regions
	case a.Has(owner.Groups):
		o.Kind = owner.Groups
	default:
		return o
	}
	o.Scopes, o.Rooms = map[string]roster.Owned{}, map[string]roster.Room{}
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
				o.Rooms[name] = roster.Room{Limit: limit, Others: others}
			}
		}
	})
	return o
}

// enter applies events that bring engines in, once the names and addresses of the hosts of these engines are known.
func (f *Fleet) enter(events ...roster.Event) {
	var lookups sync.WaitGroup
	for _, e := range events {
		for _, in := range enters(e) {
			lookups.Go(func() { f.host.learnHosts(in) }) // before hand-offs name these hosts
		}
	}
	lookups.Wait()
	f.apply(events...)
}

// learnHosts finds the names and addresses to which the hand-offs of a prefill engine may point decode engines. They are trusted while the
// engine is in the fleet, and any other host in a hand-off is refused. For a decode engine that calls back, it finds the names and
// addresses that the callback may name. Other engines have none.
func (h *Host) learnHosts(in *roster.Engine) {
	if in.Decodes() && !in.CallsBack() {
		return
	}
	hosts := append([]string{in.Target.URL.Hostname()}, in.Profile.KVHosts...)
	ctx, cancel := context.WithTimeout(h.Context, 2*time.Second)
	defer cancel()
	for _, name := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, name)
		if err != nil {
			h.Log.Warn("the name of an engine does not resolve; hand-offs may name it only by this name, and its callbacks are refused "+
				"unless bind.allow has its address", zap.String("engine", in.Key()), zap.String("host", name), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	slices.Sort(hosts)
	in.Hosts = slices.Compact(hosts)
}

// publisher finds where a rank of an engine publishes its KV events.
type publisher struct {
	fleet *Fleet
	key   string
	rank  int
}

// enters returns the engines that come in with an event.
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
		log, in := f.host.Log, e.Engine
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
				zap.String("engine", in.Key()), zap.Duration("over", f.host.Settings().Health.SlowStart))
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
			n := f.Move(e.Stop.Covers)
			log.Info("the drain's deadline has passed; answers that still run go on elsewhere, or end",
				zap.String("engine", e.Stop.ID), zap.String("role", e.Stop.Role), zap.Int("calls", n))
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
		if in.Decodes() { // only decode engines need a canary: the prefill tier tries prefill engines with clients' requests
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

// Made is the birth of a hand-off that names the engine id, from a candidate whose birth was b when its probe was sent. If the id shows
// something new about the processes of the engine, the roster learns that first.
func (f *Fleet) Made(b Birth, c prefill.Candidate, id string) Birth {
	made, known := f.Now().Made(b, c.ID, id)
	if !known {
		f.applyUnless(func() bool {
			_, known := f.Now().Made(b, c.ID, id)
			return known
		}, roster.Handed{Birth: b, Candidate: c.ID, ID: id})
		made, _ = f.Now().Made(b, c.ID, id)
	}
	return made
}

// DownSince reports whether an engine is down, or was down after the time at.
func (f *Fleet) DownSince(key string, at time.Time) bool {
	s := f.host.Monitor.Status(key)
	return !s.Up || s.Since.After(at)
}

// GaveBack records that a decode engine gave an answer back, if its profile says that it never does. decode is the engine's key.
func (f *Fleet) GaveBack(decode string) {
	if e := f.Now().Engine(decode); e != nil && e.MustNotGiveBack() {
		f.apply(roster.GaveBack{Key: decode})
	}
}

// KnownHost says whether a hand-off may point decode engines at a host.
func (f *Fleet) KnownHost(host string) bool { return f.Now().KnownHost(host, time.Now()) }

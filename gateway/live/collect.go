package live

import (
	"cmp"
	"context"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/engine/discover"
	"evenkeel/gateway"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/prefill"
)

// proxy is a subject that is a running proxy.
type proxy struct {
	*gateway.Gateway
	version, host string
}

// Document asks all parts of the proxy how they are. Rates and incidents are not
// in it yet.
func (p *proxy) Document(ctx context.Context) Document {
	s, tier, now := p.Status(ctx), p.Prefill().Overview(), time.Now()
	recent, conf := p.Recent(), p.Config()
	d := Document{
		Form: Form, AtMs: now.UnixMilli(), EveryMs: sampleEvery.Milliseconds(),
		Proxy: Proxy{
			ID: cmp.Or(conf.Geo.Self.ID, p.host), Region: conf.Geo.Self.Region, Version: p.version, UptimeS: now.Sub(s.Started).Seconds(),
			Ready: s.Ready, Why: s.Why, Draining: s.Drain != nil, Policy: s.Dispatch.Policy, PrefillPolicy: tier.Policy,
			ReloadedMs: reloaded(s.Config.Since, s.Started),
			Open:       s.Open, Places: s.PoolPlaces, PlacesUsed: s.PoolUsed, DriftSlots: s.Dispatch.Drift.Slots, DriftTokens: s.Dispatch.Drift.KVTokens,
		},
		Traffic: Traffic{TTFT: latency(recent.TTFT), TPOT: latency(recent.TPOT)},
		Models:  make([]Model, 0, len(s.Dispatch.Models)),
		Prefill: Prefill{
			Policy: tier.Policy, Waiting: tier.Waiting, Batch: s.Batch, QueueMax: conf.Prefill.Queue.Max, ScrapeEveryMs: float64(conf.Prefill.Scrape.Interval.Milliseconds()),
			HitShare: share(float64(tier.Index.ActualTokens), float64(tier.Index.PromptTokens)), Engines: make([]PrefillEngine, 0, len(tier.Candidates)), Groups: []PrefillGroup{},
		},
		Waiting: []Waiting{}, Incidents: []Incident{}, Failures: []Failed{},
		Advice: append([]Advice{}, s.Advice...), Engines: make([]Engine, 0, len(s.Engines)),
		Decisions: Decisions(p.Receipts().Latest(mostDecisions), now), Sources: sources(s.Discovery), Scopes: []Scope{},
	}
	if s.Config.Last != nil {
		d.Proxy.ConfigError = s.Config.Last.Error
	}
	for key, ends := range p.Reloader().Certificates() {
		d.Proxy.Certificates = append(d.Proxy.Certificates, Certificate{key, ends.Sub(now).Seconds()})
	}
	ranks := newRankStates(&s)
	for i := range s.Dispatch.Models {
		d.Models = append(d.Models, model(&s.Dispatch.Models[i], ranks, conf.Pool.TTL.Seconds(), len(conf.Dispatch.Twin) > 0))
	}
	for i := range tier.Candidates {
		if c := &tier.Candidates[i]; c.Aggregated {
			id, _ := fleet.Called(c.ID)
			d.Prefill.Groups = append(d.Prefill.Groups, PrefillGroup{ID: id, State: c.State, Inflight: c.Inflight})
		} else {
			d.Prefill.Engines = append(d.Prefill.Engines, prefillEngine(c, conf.Prefill.KVThreshold))
		}
	}
	for _, e := range s.Engines {
		d.Engines = append(d.Engines, Engine{
			ID: e.ID, Role: e.Role, Models: named(e.Models), Group: e.Group, State: e.State, Why: e.Error, SinceS: age(now, e.Since), Draining: e.Draining,
			Hangs: e.Hangs, Share: e.Share, Ranks: e.Ranks, Version: e.Version,
		})
	}
	if pooled := slices.ContainsFunc(d.Models, func(m Model) bool { return m.Pool.Entries > 0 }); pooled || tier.Waiting > 0 {
		d.Waiting = waitingOf(p.Receipts().Waiting())
	}
	readGauges(&d, p.Gauges)
	if host, most, all := p.Receipts().FailedOn(now); all >= failedLeast && float64(most) >= failedShare*float64(all) && elsewhere(d.Engines, host) {
		d.Traffic.FailedOn = host
	}
	for i := range d.Advice {
		d.Prefill.BacklogS = max(d.Prefill.BacklogS, d.Advice[i].Prefill.BacklogSeconds)
	}
	if d.Prefill.BacklogS > lateSeconds && len(d.Waiting) > 0 {
		key := d.Waiting[0].Key
		lately, before := p.Receipts().Hits(key, now)
		if lately.Prompt > 0 && before.Prompt > 0 {
			d.Prefill.Hits = &Hits{key, share(float64(lately.Cached), float64(lately.Prompt)), share(float64(before.Cached), float64(before.Prompt))}
		}
	}
	p.regions(&d)
	return d
}

// readGauges fills in what engines say of the ranks behind a barrier.
func readGauges(d *Document, of func(rank int32) (gateway.Gauges, bool)) {
	for i := range d.Models {
		for j := range d.Models[i].Groups {
			g := &d.Models[i].Groups[j]
			if !g.onlyDecodes() {
				continue
			}
			for k := range g.Ranks {
				if said, ok := of(g.Ranks[k].ID); ok {
					g.Ranks[k].gauges = &said
				}
			}
		}
	}
}

// mostKeys is how many keys the document names.
const mostKeys = 5

// waitingOf sorts who waits.
func waitingOf(keys map[string]int) []Waiting {
	list := make([]Waiting, 0, len(keys))
	for key, n := range keys {
		list = append(list, Waiting{key, n})
	}
	slices.SortFunc(list, func(a, b Waiting) int { return cmp.Or(cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Key, b.Key)) })
	if len(list) > mostKeys {
		rest := Waiting{}
		for _, w := range list[mostKeys:] {
			rest.Requests += w.Requests
		}
		list = append(list[:mostKeys], rest)
	}
	return list
}

// abroad fills in other regions.
func (p *proxy) regions(d *Document) {
	if n := p.Geo(); n != nil {
		s := n.Status()
		d.Geo = &Geo{Policy: s.Policy, Peers: make([]Peer, 0, len(s.Peers))}
		for _, o := range s.Peers {
			d.Geo.Peers = append(d.Geo.Peers, Peer{o.ID, o.Region, o.Up, o.Draining, o.Fault, o.RTTMs, o.InFlight, o.Circuit})
		}
	}
	for _, a := range p.Owners() {
		d.Scopes = append(d.Scopes, Scope{a.Region, "", a.Home, a.Phase, a.Admits, a.Holder, a.Epoch})
	}
	if ha := p.HA(); ha != nil {
		d.Proxy.Role = ha.Role
		for _, g := range ha.Groups {
			d.Scopes = append(d.Scopes, Scope{d.Proxy.Region, g.Group, true, g.Phase, g.Admits, g.Holder, g.Epoch})
		}
	}
}

func sources(s *discover.Status) []Source {
	all := []Source{}
	if s == nil {
		return all
	}
	for _, one := range s.Sources {
		source := Source{Name: one.Name, Engines: one.Engines, Error: one.Error, Unfit: []Unfit{}}
		for _, e := range s.Engines {
			if e.Source == one.Name && e.State == discover.Unfit {
				source.Unfit = append(source.Unfit, Unfit{e.ID, e.Role, e.Why})
			}
		}
		all = append(all, source)
	}
	return all
}

// mostNamed is how many models of an engine the document names. LoRA adapters are models, too, and there may be thousands.
const mostNamed = 16

// named are the first of an engine's models, which begin with the base model, and "other" for the rest.
func named(models []string) []string {
	if len(models) <= mostNamed {
		return models
	}
	return append(slices.Clone(models[:mostNamed]), "other")
}

func model(m *board.ModelStatus, states rankStates, ttl float64, twin bool) Model {
	out := Model{
		Pool:   Pool{Entries: m.Pool, OldestS: m.OldestSeconds, TTLS: ttl, UpToS: board.PoolAgeSeconds, Ages: m.PoolAges},
		Groups: make([]Group, 0, len(m.Groups)),
	}
	out.Name, out.Aggregated = fleet.Called(m.Model)
	for i := range m.Groups {
		g := &m.Groups[i]
		group := Group{GroupLoads: g.GroupLoads, Held: g.Held, Rounds: roundsOf(g), Twin: twinOf(m, g, twin), Counterfactuals: counterfactuals(g), Ranks: []Rank{}}
		if g.Step != nil {
			group.law = law{c0: g.Step.C0Ms, c1: g.Step.C1Ms, each: g.Step.RequestMs}
			group.StepMs, group.ModelMs, group.ModelWhy = float64(g.Step.MeanMs), g.Step.ModelMs, g.Step.Why
			group.LostShare, group.LostMs, group.SyncWaitMs = g.Step.LostShare, g.Step.LostMs, g.Step.SyncWaitMs
		}
		for _, w := range m.Workers {
			if w.Barrier == g.Barrier && (!g.Barrier || w.Group == g.Name) {
				group.Ranks = append(group.Ranks, Rank{
					ID: w.ID, Name: w.Name, State: states.of(&w), Steps: !w.Down && !w.Removed, KVTokens: w.KVTokens, Unread: w.Unread, Capacity: w.Capacity,
					Used: w.Used, Slots: w.Limit, Running: w.Running, Output: w.Output, Answers: w.Answers, Empty: w.Empty, Tight: w.Tight, Backlog: w.Backlog, Prompts: w.Prompts,
				})
			}
		}
		out.Groups = append(out.Groups, group)
	}
	return out
}

// rankStates say why a rank is not up: engines and drains by their name.
type rankStates struct {
	engines map[string]string // state, of engines with ranks
	drains  map[string]bool
}

func newRankStates(s *gateway.Status) rankStates {
	all := rankStates{map[string]string{}, map[string]bool{}}
	for _, e := range s.Engines {
		if e.Role != fleet.Prefill {
			all.engines[e.ID] = e.State
		}
	}
	for _, d := range s.Drains {
		if d.Role != fleet.Prefill {
			all.drains[d.ID] = true
		}
	}
	return all
}

func (r rankStates) of(w *board.WorkerStatus) string {
	engine, _, _ := strings.Cut(w.Name, "/")
	switch state := r.engines[engine]; {
	case w.Removed:
		return RankRemoved
	case w.Up:
		return RankUp
	case state == "down", w.Down && state == "up": // the engine goes on without it
		return RankDown
	case state == "out" || state == "wedged" || state == "halted":
		return RankOut
	case r.drains[w.Name] || r.drains[engine]:
		return RankDraining
	default:
		return RankForeign
	}
}

func prefillEngine(c *prefill.CandidateStatus, gate float64) PrefillEngine {
	p := PrefillEngine{
		ID: c.ID, State: c.State, KVTokens: c.KVTokens, Budget: int64(gate * float64(c.CapacityTokens)), KVShare: c.OwnUsage, GateShare: gate,
		Inflight: c.Inflight, NewTokens: c.QueuedNewTokens, Waiting: c.Waiting, Pooled: c.Pooled, Dispatched: c.Dispatched,
		HitShare: c.HitShare, ScrapeAgeMs: -1,
	}
	if c.State == "out" {
		p.Why = firstLine(c.Fault)
	}
	if c.ScrapedUsage != nil {
		p.KVShare = max(p.KVShare, *c.ScrapedUsage)
	}
	if c.ScrapeAgeMs != nil {
		p.ScrapeAgeMs = *c.ScrapeAgeMs
	}
	return p
}

// reloaded is since when the config is in force; 0: since the start.
func reloaded(since, started time.Time) int64 {
	if !since.After(started) {
		return 0
	}
	return since.UnixMilli()
}

func latency(l journal.Latency) Latency {
	return Latency{P50Ms: float64(l.P50.Microseconds()) / 1000, P99Ms: float64(l.P99.Microseconds()) / 1000, Samples: l.Samples}
}

func share(part, of float64) float64 {
	if of == 0 {
		return 0
	}
	return part / of
}

func age(now, then time.Time) float64 {
	if then.IsZero() {
		return 0
	}
	return max(0, now.Sub(then).Seconds())
}

func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "evenkeel"
	}
	return name
}

const (
	failedLeast = 5   // requests that failed in the last minute, for a host to be named
	failedShare = 0.9 // of them had an attempt on the host that failed
)

// elsewhere says that engines of other hosts may take over what those of a host do.
func elsewhere(engines []Engine, host string) bool {
	at := func(e *Engine) string {
		h, _, _ := net.SplitHostPort(e.ID)
		return h
	}
	known := false
	for i := range engines {
		e := &engines[i]
		if known = known || at(e) == host; at(e) == host && !slices.ContainsFunc(engines, func(o Engine) bool {
			return at(&o) != host && o.Role == e.Role && o.State == "up" && !o.Draining
		}) {
			return false
		}
	}
	return known
}

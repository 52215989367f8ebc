package live

import (
	"evenkeel/gateway/detect"
	"evenkeel/gateway/watch"
)

// documentOf is what was seen, in the form of a Document. Types of the same fields are converted; their JSON names are those of the page.
func documentOf(look *watch.Look, version string) Document {
	f := &look.Facts
	p := &f.Proxy
	d := Document{
		Form: Form, AtMs: f.At.UnixMilli(), EveryMs: detect.Every.Milliseconds(),
		Proxy: Proxy{
			ID: p.ID, Region: p.Region, Role: p.Role, Version: version, UptimeS: p.UptimeS, Ready: p.Ready, Why: p.Why, Draining: p.Draining,
			ConfigError: p.ConfigError, ReloadedMs: p.ReloadedMs, Policy: p.Policy, PrefillPolicy: p.PrefillPolicy, Open: p.Open, Places: p.Places,
			PlacesUsed: p.PlacesUsed, DriftSlots: p.DriftSlots, DriftTokens: p.DriftTokens,
			Certificates: each(f.Certificates, func(c *detect.Certificate) Certificate { return Certificate(*c) }),
		},
		Traffic: Traffic{
			RequestsPerS: f.Traffic.RequestsPerS, FailuresPerS: f.Traffic.FailuresPerS, Recovered: f.Traffic.Recovered, FailedOn: f.Traffic.FailedOn,
			TokensPerS: f.Traffic.TokensPerS, TTFT: Latency(f.Traffic.TTFT), TPOT: Latency(f.Traffic.TPOT),
		},
		Incidents: each(look.Incidents, func(i *detect.Incident) Incident { return Incident(*i) }),
		Failures:  each(f.Failures, func(x *detect.Failed) Failed { return Failed(*x) }),
		Models:    each(f.Models, func(m *detect.Model) Model { return modelOf(m, f.Twin) }),
		Prefill:   prefillOf(&f.Prefill),
		Waiting:   each(f.Waiting, func(w *detect.Waiting) Waiting { return Waiting(*w) }),
		Engines: each(f.Engines, func(e *detect.Engine) Engine {
			return Engine{e.ID, e.Role, e.Models, e.Group, e.State, e.Why, e.Hangs, e.SinceS, e.Draining, e.Share, e.Ranks, e.Version}
		}),
		Advice:    each(f.Advice, func(a *Advice) Advice { return *a }),
		Decisions: []Decision{},
		Sources: each(f.Sources, func(s *detect.Source) Source {
			return Source{s.Name, s.Engines, s.Error, each(s.Unfit, func(u *detect.Unfit) Unfit { return Unfit(*u) })}
		}),
		Scopes: each(f.Scopes, func(s *detect.Scope) Scope { return Scope(*s) }),
	}
	if f.Geo != nil {
		d.Geo = &Geo{f.Geo.Policy, each(f.Geo.Peers, func(p *detect.Peer) Peer { return Peer(*p) })}
	}
	return d
}

// each is a list of others, which is never nil.
func each[From, To any](list []From, to func(*From) To) []To {
	out := make([]To, len(list))
	for i := range list {
		out[i] = to(&list[i])
	}
	return out
}

func modelOf(m *detect.Model, twin bool) Model {
	return Model{m.Name, m.Aggregated, Pool(m.Pool), each(m.Groups, func(g *detect.Group) Group {
		return Group{
			GroupLoads: g.GroupLoads, Held: g.Held, StepMs: g.StepMs, TokenMs: g.TokenMs, UsualMs: g.UsualMs, SlowS: g.SlowS,
			Differ:     differs(g.Differ),
			StepTokens: g.StepTokens, UsualTokens: g.UsualTokens, FewS: g.FewS, ModelMs: g.ModelMs, ModelWhy: g.ModelWhy, LostShare: g.LostShare,
			LostMs: g.LostMs, SyncWaitMs: g.SyncWaitMs, Rounds: roundsOf(g), Twin: twinOf(m, g, twin), Counterfactuals: counterfactuals(g),
			Ranks: each(g.Ranks, func(r *detect.Rank) Rank {
				return Rank{
					r.ID, r.Name, r.State, r.Steps, r.KVTokens, r.Unread, r.Capacity, r.Used, r.Slots, r.Running, r.Output, r.Answers, r.Empty, r.TokenMs, r.Tight,
					Lately(r.Lately), r.Backlog, r.Prompts,
				}
			}),
		}
	})}
}

func differs(list []detect.Differs) []Differs {
	if len(list) == 0 {
		return nil // it is left out of the document
	}
	return each(list, func(d *detect.Differs) Differs { return Differs(*d) })
}

func prefillOf(p *detect.Prefill) Prefill {
	out := Prefill{
		Policy: p.Policy, Waiting: p.Waiting, Batch: BatchStatus(p.Batch), QueueMax: p.QueueMax, ScrapeEveryMs: p.ScrapeEveryMs, HitShare: p.HitShare,
		BacklogS: p.BacklogS, BusyS: p.BusyS,
		Engines: each(p.Engines, func(e *detect.PrefillEngine) PrefillEngine { return PrefillEngine(*e) }),
		Groups:  each(p.Groups, func(g *detect.PrefillGroup) PrefillGroup { return PrefillGroup(*g) }),
	}
	if p.Hits != nil {
		hits := Hits(*p.Hits)
		out.Hits = &hits
	}
	return out
}

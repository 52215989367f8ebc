// Package livetest has a proxy for tests of the live page and of what sends it.
package livetest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/live"
	"evenkeel/gateway/timeline"
)

// Proxy is a proxy that a test makes up: one group of ranks whose loads move, and
// whatever else Change says.
type Proxy struct {
	mu     sync.Mutex
	began  time.Time
	ranks  int
	asked  int           // documents made
	ahead  time.Duration // of the clock
	failed map[timeline.Outcome]uint64
	whys   map[timeline.Outcome]timeline.Why
	fails  uint64 // requests in all, of which rates are made
	change func(*live.Document)
}

// New has so many ranks.
func New(ranks int) *Proxy { return &Proxy{began: time.Now(), ranks: ranks} }

// Change has a function change each document from now on; nil: none does.
func (p *Proxy) Change(change func(*live.Document)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change = change
}

// Fail has requests fail: so many by their outcome since the start, why, and so many in all, of which rates are made.
func (p *Proxy) Fail(by map[timeline.Outcome]uint64, whys map[timeline.Outcome]timeline.Why, all uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed, p.whys, p.fails = by, whys, all
}

// Pass lets time go by.
func (p *Proxy) Pass(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead += d
}

// seconds since it began; called with p.mu held.
func (p *Proxy) seconds() float64 { return (time.Since(p.began) + p.ahead).Seconds() }

// Documents is how many were made.
func (p *Proxy) Documents() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// load is what rank i holds after s seconds.
func (p *Proxy) load(i int, s float64) int64 {
	base := 180_000 + 26_000*math.Sin(s/17+float64(i)/9) + 14_000*math.Sin(s/5+float64(i*i%97))
	if i%24 == 7 {
		base += 45_000 * (1 + math.Sin(s/40))
	}
	return int64(base)
}

// Sample is how it is now.
func (p *Proxy) Sample(context.Context) (s gateway.Sample, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at(p.seconds()), true
}

// At is the sample of another second, so that a test need not wait for a history.
func (p *Proxy) At(seconds float64) gateway.Sample {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at(seconds)
}

func (p *Proxy) at(seconds float64) (s gateway.Sample) {
	for i := range p.ranks {
		s.Ranks = append(s.Ranks, board.Load{Worker: int32(i), KVTokens: p.load(i, seconds)})
	}
	s.TTFT = journal.Latency{P50: ms(310 + 40*math.Sin(seconds/11)), P99: ms(1450 + 300*math.Sin(seconds/8)), Samples: 900}
	s.TPOT = journal.Latency{P50: ms(31 + 2*math.Sin(seconds/12)), P99: ms(48 + 5*math.Sin(seconds/6)), Samples: 880}
	s.OutputTokens, s.Ended, s.Pool = int64(150_000*(seconds+1000)), uint64(410*(seconds+1000)), int(12+10*math.Sin(seconds/10))
	s.Failures, s.Whys, s.Failed = p.failed, p.whys, p.fails
	return s
}

func ms(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }

func latency(l journal.Latency) live.Latency {
	return live.Latency{P50Ms: float64(l.P50.Microseconds()) / 1000, P99Ms: float64(l.P99.Microseconds()) / 1000, Samples: l.Samples}
}

// Document is all that is known of it now.
func (p *Proxy) Document(context.Context) live.Document {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	seconds := p.seconds()
	s := p.at(seconds)
	g := live.Group{GroupLoads: board.GroupLoads{Name: "dp", Barrier: true, Policy: "evenkeel"}, StepMs: 31.4, ModelMs: 30.6, LostShare: 0.062, LostMs: 1.9, Held: 3}
	g.Twin = live.Twin{
		Says: []string{"against jsq-kv: 3.1 ms of every 31 ms step saved, 2.6 rank-hours saved today; over 52 min: 3.0 ms saved, with an error of 0.4 ms", "against brh: no difference beyond the twin's error of 0.8 % of a step"},
		Note: "Replayed: the 4.0 min until 12 s ago; error 0.8 % of a step.",
		Verdict: &verdict.Twin{
			AgeSeconds: 12, WindowSeconds: 240, Policy: "evenkeel", StepMs: 31.4, TwinStepMs: 31.2, ErrorRatio: 0.008,
			Against: []verdict.Against{{Policy: "jsq-kv", StepMs: 34.3, SavedMs: 3.1, Claimed: true, Hour: &verdict.Hour{Seconds: 3120, StepMs: 34.2, SavedMs: 3, ErrorRatio: 0.012}, Says: "against jsq-kv: 3.1 ms of every 31 ms step saved, 2.6 rank-hours saved today; over 52 min: 3.0 ms saved, with an error of 0.4 ms"}, {Policy: "brh", StepMs: 31.3, SavedMs: 0.1}},
		},
	}
	var loads policy.Balance
	for i, r := range s.Ranks {
		loads.Add(r.KVTokens)
		g.Ranks = append(g.Ranks, live.Rank{
			ID: r.Worker, Name: fmt.Sprintf("10.0.3.%d:8000/%d", 10+i/16, i%16), State: live.RankUp, Steps: true, KVTokens: r.KVTokens, Capacity: 320_000,
			Used: 30 + i%11, Slots: 48, Running: 29 + i%11,
		})
	}
	g.SteppingRanks, g.KVTokens, g.MeanTokens, g.LeastTokens, g.MostTokens = loads.Ranks, loads.Sum, loads.Mean(), loads.Min, loads.Max
	g.ImbalanceTokens, g.IdleShare = loads.Imbalance(), loads.IdleShare()
	g.Counterfactuals = []live.Counterfactual{{Policy: "jsq-kv", MostTokens: g.MostTokens + 24_000, SavedMs: 3.1}}
	d := live.Document{
		Form: live.Form, AtMs: time.Now().UnixMilli(), EveryMs: 1000,
		Proxy:   live.Proxy{ID: "eu-1", Version: "dev", UptimeS: 90_000 + seconds, Ready: true, Policy: "evenkeel", PrefillPolicy: "finish", Open: 5012, Places: 400, PlacesUsed: 37},
		Traffic: live.Traffic{TTFT: latency(s.TTFT), TPOT: latency(s.TPOT)},
		Models: []live.Model{{Name: "deepseek-r1", Groups: []live.Group{g}, Pool: live.Pool{
			Entries: s.Pool, OldestS: 0.74, TTLS: 60, UpToS: board.PoolAgeSeconds, Ages: []int{s.Pool / 2, s.Pool / 3, s.Pool - s.Pool/2 - s.Pool/3, 0, 0, 0, 0},
		}}},
		Prefill: live.Prefill{Policy: "finish", Waiting: 4, QueueMax: 1000, HitShare: 0.41, Groups: []live.PrefillGroup{}},
		Waiting: []live.Waiting{}, Incidents: []live.Incident{}, Failures: []live.Failed{}, Advice: []live.Advice{}, Decisions: []live.Decision{}, Sources: []live.Source{}, Scopes: []live.Scope{},
	}
	for i := range 12 {
		used := int64(400_000 + 30_000*i + int(20_000*math.Sin(seconds/9+float64(i))))
		d.Prefill.Engines = append(d.Prefill.Engines, live.PrefillEngine{
			ID: fmt.Sprintf("10.0.1.%d:8000/0", 10+i), State: "open", KVTokens: used, Budget: 900_000, KVShare: float64(used) / 1e6, GateShare: 0.9,
			Inflight: i % 4, NewTokens: int64(i%4) * 6100, Waiting: float64(i % 3), Pooled: i % 5, Dispatched: i % 2, HitShare: 0.3 + 0.02*float64(i), ScrapeAgeMs: 120,
		})
		d.Engines = append(d.Engines, live.Engine{ID: fmt.Sprintf("10.0.1.%d:8000", 10+i), Role: "prefill", Models: []string{"deepseek-r1"}, State: "up", SinceS: 86_000, Share: 1, Ranks: 1, Version: "0.11.0"})
	}
	for i := range (p.ranks + 15) / 16 {
		d.Engines = append(d.Engines, live.Engine{ID: fmt.Sprintf("10.0.3.%d:8000", 10+i), Role: "decode", Models: []string{"deepseek-r1"}, Group: "dp", State: "up", SinceS: 86_000, Share: 1, Ranks: 16, Version: "0.11.0"})
	}
	for i := range 12 {
		d.Decisions = append(d.Decisions, live.Decision{
			ID: fmt.Sprintf("%016x%016x", uint64(int(seconds)-i)*0x9e3779b97f4a7c15, uint64(i)*0xbf58476d1ce4e5b9), AtMs: d.AtMs - int64(i)*130, Model: "deepseek-r1", Prompt: 900 + 517*i, Prefill: fmt.Sprintf("10.0.1.%d:8000/0", 10+i),
			Rank: fmt.Sprintf("10.0.3.%d:8000/%d", 10+i%9, i), WaitMs: 2.1 * float64(i), Outcome: []string{"", "ok", "ok"}[i%3], Why: "evenkeel: least imbalance over 40 steps",
		})
	}
	if p.change != nil {
		p.change(&d)
	}
	return d
}

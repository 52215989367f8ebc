// Package livetest has a simulated proxy, for tests of the live page and of its sender.
package livetest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/policy"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/live"
	"evenkeel/gateway/watch"
)

// Proxy is a simulated proxy: one group of ranks whose loads move. Change can change all other
// facts.
type Proxy struct {
	mu     sync.Mutex
	began  time.Time
	ranks  int
	asked  int           // times that facts were asked for
	ahead  time.Duration // how far the proxy's clock is ahead of the real time
	failed map[detect.Outcome]uint64
	whys   map[detect.Outcome]detect.Why
	fails  uint64 // failed requests in total, from which rates are computed
	change func(*detect.Facts)
	decide func([]live.Decision)
	next   *detect.Facts // facts of the last sample, for the next call of Facts
}

// New returns a proxy with this number of ranks.
func New(ranks int) *Proxy { return &Proxy{began: time.Now(), ranks: ranks} }

// Change sets a function that changes all facts from now on; nil: nothing changes them.
func (p *Proxy) Change(change func(*detect.Facts)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.change = change
}

// Decide sets a function that changes all decisions from now on.
func (p *Proxy) Decide(decide func([]live.Decision)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.decide = decide
}

// Age moves the start of the proxy into the past by d.
func (p *Proxy) Age(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began = p.began.Add(-d)
}

// Fail sets the failed requests since the start, by outcome and in total, with their reasons.
func (p *Proxy) Fail(by map[detect.Outcome]uint64, whys map[detect.Outcome]detect.Why, all uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failed, p.whys, p.fails = by, whys, all
}

// Pass moves the clock of the proxy forward by d.
func (p *Proxy) Pass(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ahead += d
}

// seconds returns the time since the start. The caller holds p.mu.
func (p *Proxy) seconds() float64 { return (time.Since(p.began) + p.ahead).Seconds() }

// Watch returns a Watch that samples the simulated proxy.
func (p *Proxy) Watch() *watch.Watch { return watch.New(watch.Deps{Sample: p.Sample, Facts: p.Facts}) }

// Live returns a Live that shows the results of w.
func (p *Proxy) Live(w *watch.Watch) *live.Live {
	return live.New(w, live.Options{Version: "dev", Log: zap.NewNop(), Decisions: p.Decisions})
}

// Asked returns how often facts were asked for.
func (p *Proxy) Asked() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked
}

// load returns the KV tokens of rank i after s seconds.
func (p *Proxy) load(i int, s float64) int64 {
	base := 180_000 + 26_000*math.Sin(s/17+float64(i)/9) + 14_000*math.Sin(s/5+float64(i*i%97))
	if i%24 == 7 {
		base += 45_000 * (1 + math.Sin(s/40))
	}
	return int64(base)
}

// Sample returns the loads of the simulated ranks at the present time of the proxy.
func (p *Proxy) Sample(context.Context) (s detect.Sample, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s = p.at(p.seconds())
	f := p.facts()
	s.At, p.next = f.At, &f
	s.Ranks = s.Ranks[:0]
	for i := range f.Models {
		for j := range f.Models[i].Groups {
			for _, r := range f.Models[i].Groups[j].Ranks {
				s.Ranks = append(s.Ranks, detect.RankAt{ID: r.ID, Running: r.Running, KVTokens: r.KVTokens, Output: r.Output - int64(r.Answers),
					AnswerCounts: detect.AnswerCounts{Answers: r.Answers, Empty: r.Empty}})
			}
		}
	}
	return s, true
}

// now returns the proxy's time. The caller holds p.mu.
func (p *Proxy) now() time.Time { return time.Now().Add(p.ahead) }

// At returns the sample of another second, so that a test need not wait for a history.
func (p *Proxy) At(seconds float64) detect.Sample {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at(seconds)
}

func (p *Proxy) at(seconds float64) (s detect.Sample) {
	for i := range p.ranks {
		s.Ranks = append(s.Ranks, detect.RankAt{ID: int32(i), KVTokens: p.load(i, seconds)})
	}
	s.TTFT = detect.Latency{P50Ms: 310 + 40*math.Sin(seconds/11), P99Ms: 1450 + 300*math.Sin(seconds/8), Samples: 900}
	s.TPOT = detect.Latency{P50Ms: 31 + 2*math.Sin(seconds/12), P99Ms: 48 + 5*math.Sin(seconds/6), Samples: 880}
	s.Tokens, s.Ended, s.Pool = int64(150_000*(seconds+1000)), uint64(410*(seconds+1000)), int(12+10*math.Sin(seconds/10))
	s.Failures, s.Whys, s.Failed = p.failed, p.whys, p.fails
	return s
}

// Facts returns the facts of the last sample once, and otherwise new ones. Asked counts its calls.
func (p *Proxy) Facts(context.Context) detect.Facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if f := p.next; f != nil {
		p.next = nil
		return *f
	}
	return p.facts()
}

// facts returns the present facts. The caller holds p.mu.
func (p *Proxy) facts() detect.Facts {
	seconds := p.seconds()
	s := p.at(seconds)
	g := detect.Group{GroupLoads: board.GroupLoads{Name: "dp", Barrier: true, Policy: "evenkeel"}, StepMs: 31.4, ModelMs: 30.6,
		LostShare: 0.062, LostMs: 1.9, Held: 3}
	g.StepModel = detect.StepModel{BaseMs: 20, PerTokenMs: 1.3e-4}
	var loads policy.Balance
	for i, r := range s.Ranks {
		loads.Add(r.KVTokens)
		g.Ranks = append(g.Ranks, detect.Rank{
			ID: r.ID, Name: fmt.Sprintf("10.0.3.%d:8000/%d", 10+i/16, i%16), State: detect.RankUp, InSteps: true, KVTokens: r.KVTokens,
			Capacity: 320_000,
			Used:     30 + i%11, Slots: 48, Running: 29 + i%11,
		})
	}
	g.SteppingRanks, g.KVTokens, g.MeanTokens, g.LeastTokens, g.MostTokens = loads.Ranks, loads.Sum, loads.Mean(), loads.Min, loads.Max
	g.ImbalanceTokens, g.IdleShare = loads.Imbalance(), loads.IdleShare()
	f := detect.Facts{
		At: p.now(),
		Proxy: detect.Proxy{ID: "eu-1", UptimeS: 90_000 + seconds, Ready: true, Policy: "evenkeel", PrefillPolicy: "finish", Open: 5012,
			Places: 400, PlacesUsed: 37},
		Traffic: detect.Traffic{TTFT: s.TTFT, TPOT: s.TPOT},
		Models: []detect.Model{{Name: "deepseek-r1", Groups: []detect.Group{g}, Pool: detect.Pool{
			Entries: s.Pool, OldestS: 0.74, TTLS: 60, UpToS: board.PoolAgeSeconds,
			Ages: []int{s.Pool / 2, s.Pool / 3, s.Pool - s.Pool/2 - s.Pool/3, 0, 0, 0, 0},
		}}},
		Prefill: detect.Prefill{Policy: "finish", Waiting: 4, QueueMax: 1000, HitShare: 0.41},
	}
	for i := range 12 {
		used := int64(400_000 + 30_000*i + int(20_000*math.Sin(seconds/9+float64(i))))
		f.Prefill.Engines = append(f.Prefill.Engines, detect.PrefillEngine{
			ID: fmt.Sprintf("10.0.1.%d:8000/0", 10+i), State: "open", KVTokens: used, Budget: 900_000, KVShare: float64(used) / 1e6, GateShare: 0.9,
			Inflight: i % 4, NewTokens: int64(i%4) * 6100, Waiting: float64(i % 3), Pooled: i % 5, Dispatched: i % 2,
			HitShare: 0.3 + 0.02*float64(i), ScrapeAgeMs: 120,
		})
		f.Engines = append(f.Engines, detect.Engine{ID: fmt.Sprintf("10.0.1.%d:8000", 10+i), Role: "prefill", Models: []string{"deepseek-r1"},
			State: "up", SinceS: 86_000, Share: 1, Ranks: 1, Version: "0.11.0"})
	}
	for i := range (p.ranks + 15) / 16 {
		f.Engines = append(f.Engines, detect.Engine{ID: fmt.Sprintf("10.0.3.%d:8000", 10+i), Role: "decode", Models: []string{"deepseek-r1"},
			Group: "dp", State: "up", SinceS: 86_000, Share: 1, Ranks: 16, Version: "0.11.0"})
	}
	if p.change != nil {
		p.change(&f)
	}
	return f
}

// Decisions returns 12 made-up decisions, the latest first.
func (p *Proxy) Decisions(now time.Time) []live.Decision {
	list := []live.Decision{}
	p.mu.Lock()
	defer p.mu.Unlock()
	seconds := p.seconds()
	for i := range 12 {
		list = append(list, live.Decision{
			ID:   fmt.Sprintf("%016x%016x", uint64(int(seconds)-i)*0x9e3779b97f4a7c15, uint64(i)*0xbf58476d1ce4e5b9),
			AtMs: now.UnixMilli() - int64(i)*130, Model: "deepseek-r1", Prompt: 900 + 517*i, Prefill: fmt.Sprintf("10.0.1.%d:8000/0", 10+i),
			Rank: fmt.Sprintf("10.0.3.%d:8000/%d", 10+i%9, i), WaitMs: 2.1 * float64(i), Outcome: []string{"", "ok", "ok"}[i%3],
			Why: "evenkeel: least imbalance over 40 steps",
		})
	}
	if p.decide != nil {
		p.decide(list)
	}
	return list
}

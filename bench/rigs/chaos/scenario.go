package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/rigs/testbed"
)

// scenario is what is done to the proxy. Zero means none of it.
type scenario struct {
	name      string
	connector refengine.Connector // empty: that of most engines, ascend-mooncake-v1
	duration  time.Duration
	count     int // requests after which it ends, instead of duration

	streams   int     // in the system at once
	stream    float64 // share that is streamed
	cancel    float64 // share that its client leaves, in any phase
	rate      float64 // share of an engine's requests that a fault strikes, all kinds equally
	busy      float64 // share of the prefill engines' probes that are answered 503
	heads     float64 // share of the decode engines' requests that are reset before the head of the answer
	slots     int     // of a rank; 0: enough with one engine down
	wide, lag int     // clients that ask for several answers at once, and that hardly read
	operators bool    // kills, restarts, drains, reloads, policies, keys
	strangers bool    // attacks on the sockets, after the same load without them
	killAll   bool    // each decode engine once, in the middle of the streams

	prefill, decode, ranks int
	step                   time.Duration
	output                 [2]int        // tokens an answer, from and to
	hold                   time.Duration // of KV that nobody pulls
	settle                 time.Duration // after the last request, until everything must be given back
}

// The scenarios. Holds are short where engines lose hand-offs, so that what a
// dead engine's peer keeps is free before the end; where only clients leave, the
// hold is long and everything must be given back without it.
var scenarios = []scenario{
	{
		name: "mixed", duration: 2 * time.Minute, streams: 120, stream: 0.7, cancel: 0.1, rate: 0.01, wide: 4, lag: 3, operators: true,
		prefill: 3, decode: 3, ranks: 2, step: 15 * time.Millisecond, output: [2]int{1, 80}, hold: 8 * time.Second, settle: 20 * time.Second,
	},
	{
		name: "lives", count: 10_000, streams: 80, stream: 0.7, cancel: 0.25, rate: 0.2, wide: 4, lag: 3, operators: true,
		prefill: 4, decode: 4, ranks: 2, step: 5 * time.Millisecond, output: [2]int{1, 60}, hold: 8 * time.Second, settle: 30 * time.Second,
	},
	{
		name: "faults", duration: 2 * time.Minute, streams: 500, stream: 1, rate: 0.01,
		prefill: 3, decode: 3, ranks: 2, step: 60 * time.Millisecond, output: [2]int{8, 64}, hold: 8 * time.Second, settle: 20 * time.Second,
	},
	{
		name: "disconnects", count: 10_000, streams: 300, stream: 0.8, cancel: 1,
		prefill: 3, decode: 3, ranks: 2, step: 10 * time.Millisecond, output: [2]int{8, 64}, hold: 2 * time.Minute, settle: 2 * time.Second,
	},
	{
		name: "kill", count: 1200, streams: 200, stream: 1, killAll: true,
		prefill: 2, decode: 3, ranks: 2, step: 25 * time.Millisecond, output: [2]int{80, 160}, hold: 8 * time.Second, settle: 20 * time.Second,
	},
	{
		name: "busy-prefill", count: 2000, streams: 60, stream: 0.7, busy: 0.2,
		prefill: 3, decode: 3, ranks: 2, step: 10 * time.Millisecond, output: [2]int{4, 32}, hold: 2 * time.Minute, settle: 20 * time.Second,
	},
	{
		name: "heads", count: 2000, streams: 60, stream: 0.7, heads: 0.2,
		prefill: 3, decode: 3, ranks: 2, step: 10 * time.Millisecond, output: [2]int{4, 32}, hold: 20 * time.Second, settle: 30 * time.Second,
	},
	{
		name: "lease", connector: refengine.NIXLPull, count: 2000, streams: 320, stream: 0.7, slots: 16,
		prefill: 2, decode: 3, ranks: 2, step: 100 * time.Millisecond, output: [2]int{100, 200}, hold: 30 * time.Second, settle: 40 * time.Second,
	},
	{
		name: "strangers", count: 2000, streams: 24, stream: 1, strangers: true,
		prefill: 2, decode: 2, ranks: 2, step: 20 * time.Millisecond, output: [2]int{8, 64}, hold: 2 * time.Minute, settle: 20 * time.Second,
	},
	{
		name: "soak", duration: 30 * time.Minute, streams: 60, stream: 0.7, cancel: 0.1, rate: 0.01, wide: 2, lag: 2, operators: true,
		prefill: 3, decode: 3, ranks: 2, step: 20 * time.Millisecond, output: [2]int{1, 120}, hold: 8 * time.Second, settle: 20 * time.Second,
	},
}

func names() (list []string) {
	for _, s := range scenarios {
		list = append(list, s.name)
	}
	return list
}

func scenarioOf(name string) (scenario, error) {
	if i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.name == name }); i >= 0 {
		s := scenarios[i]
		s.connector = cmp.Or(s.connector, refengine.AscendMooncake)
		return s, nil
	}
	return scenario{}, fmt.Errorf("no scenario %q; there are %s", name, strings.Join(names(), ", "))
}

// options are the command line's.
type options struct {
	testbed.Options
	connector refengine.Connector
	seed      uint64
	duration  time.Duration
	rate      float64
	count     int
	race      bool
	record    string
	loops     int
}

// warmUp is how long the proxy serves in peace before its memory is taken for
// what it should come back to.
const warmUp = 3 * time.Second

// play runs a scenario from the first engine to the verdict.
func play(ctx context.Context, s scenario, o options) (*report, error) {
	const set = "-X evenkeel/gateway/config.grace=%v -X evenkeel/gateway/config.confirm=%v -X 'evenkeel/gateway/recording.file=%s'"
	flags := []string{fmt.Sprint("-race=", o.race), fmt.Sprintf("-ldflags=-s -w "+set, bindPatience, confirm, o.record)}
	w, err := testbed.New(ctx, "chaos", o.Options, flags...)
	if err != nil {
		return nil, err
	}
	r := &report{Scenario: s.name, Speaks: string(s.connector), Seed: o.seed, Folder: w.Dir}
	defer func() { _ = w.Close(len(r.Breaches) == 0) }()
	books := newLedger()
	f, err := startFleet(w, s, o.seed, books)
	if err != nil {
		return nil, err
	}
	p, err := startProxy(ctx, w, s, o.loops, f)
	if err != nil {
		return nil, err
	}

	cold, err := p.vitals()
	if err != nil {
		return nil, err
	}
	calm := s
	calm.cancel, calm.wide, calm.lag, calm.count, calm.duration = 0, 0, 0, 0, warmUp
	if _, err := (&crowd{s: calm, seed: o.seed + 1, p: p}).run(ctx); err != nil {
		return nil, err
	}
	if err := p.idle(ctx, f, s.settle); err != nil {
		return nil, fmt.Errorf("after the warm-up: %w", err)
	}
	before, err := p.vitals()
	if err != nil {
		return nil, err
	}
	before.Goroutines, before.Files = cold.Goroutines, cold.Files // those of the warm-up's connections end later
	var peace *seen
	if s.strangers {
		if peace, err = (&crowd{s: s, seed: o.seed, p: p}).run(ctx); err != nil {
			return nil, err
		}
		if err := p.idle(ctx, f, s.settle); err != nil {
			return nil, fmt.Errorf("before the attacks: %w", err)
		}
	}
	books.reset()

	r.Started = time.Now()
	crowd := &crowd{s: s, seed: o.seed, p: p}
	trouble := startTrouble(ctx, s, o.seed, f, p, crowd)
	var foes []load.Config
	if s.strangers {
		foes = append(foes, (&strangers{p, trouble.actions}).attack(o.seed))
	}
	seen, err := crowd.run(ctx, foes...)
	r.Actions = trouble.stop()
	r.Seconds = time.Since(r.Started).Seconds()
	if err != nil {
		return nil, err
	}
	if s.strangers {
		r.TTFT = map[string]float64{"alone": peace.TTFT, "beside attacks": seen.TTFT}
	}
	f.misbehave("") // no more
	idle := p.idle(ctx, f, s.settle)
	if idle == nil {
		idle = r.restart(ctx, s, f, p)
	}
	r.judge(ctx, s, f, p, books, seen, before, idle)
	if err := p.End(20 * time.Second); err != nil {
		r.breach("the proxy's end", "%v", err)
	}
	return r, nil
}

// loadOf is the load of one caller, who has so many tenths of the clients and of the requests.
func (s scenario) loadOf(url, key string, seed uint64, share int) load.Config {
	c := load.Config{
		URLs: []string{url}, APIKey: key, Model: model, Chat: 0.5, Stream: s.stream, Usage: 0.3, Seed: seed, Timeout: 3 * time.Minute,
		Cancel: load.Cancel{Share: s.cancel}, Backoff: 200 * time.Millisecond, Requests: requests(seed, s.output),
		Concurrency: max(1, s.streams*share/10), Duration: s.duration,
	}
	if s.count > 0 {
		c.Count, c.Duration = max(1, s.count*share/10), 0
	}
	return c
}

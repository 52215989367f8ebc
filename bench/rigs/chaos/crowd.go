package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
)

// crowd are the clients.
type crowd struct {
	s    scenario
	seed uint64
	p    *proxy

	ended atomic.Int64 // of the requests that load sends
}

// seen is what the clients saw.
type seen struct {
	*testbed.Tally
	Wide tally   `json:"wide"` // requests for several answers
	Slow tally   `json:"slow"` // clients that hardly read
	TTFT float64 `json:"-"`    // ms, the median of the last caller
}

// tally counts how the requests of clients of our own ended.
type tally struct {
	Right  int `json:"right"`
	Failed int `json:"failed"` // and it was said
	Wrong  int `json:"wrong"`
}

// requests is a repeatable mix of lengths.
func requests(seed uint64, output [2]int) []trace.Request {
	rng := rand.New(rand.NewPCG(seed, 7))
	list := make([]trace.Request, 997)
	for i := range list {
		list[i] = trace.Request{Prompt: 4 + rng.IntN(60), Output: output[0] + rng.IntN(output[1]-output[0]+1)}
		if rng.IntN(20) == 0 {
			list[i].Prompt = 500 + rng.IntN(1500)
		}
	}
	return list
}

// run sends until the scenario is over and every answer has ended. Others send as long.
func (c *crowd) run(ctx context.Context, others ...load.Config) (*seen, error) {
	shares := map[string]int{callers[0].name: 5, callers[1].name: 3, callers[2].name: 1, guest.name: 1} // of ten
	if c.s.count > 0 || !c.s.operators {
		shares = map[string]int{callers[0].name: 5, callers[1].name: 5} // nobody who is refused by plan
	}
	if c.s.strangers {
		shares = map[string]int{callers[0].name: 10}
	}
	transport := &http.Transport{IdleConnTimeout: 2 * time.Second, MaxIdleConnsPerHost: c.s.wide}
	client := &http.Client{Timeout: time.Minute, Transport: transport}
	defer client.CloseIdleConnections()
	wide := func(_ context.Context, rng *rand.Rand) error { return wideOnce(c.p.URL(), client, rng) }
	loads := append([]load.Config{c.own(c.s.wide, 1000, wide), c.own(c.s.lag, 2000, c.slowOnce)}, others...)
	own := len(loads)
	for i, who := range callers {
		share := shares[who.name]
		if share == 0 {
			continue
		}
		cfg := c.s.loadOf(c.p.URL(), who.key(), c.seed+uint64(i)*7919, share)
		cfg.OnProgress = func(load.Progress) { c.ended.Add(1) }
		loads = append(loads, cfg)
	}
	results, err := testbed.Drive(ctx, nil, loads...)
	if err != nil {
		return nil, err
	}
	total := &seen{Tally: testbed.Count(testbed.Told, results[own:]...), TTFT: results[len(results)-1].All.TTFT.P50}
	for i, t := range []*tally{&total.Wide, &total.Slow} {
		one := testbed.Count(testbed.Told, results[i])
		*t = tally{one.Right, len(one.Told), len(one.Wrong)}
		total.Wrong = append(total.Wrong, one.Wrong...)
	}
	return total, nil
}

// own is a load of clients of our own, who go on until the others have ended. Each request draws
// from a source of its own.
func (c *crowd) own(clients int, kind uint64, ask func(context.Context, *rand.Rand) error) load.Config {
	send := func(ctx context.Context, _ string, i int) (load.Kind, string) {
		switch err := ask(ctx, rand.New(rand.NewPCG(c.seed, kind<<32+uint64(i)))); {
		case err == nil:
			return load.OK, ""
		case errors.Is(err, errTold):
			return load.ErrorEvent, ""
		default:
			return load.WrongText, err.Error()
		}
	}
	return load.Config{URLs: []string{c.p.URL()}, Concurrency: clients, Own: send}
}

// pause waits; false when ctx has ended.
func pause(ctx context.Context, d time.Duration) bool { return testbed.Pause(ctx, d) == nil }

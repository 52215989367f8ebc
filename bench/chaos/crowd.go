package main

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/trace"
	"evenkeel/bench/world"
)

// crowd are the clients.
type crowd struct {
	s    scenario
	seed uint64
	p    *proxy

	ended atomic.Int64 // of the requests that load sends
}

func newCrowd(s scenario, seed uint64, p *proxy) *crowd {
	return &crowd{s: s, seed: seed, p: p}
}

// seen is what the clients saw.
type seen struct {
	Sent      int            `json:"sent"`
	Right     int            `json:"right"`
	Left      int            `json:"left"`    // by plan
	Refused   int            `json:"refused"` // a status and an error in words, before any of the answer
	Broken    int            `json:"broken"`  // an error event, after some of it
	Kinds     map[string]int `json:"kinds"`   // of what was not right
	Wrong     []load.Failure `json:"-"`       // neither right nor told
	Failures  []load.Failure `json:"-"`       // told
	WrongText []string       `json:"-"`       // of the wide and the slow
	Wide      tally          `json:"wide"`    // requests for several answers
	Slow      tally          `json:"slow"`    // clients that hardly read
	TTFT      float64        `json:"-"`       // ms, the median of the load that ended last
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

// run sends until the scenario is over and every answer has ended.
func (c *crowd) run(ctx context.Context) (*seen, error) {
	shares := map[string]int{callers[0].name: 5, callers[1].name: 3, callers[2].name: 1, guest.name: 1} // of ten
	if c.s.count > 0 || !c.s.operators {
		shares = map[string]int{callers[0].name: 5, callers[1].name: 5} // nobody who is refused by plan
	}
	if c.s.strangers {
		shares = map[string]int{callers[0].name: 10}
	}
	var wg sync.WaitGroup
	over, cancel := context.WithCancel(ctx)
	defer cancel()
	total := &seen{Kinds: map[string]int{}}
	var mu sync.Mutex // of total and failed
	var failed error
	for i, who := range callers {
		share := shares[who.name]
		if share == 0 {
			continue
		}
		cfg := c.s.loadOf(c.p.URL(), who.key(), c.seed+uint64(i)*7919)
		cfg.Concurrency = max(1, c.s.streams*share/10)
		cfg.Count = c.s.count * share / 10
		cfg.OnProgress = func(load.Progress) { c.ended.Add(1) }
		wg.Go(func() {
			r, err := load.Run(ctx, cfg)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = err
				return
			}
			total.add(r)
		})
	}
	var others sync.WaitGroup
	for i := range c.s.wide {
		others.Go(func() { c.wide(over, rand.New(rand.NewPCG(c.seed, uint64(1000+i))), total, &mu) })
	}
	for i := range c.s.lag {
		others.Go(func() { c.slow(over, rand.New(rand.NewPCG(c.seed, uint64(2000+i))), total, &mu) })
	}
	wg.Wait()
	cancel()
	others.Wait()
	return total, failed
}

func (s *seen) add(r *load.Result) {
	s.Sent += r.Sent
	s.Right += r.OK
	s.TTFT = r.All.TTFT.P50
	s.Left += r.Cancelled + r.Stopped
	for kind, n := range r.Kinds {
		if kind.Failed() {
			s.Kinds[string(kind)] += n
		}
	}
	for _, f := range r.Failures {
		switch {
		case strings.HasPrefix(string(f.Kind), "http_"):
			s.Refused++
			s.Failures = append(s.Failures, f)
		case f.Kind == load.ErrorEvent:
			s.Broken++
			s.Failures = append(s.Failures, f)
		default:
			s.Wrong = append(s.Wrong, f)
		}
	}
}

// pause waits; false when ctx has ended.
func pause(ctx context.Context, d time.Duration) bool { return world.Pause(ctx, d) == nil }

package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
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

func newCrowd(s scenario, seed uint64, p *proxy) *crowd {
	return &crowd{s: s, seed: seed, p: p}
}

// seen is what the clients saw.
type seen struct {
	Sent     int            `json:"sent"`
	Right    int            `json:"right"`
	Left     int            `json:"left"`    // by plan
	Refused  int            `json:"refused"` // a status and an error in words, before any of the answer
	Broken   int            `json:"broken"`  // an error event, after some of it
	Kinds    map[string]int `json:"kinds"`   // of what was not right
	Wrong    []string       `json:"-"`       // neither right nor told
	Failures []load.Failure `json:"-"`       // told
	Wide     tally          `json:"wide"`    // requests for several answers
	Slow     tally          `json:"slow"`    // clients that hardly read
	TTFT     float64        `json:"-"`       // ms, the median of the load that ended last
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
	var loads []func() (*load.Result, error)
	for i, who := range callers {
		share := shares[who.name]
		if share == 0 {
			continue
		}
		cfg := c.s.loadOf(c.p.URL(), who.key(), c.seed+uint64(i)*7919)
		cfg.Concurrency = max(1, c.s.streams*share/10)
		cfg.Count = c.s.count * share / 10
		cfg.OnProgress = func(load.Progress) { c.ended.Add(1) }
		loads = append(loads, load.Start(ctx, cfg))
	}
	over, cancel := context.WithCancel(ctx)
	defer cancel()
	total := &seen{Kinds: map[string]int{}}
	var mu sync.Mutex // of total, while others run
	var others sync.WaitGroup
	again := func(clients, seed int, t *tally, ask func(context.Context, *rand.Rand) error) {
		for i := range clients {
			rng := rand.New(rand.NewPCG(c.seed, uint64(seed+i)))
			others.Go(func() {
				for over.Err() == nil {
					err := ask(over, rng)
					mu.Lock()
					total.count(t, err)
					mu.Unlock()
				}
			})
		}
	}
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{IdleConnTimeout: 2 * time.Second, MaxIdleConnsPerHost: c.s.wide}}
	defer client.CloseIdleConnections()
	again(c.s.wide, 1000, &total.Wide, func(_ context.Context, rng *rand.Rand) error { return wideOnce(c.p.URL(), client, rng) })
	again(c.s.lag, 2000, &total.Slow, c.slowOnce)
	var failed error
	for _, end := range loads {
		r, err := end()
		if err != nil {
			failed = err
			continue
		}
		mu.Lock()
		total.add(r)
		mu.Unlock()
	}
	cancel()
	others.Wait()
	return total, failed
}

// count counts a request of a client of our own in one of the tallies.
func (s *seen) count(t *tally, err error) {
	switch {
	case err == nil:
		t.Right++
	case errors.Is(err, errTold):
		t.Failed++
	default:
		t.Wrong++
		s.Wrong = append(s.Wrong, err.Error())
	}
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
			s.Wrong = append(s.Wrong, f.String())
		}
	}
}

// pause waits; false when ctx has ended.
func pause(ctx context.Context, d time.Duration) bool { return testbed.Pause(ctx, d) == nil }

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/decode"
)

// What the twin may cost: memory, and its share of a core.
const (
	mostMiB   = 30
	mostShare = 0.01
)

// busy is the share of the slots that are taken. One process holds both ends of all streams of two proxies, so that
// more would take more files than a process has at most hosts.
const busy = 0.6

// longestAnswer is so short that the last one does not run for long after the load.
const longestAnswer = 300

// price is what a proxy used.
type price struct {
	name       string
	cpu        float64 // of a core, since the load began
	twin       float64 // of a core, that the twin says it used
	inUse, rss float64 // MiB
	verdicts   int
	oldest     float64 // seconds, that a verdict was old before the next one came
}

// prices sends the same load to two proxies at once, each in front of a large fleet of its own. One of them has no twin.
func (o options) prices(ctx context.Context, out io.Writer) (ok bool, err error) {
	w, err := testbed.New(ctx, "twin", o.Options)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.Close(err == nil)) }()
	fleet := decode.Uniform(144, 40, 0)
	fleet.Groups[0].C0Ms, fleet.Groups[0].C1Ms = 1000, 0.005 // so slow that two cores carry all of it twice
	requests := slices.Clone(trace.Azure().Requests)
	for i := range requests {
		requests[i].Output = min(requests[i].Output, longestAnswer)
	}
	s := scene{fleet: fleet, requests: requests, rate: fleet.Rate(busy, requests)}
	list := []*price{{name: "twin: off"}, {name: "twin: [jsq-kv]"}}
	paid := make(chan error, len(list))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i, twin := range []string{"off", "[jsq-kv]"} {
		p, _, err := serve(ctx, w, s, fmt.Sprintf("evenkeel%d", i), "twin: "+twin)
		if err != nil {
			return false, err
		}
		go func() { paid <- list[i].pay(ctx, p, s, o.lasts) }()
	}
	for range list {
		if e := <-paid; e != nil {
			err = errors.Join(err, e)
			cancel() // the other one is of no use alone
		}
	}
	if err != nil {
		return false, err
	}
	fmt.Fprintf(out, "144 ranks of 40 slots, steps of a second and more, %.1f requests a second for %v, both proxies at once\n", s.rate,
		o.lasts)
	for _, p := range list {
		fmt.Fprintf(out, "%-15s %5.2f %% of a core, the twin %.2f %% by its own count; %5.1f MiB in use, %5.1f MiB resident; %d verdicts, the "+
			"oldest was %.0f s old\n",
			p.name, 100*p.cpu, 100*p.twin, p.inUse, p.rss, p.verdicts, p.oldest)
	}
	more := list[1].inUse - list[0].inUse
	fmt.Fprintf(out, "the twin: %+.2f %% of a core, %+.1f MiB in use, %+.1f MiB resident\n", 100*(list[1].cpu-list[0].cpu), more,
		list[1].rss-list[0].rss)
	return more <= mostMiB && list[1].twin <= mostShare && list[1].verdicts > 0, nil
}

// pay sends a load, and fills in what it cost the proxy.
func (b *price) pay(ctx context.Context, p *testbed.Proxy, s scene, lasts time.Duration) error {
	before, err := testbed.CPU(p.Pid)
	if err != nil {
		return err
	}
	var f found
	stop := f.watching(ctx, p)
	r, err := load.Run(ctx, load.Config{URLs: []string{p.URL()}, Requests: s.requests, Rate: s.rate, Duration: lasts, Chat: 0.5, Stream: 1,
		Seed: 1, Check: load.CheckShape, Timeout: time.Hour})
	stop()
	if err != nil {
		return err
	}
	if r.Failed > 0 {
		return fmt.Errorf("%d of %d requests failed: %v", r.Failed, r.Sent, r.Kinds)
	}
	after, err := testbed.CPU(p.Pid)
	if err != nil {
		return err
	}
	books, err := p.Series()
	if err != nil {
		return err
	}
	inUse, err := p.InUse()
	if err != nil {
		return err
	}
	took := time.Since(f.began).Seconds()
	b.cpu, b.twin = (after-before).Seconds()/took, books["evenkeel_twin_work_seconds_total"]/took
	b.inUse, b.rss, b.verdicts, b.oldest = testbed.MiB(inUse), testbed.MiB(testbed.RSS(p.Pid)), f.seen, f.oldest
	return nil
}

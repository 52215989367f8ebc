// Command watch measures what it costs to be watched: evenkeel with 1,000 busy
// streams and 10,000 clients that are idle, plain, then with the live page open,
// with shadow policies, with every request traced to a collector, with receipts,
// and with all of these. It prints processor time a chunk and memory, each beside
// the plain proxy's of the same round: compare the ratios, machines are noisy, and
// two plain proxies show how much.
//
// Every proxy has a process, with idle clients and their engine in another one
// (crowd.go), for each may open so many files. The busy streams, their engines
// and the collector are in this one, and turn from proxy to proxy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/process"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
)

type options struct {
	busy, idle, tokens, prompt, rounds, ranks int
	step                                      time.Duration
	binary                                    string
}

func main() {
	var err error
	if len(os.Args) > 1 && os.Args[1] == "crowd" {
		err = crowd(os.Args[2:], os.Stdin, os.Stdout)
	} else {
		var o options
		flag.IntVar(&o.busy, "busy", 1000, "streams that are told a token every step")
		flag.IntVar(&o.idle, "idle", 10_000, "clients that are told next to nothing, of each proxy")
		flag.IntVar(&o.tokens, "tokens", 100, "tokens, and so chunks, a busy stream")
		flag.IntVar(&o.prompt, "prompt", 64, "tokens a prompt")
		flag.IntVar(&o.rounds, "rounds", 3, "waves of busy streams to each proxy, in turn")
		flag.IntVar(&o.ranks, "ranks", 8, "decode ranks")
		flag.DurationVar(&o.step, "step", 100*time.Millisecond, "time between two chunks of a busy stream")
		flag.StringVar(&o.binary, "bin", "", "the proxy to measure; empty: it is built")
		flag.Parse()
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		err = run(ctx, o)
		stop()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watch:", err)
		os.Exit(1)
	}
}

// way is how a proxy is watched.
type way struct {
	name                              string
	page, shadows, tracing, receipted bool
}

// ways begin with two that are the same: how far these differ is noise.
var ways = []way{
	{name: "off"},
	{name: "off again"},
	{name: "page open", page: true},
	{name: "shadow policies", shadows: true},
	{name: "every request traced", tracing: true},
	{name: "receipts", receipted: true},
	{name: "all of these", page: true, shadows: true, tracing: true, receipted: true},
}

const plain = 2 // ways that are off

// sample is one wave of busy streams through one proxy.
type sample struct {
	chunk time.Duration // CPU
	live  int64         // bytes that the last collection of garbage left, stacks included
	rss   int64         // bytes, the most seen: with garbage, and what was not given back yet
}

func run(ctx context.Context, o options) (err error) {
	slow, err := slowStreams(o)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "evenkeel-watch-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if o.binary, err = process.Evenkeel(ctx, o.binary, dir); err != nil {
		return err
	}
	engines, err := startEngines(o)
	defer func() {
		for _, e := range engines {
			e.Close()
		}
	}()
	if err != nil {
		return err
	}
	sink, err := openSink()
	if err != nil {
		return err
	}
	defer sink.close()
	fmt.Printf("%d busy streams, a chunk every %v each, %d chunks; %d idle clients: %d streams with a token every %v, %d kept-alive connections (%d files a process)\n%s, %d CPUs, %d rounds; engines, load and collector share the CPUs\n",
		o.busy, o.step, o.tokens, o.idle, slow, silence, o.idle-slow, fileLimit(), runtime.Version(), runtime.NumCPU(), o.rounds)
	var proxies []*proxy
	defer func() {
		for _, p := range proxies {
			p.close()
		}
	}()
	for i, w := range ways {
		p, err := start(ctx, o, dir, i, w, engines, sink.url, slow)
		if p != nil {
			proxies = append(proxies, p)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	held := func() error {
		for i, p := range proxies {
			if err := p.held(); err != nil {
				return fmt.Errorf("%s: %w", ways[i].name, err)
			}
		}
		return nil
	}
	if err := held(); err != nil {
		return err
	}
	samples := make([][]sample, len(ways))
	for round := range o.rounds {
		for i := range proxies {
			at := (i + round) % len(proxies) // nobody is always the first
			s, err := measure(ctx, proxies[at], o, uint64(round))
			if err != nil {
				return fmt.Errorf("%s: %w", ways[at].name, err)
			}
			samples[at] = append(samples[at], s)
			fmt.Printf("  round %d  %-22s %5.1f µs CPU a chunk  %6.1f MiB in use  %6.1f MiB resident\n", round+1, ways[at].name, micros(s.chunk), mib(s.live), mib(s.rss))
		}
	}
	if err := held(); err != nil { // they were there all the time
		return err
	}
	if sink.spans.Load() == 0 {
		return errors.New("the collector got no span: what was measured was not tracing")
	}
	fmt.Printf("the collector took %d spans\n", sink.spans.Load())
	return report(os.Stdout, samples)
}

// slowStreams is how many idle clients may have a stream: it takes two files
// of a proxy, a connection that waits for its next request one. Some are left
// for all else.
func slowStreams(o options) (int, error) {
	const others = 1000
	n := min(o.idle, fileLimit()-others-2*o.busy-o.idle)
	if n < 0 {
		return 0, fmt.Errorf("%d busy and %d idle clients do not fit into %d files; raise ulimit -n, or take fewer", o.busy, o.idle, fileLimit())
	}
	return n, nil
}

func fileLimit() int {
	var l syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l) != nil {
		return 1024
	}
	return int(min(l.Max, 1<<20))
}

// startEngines are those of the busy streams: they serve all proxies, one after
// the other.
func startEngines(o options) (list []*refengine.Engine, err error) {
	for _, c := range []refengine.Config{
		{Role: refengine.Prefill, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64, KVTokens: 8 << 20},
		{Role: refengine.Decode, DPSize: o.ranks, Slots: slotsOf(o), C0: o.step, C1: time.Nanosecond},
	} {
		e, err := refengine.Start(c)
		if err != nil {
			return list, err
		}
		list = append(list, e)
	}
	return list, nil
}

func slotsOf(o options) int { return (o.busy + o.ranks - 1) / o.ranks }

// measure sends one wave of busy streams through a proxy.
func measure(ctx context.Context, p *proxy, o options, seed uint64) (sample, error) {
	requests := make([]trace.Request, o.busy)
	for i := range requests {
		requests[i] = trace.Request{Prompt: o.prompt, Output: o.tokens}
	}
	before, err := process.CPU(p.pid())
	if err != nil {
		return sample{}, err
	}
	most := process.PeakRSS(func() []int { return []int{p.pid()} })
	r, err := load.Run(ctx, load.Config{URLs: []string{"http://" + p.clients}, Model: busyModel, Requests: requests, Concurrency: o.busy, Stream: 1, Chat: 0.5, Seed: seed, Timeout: 5 * time.Minute})
	rss := most()
	if err != nil {
		return sample{}, err
	}
	if r.OK != o.busy {
		return sample{}, fmt.Errorf("%d of %d streams ended well: %v", r.OK, o.busy, r.Kinds)
	}
	after, err := process.CPU(p.pid())
	if err != nil {
		return sample{}, err
	}
	live, err := p.memory()
	if err != nil {
		return sample{}, err
	}
	return sample{chunk: (after - before) / time.Duration(r.Events), live: live, rss: rss}, nil
}

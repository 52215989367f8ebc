// Command watch measures what it costs to be watched: evenkeel with 1,000 busy
// streams and 10,000 clients that are idle, plain, then with the live page open,
// with every request traced to a collector, with receipts, and with all of these.
// It prints processor time a chunk and memory, each beside the plain proxy's of the
// same round: compare the ratios, machines are noisy, and two plain proxies show how
// much.
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
	"io"
	"os"
	"runtime"
	"slices"
	"syscall"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
	"evenkeel/bench/world"
)

type options struct {
	busy, idle, tokens, prompt, rounds, ranks int
	step                                      time.Duration
	binary                                    string
}

func main() { world.Main("watch", run) }

// way is how a proxy is watched.
type way struct {
	name                     string
	page, tracing, receipted bool
}

// ways begin with two that are the same: how far these differ is noise.
var ways = []way{
	{name: "off"},
	{name: "off again"},
	{name: "page open", page: true},
	{name: "every request traced", tracing: true},
	{name: "receipts", receipted: true},
	{name: "all of these", page: true, tracing: true, receipted: true},
}

const plain = 2 // ways that are off

// sample is one wave of busy streams through one proxy.
type sample struct {
	world.Wave       // its RSS is with garbage, and with what was not given back yet
	live       int64 // bytes that the last collection of garbage left, stacks included
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	if len(args) > 0 && args[0] == "crowd" {
		return crowd(args[1:], os.Stdin, out)
	}
	var o options
	flags := flag.NewFlagSet("watch", flag.ContinueOnError)
	flags.IntVar(&o.busy, "busy", 1000, "streams that are told a token every step")
	flags.IntVar(&o.idle, "idle", 10_000, "clients that are told next to nothing, of each proxy")
	flags.IntVar(&o.tokens, "tokens", 100, "tokens, and so chunks, a busy stream")
	flags.IntVar(&o.prompt, "prompt", 64, "tokens a prompt")
	flags.IntVar(&o.rounds, "rounds", 3, "waves of busy streams to each proxy, in turn")
	flags.IntVar(&o.ranks, "ranks", 8, "decode ranks")
	flags.DurationVar(&o.step, "step", 100*time.Millisecond, "time between two chunks of a busy stream")
	flags.StringVar(&o.binary, "bin", "", "the proxy to measure; empty: it is built")
	if err := flags.Parse(args); err != nil {
		return err
	}
	slow, err := slowStreams(o)
	if err != nil {
		return err
	}
	site, err := world.New(ctx, "watch", world.Options{Bin: o.binary})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, site.Close(true)) }()
	// The engines of the busy streams serve all proxies, one after the other.
	engines, err := site.Engines(
		refengine.Config{Role: refengine.Prefill, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64, KVTokens: 8 << 20},
		refengine.Config{Role: refengine.Decode, DPSize: o.ranks, Slots: slotsOf(o), C0: o.step, C1: time.Nanosecond})
	if err != nil {
		return err
	}
	sink, err := openSink()
	if err != nil {
		return err
	}
	defer sink.close()
	fmt.Fprintf(out, "%d busy streams, a chunk every %v each, %d chunks; %d idle clients: %d streams with a token every %v, %d kept-alive connections (%d files a "+
		"process)\n%s, %d CPUs, %d rounds; engines, load and collector share the CPUs\n",
		o.busy, o.step, o.tokens, o.idle, slow, silence, o.idle-slow, fileLimit(), runtime.Version(), runtime.NumCPU(), o.rounds)
	var proxies []*proxy
	for i, w := range ways {
		p, err := start(ctx, site, o, i, w, engines, sink.url, slow)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		proxies = append(proxies, p)
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
			fmt.Fprintf(out, "  round %d  %-22s %5.1f µs CPU a chunk  %6.1f MiB in use  %6.1f MiB resident\n", round+1, ways[at].name, world.Micros(s.Chunk), world.MiB(s.live),
				world.MiB(s.RSS))
		}
	}
	if err := held(); err != nil { // they were there all the time
		return err
	}
	if sink.spans.Load() == 0 {
		return errors.New("the collector got no span: what was measured was not tracing")
	}
	fmt.Fprintf(out, "the collector took %d spans\n", sink.spans.Load())
	return report(out, samples)
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

func slotsOf(o options) int { return (o.busy + o.ranks - 1) / o.ranks }

// measure sends one wave of busy streams through a proxy.
func measure(ctx context.Context, p *proxy, o options, seed uint64) (s sample, err error) {
	s.Wave, err = world.Measure(ctx, func() []int { return []int{p.Pid} }, load.Config{
		URLs: []string{p.URL()}, Model: busyModel, Requests: slices.Repeat([]trace.Request{{Prompt: o.prompt, Output: o.tokens}}, o.busy), Seed: seed, Timeout: 5 * time.Minute,
	})
	if err != nil {
		return s, err
	}
	s.live, err = p.InUse()
	return s, err
}

// Command relay measures what a proxy costs: evenkeel beside a bare net/http
// reverse proxy, and nginx where it is installed, on the same engines under the
// same load in one run. It prints CPU time a chunk and resident memory; compare
// the ratios, machines are noisy.
//
// The bare proxies send each request to one engine, which prefills for itself;
// evenkeel does all it does: parse, probe, pool, decide, count, edit.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/process"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
	"evenkeel/stats"
)

type options struct {
	streams, tokens, prompt, rounds, ranks int
	step                                   time.Duration
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "bare-proxy" {
		if err := bareProxy(os.Args[2], os.Args[3:]); err != nil {
			fmt.Fprintln(os.Stderr, "relay:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.IntVar(&o.streams, "streams", 1000, "concurrent streams")
	flag.IntVar(&o.tokens, "tokens", 150, "tokens, and so chunks, a stream")
	flag.IntVar(&o.prompt, "prompt", 64, "tokens a prompt")
	flag.IntVar(&o.rounds, "rounds", 3, "runs of each proxy, in turn")
	flag.IntVar(&o.ranks, "ranks", 8, "decode ranks")
	flag.DurationVar(&o.step, "step", 60*time.Millisecond, "time between two chunks of a stream")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "relay:", err)
		os.Exit(1)
	}
}

// sample is one run of one proxy.
type sample struct {
	cpuPerChunk time.Duration
	rss         int64 // bytes, the most seen
	ttft        float64
	chunks      int64
}

func run(ctx context.Context, o options) error {
	prefill, err := refengine.Start(refengine.Config{Role: refengine.Prefill, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64})
	if err != nil {
		return err
	}
	defer prefill.Close()
	decode, err := refengine.Start(refengine.Config{
		Role: refengine.Both, DPSize: o.ranks, Slots: (o.streams + o.ranks - 1) / o.ranks,
		C0: o.step, C1: time.Nanosecond, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64,
	})
	if err != nil {
		return err
	}
	defer decode.Close()
	proxies, err := start(ctx, o, prefill.URLs()[0], decode.URLs())
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range proxies {
			p.stop()
		}
	}()
	fmt.Printf("%d streams of %d chunks, one every %v each; %s, %d CPUs, %d rounds, engines and load share the CPUs\n",
		o.streams, o.tokens, o.step, runtime.Version(), runtime.NumCPU(), o.rounds)
	samples := map[string][]sample{}
	for round := range o.rounds {
		for _, p := range proxies {
			s, err := measure(ctx, p, o, uint64(round))
			if err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			samples[p.name] = append(samples[p.name], s)
			fmt.Printf("  round %d  %-9s %6.1f µs CPU a chunk  %6.1f MiB resident  TTFT p50 %.0f ms\n",
				round+1, p.name, micros(s.cpuPerChunk), mib(s.rss), s.ttft)
		}
	}
	return report(proxies, samples)
}

// measure sends one wave of streams through a proxy.
func measure(ctx context.Context, p *proxy, o options, seed uint64) (sample, error) {
	requests := make([]trace.Request, o.streams)
	for i := range requests {
		requests[i] = trace.Request{Prompt: o.prompt, Output: o.tokens}
	}
	before, err := process.CPU(p.pids()...)
	if err != nil {
		return sample{}, err
	}
	watch := process.PeakRSS(p.pids)
	r, err := load.Run(ctx, load.Config{
		URLs: []string{p.url}, Model: "ref", Requests: requests, Concurrency: o.streams, Stream: 1, Chat: 0.5, Seed: seed, Timeout: 2 * time.Minute,
	})
	rss := watch()
	if err != nil {
		return sample{}, err
	}
	if r.OK != o.streams {
		err := fmt.Errorf("%d of %d streams ended well: %v", r.OK, o.streams, r.Kinds)
		if p.name == evenkeelName || r.OK < o.streams*99/100 {
			return sample{}, err
		}
		fmt.Printf("  %s: %v\n", p.name, err)
	}
	after, err := process.CPU(p.pids()...)
	if err != nil {
		return sample{}, err
	}
	return sample{cpuPerChunk: (after - before) / time.Duration(r.Events), rss: rss, ttft: r.All.TTFT.P50, chunks: r.Events}, nil
}

// report prints medians and their ratio to the bare Go proxy, round by round so
// that a machine that slowed down slowed both.
func report(proxies []*proxy, samples map[string][]sample) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "proxy\tCPU µs/chunk\tto bare\tRSS MiB\tto bare\t")
	for _, p := range proxies {
		var cpu, rss, cpuRatio, rssRatio []float64
		for i, s := range samples[p.name] {
			base := samples[bareName][i]
			cpu, rss = append(cpu, micros(s.cpuPerChunk)), append(rss, mib(s.rss))
			cpuRatio = append(cpuRatio, float64(s.cpuPerChunk)/float64(base.cpuPerChunk))
			rssRatio = append(rssRatio, float64(s.rss)/float64(base.rss))
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.2f\t%.1f\t%.2f\t\n", p.name, median(cpu), median(cpuRatio), median(rss), median(rssRatio))
	}
	return w.Flush()
}

func median(v []float64) float64 {
	slices.Sort(v)
	return stats.Median(v)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
func mib(b int64) float64            { return float64(b) / (1 << 20) }

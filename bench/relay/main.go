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
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"evenkeel/bench/load"
	"evenkeel/bench/refengine"
	"evenkeel/bench/trace"
	"evenkeel/bench/world"
)

type options struct {
	streams, tokens, prompt, rounds, ranks int
	step                                   time.Duration
}

func main() { world.Main("relay", run) }

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	if len(args) > 0 && args[0] == "bare-proxy" {
		return bareProxy(args[1], args[2:])
	}
	var o options
	flags := flag.NewFlagSet("relay", flag.ContinueOnError)
	flags.IntVar(&o.streams, "streams", 1000, "concurrent streams")
	flags.IntVar(&o.tokens, "tokens", 150, "tokens, and so chunks, a stream")
	flags.IntVar(&o.prompt, "prompt", 64, "tokens a prompt")
	flags.IntVar(&o.rounds, "rounds", 3, "runs of each proxy, in turn")
	flags.IntVar(&o.ranks, "ranks", 8, "decode ranks")
	flags.DurationVar(&o.step, "step", 60*time.Millisecond, "time between two chunks of a stream")
	if err := flags.Parse(args); err != nil {
		return err
	}
	w, err := world.New(ctx, "relay", world.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close(true)) }()
	prefill := refengine.Config{Role: refengine.Prefill, PrefillBase: time.Nanosecond, PrefillPerToken: time.Nanosecond, PrefillConcurrency: 64}
	decode := prefill
	decode.Role, decode.DPSize, decode.Slots, decode.C0, decode.C1 = refengine.Both, o.ranks, o.slots(), o.step, time.Nanosecond
	engines, err := w.Engines(prefill, decode)
	if err != nil {
		return err
	}
	proxies, err := start(ctx, w, o, engines[0].URLs(), engines[1].URLs())
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d streams of %d chunks, one every %v each; %s, %d CPUs, %d rounds, engines and load share the CPUs\n",
		o.streams, o.tokens, o.step, runtime.Version(), runtime.NumCPU(), o.rounds)
	samples := map[string][]world.Wave{}
	for round := range o.rounds {
		for _, p := range proxies {
			s, err := world.Measure(ctx, p.pids, load.Config{
				URLs: []string{p.url}, Model: "ref", Requests: slices.Repeat([]trace.Request{{Prompt: o.prompt, Output: o.tokens}}, o.streams), Seed: uint64(round),
				Timeout: 2 * time.Minute,
			})
			if err != nil {
				err = fmt.Errorf("%s: %w", p.name, err)
				if s.Result == nil || p.name == evenkeelName || s.OK < o.streams*99/100 {
					return err
				}
				fmt.Fprintf(out, "  %v\n", err)
			}
			samples[p.name] = append(samples[p.name], s)
			fmt.Fprintf(out, "  round %d  %-9s %6.1f µs CPU a chunk  %6.1f MiB resident  TTFT p50 %.0f ms\n",
				round+1, p.name, world.Micros(s.Chunk), world.MiB(s.RSS), s.All.TTFT.P50)
		}
	}
	return report(out, proxies, samples)
}

// slots of a rank.
func (o options) slots() int { return (o.streams + o.ranks - 1) / o.ranks }

// report prints medians and their ratio to the bare Go proxy, round by round so
// that a machine that slowed down slowed both.
func report(out io.Writer, proxies []*proxy, samples map[string][]world.Wave) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "proxy\tCPU µs/chunk\tto bare\tRSS MiB\tto bare\t")
	for _, p := range proxies {
		var cpu, rss, cpuRatio, rssRatio []float64
		for i, s := range samples[p.name] {
			base := samples[bareName][i]
			cpu, rss = append(cpu, world.Micros(s.Chunk)), append(rss, world.MiB(s.RSS))
			cpuRatio = append(cpuRatio, float64(s.Chunk)/float64(base.Chunk))
			rssRatio = append(rssRatio, float64(s.RSS)/float64(base.RSS))
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.2f\t%.1f\t%.2f\t\n", p.name, world.Median(cpu), world.Median(cpuRatio), world.Median(rss), world.Median(rssRatio))
	}
	return w.Flush()
}

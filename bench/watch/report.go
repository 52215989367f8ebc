package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"evenkeel/bench/world"
)

// report prints medians, and the medians of each round's ratio to the mean of
// the plain proxies, so that a machine that slowed down slowed both.
func report(out io.Writer, samples [][]sample) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "watched by\tCPU µs/chunk\tto off\tin use, MiB\tto off\tresident, MiB\t")
	for i, all := range samples {
		var cpu, live, rss, cpuRatio, liveRatio []float64
		for round, s := range all {
			var baseCPU, baseLive float64
			for _, off := range samples[:plain] {
				baseCPU += world.Micros(off[round].Chunk) / plain
				baseLive += world.MiB(off[round].live) / plain
			}
			cpu, live, rss = append(cpu, world.Micros(s.Chunk)), append(live, world.MiB(s.live)), append(rss, world.MiB(s.RSS))
			cpuRatio, liveRatio = append(cpuRatio, world.Micros(s.Chunk)/baseCPU), append(liveRatio, world.MiB(s.live)/baseLive)
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.2f\t%.0f\t%.2f\t%.0f\t\n", ways[i].name, world.Median(cpu), world.Median(cpuRatio), world.Median(live), world.Median(liveRatio),
			world.Median(rss))
	}
	return w.Flush()
}

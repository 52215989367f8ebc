package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"evenkeel/stats"
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
				baseCPU += micros(off[round].chunk) / plain
				baseLive += mib(off[round].live) / plain
			}
			cpu, live, rss = append(cpu, micros(s.chunk)), append(live, mib(s.live)), append(rss, mib(s.rss))
			cpuRatio, liveRatio = append(cpuRatio, micros(s.chunk)/baseCPU), append(liveRatio, mib(s.live)/baseLive)
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.2f\t%.0f\t%.2f\t%.0f\t\n", ways[i].name, median(cpu), median(cpuRatio), median(live), median(liveRatio), median(rss))
	}
	return w.Flush()
}

func median(v []float64) float64 {
	slices.Sort(v)
	return stats.Median(v)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
func mib(b int64) float64            { return float64(b) / (1 << 20) }

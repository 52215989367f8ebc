package main

import (
	"fmt"
	"io"
	"slices"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/internal/stats"
)

// reference is the policy that the others are compared with: most routers count requests.
const reference = "jsq"

func (r *run) String() string {
	s := fmt.Sprintf("%-8s %.0f tokens/s (%.0f whole), gap %.1f ms, imbalance %.0f (engine %.0f), full for %.1f s", r.policy,
		r.Sample[report.TokensPerS], r.Sample[ranks.WholeTokens], r.Sample[ranks.GapMean], r.Sample[report.Imbalance], r.Sample[engineLevel],
		r.Sample[report.WindowS])
	if r.model.known {
		s += fmt.Sprintf(", learned %.1f ms + %.3f per 1,000", r.model.c0, 1e3*r.model.c1)
	}
	s += fmt.Sprintf(", R2 %.2f of %.0f steps", r.model.r2, r.model.steps)
	if r.failed > 0 {
		s += fmt.Sprintf(", %d FAILED: %v", r.failed, r.why)
	}
	return s
}

// writeRuns prints the policies beside each other, by rounds of runs.
func writeRuns(out io.Writer, rounds [][]*run, o options) {
	fmt.Fprintf(out, "%d rounds, seed %d. Each list has %d requests, and %d requests are in the system at a time.\n\n", len(rounds), o.Seed,
		o.Requests, clients)
	fmt.Fprint(out, "| policy | tokens/s, whole list | tokens/s, full part | mean gap, ms | p50 | p99 | mean wait for the first token, ms | "+
		"failed "+
		"|\n|---|--:|--:|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		m := ranks.Summary(samples(rounds), i)
		failed := 0
		for _, round := range rounds {
			failed += round[i].failed
		}
		fmt.Fprintf(out, "| `%s` | %s | %s | %s | %s | %s | %s | %d |\n", r.policy, ranks.Show(m[ranks.WholeTokens], 0),
			ranks.Show(m[report.TokensPerS], 0), ranks.Show(m[ranks.GapMean], 1),
			ranks.Show(m[ranks.GapP50], 1), ranks.Show(m[ranks.GapP99], 0), ranks.Show(m[report.TTFTMean], 0), failed)
	}
	fmt.Fprintf(out, "\nIn the full part, by vLLM's gauges, read every %v, and by evenkeel's own account:\n\n", every)
	fmt.Fprint(out, "| policy | imbalance, vLLM | imbalance, evenkeel | fullest rank, vLLM | running, vLLM | waiting, vLLM "+
		"|\n|---|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		m := ranks.Summary(samples(rounds), i)
		fmt.Fprintf(out, "| `%s` | %s | %s | %s | %s | %s |\n", r.policy, ranks.Show(m[engineLevel], 0), ranks.Show(m[report.Imbalance], 0),
			ranks.Show(m[engineTop], 0), ranks.Show(m[engineRuns], 1),
			ranks.Show(m[engineWaits], 1))
	}
	writeDifferences(out, rounds)
}

// writeDifferences compares each policy with the reference in its own round.
func writeDifferences(out io.Writer, rounds [][]*run) {
	base := slices.IndexFunc(rounds[0], func(r *run) bool { return r.policy == reference })
	if base < 0 || len(rounds) < 2 {
		return
	}
	fmt.Fprintf(out, "\nThe difference to `%s` in the same round, in %%, with the 95 %% interval over %d rounds:\n\n", reference, len(rounds))
	fmt.Fprint(out, "| policy | tokens/s, whole list | tokens/s, full part | mean gap |\n|---|--:|--:|--:|\n")
	var widths []float64
	for i, r := range rounds[0] {
		if i == base {
			continue
		}
		m := ranks.Paired(samples(rounds), i, base)
		fmt.Fprintf(out, "| `%s` |", r.policy)
		for _, metric := range []report.Metric{ranks.WholeTokens, report.TokensPerS, ranks.GapMean} {
			fmt.Fprintf(out, " %s |", ranks.Off(m[metric], len(rounds)))
			if metric == report.TokensPerS {
				widths = append(widths, m[metric].Interval(len(rounds)))
			}
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\nWith %d rounds, a difference in tokens/s of the full part can be seen if it is larger than %.1f to\n%.1f %%, "+
		"depending on the policy.\n",
		len(rounds), slices.Min(widths), slices.Max(widths))
}

// writeModels compares what evenkeel learned with the law of the pinned placements.
func writeModels(out io.Writer, rounds [][]*run, l law) {
	fmt.Fprintf(out, "What evenkeel learned, beside %.1f ms + %.3f ms per 1,000 KV tokens of the fullest rank:\n\n", l.line.Intercept,
		1e3*l.line.Slope)
	fmt.Fprint(out, "| policy | learned in | c0, ms | c1, ms per 1,000 | off, c0 | off, c1 | off, a step | R2 | steps "+
		"|\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		var c0, c1, step, r2, steps []float64
		for _, round := range rounds {
			m := round[i].model
			r2, steps = append(r2, m.r2), append(steps, m.steps)
			if m.known {
				c0, c1 = append(c0, m.c0), append(c1, 1e3*m.c1)
				top, imbalance := round[i].Sample[engineTop], round[i].Sample[engineLevel]
				step = append(step, off(m.c0+m.c1*top, l.at(top, ranks.Count*top-imbalance)))
			}
		}
		fmt.Fprintf(out, "| `%s` | %d of %d |", r.policy, len(c0), len(rounds))
		if len(c0) == 0 {
			fmt.Fprint(out, " | | | | |")
		} else {
			fmt.Fprintf(out, " %.1f (%.1f to %.1f) | %.3f (%.3f to %.3f) | %+.0f %% | %+.0f %% | %+.0f %% |", stats.Mean(c0), slices.Min(c0),
				slices.Max(c0),
				stats.Mean(c1), slices.Min(c1), slices.Max(c1), off(stats.Mean(c0), l.line.Intercept), off(stats.Mean(c1), 1e3*l.line.Slope),
				stats.Mean(step))
		}
		fmt.Fprintf(out, " %.2f | %.0f |\n", stats.Mean(r2), stats.Mean(steps))
	}
}

// off is how far a value is from what it should be, in %.
func off(v, want float64) float64 { return 100 * (v/want - 1) }

func samples(rounds [][]*run) [][]report.Sample {
	return ranks.Samples(rounds, func(r *run) report.Sample { return r.Sample })
}

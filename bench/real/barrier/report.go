package main

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"

	"evenkeel/bench/real/vllm"
	"evenkeel/bench/report"
	"evenkeel/stats"
)

// reference is the policy that the others are compared with: it knows the KV
// tokens of the ranks and needs no more than that, and like them it sends a
// request on once a rank has a slot.
const reference = "pjsq-kv"

func writeHead(out io.Writer, o options) {
	fmt.Fprintf(out, `# A real barrier

This page is for people who ask whether a real engine behaves as the simulator says. It compares
the steps of the engine with the law `+"`c0 + c1 * M`"+`, and policies with each other. With two ranks,
policies have little to gain: [Decode policies](../policies.md#what-came-out) has more ranks.
%s wrote it, with seed %d, on %d cores of a %s/%s machine.

The engine is vLLM %s on a CPU. Its model is a mixture of experts (MoE) of two layers with
random weights. It runs on %d data-parallel ranks with %d slots each, and each rank is bound to a
core. The ranks wait for each other in every MoE layer. This barrier is real, and so are the
engine's scheduler, its batches and its streams. These parts are not real:

- The model is tiny, and its answers mean nothing. It has 64 query heads on 2 KV heads, so that a
  core spends its time on attention and not on weights.
- No KV is transferred. With vLLM's DecodeBenchConnector, the engine takes every prompt as
  transferred. The prefill engine is evenkeel's
  [reference engine](../glossary.md#reference-engine), which makes hand-offs at once.
- A plugin adds two collective operations to vLLM's CPU communicator. MoE with data parallelism
  needs them, and vLLM %s lacks them there.
- Engine, proxy and clients share the cores. In a data centre they have machines of their own.

`, "`make real-barrier`", o.seed, runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, vllm.Version, ranks, slots, vllm.Version)
}

func (r *run) String() string {
	s := fmt.Sprintf("%-8s %.0f tokens/s (%.0f whole), gap %.1f ms, imbalance %.0f (engine %.0f), full for %.1f s", r.policy,
		r.Sample[report.TokensPerS], r.Sample[wholeTokens], r.Sample[gapMean], r.Sample[report.Imbalance], r.Sample[engineLevel], r.Sample[report.WindowS])
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
func writeRuns(out io.Writer, rounds [][]*run, requests int, l law) {
	n := len(rounds)
	fmt.Fprintf(out, "\n## The policies\n\nThere were %d rounds. Each round has a list of %d requests of its own, the same for all policies,\n"+
		"and %d requests are in the system at a time. The figures are the mean ± the standard deviation over\n"+
		"the rounds. The full part of a run begins when the first request ends, and lasts until the list is\n"+
		"empty. A gap is the time between two tokens of one answer.\n\n", n, requests, clients)
	fmt.Fprint(out, "| policy | tokens/s, whole list | tokens/s, full part | mean gap, ms | p50 | p99 | mean wait for the first token, ms | failed "+
		"|\n|---|--:|--:|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		m := summary(rounds, i)
		failed := 0
		for _, round := range rounds {
			failed += round[i].failed
		}
		fmt.Fprintf(out, "| `%s` | %s | %s | %s | %s | %s | %s | %d |\n", r.policy, show(m[wholeTokens], 0), show(m[report.TokensPerS], 0), show(m[gapMean], 1),
			show(m[gapP50], 1), show(m[gapP99], 0), show(m[report.TTFTMean], 0), failed)
	}
	fmt.Fprintf(out, "\nThe next table has the KV tokens in the full part, by vLLM's gauges (read every %v) and by\n"+
		"evenkeel's own account. [Imbalance](../glossary.md#imbalance) is the number of tokens that all ranks\n"+
		"together have less than the fullest one.\n\n", every)
	fmt.Fprint(out, "| policy | imbalance, vLLM | imbalance, evenkeel | fullest rank, vLLM | running, vLLM | waiting, vLLM |\n|---|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		m := summary(rounds, i)
		fmt.Fprintf(out, "| `%s` | %s | %s | %s | %s | %s |\n", r.policy, show(m[engineLevel], 0), show(m[report.Imbalance], 0), show(m[engineTop], 0), show(m[engineRuns], 1),
			show(m[engineWaits], 1))
	}
	writeDifferences(out, rounds)
	writeModels(out, rounds, l)
}

// writeDifferences compares each policy with the reference in its own round.
func writeDifferences(out io.Writer, rounds [][]*run) {
	base := slices.IndexFunc(rounds[0], func(r *run) bool { return r.policy == reference })
	if base < 0 || len(rounds) < 2 {
		return
	}
	fmt.Fprintf(out, "\nThe next table has the difference to `%s` in the same round, in %%, with the 95 %% interval over\n"+
		"%d rounds. Where the interval does not contain 0, the policies differ.\n\n", reference, len(rounds))
	fmt.Fprint(out, "| policy | tokens/s, whole list | tokens/s, full part | mean gap |\n|---|--:|--:|--:|\n")
	var widths []float64
	for i, r := range rounds[0] {
		if i == base {
			continue
		}
		differences := make([]report.Sample, len(rounds))
		for k, round := range rounds {
			differences[k] = report.Sample{}
			for _, m := range []report.Metric{wholeTokens, report.TokensPerS, gapMean} {
				differences[k][m] = 100 * (round[i].Sample[m]/round[base].Sample[m] - 1)
			}
		}
		m := report.Summarize(differences...)
		fmt.Fprintf(out, "| `%s` |", r.policy)
		for _, metric := range []report.Metric{wholeTokens, report.TokensPerS, gapMean} {
			half := m[metric].Interval(len(rounds))
			fmt.Fprintf(out, " %+.1f ± %.1f |", m[metric].Mean, half)
			if metric == report.TokensPerS {
				widths = append(widths, half)
			}
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\nWith this number of rounds, a difference in tokens/s of the full part can be seen if it is larger\n"+
		"than %.1f to %.1f %%, depending on the policy.\n", slices.Min(widths), slices.Max(widths))
}

// writeModels compares what evenkeel learned with the law of the pinned placements.
func writeModels(out io.Writer, rounds [][]*run, l law) {
	fmt.Fprintf(out, "\n## What evenkeel learned of the step\n\nIn each run, evenkeel began with nothing and learned from its streams alone. The table compares\n"+
		"what it learned with %.1f ms + %.3f ms per 1,000 KV tokens of the fullest rank. \"Off, a step\" is\n"+
		"about the step at the mean load of the run, by vLLM's gauges: it compares the time that evenkeel's\n"+
		"model gives for this step with the time that the second law gives.\n\n", l.line.Intercept, 1e3*l.line.Slope)
	fmt.Fprint(out, "| policy | learned in | c0, ms | c1, ms per 1,000 | off, c0 | off, c1 | off, a step | R2 | steps |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|\n")
	for i, r := range rounds[0] {
		var c0, c1, step, r2, steps []float64
		for _, round := range rounds {
			m := round[i].model
			r2, steps = append(r2, m.r2), append(steps, m.steps)
			if m.known {
				c0, c1 = append(c0, m.c0), append(c1, 1e3*m.c1)
				top, imbalance := round[i].Sample[engineTop], round[i].Sample[engineLevel]
				step = append(step, off(m.c0+m.c1*top, l.at(top, ranks*top-imbalance)))
			}
		}
		fmt.Fprintf(out, "| `%s` | %d of %d |", r.policy, len(c0), len(rounds))
		if len(c0) == 0 {
			fmt.Fprint(out, " | | | | |")
		} else {
			fmt.Fprintf(out, " %.1f (%.1f to %.1f) | %.3f (%.3f to %.3f) | %+.0f %% | %+.0f %% | %+.0f %% |", stats.Mean(c0), slices.Min(c0), slices.Max(c0),
				stats.Mean(c1), slices.Min(c1), slices.Max(c1), off(stats.Mean(c0), l.line.Intercept), off(stats.Mean(c1), 1e3*l.line.Slope), stats.Mean(step))
		}
		fmt.Fprintf(out, " %.2f | %.0f |\n", stats.Mean(r2), stats.Mean(steps))
	}
}

// off is how far a value is from what it should be, in %.
func off(v, want float64) float64 { return 100 * (v/want - 1) }

func summary(rounds [][]*run, policy int) report.Metrics {
	samples := make([]report.Sample, len(rounds))
	for i, round := range rounds {
		samples[i] = round[policy].Sample
	}
	return report.Summarize(samples...)
}

func show(v report.Value, digits int) string {
	if math.IsNaN(v.Mean) {
		return ""
	}
	return fmt.Sprintf("%.*f ± %.*f", digits, v.Mean, digits, v.SD)
}

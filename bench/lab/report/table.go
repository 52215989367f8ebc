package report

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// column is how people read a metric.
type column struct {
	metric Metric
	Label  string
	Unit   string  // of the shown values, may be empty
	scale  float64 // from the metric's unit to the shown one
	digits int
	ratio  bool   // beside the first run's
	Help   string // what is measured
}

// columns are shown in this order; one that no run measured is left out.
var columns = []column{
	{Imbalance, "imbalance", "KV tokens", 1, 0, true, "sum over ranks of (largest KV load less the rank's own), mean over steps"},
	{MaxMinusMin, "max - min", "KV tokens", 1, 0, true, "largest less smallest KV load of the group, mean over steps"},
	{IdleShare, "idle share", "%", 100, 1, true, "imbalance over ranks times largest load: what the ranks wait for the fullest one"},
	{StepMean, "step", "ms", 1, 2, true, "mean length of a decode step: c0 + c1 times the largest KV load"},
	{MixedSteps, "steps with prefill", "%", 100, 1, true, "share of steps in which a rank computes a prompt, for which all ranks wait"},
	{EmptyRanks, "ranks without", "%", 100, 1, true, "share of ranks that compute no prompt in a step in which another rank does"},
	{TokensPerS, "throughput", "tokens/s", 1, 0, true, "tokens of all ranks in the measured window"},
	{TPOTP50, "TPOT p50", "ms", 1, 2, true, "mean time per token after the first, median request"},
	{TPOTP95, "TPOT p95", "ms", 1, 2, true, "mean time per token after the first, 95 % of requests are faster"},
	{TTFTMean, "TTFT mean", "ms", 1, 0, true, "mean time from arrival to the end of the prefill"},
	{TTFTP50, "TTFT p50", "ms", 1, 0, true, "time to the first token, median request; in a closed loop it is mostly waiting for a slot"},
	{TTFTP90, "TTFT p90", "ms", 1, 0, true, "time to the first token, 90 % of requests are faster"},
	{TTFTP99, "TTFT p99", "ms", 1, 0, true, "time to the first token, 99 % of requests are faster"},
	{HitRatio, "hits", "%", 100, 1, false, "share of the prompts' tokens that were found in a prefix cache"},
	{Utilisation, "busy", "%", 100, 1, false, "share of time in which an engine prefills"},
	{Uneven, "imbalance", "prompt tokens", 1, 0, false, "sum over engines of (most prompt tokens to be computed less the engine's own), mean over time"},
	{HitError, "hits missed", "%", 100, 1, false, "sum of |predicted - found| tokens over the sum of predicted ones"},
	{TPOTMean, "TPOT mean", "ms", 1, 1, false, "mean time per token after the first, of engines that decode too"},
	{BurstMean, "burst's TTFT", "ms", 1, 0, false, "mean TTFT of the burst's class"},
	{PoolWaitMax, "pool wait max", "ms", 1, 0, false, "longest time a finished prefill waited in the proxy's pool; immediate policies let it wait in the engine"},
	{WaitMean, "wait mean", "s", 1e-3, 2, false, "mean time from the end of prefill to a slot, in the pool or in an engine's queue"},
	{WaitMax, "longest wait", "s", 1e-3, 1, false, "longest time from the end of prefill to a slot, in the pool or in an engine's queue"},
	{E2EP50, "E2E p50", "s", 1e-3, 1, true, "from arrival to the last token, median request"},
	{E2EP99, "E2E p99", "s", 1e-3, 1, true, "from arrival to the last token, 99 % of requests are faster"},
	{Preempted, "preempted", "", 1, 0, false, "requests that KV overflow threw out, to be prefilled again"},
	{Agreement, "same rounds", "%", 100, 1, false, "rounds with exactly the recorded assignments"},
	{SamePairs, "same pairs", "%", 100, 1, false, "recorded assignments that were made again"},
	{Placed, "placed", "a round", 1, 2, false, "requests admitted in a round"},
	{Rounds, "rounds", "", 1, 0, false, "rounds of the log"},
	{TickP99, "tick p99", "µs", 1, 0, false, "time of one decision round; of a proxy from the buckets of its histogram"},
	{StepLateP99, "step late p99", "ms", 1, 2, false, "a step ended that much later than the engine's clock wanted; large means the machine was too busy to be believed"},
	{WindowS, "measured", "s", 1, 1, false, "length of the measured window"},
	{OK, "ok", "", 1, 0, false, "streams that were right, token by token"},
	{Failed, "failed", "", 1, 0, false, "streams that were wrong, broken or refused"},
}

// mixedHelp is the help of columns that mean something else where ranks prefill, too.
var mixedHelp = map[Metric]string{
	StepMean:    "mean length of a step: c0 + c1 times the largest KV load, and what prompts take",
	TTFTP50:     "time to the first token, median request",
	PoolWaitMax: "longest time that a request waited for a rank in the proxy's pool",
}

// present are the columns that any run has. Where ranks prefill, too, those of level KV come last:
// rounds of prompts make rare what ranks wait for most, and may leave KV less level.
func (r *Report) present() []column {
	shown := slices.DeleteFunc(slices.Clone(columns), func(c column) bool {
		return !slices.ContainsFunc(r.Runs, func(run Run) bool { _, ok := run.Metrics[c.metric]; return ok })
	})
	ofKV := func(c column) bool { return slices.Contains([]Metric{Imbalance, MaxMinusMin, IdleShare}, c.metric) }
	if slices.ContainsFunc(shown, func(c column) bool { return c.metric == MixedSteps }) {
		slices.SortStableFunc(shown, func(a, b column) int {
			switch {
			case ofKV(a) == ofKV(b):
				return 0
			case ofKV(a):
				return 1
			}
			return -1
		})
	}
	return shown
}

func (c column) title() string {
	if c.Unit == "" {
		return c.Label
	}
	return c.Label + ", " + c.Unit
}

// show formats a value: thousands apart, the deviation where there is one.
func (c column) show(v Value) string {
	s := Grouped(v.Mean*c.scale, c.digits)
	if v.SD > 0 {
		s += " ± " + Grouped(v.SD*c.scale, c.digits)
	}
	return s
}

// Grouped puts thousands apart.
func Grouped(x float64, digits int) string {
	whole, rest, point := strings.Cut(strconv.FormatFloat(x, 'f', digits, 64), ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if point {
		rest = "." + rest
	}
	return sign + whole + rest
}

// cell is a run's value, absent where it was not measured, and its ratio to the first run's, empty
// without one.
func (r *Report) cell(run int, c column, absent string) (value, ratio string) {
	value = absent
	if v, ok := r.Runs[run].Metrics[c.metric]; ok {
		value = c.show(v)
	}
	if x, ok := r.ratio(run, c.metric); ok && c.ratio {
		ratio = fmt.Sprintf("×%.2f", x)
	}
	return value, ratio
}

// level is what a column would have if every step were balanced.
func (r *Report) level(c column, absent string) string {
	if v, ok := r.Bound[c.metric]; ok && c.ratio {
		return c.show(Value{Mean: v.Mean})
	}
	return absent
}

// Table writes what a terminal shows: a line a metric, a column a policy, and
// beside each number its ratio to the first policy's.
func (r *Report) Table(w io.Writer) error {
	head := []string{"policy"}
	for i, run := range r.Runs {
		head = append(head, run.Policy)
		if i > 0 {
			head = append(head, "")
		}
	}
	rows := [][]string{append(head, "balanced")}
	for _, c := range r.present() {
		row := []string{c.title()}
		for i := range r.Runs {
			value, ratio := r.cell(i, c, "-")
			if row = append(row, value); i > 0 {
				row = append(row, ratio)
			}
		}
		rows = append(rows, append(row, r.level(c, "")))
	}
	return writeAligned(w, rows)
}

// writeAligned puts the first column to the left, numbers to the right.
func writeAligned(w io.Writer, rows [][]string) error {
	var widths []int
	for _, row := range rows {
		for i, cell := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			switch {
			case i == 0:
				line.WriteString(cell + pad)
			case strings.HasPrefix(cell, "×"), cell == "" && widths[i] > 0 && i+1 < len(row):
				line.WriteString(" " + cell + pad)
			default:
				line.WriteString("   " + pad + cell)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

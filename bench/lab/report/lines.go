package report

import (
	"cmp"
	"io"
	"slices"
)

// Metrics that simulations know, beside those of every run.
const (
	WaitMean  Metric = "wait_mean_ms" // from the end of prefill to a slot, in the pool or an engine's queue
	WaitMax   Metric = "wait_max_ms"
	E2EP50    Metric = "e2e_p50_ms" // from arrival to the last token
	E2EP99    Metric = "e2e_p99_ms"
	Preempted Metric = "preempted" // requests thrown out by KV overflow
	TickMean  Metric = "tick_mean_us"
	Agreement Metric = "agreement"    // share of replayed rounds with the recorded assignments
	SamePairs Metric = "same_entries" // share of the recorded assignments that were made again
	Placed    Metric = "placed"       // requests admitted in a round
	Rounds    Metric = "rounds"
)

// Metrics of the prefill tier's simulation, beside those of every run.
const (
	TTFTMean    Metric = "ttft_mean_ms"
	TTFTP90     Metric = "ttft_p90_ms"
	HitRatio    Metric = "hit_ratio" // of the prompts' tokens, found in a prefix cache
	Load        Metric = "load"      // that was asked for
	Utilisation Metric = "utilisation"
	Uneven      Metric = "imbalance" // mean of the sum over engines of (most prompt tokens to be computed - the engine's)
	HitError    Metric = "hit_error" // sum of |predicted - found| over the sum of predicted tokens
	TPOTMean    Metric = "tpot_mean_ms"
	BurstMean   Metric = "burst_ttft_mean_ms" // requests of the burst's class
)

// compared are the metrics that Lines shows beside the first run's.
var compared = []Metric{Imbalance, TTFTMean}

// blank is a cell of a column that holds numbers; an empty one has no column.
const blank = " "

// Lines writes a table for many policies: a line a policy, a column for each of
// these metrics that is not 0 for all of them.
func (r *Report) Lines(w io.Writer, metrics ...Metric) error {
	var shown []column
	for _, m := range metrics {
		for _, c := range r.present() {
			if c.metric == m && !r.allZero(m) {
				shown = append(shown, c)
			}
		}
	}
	names, units := []string{"policy"}, []string{""}
	for _, c := range shown {
		names, units = append(names, c.Label), append(units, cmp.Or(c.Unit, blank))
	}
	rows := [][]string{names, units}
	for i, run := range r.Runs {
		row := []string{run.Policy}
		for _, c := range shown {
			value, ratio := r.cell(i, c, "-")
			if ratio != "" && slices.Contains(compared, c.metric) {
				value += " " + ratio
			}
			row = append(row, value)
		}
		rows = append(rows, row)
	}
	level := []string{"balanced"}
	for _, c := range shown {
		level = append(level, r.level(c, blank))
	}
	if slices.ContainsFunc(level[1:], func(cell string) bool { return cell != blank }) {
		rows = append(rows, level)
	}
	return writeAligned(w, rows)
}

func (r *Report) allZero(m Metric) bool {
	return !slices.ContainsFunc(r.Runs, func(run Run) bool { return run.Metrics[m].Mean != 0 })
}

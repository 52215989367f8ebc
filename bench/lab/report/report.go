// Package report says what runs of policies showed: measures taken from the
// steps of a decode group, one JSON document, a table for a terminal and a page
// with plots that needs nothing beside itself. It runs nothing and reads no
// clock; who ran the policies hands over what was seen.
package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"evenkeel/internal/stats"
)

// Report is what runs at the same load showed, one run a policy. The first run
// is the one that the others are compared with.
type Report struct {
	Title   string
	Command string // that makes it again
	Facts   []Fact // what ran, on what
	Notes   []string
	Model   StepModel
	Runs    []Run
	Bound   Metrics // of the same steps, were every one balanced
}

// Fact is a line of what ran.
type Fact struct{ Name, Value string }

// Run is what one policy did.
type Run struct {
	Policy  string // as the user wrote it
	Seeds   int
	Metrics Metrics
	Samples []Sample // of each seed, in their order; nil: nobody compares the seeds of two runs
	Steps   []Step   // of one seed, from the first to the last; nil: nothing to plot
	Window  Window   // the part of Steps that Metrics speak of
}

// Metric names a number, as JSON shows it; the unit is in the name.
type Metric string

// The metrics of every run, then what says how far to believe them.
const (
	Imbalance   Metric = "imbalance_tokens" // mean over steps of the sum over ranks of (largest load - load)
	MaxMinusMin Metric = "max_minus_min"    // KV tokens, mean over steps
	IdleShare   Metric = "idle_share"       // mean over steps of imbalance over ranks times largest load
	TokensPerS  Metric = "tokens_per_s"
	TPOTP50     Metric = "tpot_p50_ms"
	TPOTP95     Metric = "tpot_p95_ms"
	TTFTP50     Metric = "ttft_p50_ms"
	TTFTP99     Metric = "ttft_p99_ms"
	PoolWaitMax Metric = "pool_wait_max_ms"
	TickP99     Metric = "tick_p99_us"
	OK          Metric = "ok"
	Failed      Metric = "failed"

	StepMean      Metric = "step_ms"          // mean length of a step
	KVShare       Metric = "kv_share"         // of the step's length: c1 times load over all of it
	KVTokens      Metric = "kv_tokens"        // held by all ranks, mean over steps
	Running       Metric = "running"          // requests that decode, mean over steps
	KVExcess      Metric = "kv_excess"        // of the rank with the most KV beyond the mean, as a share of it, mean over steps
	RequestExcess Metric = "request_excess"   // likewise of requests
	StepLateP50   Metric = "step_late_p50_ms" // a step ended later than the clock of the engine wanted
	StepLateP99   Metric = "step_late_p99_ms"
	MixedSteps    Metric = "prefill_share" // of steps, those in which a rank computes a prompt
	EmptyRanks    Metric = "empty_share"   // of ranks, those that compute none in these steps
	WindowS       Metric = "window_s"      // length of the measured part
	Steps         Metric = "steps"         // in it
)

// order is that of JSON.
var order = []Metric{Imbalance, MaxMinusMin, IdleShare, TokensPerS, TPOTP50, TPOTP95, TTFTMean, TTFTP50, TTFTP90, TTFTP99, HitRatio,
	PoolWaitMax, TickP99, OK, Failed,
	StepMean, MixedSteps, EmptyRanks, KVShare, KVTokens, Running, StepLateP50, StepLateP99, WindowS, Steps}

// Value is a metric over the seeds of a run.
type Value struct {
	Mean float64 `json:"mean"`
	SD   float64 `json:"sd"` // between seeds; 0 for one
}

// tQuantile is Student's for 95 %, two-sided, by degrees of freedom from 1.
var tQuantile = [...]float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
	2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042}

// Interval is how far the mean over so many samples may be off, at 95 %. Of
// paired differences it tells whether there is one.
func (v Value) Interval(samples int) float64 {
	if samples < 2 {
		return 0
	}
	t := 1.96
	if samples-2 < len(tQuantile) {
		t = tQuantile[samples-2]
	}
	return t * v.SD / math.Sqrt(float64(samples))
}

// Gain is how much more of a metric b has than a, as a share of a's: the geometric mean of the
// ratios of the seeds, and the ends of its 95 % interval. Both runs must have had the same load on
// each seed, so that the deviation between loads cancels out. The ratios' logarithms are taken to
// be normal. seeds are those where both runs have the metric; of one seed there is no interval.
func Gain(a, b Run, m Metric) (mean, low, high float64, seeds int) {
	var logs []Sample
	for i := range min(len(a.Samples), len(b.Samples)) {
		if before, after := a.Samples[i][m], b.Samples[i][m]; before > 0 && after > 0 {
			logs = append(logs, Sample{m: math.Log(after / before)})
		}
	}
	v := Summarize(logs...)[m]
	off := v.Interval(len(logs))
	return math.Expm1(v.Mean), math.Expm1(v.Mean - off), math.Expm1(v.Mean + off), len(logs)
}

// Sample is what one seed gave. What could not be measured is absent.
type Sample map[Metric]float64

// Metrics are what all seeds gave.
type Metrics map[Metric]Value

// Summarize takes mean and standard deviation over samples. Numbers that are
// none (NaN, infinite) count as not measured.
func Summarize(samples ...Sample) Metrics {
	values := map[Metric][]float64{}
	for _, s := range samples {
		for m, v := range s {
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				values[m] = append(values[m], v)
			}
		}
	}
	out := Metrics{}
	for m, vs := range values {
		out[m] = Value{stats.Mean(vs), stats.Deviation(vs)}
	}
	return out
}

// MarshalJSON writes the metrics of every run in their order; the others follow by
// name.
func (m Metrics) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	sep := byte('{')
	for _, name := range m.names() {
		v, err := json.Marshal(m[name])
		if err != nil {
			return nil, err
		}
		b.WriteByte(sep)
		sep = ','
		b.WriteString(`"` + string(name) + `":`)
		b.Write(v)
	}
	if sep == '{' {
		b.WriteByte('{')
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

func (m Metrics) names() []Metric {
	known := slices.DeleteFunc(slices.Clone(order), func(n Metric) bool { _, ok := m[n]; return !ok })
	others := slices.DeleteFunc(slices.Sorted(maps.Keys(m)), func(n Metric) bool { return slices.Contains(order, n) })
	return append(known, others...)
}

// JSON writes the report as one document.
func (r *Report) JSON(w io.Writer) error {
	type run struct {
		Policy  string  `json:"policy"`
		Seeds   int     `json:"seeds"`
		Metrics Metrics `json:"metrics"`
	}
	doc := struct {
		Runs  []run   `json:"runs"`
		Bound Metrics `json:"bound"`
	}{make([]run, 0, len(r.Runs)), r.Bound}
	for _, x := range r.Runs {
		doc.Runs = append(doc.Runs, run{x.Policy, x.Seeds, x.Metrics})
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(doc)
}

// ratio of a run's metric to the first run's.
func (r *Report) ratio(run int, m Metric) (x float64, ok bool) {
	if run <= 0 || run >= len(r.Runs) {
		return 0, false
	}
	a, okA := r.Runs[0].Metrics[m]
	b, okB := r.Runs[run].Metrics[m]
	return b.Mean / a.Mean, okA && okB && a.Mean > 0
}

// Headline says in a sentence what the last policy did to the first's
// imbalance, or to its steps with a prefill where ranks prefill, too; nothing
// where there is nothing to compare.
func (r *Report) Headline() string {
	last := len(r.Runs) - 1
	if x, ok := r.ratio(last, MixedSteps); ok {
		a, b := r.Runs[0], r.Runs[last]
		return fmt.Sprintf("Compare throughput, TPOT and TTFT: where ranks prefill, too, KV may be less level although more tokens come. "+
			"Steps that compute a prompt: %.1f %% under %s, %.1f %% under %s, %.2f times as many. In these, ranks without one: "+
			"%.1f %% and %.1f %%.",
			100*a.Metrics[MixedSteps].Mean, a.Policy, 100*b.Metrics[MixedSteps].Mean, b.Policy, x,
			100*a.Metrics[EmptyRanks].Mean, 100*b.Metrics[EmptyRanks].Mean)
	}
	x, ok := r.ratio(last, Imbalance)
	if !ok {
		return ""
	}
	a, b := r.Runs[0], r.Runs[last]
	return fmt.Sprintf("Imbalance, in KV tokens a step: %s under %s, %s under %s, %.2f times as much. Idle share: %.1f %% and %.1f %%.",
		Grouped(a.Metrics[Imbalance].Mean, 0), a.Policy, Grouped(b.Metrics[Imbalance].Mean, 0), b.Policy, x,
		100*a.Metrics[IdleShare].Mean, 100*b.Metrics[IdleShare].Mean)
}

// longest is the time that the longest run took.
func (r *Report) longest() (end time.Duration) {
	for _, run := range r.Runs {
		if n := len(run.Steps); n > 0 {
			end = max(end, run.Steps[n-1].End())
		}
	}
	return end
}

// Words are put together, those that are given, with the same before each.
type Words struct{ Text, Before string }

// Add adds words.
func (w *Words) Add(given bool, format string, args ...any) {
	if given {
		w.Text += w.Before + fmt.Sprintf(format, args...)
	}
}

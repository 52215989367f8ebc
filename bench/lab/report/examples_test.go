package report_test

import (
	"fmt"
	"os"
	"time"

	"evenkeel/bench/lab/report"
)

// Two ranks step together; the second step is level.
func ExampleMeasure() {
	model := report.StepModel{C0: 5 * time.Millisecond, C1: 200}
	steps := []report.Step{
		{Start: 0, Length: 9 * time.Millisecond, Running: []int{16, 16}, KVTokens: []int{20_000, 10_000}},
		{Start: 9 * time.Millisecond, Length: 8 * time.Millisecond, Running: []int{16, 16}, KVTokens: []int{15_000, 15_000}},
	}
	run, bound := report.Measure(steps, model)
	fmt.Printf("imbalance %.0f KV tokens, idle share %.1f %%\n", run[report.Imbalance], 100*run[report.IdleShare])
	fmt.Printf("step %.1f ms, level %.1f ms\n", run[report.StepMean], bound[report.StepMean])
	// Output:
	// imbalance 5000 KV tokens, idle share 12.5 %
	// step 8.5 ms, level 8.0 ms
}

func ExampleReport_Table() {
	r := report.Report{Runs: []report.Run{
		{Policy: "jsq", Seeds: 2, Metrics: report.Summarize(report.Sample{report.Imbalance: 28_000}, report.Sample{report.Imbalance: 30_000})},
		{Policy: "br0", Seeds: 2, Metrics: report.Summarize(report.Sample{report.Imbalance: 11_000}, report.Sample{report.Imbalance: 11_500})},
	}}
	if err := r.Table(os.Stdout); err != nil {
		panic(err)
	}
	// Output:
	// policy                            jsq            br0         balanced
	// imbalance, KV tokens   29,000 ± 1,414   11,250 ± 354 ×0.39
}

package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/step"
)

// Two loads. The learner loses 10 % of the steps' time on one of them and nothing on the other; who takes another form for true loses 2 %
// everywhere.
func TestTheGateJudgesByTheWorstLoad(t *testing.T) {
	all := make([]outcomes, 2)
	for i := range all {
		for truth := range step.Forms {
			for column := range columns {
				slower := 1.0
				switch {
				case column == learns && i == 0:
					slower = 1.1
				case column < learns && column != truth:
					slower = 1.02
				case column > learns:
					slower = 1.05
				}
				all[i][truth][column] = report.Metrics{
					report.StepMean: {Mean: 30 * slower}, report.TokensPerS: {Mean: 1000 / slower}, report.TPOTP95: {Mean: 40 * slower},
				}
			}
		}
	}
	g := gate{seed: 1, loads: 2}
	text := g.tables(all)
	require.Contains(t, text, "| eager | 0.0 (0.0) | 2.0 (2.0) | 2.0 (2.0) | 2.0 (2.0) | 4.9 (10.0) | 5.0 (5.0) | 5.0 (5.0) |")
	for _, f := range []string{"mean step", "tokens/s", "TPOT p95"} {
		require.Contains(t, text, "- "+f+": the least worst loss has *taken for eager*, 2.0 %. Who knows form and constants gains 4.9 % in the mean")
	}
	m, lightest, heaviest := middle(), math.Inf(1), 0.0
	for _, e := range candidates() {
		level := in(&e, step.Eager).Level()
		lightest, heaviest = min(lightest, level.Weight()), max(heaviest, level.Weight())
	}
	require.Greater(t, m.Weight(), lightest)
	require.Less(t, m.Weight(), heaviest)
}

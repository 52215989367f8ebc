package main

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/laws"
	"evenkeel/dispatcher/step"
)

// Two loads. The learner loses 10 % of the steps' time on one of them and nothing on the other; who
// takes another form for true loses 2 % everywhere.
func TestTheGateJudgesByTheWorstLoad(t *testing.T) {
	all := make([]outcomes, 2)
	for i := range all {
		for truth := range step.Forms {
			for column := range columnNames() {
				slower := 1.0
				switch {
				case column == learns && i == 0:
					slower = 1.1
				case column < learns && column != truth:
					slower = 1.02
				case column > learns:
					slower = 1.05
				}
				all[i][truth] = append(all[i][truth], figures{30 * slower, 1000 / slower, 40 * slower})
			}
		}
	}
	text := (&gate{loads: 2}).studies()[0].tables(all)
	require.Contains(t, text, "| eager | 0.0 (0.0) | 2.0 (2.0) | 2.0 (2.0) | 2.0 (2.0) | 4.9 (10.0) | 5.0 (5.0) | 5.0 (5.0) |")
	for _, f := range []string{"mean step", "tokens/s", "TPOT p95"} {
		require.Contains(t, text,
			"- "+f+": the least worst loss has *taken for eager*, 2.0 %. Who knows form and constants gains 4.9 % in the mean")
	}
	m, lightest, heaviest := middle(), math.Inf(1), 0.0
	for _, e := range candidates() {
		level := in(&e, step.Eager).Level()
		lightest, heaviest = min(lightest, level.Weight()), max(heaviest, level.Weight())
	}
	require.Greater(t, m.Weight(), lightest)
	require.Less(t, m.Weight(), heaviest)
	require.InEpsilon(t, m.Weight(), step.UsualWeight, 0.05, "what policies begin with")
	require.InDelta(t, laws.Published, promptShare(laws.All()), 0.005)
	share, own := usualPrompts()
	require.InDelta(t, share, step.UsualOwnShare, 0.02)
	require.InEpsilon(t, own, step.UsualOwnPromptMs, 0.05)
}

// usualPrompts are the middle of the own parts of a token of a prompt, with experts as fast as they
// were in published runs.
func usualPrompts() (share, own float64) {
	var shares, owns []float64
	for _, e := range laws.All() {
		if p := &e.Prompt; p.Fit.Steps > 0 {
			owns = append(owns, p.OwnMs)
			shares = append(shares, p.OwnMs/(p.OwnMs+promptShare(laws.All())*(p.MostMs+p.MeanMs)))
		}
	}
	slices.Sort(shares)
	slices.Sort(owns)
	return shares[len(shares)/2], owns[len(owns)/2]
}

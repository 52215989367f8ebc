package main

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
)

func TestFaultsOfTheDefault(t *testing.T) {
	on := &policytables.Source{Name: "t", MeanOutput: 100}
	shared := func(idle, sd, imbalance, wait float64) report.Metrics {
		return report.Metrics{
			report.IdleShare: {Mean: idle, SD: sd}, report.Imbalance: {Mean: imbalance},
			report.WaitMax: {Mean: wait}, report.WaitMean: {Mean: 1000}, report.StepMean: {Mean: 60},
		}
	}
	for _, c := range []struct {
		name       string
		sc         scenario
		mine       report.Metrics
		kv, br, bh report.Metrics
		want       string
	}{
		{"better everywhere", closed(on, 64), shared(0.05, 0, 10, 36_499), shared(0.1, 0, 30, 0), shared(0.06, 0, 20, 0), shared(0.06, 0, 20, 0), policytables.Pass},
		{"within a deviation of its own", closed(on, 8), shared(0.065, 0.005, 10, 0), shared(0.1, 0, 30, 0), shared(0.06, 0, 20, 0), shared(0.06, 0.001, 20, 0), policytables.Pass},
		{"above one rival", closed(on, 8), shared(0.065, 0.001, 10, 0), shared(0.1, 0, 30, 0), shared(0.06, 0, 20, 0), shared(0.07, 0, 20, 0), "**does not reproduce**: idles above `br0`"},
		{"not enough below the baseline in a closed loop", closed(on, 8), shared(0.08, 0, 10, 0), shared(0.1, 0, 30, 0), shared(0.09, 0, 20, 0), shared(0.09, 0, 20, 0), "**does not reproduce**: idle 0.80 of `jsq-kv`"},
		{"which an open one does not ask for", open(on, 8, 0.7), shared(0.08, 0, 10, 0), shared(0.1, 0, 30, 0), shared(0.09, 0, 20, 0), shared(0.09, 0, 20, 0), policytables.Pass},
		{"above the baseline in an open loop", open(on, 8, 0.7), shared(0.12, 0.01, 10, 0), shared(0.1, 0.01, 30, 0), shared(0.2, 0, 20, 0), shared(0.2, 0, 20, 0), "**does not reproduce**: idles above `jsq-kv`"},
		{"many ranks ask for more", closed(on, 64), shared(0.05, 0, 16, 0), shared(0.1, 0, 30, 0), shared(0.06, 0, 20, 0), shared(0.06, 0, 40, 0), "**does not reproduce**: imbalance 0.80 of `br0`"},
		{"30 s and 100 steps of 60 ms is the longest wait", closed(on, 8), shared(0.05, 0, 1, 36_501), shared(0.1, 0, 3, 0), shared(0.06, 0, 2, 0), shared(0.06, 0, 2, 0), "**does not reproduce**: waits too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := judged{sc: c.sc, ours: ours, rivals: rivals, guardMs: ownGuardMs, o: &page.Outcome{Metrics: map[string]report.Metrics{
				ours: c.mine, baseline: c.kv, "br0": c.br, "brh": c.bh,
			}}}
			require.Equal(t, c.want, j.faults())
		})
	}
}

// judging is a book of one trace whose simulations are done.
func judging(t *testing.T, gave func(sc scenario, policy string) report.Metrics) *book {
	t.Helper()
	on := &policytables.Source{Name: "t"}
	b := &book{&policytables.Book{Traces: &policytables.Traces{Real: []*policytables.Source{on}},
		Runs: page.Runs{Done: map[string]*page.Outcome{}}}}
	for _, g := range b.sizes() {
		sc := closed(on, g)
		o := &page.Outcome{Metrics: map[string]report.Metrics{}}
		for _, p := range append(sweep(), foreseeing...) {
			o.Metrics[p] = gave(sc, p)
		}
		b.Done[sc.String()] = o
	}
	return b
}

func TestTheSweepIsJudgedByItsSpread(t *testing.T) {
	for _, c := range []struct {
		name string
		last float64 // idle share with gamma=1; 0.075 with all others
		want string
	}{
		{"as printed: 7.5 to 8.4", 0.0844, "| 7.5 to 8.4 | 0.9 | 100 to 100 | 7.5 | PASS |"},
		{"and not by what is not printed: 7.5 to 8.5", 0.08451, "| 7.5 to 8.5 | 1.0 | 100 to 100 | 7.5 | **does not reproduce** |"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := judging(t, func(_ scenario, p string) report.Metrics {
				m := report.Metrics{report.IdleShare: {Mean: 0.075}, report.TokensPerS: {Mean: 100}}
				if strings.HasSuffix(p, "gamma=1") {
					m[report.IdleShare] = report.Value{Mean: c.last}
				}
				return m
			})
			require.Equal(t, 2, strings.Count(b.weightsMatterLittle(), c.want), b.weightsMatterLittle())
		})
	}
}

func TestImbalanceMustGrowFasterThanTheRanks(t *testing.T) {
	for power, want := range map[float64]string{
		1.2: "| t | 4 to 64 | 1.74 times, `jsq` | 1.74 times, `jsq` | PASS |",
		1.0: "| t | 4 to 64 | 1.00 times, `jsq` | 1.00 times, `jsq` | **does not reproduce** |",
	} {
		b := judging(t, func(sc scenario, _ string) report.Metrics {
			return report.Metrics{report.Imbalance: {Mean: 1e6 * math.Pow(float64(sc.ranks), power)}}
		})
		require.Contains(t, b.imbalanceGrows(), want)
	}
}

func TestGuardedPolicies(t *testing.T) {
	for name, want := range map[string]string{
		"jsq":              "jsq", // has none
		"br0:paper":        "br0:paper",
		"br0":              "br0:max_age_ms=60000",
		"brh:horizon=80":   "brh:horizon=80,max_age_ms=60000",
		"evenkeel:kappa=0": "evenkeel:kappa=0,max_age_ms=60000",
	} {
		got, err := guarded(name, 60_000)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := guarded("fastest", 1)
	require.Error(t, err)
}

func TestReferenceHasAFigureForEveryRow(t *testing.T) {
	for _, r := range referenceRuns {
		require.Len(t, r.gave, len(referenceRows))
	}
}

func TestFiguresAreReadable(t *testing.T) {
	require.Equal(t, "1,234,567", report.Grouped(1_234_567, 0))
	require.Equal(t, "-1,234.50", report.Grouped(-1234.5, 2))
	require.Equal(t, "123", report.Grouped(123, 0))
	for want, v := range map[string]report.Value{
		"9.00 ± 0.25": {Mean: 9000, SD: 250}, "90.0": {Mean: 90_000}, "900 ± 10": {Mean: 900_000, SD: 10_000},
	} {
		require.Equal(t, want, imbalance.Show(v))
	}
	require.Equal(t, "12.5 ± 0.2", idle.Show(report.Value{Mean: 0.125, SD: 0.002}))
}

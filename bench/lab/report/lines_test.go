package report

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLinesHasALineAPolicy(t *testing.T) {
	r := Report{
		Runs: []Run{
			{Policy: "jsq", Metrics: Summarize(Sample{Imbalance: 28_000, WaitMax: 12_345, Failed: 0}, Sample{Imbalance: 30_000, WaitMax: 12_345, Failed: 0})},
			{Policy: "br0:theta=0", Metrics: Summarize(Sample{Imbalance: 14_500, TickP99: 3})},
		},
		Bound: Summarize(Sample{Imbalance: 0}),
	}
	var b strings.Builder
	require.NoError(t, r.Lines(&b, WaitMax, Imbalance, Failed, Preempted, TickP99))
	require.Equal(t, strings.Join([]string{
		"policy        longest wait        imbalance   tick p99",
		"                         s        KV tokens         µs",
		"jsq                   12.3   29,000 ± 1,414          -",
		"br0:theta=0              -     14,500 ×0.50          3",
		"balanced                                  0",
		"",
	}, "\n"), b.String(), "in the order asked for; what is 0 for all, or unknown, is left out")
}

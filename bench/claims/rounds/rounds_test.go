package main

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/sim/mixed"
	"evenkeel/internal/race"
)

func TestTheSameLoadGivesTheSame(t *testing.T) {
	t.Parallel()
	a, err := mixed.Serve(t.Context(), mixed.Draw(4, 3), policies()[set-1])
	require.NoError(t, err)
	b, err := mixed.Serve(t.Context(), mixed.Draw(4, 3), policies()[set-1])
	require.NoError(t, err)
	require.Equal(t, a, b)
}

func TestWrongFlags(t *testing.T) {
	for flag, want := range map[string]string{"-seeds=1,x": "is no seed", "-loads=0": "there must be one"} {
		_, err := parse([]string{flag})
		require.ErrorContains(t, err, want)
	}
}

func TestTablesJudge(t *testing.T) {
	t.Parallel()
	loads := 3
	if race.Enabled { // one load alone takes minutes under the race detector
		loads = 1
	}
	all, err := try(t.Context(), 1, loads, io.Discard) // the loads of other seeds take several times as long
	require.NoError(t, err)
	o := options{}
	text := o.tables([]*trials{all})
	require.Contains(t, text, "| tokens/s beside the better of vLLM's own and least tokens: worst |")
	require.Contains(t, text, "| vLLM's own | 1.000 (1.00, 1.00) |")
}

package main

import (
	"io"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/race"
)

// Whoever chooses the ranks, all that was asked for is answered, and what the proxy thinks of the ranks ends where it began.
func TestAccountsEndWhereTheyBegan(t *testing.T) {
	race.Alone(t)
	t.Parallel()
	for number := range 6 {
		l := newLoad(9, number)
		for _, p := range policies() {
			s, err := newRun(l, p)
			require.NoError(t, err)
			s.requests = s.requests[:200]
			s.to = math.Inf(1) // until nothing is left to do
			_, err = s.do(t.Context())
			require.NoError(t, err)
			require.Zero(t, s.unended, "%s on %s", p.name, l)
			status := s.Boards.Status(s.Instant(s.Now))
			require.Zero(t, status.Drift)
			for r, w := range status.Models[0].Workers {
				require.Zero(t, w.Used, "%s on %s", p.name, l)
				require.Zero(t, w.Backlog, "%s on %s", p.name, l)
				require.Zero(t, w.KVTokens, "%s on %s", p.name, l)
				require.Zero(t, s.group.Ranks[r].KV)
			}
		}
	}
}

func TestTheSameLoadGivesTheSame(t *testing.T) {
	t.Parallel()
	a, err := serve(t.Context(), newLoad(4, 3), policies()[set-1])
	require.NoError(t, err)
	b, err := serve(t.Context(), newLoad(4, 3), policies()[set-1])
	require.NoError(t, err)
	require.Equal(t, a, b)
}

func TestACacheForgetsTheOldest(t *testing.T) {
	c := cache{}
	c.keep(1, 100, 250)
	c.keep(2, 100, 250)
	c.keep(1, 120, 250)
	c.keep(3, 50, 250)
	require.EqualValues(t, 120, c.holds(1))
	require.Zero(t, c.holds(2))
	require.EqualValues(t, 50, c.holds(3))
	require.EqualValues(t, 170, c.tokens)
}

func TestWrongFlags(t *testing.T) {
	for flag, want := range map[string]string{"-seeds=1,x": "is no seed", "-loads=0": "there must be one"} {
		_, err := parse([]string{flag})
		require.ErrorContains(t, err, want)
	}
}

func TestTablesJudge(t *testing.T) {
	t.Parallel()
	all, err := try(t.Context(), 1, 3, io.Discard) // the loads of other seeds take several times as long
	require.NoError(t, err)
	o := options{}
	text := o.tables([]*trials{all})
	require.Contains(t, text, "| tokens/s against least tokens: mean, worst |")
	require.Contains(t, text, "| least tokens | 1.000 (1.00, 1.00) |")
}

package mixed

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// contenders decide in different ways.
func contenders() []Contender {
	return []Contender{
		{Name: "rr", Spec: "rr"}, {Name: "vllm", Route: VLLM}, {Name: "least", Route: LeastTokens, Delay: 30}, {Name: "rounds", Spec: "evenkeel"},
		{Name: "learned", Spec: "evenkeel", Every: 2, Learn: true},
	}
}

// Whoever chooses the ranks, all that was asked for is answered, and what the proxy thinks of the ranks ends where it began.
func TestAccountsEndWhereTheyBegan(t *testing.T) {
	race.Alone(t)
	t.Parallel()
	for number := range 6 {
		l := Draw(9, number)
		for _, p := range contenders() {
			s, err := New(l, p)
			require.NoError(t, err)
			s.requests = s.requests[:200]
			s.to = math.Inf(1) // until nothing is left to do
			_, err = s.Do(t.Context())
			require.NoError(t, err)
			require.Zero(t, s.unended, "%s on %s", p.Name, l)
			status := s.Boards.Status(s.Instant(s.Now))
			require.Zero(t, status.Drift)
			for r, w := range status.Models[0].Workers {
				require.Zero(t, w.Used, "%s on %s", p.Name, l)
				require.Zero(t, w.Backlog, "%s on %s", p.Name, l)
				require.Zero(t, w.KVTokens, "%s on %s", p.Name, l)
				require.Zero(t, s.group.Ranks[r].KV)
			}
		}
	}
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

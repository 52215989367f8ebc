package circuit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func TestAReturnIsNoSuccess(t *testing.T) {
	c, now := Circuit{Limit: 2}, start
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		require.False(t, c.Fail(1, now))
		require.True(t, c.Fail(2, now))
		require.Equal(t, want*time.Second, c.OutageLength())
		require.False(t, c.Allows(c.TrialAt().Add(-1)))
		now = c.TrialAt()
		require.True(t, c.Allows(now))
		c.ReturnToService()
		require.True(t, c.InService())
	}
	c.Succeed()
	c.Fail(1, now)
	c.Fail(2, now)
	require.Equal(t, FirstOut, c.OutageLength(), "a success forgets the past")
	require.Equal(t, 2, c.Limit, "but not the limit")
}

// Whatever happens in whatever order: out only after enough failures or a trip,
// one trial at a time, and never out for longer than the longest outage.
func TestCircuit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, now, row, sent := Circuit{Limit: rapid.IntRange(0, 6).Draw(t, "limit")}, start, 0, uint64(0)
		limit := c.Limit
		if limit == 0 {
			limit = Limit
		}
		t.Repeat(map[string]func(*rapid.T){
			"wait": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 40_000).Draw(t, "ms")) * time.Millisecond)
			},
			"send": func(*rapid.T) {
				sent++
				trial := !c.InService() && c.Allows(now)
				c.Send(sent, now)
				require.False(t, trial && c.Allows(now), "one trial at a time")
			},
			"fail": func(t *rapid.T) {
				in := c.InService()
				out := c.Fail(rapid.Uint64Range(0, sent).Draw(t, "request"), now)
				if in {
					row++
					require.Equal(t, row >= limit, out)
				}
				if out {
					row = 0
				}
			},
			"neutral": func(t *rapid.T) { c.Neutral(rapid.Uint64Range(1, sent+1).Draw(t, "request")) },
			"trip":    func(*rapid.T) { c.Trip(now); row = 0 },
			"return":  func(*rapid.T) { c.ReturnToService(); row = 0 },
			"succeed": func(*rapid.T) { c.Succeed(); row = 0 },
			"": func(t *rapid.T) {
				require.False(t, c.TrialAt().After(now.Add(MaxOut)))
				require.Equal(t, c.InService(), c.TrialAt().IsZero())
				if c.InService() {
					require.True(t, c.Allows(now))
				}
			},
		})
	})
}

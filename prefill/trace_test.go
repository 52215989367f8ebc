package prefill

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestALeaseSaysWhatItsCandidateWasChosenOn(t *testing.T) {
	scheduler := newScheduler(t, fleet(12), withPolicy("least-tokens"), func(c *Config) { c.Explain = true })
	acquire(t, scheduler, request(1))
	l := acquire(t, scheduler, request(2))
	g := l.Trace
	require.NotNil(t, g)
	require.Equal(t, "policy", g.Reason)
	require.Equal(t, 12, g.Eligible)
	require.Len(t, g.Best, maxTraceRows)
	require.True(t, g.Best[0].Chosen)
	require.Equal(t, l.Candidate.ID, g.Best[0].Candidate)
	for i := 1; i < len(g.Best); i++ {
		require.False(t, g.Best[i].Chosen)
		require.GreaterOrEqual(t, *g.Best[i].Score, *g.Best[i-1].Score, "by score")
	}
}

func TestASessionThatStayedWasNotScored(t *testing.T) {
	scheduler := newScheduler(t, fleet(3), func(c *Config) {
		c.Explain, c.Affinity = true, AffinityConfig{Enabled: true, MaxKeys: 10, TTL: 1e12, LoadFactor: 100}
	})
	r := request(1)
	r.Session = 7
	first := acquire(t, scheduler, r)
	first.Release()
	r = request(2)
	r.Session = 7
	l := acquire(t, scheduler, r)
	require.Equal(t, "affinity", l.Trace.Reason)
	require.Len(t, l.Trace.Best, 1)
	require.Nil(t, l.Trace.Best[0].Score)
}

func TestWithoutExplainALeaseHasNoGrounds(t *testing.T) {
	require.Nil(t, acquire(t, newScheduler(t, fleet(2)), request(1)).Trace)
}

package prefill

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// A million sessions come, each with a prompt of its own. What is remembered of them does not grow
// with their number. The last ones are where they were, and the first ones are new.
func TestAMillionSessions(t *testing.T) {
	race.Alone(t)
	const sessions, most = 1_000_000, 20_000
	scheduler := newScheduler(t, up("a", "b", "c", "d"), withPolicy("lmetric"), func(c *Config) {
		c.Affinity = AffinityConfig{Enabled: true, MaxKeys: most, TTL: time.Hour, LoadFactor: 4}
		c.Index.MaxBytes = 8 << 20
	})
	of := func(n int) string {
		r := prompt(fmt.Sprint(n), text(fmt.Sprintf("%08d", n), 1024))
		r.Session = uint64(n)
		l := acquire(t, scheduler, r)
		defer l.Release()
		l.Answered(Usage{PromptTokens: 256}, time.Time{})
		return l.Candidate.ID
	}
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	went := make([]string, sessions+1)
	var filled int64
	for n := 1; n <= sessions; n++ {
		if went[n] = of(n); n == sessions/4 {
			filled = heap()
		}
	}
	require.LessOrEqual(t, heap()-filled, int64(4<<20), "bytes that three quarters of a million sessions leave")
	counts := func(outcome string) float64 {
		return testutil.ToFloat64(scheduler.metrics.affinity.WithLabelValues(outcome))
	}
	kept := counts("kept")
	for n := sessions - most/2; n <= sessions; n++ {
		require.Equal(t, went[n], of(n))
	}
	require.InDelta(t, kept+most/2+1, counts("kept"), 0)
	fresh := counts("new")
	for n := 1; n <= 100; n++ {
		of(n)
	}
	require.InDelta(t, fresh+100, counts("new"), 0)
}

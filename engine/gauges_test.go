package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// What an engine says of a rank is known for a while, and what its counters grew by after two readings of the same process.
func TestGaugesOfARank(t *testing.T) {
	page := func(start, running, preempted, asked, pulled int) string {
		return ok(fmt.Sprintf("process_start_time_seconds %d\nvllm:num_requests_running{engine=\"0\"} %d\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n"+
			"vllm:num_preemptions_total{engine=\"0\"} %d\nvllm:external_prefix_cache_queries_total{engine=\"0\"} %d\nvllm:external_prefix_cache_hits_total{engine=\"0\"} %d\n",
			start, running, preempted, asked, pulled))
	}
	f := decodes()
	f.set("/metrics", page(100, 12, 3, 9000, 9000))
	doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		_, ok := m.Gauges("nobody", -1)
		require.False(t, ok)
		g, ok := m.Gauges("d0", -1)
		require.True(t, ok)
		require.Equal(t, Gauges{Running: 12, Waiting: -1, KVShare: 0.5, Preempted: -1, Computed: -1}, g, "there is no reading before it")
		f.set("/metrics", page(100, 61, 7, 15_000, 10_000))
		time.Sleep(12 * time.Second)
		g, _ = m.Gauges("d0", -1)
		require.Equal(t, Gauges{Running: 61, Waiting: -1, KVShare: 0.5, Preempted: 4, Computed: 5000}, g)
		f.set("/metrics", page(200, 1, 1, 1, 0))
		time.Sleep(12 * time.Second)
		g, _ = m.Gauges("d0", -1)
		require.Equal(t, Gauges{Running: 1, Waiting: -1, KVShare: 0.5, Preempted: -1, Computed: -1}, g, "another process counts")
		f.set("/metrics", status(404))
		time.Sleep(oldReadings*10*time.Second + 5*time.Second)
		_, ok = m.Gauges("d0", -1)
		require.False(t, ok, "it says nothing any more")
	})
}

package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

// What an engine says of a rank is known for a while, and what its counters grew by after two
// readings of the same process.
func TestGaugesOfARank(t *testing.T) {
	page := func(start, running, preempted, asked, pulled int) string {
		return ok(fmt.Sprintf("process_start_time_seconds %d\nvllm:num_requests_running{engine=\"0\"} "+
			"%d\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n"+
			"vllm:num_preemptions_total{engine=\"0\"} %d\nvllm:external_prefix_cache_queries_total{engine=\"0\"} "+
			"%d\nvllm:external_prefix_cache_hits_total{engine=\"0\"} %d\n",
			start, running, preempted, asked, pulled))
	}
	f := decodes()
	f.set("/metrics", page(100, 12, 3, 9000, 9000))
	doubted(t, f, func(t *testing.T, m *Monitor, _ *prometheus.Registry) {
		_, ok := m.Gauges("nobody", -1)
		require.False(t, ok)
		g, ok := m.Gauges("d0", -1)
		require.True(t, ok)
		require.Equal(t, Gauges{Running: 12, Waiting: -1, KVShare: 0.5, Preempted: -1, Computed: -1, WaitMs: -1}, g,
			"there is no reading before it")
		f.set("/metrics", page(100, 61, 7, 15_000, 10_000))
		time.Sleep(12 * time.Second)
		g, _ = m.Gauges("d0", -1)
		require.Equal(t, Gauges{Running: 61, Waiting: -1, KVShare: 0.5, Preempted: 4, Computed: 5000, WaitMs: -1}, g)
		f.set("/metrics", page(200, 1, 1, 1, 0))
		time.Sleep(12 * time.Second)
		g, _ = m.Gauges("d0", -1)
		require.Equal(t, Gauges{Running: 1, Waiting: -1, KVShare: 0.5, Preempted: -1, Computed: -1, WaitMs: -1}, g, "another process counts")
		f.set("/metrics", status(404))
		time.Sleep(maxSampleIntervals*10*time.Second + 5*time.Second)
		_, ok = m.Gauges("d0", -1)
		require.False(t, ok, "it says nothing any more")
	})
}

// Two ranks of SGLang behind one address, of which the second has two workers: each rank waits for
// as long as it counts itself.
func TestHowLongARankWaitsByItsOwnClock(t *testing.T) {
	page := func(steps, sum0, sum1 string) *Sample {
		text := ""
		for series, values := range map[string][3]string{"count": {steps, steps, "0"}, "sum": {sum0, sum1, "0"}} {
			for i, labels := range []string{`dp_rank="0",tp_rank="0"`, `dp_rank="1",tp_rank="2"`, `dp_rank="1",tp_rank="3"`} {
				text += fmt.Sprintf("sglang:dp_attention_sync_wait_seconds_%s{model_name=\"m\",%s} %s\n", series, labels, values[i])
			}
		}
		s, err := MetricNames{}.Parse([]byte(text))
		require.NoError(t, err)
		return s
	}
	before := page("100", "2", "3")
	for name, tt := range map[string]struct {
		now  *Sample
		want [3]float64 // of rank 0, rank 1, and where the address has one rank
	}{
		"each rank since the reading before":  {page("300", "2.2", "3.8"), [3]float64{1, 4, 2.5}},
		"no step since then":                  {before, [3]float64{-1, -1, -1}},
		"a clock that cannot be right":        {page("101", "1e9", "3"), [3]float64{-1, 0, -1}},
		"a clock that is no number":           {page("300", "NaN", "3"), [3]float64{-1, 0, -1}},
		"counters that began anew":            {page("5", "1", "1"), [3]float64{-1, -1, -1}},
		"the variable is not set":             {page("0", "0", "0"), [3]float64{-1, -1, -1}},
		"a page that has none of these lines": {&Sample{}, [3]float64{-1, -1, -1}},
	} {
		for i, rank := range []int{0, 1, -1} {
			require.InDelta(t, tt.want[i], gaugesOf(before, tt.now, rank).WaitMs, 1e-9, "%s, rank %d", name, rank)
		}
	}
	for _, absurd := range []string{"-1", "+Inf", "1e300", "many"} {
		s, err := MetricNames{}.Parse([]byte("vllm:num_requests_running 5\nsglang:dp_attention_sync_wait_seconds_sum{dp_rank=\"0\"} " + absurd +
			"\nsglang:dp_attention_sync_wait_seconds_count{dp_rank=\"0\"} 900\n"))
		require.NoError(t, err, "the page is believed without it")
		g := gaugesOf(before, s, 0)
		require.Equal(t, []float64{5, -1}, []float64{g.Running, g.WaitMs}, absurd)
	}
	require.EqualValues(t, -1, gaugesOf(nil, before, 0).WaitMs, "there is no reading before it")
}

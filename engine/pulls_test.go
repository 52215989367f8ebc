package engine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPullsThatFellShort(t *testing.T) {
	var (
		p       pullCheck
		settled float64
		traffic Traffic
	)
	scraped := func(start, asked, pulled int) float64 {
		t.Helper()
		s, err := MetricNames{}.Parse(fmt.Appendf(nil, `process_start_time_seconds %d
vllm:external_prefix_cache_queries_total{engine="0"} %d
vllm:external_prefix_cache_queries_total{engine="1"} 100
vllm:external_prefix_cache_hits_total{engine="0"} %d
vllm:external_prefix_cache_hits_total{engine="1"} 100
`, start, asked, pulled))
		require.NoError(t, err)
		return p.newlyNotPulled(s, settled, float64(traffic.computedTokens.Load()))
	}
	traffic.ExpectComputed(500) // it is not known yet whether the engine has counted this one
	settled = traffic.settledTokens()
	require.Zero(t, scraped(1, 9000, 4000), "what was there before is nobody's")
	require.Zero(t, scraped(1, 9500, 4000), "it was to compute these")
	traffic.SettleComputed(500, 400)
	require.EqualValues(t, 100, scraped(1, 9500, 4000), "more than its answer says")
	require.Zero(t, scraped(1, 9500, 4000), "told once")
	traffic.ExpectComputed(128)
	require.EqualValues(t, 872, scraped(1, 10_500, 4000), "a hand-off of 1,000 tokens, and nothing was pulled")
	traffic.SettleComputed(128, 128)
	require.Zero(t, scraped(1, 11_500, 5000), "all of it came")
	settled = traffic.settledTokens()
	require.Zero(t, scraped(2, 300, 0), "another process begins anew")
	require.EqualValues(t, 50, scraped(2, 350, 0))
	s, err := MetricNames{}.Parse([]byte("vllm:external_prefix_cache_queries_total 5\n"))
	require.NoError(t, err)
	require.Zero(t, p.newlyNotPulled(s, settled, 0), "an engine that tells one of them only tells nothing")
}

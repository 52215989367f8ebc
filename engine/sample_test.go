package engine

import (
	"bytes"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSampleOfAnEngineWithTwoRanks(t *testing.T) {
	page, err := os.ReadFile("testdata/metrics-dp2.txt")
	require.NoError(t, err)
	s, err := MetricNames{}.Parse(page)
	require.NoError(t, err)
	require.Equal(t, []string{"0", "1"}, s.Engines())
	require.Equal(t, 1755800000.25, s.StartTime)
	for rank, want := range map[int]Gauges{
		0:  {KVShare: 0.25, Running: 3, Waiting: 0},
		1:  {KVShare: 0.75, Running: 5, Waiting: 7}, // the fullest of a rank's series counts
		-1: {KVShare: 0.75, Running: 8, Waiting: 7}, // the fullest rank, and the sum
		2:  {KVShare: -1, Running: -1, Waiting: -1},
	} {
		want.Preempted, want.Computed, want.WaitMs = -1, -1, -1
		require.Equal(t, want, gaugesOf(nil, s, rank), rank)
	}
}

func TestKVUsageByName(t *testing.T) {
	nan := math.NaN()
	for _, tt := range []struct {
		name, page string
		want       float64 // NaN: unknown
	}{
		{"the new name", `vllm:kv_cache_usage_perc{engine="0"} 0.5`, 0.5},
		{"the old name", `vllm:gpu_cache_usage_perc{engine="0"} 0.5`, 0.5},
		{"new before old", "vllm:gpu_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5", 0.5},
		{"old where new is NaN", "vllm:gpu_cache_usage_perc{engine=\"0\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"0\"} NaN", 0.9},
		{"SGLang", "sglang:token_usage{model_name=\"m\"} 0.5", 0.5},
		{"no labels at all", "vllm:gpu_cache_usage_perc 0.5", 0.5},
		{"a longer name is another metric", `vllm:kv_cache_usage_perc_max{engine="0"} 0.5`, nan},
		{"NaN is unknown, not 0", `vllm:kv_cache_usage_perc{engine="0"} NaN`, nan},
		{"another rank's value is not ours", "vllm:kv_cache_usage_perc{engine=\"0\"} NaN\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5", nan},
		{"a node that counts from another rank than 0", "vllm:kv_cache_usage_perc{engine=\"5\"} 0.9\nvllm:kv_cache_usage_perc{engine=\"4\"} 0.5", 0.5},
		{"its first rank's is unknown", "vllm:kv_cache_usage_perc{engine=\"5\"} 0.9\nvllm:num_requests_running{engine=\"4\"} 1", nan},
		{"an empty page", "", nan},
		{"a broken line of another metric", "foo{ 1\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nbar bar", 0.5},
		{"a label value with braces and quotes", `vllm:kv_cache_usage_perc{model_name="a\"} 0.9 {",engine="0"} 0.5`, 0.5},
		{"CRLF line ends", "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\r\n", 0.5},
		{"a TYPE line after the samples", "vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n# TYPE vllm:kv_cache_usage_perc gauge\n", 0.5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := MetricNames{}.Parse([]byte(tt.page))
			require.NoError(t, err)
			got, ok := s.KVUsage(0)
			require.Equal(t, !math.IsNaN(tt.want), ok)
			if ok {
				require.Equal(t, tt.want, got)
			}
		})
	}
}

func TestMetricNamesOfAnOperator(t *testing.T) {
	s, err := MetricNames{KVUsage: "my:kv"}.Parse([]byte("my:kv{engine=\"0\"} 0.5\nvllm:kv_cache_usage_perc{engine=\"0\"} " +
		"0.9\nvllm:num_requests_running{engine=\"0\"} 2\n"))
	require.NoError(t, err)
	kv, _ := s.KVUsage(0)
	require.Equal(t, 0.5, kv)
	running, _ := s.Running(0)
	require.Equal(t, 2.0, running)
}

func TestABrokenLineOfAWantedMetricIsAnError(t *testing.T) {
	_, err := MetricNames{}.Parse([]byte(`vllm:kv_cache_usage_perc{engine="0" 0.5`))
	require.ErrorContains(t, err, "metrics page")
}

func TestScrapeFailures(t *testing.T) {
	for _, tt := range []struct {
		name, raw string
		want      string
	}{
		{"no such page", "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "engine e0: GET /metrics answered 404 Not Found"},
		{"cut off", "HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nvllm:kv_cache_usage_perc 0.", "unexpected EOF"},
		{"not a metrics page", ok("vllm:kv_cache_usage_perc x\n"), "engine e0: metrics page"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, tg := listen(t, once(tt.raw))
			_, err := Scrape(t.Context(), c, tg)
			require.ErrorContains(t, err, tt.want)
		})
	}
}

func FuzzMetrics(f *testing.F) {
	page, err := os.ReadFile("testdata/metrics-dp2.txt")
	require.NoError(f, err)
	f.Add(page)
	f.Add([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} NaN\n"))
	f.Add([]byte("vllm:cache_config_info{num_gpu_blocks=\"9223372036854775807\",block_size=\"9223372036854775807\"," +
		"engine=\"9223372036854775807\"} 1\n"))
	f.Add([]byte("sglang:token_usage 1e400\nprocess_start_time_seconds -1 5"))
	for _, name := range []string{"vllm-0.32.0-gemma4.txt", "made-vllm-0.33-dcp4-dp2.txt"} {
		page, err := os.ReadFile("testdata/" + name)
		require.NoError(f, err)
		f.Add(page)
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		s, err := MetricNames{}.Parse(page)
		if err != nil {
			return
		}
		for _, of := range []struct {
			values map[string]float64
			most   float64
		}{
			{s.kvUsage, mostShare},
			{s.running, MostRequests},
			{s.waiting, MostRequests},
			{s.kvHeld, mostShare},
			{s.generated, mostCounted},
			{s.preempted, mostCounted},
			{s.wantedTokens, mostCounted},
			{s.pulledTokens, mostCounted},
			{s.expired, mostCounted},
			{s.stepWaits, math.Inf(1)}, // of several workers
			{s.steps, math.Inf(1)},
			{map[string]float64{"": s.StartTime}, latestStart},
			{map[string]float64{"": float64(s.FirstRank)}, math.MaxInt32},
		} {
			for e, v := range of.values {
				if !(v >= 0 && v <= of.most) {
					t.Fatalf("%q: engine %q has %v for a value, and %v is the most", page, e, v, of.most)
				}
			}
		}
		for rank, m := range s.memory {
			if c, b := m.Capacity.Tokens, m.Block.Tokens; c < 0 || c > MostKVTokens || b < 0 || b > mostBlock {
				t.Fatalf("%q: rank %q has memory for %d tokens in blocks of %d", page, rank, c, b)
			}
		}
		again, err := MetricNames{}.Parse(bytes.ReplaceAll(page, []byte("\n"), []byte("\n# c\n")))
		if err != nil || len(again.kvUsage) != len(s.kvUsage) {
			t.Fatalf("%q: comments change what is read: %v", page, err)
		}
	})
}

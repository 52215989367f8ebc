package engine

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest/observer"
)

func TestAPageThatCannotBeRight(t *testing.T) {
	for page, says := range map[string]string{
		`vllm:kv_cache_usage_perc{engine="0"} +Inf`:                                "vllm:kv_cache_usage_perc says +Inf",
		`vllm:kv_cache_usage_perc{engine="0"} 144115188075855`:                     "vllm:kv_cache_usage_perc says 1.44115188075855e+14",
		`sglang:token_usage -0.5`:                                                  "sglang:token_usage says -0.5",
		`vllm:num_requests_running{engine="0"} -1`:                                 "vllm:num_requests_running says -1",
		`vllm:num_requests_waiting{engine="0"} 1e300`:                              "vllm:num_requests_waiting says 1e+300",
		`sglang:max_total_num_tokens 9e18`:                                         "sglang:max_total_num_tokens says 9e+18",
		`vllm:generation_tokens_total{engine="0"} 1e17`:                            "vllm:generation_tokens_total says 1e+17",
		`process_start_time_seconds -Inf`:                                          "process_start_time_seconds says -Inf",
		`vllm:cache_config_info{block_size="16",num_gpu_blocks="1e300"} 1`:         `vllm:cache_config_info num_gpu_blocks says "1e300"`,
		`vllm:cache_config_info{block_size="-16",num_gpu_blocks="100"} 1`:          `vllm:cache_config_info block_size says "-16"`,
		`vllm:cache_config_info{block_size="1.5",num_gpu_blocks="100"} 1`:          `vllm:cache_config_info block_size says "1.5"`,
		`vllm:cache_config_info{kv_cache_size_tokens="-7"} 1`:                      `vllm:cache_config_info kv_cache_size_tokens says "-7"`,
		`vllm:cache_config_info{effective_attention_block_size="1e300"} 1`:         `vllm:cache_config_info effective_attention_block_size says "1e300"`,
		`vllm:cache_config_info{block_size="99999",num_gpu_blocks="9999999999"} 1`: "num_gpu_blocks 9999999999 of block_size 99999",
		`vllm:num_requests_running{engine="9223372036854775807"} 1`:                "the label engine says 1 different numbers up to 9223372036854775807",
		manyEngines(MostRanks + 1):                                                 "the label engine says 4097 different numbers",
	} {
		_, err := MetricNames{}.Parse([]byte(page + "\n"))
		require.ErrorAs(t, err, new(*PageError), says)
		require.ErrorContains(t, err, "the engine's page cannot be right: ")
		require.ErrorContains(t, err, says)
	}
	for _, page := range []string{
		"vllm:kv_cache_usage_perc 1", "vllm:kv_cache_usage_perc NaN", "vllm:num_requests_running 0", "other -5", manyEngines(MostRanks),
		`vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1`,
	} {
		_, err := MetricNames{}.Parse([]byte(page + "\n"))
		require.NoError(t, err, page)
	}
}

func manyEngines(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "vllm:num_requests_running{engine=\"%d\"} 1\n", i)
	}
	return b.String()
}

// A context that cannot be right is not known, and the models are served all the same.
func TestAContextThatCannotBeRight(t *testing.T) {
	for says, most := range map[string]int{"4096": 4096, "-1": 0, "1e30": 0, "2.5": 0, "null": 0, "333333333333333333": 0} {
		models, err := parseModels([]byte(`{"data":[{"id":"m","max_model_len":` + says + `},{"id":"l","max_model_len":7}]}`))
		require.Equal(t, []Model{{ID: "m", MaxModelLen: most}, {ID: "l", MaxModelLen: 7}}, models)
		if most == 0 && says != "null" {
			require.ErrorContains(t, err, fmt.Sprintf("the engine's page cannot be right: max_model_len says %q", says))
		} else {
			require.NoError(t, err)
		}
	}
}

// Names of models become labels of metrics, and are shown in logs and terminals.
func TestNamesThatCannotBeShownAreNotTaken(t *testing.T) {
	for name, quoted := range map[string]string{
		`\u001b[2Jm`: `"\x1b[2Jm"`, `m\n`: `"m\n"`, "m\xff": `"m\ufffd"`, `m\u202e`: `"m\u202e"`,
		strings.Repeat("m", 513): `"` + strings.Repeat("m", 40) + `..."`,
	} {
		models, err := parseModels([]byte(`{"data":[{"id":"` + name + `"},{"id":"l","parent":"` + name + `"},{"id":"m"}]}`))
		require.Equal(t, []Model{{ID: "m"}}, models, quoted)
		require.EqualError(t, err, "the engine's page cannot be right: the name of a model that is left out says "+quoted)
		require.ErrorAs(t, err, new(*PageError))
	}
	require.Equal(t, "0.31.0", parseVersion([]byte(`{"version":"0.31.0"}`)))
	require.Empty(t, parseVersion([]byte(`{"version":"0.31.0\u001b[2J"}`)))

	list := `{"data":[` + strings.Repeat(`{"id":"m"},`, mostModels) + `{"id":"m"}]}`
	_, err := parseModels([]byte(list))
	require.ErrorIs(t, err, ErrTooLarge)
}

// The engine keeps what was known of it, and one line tells of the page, however often it is read.
func TestAPageThatCannotBeRightIsToldOfOnce(t *testing.T) {
	f := newFake()
	watched(t, f, func(t *testing.T, m *Monitor, logs *observer.ObservedLogs, _ *prometheus.Registry) {
		told := func() int { return logs.FilterMessageSnippet("an engine's page is not believed").Len() }
		known := m.Status("p0").Memories
		for _, odd := range []struct{ path, page string }{
			{"/metrics", "vllm:num_requests_running{engine=\"0\"} +Inf\n" + metricsPage(200)},
			{"/v1/models", `{"data":[{"id":"m","max_model_len":-7}]}`},
		} {
			before, right := told(), f.answers[odd.path]
			f.set(odd.path, ok(odd.page))
			time.Sleep(time.Minute)
			require.Equal(t, before+1, told(), odd.path)
			require.True(t, m.Status("p0").Up)
			require.Equal(t, known, m.Status("p0").Memories)
			f.set(odd.path, right)
			time.Sleep(time.Minute)
			require.Equal(t, before+1, told(), odd.path)
		}
	})
}

package survey

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/engine"
)

// vllmPage is a page of a decode engine of vLLM with two ranks after so many seconds. The lines of
// these names of the first rank are replaced.
func vllmPage(at int, instead map[string]string) string {
	lines := map[string]string{
		"vllm:num_requests_running":              `{engine="0",model_name="m"} 4`,
		"vllm:kv_cache_usage_perc":               `{engine="0"} 0.5`,
		"vllm:cache_config_info":                 `{engine="0",num_gpu_blocks="1000",block_size="16"} 1`,
		"vllm:generation_tokens_total":           fmt.Sprintf(`{engine="0"} %d`, 80*at),
		"vllm:prompt_tokens_total":               fmt.Sprintf(`{engine="0"} %d`, 800*at),
		"vllm:inter_token_latency_seconds_sum":   fmt.Sprintf(`{engine="0"} %d`, 4*at),
		"vllm:inter_token_latency_seconds_count": fmt.Sprintf(`{engine="0"} %d`, 76*at),
		"vllm:request_prompt_tokens_bucket":      fmt.Sprintf("{engine=\"0\",le=\"500\"} %d\nvllm:request_prompt_tokens_bucket{engine=\"0\",le=\"+Inf\"} %d", at, 2*at),
		"vllm:request_prompt_tokens_sum":         fmt.Sprintf(`{engine="0"} %d`, 800*at),
		"vllm:request_generation_tokens_bucket":  fmt.Sprintf("{engine=\"0\",le=\"50\"} %d\nvllm:request_generation_tokens_bucket{engine=\"0\",le=\"+Inf\"} %d", at, 2*at),
		"vllm:request_generation_tokens_sum":     fmt.Sprintf(`{engine="0"} %d`, 80*at),
		"process_start_time_seconds":             ` 1`,
	}
	var b strings.Builder
	for name, line := range lines {
		if name != "process_start_time_seconds" {
			b.WriteString(strings.ReplaceAll(name+line, `"0"`, `"1"`) + "\n")
		}
		if other, is := instead[name]; is {
			line = other
		}
		b.WriteString(name + line + "\n")
	}
	return b.String()
}

func TestAPageThatCannotBeRightIsNotBelieved(t *testing.T) {
	rank := `{engine="0"} `
	for name, c := range map[string]struct{ value, says string }{
		"vllm:num_requests_running":            {rank + "+Inf", "vllm:num_requests_running says +Inf"},
		"vllm:kv_cache_usage_perc":             {rank + "144115188075855872", "vllm:kv_cache_usage_perc says 1.4411518807585587e+17"},
		"vllm:cache_config_info":               {`{engine="0",num_gpu_blocks="1e300",block_size="16"} 1`, "num_gpu_blocks says \"1e300\""},
		"vllm:generation_tokens_total":         {rank + "-7", "vllm:generation_tokens_total says -7"},
		"vllm:inter_token_latency_seconds_sum": {rank + "1e300", "says 1e+300"},
		"vllm:request_prompt_tokens_bucket":    {`{engine="0",le="500"} 9` + "\nvllm:request_prompt_tokens_bucket" + `{engine="0",le="+Inf"} 5`, "vllm:request_prompt_tokens_bucket says 5 up to +Inf"},
		"vllm:request_prompt_tokens_sum":       {rank + "9e15", "vllm:request_prompt_tokens_sum says 9000000000000000 more tokens for 2 more requests"},
		"vllm:request_generation_tokens_bucket": {`{engine="0",le="1e12"} 2` + "\nvllm:request_generation_tokens_bucket" + `{engine="0",le="+Inf"} 2`,
			"that requests are counted up to 1e+12 tokens"},
	} {
		_, err := Read([]byte(vllmPage(1, map[string]string{name: c.value})))
		require.ErrorAs(t, err, new(*engine.PageError), name)
		require.ErrorContains(t, err, "the engine's page cannot be right: ")
		require.ErrorContains(t, err, c.says)
	}
	_, err := Read([]byte("sglang:num_running_reqs 1\nsglang:num_used_tokens 5000\nsglang:max_total_num_tokens 100\n"))
	require.ErrorContains(t, err, "sglang:num_used_tokens says 5000, which is more than the 100 of sglang:max_total_num_tokens")
}

// Two pages can each be right, and not both of one engine.
func TestPagesThatCannotFollowEachOther(t *testing.T) {
	rank := `{engine="0"} `
	for name, c := range map[string]struct{ value, says string }{
		"vllm:generation_tokens_total":           {rank + "3", "vllm:generation_tokens_total says 3, although it said 800 before"},
		"vllm:prompt_tokens_total":               {rank + "9e15", "vllm:prompt_tokens_total says 8999999999992000 more within 1s"},
		"vllm:inter_token_latency_seconds_sum":   {rank + "40.0000000001", "vllm:inter_token_latency_seconds_sum says that a token came every"},
		"vllm:inter_token_latency_seconds_count": {rank + "759", "says 759, although"},
		"vllm:request_prompt_tokens_sum":         {rank + "2e9", "vllm:request_prompt_tokens_sum says 1999992000 more tokens for 2 more requests"},
	} {
		s := &Series{Address: "a"}
		add := func(i int, instead map[string]string) error {
			p, err := Read([]byte(vllmPage(i, instead)))
			require.NoError(t, err, name)
			return s.Add(i, began.Add(time.Duration(i)*time.Second), p)
		}
		for i := range 11 {
			require.NoError(t, add(i, nil))
		}
		had := s.output
		err := add(11, map[string]string{name: c.value})
		require.ErrorAs(t, err, new(*engine.PageError), name)
		require.ErrorContains(t, err, c.says)
		require.NoError(t, add(12, nil)) // of which nobody knows what came since
		require.NoError(t, add(13, nil))
		require.InDelta(t, had+2*80, s.output, 1e-9, name)
		g := groups([]*Series{s})[0]
		require.Positive(t, g.Lost, name)
	}
}

// How long a step takes is said by the ranks that tell both the sum of the gaps between tokens and
// their count, and by no page that was not compared with the one before it.
func TestASumOfGapsSaysNothingWithoutItsCount(t *testing.T) {
	sum, count := "vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count"
	untold, much := `{engine="0"} NaN`, `{engine="0"} 9007199254740992`
	for name, pages := range map[string][]map[string]string{
		"the count is not told":              {{sum: much, count: untold}, {sum: `{engine="0"} 5`, count: untold}, {sum: much, count: untold}},
		"the count is the same":              {nil, {sum: much, count: `{engine="0"} 0`}},
		"the sum was not told in between":    {nil, {sum: untold}, {sum: much}},
		"the count was not told in between":  {nil, {count: untold}, {sum: much}},
		"the sum is told only by other ones": {{sum: untold}, {sum: untold}, {sum: untold}},
	} {
		s := &Series{Address: "a"}
		for i := range 20 {
			instead := map[string]string{}
			if i < len(pages) {
				instead = pages[i]
			}
			p, err := Read([]byte(vllmPage(i, instead)))
			require.NoError(t, err, name)
			_ = s.Add(i, began.Add(time.Duration(i)*time.Second), p)
		}
		g := groups([]*Series{s})[0]
		require.NotEmpty(t, g.windows, name)
		for _, w := range g.windows {
			require.InEpsilon(t, 1000*4./76, w.stepMs, 1e-9, name)
		}
	}
}

// The report of a survey says why a page was not believed, and at the beginning the survey ends
// with it.
func TestASurveySaysThatAPageCannotBeRight(t *testing.T) {
	var asked atomic.Int64
	var odd atomic.Int64 // from this page on
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := asked.Add(1)
		instead := map[string]string{}
		if n >= odd.Load() {
			instead["vllm:num_requests_running"] = `{engine="0",model_name="m"} +Inf`
		}
		_, _ = w.Write([]byte(vllmPage(int(n), instead)))
	}))
	defer server.Close()
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	watch := func() ([]*Series, error) {
		return Watch(t.Context(), client, []*engine.Target{target(t, server.URL)}, 5*time.Millisecond, 100*time.Millisecond,
			func(time.Duration) {})
	}
	_, err := watch()
	require.ErrorContains(t, err, "the engine's page cannot be right: vllm:num_requests_running says +Inf")
	odd.Store(asked.Load() + 4)
	all, err := watch()
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, NewReport("", time.Second, all, Judge(t.Context(), all, Given{}, func(int, int) {})).Text(&text))
	require.Contains(t, text.String(), "the engine's page cannot be right: vllm:num_requests_running says +Inf")
	before, _, said := strings.Cut(text.String(), "pages that did not come")
	require.True(t, said)
	require.NotRegexp(t, nonsense, before)
}

// nonsense is what no report may have.
var nonsense = regexp.MustCompile(`Inf|NaN|[0-9]{14}|-[0-9]+ %`)

// Whatever pages say, a report has figures that can be right.
func TestNoReportHasNonsense(t *testing.T) {
	values := []string{"0", "1", "NaN", "+Inf", "-Inf", "-1", "1e300", "5e-324", "1e15", "9007199254740992", "18446744073709551616", "0.5",
		"1.005", "1e11", "1e-9", "1e6"}
	rapid.Check(t, func(t *rapid.T) {
		drawn := func() string {
			return rapid.OneOf(rapid.SampledFrom(values), rapid.Map(rapid.Float64(), func(v float64) string { return fmt.Sprint(v) })).Draw(t,
				"value")
		}
		s := &Series{Address: "a"}
		for i := range rapid.IntRange(2, 40).Draw(t, "pages") {
			instead := map[string]string{}
			for _, name := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{
				"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info", "vllm:generation_tokens_total",
				"vllm:prompt_tokens_total",
				"vllm:inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_count", "vllm:request_prompt_tokens_sum",
				"vllm:request_prompt_tokens_bucket",
				"vllm:prompt_tokens_by_source_total",
			}), 0, rapid.SampledFrom([]int{0, 0, 0, 1, 3}).Draw(t, "how many"), rapid.ID).Draw(t, "odd") {
				instead[name] = `{engine="0"} ` + drawn()
				switch name {
				case "vllm:cache_config_info":
					instead[name] = fmt.Sprintf(`{engine="0",num_gpu_blocks=%q,block_size=%q} 1`, drawn(), drawn())
				case "vllm:prompt_tokens_by_source_total":
					instead[name] = `{engine="0",source="local_compute"} ` + drawn()
				case "vllm:request_prompt_tokens_bucket":
					instead[name] = fmt.Sprintf("{engine=\"0\",le=%q} %s\n%s{engine=\"0\",le=\"+Inf\"} %s", drawn(), drawn(), name, drawn())
				}
			}
			p, err := Read([]byte(vllmPage(100*i, instead)))
			if err != nil {
				require.ErrorAs(t, err, new(*engine.PageError))
				continue
			}
			_ = s.Add(i, began.Add(time.Duration(i)*time.Second), p)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // nothing is simulated
		found := Judge(ctx, []*Series{s}, Given{}, func(int, int) {})
		var text, page bytes.Buffer
		r := NewReport("", time.Second, nil, found)
		require.NoError(t, r.Text(&text))
		require.NoError(t, r.HTML(&page))
		require.NotRegexp(t, nonsense, text.String())
	})
}

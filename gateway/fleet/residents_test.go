package fleet

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/geo"
	"evenkeel/mooncake"
)

// Whoever looks after claims asks engines what runs on them. One that hangs must
// not keep it from that.
func TestAnEngineThatHangsHoldsNobodyUp(t *testing.T) {
	hangs := make(chan struct{})
	page := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hangs }))
	defer page.Close()
	defer close(hangs)
	f := empty(t, nil)
	var all []*roster.Engine
	for range 8 {
		profile := &mooncake.Profile{}
		target, err := config.Target(config.Engine{URL: page.URL}, profile)
		require.NoError(t, err)
		all = append(all, &roster.Engine{ID: target.ID, Role: roster.Decode, Target: target, Profile: profile})
	}
	done := make(chan int)
	go func() {
		_, silent := f.deps.residentsOn(t.Context(), all)
		done <- len(silent)
	}()
	select {
	case n := <-done:
		require.Equal(t, 8, n)
	case <-time.After(time.Minute):
		require.Fail(t, "it waits for ever")
	}
}

// Some engines do not report how many KV tokens a rank can hold, so that only the config has the
// number. The KV of other proxies' requests counts there, too.
func TestTheKVOfOthersCountsWhereOnlyTheConfigHasTheCapacity(t *testing.T) {
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:num_requests_running{engine=\"0\"} 3\n"))
	}))
	defer page.Close()
	f, conf, profile := empty(t, nil), config.Engine{URL: page.URL, KV: 1000}, &mooncake.Profile{}
	target, err := config.Target(conf, profile)
	require.NoError(t, err)
	in := &roster.Engine{ID: target.ID, Role: roster.Decode, Target: target, Profile: profile, Conf: conf}
	found, silent := f.deps.residentsOn(t.Context(), []*roster.Engine{in})
	require.Empty(t, silent)
	require.Equal(t, []geo.Resident{{ID: target.ID, Requests: 3, KVTokens: 250}}, found)
	in.Status.Memories = engine.Memories{"0": {Capacity: engine.Reading{Tokens: 2000}}}
	found, _ = f.deps.residentsOn(t.Context(), []*roster.Engine{in})
	require.EqualValues(t, 500, found[0].KVTokens, "the engine knows its own capacity best")
}

// The boards get the gauges of each decode engine. A rank says for how long it keeps the KV of
// answers.
func TestTheBoardsGetTheGaugesOfDecodeEngines(t *testing.T) {
	for name, row := range map[string]struct {
		profile mooncake.Profile
		keeps   time.Duration
	}{
		"it keeps nothing":        {mooncake.Profile{Connector: mooncake.NIXLPull}, 0},
		"its answers are counted": {mooncake.Profile{Connector: mooncake.NIXLPull, HandBack: mooncake.HandBackCounted, DecoderTTL: time.Minute}, time.Minute},
		"it is bound at arrival":  {mooncake.Profile{Connector: mooncake.SGLang}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			cfg.Profiles = map[string]mooncake.Profile{"p": row.profile}
			cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "p", KV: 1000}}
			f := of(t, cfg)
			enter, err := f.Load()
			require.NoError(t, err)
			enter()
			f.up("decode 127.0.0.1:3", "m")
			var heard []int64
			f.deps.Gauged = func(_ int32, kvTokens int64, _ time.Time) { heard = append(heard, kvTokens) }
			page, err := engine.MetricNames{}.Parse([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n"))
			require.NoError(t, err)
			f.OnSample("decode 127.0.0.1:3", page, time.Now())
			f.OnStatus("decode 127.0.0.1:3", engine.Status{
				Up: true, Models: []engine.Model{{ID: "m"}}, Memories: engine.Memories{"0": {Capacity: engine.Reading{Tokens: 2000}}},
			})
			f.OnSample("decode 127.0.0.1:3", page, time.Now())
			require.Equal(t, []int64{250, 500}, heard, "the usage is a share of the engine's own capacity, if it reports that")
			require.Equal(t, row.keeps, f.Now().Workers[0].KeepsKVFor)
		})
	}
}

// A capacity that cannot be one bounds nothing: neither the board nor the prefill tier.
func TestAMisreadCapacityIsUnknownEverywhere(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"p": {Connector: mooncake.NIXLPull}}
	cfg.Engines.Prefill = []config.Engine{{URL: "http://127.0.0.1:2", Profile: "p"}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "p", Slots: 4}}
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	f.deps.Gauged = func(int32, int64, time.Time) {
		require.Fail(t, "no share of an unknown capacity is a number of tokens")
	}
	models := []engine.Model{{ID: "m", MaxModelLen: 163_840}}
	for labels, want := range map[string]struct{ capacity, block int64 }{
		`block_size="4",num_gpu_blocks="20377"`: {0, 4},
		`block_size="4",effective_attention_block_size="256",kv_cache_size_tokens="1179770",num_gpu_blocks="20377"`: {1_179_770, 256},
	} {
		page, err := engine.MetricNames{}.Parse([]byte("vllm:cache_config_info{engine=\"0\"," + labels + "} 1\n" +
			"vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n"))
		require.NoError(t, err)
		for _, key := range []string{"prefill 127.0.0.1:2", "decode 127.0.0.1:3"} {
			f.OnStatus(key, engine.Status{Up: true, Models: models, Memories: page.Memories(models)})
		}
		if want.capacity == 0 {
			f.OnSample("decode 127.0.0.1:3", page, time.Now())
		}
		require.Equal(t, want.capacity, f.Now().Workers[0].Capacity)
		require.Equal(t, want.capacity, f.Now().Candidates[0].CapacityTokens)
		require.EqualValues(t, want.block, f.Now().Candidates[0].BlockTokens)
		require.Equal(t, page.Memories(models), f.Now().Statuses()[1].Memory)
	}
}

// The gauges of a core that stands still are those of its last step: they say nothing of what came
// after it.
func TestGaugesTellOfTheTimeUpToTheLastSignOfLife(t *testing.T) {
	cfg := config.Default()
	cfg.Profiles = map[string]mooncake.Profile{"push": {Connector: mooncake.NIXLPush}}
	cfg.Engines.Decode = []config.Engine{{URL: "http://127.0.0.1:3", Profile: "push", KV: 1000}}
	f := of(t, cfg)
	enter, err := f.Load()
	require.NoError(t, err)
	enter()
	f.up("decode 127.0.0.1:3", "m")
	var told []time.Time
	f.deps.Gauged = func(_ int32, kvTokens int64, at time.Time) {
		require.EqualValues(t, 250, kvTokens)
		told = append(told, at)
	}
	page, err := engine.MetricNames{}.Parse([]byte("vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n"))
	require.NoError(t, err)
	asked := time.Now()
	f.OnSample("decode 127.0.0.1:3", page, asked)
	f.OnSample("decode 127.0.0.1:3", page, asked.Add(time.Second))
	require.Equal(t, told[0], told[1], "nothing has shown since that the core goes on")
	seen := asked.Add(time.Minute)
	f.deps.Monitor.Traffic("decode 127.0.0.1:3").Liveness(-1).RecordSign(seen)
	f.OnSample("decode 127.0.0.1:3", page, seen.Add(time.Second))
	require.WithinDuration(t, seen, told[2], time.Millisecond)
	f.OnSample("decode 127.0.0.1:3", page, seen.Add(-time.Second))
	require.WithinDuration(t, seen.Add(-time.Second), told[3], time.Millisecond, "the sign came while the page was on its way")
}

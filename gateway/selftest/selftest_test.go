package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner/ownertest"
	"evenkeel/mooncake"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs an engine that answers as fast as it can.
func start(t *testing.T, c refengine.Config) *refengine.Engine {
	t.Helper()
	c.Steps.C0, c.Prompts.Base, c.Answers.PromptTokensDetails = time.Millisecond, time.Millisecond, true
	e, err := refengine.Start(c)
	require.NoError(t, err)
	t.Cleanup(e.Close)
	return e
}

// cluster is a config of engines by URL, all of one profile.
func cluster(t *testing.T, p mooncake.Profile, prefills, decodes []string) *config.Config {
	t.Helper()
	c := config.Default()
	c.Profiles = map[string]mooncake.Profile{config.DefaultProfile: p}
	for _, u := range prefills {
		c.Engines.Prefill = append(c.Engines.Prefill, config.Engine{URL: u})
	}
	for _, u := range decodes {
		c.Engines.Decode = append(c.Engines.Decode, config.Engine{URL: u})
	}
	require.NoError(t, c.Validate())
	return c
}

func pick(all []Finding, l Level) (msgs []string) {
	for _, f := range all {
		if f.Level == l {
			role, _, _ := strings.Cut(f.Engine, " ")
			msgs = append(msgs, role+": "+f.Msg)
		}
	}
	return msgs
}

func TestAGoodPairIsOK(t *testing.T) {
	for _, tc := range []struct {
		name      string
		connector refengine.Connector
	}{
		{"ascend-mooncake-v1", refengine.AscendMooncake},
		{"nixl-pull", refengine.NIXLPull},
		{"nixl-push", refengine.NIXLPush},
		{"vllm-mooncake, with what its bootstrap server says", refengine.VLLMMooncake},
		{"opaque", refengine.Opaque},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := start(t, refengine.Config{Role: refengine.Prefill, Connector: tc.connector})
			d := start(t, refengine.Config{Role: refengine.Decode, Connector: tc.connector})
			profile := mooncake.Profile{Connector: string(tc.connector), BootstrapPort: port(t, p.URLs()[0])}
			found := Run(t.Context(), cluster(t, profile, p.URLs(), d.URLs()), Options{})
			require.Empty(t, pick(found, Bad))
			require.Empty(t, pick(found, Warn))
			require.Len(t, pick(found, OK), 4)
			require.Equal(t, "decode: holds 524288 KV tokens per rank (vllm:cache_config_info num_gpu_blocks × block_size), in blocks of 128 "+
				"(vllm:cache_config_info block_size)", pick(found, OK)[1])
			require.Contains(t, pick(found, OK)[3], "decode: decoded 4 tokens of a hand-off")
			requireClean(t, p, d)
		})
	}
}

// requireClean: the test leaves nothing behind in the engines.
func requireClean(t *testing.T, p, d *refengine.Engine) {
	t.Helper()
	require.Eventually(t, func() bool {
		return p.Stats().Pins == 0
	}, 5*time.Second, 5*time.Millisecond)
	ps, ds := p.Stats(), d.Stats()
	require.EqualValues(t, 1, ps.Pulls)
	require.Zero(t, ps.Leaks+ps.Replays+ps.ExpiredPulls+ps.WrongBlocks+ps.DuplicateIDs)
	require.Zero(t, ds.Unknown+ds.KeyMismatches+ds.LocalPrefills+ds.DuplicateIDs+ds.Aborted)
}

func port(t *testing.T, raw string) int {
	t.Helper()
	u, err := url.Parse(raw)
	require.NoError(t, err)
	n, err := strconv.Atoi(u.Port())
	require.NoError(t, err)
	return n
}

func TestRanksBehindOneAddress(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	d := start(t, refengine.Config{Role: refengine.Decode, DPSize: 4, DPMode: "internal"})
	c := cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()[:1])
	c.Engines.Decode[0].Ranks = 4
	found := Run(t.Context(), c, Options{})
	require.Empty(t, pick(found, Bad))
	require.Empty(t, pick(found, Warn))
	for rank := range 4 {
		require.EqualValues(t, 1, d.Stats().Ranks[rank].Concurrent, "rank %d was tried", rank)
	}

	two := 2
	require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.Internal, Rank: &two}))
	found = Run(t.Context(), c, Options{})
	require.Len(t, pick(found, Bad), 1, "one rank that fails is found")
	for _, f := range found {
		if f.Level == Bad {
			require.True(t, strings.HasSuffix(f.Engine, "/2"), f.Engine)
		}
	}
}

// The front end of a hybrid deployment's node decides whether ranks are counted in the node or in
// the deployment.
func TestHowANodeCountsItsRanks(t *testing.T) {
	for _, tc := range []struct {
		name  string
		shape refengine.ErrorShape
		first int
		want  []string
	}{
		{"in the node", refengine.ShapeNew, 0, nil},
		{"in the node, and the config says otherwise", refengine.ShapeNew, 4, []string{"decode: it refuses the ranks that evenkeel names: its ranks begin at 0 in the header X-data-parallel-rank, and not at 4; set first_rank: 0 of this engine"}},
		{"in the deployment", refengine.ShapeRust, 4, nil},
		{"in the deployment, and the config says otherwise", refengine.ShapeRust, 0, []string{"decode: it refuses the ranks that evenkeel names: its ranks begin at 4 in the header X-data-parallel-rank, and not at 0; set first_rank: 4 of this engine"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := start(t, refengine.Config{Role: refengine.Prefill})
			d := start(t, refengine.Config{Role: refengine.Decode, DPSize: 2, DPMode: "internal", DPFirst: 4,
				Answers: refengine.Answers{ErrorShape: tc.shape}})
			c := cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()[:1])
			node := c.Profiles[config.DefaultProfile]
			node.DPMode = mooncake.DPHybrid
			c.Profiles["node"] = node
			c.Engines.Decode[0].Profile, c.Engines.Decode[0].Ranks, c.Engines.Decode[0].First = "node", 2, tc.first
			require.NoError(t, c.Validate())
			found := Run(t.Context(), c, Options{})
			require.Equal(t, tc.want, pick(found, Bad), "%v", found)
			require.Empty(t, pick(found, Warn), "its gauges are known by the number of each rank")
			require.Contains(t, strings.Join(pick(found, OK), "\n"), "decode: decoded 4 tokens")
			for rank := range 2 {
				require.EqualValues(t, 1, d.Stats().Ranks[rank].Concurrent, "rank %d was tried", rank)
			}
			before := d.Stats().Requests
			Run(t.Context(), c, Options{TakeSlot: func(context.Context, string, int) (Slot, error) { return Slot{}, ErrNotOwned }})
			require.Equal(t, before, d.Stats().Requests, "another proxy's node is asked nothing")
		})
	}
}

func TestEveryEngineGetsAPartner(t *testing.T) {
	var prefills, decodes []string
	for range 2 {
		prefills = append(prefills, start(t, refengine.Config{Role: refengine.Prefill}).URLs()...)
	}
	decodes = start(t, refengine.Config{Role: refengine.Decode, DPSize: 5}).URLs()
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, prefills, decodes), Options{})
	seen := map[string]int{}
	for _, f := range found {
		require.Equal(t, OK, f.Level, f)
		seen[f.Engine]++
	}
	require.Len(t, seen, 7)
}

func TestTwoModelsAreTestedApart(t *testing.T) {
	pa := start(t, refengine.Config{Role: refengine.Prefill, Model: refengine.Model{Name: "a"}})
	pb := start(t, refengine.Config{Role: refengine.Prefill, Model: refengine.Model{Name: "b"}})
	da := start(t, refengine.Config{Role: refengine.Decode, Model: refengine.Model{Name: "a"}})
	db := start(t, refengine.Config{Role: refengine.Decode, Model: refengine.Model{Name: "b"}})
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, []string{pa.URLs()[0], pb.URLs()[0]}, []string{db.URLs()[0], da.URLs()[0]}),
		Options{})
	require.Empty(t, pick(found, Bad))
	require.Empty(t, pick(found, Warn))
	require.Len(t, pick(found, OK), 8)
}

func TestWhatIsWrongIsTold(t *testing.T) {
	for _, tc := range []struct {
		name            string
		prefill, decode refengine.Config
		profile         mooncake.Profile
		level           Level
		want            []string
	}{
		{
			name: "models differ", prefill: refengine.Config{Model: refengine.Model{Name: "a"}},
			decode: refengine.Config{Model: refengine.Model{Name: "b"}},
			level:  Bad, want: []string{"prefill: serves a, and no engine of the other side does",
				"decode: serves b, and no engine of the other side does"},
		},
		{
			name: "no continuous usage", decode: refengine.Config{Answers: refengine.Answers{NoContinuousUsage: true}},
			level: Warn, want: []string{"events carry usage; set continuous_usage: false in its profile"},
		},
		{
			name: "no token ids", decode: refengine.Config{Answers: refengine.Answers{NoTokenIDs: true}},
			level: Warn, want: []string{"decode: no token_ids though asked for; set return_token_ids: false"},
		},
		{
			name: "a prefill engine that hands nothing off", prefill: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.NullHandoff}}},
			level: Bad, want: []string{"kv_transfer_params",
				"or is ascend-mooncake-v1 the wrong connector? Engines of vllm-mooncake and ascend-layerwise hand nothing off"},
		},
		{
			name: "a hand-off that points elsewhere", prefill: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.WrongHost}}},
			level: Bad, want: []string{"203.0.113.7", "add it to the profile's kv_hosts"},
		},
		{
			name: "a hand-off of another connector", prefill: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.StringBlocks}}},
			level: Bad, want: []string{"remote_block_ids"},
		},
		{
			name:    "a probe that is refused",
			prefill: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.Internal, Leg: refengine.LegProbe}}},
			level:   Bad, want: []string{"prefill: a probe was answered with 500"},
		},
		{
			name:   "a decode engine that refuses",
			decode: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.Reject, Leg: refengine.LegDecode, Cleanup: true}}},
			level:  Bad, want: []string{"decode: with the hand-off of prefill ", "the decode request was answered with 400"},
		},
		{
			name: "an error inside the stream", decode: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.ErrorEvent, AfterTokens: 1}}},
			level: Bad, want: []string{"the stream failed: \""},
		},
		{
			name: "a stream that just ends", decode: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.SilentEnd, AfterTokens: 1}}},
			level: Bad, want: []string{"the stream ended without"},
		},
		{
			name: "a stream without a finish reason", decode: refengine.Config{Faults: []refengine.Rule{{Fault: refengine.MissingFinish}}},
			level: Bad, want: []string{"the stream ended without"},
		},
		{
			name: "an engine that wants a key", decode: refengine.Config{Server: refengine.Server{APIKey: "secret"}},
			level: Bad, want: []string{"decode: ", "401"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.prefill.Role, tc.decode.Role = refengine.Prefill, refengine.Decode
			p, d := start(t, tc.prefill), start(t, tc.decode)
			found := Run(t.Context(), cluster(t, tc.profile, p.URLs(), d.URLs()), Options{})
			text := strings.Join(pick(found, tc.level), "\n")
			for _, want := range tc.want {
				require.Contains(t, text, want, "%v", found)
			}
		})
	}
}

func TestCachedTokensThatAreNotReported(t *testing.T) {
	p, err := refengine.Start(refengine.Config{Role: refengine.Prefill, Prompts: refengine.Prompts{Base: time.Millisecond}})
	require.NoError(t, err)
	t.Cleanup(p.Close)
	d := start(t, refengine.Config{Role: refengine.Decode})
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()), Options{})
	require.Equal(t, []string{"prefill: cached_tokens are not reported; start it with --enable-prompt-tokens-details"}, pick(found, Warn))
}

// between answers as the engine behind it, but for what change makes of a
// path's body; nil is a 404.
func between(t *testing.T, e *refengine.Engine, path string, change func(body []byte) []byte) string {
	t.Helper()
	u, err := url.Parse(e.URLs()[0])
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(u)
	proxy.FlushInterval = -1
	transport := &http.Transport{}
	proxy.Transport = transport
	proxy.ModifyResponse = func(r *http.Response) error {
		if r.Request.URL.Path != path {
			return nil
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return err
		}
		if body = change(body); body == nil {
			r.StatusCode = http.StatusNotFound
		}
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		r.Header.Set("Content-Length", strconv.Itoa(len(body)))
		return nil
	}
	s := httptest.NewServer(proxy)
	t.Cleanup(func() { s.Close(); transport.CloseIdleConnections() })
	return s.URL
}

// without drops the lines of a page that name a series.
func without(name string) func([]byte) []byte {
	return func(page []byte) (out []byte) {
		for line := range bytes.Lines(page) {
			if !bytes.Contains(line, []byte(name)) {
				out = append(out, line...)
			}
		}
		return out
	}
}

func TestWhatMetricsLack(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	d := start(t, refengine.Config{Role: refengine.Decode})
	none := func([]byte) []byte { return nil }

	found := Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), []string{between(t, d, "/metrics", without("cache_config_info"))}),
		Options{})
	require.Equal(t,
		[]string{"decode: its KV capacity is not in its metrics; set the profile's kv_tokens_per_rank, or only slots limit what it is given"},
		pick(found, Warn))

	found = Run(t.Context(), cluster(t, mooncake.Profile{KVTokensPerRank: 1000}, p.URLs(),
		[]string{between(t, d, "/metrics", without("cache_config_info"))}), Options{})
	require.Empty(t, pick(found, Warn), "who sets the capacity need not be told")
	require.Contains(t, pick(found, OK), "decode: may hold 1000 KV tokens per rank by the config; its metrics do not say how many fit")

	misread := func([]byte) []byte {
		return []byte("vllm:kv_cache_usage_perc 0\n" +
			"vllm:cache_config_info{block_size=\"4\",effective_attention_block_size=\"256\",num_gpu_blocks=\"1000\"} 1\n")
	}
	found = Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), []string{between(t, d, "/metrics", misread)}), Options{})
	require.Equal(t, []string{"decode: its metrics seem to say that 4000 KV tokens fit " +
		"(vllm:cache_config_info num_gpu_blocks × block_size), " +
		"which is less than one request of its max_model_len 131072; this number means something else, so evenkeel does not use it; set the " +
		"profile's kv_tokens_per_rank to the KV cache size that the engine logs at its start, or only slots limit what it is given"},
		pick(found, Warn))

	found = Run(t.Context(), cluster(t, mooncake.Profile{}, []string{between(t, p, "/metrics", without("cache_usage_perc"))}, d.URLs()),
		Options{})
	require.Equal(t, []string{"prefill: no KV usage under a known metric name; set the profile's metrics.kv_usage"}, pick(found, Warn))

	found = Run(t.Context(), cluster(t, mooncake.Profile{}, []string{between(t, p, "/metrics", none)}, d.URLs()), Options{})
	require.Len(t, pick(found, Warn), 1)
	require.Contains(t, pick(found, Warn)[0], "prefill: no metrics: ")
	require.Empty(t, pick(found, Bad))
}

func TestAnEngineThatLacksOneModelOfItsPartners(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	d := start(t, refengine.Config{Role: refengine.Decode})
	lora := func(body []byte) []byte {
		return bytes.Replace(body, []byte(`"data":[`), []byte(`"data":[{"id":"lora","object":"model","parent":"ref"},`), 1)
	}
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, []string{between(t, p, "/v1/models", lora)}, d.URLs()), Options{})
	require.Len(t, pick(found, Warn), 1)
	require.Contains(t, pick(found, Warn)[0], `decode: does not serve "lora", which prefill `)

	empty := func([]byte) []byte { return []byte(`{"object":"list","data":[]}`) }
	found = Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), []string{between(t, d, "/v1/models", empty)}), Options{})
	require.Len(t, pick(found, Bad), 1)
	require.Contains(t, pick(found, Bad)[0], "serves no model")
}

func TestADeadEngineIsBadAndTheOthersAreTested(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	d := start(t, refengine.Config{Role: refengine.Decode})
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), append(d.URLs(), "http://"+closedAddress(t))), Options{})
	require.Len(t, pick(found, Bad), 1)
	require.Contains(t, pick(found, Bad)[0], "connect")
	require.Len(t, pick(found, OK), 4)
}

func TestAKeyThatIsNotInTheEnvironment(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	found := Run(t.Context(), cluster(t, mooncake.Profile{APIKeyEnv: "EK_SELFTEST_NO_KEY"}, p.URLs(), p.URLs()), Options{})
	require.Len(t, pick(found, Bad), 2)
	require.Contains(t, pick(found, Bad)[0], "EK_SELFTEST_NO_KEY, which is empty; export it")
}

func TestAConfigWithoutEngines(t *testing.T) {
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, nil, nil), Options{})
	require.Equal(t, []string{
		"prefill: the config lists none; until some are added nothing can be served",
		"decode: the config lists none; until some are added nothing can be served",
	}, pick(found, Warn))
}

func TestTheTestEndsWithItsContext(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Faults: []refengine.Rule{{Fault: refengine.Hang, Leg: refengine.LegProbe}}})
	d := start(t, refengine.Config{Role: refengine.Decode})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan []Finding)
	go func() { done <- Run(ctx, cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()), Options{}) }()
	require.Eventually(t, func() bool { return p.Stats().Probes == 1 }, 30*time.Second, time.Millisecond)
	cancel()
	select {
	case found := <-done:
		require.Len(t, pick(found, Bad), 1)
	case <-time.After(10 * time.Second):
		t.Fatal("still waiting for the engine")
	}
}

func TestEveryPairIsTried(t *testing.T) {
	var prefills, decodes []string
	var ps, ds []*refengine.Engine
	for range 3 {
		ps = append(ps, start(t, refengine.Config{Role: refengine.Prefill}))
		prefills = append(prefills, ps[len(ps)-1].URLs()...)
	}
	for range 5 {
		ds = append(ds, start(t, refengine.Config{Role: refengine.Decode, DPSize: 2, DPMode: "internal"}))
		decodes = append(decodes, ds[len(ds)-1].URLs()[0])
	}
	c := cluster(t, mooncake.Profile{}, prefills, decodes)
	for i := range c.Engines.Decode {
		c.Engines.Decode[i].Ranks = 2
	}
	found := Run(t.Context(), c, Options{EveryPair: true})
	require.Empty(t, pick(found, Bad), "%v", found)
	require.Empty(t, pick(found, Warn))
	require.Len(t, pick(found, OK), 8+3+5*2, "what is well is told once for each rank")
	for _, p := range ps {
		require.EqualValues(t, 5, p.Stats().Requests)
	}
	for _, d := range ds {
		require.EqualValues(t, 3, d.Stats().Requests)
		for rank := range 2 {
			require.EqualValues(t, 1, d.Stats().Ranks[rank].Concurrent, "rank %d was tried", rank)
		}
	}
}

func TestTooManyPairsAreNotTried(t *testing.T) {
	ranks := func(role string, n int) (list []testedRank) {
		for i := range n {
			list = append(list, testedRank{name: fmt.Sprint(role, i), target: &engine.Target{Rank: -1},
				profile: &mooncake.Profile{Connector: mooncake.NIXLPull}, models: []string{"m"}})
		}
		return list
	}
	for _, tc := range []struct{ prefills, decodes, rounds, left int }{{1, 1, 1, 0}, {8, 144, 144, 0}, {144, 8, 144, 0}, {65, 64, 65, 64},
		{20, 1000, 1000, 20*1000 - maxPairs}, {0, 3, 3, 0}, {3, 0, 3, 0}} {
		rounds, left := everyPair(ranks("p", tc.prefills), ranks("d", tc.decodes))
		require.Equal(t, tc.left, left)
		met, tried := map[string]bool{}, 0
		for _, round := range rounds {
			now := map[string]bool{}
			for _, p := range round {
				require.False(t, now[p.prefill.name] || now[p.decode.name], "no engine is twice in a round")
				now[p.prefill.name], now[p.decode.name] = true, true
				require.False(t, met[p.prefill.name+p.decode.name], "no pair is tried twice")
				met[p.prefill.name+p.decode.name], met[p.prefill.name], met[p.decode.name] = true, true, true
				tried++
			}
		}
		if tc.prefills > 0 && tc.decodes > 0 {
			require.Len(t, met, tried+tc.prefills+tc.decodes, "every engine has met another one")
			require.GreaterOrEqual(t, tried+left, tc.prefills*tc.decodes)
		}
	}
}

// An engine that fails with its first partners is left alone: each of its failures may take half a
// minute.
func TestAnEngineThatFailsIsLeftAlone(t *testing.T) {
	var prefills []string
	for range 6 {
		prefills = append(prefills, start(t, refengine.Config{Role: refengine.Prefill}).URLs()...)
	}
	good := start(t, refengine.Config{Role: refengine.Decode})
	bad := start(t, refengine.Config{Role: refengine.Decode,
		Faults: []refengine.Rule{{Fault: refengine.Reject, Leg: refengine.LegDecode, Cleanup: true}}})
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, prefills, []string{good.URLs()[0], bad.URLs()[0]}), Options{EveryPair: true})
	require.Len(t, pick(found, Bad), maxFailures, "%v", found)
	require.Equal(t, []string{"decode: its first 3 pairs failed, so 3 others were not tried; mend it, and run the check again"},
		pick(found, Warn))
	require.EqualValues(t, maxFailures, bad.Stats().Requests)
	require.EqualValues(t, 6, good.Stats().Requests)
}

// A rank that another proxy sends requests to is left alone. The other ranks get requests as from
// their owner.
func TestOthersRanksAreLeftAlone(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	ours, theirs := start(t, refengine.Config{Role: refengine.Decode}), start(t, refengine.Config{Role: refengine.Decode})
	c := cluster(t, mooncake.Profile{}, p.URLs(), []string{theirs.URLs()[0], ours.URLs()[0]})
	own, err := config.InstanceID(ours.URLs()[0])
	require.NoError(t, err)
	scope, _ := ownertest.Owned(t, 7)
	var taken, left int
	found := Run(t.Context(), c, Options{TakeSlot: func(_ context.Context, rank string, _ int) (Slot, error) {
		if rank != own {
			return Slot{}, ErrNotOwned
		}
		taken++
		return Slot{Scope: scope, Release: func() { left++ }}, nil
	}})
	require.Empty(t, pick(found, Bad))
	require.Equal(t, []int{1, 1}, []int{taken, left})
	require.EqualValues(t, 7, ours.Stats().Epoch)
	require.Zero(t, theirs.Stats().Requests)
	require.EqualValues(t, 1, p.Stats().Requests, "no hand-off is made for a rank that gets none")
}

// The hold of a hand-off, and what may be done with it, are the connector's: an engine that passes
// under another one's name would fail later.
func TestAWrongConnectorIsNamed(t *testing.T) {
	for _, tc := range []struct {
		engines refengine.Connector
		profile string
		want    string
	}{
		{refengine.NIXLPull, mooncake.AscendMooncakeV1, "has connector ascend-mooncake-v1, but its hand-off is that of nixl-pull; set connector: nixl-pull"},
		{refengine.NIXLPush, mooncake.AscendMooncakeV1, "has connector ascend-mooncake-v1, but its hand-off is that of nixl-push; set connector: nixl-push"},
		{refengine.NIXLPush, mooncake.NIXLPull, "has connector nixl-pull, but its hand-off is that of nixl-push; set connector: nixl-push"},
		{refengine.AscendMooncake, mooncake.NIXLPull, "has connector nixl-pull, but its hand-off is that of ascend-mooncake-v1; set connector: ascend-mooncake-v1"},
	} {
		t.Run(string(tc.engines)+" as "+tc.profile, func(t *testing.T) {
			p, d := start(t, refengine.Config{Role: refengine.Prefill, Connector: tc.engines}),
				start(t, refengine.Config{Role: refengine.Decode, Connector: tc.engines, DPSize: 5})
			found := Run(t.Context(), cluster(t, mooncake.Profile{Connector: tc.profile}, p.URLs(), d.URLs()), Options{EveryPair: true})
			require.Len(t, pick(found, Bad), maxFailures, "%v", found)
			require.Contains(t, pick(found, Bad)[0], tc.want)
			require.Eventually(t, func() bool { return p.Stats().Pins == 0 }, 5*time.Second, 5*time.Millisecond, "nothing is left to the hold")
			require.EqualValues(t, maxFailures, d.Stats().Requests, "a decode engine fetches what was handed over")
			require.Zero(t, p.Stats().Leaks+d.Stats().Unknown+d.Stats().KeyMismatches+d.Stats().LocalPrefills)
		})
	}
}

// The profile of a decode engine may be right where that of the prefill engine is wrong. One with a
// third connector is left alone.
func TestWhoFetchesAHandOffOfAnotherConnector(t *testing.T) {
	for connector, fetches := range map[refengine.Connector]int{refengine.NIXLPull: 1, refengine.AscendMooncake: 0} {
		p, d := start(t, refengine.Config{Role: refengine.Prefill, Connector: refengine.NIXLPull}),
			start(t, refengine.Config{Role: refengine.Decode, Connector: connector})
		c := cluster(t, mooncake.Profile{Connector: mooncake.NIXLPush}, p.URLs(), d.URLs())
		c.Profiles["other"] = mooncake.Profile{Connector: string(connector)}.WithDefaults()
		c.Engines.Decode[0].Profile = "other"
		found := Run(t.Context(), c, Options{})
		require.Contains(t, pick(found, Bad)[0], "has connector nixl-push, but its hand-off is that of nixl-pull")
		require.EqualValues(t, fetches, d.Stats().Requests)
		require.Eventually(t, func() bool { return p.Stats().Pins == 1-fetches }, 5*time.Second, 5*time.Millisecond)
	}
}

// A prefill engine computes a prompt for a model that its partner has, too, so that the partner
// frees the KV.
func TestTheKVOfATriedPrefillIsFreed(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill})
	d := start(t, refengine.Config{Role: refengine.Decode})
	lora := func(body []byte) []byte {
		return bytes.Replace(body, []byte(`"data":[`), []byte(`"data":[{"id":"lora","object":"model","parent":"ref"},`), 1)
	}
	c := cluster(t, mooncake.Profile{}, []string{between(t, p, "/v1/models", lora)}, d.URLs())
	_, err := TryEngine(t.Context(), c, "prefill", c.Engines.Prefill[0], c.Engines.Decode, nil)
	require.NoError(t, err)
	freed := func() bool { return d.Stats().Finished == 1 && p.Stats().Pins == 0 }
	require.Eventually(t, freed, 30*time.Second, time.Millisecond, "an engine counts an answer a moment after its last byte")
}

// closedAddress is an address at which nothing listens.
func closedAddress(t *testing.T) string {
	t.Helper()
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, dead.Close())
	return dead.Addr().String()
}

// The proxy's own test may take some minutes. What it did not get to is not well for that reason,
// and the time is the reason that it gives of the engine that it was asking then.
func TestATestThatRunsOutOfTimeSaysWhatItLeftOut(t *testing.T) {
	p := start(t, refengine.Config{Role: refengine.Prefill, Faults: []refengine.Rule{{Fault: refengine.Hang, Leg: refengine.LegProbe}}})
	var decodes []string
	for range 3 {
		decodes = append(decodes, start(t, refengine.Config{Role: refengine.Decode}).URLs()...)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan []Finding)
	go func() { done <- Run(ctx, cluster(t, mooncake.Profile{}, p.URLs(), decodes), Options{}) }()
	require.Eventually(t, func() bool { return p.Stats().Probes == 1 }, 30*time.Second, time.Millisecond)
	cancel(errors.New("its time is over"))
	found := <-done
	require.Equal(t, []string{"engines: the test had to end before all was tried (its time is over); it left out at least 2 requests"},
		pick(found, Warn))
	require.Len(t, pick(found, Bad), 1)
	require.Contains(t, pick(found, Bad)[0], "its time is over")
}

// JSON has no escape such as \x7f, which Go writes for some characters that a model's name may
// have.
func TestARequestNamesItsModelWhateverItsName(t *testing.T) {
	const name = "a\x7f\"b\""
	for _, endpoint := range []mooncake.Endpoint{mooncake.Completions, mooncake.Chat} {
		q := newQuery(endpoint, name, "id", shortPrompt)
		model, ok := q.body.Get("model")
		require.True(t, ok)
		require.JSONEq(t, "\"a\x7f\\\"b\\\"\"", string(model))
	}
	var body struct{ Model string }
	require.NoError(t, json.Unmarshal(oneToken(name), &body))
	require.Equal(t, name, body.Model)
}

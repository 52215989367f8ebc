package gateway_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/refengine/plain"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// SGLang makes a request without a room of a score, and its DP controller ends the whole server then.
func TestNothingIsComputedAloneOnEnginesOfSGLang(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, options{
		prefill: []refengine.Config{{DPSize: 2, DPMode: "internal"}, {DPSize: 2, DPMode: "internal"}}, decode: []refengine.Config{{DPSize: 2, DPMode: "internal", LoadBalance: "follow_bootstrap_room"}},
		configure: func(cfg *config.Config) { cfg.Engines.Prefill[0].Ranks, cfg.Engines.Prefill[1].Ranks = 2, 2 },
	})
	for range 2 {
		for _, row := range [][2]string{
			{"/v1/score", `{"model":"ref","query":"a","items":["b"],"label_token_ids":[1]}`}, {"/v1/rerank", `{"model":"ref","query":"a","documents":["b"]}`},
			{"/v1/embeddings", `{"model":"ref","input":"a"}`}, {"/classify", `{"model":"ref","input":"a"}`}, {"/pooling", `{"model":"ref","input":"a"}`},
		} {
			r := c.post(row[0], row[1])
			require.Equal(t, http.StatusNotFound, r.status, r.body)
			code, _, _ := failure(t, r)
			require.Equal(t, "no_such_route", code)
			require.Contains(t, r.body, "no engine of this model computes")
		}
	}
	speech, kind := form(t, "speech", "model", "ref")
	require.Equal(t, http.StatusNotFound, c.post(transcriptions, speech, "Content-Type", kind).status)
	require.Equal(t, http.StatusOK, c.post("/tokenize", `{"model":"ref","prompt":"one two"}`).status, "to count tokens computes nothing")
	require.Equal(t, "right", c.judge("one two three", `"stream":true,`))
	for _, e := range append(c.prefill, c.decode...) {
		require.Zero(t, e.Stats().Crashes)
	}
}

// An engine of a pair waits for its counterpart, or was started for half of the work.
func TestHalfOfAPairComputesNothingAlone(t *testing.T) {
	t.Parallel()
	speech, kind := form(t, "speech", "model", "ref")
	pair := func(t *testing.T, may bool) *cluster {
		return start(t, options{
			prefill: []refengine.Config{{Task: plain.Transcription}}, decode: []refengine.Config{{Task: plain.Transcription}},
			profile: mooncake.Profile{PassThrough: may}, configure: func(cfg *config.Config) { cfg.SelfTest = false },
		})
	}
	t.Run("unless its profile says so", func(t *testing.T) {
		r := pair(t, true).post(transcriptions, speech, "Content-Type", kind)
		require.Equal(t, http.StatusOK, r.status, r.body)
	})
	t.Run("and else the client is told", func(t *testing.T) {
		c := pair(t, false)
		r := c.post(transcriptions, speech, "Content-Type", kind)
		require.Equal(t, http.StatusNotFound, r.status, r.body)
		code, _, _ := failure(t, r)
		require.Equal(t, "no_such_route", code)
		require.Contains(t, r.body, "no engine of this model computes")
		require.Equal(t, http.StatusOK, c.post("/tokenize", `{"model":"ref","prompt":"one two"}`).status)
	})
}

// deadly is an engine of an embedding model that ends with the request that it gets, once it is told to.
type deadly struct {
	odd
	server *httptest.Server
	struck *atomic.Int64 // of all such engines
}

func (d *deadly) die(http.ResponseWriter, *http.Request) {
	d.struck.Add(1)
	_ = d.server.Listener.Close()
	d.server.CloseClientConnections()
}

// Each engine has a connection that is kept alive. A lost answer there looks as if the connection was closed while idle.
func TestARequestThatEndsAnEngineIsOfferedToNoOther(t *testing.T) {
	t.Parallel()
	var struck atomic.Int64
	var engines []*deadly
	all := 0
	c := start(t, options{partly: true, configure: func(cfg *config.Config) {
		for range 5 {
			d := &deadly{struck: &struck}
			d.answers(says(200, "application/json", `{}`))
			d.server = httptest.NewServer(d)
			t.Cleanup(d.server.Close)
			engines = append(engines, d)
			cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: d.server.URL, Slots: 4})
		}
		all = len(cfg.Engines.Prefill) + len(cfg.Engines.Decode)
	}})
	c.served("emb", 5)
	c.eventually("all are up", func() bool { return c.sum("evenkeel_engine_up") == float64(all) })
	for round := range 2 {
		for i := 0; ; i++ { // until each has a connection
			require.Less(t, i, 1000)
			require.Equal(t, http.StatusOK, c.post("/v1/embeddings", embedding).status)
			asked := 0
			for _, d := range engines {
				if len(d.got()) > 0 {
					asked++
				}
			}
			if asked == 5-round {
				break
			}
		}
		for _, d := range engines {
			d.answers(d.die)
		}
		r := c.post("/v1/embeddings", embedding, "X-Request-Id", fmt.Sprint("deadly-", round))
		require.Equal(t, http.StatusBadGateway, r.status, r.body)
		require.EqualValues(t, round+1, struck.Load(), "engines that ended")
		for i := 0; i < len(engines); i++ {
			engines[i].answers(says(200, "application/json", `{}`))
		}
		c.eventually("one more is down", func() bool { return c.sum("evenkeel_engine_up") == float64(all-round-1) })
	}
}

// If a connection was only closed while it was idle, no request is lost.
func TestAConnectionThatWasClosedWhileIdleIsReplaced(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	var server *httptest.Server
	o := &odd{}
	o.answers(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 2 { // the end of an idle connection, which the request met
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
			}
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{}`)
	})
	c := start(t, options{partly: true, configure: func(cfg *config.Config) {
		server = httptest.NewServer(o)
		t.Cleanup(server.Close)
		cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: server.URL, Slots: 4})
	}})
	c.served("emb", 1)
	require.Equal(t, http.StatusOK, c.post("/v1/embeddings", embedding).status)
	r := c.post("/v1/embeddings", embedding, "X-Request-Id", "replaced")
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, c.receipt("replaced").Attempts, 2)
	require.EqualValues(t, 3, asked.Load())
}

// With elastic EP a server of SGLang goes on without a rank whose GPU has failed, and ends when a request names it.
func TestRanksThatAreNotNamedMayFail(t *testing.T) {
	t.Parallel()
	never := false
	c := early(t, refengine.SGLang, options{
		dirty:   true, // one rank may get more than its part, because SGLang chooses
		prefill: []refengine.Config{{DPSize: 2, DPMode: "internal", LoadBalance: "round_robin"}}, decode: []refengine.Config{{DPSize: 2, DPMode: "internal"}},
		configure: func(cfg *config.Config) {
			cfg.Engines.Prefill[0].Ranks = 2
			p := cfg.Profiles[config.DefaultProfile]
			p.NameRanks = &never
			cfg.Profiles[config.DefaultProfile] = p
		},
	})
	for _, e := range append(c.prefill, c.decode...) {
		require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.MaskedRank, Rank: new(1)}))
	}
	require.Equal(t, map[string]int{"right": 40}, c.judgeAll(40, `"stream":true,`))
	for _, e := range append(c.prefill, c.decode...) {
		require.Zero(t, e.Stats().Crashes)
	}
}

// Whether a rank of SGLang computes is tried with SGLang's fake host: a request without a room is refused whatever the
// rank does, or ends the whole server.
func TestACanaryOfSGLangIsComputed(t *testing.T) {
	t.Parallel()
	for _, balance := range []string{"round_robin", "follow_bootstrap_room"} {
		t.Run(balance, func(t *testing.T) {
			t.Parallel()
			c := early(t, refengine.SGLang, options{
				dirty: true, decode: []refengine.Config{{DPSize: 2, DPMode: "internal", LoadBalance: balance}},
				configure: func(cfg *config.Config) {
					if balance != "round_robin" { // the server chooses the rank of each request
						cfg.Engines.Decode[0].Ranks = 0
					}
					cfg.Prefill.Retry.Attempts = 1
					cfg.Health.Interval, cfg.Health.Canary, cfg.Health.SlowStart = 20*time.Millisecond, 3*time.Second, 0
				},
			})
			d := c.decode[0]
			canaries := func(outcome string) float64 {
				return c.metric(fmt.Sprintf(`evenkeel_engine_canaries_total{engine=%q,outcome=%q}`, "decode "+addressOf(d), outcome))
			}
			require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.Reset, Leg: refengine.LegDecode}))
			for i := 0; canaries("failed") == 0; i++ {
				require.Less(t, i, 2000)
				require.Zero(t, canaries("passed"), "no rank computes")
				require.NotEqual(t, "right", c.judge(fmt.Sprint("prompt ", i), `"stream":true,`))
				time.Sleep(10 * time.Millisecond) // refusals come at once, and a canary takes its time
			}
			require.NoError(t, d.SetFaults())
			c.eventually("a canary brings it back", func() bool { return canaries("passed") > 0 && c.engineStatus(d).State == "up" })
			require.Zero(t, d.Stats().Crashes)
			require.Equal(t, "right", c.judge("one two three", `"stream":true,`))
		})
	}
}

// SGLang would obey these keys, and no client may send them to it. Other engines ignore them.
func TestKeysThatNoClientSetsForSGLang(t *testing.T) {
	t.Parallel()
	c := early(t, refengine.SGLang, options{})
	other := start(t, options{})
	for key, v := range map[string]string{
		"custom_logit_processor": `"gASVAAAA"`, "custom_params": `{"a":1}`, "session_params": `{"id":"x"}`, "lora_path": `"/tmp/x"`,
		"input_ids": `[1,2]`, "input_embeds": `[[0.5]]`, "stop_regex": `"(a+)+$"`,
	} {
		for path, body := range map[string]string{"/v1/chat/completions": `{"model":"ref","messages":[{"role":"user","content":"a b"}],%s"max_tokens":2}`, "/v1/completions": `{"model":"ref","prompt":"a b",%s"max_tokens":2}`} {
			set := fmt.Sprintf(body, fmt.Sprintf("%q:%s,", key, v))
			r := c.post(path, set)
			require.Equal(t, http.StatusBadRequest, r.status, r.body)
			require.Contains(t, r.body, fmt.Sprintf(`"param":%q,"code":"unsupported_parameter"`, key))
			require.Equal(t, http.StatusOK, c.post(path, fmt.Sprintf(body, fmt.Sprintf("%q:null,", key))).status)
			require.Equal(t, http.StatusOK, other.post(path, set).status)
		}
	}
	r := c.post("/v1/chat/completions", `{"model":"ref","messages":[{"role":"user","content":"a b"}],"return_token_ids":true,"max_tokens":2}`)
	require.Equal(t, http.StatusBadRequest, r.status, r.body)
	require.Contains(t, r.body, `"param":"return_token_ids","code":"unsupported_parameter"`)
}

// GET /health of SGLang generates a token and takes a second at least. Nothing but a check every second asks for it.
func TestAHealthCheckOfSGLangComputesNothing(t *testing.T) {
	t.Parallel()
	var health atomic.Int64
	told := func(path string, _ http.Header) {
		if path == "/health" {
			health.Add(1)
		}
	}
	c := early(t, refengine.SGLang, options{prefill: []refengine.Config{{OnRequest: told}}, decode: []refengine.Config{{OnRequest: told}}})
	require.Equal(t, "right", c.judge("one two three", `"stream":true,`))
	require.Zero(t, health.Load())
}

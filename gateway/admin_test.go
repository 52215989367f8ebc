package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	promodel "github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
)

func (c *cluster) models() (ids []string) {
	c.Helper()
	r := c.ask("GET", c.url+"/v1/models", "")
	require.Equal(c, 200, r.status)
	var list struct {
		Object string
		Data   []struct {
			ID, Object string
		}
	}
	require.NoError(c, json.Unmarshal([]byte(r.body), &list))
	require.Equal(c, "list", list.Object)
	for _, m := range list.Data {
		require.Equal(c, "model", m.Object)
		ids = append(ids, m.ID)
	}
	return ids
}

func TestModelsAreThoseOfHealthyEngines(t *testing.T) {
	t.Parallel()
	c := start(t, options{
		prefill: []refengine.Config{{Model: "small"}, {Model: "large"}},
		decode:  []refengine.Config{{Model: "small"}, {Model: "large"}},
	})
	c.eventually("both models are there", func() bool { return len(c.models()) == 2 })
	require.Equal(t, []string{"large", "small"}, c.models())
	c.eventually("with their context", func() bool {
		return strings.Count(c.ask("GET", c.url+"/v1/models", "").body, `"max_model_len":131072`) == 2
	})
	c.prefill[1].Kill()
	require.Equal(t, []string{"large", "small"}, c.models(), "its decode engine is up")
	c.decode[1].Kill()
	c.eventually("only the healthy ones' model is left", func() bool { return len(c.models()) == 1 })
	require.Equal(t, []string{"small"}, c.models())
	r := c.post(completionPath, `{"model":"large","prompt":"a"}`)
	require.Equal(t, http.StatusServiceUnavailable, r.status, "known, but nobody serves it now")
	require.Equal(t, 200, c.post(completionPath, `{"model":"small","prompt":"a"}`).status)
	require.NoError(t, c.prefill[1].Revive())
	require.NoError(t, c.decode[1].Revive())
	c.eventually("and back again", func() bool { return c.post(completionPath, `{"model":"large","prompt":"a"}`).status == 200 })
}

func TestHealth(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Limits.DrainGrace = 0 }})
	require.Equal(t, 200, c.ask("GET", c.url+"/health", "").status)
	require.JSONEq(t, `{"status":"ok","prefill_instances":1,"decode_instances":2}`, c.ask("GET", c.url+"/healthcheck", "").body)
	require.Equal(t, 200, c.get("/livez").status)
	require.Equal(t, 200, c.get("/readyz").status)

	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/drain", "").status)
	r := c.get("/readyz")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Contains(t, r.body, "draining")
	require.Equal(t, 200, c.get("/livez").status)
	require.Equal(t, http.StatusServiceUnavailable, c.ask("GET", c.url+"/health", "").status)
	require.Equal(t, http.StatusServiceUnavailable, c.ask("GET", c.url+"/healthcheck", "").status)
	r = c.post(chatPath, chat("a", ""))
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	code, _, _ := failure(t, r)
	require.Equal(t, "draining", code)
	require.NotEmpty(t, r.header.Get("Retry-After"))
}

func TestMetricsPage(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	require.Equal(t, "right", c.judge("one two three", `"stream":true,`))
	c.settled(false)
	r := c.get("/metrics")
	parser := expfmt.NewTextParser(promodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(r.body))
	require.NoError(t, err)
	for _, name := range []string{
		"requests_total", "stage_seconds", "ttft_seconds", "tpot_seconds", "itl_seconds", "tick_seconds", "rank_kv_tokens", "rank_slots",
		"rank_running", "imbalance_tokens", "idle_share_ratio", "pool_entries", "pool_oldest_seconds", "handoffs", "handoffs_expired_total",
		"audit_drift", "double_releases_total",
	} {
		require.Contains(t, families, "evenkeel_"+name)
	}
	for _, stage := range []string{"parse", "choose", "probe", "pool_wait", "decide", "transfer", "relay"} {
		require.EqualValues(t, 1, c.metric(fmt.Sprintf(`evenkeel_stage_seconds_count{stage=%q}`, stage)), stage)
	}
	require.EqualValues(t, 1, c.metric(`evenkeel_requests_total{outcome="ok"}`))
	require.EqualValues(t, 1, c.metric("evenkeel_tpot_seconds_count"))
	require.EqualValues(t, c.records()[0].OutputTokens-1, c.metric("evenkeel_itl_seconds_count"))
	require.Contains(t, r.body, "go_goroutines")
}

func TestStatusPage(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Dispatch.Policy = "br0" }})
	leave := c.endless()
	defer leave()
	var s struct {
		Ready   bool
		Open    int64 `json:"open_requests"`
		Engines []struct {
			ID, Role, Version string
			Up                bool
			Models            []string
		}
		Prefill  []struct{ ID, State string }
		Dispatch struct {
			Policy string
			Models []struct {
				Model   string
				Workers []struct {
					Name              string
					Used, Running     int
					KVTokens          int64 `json:"kv_tokens"`
					Capacity, Slots   int64
					Barrier, Up       bool
					Group             string
					Transferring, Age int
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal([]byte(c.get("/status").body), &s))
	require.True(t, s.Ready)
	require.EqualValues(t, 1, s.Open)
	require.Len(t, s.Engines, 3)
	require.Len(t, s.Prefill, 1)
	require.Equal(t, "open", s.Prefill[0].State)
	require.Equal(t, "br0", s.Dispatch.Policy)
	used, running := 0, 0
	for _, w := range s.Dispatch.Models[0].Workers {
		used += w.Used
		running += w.Running
		require.EqualValues(t, 524288, w.Capacity, "from the engine's metrics")
		require.EqualValues(t, 16, w.Slots)
		require.Equal(t, "main", w.Group)
	}
	require.Equal(t, 1, used)
	require.Equal(t, 1, running)
}

func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) { cfg.Dispatch.Policy = "br0" }})
	require.JSONEq(t, `{"policy":"br0"}`, c.get("/policy").body)
	put := func(policy string) reply {
		return c.ask("PUT", c.admin+"/policy", fmt.Sprintf(`{"policy":%q}`, policy))
	}
	require.JSONEq(t, `{"policy":"jsq"}`, put("jsq").body)
	require.Equal(t, "right", c.judge("one", `"stream":true,`))
	require.EqualValues(t, 1, c.metric(`evenkeel_tick_seconds_count{group="main",policy="jsq"}`))
	for _, bad := range []string{"best", "", "br0:nonsense"} {
		r := put(bad)
		require.Equal(t, http.StatusBadRequest, r.status, bad)
		code, _, _ := failure(t, r)
		require.Equal(t, "bad_policy", code)
	}
	require.JSONEq(t, `{"policy":"jsq"}`, c.get("/policy").body, "a wrong one changes nothing")
	require.Equal(t, http.StatusBadRequest, c.ask("PUT", c.admin+"/policy", `{"polcy":"jsq"}`).status)
}

// Ranks come and go while requests run: none fails, and a rank that is drained
// or gone gets no new ones.
func TestWorkersComeAndGo(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	late, err := refengine.Start(refengine.Config{Role: refengine.Decode}.Quick())
	require.NoError(t, err)
	c.decode = append(c.decode, late)
	address := strings.TrimPrefix(late.URLs()[0], "http://")

	stop := c.keepAsking(8)
	require.Equal(t, http.StatusCreated, c.ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q}`, late.URLs()[0])).status)
	c.eventually("it gets requests", func() bool { return late.Stats().Decodes > 3 })
	require.Contains(t, c.get("/workers").body, address)

	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+address+"/drain", "").status)
	c.eventually("what was bound to it has finished", func() bool { // it may not have reached the engine yet, which then looks idle
		drains := c.gw.Status(t.Context()).Drains
		return len(drains) == 1 && drains[0].State == "done"
	})
	drained := late.Stats().Decodes
	before := c.decode[0].Stats().Decodes
	c.eventually("others go on", func() bool { return c.decode[0].Stats().Decodes > before+5 })
	require.Equal(t, drained, late.Stats().Decodes, "drained: no new ones")

	require.Equal(t, http.StatusCreated, c.ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q,"slots":4}`, address)).status, "host:port will do, and takes the drain back")
	c.eventually("it gets requests again", func() bool { return late.Stats().Decodes > drained+3 })
	require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/workers/"+address, "").status)
	c.eventually("it is gone", func() bool { return !strings.Contains(c.get("/workers").body, address) })
	stop()

	for _, r := range []reply{
		c.ask("DELETE", c.admin+"/workers/"+address, ""), c.ask("POST", c.admin+"/workers/"+address+"/drain", ""),
	} {
		require.Equal(t, http.StatusNotFound, r.status)
	}
	for _, bad := range []string{`{`, `{"url":"ftp://x"}`, `{"url":"x"}`, `{"role":"cook","url":"http://x:1"}`, `{"url":"http://x:1","profile":"nobody"}`, `{"url":"http://x:1","colour":1}`,
		`{"url":"http://u:p@x:1"}`, `{"url":"http://x:1/v1"}`, `{"url":"http://x:1?a=b"}`, `{"url":"file:///etc/passwd"}`, `{"url":"gopher://x:1"}`, `{"url":"http://169.254.169.254"}`} {
		require.Equal(t, http.StatusBadRequest, c.ask("POST", c.admin+"/workers", bad).status, bad)
	}
}

// The vllm-ascend proxy's dialect.
func TestInstances(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	more := c.engine(refengine.Config{Role: refengine.Prefill})
	c.prefill = append(c.prefill, more)
	address := strings.TrimPrefix(more.URLs()[0], "http://")
	r := c.ask("POST", c.admin+"/instances/add", fmt.Sprintf(`{"type":"prefill","instances":[%q]}`, address))
	require.Equal(t, 200, r.status, r.body)
	var list struct {
		Prefill []string `json:"current_prefill_instances"`
		Decode  []string `json:"current_decode_instances"`
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &list))
	require.Len(t, list.Decode, 2)
	require.Contains(t, list.Prefill, address)
	c.eventually("it is a candidate", func() bool { return c.metric(`evenkeel_prefill_candidates{state="open"}`) == 2 })
	require.Equal(t, 200, c.ask("POST", c.admin+"/instances/remove", fmt.Sprintf(`{"type":"prefill","instances":%q}`, address)).status, "one may stand alone")
	c.eventually("it is none", func() bool { return c.metric(`evenkeel_prefill_candidates{state="open"}`) == 1 })
	require.Equal(t, http.StatusNotFound, c.ask("POST", c.admin+"/instances/remove", fmt.Sprintf(`{"type":"prefill","instances":[%q]}`, address)).status)
	require.Equal(t, http.StatusBadRequest, c.ask("POST", c.admin+"/instances/add", `{"type":"cook","instances":["a:1"]}`).status)
	require.Equal(t, http.StatusBadRequest, c.ask("POST", c.admin+"/instances/add", `{"type":"decode","instances":["nowhere"]}`).status)
}

func TestResetPrefixCache(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	ask := func() int { // tokens of the prompt that were cached
		require.Equal(t, "right", c.judge(strings.Repeat("word ", 300), `"stream":true,`))
		c.settled(false)
		all := c.records()
		return all[len(all)-1].CachedTokens
	}
	require.Zero(t, ask())
	require.Equal(t, 256, ask())
	require.Equal(t, 200, c.ask("POST", c.admin+"/reset_prefix_cache", "").status)
	require.Zero(t, ask())
	c.decode[0].Kill()
	require.Equal(t, http.StatusBadGateway, c.ask("POST", c.admin+"/reset_prefix_cache", "").status, "some engine did not")
	require.NoError(t, c.decode[0].Revive())
}

func TestProfilesForPeople(t *testing.T) {
	t.Parallel()
	c := start(t, options{})
	require.Equal(t, 200, c.get("/debug/pprof/").status)
	require.Equal(t, 200, c.get("/debug/pprof/goroutine?debug=1").status)
	require.Equal(t, 200, c.get("/debug/pprof/heap").status)
	require.Equal(t, http.StatusNotFound, c.ask("GET", c.url+"/debug/pprof/", "").status, "never on the public listener")
	require.Equal(t, http.StatusNotFound, c.ask("GET", c.url+"/metrics", "").status)
}

func TestTheAdminToken(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("open sesame\n"), 0o600))
	c := start(t, options{token: "open sesame", configure: func(cfg *config.Config) { cfg.Admin.TokenFile = file }})
	without := func(method, path string, header ...string) int {
		req, err := http.NewRequestWithContext(t.Context(), method, c.admin+path, nil)
		require.NoError(t, err)
		if len(header) > 0 {
			req.Header.Set("Authorization", header[0])
		}
		resp, err := c.http.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	for _, path := range []string{"/livez", "/readyz"} {
		require.Equal(t, 200, without("GET", path), "kubelets have no token")
	}
	for path, method := range map[string]string{"/metrics": "GET", "/status": "GET", "/workers": "POST", "/policy": "PUT", "/drain": "POST", "/debug/pprof/": "GET", "/reset_prefix_cache": "POST", "/instances/add": "POST"} {
		require.Equal(t, http.StatusUnauthorized, without(method, path), path)
		require.Equal(t, http.StatusUnauthorized, without(method, path, "Bearer open"), path)
	}
	require.Equal(t, 200, without("GET", "/status", "Bearer open sesame"))

	for _, empty := range []string{"", " \n"} {
		require.NoError(t, os.WriteFile(file, []byte(empty), 0o600))
		cfg := config.Default()
		cfg.Admin.TokenFile = file
		require.NoError(t, cfg.Validate())
		_, err := gateway.New(cfg, zap.NewNop())
		require.ErrorContains(t, err, "write the token")
	}
	c.eventually("it is told", func() bool { return c.logs.FilterMessageSnippet("is not used").Len() >= 1 })
	require.Equal(t, 200, without("GET", "/status", "Bearer open sesame"), "an empty file changes nothing")
	require.NoError(t, os.WriteFile(file, []byte("close sesame\n"), 0o600))
	c.eventually("the new token is known", func() bool { return without("GET", "/status", "Bearer close sesame") == 200 })
	require.Equal(t, http.StatusUnauthorized, without("GET", "/status", "Bearer open sesame"), "the old one is not")
	c.token = "close sesame"
}

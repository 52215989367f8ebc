package gateway_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	promodel "github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

// What an operator sees and changes at the admin listener, of one proxy after the other: each part
// leaves it as the next one wants it.
func TestOperatorsWatchAndSteerTheProxy(t *testing.T) {
	t.Parallel()
	c := start(t, options{configure: func(cfg *config.Config) {
		cfg.Dispatch.Policy, cfg.Prefill.Policy, cfg.Limits.DrainGrace = "br0", "lmetric", 0
	}})
	// What hides a second request in the first must reach no engine, whichever way a
	// proxy in front of us read it.
	t.Run("hidden requests reach no engine", func(t *testing.T) {
		body := chat("a", "")
		hidden := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", refclient.ChatPath, len(body), body)
		head := "POST " + refclient.ChatPath + " HTTP/1.1\r\nHost: x\r\n"
		for name, in := range map[string]string{
			"CL.TE":                          head + fmt.Sprintf("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s", len(hidden)+5, hidden),
			"TE.CL":                          head + fmt.Sprintf("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(hidden), hidden),
			"TE.TE, one of them in disguise": head + "Transfer-Encoding: chunked\r\nTransfer-encoding: cow\r\n\r\n0\r\n\r\n" + hidden,
			"a coding behind a tab":          head + "Transfer-Encoding:\tchunked, identity\r\n\r\n0\r\n\r\n" + hidden,
			"a coding with a vertical tab":   head + "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n" + hidden,
			"two lengths":                    head + fmt.Sprintf("Content-Length: 0\r\nContent-Length: %d\r\n\r\n%s", len(hidden), hidden),
			"a folded length":                head + fmt.Sprintf("Content-Length: 0\r\nX: y\r\n Content-Length: %d\r\n\r\n%s", len(hidden), hidden),
			"a chunk line that ends in LF":   head + "Transfer-Encoding: chunked\r\n\r\n0;a\n\r\n" + hidden,
			"a bare CR in a chunk extension": head + "Transfer-Encoding: chunked\r\n\r\n0;a\rb\r\n\r\n" + hidden,
			"a space in a chunk size":        head + "Transfer-Encoding: chunked\r\n\r\n0 0\r\n\r\n" + hidden,
			"a chunk longer than it says":    head + "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n" + hidden,
			"a trailer that is framing":      head + "Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 5\r\n\r\n" + hidden,
		} {
			t.Run(name, func(t *testing.T) {
				conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "http://"))
				require.NoError(t, err)
				defer func() { _ = conn.Close() }()
				require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
				_, err = io.WriteString(conn, in)
				require.NoError(t, err)
				answer, err := io.ReadAll(conn)
				require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection is not used again")
				require.True(t, strings.HasPrefix(string(answer), "HTTP/1.1 400 "), "%s", answer)
				require.Equal(t, 1, strings.Count(string(answer), "HTTP/1.1 "), "one answer")
				require.Zero(t, c.Prefill[0].Stats().Requests)
			})
		}
	})
	t.Run("the page of metrics", func(t *testing.T) {
		require.Equal(t, "right", c.Judge("one two three", `"stream":true,`))
		c.settled(false)
		r := c.get("/metrics")
		parser := expfmt.NewTextParser(promodel.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(r.Body))
		require.NoError(t, err)
		for _, name := range []string{
			"requests_total", "stage_seconds", "ttft_seconds", "tpot_seconds", "itl_seconds", "tick_seconds", "rank_kv_tokens", "rank_slots",
			"rank_running", "imbalance_tokens", "idle_share_ratio", "pool_entries", "pool_oldest_seconds", "handoffs", "handoffs_expired_total",
			"audit_drift", "double_releases_total",
		} {
			require.Contains(t, families, "evenkeel_"+name)
		}
		for _, stage := range []string{"parse", "choose", "probe", "pool_wait", "decide", "transfer", "relay"} {
			require.EqualValues(t, 1, c.Metric(fmt.Sprintf(`evenkeel_stage_seconds_count{stage=%q}`, stage)), stage)
		}
		require.EqualValues(t, 1, c.Metric(`evenkeel_requests_total{outcome="ok"}`))
		require.EqualValues(t, 1, c.Metric("evenkeel_tpot_seconds_count"))
		require.EqualValues(t, c.Records()[0].OutputTokens-1, c.Metric("evenkeel_itl_seconds_count"))
		require.Contains(t, r.Body, "go_goroutines")
	})
	t.Run("the status", func(t *testing.T) {
		leave := c.Endless()
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
		require.NoError(t, json.Unmarshal([]byte(c.get("/status").Body), &s))
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
	})
	t.Run("profiles for people", func(t *testing.T) {
		require.Equal(t, 200, c.get("/debug/pprof/").Status)
		require.Equal(t, 200, c.get("/debug/pprof/goroutine?debug=1").Status)
		require.Equal(t, 200, c.get("/debug/pprof/heap").Status)
		require.Equal(t, http.StatusNotFound, c.Ask("GET", c.URL+"/debug/pprof/", "").Status, "never on the public listener")
		require.Equal(t, http.StatusNotFound, c.Ask("GET", c.URL+"/metrics", "").Status)
	})
	t.Run("the policy changes", func(t *testing.T) {
		require.JSONEq(t, `{"policy":"br0"}`, c.get("/policy").Body)
		put := func(policy string) reply {
			return c.Ask("PUT", c.admin+"/policy", fmt.Sprintf(`{"policy":%q}`, policy))
		}
		require.JSONEq(t, `{"policy":"jsq"}`, put("jsq").Body)
		require.Equal(t, "right", c.Judge("one", `"stream":true,`))
		require.EqualValues(t, 1, c.Metric(`evenkeel_tick_seconds_count{group="main",policy="jsq"}`))
		for _, bad := range []string{"best", "", "br0:nonsense"} {
			r := put(bad)
			require.Equal(t, http.StatusBadRequest, r.Status, bad)
			code, _, _ := refclient.Failure(t, r)
			require.Equal(t, "bad_policy", code)
		}
		require.JSONEq(t, `{"policy":"jsq"}`, c.get("/policy").Body, "a wrong one changes nothing")
		require.Equal(t, http.StatusBadRequest, c.Ask("PUT", c.admin+"/policy", `{"polcy":"jsq"}`).Status)
	})
	// Without a token the admin listener is open to this machine, and so to every
	// page its user visits. None of them may use it.
	t.Run("pages of other sites cannot use it", func(t *testing.T) {
		port := c.admin[strings.LastIndexByte(c.admin, ':'):]
		const policy = `{"policy":"jsq"}`
		for _, tt := range []struct {
			name, method, path, body string
			header                   []string
			want                     int
			code                     string
		}{
			{"curl", "GET", "/status", "", nil, 200, ""},
			{"curl, writing", "PUT", "/policy", policy, nil, 200, ""},
			{"curl, by the name localhost", "GET", "/status", "", []string{"Host", "localhost" + port}, 200, ""},
			{"curl, by its IPv6 address", "GET", "/status", "", []string{"Host", "[::1]" + port}, 200, ""},
			{"our own page", "PUT", "/policy", policy, []string{"Origin", c.admin, "Sec-Fetch-Site", "same-origin"}, 200, ""},
			{"an address that was typed", "GET", "/status", "", []string{"Sec-Fetch-Site", "none", "Sec-Fetch-Mode", "navigate"}, 200, ""},
			{"a link that was followed", "GET", "/status", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 200, ""},
			{"a form of another site", "POST", "/drain", "", []string{"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, "cross_site"},
			{"a script of another site", "POST", "/drain", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 403, "cross_site"},
			{"a browser that says no more than the origin", "POST", "/drain", "", []string{"Origin", "https://evil.example"}, 403, "cross_site"},
			{"a sandboxed page", "POST", "/drain", "", []string{"Origin", "null"}, 403, "cross_site"},
			{"a page on another port of this host", "POST", "/drain", "", []string{"Origin", "http://127.0.0.1:1"}, 403, "cross_site"},
			{"a picture of another site", "GET", "/debug/pprof/profile?seconds=60", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"}, 403, "cross_site"},
			{"a read of another site", "GET", "/status", "", []string{"Origin", "https://evil.example"}, 403, "cross_site"},
			{"the same, said to be a link", "GET", "/status", "", []string{"Origin", "https://evil.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate"}, 403, "cross_site"},
			{"a frame of another site", "GET", "/status", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, 403, "cross_site"},
			{"a link to a profile", "GET", "/debug/pprof/profile?seconds=60", "", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, 403, "cross_site"},
			{"an operator's profile", "GET", "/debug/pprof/cmdline", "", nil, 200, ""},
			{"brackets in brackets", "GET", "/status", "", []string{"Host", "[[127.0.0.1]]" + port}, 403, "wrong_host"},
			{"brackets around what needs none", "GET", "/status", "", []string{"Host", "[127.0.0.1]" + port}, 403, "wrong_host"},
			{"brackets without a port", "GET", "/status", "", []string{"Host", "[::1]"}, 200, ""},
			{"a name that leads here", "GET", "/status", "", []string{"Host", "evil.example" + port}, 403, "wrong_host"},
			{"a name that begins well", "GET", "/status", "", []string{"Host", "127.0.0.1.evil.example"}, 403, "wrong_host"},
			{"the same, as the browser's own site", "POST", "/drain", "", []string{"Host", "evil.example", "Origin", "http://evil.example", "Sec-Fetch-Site", "same-origin"}, 403, "wrong_host"},
			{"plain text, which needs no leave", "PUT", "/policy", policy, []string{"Content-Type", "text/plain"}, 415, "wrong_content_type"},
			{"a form", "POST", "/workers", "url=x", []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "wrong_content_type"},
			{"JSON with a charset", "PUT", "/policy", policy, []string{"Content-Type", "application/json; charset=utf-8"}, 200, ""},
			{"kubelets use any name", "GET", "/readyz", "", []string{"Host", "proxy.pd.internal"}, 200, ""},
			{"more than any body", "PUT", "/policy", `{"policy":"` + strings.Repeat("x", 2<<20) + `"}`, nil, 400, "bad_body"},
		} {
			t.Run(tt.name, func(t *testing.T) {
				r := c.Ask(tt.method, c.admin+tt.path, tt.body, tt.header...)
				require.NoError(t, r.Err)
				require.Equal(t, tt.want, r.Status, r.Body)
				require.Empty(t, r.Header.Get("Access-Control-Allow-Origin"))
				if tt.code != "" {
					code, _, _ := refclient.Failure(t, r)
					require.Equal(t, tt.code, code)
				}
			})
		}
		require.Equal(t, 200, c.get("/readyz").Status, "nobody drained it")
	})
	t.Run("the prefill tier", func(t *testing.T) {
		require.Equal(t, "right", c.Judge("one", `"stream":true,`))

		var o prefill.Overview
		require.NoError(t, json.Unmarshal([]byte(c.get("/prefill").Body), &o))
		require.Equal(t, "lmetric", o.Policy)
		require.Contains(t, o.Policies, "finish")
		require.Len(t, o.Candidates, 1)
		require.True(t, o.Candidates[0].CanStart)
		require.NotNil(t, o.Candidates[0].AnswerAgeMs)
		require.NotZero(t, o.Index.PromptTokens)

		require.JSONEq(t, `{"policy":"gorgo:qs=2"}`, c.Ask("PUT", c.admin+"/prefill/policy", `{"policy":"gorgo:qs=2"}`).Body)
		r := c.Ask("PUT", c.admin+"/prefill/policy", `{"policy":"best"}`)
		require.Equal(t, http.StatusBadRequest, r.Status)
		code, _, _ := refclient.Failure(t, r)
		require.Equal(t, "bad_policy", code)
		require.Contains(t, r.Body, "there are round-robin")

		var scores []prefill.Scored
		body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"hello"}]}`, model)
		require.NoError(t, json.Unmarshal([]byte(c.Ask("POST", c.admin+"/prefill/score", body).Body), &scores))
		require.Len(t, scores, len((&policy.Library{ForServing: true}).Names()))
		for _, s := range scores {
			require.Equal(t, o.Candidates[0].ID, s.Candidate)
			require.True(t, s.Scores[0].Chosen)
		}
		unknown := c.Ask("POST", c.admin+"/prefill/score", `{"model":"none","prompt":"x"}`)
		require.Equal(t, http.StatusNotFound, unknown.Status)
		require.Contains(t, unknown.Body, "model_not_found")
		require.JSONEq(t, `[]`, c.get("/prefill/hotspots").Body)
		require.Equal(t, http.StatusNoContent, c.Ask("DELETE", c.admin+"/prefill/index", "").Status)
		require.Equal(t, http.StatusNotFound, c.Ask("DELETE", c.admin+"/prefill/index?candidate=p9", "").Status)
	})
	// The vllm-ascend proxy's dialect.
	t.Run("instances, in the dialect of vllm-ascend", func(t *testing.T) {
		more := c.Engine(refengine.Config{Role: refengine.Prefill})
		c.Prefill = append(c.Prefill, more)
		address := strings.TrimPrefix(more.URLs()[0], "http://")
		r := c.Ask("POST", c.admin+"/instances/add", fmt.Sprintf(`{"type":"prefill","instances":[%q]}`, address))
		require.Equal(t, 200, r.Status, r.Body)
		var list struct {
			Prefill []string `json:"current_prefill_instances"`
			Decode  []string `json:"current_decode_instances"`
		}
		require.NoError(t, json.Unmarshal([]byte(r.Body), &list))
		require.Len(t, list.Decode, 2)
		require.Contains(t, list.Prefill, address)
		c.Eventually("it is a candidate", func() bool { return c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 2 })
		require.Equal(t, 200, c.Ask("POST", c.admin+"/instances/remove", fmt.Sprintf(`{"type":"prefill","instances":%q}`, address)).Status, "one may stand alone")
		c.Eventually("it is none", func() bool { return c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 1 })
		require.Equal(t, http.StatusNotFound, c.Ask("POST", c.admin+"/instances/remove", fmt.Sprintf(`{"type":"prefill","instances":[%q]}`, address)).Status)
		require.Equal(t, http.StatusBadRequest, c.Ask("POST", c.admin+"/instances/add", `{"type":"cook","instances":["a:1"]}`).Status)
		require.Equal(t, http.StatusBadRequest, c.Ask("POST", c.admin+"/instances/add", `{"type":"decode","instances":["nowhere"]}`).Status)
	})
	// Ranks come and go while requests run: none fails, and a rank that is drained
	// or gone gets no new ones.
	t.Run("workers come and go", func(t *testing.T) {
		late, err := refengine.Start(refengine.Config{Role: refengine.Decode}.Quick())
		require.NoError(t, err)
		c.Decode = append(c.Decode, late)
		address := strings.TrimPrefix(late.URLs()[0], "http://")

		stop := c.KeepAsking(8)
		require.Equal(t, http.StatusCreated, c.Ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q}`, late.URLs()[0])).Status)
		c.Eventually("it gets requests", func() bool { return late.Stats().Decodes > 3 })
		require.Contains(t, c.get("/workers").Body, address)

		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/workers/"+address+"/drain", "").Status)
		c.Eventually("what was bound to it has finished", func() bool { // it may not have reached the engine yet, which then looks idle
			drains := c.gw.Status(t.Context()).Drains
			return len(drains) == 1 && drains[0].State == "done"
		})
		drained := late.Stats().Decodes
		before := c.Decode[0].Stats().Decodes
		c.Eventually("others go on", func() bool { return c.Decode[0].Stats().Decodes > before+5 })
		require.Equal(t, drained, late.Stats().Decodes, "drained: no new ones")

		require.Equal(t, http.StatusCreated, c.Ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q,"slots":4}`, address)).Status, "host:port will do, and takes the drain back")
		c.Eventually("it gets requests again", func() bool { return late.Stats().Decodes > drained+3 })
		require.Equal(t, http.StatusNoContent, c.Ask("DELETE", c.admin+"/workers/"+address, "").Status)
		c.Eventually("it is gone", func() bool { return !strings.Contains(c.get("/workers").Body, address) })
		stop()

		for _, r := range []reply{
			c.Ask("DELETE", c.admin+"/workers/"+address, ""), c.Ask("POST", c.admin+"/workers/"+address+"/drain", ""),
		} {
			require.Equal(t, http.StatusNotFound, r.Status)
		}
		for _, bad := range []string{`{`, `{"url":"ftp://x"}`, `{"url":"x"}`, `{"role":"cook","url":"http://x:1"}`, `{"url":"http://x:1","profile":"nobody"}`, `{"url":"http://x:1","colour":1}`,
			`{"url":"http://u:p@x:1"}`, `{"url":"http://x:1/v1"}`, `{"url":"http://x:1?a=b"}`, `{"url":"file:///etc/passwd"}`, `{"url":"gopher://x:1"}`, `{"url":"http://169.254.169.254"}`} {
			require.Equal(t, http.StatusBadRequest, c.Ask("POST", c.admin+"/workers", bad).Status, bad)
		}
	})
	t.Run("prefix caches are reset", func(t *testing.T) {
		ask := func() int { // tokens of the prompt that were cached
			require.Equal(t, "right", c.Judge(strings.Repeat("word ", 300), `"stream":true,`))
			c.settled(false)
			all := c.Records()
			return all[len(all)-1].CachedTokens
		}
		require.Zero(t, ask())
		require.Equal(t, 256, ask())
		require.Equal(t, 200, c.Ask("POST", c.admin+"/reset_prefix_cache", "").Status)
		require.Zero(t, ask())
		c.Decode[0].Kill()
		require.Equal(t, http.StatusBadGateway, c.Ask("POST", c.admin+"/reset_prefix_cache", "").Status, "some engine did not")
		require.NoError(t, c.Decode[0].Revive())
		c.Eventually("it is up again", func() bool { return c.get("/readyz").Status == http.StatusOK && c.Sum("evenkeel_engine_up") == 3 })
	})
	t.Run("health, until it drains", func(t *testing.T) {
		require.Equal(t, 200, c.Ask("GET", c.URL+"/health", "").Status)
		require.JSONEq(t, `{"status":"ok","prefill_instances":1,"decode_instances":2}`, c.Ask("GET", c.URL+"/healthcheck", "").Body)
		require.Equal(t, 200, c.get("/livez").Status)
		require.Equal(t, 200, c.get("/readyz").Status)

		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/drain", "").Status)
		r := c.get("/readyz")
		require.Equal(t, http.StatusServiceUnavailable, r.Status)
		require.Contains(t, r.Body, "draining")
		require.Equal(t, 200, c.get("/livez").Status)
		require.Equal(t, http.StatusServiceUnavailable, c.Ask("GET", c.URL+"/health", "").Status)
		require.Equal(t, http.StatusServiceUnavailable, c.Ask("GET", c.URL+"/healthcheck", "").Status)
		r = c.Post(refclient.ChatPath, chat("a", ""))
		require.Equal(t, http.StatusServiceUnavailable, r.Status)
		code, _, _ := refclient.Failure(t, r)
		require.Equal(t, "draining", code)
		require.NotEmpty(t, r.Header.Get("Retry-After"))
	})
}

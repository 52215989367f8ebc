package gateway_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// What must never be written down.
const (
	secretPrompt = "zanzibar-nightingale"
	secretKey    = "ek-opensesame-client"
	secretEngine = "sk-opensesame-engine"
)

// TestNothingOfARequestIsWrittenDown runs requests into every kind of end and
// looks through all that the proxy wrote and shows: log at debug level, request
// log, decision log, metrics, status.
func TestNothingOfARequestIsWrittenDown(t *testing.T) {
	t.Setenv("EK_TEST_ENGINE_KEY", secretEngine)
	dir := t.TempDir()
	keys, decisions := filepath.Join(dir, "keys.yaml"), filepath.Join(dir, "decisions.jsonl")
	refclient.KeyFile(t, keys, "team "+secretKey)
	var bird atomic.Pointer[parrot] // answers in the engines' place
	c := start(t, options{
		dirty: true, debug: true,
		prefill: []refengine.Config{{Server: refengine.Server{APIKey: secretEngine}}},
		decode:  []refengine.Config{{Server: refengine.Server{APIKey: secretEngine}}},
		profile: mooncake.Profile{APIKeyEnv: "EK_TEST_ENGINE_KEY"},
		configure: func(cfg *config.Config) {
			cfg.KeysFile, cfg.Dispatch.DecisionLog.File = keys, decisions
			cfg.Limits.Body = 64 << 10
			cfg.Limits.ReadTimeout = time.Second
			inFront(t, &cfg.Engines.Prefill[0], &bird)
			inFront(t, &cfg.Engines.Decode[0], &bird)
		},
	})
	auth := []string{"Authorization", "Bearer " + secretKey}
	const prompt = "tell me of " + secretPrompt

	require.Equal(t, 200, c.Post(refclient.ChatPath, chat(prompt, ""), auth...).Status)
	require.Equal(t, 200, c.Post(refclient.ChatPath, chat(prompt, `"stream":true,"n":2,`), auth...).Status)
	require.Equal(t, 200, c.Post("/v1/completions", completion(prompt, ""), auth...).Status)
	for _, body := range []string{
		`{"` + secretPrompt, chat(prompt, `"`+secretPrompt+`":1,"n":99,`), chat(prompt, `"model":"`+secretPrompt+`","model":"x",`),
		`{"model":"` + secretPrompt + `","messages":[]}`, chat(prompt, `"tools":[{"`+secretPrompt+`":NaN}],`), strings.Repeat(secretPrompt, 10_000),
	} {
		status := c.Post(refclient.ChatPath, body, auth...).Status
		require.True(t, status >= 400 && status < 500, "%d: %.80s", status, body)
	}
	require.Equal(t, 401, c.Post(refclient.ChatPath, chat(prompt, ""), "Authorization", "Bearer "+secretKey+"x").Status)
	require.Equal(t, 401, c.Post(refclient.ChatPath, strings.Repeat(secretPrompt, 10_000), "Authorization", "Bearer "+secretKey+"x").Status)
	for _, raw := range []string{ // heads that cannot be read, a body that stops
		"POST /v1/" + secretPrompt + " HTTP/1.1\r\nAuthorization: Bearer " + secretKey + "\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secretKey + "\r\nContent-Length: " + secretPrompt + "\r\n\r\n",
		"POST " + refclient.ChatPath + " HTTP/1.1\r\nHost: x\r\nX " + secretPrompt + ": " + secretKey + "\r\n\r\n",
		"POST " + refclient.ChatPath + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secretKey + "\r\nContent-Length: 99\r\n\r\n" +
			secretPrompt,
		"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + strings.Repeat(secretKey, 2000) + "\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL, "http://"))
		require.NoError(t, err)
		_, err = conn.Write([]byte(raw))
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
	}

	// Engines repeat the prompt in what they answer.
	for _, answer := range []func(w http.ResponseWriter, body string){
		func(w http.ResponseWriter, body string) { http.Error(w, body, http.StatusInternalServerError) },
		func(w http.ResponseWriter, body string) { http.Error(w, body, http.StatusBadRequest) },
		func(w http.ResponseWriter, body string) { http.Error(w, body, http.StatusUnauthorized) },
		func(w http.ResponseWriter, body string) {
			_, _ = fmt.Fprintf(w, `{"error":{"message":%q,"code":500}}`, body)
		},
		func(w http.ResponseWriter, body string) {
			_, _ = fmt.Fprintf(w, `{"kv_transfer_params":{"x":%q}}`, body)
		},
		func(w http.ResponseWriter, body string) { _, _ = io.WriteString(w, body) },
		func(w http.ResponseWriter, body string) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, "data: {\"error\":{\"message\":%q,\"type\":%[1]q,\"code\":500}}\n\n", body)
		},
		func(w http.ResponseWriter, body string) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\n")
			_, _ = fmt.Fprintf(w, "data: {\"error\":{\"message\":%q,\"type\":%[1]q,\"code\":%[1]q}}\n\n", body)
		},
		func(w http.ResponseWriter, body string) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, `data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\n")
			_, _ = io.WriteString(w, "data: "+body+body+"\n\ndata: {"+body)
		},
	} {
		for _, leg := range []string{"do_remote_decode\":true", "do_remote_prefill\":true"} {
			echo := parrot(func(w http.ResponseWriter, body string) bool {
				if strings.Contains(body, leg) {
					answer(w, body)
					return true
				}
				return false
			})
			bird.Store(&echo)
			for _, more := range []string{`"stream":true,`, ""} {
				require.NoError(t, c.Post(refclient.ChatPath, chat(prompt, more), auth...).Err)
			}
		}
		bird.Store(nil)
	}

	// They repeat it where something else belongs: the client hears of it in our own
	// words, too.
	stream := func(w http.ResponseWriter, events ...string) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range events {
			_, _ = fmt.Fprintf(w, "data: %s\n\n", e)
		}
	}
	handOff := func(w http.ResponseWriter, member string) {
		_, _ = fmt.Fprintf(w, `{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":3},"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],`+
			`"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1,%s}}`, member)
	}
	const first = `{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}`
	for i, answer := range []struct {
		leg   string
		write func(w http.ResponseWriter)
	}{
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { stream(w, `["`+secretPrompt+`"]`) }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { stream(w, first, `["`+secretPrompt+`"]`) }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { stream(w, first, `{"choices":"`+secretPrompt+`"}`) }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { stream(w, first, `{"choices":[],"usage":"`+secretPrompt+`"}`, "[DONE]") }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { stream(w, first, `{"`+secretPrompt) }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { w.Header().Set("Content-Type", "text/"+secretPrompt) }},
		{"do_remote_prefill\":true", func(w http.ResponseWriter) { w.Header().Set("Content-Type", "application/json; "+secretPrompt) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) {
			_, _ = io.WriteString(w, `{"choices":[{"finish_reason":"`+secretPrompt+`"}]}`)
		}},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"do_remote_prefill":"`+secretPrompt+`"`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"remote_block_ids":["`+secretPrompt+`"]`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"remote_engine_id":["`+secretPrompt+`"]`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"remote_port":"`+secretPrompt+`"`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"remote_host":"`+secretPrompt+`"`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"new":{"`+secretPrompt+`":"tcp://`+secretPrompt+`"}`) }},
		{"do_remote_decode\":true", func(w http.ResponseWriter) { handOff(w, `"`+secretPrompt+`_host":"`+secretPrompt+`"`) }},
	} {
		echo := parrot(func(w http.ResponseWriter, body string) bool {
			if !strings.Contains(body, answer.leg) {
				return false
			}
			answer.write(w)
			return true
		})
		bird.Store(&echo)
		for _, more := range []string{`"stream":true,`, "", `"n":2,`} {
			got := c.Post(refclient.ChatPath, chat(prompt, more), auth...)
			require.NoError(t, got.Err)
			if more != `"stream":true,` { // which may have relayed what came before
				require.NotContains(t, got.Body, secretPrompt, "answer %d with %s", i, more)
			}
		}
		bird.Store(nil)
		c.Eventually("the engine is up again", func() bool { return c.get("/readyz").Status == http.StatusOK })
	}

	// Engines fail in every other way.
	for _, f := range []refengine.Rule{
		{Fault: refengine.Internal}, {Fault: refengine.Reject}, {Fault: refengine.Throttle}, {Fault: refengine.Status, Value: 401}, {Fault: refengine.Reset},
		{Fault: refengine.Garbage}, {Fault: refengine.ErrorEvent}, {Fault: refengine.Error200}, {Fault: refengine.SilentEnd}, {Fault: refengine.MissingFinish},
		{Fault: refengine.FinishError}, {Fault: refengine.Recomputed, AfterTokens: 2}, {Fault: refengine.WrongHost}, {Fault: refengine.StringBlocks}, {Fault: refengine.NullHandoff},
	} {
		for _, e := range []*refengine.Engine{c.Prefill[0], c.Decode[0]} {
			require.NoError(t, e.SetFaults(f))
			r := c.Post(refclient.ChatPath, chat(prompt, `"stream":true,`), auth...)
			require.NoError(t, r.Err)
			require.NoError(t, e.SetFaults())
			c.Eventually("the engine is up again", func() bool { return c.get("/readyz").Status == http.StatusOK })
		}
	}
	c.Endless(auth...)()
	c.settled(true)

	var wrote bytes.Buffer
	for _, l := range c.logs.All() {
		line, err := json.Marshal(l.ContextMap())
		require.NoError(t, err)
		fmt.Fprintln(&wrote, l.Message, l.Stack, string(line))
		for _, f := range l.Context { // what JSON might not show
			fmt.Fprintf(&wrote, "%s %s %+v\n", f.Key, f.String, f.Interface)
		}
	}
	for _, file := range []string{c.RequestLog, decisions} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		wrote.Write(text)
	}
	for _, path := range []string{"/metrics", "/status", "/workers"} {
		wrote.WriteString(c.get(path).Body)
	}
	require.Contains(t, wrote.String(), "no retry is left", "failures are in the log")
	require.Contains(t, wrote.String(), `"key":"team"`, "and requests in theirs, by the name of their key")
	for _, secret := range []string{secretPrompt, "opensesame"} {
		if i := strings.Index(wrote.String(), secret); i >= 0 {
			t.Errorf("%q was written down: ...%s...", secret, wrote.String()[max(0, i-300):min(wrote.Len(), i+100)])
		}
	}
}

// parrot answers a request in an engine's place, or not.
type parrot func(w http.ResponseWriter, body string) bool

// inFront puts a server in front of an engine that lets a parrot answer.
func inFront(t *testing.T, e *config.Engine, bird *atomic.Pointer[parrot]) {
	t.Helper()
	target, err := url.Parse(e.URL)
	require.NoError(t, err)
	transport := &http.Transport{DisableCompression: true}
	through := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if p := bird.Load(); err == nil && r.Method == http.MethodPost && p != nil && (*p)(w, string(body)) {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		through.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		srv.Close()
		transport.CloseIdleConnections()
	})
	e.URL = srv.URL
}

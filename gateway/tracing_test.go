package gateway_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/tracing/tracetest"
)

// heard are the trace headers that engines were sent, by path and in order.
type heard struct {
	mu  sync.Mutex
	all []http.Header
}

func (h *heard) note(path string, header http.Header) {
	if strings.HasPrefix(path, "/v1/") && header.Get("X-Request-Id") != "" {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.all = append(h.all, header.Clone())
	}
}

// leg is the last header of a leg, "-p" or "-d".
func (h *heard) leg(name string) http.Header {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range slices.Backward(h.all) {
		if strings.Contains(one.Get("X-Request-Id"), name) {
			return one
		}
	}
	return nil
}

func traced(c *tracetest.Collector, more ...func(*config.Config)) func(*config.Config) {
	return func(cfg *config.Config) {
		cfg.Tracing.Endpoint, cfg.Tracing.Sample = c.URL, 1
		for _, f := range more {
			f(cfg)
		}
	}
}

// spans waits for a whole trace: until the request's own span is there.
func (c *cluster) spans(col *tracetest.Collector, trace string) (all []tracetest.Span) {
	c.Helper()
	c.Eventually("the trace "+trace+" is exported", func() bool {
		all = slices.DeleteFunc(col.Spans(), func(s tracetest.Span) bool { return s.Trace != trace })
		return slices.ContainsFunc(all, func(s tracetest.Span) bool { return s.Kind == "server" && s.Attributes["evenkeel.outcome"] != nil })
	})
	return all
}

func named(t *testing.T, all []tracetest.Span, name string) tracetest.Span {
	t.Helper()
	at := slices.IndexFunc(all, func(s tracetest.Span) bool { return s.Name == name })
	require.GreaterOrEqual(t, at, 0, "no span %s in\n%s", name, tracetest.Tree(all))
	return all[at]
}

const wholeTree = `chat ref (server)
  parse (internal)
  attempt (internal)
    queue (internal)
    probe (client)
    pool_wait (internal)
    decode (client)
      transfer (internal)
      relay (internal)
`

func TestARequestIsATreeOfSpans(t *testing.T) {
	t.Parallel()
	col := tracetest.Start(t)
	var ears heard
	c := start(t, options{
		prefill: []refengine.Config{{Answers: refengine.Answers{PromptTokensDetails: true}, Hooks: refengine.Hooks{OnRequest: ears.note}},
			{Answers: refengine.Answers{PromptTokensDetails: true}, Hooks: refengine.Hooks{OnRequest: ears.note}}},
		decode:    []refengine.Config{{Hooks: refengine.Hooks{OnRequest: ears.note}}, {Hooks: refengine.Hooks{OnRequest: ears.note}}},
		configure: traced(col, turns), dirty: true,
	})
	c.allUp()
	t.Run("one that is served", func(t *testing.T) {
		trace, caller := "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
		r := c.Post(refclient.ChatPath, chat("a traced one", `"stream":true,"max_tokens":4,`), "Traceparent", "00-"+trace+"-"+caller+"-01", "Tracestate", "vendor=x", "X-Request-Id", "mine")
		require.Equal(t, http.StatusOK, r.Status)
		all := c.spans(col, trace)
		require.Equal(t, wholeTree, tracetest.Tree(all))
		for _, s := range all {
			require.False(t, s.End.Before(s.Start))
			require.Equal(t, "vendor=x", s.State)
		}
		root := named(t, all, "chat ref")
		require.Equal(t, caller, root.Parent, "below the caller's")
		kept := c.receipt("mine")
		require.Equal(t, trace, kept.TraceID)
		for name, want := range map[string]any{
			"gen_ai.operation.name": "chat", "gen_ai.provider.name": "evenkeel", "gen_ai.request.model": model, "gen_ai.response.model": model,
			"gen_ai.request.stream": true, "gen_ai.request.max_tokens": int64(4), "gen_ai.usage.output_tokens": int64(4), "gen_ai.usage.input_tokens": int64(kept.PromptTokens),
			"http.request.method": "POST", "http.route": refclient.ChatPath, "http.response.status_code": int64(200),
			"evenkeel.outcome": "ok", "evenkeel.request.id": kept.ID, "evenkeel.client.request.id": "mine", "evenkeel.decode.rank": kept.Attempts[0].Decode.Rank,
		} {
			require.Equal(t, want, root.Attributes[name], name)
		}
		require.InDelta(t, kept.TTFT/1000, root.Attributes["gen_ai.response.time_to_first_chunk"], 1e-9)
		require.Equal(t, []string{"choose"}, named(t, all, "queue").Events)
		require.Equal(t, kept.Attempts[0].Prefill.Candidate, named(t, all, "queue").EventAttributes["choose"]["evenkeel.prefill.engine"])
		admit := named(t, all, "pool_wait").EventAttributes["admit"]
		require.Equal(t, kept.Attempts[0].Decode.Rank, admit["evenkeel.decode.rank"])
		require.Len(t, admit["evenkeel.decode.best"], 2)
		require.Equal(t, []string{"first token"}, named(t, all, "decode").Events)

		require.Equal(t, "00-"+trace+"-"+named(t, all, "probe").ID+"-01", ears.leg("-p").Get("Traceparent"))
		require.Equal(t, "00-"+trace+"-"+named(t, all, "decode").ID+"-01", ears.leg("-d").Get("Traceparent"))
		require.Equal(t, "vendor=x", ears.leg("-d").Get("Tracestate"))
		for _, s := range all {
			for _, v := range s.Attributes {
				require.NotContains(t, fmt.Sprint(v), "a traced one", "no word of the prompt")
			}
		}
	})
	t.Run("the request log names its trace", func(t *testing.T) {
		r := c.Post(refclient.ChatPath, chat("logged", ""), "X-Request-Id", "theirs")
		require.Equal(t, http.StatusOK, r.Status)
		kept := c.receipt("theirs")
		var line struct {
			ID       string `json:"id"`
			ClientID string `json:"client_id"`
			TraceID  string `json:"trace_id"`
		}
		for scan := bufio.NewScanner(openFile(t, c.RequestLog)); line.ID != kept.ID; {
			require.True(t, scan.Scan())
			require.NoError(t, json.Unmarshal(scan.Bytes(), &line))
		}
		require.Equal(t, []string{kept.ID, "theirs", kept.TraceID}, []string{line.ID, line.ClientID, line.TraceID})
	})
	t.Run("a client that leaves is no error", func(t *testing.T) {
		leave := c.Endless("X-Request-Id", "leaver")
		trace := c.decisions("?id=leaver")[0].TraceID
		leave()
		all := c.spans(col, trace)
		require.NotContains(t, tracetest.Tree(all), "!", "nothing of ours failed")
		root := named(t, all, "chat ref")
		require.Equal(t, "client_closed", root.Attributes["error.type"])
		require.Equal(t, "client_closed", named(t, all, "relay").Attributes["error.type"])
	})
	t.Run("a retry is a span of its own", func(t *testing.T) {
		require.NoError(t, c.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
		var id string
		c.Eventually("a request meets the busy engine first", func() bool {
			r := c.Post(refclient.ChatPath, chat("again", `"max_tokens":2,`))
			require.Equal(t, http.StatusOK, r.Status, r.Body)
			id = r.Header.Get("X-Request-Id")
			return len(c.receipt(id).Attempts) > 1
		})
		require.NoError(t, c.Prefill[0].SetFaults())
		all := c.spans(col, c.receipt(id).TraceID)
		require.Equal(t, `chat ref (server)
  parse (internal)
  attempt (internal) !
    queue (internal)
    probe (client) !
  attempt (internal)
    queue (internal)
    probe (client)
    pool_wait (internal)
    decode (client)
      transfer (internal)
      relay (internal)
`, tracetest.Tree(all))
		probe := named(t, all, "probe")
		require.Contains(t, probe.Error, "503")
		require.Equal(t, "prefill_unavailable", probe.Attributes["error.type"])
		line := c.logs.FilterMessage("an attempt failed, and the request is tried again").All()
		require.NotEmpty(t, line)
		require.NotEmpty(t, line[0].ContextMap()["trace_id"], "the log says which trace it is of")
	})
	t.Run("an answer that goes on elsewhere is two attempts", func(t *testing.T) {
		for _, e := range c.Decode { // the first one that has it loses it, and the other does not
			require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 5}))
		}
		r := c.Post("/v1/completions", completion("goes on", `"stream":true,"max_tokens":8,`))
		for _, e := range c.Decode {
			require.NoError(t, e.SetFaults())
		}
		require.Equal(t, http.StatusOK, r.Status)
		kept := c.receipt(r.Header.Get("X-Request-Id"))
		require.Equal(t, "ok", kept.Outcome)
		all := c.spans(col, kept.TraceID)
		tree := tracetest.Tree(all)
		require.Contains(t, tree, "      relay (internal) !\n  attempt (internal)", tree)
		require.Equal(t, "text_completion ref", named(t, all, "text_completion ref").Name)
		require.Empty(t, named(t, all, "text_completion ref").Error, "the client has a whole answer")
		require.Contains(t, kept.Attempts[0].Cause, "lost in the middle")
		require.True(t, kept.Attempts[0].Again)
	})
	t.Run("one that fails is a failed span", func(t *testing.T) {
		for _, e := range c.Prefill {
			require.NoError(t, e.SetFaults(refengine.Rule{Fault: refengine.Internal}))
		}
		r := c.Post(refclient.ChatPath, chat("fails", ""))
		require.Equal(t, http.StatusBadGateway, r.Status)
		all := c.spans(col, c.receipt(r.Header.Get("X-Request-Id")).TraceID)
		root := named(t, all, "chat ref")
		require.NotEmpty(t, root.Error)
		require.Equal(t, "prefill_failed", root.Attributes["error.type"])
		require.EqualValues(t, http.StatusBadGateway, root.Attributes["http.response.status_code"])

		r = c.Post(refclient.ChatPath, strings.Replace(chat("x", ""), model, "none", 1))
		root = named(t, c.spans(col, c.receipt(r.Header.Get("X-Request-Id")).TraceID), "chat none")
		require.Empty(t, root.Error, "the client's fault is none of ours")
		require.Equal(t, "model_not_found", root.Attributes["error.type"])
	})
}

func TestTracingFollowsAReload(t *testing.T) {
	t.Parallel()
	col := tracetest.Start(t)
	write := func(c *cluster, more string) string {
		return fmt.Sprintf("listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0}\nself_test: false\nengines:\n  prefill: [{url: %q}]\n  decode: "+
			"[{url: %q, slots: 8}]\n%s", c.Prefill[0].URLs()[0], c.Decode[0].URLs()[0], more)
	}
	var ears heard
	c := start(t, options{
		prefill: []refengine.Config{{Hooks: refengine.Hooks{OnRequest: ears.note}}},
		decode:  []refengine.Config{{Hooks: refengine.Hooks{OnRequest: ears.note}}},
		file:    func(c *cluster) string { return write(c, "") },
	})
	without := c.Post(refclient.ChatPath, chat("one", ""), "Traceparent", "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	require.Equal(t, http.StatusOK, without.Status)
	require.Empty(t, col.Spans())
	require.Empty(t, c.receipt(without.Header.Get("X-Request-Id")).TraceID)
	for _, leg := range []string{"-p", "-d"} {
		h := ears.leg(leg)
		require.NotNil(t, h)
		for _, name := range []string{"Traceparent", "Tracestate", "Baggage"} {
			require.Empty(t, h.Values(name), "without tracing engines get no headers of it")
		}
	}
	c.write(write(c, fmt.Sprintf("tracing: {endpoint: %q, sample: 1, headers: {x-token: secret}}\n", col.URL)))
	said := c.Ask(http.MethodPost, c.admin+"/reload", "")
	require.Equal(t, http.StatusOK, said.Status, said.Body)
	require.NotContains(t, said.Body, "secret")
	require.NotContains(t, said.Body, "needs_restart")
	r := c.Post(refclient.ChatPath, chat("two", ""))
	trace := c.receipt(r.Header.Get("X-Request-Id")).TraceID
	c.write(write(c, ""))
	require.Equal(t, http.StatusOK, c.Ask(http.MethodPost, c.admin+"/reload", "").Status)
	c.spans(col, trace) // what was traced is exported all the same
	require.Equal(t, "secret", col.Headers().Get("X-Token"))
	r = c.Post(refclient.ChatPath, chat("three", ""))
	require.Empty(t, c.receipt(r.Header.Get("X-Request-Id")).TraceID)
	require.Contains(t, c.Ask(http.MethodPost, c.admin+"/reload?dry=1", "").Body, "outcome")

	// Any caller's flag does not force sampling.
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c.write(write(c, fmt.Sprintf("keys_file: %q\ntracing: {endpoint: %q, sample: 0}\n", file, col.URL)))
	require.Equal(t, http.StatusOK, c.Ask(http.MethodPost, c.admin+"/reload", "").Status)
	const teams, ops = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "00-2af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	body := chat("whose", `"max_tokens":2,`)
	require.Equal(t, http.StatusOK, c.Post(refclient.ChatPath, body, "Authorization", "Bearer ek-team", "Traceparent", teams).Status)
	require.Equal(t, teams[:35], ears.leg("-d").Get("Traceparent")[:35], "the trace goes on")
	require.Equal(t, "00", ears.leg("-d").Get("Traceparent")[53:], "and engines are told that it is not sampled")
	require.Equal(t, http.StatusOK, c.Post(refclient.ChatPath, body, "Authorization", "Bearer ek-ops", "Traceparent", ops).Status)
	c.spans(col, ops[3:35])
	require.False(t, slices.ContainsFunc(col.Spans(), func(s tracetest.Span) bool { return s.Trace == teams[3:35] }))
}

func openFile(t *testing.T, name string) io.Reader {
	t.Helper()
	f, err := os.Open(name)
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

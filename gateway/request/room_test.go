package request

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// refused is the code of a refusal that says when to come back.
func refused(t *testing.T, r reply, status int) string {
	t.Helper()
	require.Equal(t, status, r.status, r.body)
	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		require.NotEmpty(t, r.header.Get("Retry-After"))
	}
	_, _, fail := read(t, r)
	return fail
}

// Hand-offs that no decode rank fetches fill a prefill engine's KV cache: new prompts wait, and are
// refused when that takes too long.
func TestPrefillMemoryIsTaken(t *testing.T) {
	t.Parallel()
	b, free := full(t, setup{prefill: []refengine.Config{{KV: refengine.KV{Tokens: 2048}}},
		configure: func(c *config.Config, _ *Deps) { c.Prefill.Queue.Timeout = 200 * time.Millisecond }})
	leave, wait := b.send(chat(reftext.MakePrompt(1, 1900), ""))
	pooled(b, 1)
	require.Equal(t, "prefill_kv_exhausted", refused(t, b.post(mooncake.Chat.Path(), chat("one two", "")), http.StatusServiceUnavailable))
	leave()
	wait()
	free()
	b.eventually("room again", func() bool { return b.judge("one two", "") == "right" })
	b.clean()
}

// A prompt that no rank's KV cache can hold is refused, once it was counted.
func TestAPromptThatFitsNoRank(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: []refengine.Config{{KV: refengine.KV{Tokens: 1024}}}})
	require.Equal(t, "prompt_too_long", refused(t, b.post(mooncake.Chat.Path(), chat(reftext.MakePrompt(1, 2000), "")), http.StatusBadRequest))
	require.Equal(t, "right", b.judge("one two", ""))
	b.settle()
}

// A full arrival queue refuses at once, all legs of a request together, and one that is not full
// refuses in the end.
func TestTheArrivalQueueIsFullOrTooSlow(t *testing.T) {
	t.Parallel()
	b := start(t, setup{configure: func(c *config.Config, _ *Deps) {
		c.Pool.Size, c.Prefill.Queue.Max, c.Prefill.Queue.Timeout = 1, 3, 2*time.Second
	}})
	require.NoError(t, b.p[0].SetFaults(standing))
	first := b.judging("has the only place", "")
	b.eventually("the place is taken", func() bool { return b.Places.Used() == 1 && b.p[0].Stats().Running == 1 })
	for _, more := range []string{`"n":4,`, `"n":4,"stream":true,`} {
		require.Equal(t, "queue_full", refused(t, b.post(mooncake.Chat.Path(), chat("a", more)), http.StatusTooManyRequests))
		require.Zero(t, b.Prefill.Waiting(refModel), "no leg stays")
	}
	legs := make(chan reply, 1)
	go func() { legs <- b.post(mooncake.Chat.Path(), chat("a", `"n":3,`)) }()
	b.eventually("each leg takes a place", func() bool { return b.Prefill.Waiting(refModel) == 3 })
	require.Equal(t, "queue_full", refused(t, b.post(mooncake.Chat.Path(), chat("a", "")), http.StatusTooManyRequests))
	require.Equal(t, "queue_timeout", refused(t, <-legs, http.StatusServiceUnavailable))
	require.NoError(t, b.p[0].SetFaults())
	require.Equal(t, "right", <-first)
	require.Equal(t, "right", b.judge("another one", `"n":2,"seed":5,`))
	b.clean()
}

// A prompt and its answer that pass the context together are the decode engine's to judge: it cuts
// the answer, or it refuses, and then no prefill is paid for.
func TestBeyondTheContext(t *testing.T) {
	t.Parallel()
	const context, prompt = 200, 190
	text := reftext.MakePrompt(9, prompt)
	ids := "[" + strings.TrimSuffix(strings.Repeat("7,", prompt), ",") + "]"
	bodies := map[string]func(more string) (path, body string){
		"chat": func(more string) (string, string) { return mooncake.Chat.Path(), chat(text, more) },
		"text": func(more string) (string, string) { return mooncake.Completions.Path(), completion(text, more) },
		"token ids": func(more string) (string, string) {
			return mooncake.Completions.Path(), strings.Replace(completion("x", more), `"x"`, ids, 1)
		},
		"two prompts": func(more string) (string, string) {
			return mooncake.Completions.Path(), strings.Replace(completion("x", more), `"x"`, fmt.Sprintf(`["a b",%q]`, text), 1)
		},
	}
	for _, row := range []struct {
		name    string
		version string
		clamps  bool // so the proxy believes
		silent  bool // no engine tells how long a prompt is
		ok      bool
		probes  int // of a request of one prompt
	}{
		{"vLLM 0.32 cuts the answer", "0.32.0", true, false, true, 1},
		{"vLLM 0.31 refuses it", "0.31.0", false, false, false, 0},
		{"a profile says more of 0.31 than is true", "0.31.0", true, false, false, 1},
		{"a profile says less of 0.32", "0.32.0", false, false, false, 0},
		{"the prefill engine counts what nobody tells", "0.31.0", false, true, false, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			e := []refengine.Config{{Model: refengine.Model{MaxLen: context}, Version: row.version}}
			b := start(t, setup{prefill: e, decode: e, configure: func(c *config.Config, _ *Deps) {
				if c.Prefill.Index.TokenizeTimeout = patience; row.silent {
					c.Prefill.Index.TokenizeTimeout = time.Nanosecond
				}
			}})
			b.route.MaxLen, b.route.Clamps, b.engines.counts = context, row.clamps, b.fill[0]
			for name, body := range bodies {
				for _, stream := range []string{"", `"stream":true,`} {
					b.over()
					before := b.probes()
					path, request := body(stream + `"max_tokens":50,"ignore_eos":true,`)
					r := b.post(path, request)
					// the other one's answer had begun before an engine refused this one
					if !row.ok && r.status == http.StatusOK && row.probes > 0 && name == "two prompts" && stream != "" {
						_, _, fail := readAll(t, r)
						require.Contains(t, []string{"engine_refused", "context_length_exceeded"}, fail)
						continue
					}
					if !row.ok {
						require.Equal(t, http.StatusBadRequest, r.status, r.body)
						if row.version == "0.31.0" && !row.clamps {
							require.Contains(t, r.body, `"context_length_exceeded"`)
						}
						if name != "two prompts" && (name != "token ids" || !row.silent) {
							require.Equal(t, row.probes, b.probes()-before, name)
						}
						continue
					}
					require.Equal(t, http.StatusOK, r.status, r.body)
					require.Contains(t, r.body, `"finish_reason":"length"`)
					if name == "chat" {
						rendered, err := reftext.Render(true, []byte(chat(text, "")))
						require.NoError(t, err)
						got, _, _ := read(t, r)
						require.Equal(t, context-rendered.Tokens(), right(t, rendered.Answer, got))
					}
				}
			}
			b.settle()
		})
	}
}

// No engine gives more than its whole context, whatever the prompt: the prefill engine, which is
// asked for one token, would not notice. How long a prompt is one engine is asked once, however
// many answers the request is to have.
func TestMoreThanTheWholeContext(t *testing.T) {
	t.Parallel()
	for _, clamps := range []bool{false, true} {
		t.Run(fmt.Sprint(clamps), func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int64
			e := []refengine.Config{{Model: refengine.Model{MaxLen: 200}, Version: map[bool]string{false: "0.31.0", true: "0.32.0"}[clamps]}}
			count := refengine.Config{Model: refengine.Model{MaxLen: 200}, Hooks: refengine.Hooks{OnRequest: func(path string, _ http.Header) {
				if path == "/tokenize" {
					asked.Add(1)
				}
			}}}
			b := start(t, setup{prefill: append(e, count), decode: e,
				configure: func(c *config.Config, _ *Deps) { c.Prefill.Index.TokenizeTimeout = patience }})
			b.route.MaxLen, b.route.Clamps, b.engines.counts = 200, clamps, b.fill[1]
			for _, more := range []string{`"max_tokens":201,`, `"max_completion_tokens":201,`} {
				require.Equal(t, "context_length_exceeded", refused(t, b.post(mooncake.Chat.Path(), chat("hello", more)), http.StatusBadRequest))
			}
			require.Zero(t, b.probes())
			require.Equal(t, http.StatusOK, b.post(mooncake.Chat.Path(), chat("hello", `"max_tokens":190,`)).status)
			require.Equal(t, 1, b.probes())
			before := asked.Load()
			r := b.post(mooncake.Chat.Path(), chat(reftext.MakePrompt(9, 100), `"n":8,"max_tokens":50,`)) // it fits, but has more bytes than it may have tokens
			require.Equal(t, http.StatusOK, r.status, r.body)
			require.Equal(t, map[bool]int64{false: 1, true: 0}[clamps], asked.Load()-before)
			b.settle()
		})
	}
}

// The end of a proxy waits until the hand-off of a request that was refused after its prefill is
// discarded.
func TestTheEndWaitsForDiscards(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: []refengine.Config{{KV: refengine.KV{TransferBase: time.Second}}},
		configure: func(c *config.Config, _ *Deps) { c.Limits.DrainTimeout = patience }})
	b.route.MaxLen = 131072
	r := b.post(mooncake.Chat.Path(), chat("a", `"max_tokens":131072,`))
	require.Equal(t, http.StatusBadRequest, r.status, "longer than the context, found out after prefill")
	require.Equal(t, 1, b.pins())
	b.settle()
	require.Zero(t, b.pins())
}

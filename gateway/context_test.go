package gateway_test

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

// A prompt and its answer that pass the context together are the decode engine's to
// judge: it cuts the answer, or it refuses, and then no prefill is paid for.
func TestBeyondTheContext(t *testing.T) {
	t.Parallel()
	const context, prompt = 200, 190
	text := reftext.MakePrompt(9, prompt)
	ids := "[" + strings.TrimSuffix(strings.Repeat("7,", prompt), ",") + "]"
	bodies := map[string]func(more string) (path, body string){
		"chat": func(more string) (string, string) { return chatPath, chat(text, more) },
		"text": func(more string) (string, string) { return completionPath, completion(text, more) },
		"token ids": func(more string) (string, string) {
			return completionPath, strings.Replace(completion("x", more), `"x"`, ids, 1)
		},
		"two prompts": func(more string) (string, string) {
			return completionPath, strings.Replace(completion("x", more), `"x"`, fmt.Sprintf(`["a b",%q]`, text), 1)
		},
	}
	for _, row := range []struct {
		name    string
		version string
		clamps  *bool // what the profile says
		silent  bool  // nobody tells how long a prompt is
		ok      bool
		probes  int64 // of a request of one prompt
	}{
		{"vLLM 0.32 cuts the answer", "0.32.0", nil, false, true, 1},
		{"vLLM 0.31 refuses it", "0.31.0", nil, false, false, 0},
		{"a profile knows better than 0.31", "0.31.0", new(true), false, false, 1},
		{"a profile knows better than 0.32", "0.32.0", new(false), false, false, 0},
		{"the prefill engine counts what nobody tells", "0.31.0", nil, true, false, 1},
		{"of an unknown version, the engine decides", "dev", nil, false, true, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			e := refengine.Config{MaxModelLen: context, Version: row.version}
			c := start(t, options{
				prefill: []refengine.Config{e}, decode: []refengine.Config{e}, dirty: true, profile: mooncake.Profile{ClampsMaxTokens: row.clamps},
				configure: func(cfg *config.Config) {
					if cfg.Prefill.Index.TokenizeTimeout = patience; row.silent {
						cfg.Prefill.Index.TokenizeTimeout = time.Nanosecond
					}
				},
			})
			for name, body := range bodies {
				for _, stream := range []string{"", `"stream":true,`} {
					c.eventually("no leg of the request before is under way", func() bool { return c.sum("evenkeel_prefill_inflight_requests") == 0 })
					before := c.prefill[0].Stats().Probes
					r := c.post(body(stream + `"max_tokens":50,"ignore_eos":true,`))
					if !row.ok && r.status == 200 && row.probes > 0 && name == "two prompts" && stream != "" { // the other one's answer had begun before an engine refused this one
						require.Contains(t, []string{"engine_refused", "context_length_exceeded"}, read(t, r.body).fail)
						continue
					}
					if !row.ok {
						require.Equal(t, 400, r.status, r.body)
						if row.clamps == nil {
							require.Contains(t, r.body, `"context_length_exceeded"`)
						}
						if name != "two prompts" && (name != "token ids" || !row.silent) {
							require.Equal(t, row.probes, c.prefill[0].Stats().Probes-before, name)
						}
						continue
					}
					require.Equal(t, 200, r.status, r.body)
					require.Contains(t, r.body, `"finish_reason":"length"`)
					if name == "chat" {
						rendered, err := reftext.Render(true, []byte(chat(text, "")))
						require.NoError(t, err)
						require.Equal(t, context-rendered.Tokens(), rightText(t, rendered.Answer, readSeamless(t, r.body).text))
					}
				}
			}
		})
	}
}

// No engine gives more than its whole context, whatever the prompt: the prefill
// engine, which is asked for one token, would not notice.
func TestMoreThanTheWholeContext(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.31.0", "0.32.0"} {
		e := refengine.Config{MaxModelLen: 200, Version: version}
		c := start(t, options{prefill: []refengine.Config{e}, decode: []refengine.Config{e}})
		for _, body := range []string{`"max_tokens":201,`, `"max_completion_tokens":201,`} {
			r := c.post(chatPath, chat("hello", body))
			require.Equal(t, 400, r.status, r.body)
			require.Contains(t, r.body, `"context_length_exceeded"`)
		}
		require.Equal(t, 200, c.post(chatPath, chat("hello", `"max_tokens":190,`)).status)
		require.EqualValues(t, 1, c.prefill[0].Stats().Probes)
	}
}

// An engine is asked once how long a prompt is, however many answers it is to have.
func TestTheLengthOfAPromptIsAskedOnce(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	var bird atomic.Pointer[parrot]
	bird.Store(new(parrot(func(_ http.ResponseWriter, body string) bool {
		if !strings.Contains(body, "kv_transfer_params") { // it is no probe
			asked.Add(1)
		}
		return false
	})))
	e := refengine.Config{MaxModelLen: 200, Version: "0.31.0"}
	c := start(t, options{prefill: []refengine.Config{e}, decode: []refengine.Config{e}, dirty: true, configure: func(cfg *config.Config) {
		cfg.Prefill.Index.TokenizeTimeout = patience
		inFront(t, &cfg.Engines.Prefill[0], &bird)
	}})
	r := c.post(chatPath, chat(reftext.MakePrompt(9, 100), `"n":8,"max_tokens":50,`)) // it fits, but has more bytes than it may have tokens
	require.Equal(t, 200, r.status, r.body)
	require.EqualValues(t, 1, asked.Load())
}

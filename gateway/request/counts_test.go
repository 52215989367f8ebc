package request

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// textEvent is an event of a completion that tells nothing of its tokens.
const textEvent = `data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"text":"x","finish_reason":null}]}` + "\n\n"

func lastText(tokens int) string {
	return fmt.Sprintf(`data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"text":"","finish_reason":"stop"}]}`+"\n\n"+
		`data: {"id":"d","created":1,"model":"ref","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d}}`+"\n\n", tokens) + doneEvent
}

// Engines take 16 for a max_tokens that is not there. One that is null is there, and
// the answer then has what the context leaves.
func TestAMaxTokensOfNullIsNoLimit(t *testing.T) {
	t.Parallel()
	const tokens = 100
	u := &unruly{}
	u.decode = func(w *script, _ *http.Request) {
		w.send(strings.Repeat(strings.Replace(textEvent, `null}`, `null,"token_ids":[1]}`, 1), tokens))
		w.send(lastText(tokens))
	}
	b := misled(t, u)
	r := b.post(mooncake.Completions.Path(), completion("a", `"stream":true,"max_tokens":null,"min_tokens":20,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.NotContains(t, r.body, `"error"`)
	require.Equal(t, tokens, strings.Count(r.body, `"text":"x"`))
	require.NotContains(t, b.post(mooncake.Completions.Path(), completion("a", `"max_tokens":null,`)).body, `"error"`)

	r = b.post(mooncake.Completions.Path(), completion("a", `"stream":true,`))
	require.Contains(t, r.body, "upstream_broken", "without the key the limit is 16")
	b.settle()
}

// The first event of an echo has the whole prompt, with the logprobs of each token.
func TestAnAnswerMayBeginWithItsPrompt(t *testing.T) {
	t.Parallel()
	u := &unruly{}
	u.probe = func(w http.ResponseWriter) {
		_, _ = io.WriteString(w, handOff("90000", ""))
	}
	u.decode = func(w *script, _ *http.Request) {
		w.send(`data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"text":"prompt","logprobs":{"top_logprobs":[` +
			strings.Repeat(`{"abcdefghij":-1.25},`, 600_000) + `null]},"finish_reason":null}]}` + "\n\n")
		w.send(textEvent + lastText(1))
	}
	b := misled(t, u)
	b.route.PromptLogprobs = true // its decode engines compute such a prompt by themselves
	r := b.post(mooncake.Completions.Path(), completion("hello", `"echo":true,"logprobs":5,"max_tokens":2,"stream":true,`))
	require.Equal(t, http.StatusOK, r.status)
	require.NotContains(t, r.body[max(0, len(r.body)-300):], `"error"`)
	require.Greater(t, len(r.body), 12_600_000)

	r = b.post(mooncake.Completions.Path(), completion("hello", `"logprobs":5,"max_tokens":2,"stream":true,`))
	require.Contains(t, r.body[max(0, len(r.body)-300):], `"error"`, "nobody asked for an echo")
	b.settle()
}

// An event that is too large to be gathered leaves in pieces. If it breaks off, the
// error behind it is an event of its own.
func TestTheErrorBehindABrokenEventIsReadable(t *testing.T) {
	t.Parallel()
	large := strings.Replace(oneEvent, "hi", strings.Repeat("x", 5000), 1)
	endless := strings.Replace(oneEvent, "hi", strings.Repeat("x", 1<<20), 1)
	for name, row := range map[string]string{
		"the engine dies":        large[:4000],
		"the answer has no end":  endless[:len(endless)-40],
		"in the middle of lines": "data: x\n" + large[:4000] + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			u := &unruly{change: func(cfg *config.Config) { cfg.Limits.EventBytes = 1000 }}
			u.decode = func(w *script, _ *http.Request) {
				w.send(oneEvent + row)
				panic(http.ErrAbortHandler)
			}
			b := misled(t, u)
			r := b.post(mooncake.Chat.Path(), chat("a", `"max_tokens":4,"stream":true,`))
			require.Equal(t, http.StatusOK, r.status)
			require.Regexp(t, `xx\n*\n\ndata: \{"error":.*\n\ndata: \[DONE\]\n\n$`, r.body[max(0, len(r.body)-400):])
			b.settle()
		})
	}
}

// A tool call of 500 tokens comes in one chunk. The answers after it are counted by
// what the engine tells of them in the end.
func TestWhatChunksWereTakenForIsNotBilled(t *testing.T) {
	t.Parallel()
	u := &unruly{}
	u.decode = func(w *script, _ *http.Request) {
		if w.n == 1 { // what is learned
			w.send(strings.Repeat(textEvent, 4) + lastText(400))
			return
		}
		w.send(strings.Repeat(textEvent, 100))
		w.send(lastText(100))
	}
	b := misled(t, u)
	for i, want := range []int{400, 100} {
		r := b.post(mooncake.Completions.Path(), completion("a", `"max_tokens":1000,"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		b.over()
		require.Equal(t, want, b.asked[i].Record.OutputTokens)
	}
	b.settle()
}

// Where an engine counts nothing, an answer that was lost has at least one token to
// go: with none left the engine would have ended it.
func TestAGuessedCountEndsNoAnswer(t *testing.T) {
	t.Parallel()
	u, begun := &unruly{}, make(chan struct{})
	prompt := 0
	u.probe = func(w http.ResponseWriter) {
		prompt += 7 // longer by what is out
		_, _ = io.WriteString(w, handOff(strconv.Itoa(prompt), ""))
	}
	u.decode = func(w *script, _ *http.Request) {
		switch w.n {
		case 1: // 8 tokens in a chunk
			w.send(strings.Repeat(textEvent, 5) + lastText(40))
		case 2:
			w.send(strings.Repeat(textEvent, 15))
			<-begun
			w.send(`data: {"id":"d","created":1,"model":"ref","choices":[{"index":0,"text":"","finish_reason":"stop","stop_reason":"recomputed"}]}` + "\n\n")
		default:
			w.send(textEvent + strings.Replace(lastText(1), `"prompt_tokens":7`, `"prompt_tokens":21`, 1))
		}
	}
	b := misled(t, u)
	require.Equal(t, http.StatusOK, b.post(mooncake.Completions.Path(), completion("a", `"max_tokens":50,"stream":true,`)).status)
	b.over()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(b.url+mooncake.Completions.Path(), "application/json", strings.NewReader(completion("a", `"max_tokens":20,"stream":true,`)))
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	_, err = io.ReadFull(resp.Body, make([]byte, len(textEvent)))
	require.NoError(t, err)
	close(begun)
	rest, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NotContains(t, string(rest), `"error"`)
	require.NotContains(t, string(rest), `"length"`)
	require.Equal(t, 15, strings.Count(string(rest), `"text":"x"`), "14 of the first engine's, and one of the second's")
	require.EqualValues(t, 3, u.calls.Load())
	b.settle()
}

// Events that arrive together are heard as one step: on a busy machine a short answer may not be
// enough.
func TestTheBoardHearsTheStepsOfItsEngines(t *testing.T) {
	t.Parallel()
	b := start(t, setup{waits: true})
	seed := uint64(3)
	b.eventually("steps are heard", func() bool {
		seed++
		require.Equal(t, "right", b.judge(reftext.MakePrompt(seed, 40), `"stream":true,`))
		return b.metric(t, "evenkeel_step_seconds", "") > 5
	})
	b.clean()
}

// No engine is believed that counts more tokens in a prompt than its context has: its caller would
// pay for them for ever.
func TestTokensOfAPromptThatThereCannotBe(t *testing.T) {
	t.Parallel()
	const scores = `"echo":true,"logprobs":1,"max_tokens":1,`
	rows := map[string]struct {
		o          setup
		path, body string
	}{
		"of a prefill engine that answers alone": {setup{}, mooncake.Completions.Path(), completion(short, scores)},
		"likewise, streamed":                     {setup{}, mooncake.Completions.Path(), completion(short, scores+`"stream":true,`)},
		"of a beam search": {setup{mixed: []refengine.Config{does(1)}}, mooncake.Chat.Path(),
			chat(short, `"use_beam_search":true,"n":1,"max_tokens":4,`)},
	}
	for _, connector := range earlyConnectors {
		row := rows["of a beam search"]
		row.o, row.body = setup{profile: mooncake.Profile{Connector: connector}}, chat(short, `"stream":true,`)
		rows["of a prefill beside, "+connector] = row
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var liar atomic.Value
			row.o.front = counts1e15("prompt_tokens", &liar)
			b := start(t, row.o)
			paid := b.paid.Load()
			liar.Store(b.engines.ranks[0].Target.URL.Host)
			if row.o.mixed == nil {
				liar.Store(b.fill[0].URL.Host)
			}
			require.NotContains(t, b.post(row.path, row.body).body, "1000000000000000")
			b.over()
			require.Less(t, b.paid.Load()-paid, int64(1000))
			liar.Store("")
			require.Equal(t, http.StatusOK, b.post(row.path, row.body).status, "its next answer is right")
			b.settle()
		})
	}
}

// counts1e15 is the front of a setup: the engine at the host in liar reports 10^15 for a count of
// its usage.
func counts1e15(key string, liar *atomic.Value) func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
	count := regexp.MustCompile(`"` + key + `":\s*\d+`)
	return func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
		if liar.Load() != r.Host {
			engine.ServeHTTP(w, r)
			return
		}
		answer := httptest.NewRecorder()
		engine.ServeHTTP(answer, r)
		w.Header().Set("Content-Type", answer.Header().Get("Content-Type"))
		w.WriteHeader(answer.Code)
		_, _ = w.Write(count.ReplaceAll(answer.Body.Bytes(), []byte(`"`+key+`":1000000000000000`)))
	}
}

// More tokens of a prompt than it has cannot have been cached: neither the client nor the record is
// told that they were.
func TestCachedTokensThatThereCannotBe(t *testing.T) {
	t.Parallel()
	rows := map[string]setup{"of ranks that do both": {mixed: []refengine.Config{does(1)}}}
	for _, connector := range earlyConnectors {
		rows["of a prefill beside, "+connector] = setup{profile: mooncake.Profile{Connector: connector}}
	}
	for name, o := range rows {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var liar atomic.Value
			o.front = counts1e15("cached_tokens", &liar)
			b := start(t, o)
			before := len(b.asked)
			liar.Store(b.engines.ranks[0].Target.URL.Host)
			if o.mixed == nil {
				liar.Store(b.fill[0].URL.Host)
			}
			r := b.post(mooncake.Chat.Path(), chat(short, ""))
			require.Equal(t, http.StatusOK, r.status, r.body)
			if o.mixed == nil {
				require.NotContains(t, r.body, "1000000000000000")
			}
			b.over()
			for _, in := range b.asked[before:] {
				require.Less(t, in.Record.CachedTokens, 1000)
			}
			b.settle()
		})
	}
}

package request

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// fetches is a bed whose engines hand the KV of answers back: decode engines keep it for so long.
func fetches(t *testing.T, keeps time.Duration) *bed {
	return start(t, setup{
		prefill:   []refengine.Config{{Version: "0.33.0", KV: refengine.KV{KeepsAnswers: time.Minute}}},
		decode:    []refengine.Config{{Version: "0.33.0", KV: refengine.KV{KeepsAnswers: keeps}}},
		profile:   mooncake.Profile{Connector: mooncake.NIXLPull, HandBack: mooncake.HandBackFetched, DecoderTTL: time.Minute},
		configure: func(cfg *config.Config, _ *Deps) { cfg.Prefill.Retry.Attempts = 1 }, // to compute what cannot be fetched is no retry
	})
}

// turn asks for an answer to a prompt of token ids, which must be right, and returns prompt and answer.
func (b *bed) turn(prompt []int32, more string) (whole []int32) {
	ids, err := json.Marshal(prompt)
	require.NoError(b.t, err)
	r := b.post(mooncake.Completions.Path(), fmt.Sprintf(`{%s"model":%q,"prompt":%s,"max_tokens":20,"return_token_ids":true}`, more, refModel, ids))
	require.Equal(b.t, http.StatusOK, r.status, r.body)
	require.NotContains(b.t, r.body, "remote_engine_id")
	var got struct {
		Choices []struct {
			IDs []int32 `json:"token_ids"`
		}
	}
	require.NoError(b.t, json.Unmarshal([]byte(r.body), &got), r.body)
	expect(b.t, reftext.OfIDs(prompt, nil).Answer, got.Choices[0].IDs)
	b.over()
	return slices.Concat(prompt, got.Choices[0].IDs)
}

func (b *bed) handBacks() (fetched, failed, none int) {
	of := func(outcome string) int {
		return int(testutil.ToFloat64(b.metrics.handBacks.WithLabelValues(outcome)))
	}
	return of("fetched"), of("failed"), of("none")
}

// The prefill engine fetches what the turn before has left, if the prompt begins with exactly that, and only then.
func TestTheKVOfATurnIsFetched(t *testing.T) {
	begin, later := reftext.Of(reftext.MakePrompt(1, 600)).IDs, reftext.Of(reftext.MakePrompt(2, 50)).IDs
	for name, row := range map[string]struct {
		change  func(prompt []int32) []int32
		more    string // of the second turn
		before  func(b *bed)
		fetched bool
	}{
		"a next turn":                        {fetched: true},
		"one token of the prompt is another": {change: func(p []int32) []int32 { p[3]++; return p }},
		"one token of the answer is another": {change: func(p []int32) []int32 { p[len(begin)+2]++; return p }},
		"less than the turn":                 {change: func(p []int32) []int32 { return p[:len(begin)-4] }},
		"another salt":                       {more: `"cache_salt":"mine",`},
		"another key":                        {before: func(b *bed) { b.key = "other" }},
		"its engine was down meanwhile":      {before: func(b *bed) { b.engines.down = append(b.engines.down, "decode d0") }},
		"its weights are others":             {before: func(b *bed) { b.engines.process = 1 }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := fetches(t, time.Minute)
			said := b.turn(slices.Clone(begin), "")
			b.eventually("it is kept", func() bool { return b.turns.Len() == 1 })
			if row.before != nil {
				row.before(b)
			}
			prompt := slices.Concat(said, later)
			if row.change != nil {
				prompt = row.change(prompt)
			}
			b.turn(prompt, row.more)
			fetched, failed, none := b.handBacks()
			require.Zero(t, failed)
			require.Equal(t, []int{map[bool]int{true: 1}[row.fetched], map[bool]int{true: 1, false: 2}[row.fetched]}, []int{fetched, none})
			require.Zero(t, b.p[0].Stats().KeyMismatches+b.d[0].Stats().KeyMismatches)
			b.settle()
		})
	}
}

// What is no longer there fails the prefill, and the next attempt computes the prompt.
func TestATurnThatIsGoneIsComputed(t *testing.T) {
	t.Parallel()
	b := fetches(t, 50*time.Millisecond)
	said := b.turn(reftext.Of(reftext.MakePrompt(1, 600)).IDs, "")
	b.eventually("it is kept", func() bool { return b.turns.Len() == 1 })
	b.eventually("the engine has given it up", func() bool { return b.d[0].Stats().KVUsed == 0 })
	b.turn(slices.Concat(said, reftext.Of("and then").IDs), "")
	fetched, failed, none := b.handBacks()
	require.Equal(t, []int{0, 1, 1}, []int{fetched, failed, none})
	require.Zero(t, b.Prefill.Status()[0].Failures, "nobody is to blame")
	b.settle()
}

// A chat of many turns is computed once.
func TestAChatIsComputedOnce(t *testing.T) {
	t.Parallel()
	b := fetches(t, time.Minute)
	said := reftext.Of(reftext.MakePrompt(1, 600)).IDs
	for i := range 5 {
		said = b.turn(slices.Concat(said, reftext.Of(strings.Repeat("word ", 20+i)).IDs), "")
	}
	fetched, failed, none := b.handBacks()
	require.Equal(t, []int{4, 0, 1}, []int{fetched, failed, none})
	b.settle()
}

// Turns of token ids are kept, and not those of texts, whose ids nobody has said. In a stream of /inference/v1/generate, vLLM 0.33 does not
// say where the KV is (serve_tokens_stream_generator in entrypoints/scale_out/token_in_token_out/serving.py).
func TestWhoseTurnsAreKept(t *testing.T) {
	t.Parallel()
	b := fetches(t, time.Minute)
	for _, row := range []struct {
		path, body string
		kept       int
	}{
		{mooncake.Completions.Path(), fmt.Sprintf(`{"model":%q,"prompt":[1,2,3,4,5,6,7],"max_tokens":5}`, refModel), 1},
		{mooncake.Completions.Path(), completion("one two three", `"stream":true,"max_tokens":5,`), 0},
		{mooncake.Chat.Path(), chat("one two three", `"stream":true,"max_tokens":5,`), 0},
		{mooncake.Tokens.Path(), fmt.Sprintf(`{"model":%q,"token_ids":[1,2,3,4,5,6,7],"sampling_params":{"max_tokens":5}}`, refModel), 0},
		{mooncake.Completions.Path(), fmt.Sprintf(`{"model":%q,"prompt":[[1,2,3],[4,5,6]],"n":2,"stream":true,"max_tokens":5}`, refModel), 4},
	} {
		before := b.turns.Len()
		r := b.post(row.path, row.body)
		require.Equal(t, http.StatusOK, r.status, r.body)
		b.over()
		require.Equal(t, row.kept, b.turns.Len()-before, row.body)
	}
	b.settle()
}

// A decode engine keeps KV at a host of its own. It may name no other host, although decode engines may fetch KV from there.
func TestATurnIsKeptOnlyAtAHostOfItsEngine(t *testing.T) {
	t.Parallel()
	b := fetches(t, time.Minute)
	b.engines.hostless = true
	b.turn(reftext.Of(reftext.MakePrompt(1, 600)).IDs, "")
	require.Zero(t, b.turns.Len())
	b.settle()
}

// A prefill engine that gives a whole answer itself says that it gave the request back. There is no slot that it could have preempted.
func TestAPrefillEngineThatGivesARequestBackHasFailed(t *testing.T) {
	b := start(t, setup{front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
		if r.URL.Path != mooncake.Completions.Path() {
			engine.ServeHTTP(w, r)
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"id":"x","object":"text_completion","created":1,"model":"ref","choices":[{"index":0,"text":"a",`+
			`"finish_reason":"stop","stop_reason":"recomputed"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}`)
	}})
	r := b.post(mooncake.Completions.Path(), completion("one two three", `"max_tokens":1,"prompt_logprobs":1,`))
	require.Equal(t, http.StatusBadGateway, r.status, r.body)
	require.Contains(t, r.body, "prefill_failed")
	b.settle()
}

// An answer that comes whole, and too late to be believed, leaves no turn: its engine may keep another prompt's KV.
func TestATurnOfALateAnswerIsNotKept(t *testing.T) {
	t.Parallel()
	o := holding(mooncake.NIXLPull, longLease, 0, 20*time.Millisecond)
	o.late, o.decode[0].KV.NoRenewals = true, true
	o.prefill[0].Version, o.prefill[0].KV.KeepsAnswers = "0.33.0", time.Minute
	o.decode[0].Version, o.decode[0].KV.KeepsAnswers = "0.33.0", time.Minute
	o.profile.HandBack, o.profile.DecoderTTL = mooncake.HandBackFetched, time.Minute
	o.front = func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
		if r.URL.Path != mooncake.Completions.Path() {
			engine.ServeHTTP(w, r)
			return
		}
		whole := httptest.NewRecorder()
		engine.ServeHTTP(whole, r)
		maps.Copy(w.Header(), whole.Header())
		w.WriteHeader(whole.Code)
		_, _ = w.Write(whole.Body.Bytes())
	}
	b := start(t, o)
	b.monitor.counts = true
	leave := b.endless()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r := b.post(mooncake.Completions.Path(), fmt.Sprintf(`{"model":%q,"prompt":[1,2,3,4,5,6,7],"max_tokens":1}`, refModel))
		require.Equal(t, http.StatusOK, r.status, r.body)
	}()
	b.eventually("it waits in the engine's queue", func() bool { return b.d[0].Stats().Waiting == 1 })
	b.eventually("the prefill engine has given its KV away", func() bool { return b.p[0].Stats().Leaks == 1 })
	b.monitor.gaveAway(1)
	leave()
	<-done
	b.over()
	require.EqualValues(t, 1, b.metric(t, latePulls, ""))
	require.Equal(t, 1, b.turns.Len(), "only that of the answer that the client has got")
	b.settle()
}

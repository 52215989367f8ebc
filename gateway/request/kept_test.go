package request

import (
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/mooncake"
)

// keeping is a bed whose decode engine keeps the KV of answers for so long.
func keeping(t *testing.T, version string, keeps time.Duration) *bed {
	return start(t, setup{
		decode:  []refengine.Config{{Version: version, KV: refengine.KV{Tokens: 2048, KeepsAnswers: keeps}}},
		profile: mooncake.Profile{Connector: mooncake.NIXLPull, HandBack: mooncake.HandBackCounted, DecoderTTL: keeps},
		waits:   true,
	})
}

// kept is what decode engines keep by the proxy's count.
func (b *bed) kept() (n int64) {
	for _, w := range b.Dispatcher.Status(b.t.Context()).Models[0].Workers {
		n += w.Kept
	}
	return n
}

// Whatever ends an answer, the proxy counts what its engine keeps: an engine has so many tokens in
// whole blocks. vLLM 0.33 says in streams what it keeps, and 0.32 does not.
func TestWhatAnEngineKeepsOfAnAnswerIsCounted(t *testing.T) {
	for _, version := range []string{"0.32.0", "0.33.0"} {
		for name, ask := range map[string]struct {
			path, body string
			keeps      bool
		}{
			"a stream that ends by itself":      {mooncake.Chat.Path(), chat("one two three", `"stream":true,`), true},
			"a stream that its length ends":     {mooncake.Chat.Path(), chat("one two three", `"stream":true,"max_tokens":3,`), true},
			"an answer in one piece":            {mooncake.Chat.Path(), chat("one two three", ""), true},
			"an answer as the engine gives it":  {mooncake.Chat.Path(), chat("one two three", `"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`), true},
			"a completion":                      {mooncake.Completions.Path(), completion("one two three", `"stream":true,`), true},
			"a call of a tool":                  {mooncake.Chat.Path(), chat("one two three", `"stream":true,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`), true},
			"a message":                         {mooncake.Messages.Path(), `{"model":"ref","max_tokens":9,"messages":[{"role":"user","content":"one two three"}]}`, true},
			"a response":                        {mooncake.Responses.Path(), `{"model":"ref","input":"one two three","stream":true}`, true},
			"a stream that a text ends":         {mooncake.Chat.Path(), chat("one two three", `"stream":true,"stop":" ",`), false},
			"an answer in one piece, by a text": {mooncake.Chat.Path(), chat("one two three", `"stop":" ",`), false},
		} {
			t.Run(version+" "+name, func(t *testing.T) {
				t.Parallel()
				b := keeping(t, version, time.Minute)
				got := b.post(ask.path, ask.body)
				require.Equal(t, http.StatusOK, got.status, got.body)
				require.NotContains(t, got.body, "remote_engine_id")
				b.over()
				if !ask.keeps {
					b.eventually("the engine has given it up", func() bool { return b.d[0].Stats().KVUsed == 0 })
					require.Zero(t, b.kept())
					return
				}
				b.eventually("it is counted", func() bool { return b.kept() > 0 })
				used, counted := b.d[0].Stats().KVUsed, b.kept()
				require.True(t, counted <= used && used < counted+128, "the engine has %d tokens of blocks in use, and %d are counted", used, counted)
				b.settle()
			})
		}
	}
}

// A prompt waits for the room that is kept, and gets it when its time is over.
func TestARequestWaitsForWhatAnEngineKeeps(t *testing.T) {
	t.Parallel()
	b := keeping(t, "0.33.0", 3*time.Second)
	require.Equal(t, "right", b.judge(reftext.MakePrompt(1, 1500), `"stream":true,`))
	b.eventually("it is kept", func() bool { return b.kept() > 1500 })
	waits := b.judging(reftext.MakePrompt(2, 1500), `"stream":true,`)
	pooled(b, 1)
	require.Positive(t, b.kept())
	require.Equal(t, "right", <-waits)
	b.eventually("nothing is kept", func() bool { return b.kept() == 0 })
	b.settle()
}

// What an engine keeps is gone with its process.
func TestARestartedEngineKeepsNothing(t *testing.T) {
	t.Parallel()
	b := keeping(t, "0.33.0", time.Minute)
	runs := func(process uint64) {
		b.workers = slices.Clone(b.workers)
		for i := range b.workers {
			b.workers[i].Process = process
		}
		b.Dispatcher.SetWorkers(b.workers)
	}
	runs(1)
	for i := range 3 {
		require.Equal(t, "right", b.judge(fmt.Sprint("prompt ", i), `"stream":true,`))
	}
	b.eventually("it is kept", func() bool { return b.kept() > 0 })
	b.d[0].Kill()
	require.NoError(t, b.d[0].Revive())
	runs(2)
	b.eventually("nothing is kept", func() bool { return b.kept() == 0 })
	require.Zero(t, b.d[0].Stats().KVUsed)
	require.Equal(t, "right", b.judge("the next one", `"stream":true,`))
	b.settle()
}

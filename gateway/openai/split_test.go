package openai

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

// Only an engine that computes a prompt can tell the logprobs of its tokens, and only one that
// makes the whole answer can search it.
func TestWhatCannotBeSplit(t *testing.T) {
	const chats, completes = `{"model":"m","messages":[{"role":"user","content":"x"}],`, `{"model":"m","prompt":"x",`
	for _, row := range []struct {
		name    string
		ep      mooncake.Endpoint
		raw     string
		refused string // where decode engines compute no prompts: the key
		alone   bool   // a prefill engine answers
		anyway  bool   // refused, even where they do
	}{
		{"the prompt's logprobs", mooncake.Chat, chats + `"prompt_logprobs":0}`, "prompt_logprobs", false, false},
		{"of one token", mooncake.Chat, chats + `"prompt_logprobs":2,"max_tokens":1}`, "", true, false},
		{"by the newer key", mooncake.Chat, chats + `"prompt_logprobs":2,"max_tokens":9,"max_completion_tokens":1}`, "", true, false},
		{"of a completion that has 16", mooncake.Completions, completes + `"prompt_logprobs":1}`, "prompt_logprobs", false, false},
		{"none", mooncake.Chat, chats + `"prompt_logprobs":null}`, "", false, false},
		{"an echo with logprobs", mooncake.Completions, completes + `"echo":true,"logprobs":0,"max_tokens":8}`, "echo", false, false},
		{"of one token", mooncake.Completions, completes + `"echo":true,"logprobs":1,"max_tokens":1,"stream":true}`, "", true, false},
		{"of none", mooncake.Completions, completes + `"echo":true,"logprobs":1,"max_tokens":0}`, "", true, false},
		{"an echo alone", mooncake.Completions, completes + `"echo":true,"max_tokens":8}`, "", false, false},
		{"vLLM computes them for each echo of a chat", mooncake.Chat, chats + `"echo":true}`, "echo", false, false},
		{"the logprobs of some tokens", mooncake.Tokens,
			`{"model":"m","token_ids":[1],"sampling_params":{"prompt_logprob_token_ids":[[1]],"max_tokens":8}}`,
			"prompt_logprob_token_ids", false, false},
		{"of no others", mooncake.Tokens,
			`{"model":"m","token_ids":[1],"sampling_params":{"prompt_logprobs":null,"prompt_logprob_token_ids":[[1]],"max_tokens":8}}`,
			"prompt_logprob_token_ids", false, false},
		{"beam search", mooncake.Chat, chats + `"use_beam_search":true,"max_tokens":1}`, "use_beam_search", false, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			for _, computes := range []bool{false, true} {
				r, e := Parse(row.ep, []byte(row.raw), Limits{})
				require.Nil(t, e)
				e = r.CheckSplit(computes)
				require.Equal(t, row.alone, r.PrefillOnly)
				if row.refused == "" || computes && !row.anyway {
					require.Nil(t, e)
					continue
				}
				refusal(t, e, row.refused, CodeUnsupported)
			}
		})
	}
}

func TestABeamSearchIsOneAnswerOfItsEngine(t *testing.T) {
	r, e := Parse(mooncake.Completions, []byte(`{"model":"m","prompt":"x","use_beam_search":true,"n":4,"best_of":1}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, 4, r.Beams)
	require.True(t, r.Passthrough)
	require.Len(t, r.Parts(), 1)
	body := ""
	for _, piece := range (&mooncake.Profile{}).DecodeBody(&r.Body, r.Endpoint, &r.Parts()[0].Patch, nil, "", false, nil) {
		body += string(piece)
	}
	require.JSONEq(t, `{"model":"m","prompt":"x","use_beam_search":true,"n":4,"best_of":1,"stream":false}`, body)
}

// An answer of no tokens is what a completion may have that echoes its prompt.
func TestOnlyAnEchoMayHaveNoTokens(t *testing.T) {
	for raw, param := range map[string]string{
		`{"model":"m","prompt":"x","max_tokens":0,"echo":true}`:  "",
		`{"model":"m","prompt":"x","max_tokens":0,"echo":false}`: "max_tokens",
		`{"model":"m","prompt":"x","max_tokens":0}`:              "max_tokens",
	} {
		_, e := Parse(mooncake.Completions, []byte(raw), Limits{})
		if param == "" {
			require.Nil(t, e, raw)
			continue
		}
		refusal(t, e, param, CodeInvalidValue)
	}
}

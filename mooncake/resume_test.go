package mooncake

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAResumedRequestOnTheWire(t *testing.T) {
	p := Profile{}.WithDefaults()
	kv := json.RawMessage(`{"do_remote_prefill":true,"n":9007199254740993 }`)
	for _, tc := range []struct {
		name          string
		ep            Endpoint
		body          string
		resume        Resume
		probe, decode map[string]string
	}{
		{"a completion has all tokens as its prompt", Completions, `{"prompt":"one","echo":true,"truncate_prompt_tokens":1,"max_tokens":9,"min_tokens":4}`,
			Resume{Method: ResumePrompt, IDs: json.RawMessage(`[1,2]`), Tokens: 3, Limit: 6, LimitKey: "max_tokens"},
			map[string]string{"prompt": "[1,2]", "max_tokens": "1", "min_tokens": "1", "echo": "", "truncate_prompt_tokens": ""},
			map[string]string{"prompt": "[1,2]", "max_tokens": "6", "min_tokens": "1", "echo": "", "truncate_prompt_tokens": "",
				"kv_transfer_params": string(kv)}},
		{"a chat has them beside the hand-off", Chat, `{"messages":[1],"max_completion_tokens":9,"min_tokens":2}`,
			Resume{Method: ChatResumeVLLM, IDs: json.RawMessage(`[1,2]`), Tokens: 3, Limit: 6, LimitKey: "max_completion_tokens"},
			map[string]string{"messages": "[1]", "max_completion_tokens": "1", "kv_transfer_params": string(pullProbe[:len(pullProbe)-1]) + `,"prompt_token_ids":[1,2]}`},
			map[string]string{"messages": "[1]", "max_completion_tokens": "6", "min_tokens": "0", "kv_transfer_params": `{"do_remote_prefill":true,"n":9007199254740993,"prompt_token_ids":[1,2]}`}},
		{"of vllm-ascend under the keys of all its versions", Chat, `{"messages":[1]}`, Resume{Method: ChatResumeAscend, IDs: json.RawMessage(`[1]`), Tokens: 1},
			map[string]string{"max_tokens": "1"},
			map[string]string{"max_tokens": "", "kv_transfer_params": `{"do_remote_prefill":true,"n":9007199254740993,"_vllm_ascend_recompute_token_ids":[1],"prompt_token_ids":[1]}`}},
		{"or its text as a last message", Chat, `{"messages":[{"role":"user","content":"a"} ]}`, Resume{Method: ChatResumeContinue, Text: json.RawMessage(`"so \u00e9"`), Tokens: 2},
			map[string]string{"messages": `[{"role":"user","content":"a"},{"role":"assistant","content":"so \u00e9"}]`, "continue_final_message": "true", "add_generation_prompt": "false"},
			map[string]string{"messages": `[{"role":"user","content":"a"},{"role":"assistant","content":"so \u00e9"}]`, "continue_final_message": "true", "add_generation_prompt": "false", "kv_transfer_params": string(kv)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, err := ScanBody([]byte(tc.body), 0)
			require.NoError(t, err)
			leg := &Patch{Resume: &tc.resume}
			for name, side := range map[string]struct {
				got  [][]byte
				want map[string]string
			}{
				"probe":  {p.ProbeBody(&b, tc.ep, leg, nil, nil), tc.probe},
				"decode": {p.DecodeBody(&b, tc.ep, leg, kv, "", true, nil), tc.decode},
			} {
				text := bytes.Join(side.got, nil)
				sent, err := ScanBody(text, 0)
				require.NoError(t, err, "%s", text)
				for key, want := range side.want {
					v, _ := sent.Get(key)
					require.Equal(t, want, string(v), "%s: %s", name, key)
					require.LessOrEqual(t, sent.Count(key), 1)
				}
			}
			drain, err := ScanBody(bytes.Join(p.DiscardBody(&b, tc.ep, leg, kv, "salt", nil), nil), 0)
			require.NoError(t, err)
			limit, _ := drain.Get("max_tokens")
			require.Equal(t, "1", string(limit))
		})
	}
}

func TestCountIDs(t *testing.T) {
	for list, want := range map[string]int{"": 0, "[]": 0, "[ ]": 0, "[\n]": 0, "[5]": 1, "[ 5 , 6 ]": 2} {
		require.Equal(t, want, CountIDs(json.RawMessage(list)), list)
	}
}

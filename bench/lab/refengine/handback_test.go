package refengine

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// A decode engine with bidirectional_kv_xfer keeps the KV of what its core ends. An answer in one
// piece says so, and from 0.33 on the last chunk of a stream.
func TestTheKVOfAnAnswerIsKept(t *testing.T) {
	for _, row := range []struct {
		name, version, more string
		keeps, says         bool
	}{
		{"a stream of 0.33", "0.33.0", `"stream":true,"max_tokens":5,`, true, true},
		{"a stream of 0.32", "0.32.0", `"stream":true,"max_tokens":5,`, true, false},
		{"a call of a tool", "0.33.0", `"stream":true,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required",`, true, true},
		{"an answer in one piece of 0.32", "0.32.0", `"max_tokens":5,`, true, true},
		{"an answer that a text ends", "0.33.0", `"stream":true,"stop":" ",`, false, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := pairOf(t, Config{Connector: NIXLPull, Version: row.version, KV: KV{KeepsAnswers: 300 * time.Millisecond}})
			r := do(p.c, "POST", p.d.URLs()[0]+"/v1/chat/completions", chatBody("one two", decodeMore(probe(t, p.c, p.p, "one two"), row.more)))
			require.Equal(t, 200, r.status, r.body)
			require.Equal(t, row.says, strings.Contains(r.body, `"do_remote_decode":true,"remote_block_ids":[[`), r.body)
			if row.says && strings.Contains(row.more, "max_tokens") {
				require.Contains(t, r.body, `"remote_num_tokens":6,`, "the last token has no KV")
			}
			if row.keeps {
				require.Positive(t, p.d.Stats().KVUsed)
			}
			p.nothingHeld()
		})
	}
}

func TestKeptKVHasItsRoom(t *testing.T) {
	p := pairOf(t, Config{Connector: NIXLPull, KV: KV{Tokens: 2048, KeepsAnswers: time.Second}})
	serve := func(seed uint64) reply {
		prompt := reftext.MakePrompt(seed, 1500)
		return do(p.c, "POST", p.d.URLs()[0]+"/v1/chat/completions", chatBody(prompt, decodeMore(probe(t, p.c, p.p, prompt), `"max_tokens":2,`)))
	}
	require.Equal(t, 200, serve(1).status)
	require.Positive(t, p.d.Stats().KVUsed)
	second := make(chan reply)
	go func() { second <- serve(2) }()
	eventually(t, "another one waits for its room", func() bool { return p.d.Stats().Waiting == 1 })
	require.Equal(t, 200, (<-second).status)
	p.nothingHeld()
}

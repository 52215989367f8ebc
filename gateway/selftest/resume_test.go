package selftest

import (
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/mooncake"
)

// The probe finds what chat_resume must be: a way that the engines do not know is a warning with
// the one that they know.
func TestHowChatsGoOnIsFound(t *testing.T) {
	const breaks = "decode: a chat that breaks off ends with an error"
	for _, tc := range []struct {
		name      string
		connector refengine.Connector
		resume    string // empty: the connector's default
		engine    refengine.Config
		level     Level
		says      string
	}{
		{"vllm-ascend 0.26 has a key of its own", refengine.AscendMooncake, "", refengine.Config{Version: "0.26.0"}, OK, "decode: a chat that breaks off goes on (chat_resume: ascend_private)"},
		{"vllm-ascend 0.27 has vLLM's", refengine.AscendMooncake, "", refengine.Config{Version: "0.27.1"}, OK, "decode: a chat that breaks off goes on (chat_resume: ascend_private)"},
		{"and its layerwise connector, too", refengine.AscendLayerwise, "", refengine.Config{Version: "0.27.1"}, OK, "decode: a chat that breaks off goes on (chat_resume: ascend_private)"},
		{"vllm-ascend before 0.26 has none", refengine.AscendMooncake, "", refengine.Config{Version: "0.23.0"}, Warn,
			breaks + ": chat_resume is ascend_private, and with it the prefill engine overlooked the answer so far: it counted "},
		{"so that its text has to do", refengine.AscendMooncake, "", refengine.Config{Version: "0.23.0"}, Warn, "; set chat_resume: continue_final_message in its profile"},
		{"vLLM's key is not read by vllm-ascend 0.26", refengine.AscendMooncake, mooncake.ChatResumeVLLM, refengine.Config{Version: "0.26.0"}, Warn, "; set chat_resume: ascend_private in its profile"},
		{"engines that tell no token ids", refengine.AscendMooncake, "", refengine.Config{Answers: refengine.Answers{NoTokenIDs: true}}, Warn,
			"the prefill engine does not tell the prompt's token ids"},
		{"an operator said none", refengine.AscendMooncake, mooncake.ChatResumeNone, refengine.Config{}, OK, breaks + ", because chat_resume is none; these engines go on with chat_resume: ascend_private"},
		{"vLLM whose profile says nothing", refengine.NIXLPull, "", refengine.Config{}, OK, breaks + ", because chat_resume is none; these engines go on with chat_resume: vllm_prompt_token_ids"},
		{"vLLM before 0.27", refengine.NIXLPull, mooncake.ChatResumeVLLM, refengine.Config{Version: "0.26.0"}, Warn, "; set chat_resume: continue_final_message in its profile"},
		{"vLLM that pushes", refengine.NIXLPush, mooncake.ChatResumeVLLM, refengine.Config{}, OK, "decode: a chat that breaks off goes on (chat_resume: vllm_prompt_token_ids)"},
		{"SGLang", refengine.SGLang, "", refengine.Config{}, OK, breaks + ", because chat_resume is none; these engines go on with chat_resume: continue_final_message"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := tc.engine
			c.Connector, c.Role = tc.connector, refengine.Prefill
			p := start(t, c)
			c.Role = refengine.Decode
			d := start(t, c)
			cfg := meeting(t, tc.connector, p, d)
			for name, profile := range cfg.Profiles {
				if tc.resume != "" {
					profile.ChatResume = tc.resume
				}
				cfg.Profiles[name] = profile
			}
			found := Run(t.Context(), cfg, Options{Resumes: true})
			require.Empty(t, pick(found, Bad))
			require.Contains(t, strings.Join(pick(found, tc.level), "\n"), tc.says)
			require.Eventually(t, func() bool { return p.Stats().Pins == 0 && d.Stats().Stranded() == 0 }, 30*time.Second, time.Millisecond,
				"nothing is left at the engines")
			require.Zero(t, p.Stats().Leaks+p.Stats().Aborted+d.Stats().Aborted+d.Stats().KeyMismatches)
		})
	}
}

// A pair that fails a completion is not asked for chats, and one that has no chats is no failure.
func TestWhereNoChatGoesOn(t *testing.T) {
	var asked atomic.Int64
	heard := func(path string, _ http.Header) {
		if path == mooncake.Chat.Path() {
			asked.Add(1)
		}
	}
	p := start(t, refengine.Config{Role: refengine.Prefill, Hooks: refengine.Hooks{OnRequest: heard},
		Faults: []refengine.Rule{{Fault: refengine.Internal}}})
	d := start(t, refengine.Config{Role: refengine.Decode})
	found := Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()), Options{Resumes: true})
	require.NotEmpty(t, pick(found, Bad))
	require.Zero(t, asked.Load())
	require.NoError(t, p.SetFaults(refengine.Rule{Fault: refengine.Internal, Skip: 1}))
	found = Run(t.Context(), cluster(t, mooncake.Profile{}, p.URLs(), d.URLs()), Options{Resumes: true})
	require.Empty(t, pick(found, Bad))
	require.Contains(t, strings.Join(pick(found, OK), "\n"), "decode: does not answer a chat (a probe was answered with 500: ")
	require.EqualValues(t, 1, asked.Load())
}

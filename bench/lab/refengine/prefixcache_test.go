package refengine

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

func TestACacheUnderPressureReportsWhatIsLeft(t *testing.T) {
	e := start(t, Config{Role: Prefill, KV: KV{PrefixCache: 5}, Answers: Answers{PromptTokensDetails: true}})
	c := client(t)
	cached := func(seed uint64, tokens int) int {
		r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody(reftext.MakePrompt(seed, tokens), probeMore))
		var got struct{ Usage usage }
		require.NoError(t, json.Unmarshal([]byte(r.body), &got), r.body)
		return got.Usage.Details.Cached
	}
	require.Equal(t, 0, cached(1, 400))
	require.Equal(t, 384, cached(1, 400))
	require.Equal(t, 0, cached(2, 400), "three more blocks: one of the first prompt is left out")
	require.Equal(t, 256, cached(1, 400))
}

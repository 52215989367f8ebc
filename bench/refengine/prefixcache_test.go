package refengine

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/reftext"
)

func TestTheLeastRecentBlocksLeaveThePrefixCache(t *testing.T) {
	c := newPrefixCache(6, nil)
	prompt := func(seed int32, blocks int) []int32 {
		ids := make([]int32, blocks*blockSize+1)
		for i := range ids {
			ids[i] = seed
		}
		return ids
	}
	a, b := prompt(1, 3), prompt(2, 3)
	c.add(a)
	c.add(b)
	c.add(a)            // used again
	c.add(prompt(3, 2)) // two of b must go: its last ones
	require.Equal(t, 3*blockSize, c.match(a))
	require.Equal(t, blockSize, c.match(b))
	c.add(prompt(4, 9))
	require.Equal(t, 6*blockSize, c.match(prompt(4, 9)), "a prompt larger than the cache leaves its start")
	require.Zero(t, c.match(a))
	c.reset()
	require.Zero(t, c.match(prompt(4, 9)))
}

func TestACacheUnderPressureReportsWhatIsLeft(t *testing.T) {
	e := start(t, Config{Role: Prefill, PrefixCache: 5, PromptTokensDetails: true})
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

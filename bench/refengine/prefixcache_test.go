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
	match := func(ids []int32) int { n, _ := c.match("", ids); return n }
	c.add("", a, false)
	c.add("", b, false)
	c.add("", a, false)            // used again
	c.add("", prompt(3, 2), false) // two of b must go: its last ones
	require.Equal(t, 3*blockSize, match(a))
	require.Equal(t, blockSize, match(b))
	c.add("", prompt(4, 9), false)
	require.Equal(t, 6*blockSize, match(prompt(4, 9)), "a prompt larger than the cache leaves its start")
	require.Zero(t, match(a))
	c.reset()
	require.Zero(t, match(prompt(4, 9)))
}

// Blocks under a cache_salt are found under it alone, and those that hold another
// prompt's KV tell so until they are gone.
func TestSaltAndBadBlocksInAPrefixCache(t *testing.T) {
	c, ids := newPrefixCache(4, nil), make([]int32, 2*blockSize+1)
	c.add("a", ids, true)
	n, bad := c.match("", ids)
	require.Zero(t, n)
	require.False(t, bad)
	n, bad = c.match("a", ids)
	require.Equal(t, 2*blockSize, n)
	require.True(t, bad)
	c.add("", ids, false)
	n, bad = c.match("", ids)
	require.Equal(t, 2*blockSize, n)
	require.False(t, bad)
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

package cache

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheLeastRecentBlocksLeaveThePrefixCache(t *testing.T) {
	c := New(6, nil)
	prompt := func(seed int32, blocks int) []int32 {
		ids := make([]int32, blocks*BlockSize+1)
		for i := range ids {
			ids[i] = seed
		}
		return ids
	}
	a, b := prompt(1, 3), prompt(2, 3)
	match := func(ids []int32) int { n, _ := c.Match("", ids); return n }
	c.Add("", a, false)
	c.Add("", b, false)
	c.Add("", a, false)            // used again
	c.Add("", prompt(3, 2), false) // two of b must go: its last ones
	require.Equal(t, 3*BlockSize, match(a))
	require.Equal(t, BlockSize, match(b))
	c.Add("", prompt(4, 9), false)
	require.Equal(t, 6*BlockSize, match(prompt(4, 9)), "a prompt larger than the cache leaves its start")
	require.Zero(t, match(a))
	c.Reset()
	require.Zero(t, match(prompt(4, 9)))
}

// Blocks under a cache_salt are found under it alone, and those that hold another
// prompt's KV tell so until they are gone.
func TestSaltAndBadBlocksInAPrefixCache(t *testing.T) {
	c, ids := New(4, nil), make([]int32, 2*BlockSize+1)
	c.Add("a", ids, true)
	n, bad := c.Match("", ids)
	require.Zero(t, n)
	require.False(t, bad)
	n, bad = c.Match("a", ids)
	require.Equal(t, 2*BlockSize, n)
	require.True(t, bad)
	c.Add("", ids, false)
	n, bad = c.Match("", ids)
	require.Equal(t, 2*BlockSize, n)
	require.False(t, bad)
}

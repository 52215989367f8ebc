package prefill

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestTheLeastRecentBlockGoesFirst(t *testing.T) {
	c := newCache(4, 10)
	for _, prompt := range [][]int32{{0, 1}, {2, 3}} {
		require.True(t, c.pin(prompt, 0))
		c.unpin(prompt, 0)
	}
	require.True(t, c.pin([]int32{0}, 0), "touched, so 1 is the least recent")
	c.unpin([]int32{0}, 0)
	require.True(t, c.pin([]int32{4}, 0))
	require.Equal(t, []bool{true, false, true, true, true}, c.here[:5])
	require.True(t, c.pin([]int32{5}, 0))
	require.False(t, c.here[3], "of a prompt the deepest goes first")
	require.True(t, c.here[2])
}

func TestPinnedBlocksStay(t *testing.T) {
	c := newCache(4, 10)
	require.True(t, c.pin([]int32{0, 1}, 1))
	require.False(t, c.pin([]int32{2, 3}, 0), "one place is left")
	require.True(t, c.pin([]int32{0, 1, 2}, 0), "two of its blocks are here")
	require.Equal(t, 4, c.pinned())
	c.unpin([]int32{0, 1}, 1)
	require.Equal(t, 3, c.pinned(), "the other request still uses them; the nameless one is gone")
	require.Equal(t, 2, c.match([]int32{0, 1, 9, 2}))
}

func TestACacheIsNeverOverfull(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const names = 12
		c := newCache(rapid.IntRange(1, 8).Draw(t, "capacity"), names)
		type use struct {
			blocks   []int32
			nameless int
		}
		var uses []use
		for range 40 {
			if len(uses) > 0 && rapid.Bool().Draw(t, "unpin") {
				at := rapid.IntRange(0, len(uses)-1).Draw(t, "which")
				c.unpin(uses[at].blocks, uses[at].nameless)
				uses = slices.Delete(uses, at, at+1)
			} else {
				u := use{rapid.SliceOfNDistinct(rapid.Int32Range(0, names-1), 0, 4, rapid.ID).Draw(t, "blocks"),
					rapid.IntRange(0, 2).Draw(t, "nameless")}
				if c.pin(u.blocks, u.nameless) {
					uses = append(uses, u)
				}
			}
			pinned, here, nameless := map[int32]bool{}, 0, 0
			for _, u := range uses {
				nameless += u.nameless
				for _, b := range u.blocks {
					pinned[b] = true
					require.True(t, c.here[b])
				}
			}
			for _, is := range c.here {
				if is {
					here++
				}
			}
			require.Equal(t, len(pinned)+nameless, c.pinned())
			require.Equal(t, here+nameless, c.used)
			require.LessOrEqual(t, c.used, c.capacity)
		}
	})
}

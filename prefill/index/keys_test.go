package index

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestScopesShareNothing(t *testing.T) {
	scopes := []Scope{{}, {Model: "m"}, {LoRA: "m"}, {LoRA: "m", Weights: 1}, {Salt: "m"}, {Tenant: "m"},
		{Model: "m", Tenant: "t"}, {Model: "mt"}, {Model: strings.Repeat("long", 99)}}
	seen := map[Key]bool{}
	for _, s := range scopes {
		for _, unit := range []Unit{Bytes, Tokens} {
			for _, block := range []int{16, 128} {
				root := s.Root(unit, block)
				require.False(t, seen[root], "%v %c %d", s, unit, block)
				require.Equal(t, root, s.Root(unit, block))
				seen[root] = true
			}
		}
	}
}

func TestAKeyCoversAllBeforeIt(t *testing.T) {
	var h Hasher
	root := Scope{Model: "m"}.Root(Tokens, 4)
	ids := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	all := h.Tokens(nil, root, ids, 4)
	require.Len(t, all, 2, "the rest is no block")
	require.Equal(t, all[1:], h.Tokens(nil, all[0], ids[4:], 4), "it goes on from any block's key")
	ids[0]++
	changed := h.Tokens(nil, root, ids, 4)
	require.NotEqual(t, all[0].Hash, changed[0].Hash)
	require.NotEqual(t, all[1].Hash, changed[1].Hash, "though the block is the same")
	require.NotEqual(t, all[1].Check, changed[1].Check)
}

// Hash may be compared between processes, so it must not change unnoticed.
func TestHashIsTheSameEverywhere(t *testing.T) {
	var h Hasher
	keys := h.Tokens(nil, Scope{Model: "m", Tenant: "t"}.Root(Tokens, 2), []int32{1, 2, 3, 4}, 2)
	text := h.Chat(nil, Scope{Model: "m"}.Root(Bytes, BlockBytes), json.RawMessage(`[{"role":"user","content":"`+strings.Repeat("x", 300)+`"}]`), nil)
	require.Equal(t, []uint64{0x82d27e7ca19343b5, 0x4dc14233cd7fd252, 0x5732fab2bcdc9d1},
		[]uint64{keys[0].Hash, keys[1].Hash, text.Keys[0].Hash})
}

func TestASaltOfOneRequestIsNotIndexed(t *testing.T) {
	var s Salts
	require.True(t, s.Shared(""), "none is everybody's")
	require.False(t, s.Shared("a"))
	require.True(t, s.Shared("a"))
	require.False(t, s.Shared("b"))
}

func TestRatio(t *testing.T) {
	var r Ratio
	require.Equal(t, 1000, r.Tokens(4000))
	require.Equal(t, 8192, r.Blocks(4096*128, BlockBytes))
	r.Learn(9000, 3000)
	require.InDelta(t, 3.95, r.BytesPerToken(), 1e-12)
	require.Equal(t, 2000, r.Tokens(7900))
	r.Learn(0, 5)
	r.Learn(5, 0)
	require.InDelta(t, 3.95, r.BytesPerToken(), 1e-12, "what was not counted teaches nothing")
	for range 200 {
		r.Learn(1, math.MaxInt32)
	}
	require.InDelta(t, 1, r.BytesPerToken(), 1e-12)
	for range 200 {
		r.Learn(math.MaxInt32, 1)
	}
	require.InDelta(t, 16, r.BytesPerToken(), 1e-12)
}

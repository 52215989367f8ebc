package lease

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const settle = 15 * time.Second

func members(spread bool, self string, ids ...string) *Members {
	m := NewMembers(self, spread, settle)
	m.See(ids, seconds(0))
	return m
}

func TestMembersOwnInOrder(t *testing.T) {
	m := members(false, "b", "c", "b", "a")
	require.Equal(t, []string{"a", "b", "c"}, m.Order("main"))
	rank, home := m.TakeoverRank("main", "c", seconds(20))
	require.Equal(t, 1, rank)
	require.False(t, home)
	require.True(t, m.ShouldHandOver("main", "a", seconds(20)))
	require.False(t, m.ShouldHandOver("main", "c", seconds(20)), "it comes after us")
	require.False(t, m.ShouldHandOver("main", "x", seconds(20)), "nobody sees it")

	m.See([]string{"b", "c"}, seconds(30))
	rank, home = m.TakeoverRank("main", "c", seconds(30))
	require.Zero(t, rank)
	require.True(t, home)
	m.See([]string{"a", "b", "c"}, seconds(40))
	require.False(t, m.ShouldHandOver("main", "a", seconds(47)), "it is back, and not yet for good")
	require.True(t, m.ShouldHandOver("main", "a", seconds(48)))
}

// A proxy that the lease does not list never takes it, so the next proxy in the order does not wait
// for it.
func TestWhoIsNotOnAListIsInNoOrder(t *testing.T) {
	lists := [][]string{{"a", "b", "c"}, {"b", "c"}}
	m := members(false, "b", "a", "b", "c")
	require.Equal(t, []string{"b", "c"}, m.Order("main", lists...))
	require.Equal(t, []string{"a", "b", "c"}, m.Order("main", nil, nil), "nobody listed anybody")
	rank, home := m.TakeoverRank("main", "", seconds(20), lists...)
	require.Zero(t, rank)
	require.True(t, home)
	require.False(t, m.ShouldHandOver("main", "a", seconds(20), lists...), "it could not take it")
	m = members(false, "a", "a", "b", "c")
	rank, home = m.TakeoverRank("main", "", seconds(20), lists...)
	require.Equal(t, 2, rank)
	require.False(t, home)
	require.True(t, m.ShouldHandOver("main", "c", seconds(20), lists...))
}

func TestMemberThatLeavesYieldsToAll(t *testing.T) {
	m := members(true, "a", "b", "c")
	rank, home := m.TakeoverRank("main", "a", seconds(60))
	require.Equal(t, 2, rank)
	require.False(t, home)
	require.True(t, m.ShouldHandOver("main", "b", seconds(0)))
	require.True(t, m.ShouldHandOver("main", "c", seconds(0)))
}

func TestNewMemberAsksForNothingThatSomebodyKeeps(t *testing.T) {
	m := members(false, "a", "a", "b")
	_, home := m.TakeoverRank("main", "b", seconds(14))
	require.False(t, home)
	_, home = m.TakeoverRank("main", "b", seconds(15))
	require.True(t, home)

	m = members(false, "a", "a")
	_, home = m.TakeoverRank("main", "b", seconds(2.9))
	require.False(t, home, "it has not seen the others yet")
	_, home = m.TakeoverRank("main", "b", seconds(3))
	require.True(t, home, "its owner is gone, or leaves")
	_, home = m.TakeoverRank("main", "", seconds(3))
	require.True(t, home, "nobody has it")
}

func TestAreasSpreadAndMoveLittle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(2, 6).Draw(t, "members")
		ids := make([]string, n)
		for i := range ids {
			ids[i] = fmt.Sprintf("ek-%d", i)
		}
		m := members(true, ids[0], ids...)
		had := map[string]int{}
		first := map[string]string{}
		for i := range 600 {
			scope := fmt.Sprintf("group-%d", i)
			first[scope] = m.Order(scope)[0]
			had[first[scope]]++
		}
		for _, id := range ids {
			if had[id] < 600/n/2 {
				t.Fatalf("%s has %d of 600 groups among %d", id, had[id], n)
			}
		}
		gone := rapid.SampledFrom(ids).Draw(t, "gone")
		m.See(slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return id == gone }), seconds(20))
		for scope, was := range first {
			if now := m.Order(scope)[0]; was != gone && now != was {
				t.Fatalf("%s went from %s to %s when %s left", scope, was, now, gone)
			}
		}
	})
}

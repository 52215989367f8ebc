package index

import (
	"go/build"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestImportsArePure(t *testing.T) { // no clock, no socket, no log: the owner knows those
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"bytes", "encoding/binary", "encoding/json", "hash/maphash", "math", "math/bits", "strconv", "time", "unicode/utf8",
		"github.com/cespare/xxhash/v2", "evenkeel/internal/rawjson"}
	require.Subset(t, pure, pkg.Imports, "let the owner read it and pass it in")
}

// prompt are the keys of n blocks of 16 tokens; prompts with other seeds share
// the first shared of them.
func prompt(seed int32, shared, n int) []Key {
	ids := make([]int32, 16*n)
	for i := range ids {
		ids[i] = int32(i)
		if i >= 16*shared {
			ids[i] += seed << 20
		}
	}
	var h Hasher
	return h.Tokens(nil, Scope{Model: "m"}.Root(Tokens, 16), ids, 16)
}

func TestG24(t *testing.T) {
	x, keys := New(Config{}), prompt(1, 0, 100/16)
	a, b := x.Add("a", 0), x.Add("b", 0)
	usable := func() []int {
		var got []int
		for _, blocks := range x.Match(nil, keys) {
			got = append(got, UsableHit(int(blocks)*16, 100, 16))
		}
		return got
	}
	x.Insert(a, keys[:4])
	x.Insert(b, keys[:6])
	require.Equal(t, []int{64, 96}, usable())
	x.Remove(b, keys[1])
	require.Equal(t, []int{64, 16}, usable(), "blocks 2 to 5 of b are out of reach")
	x.Clear(a, Removed)
	require.Equal(t, []int{0, 16}, usable())
	x.Insert(b, keys[1:2])
	require.Equal(t, []int{0, 96}, usable(), "and within reach again")
}

func TestUsable(t *testing.T) {
	for _, row := range []struct {
		name                        string
		matched, prompt, block, use int
	}{
		{"the last token is always computed", 4096, 4096, 16, 4080},
		{"whole blocks only", 4000, 90, 16, 80},
		{"no more than was matched", 32, 4096, 16, 32},
		{"a prompt of one token has no prefix", 16, 1, 16, 0},
		{"an empty prompt has none either", 0, 0, 16, 0},
		{"an unknown block size promises nothing", 16, 100, 0, 0},
	} {
		require.Equal(t, row.use, UsableHit(row.matched, row.prompt, row.block), row.name)
	}
}

func TestAPromptLongerThanTheEnginePromisesItsStart(t *testing.T) {
	x := New(Config{})
	s, keys := x.Add("a", 10), prompt(1, 0, 64)
	x.Insert(s, keys)
	require.Equal(t, []int32{10}, x.Match(nil, keys))
}

func TestTheLeavesOfTheLeastRecentPromptGoFirst(t *testing.T) {
	x := New(Config{})
	s := x.Add("a", 30)
	one, two, three := prompt(1, 5, 15), prompt(2, 5, 15), prompt(3, 5, 15)
	x.Insert(s, one)
	x.Insert(s, two) // 25 blocks: 5 shared, 10 each
	x.Insert(s, one)
	x.Insert(s, three) // 35: 5 must go
	got := []int32{x.Match(nil, one)[0], x.Match(nil, two)[0], x.Match(nil, three)[0]}
	require.Equal(t, []int32{15, 10, 15}, got)
	require.EqualValues(t, 5, x.Stats().Evictions[Capacity])
	x.SetCapacity(s, 20)
	require.Equal(t, 20, x.Held(s))
	require.EqualValues(t, 15, x.Match(nil, three)[0], "the most recent stays whole")
}

func TestOneCandidatesUseDoesNotKeepAnothersBlocks(t *testing.T) {
	x := New(Config{})
	a, b := x.Add("a", 20), x.Add("b", 20)
	hot := prompt(1, 0, 10)
	x.Insert(a, hot)
	x.Insert(b, hot)
	x.Insert(b, prompt(2, 0, 10))
	x.Insert(a, hot) // b's engine saw nothing of it
	x.Insert(b, prompt(3, 0, 10))
	require.Equal(t, []int32{10, 0}, x.Match(nil, hot))
}

func TestWhatWasInsertedFirstGoesFirst(t *testing.T) {
	for _, row := range []struct {
		name       string
		evict      Eviction
		a, b, c, d int32
	}{
		{"the local index drops what was not used longest", LeastRecent, 4, 0, 4, 4},
		{"a peer's snapshot drops what was sent first", Oldest, 0, 4, 4, 4},
	} {
		x := New(Config{Evict: row.evict})
		s := x.Add("peer", 12)
		var prompts [4][]Key
		for i := range prompts {
			prompts[i] = prompt(int32(i+1), 0, 4)
		}
		x.Insert(s, prompts[0])
		x.Insert(s, prompts[1])
		x.Insert(s, prompts[2])
		x.Insert(s, prompts[0]) // a hit
		x.Insert(s, prompts[3])
		for i, want := range []int32{row.a, row.b, row.c, row.d} {
			require.Equal(t, want, x.Match(nil, prompts[i])[0], "%s: prompt %c", row.name, 'A'+i)
		}
	}
}

func TestACollisionOfHashIsAMiss(t *testing.T) {
	x := New(Config{})
	s := x.Add("a", 0)
	x.Insert(s, []Key{{Hash: 7, Check: 1}})
	require.Equal(t, []int32{0}, x.Match(nil, []Key{{Hash: 7, Check: 2}}))
	require.Equal(t, []int32{0}, x.Match(nil, []Key{{Hash: 8, Check: 1}}))
	require.Equal(t, []int32{1}, x.Match(nil, []Key{{Hash: 7, Check: 1}}))
}

func TestAStaleSlotDoesNothing(t *testing.T) {
	x, keys := New(Config{}), prompt(1, 0, 4)
	old := x.Add("a", 0)
	probe := x.Speculate(old, keys)
	x.Delete(old)
	fresh := x.Add("b", 0)
	require.Equal(t, old.N, fresh.N, "the number is used again")
	require.Equal(t, []int32{0}, x.Match(nil, keys), "but not its blocks")
	x.Insert(old, keys)
	x.Confirm(&probe)
	x.Clear(old, Removed)
	x.Delete(old)
	x.SetCapacity(old, 1)
	require.Equal(t, []int32{0}, x.Match(nil, keys))
	require.Zero(t, x.Held(old))
	x.Insert(fresh, keys)
	x.Remove(old, keys[0])
	require.Equal(t, []int32{4}, x.Match(nil, keys))
	require.Equal(t, fresh, x.Add("b", 0), "a candidate keeps its slot")
}

func TestMoreThan64Slots(t *testing.T) {
	x, keys := New(Config{}), prompt(1, 0, 8)
	var slots []Slot
	for i := range 130 {
		slots = append(slots, x.Add(string(rune('a'+i)), 0))
		x.Insert(slots[i], keys[:i%9])
	}
	want := make([]int32, 130)
	for i := range want {
		want[i] = int32(i % 9)
	}
	require.Equal(t, want, x.Match(nil, keys))
	require.EqualValues(t, 8*(96+16*3)+(x.Stats().Claims-8)*32, x.Stats().Bytes)
	for _, s := range slots {
		x.Delete(s)
	}
	require.Zero(t, x.Stats().Bytes)
}

func TestResetKeepsTheSlots(t *testing.T) {
	x, keys := New(Config{}), prompt(1, 0, 8)
	s := x.Add("a", 6)
	probe := x.Speculate(s, keys)
	x.Reset()
	x.Confirm(&probe)
	require.Equal(t, []int32{0}, x.Match(nil, keys))
	require.Zero(t, x.Stats().Bytes)
	x.Insert(s, keys)
	require.Equal(t, []int32{6}, x.Match(nil, keys))
}

// The bound is on memory, not on a formula.
func TestTheBoundHoldsForTheHeap(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	const bound = 16 << 20
	x := New(Config{MaxBytes: bound})
	a, b := x.Add("a", 0), x.Add("b", 0)
	for i := range int32(2000) {
		keys := prompt(i+1, 0, 128)
		x.Insert(a, keys)
		if i%2 == 0 {
			x.Insert(b, keys)
		}
	}
	require.Positive(t, x.Stats().Evictions[ForBytes], "it was full")
	require.Less(t, int64(heap()-before), int64(bound))
	runtime.KeepAlive(x)
}

// naive is the index without any of its structure.
type naive struct {
	capacity []int
	order    [][]Key // of each slot, the newest first
}

func (n *naive) insert(s int, keys []Key) {
	if c := n.capacity[s]; c > 0 && len(keys) > c {
		keys = keys[:c]
	}
	for i := len(keys) - 1; i >= 0; i-- {
		n.remove(s, keys[i])
		n.order[s] = append([]Key{keys[i]}, n.order[s]...)
	}
	if c := n.capacity[s]; c > 0 && len(n.order[s]) > c {
		n.order[s] = n.order[s][:c]
	}
}

func (n *naive) remove(s int, k Key) {
	for i, held := range n.order[s] {
		if held == k {
			n.order[s] = append(n.order[s][:i:i], n.order[s][i+1:]...)
			return
		}
	}
}

func (n *naive) match(s int, keys []Key) int32 {
	for i, k := range keys {
		found := false
		for _, held := range n.order[s] {
			found = found || held == k
		}
		if !found {
			return int32(i)
		}
	}
	return int32(len(keys))
}

func TestTheWalkIsThatOfARadixTree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.SampledFrom([]int{3, 3, 3, 70}).Draw(t, "slots")
		x, n := New(Config{}), &naive{capacity: make([]int, slots), order: make([][]Key, slots)}
		var at []Slot
		for s := range slots {
			n.capacity[s] = rapid.IntRange(0, 20).Draw(t, "capacity")
			at = append(at, x.Add(string(rune('a'+s)), n.capacity[s]))
		}
		anyPrompt := rapid.Custom(func(t *rapid.T) []Key {
			blocks := rapid.IntRange(0, 12).Draw(t, "blocks")
			return prompt(int32(rapid.IntRange(1, 5).Draw(t, "seed")), min(blocks, rapid.IntRange(0, 1).Draw(t, "shared")*4), blocks)
		})
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			s, keys := rapid.IntRange(0, slots-1).Draw(t, "slot"), anyPrompt.Draw(t, "prompt")
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0, 1:
				x.Insert(at[s], keys)
				n.insert(s, keys)
			case 2:
				probe := x.Speculate(at[s], keys)
				x.Confirm(&probe)
				n.insert(s, keys)
			case 3:
				if len(keys) > 0 {
					x.Remove(at[s], keys[len(keys)/2])
					n.remove(s, keys[len(keys)/2])
				}
			case 4:
				cached := rapid.IntRange(0, len(keys)).Draw(t, "cached")
				x.Correct(at[s], keys, cached)
				for _, k := range keys[cached:] {
					n.remove(s, k)
				}
			case 5:
				x.Clear(at[s], Cold)
				n.order[s] = nil
			}
			look := anyPrompt.Draw(t, "look")
			for s, got := range x.Match(nil, look) {
				require.Equal(t, n.match(s, look), got, "slot %d", s)
				require.Equal(t, len(n.order[s]), x.Held(at[s]))
			}
			consistent(t, x)
		}
	})
}

func TestNeverAboveItsBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := New(Config{MaxBytes: 1, Evict: rapid.SampledFrom([]Eviction{LeastRecent, Oldest}).Draw(t, "evict")})
		capacity, at := map[Slot]int{}, []Slot{}
		var probes []Speculation
		for i := range rapid.IntRange(1, 100).Draw(t, "steps") {
			if len(at) == 0 || rapid.IntRange(0, 9).Draw(t, "add") == 0 {
				c := rapid.IntRange(0, 300).Draw(t, "capacity")
				s := x.Add(string(rune('a'+i)), c)
				at, capacity[s] = append(at, s), c
			}
			s := rapid.SampledFrom(at).Draw(t, "slot")
			keys := prompt(int32(rapid.IntRange(1, 12).Draw(t, "seed")), 0, rapid.IntRange(1, 300).Draw(t, "blocks"))
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0, 1:
				x.Insert(s, keys)
				if x.cfg.Evict == LeastRecent && x.wordsPerEntry == 1 && capacity[s] == 0 {
					require.EqualValues(t, len(keys), x.Match(nil, keys)[s.N], "what was just inserted is there")
				}
			case 2:
				probes = append(probes, x.Speculate(s, keys))
			case 3:
				if len(probes) > 0 {
					x.Confirm(&probes[0])
					probes = probes[1:]
				}
			case 4:
				if len(probes) > 0 {
					x.Drop(&probes[0])
					probes = probes[1:]
				}
			case 5:
				capacity[s] = rapid.IntRange(0, 300).Draw(t, "new capacity")
				x.SetCapacity(s, capacity[s])
			}
			require.LessOrEqual(t, x.Stats().Bytes, int64(leastBytes))
			for s, c := range capacity {
				require.True(t, c == 0 || x.Held(s) <= c, "%d of %d", x.Held(s), c)
			}
		}
		consistent(t, x)
	})
}

// consistent checks every link of an index.
func consistent(t require.TestingT, x *Index) {
	entries, claims := 0, 0
	for e, newer := x.useOrder.newest, uint32(0); e != 0; newer, e = e, x.useLinks[e].older {
		entries++
		if newer != x.useLinks[e].newer || e != x.table.find(x.keys[e], x.keys) {
			require.Fail(t, "a broken list or table", "entry %d", e)
		}
		for c := x.firstClaim[e]; c != 0; c = x.claims[c].sibling {
			claims++
			n := int(x.claims[c].slot)
			if x.claims[c].entry != e || x.claims[c].support == 0 || x.holders[int(e)*x.wordsPerEntry+n/64]&(1<<(n%64)) == 0 {
				require.Fail(t, "a claim that nobody vouches for, or no holder", "%+v", x.claims[c])
			}
		}
	}
	require.Equal(t, []int{x.entries, x.claimCount, x.entries}, []int{entries, claims, x.table.used})
	for n := range x.slots {
		held := 0
		for c := x.slots[n].recent.newest; c != 0; c = x.recency[c].older {
			held++
			if int(x.claims[c].slot) != n {
				require.Fail(t, "another slot's claim", "%+v", x.claims[c])
			}
		}
		require.Equal(t, x.slots[n].held, held)
	}
}

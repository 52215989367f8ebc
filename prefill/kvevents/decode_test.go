package kvevents

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"evenkeel/prefill/index"
)

type m = map[string]any

type list = []any

// payload is a batch of events.
func payload(events ...any) []byte {
	var out bytes.Buffer
	e := msgpack.NewEncoder(&out)
	e.UseCompactInts(true)
	if err := e.Encode(list{1767225600.5, events, nil}); err != nil {
		panic(err)
	}
	return out.Bytes()
}

// told writes down what a sink is told.
type told struct {
	sync.Mutex
	lines []string
	names map[index.Key]string
}

func newTold() *told { return &told{names: map[index.Key]string{}} }

// name gives the blocks of a prompt names to be told by.
func (s *told) name(prefix string, scope index.Scope, ids []int32, block int) {
	var h index.Hasher
	for i, k := range h.Tokens(nil, scope.Root(index.Tokens, block), ids, block) {
		s.names[k] = fmt.Sprint(prefix, i)
	}
}

func (s *told) say(what string, keys []index.Key) {
	for _, k := range keys {
		name, ok := s.names[k]
		if !ok {
			name = "?"
		}
		what += " " + name
	}
	s.lines = append(s.lines, what)
}

func (s *told) Stored(_ index.Slot, keys []index.Key)  { s.say("stored", keys) }
func (s *told) Removed(_ index.Slot, keys []index.Key) { s.say("removed", keys) }
func (s *told) Cleared(_ index.Slot, why index.Reason) {
	s.lines = append(s.lines, "cleared "+why.String())
}
func newMirror(sink Sink, count *counters) *mirror {
	return &mirror{scope: index.Scope{Model: "m"}, sink: sink, maxHashes: 100, counters: count, known: map[engineHash]block{},
		hashesOf: map[index.Key]int32{}}
}

func stored(hashes, parent, tokens any) m {
	return m{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 2}
}

func with(event m, more m) m {
	out := m{}
	for _, part := range []m{event, more} {
		for k, v := range part {
			out[k] = v
		}
	}
	return out
}

var ids = []int32{1, 2, 3, 4, 5, 6, 7, 8}

func TestEventsSayWhatIsHeld(t *testing.T) {
	first := stored(list{int64(-5), uint64(math.MaxUint64 - 9)}, nil, list{1, 2, 3, 4})
	for _, row := range []struct {
		name   string
		events list
		want   []string
	}{
		{"maps", list{first, m{"type": "BlockRemoved", "block_hashes": list{-5}, "medium": "GPU"}, m{"type": "AllBlocksCleared"}},
			[]string{"stored a0 a1", "removed a0", "cleared removed"}},
		{"tagged arrays", list{list{"BlockStored", list{7, 8}, nil, list{1, 2, 3, 4}, 2, nil, "GPU", nil}, list{"BlockRemoved", list{8}, "GPU"}, list{"AllBlocksCleared"}},
			[]string{"stored a0 a1", "removed a1", "cleared removed"}},
		{"old arrays are shorter", list{list{"BlockStored", list{7}, nil, list{1, 2}, 2, nil}, list{"BlockRemoved", list{7}}}, []string{"stored a0", "removed a0"}},
		{"new ones longer", list{list{"BlockStored", list{7}, nil, list{1, 2}, 2, nil, "GPU", nil, nil, 0, "full_attention", m{"x": list{1}}, list{nil}}, list{"BlockRemoved", list{7}, "GPU", 0, "z"}},
			[]string{"stored a0", "removed a0"}},
		{"members we do not know", list{with(first, m{"zz": m{"a": list{1, nil, 2.5}}})}, []string{"stored a0 a1"}},
		{"an int64 and a uint64 of the same bits are one hash", list{first, m{"type": "BlockRemoved", "block_hashes": list{uint64(math.MaxUint64 - 4)}}}, []string{"stored a0 a1", "removed a0"}},
		{"hashes of bytes", list{stored(list{[]byte("first"), []byte("second")}, nil, list{1, 2, 3, 4}), stored(list{[]byte("third")}, []byte("second"), list{5, 6}), m{"type": "BlockRemoved", "block_hashes": list{[]byte("second")}}},
			[]string{"stored a0 a1", "stored a2", "removed a1"}},
		{"a child of a known block", list{first, stored(list{9}, int64(-10), list{5, 6})}, []string{"stored a0 a1", "stored a2"}},
		{"a child of an unknown one is left out", list{stored(list{9}, 1234, list{5, 6})}, nil},
		{"so is one of a block that was removed", list{first, m{"type": "BlockRemoved", "block_hashes": list{int64(-10)}}, stored(list{9}, int64(-10), list{5, 6})}, []string{"stored a0 a1", "removed a1"}},
		{"only the GPU's blocks are hits", list{with(first, m{"medium": "CPU"}), with(first, m{"medium": "GPU"}), m{"type": "BlockRemoved", "block_hashes": list{int64(-5)}, "medium": "CPU"}}, []string{"stored a0 a1"}},
		{"only groups of full attention are", list{with(first, m{"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}),
			with(first, m{"group_idx": 0, "kv_cache_spec_kind": "full_attention"}),
			m{"type": "BlockRemoved", "block_hashes": list{int64(-5)}, "group_idx": 1},
			m{"type": "BlockRemoved", "block_hashes": list{int64(-5)}, "group_idx": 0}}, []string{"stored a0 a1", "removed a0"}},
		{"what another group removes stays", list{with(first, m{"group_idx": 0}), m{"type": "BlockRemoved", "block_hashes": list{int64(-5)}, "group_idx": 1}}, []string{"stored a0 a1"}},
		{"a LoRA's blocks are its own", list{with(first, m{"lora_id": 1, "lora_name": "l", "extra_keys": list{list{"l"}, nil}})}, []string{"stored l0 l1"}},
		{"a LoRA without a name is nobody's", list{with(first, m{"lora_id": 1})}, nil},
		{"a picture's blocks, and those behind it, are not made of tokens alone", list{with(first, m{"extra_keys": list{nil, list{list{"picture", 3}}}}), stored(list{9}, int64(-10), list{5, 6})}, []string{"stored a0"}},
		{"a salt's are not either", list{with(first, m{"extra_keys": list{list{"salt"}, nil}})}, nil},
		{"unknown types are passed over", list{m{"type": "BlockPondered", "x": 1}, list{"BlockMoved", 1, 2, 3}, first}, []string{"stored a0 a1"}},
		{"more hashes than tokens are no blocks", list{stored(list{1, 2, 3}, nil, list{1, 2, 3, 4})}, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			sink := newTold()
			sink.name("a", index.Scope{Model: "m"}, ids, 2)
			sink.name("l", index.Scope{Model: "m", LoRA: "l"}, ids, 2)
			mirror := newMirror(sink, &counters{})
			ts, err := newDecoder().decodeBatch(payload(row.events...), mirror.apply)
			require.NoError(t, err)
			require.Equal(t, 1767225600.5, ts)
			require.Equal(t, row.want, sink.lines)
		})
	}
}

func TestWhatIsPassedOverIsCounted(t *testing.T) {
	var count counters
	mirror := newMirror(newTold(), &count)
	_, err := newDecoder().decodeBatch(payload(m{"type": "BlockPondered"}, stored(list{9}, 1234, list{5, 6}), stored(list{9, 8}, nil, list{5}),
		with(stored(list{1, 2}, nil, list{1, 2, 3, 4}), m{"extra_keys": list{nil, list{"salt"}}})), mirror.apply)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 1, 1, 1},
		[]int64{count.unknownTypes.Load(), count.unknownParents.Load(), count.decodeErrors.Load(), count.skipped.Load()})
}

func TestGarbageIsAnError(t *testing.T) {
	deep := append([]byte{0x93, 0xca, 0, 0, 0, 0, 0x91, 0x92, 0xa1, 'x'}, bytes.Repeat([]byte{0x91}, 1<<20)...)
	for name, garbage := range map[string][]byte{
		"nothing":                   {},
		"text":                      []byte("HTTP/1.1 400 Bad Request\r\n"),
		"a map":                     {0x80},
		"an empty array":            {0x90},
		"a time that is none":       {0x92, 0xa1, 'x', 0x90},
		"events that are no list":   {0x92, 0xca, 0, 0, 0, 0, 0x01},
		"more events than bytes":    {0x92, 0xca, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"more text than bytes":      {0x92, 0xca, 0, 0, 0, 0, 0x91, 0x92, 0xdb, 0xff, 0xff, 0xff, 0xff},
		"an event without a tag":    payload(list{}),
		"an event that is a number": payload(7),
		"a tag that is a number":    payload(list{7}),
		"hashes that are no list":   payload(stored("x", nil, list{1})),
		"a token that is none":      payload(stored(list{1}, nil, list{"x"})),
		"a token below zero":        payload(stored(list{1}, nil, list{-1, 2})),
		"a token of 64 bits":        payload(stored(list{1}, nil, list{uint64(1 << 40), 2})),
		"a block of no tokens":      payload(with(stored(list{1}, nil, list{1, 2}), m{"block_size": 0})),
		"nested without end":        deep,
		"a batch that was cut":      payload(stored(list{1}, nil, list{1, 2}))[:40],
	} {
		_, err := newDecoder().decodeBatch(garbage, func(*event) {})
		require.Error(t, err, name)
		require.True(t, strings.HasPrefix(err.Error(), "kvevents: "), "%s: %v", name, err)
	}
}

func FuzzBatch(f *testing.F) {
	f.Add(payload(stored(list{int64(-5), []byte("b")}, nil, list{1, 2, 3, 4})))
	f.Add(payload(list{"BlockStored", list{7, 8}, 6, list{1, 2, 3, 4}, 2, 1, "GPU", "l", list{nil, list{"l"}, list{1, 2}}, 0, "full_attention",
		m{}}))
	f.Add(payload(list{"BlockRemoved", list{8}, "GPU", 1}, list{"AllBlocksCleared"}, m{"type": "X", "y": list{m{}}}))
	seed, _ := hex.DecodeString("92ca000000009192dbffffffff")
	f.Add(seed)
	ahead := func(hash any, parent any, more int32) m {
		return with(stored(list{hash}, parent, list{1, 2}), m{"lookahead_token_ids": list{list{more}}, "group_idx": 0})
	}
	f.Add(payload(ahead(1, nil, 3), ahead(2, nil, 4), ahead(2, nil, 4), m{"type": "BlockRemoved", "block_hashes": list{1}}, ahead(1, 2, 5)))
	frames, err := os.ReadFile("testdata/vllm-0.33-lookahead.hex")
	require.NoError(f, err)
	for _, line := range strings.Fields(string(frames)) {
		seed, _ := hex.DecodeString(line)
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, batch []byte) {
		var count counters
		sink := held{}
		mirror := newMirror(sink, &count)
		d := newDecoder()
		_, err := d.decodeBatch(batch, mirror.apply)
		_, again := d.decodeBatch(batch, func(*event) {})
		require.Equal(t, err == nil, again == nil, "what was read before changes nothing")
		mirror.removedKeys = nil
		for _, b := range mirror.known {
			require.NotZero(t, b.key)
			require.True(t, sink[b.key], "the index lacks a block that the engine holds")
			mirror.releaseHash(b.key)
		}
		require.Empty(t, mirror.hashesOf)
		require.Len(t, mirror.removedKeys, len(sink))
	})
}

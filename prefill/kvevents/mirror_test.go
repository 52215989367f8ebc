package kvevents

import (
	"encoding/binary"
	"encoding/hex"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/prefill/index"
)

// keysOf are our keys of a prompt's whole blocks.
func keysOf(tokens []int32, block int) []index.Key {
	var h index.Hasher
	scope := index.Scope{Model: "m"}
	return h.Tokens(nil, scope.Root(index.Tokens, block), tokens[:len(tokens)/block*block], block)
}

// lookahead is an engine that hashes a block with the tokens that follow it, as vLLM 0.33 does with
// EAGLE (v1/core/kv_cache_utils.py, get_request_block_hasher), and says what it stores and removes.
type lookahead struct {
	block, tokens int                  // of a block, and of those that follow it
	held          map[string]index.Key // by what the hash is made of: the whole prompt up to there
}

func (e *lookahead) hash(made string) []byte { return []byte("hash of " + made) }

func made(tokens []int32) string {
	var b []byte
	for _, t := range tokens {
		b = binary.BigEndian.AppendUint32(b, uint32(t))
	}
	return string(b)
}

// serve stores the blocks of a prompt that are not held, and says those again that are, if again.
func (e *lookahead) serve(prompt []int32, again bool) (events list) {
	keys := keysOf(prompt, e.block)
	from := 0
	emit := func(to int) {
		if to == from {
			return
		}
		hashes, after := list{}, list{}
		for i := from; i < to; i++ {
			end := (i + 1) * e.block
			name := made(prompt[:end+e.tokens])
			hashes, after = append(hashes, e.hash(name)), append(after, slices.Clone(prompt[end:end+e.tokens]))
			e.held[name] = keys[i]
		}
		var parent any
		if from > 0 {
			parent = e.hash(made(prompt[:from*e.block+e.tokens]))
		}
		stored := m{"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
			"token_ids":  slices.Clone(prompt[from*e.block : to*e.block]),
			"block_size": e.block, "medium": "GPU", "group_idx": 0}
		if e.tokens > 0 {
			stored["lookahead_token_ids"] = after
		}
		events, from = append(events, stored), to
	}
	whole := max(0, len(prompt)-e.tokens) / e.block
	cached := 0
	for cached < whole && e.held[made(prompt[:(cached+1)*e.block+e.tokens])] != (index.Key{}) {
		cached++
	}
	if again {
		emit(cached)
	}
	from = cached
	emit(whole)
	return events
}

func (e *lookahead) remove(name string) m {
	delete(e.held, name)
	return m{"type": "BlockRemoved", "block_hashes": list{e.hash(name)}, "medium": "GPU", "group_idx": 0}
}

// A key is held as long as the engine holds one hash of it.
func TestTheIndexHoldsWhatTheEngineHoldsUnderSeveralHashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := &lookahead{block: 2, tokens: rapid.IntRange(0, 2).Draw(t, "lookahead"), held: map[string]index.Key{}}
		sink := held{}
		mirror := newMirror(sink, &counters{})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			var events list
			switch names := slices.Sorted(func(yield func(string) bool) {
				for n := range e.held {
					if !yield(n) {
						return
					}
				}
			}); {
			case len(names) > 0 && rapid.IntRange(0, 2).Draw(t, "what") == 0:
				events = append(events, e.remove(rapid.SampledFrom(names).Draw(t, "removed")))
			case rapid.IntRange(0, 40).Draw(t, "clear") == 0:
				clear(e.held)
				events = append(events, m{"type": "AllBlocksCleared"})
			default:
				events = e.serve(rapid.SliceOfN(rapid.Int32Range(0, 1), 0, 9).Draw(t, "prompt"), rapid.Bool().Draw(t, "says cached blocks again"))
			}
			_, err := newDecoder().decodeBatch(payload(events...), mirror.apply)
			require.NoError(t, err)
			want := held{}
			for _, k := range e.held {
				want[k] = true
			}
			require.Equal(t, want, sink)
			require.Len(t, mirror.known, len(e.held))
			require.Len(t, mirror.hashesOf, len(want), "nothing is remembered of what is gone")
		}
	})
}

// The frames are batches as the classes of vLLM 0.33.0 encode them (distributed/kv_events.py, with
// msgspec): two prompts share their first block and go on in different ways, and one of the two
// hashes of that block is removed.
func TestBatchesOfVLLMWithTokensAhead(t *testing.T) {
	text, err := os.ReadFile("testdata/vllm-0.33-lookahead.hex")
	require.NoError(t, err)
	sink := held{}
	var count counters
	mirror := newMirror(sink, &count)
	a, b := keysOf([]int32{1, 2, 3, 4}, 2), keysOf([]int32{1, 2, 5, 6}, 2)
	require.Equal(t, a[0], b[0])
	wants := []held{
		{a[0]: true, a[1]: true},
		{a[0]: true, a[1]: true, b[1]: true},
		{a[0]: true, b[1]: true}, // the first prompt's blocks are removed, from the last on
		{},
	}
	lines := strings.Fields(string(text))
	require.Len(t, lines, len(wants))
	for i, line := range lines {
		batch, err := hex.DecodeString(line)
		require.NoError(t, err)
		_, err = newDecoder().decodeBatch(batch, mirror.apply)
		require.NoError(t, err)
		require.Equal(t, wants[i], sink, "batch %d", i)
	}
	require.Equal(t, []int64{0, 0, 0, 0},
		[]int64{count.unknownTypes.Load(), count.unknownParents.Load(), count.decodeErrors.Load(), count.skipped.Load()})
}

package kvevents

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/rigs/real/recording"
	"evenkeel/prefill/index"
)

// held is a sink that keeps what the engine holds.
type held map[index.Key]bool

func (h held) Stored(_ index.Slot, keys []index.Key) {
	for _, k := range keys {
		h[k] = true
	}
}

func (h held) Removed(_ index.Slot, keys []index.Key) {
	for _, k := range keys {
		delete(h, k)
	}
}

// Lock and Unlock do nothing: all of it is one goroutine.
func (h held) Lock()   {}
func (h held) Unlock() {}

func (h held) Cleared(index.Slot, index.Reason) { clear(h) }

// TestRecordedEventsTellWhatTheEngineHolds follows the events of a real prefill engine with a cache
// of 90 blocks. The index has to find the same prompts afterwards that the engine still held.
func TestRecordedEventsTellWhatTheEngineHolds(t *testing.T) {
	const blockTokens, blocks = 32, 90
	recorded, err := recording.KVEvents()
	require.NoError(t, err)
	for name, frames := range map[string][][][]byte{"live": recorded.Live, "replayed": recorded.Replay} {
		t.Run(name, func(t *testing.T) {
			var count counters
			now, everHeld := held{}, map[index.Key]bool{}
			mirror := newMirror(now, &count)
			mirror.maxHashes = 10 * blocks
			next, ended := uint64(0), false
			for _, f := range frames {
				m, ok := messageOf(f)
				require.True(t, ok, "a message of %d frames", len(f))
				if m.seq == endOfReplay {
					ended = true
					continue
				}
				if name == "replayed" { // before 0.26 without the topic
					old, ok := messageOf(append(f[:1:1], f[2:]...))
					require.True(t, ok)
					require.Equal(t, m, old)
				}
				require.Equal(t, next, m.seq)
				next++
				ts, err := newDecoder().decodeBatch(m.payload, mirror.apply)
				require.NoError(t, err)
				require.Greater(t, ts, 1.7e9)
				for k := range now {
					everHeld[k] = true
				}
				require.LessOrEqual(t, len(now), blocks)
				for cut := 0; cut < len(m.payload)-1; cut += 1 + len(m.payload)/199 { // the last byte is the rank, which is not read
					_, err := newDecoder().decodeBatch(m.payload[:cut], func(*event) {})
					require.Error(t, err, "cut at %d", cut)
				}
			}
			require.Equal(t, name == "replayed", ended)
			require.Equal(t, []int64{0, 0, 0, 0},
				[]int64{count.unknownTypes.Load(), count.unknownParents.Load(), count.decodeErrors.Load(), count.skipped.Load()})
			require.EqualValues(t, blockTokens, count.blockTokens.Load())

			all, err := recording.All()
			require.NoError(t, err)
			prompts := map[string][]int32{}
			for _, r := range all {
				prompts[r.Name] = promptOf(t, r)
			}
			var last []bool
			for _, name := range recorded.Requests {
				ids := prompts[name]
				full := len(ids) / blockTokens * blockTokens
				var h index.Hasher
				keys := h.Tokens(nil, mirror.scope.Root(index.Tokens, blockTokens), ids[:full], blockTokens)
				last = nil
				for _, k := range keys {
					require.True(t, everHeld[k], "%s: a block that the engine never told of", name)
					last = append(last, now[k])
				}
			}
			require.NotEmpty(t, last)
			require.NotContains(t, last, false, "the newest prompt is in the cache")
		})
	}
}

// promptOf is the prompt by the engine's own count of its tokens.
func promptOf(t *testing.T, r *recording.Recording) []int32 {
	var body struct {
		Prompt []int32 `json:"prompt"`
	}
	if json.Unmarshal([]byte(r.Ask.Body), &body) == nil && len(body.Prompt) > 0 {
		return body.Prompt
	}
	var answer struct {
		IDs []int32 `json:"prompt_token_ids"`
	}
	_ = json.Unmarshal(r.Body(), &answer) // nil: it tells none
	return answer.IDs
}

// The page of this engine's metrics says block_size 32, which is that of the layer with a sliding
// window.
func TestRecordedEventsOfAHybridModelHaveTheBlocksOfFullAttention(t *testing.T) {
	text, err := os.ReadFile("testdata/vllm-0.32.0-gemma4.json")
	require.NoError(t, err)
	var recorded struct {
		IDs    []int32    `json:"ids"`
		Frames [][][]byte `json:"frames"`
	}
	require.NoError(t, json.Unmarshal(text, &recorded))
	var count counters
	now := held{}
	mirror := newMirror(now, &count)
	for _, f := range recorded.Frames {
		m, ok := messageOf(f)
		require.True(t, ok)
		_, err := newDecoder().decodeBatch(m.payload, mirror.apply)
		require.NoError(t, err)
	}
	require.EqualValues(t, 64, count.blockTokens.Load())
	var h index.Hasher
	keys := h.Tokens(nil, mirror.scope.Root(index.Tokens, 64), recorded.IDs[:256], 64)
	require.Len(t, now, 4)
	for _, k := range keys {
		require.True(t, now[k])
	}
}

func TestTheBeginningOfABlockDoesNotShortenTheBlocks(t *testing.T) {
	var count counters
	mirror := newMirror(held{}, &count)
	events := func(list ...any) {
		_, err := newDecoder().decodeBatch(payload(list...), mirror.apply)
		require.NoError(t, err)
	}
	of := func(hash, tokens int) m {
		return m{"type": "BlockStored", "block_hashes": []int{hash}, "parent_block_hash": nil,
			"token_ids": make([]int, tokens), "block_size": tokens}
	}
	events(of(1, 4), of(2, 16), of(3, 8))
	require.EqualValues(t, 16, count.blockTokens.Load())
	events(m{"type": "AllBlocksCleared"}, of(4, 8))
	require.EqualValues(t, 8, count.blockTokens.Load(), "another engine may have smaller ones")
}

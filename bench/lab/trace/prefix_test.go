package trace

import (
	"container/list"
	"testing"

	"github.com/stretchr/testify/require"
)

// reuse is what of a trace's blocks is found in a cache of so many blocks, the least recent
// dropped first; 0: all are kept. shared are the requests that find more than one block, once
// the blocks that only one request has.
func reuse(t *Trace, capacity int) (found, shared, once float64) {
	at, recent := map[uint64]*list.Element{}, list.New()
	uses := map[uint64]int{}
	all, hits, sharing := 0, 0, 0
	for _, r := range t.Requests {
		all += len(r.HashIDs)
		n := 0
		for n < len(r.HashIDs) && at[r.HashIDs[n]] != nil {
			n++
		}
		hits += n
		if n > 1 {
			sharing++
		}
		for i := len(r.HashIDs) - 1; i >= 0; i-- { // the deepest goes first
			b := r.HashIDs[i]
			uses[b]++
			if e := at[b]; e != nil {
				recent.MoveToFront(e)
			} else {
				at[b] = recent.PushFront(b)
			}
		}
		for capacity > 0 && recent.Len() > capacity {
			delete(at, recent.Remove(recent.Back()).(uint64))
		}
	}
	single := 0
	for _, n := range uses {
		if n == 1 {
			single++
		}
	}
	return float64(hits) / float64(all), float64(sharing) / float64(len(t.Requests)), float64(single) / float64(len(uses))
}

func TestPrefixesAreThoseOfMooncake(t *testing.T) {
	published := Mooncake()
	drawn, err := Synth(Prefixed, len(published.Requests), 1)
	require.NoError(t, err)
	for _, capacity := range []int{1000, 10_000, 50_000, 0} {
		want, wantShared, wantOnce := reuse(published, capacity)
		found, shared, once := reuse(drawn, capacity)
		require.InDelta(t, want, found, 0.03, "found in a cache of %d blocks", capacity)
		if capacity == 0 {
			require.InDelta(t, 0.366, want, 0.001)
			require.InDelta(t, wantShared, shared, 0.03, "requests that share more than the system prompt")
			require.InDelta(t, wantOnce, once, 0.06, "blocks that one request alone has")
		}
	}
	want, got := published.Summary(), drawn.Summary()
	require.InEpsilon(t, want.Prompt.Mean, got.Prompt.Mean, 0.06)
	require.InEpsilon(t, want.Prompt.P50, got.Prompt.P50, 0.06)
	require.InEpsilon(t, want.Prompt.P99, got.Prompt.P99, 0.06)
	require.InEpsilon(t, want.Output.Mean, got.Output.Mean, 0.06)
}

func TestDrawnPromptsAreAsLongAsTheirBlocks(t *testing.T) {
	drawn, err := Synth(Prefixed, 3000, 2)
	require.NoError(t, err)
	again, err := Synth(Prefixed, 3000, 2)
	require.NoError(t, err)
	require.Equal(t, drawn, again, "a seed draws the same")
	for _, r := range drawn.Requests {
		require.Equal(t, (r.Prompt+BlockTokens-1)/BlockTokens, len(r.HashIDs))
		require.Zero(t, r.HashIDs[0], "the system prompt")
	}
	require.InDelta(t, 3000, drawn.Requests[2999].At.Seconds(), 300, "a mean gap of a second")
}

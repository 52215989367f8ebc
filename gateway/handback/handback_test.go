package handback

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func all(*Turn) bool { return true }

// A prompt gets the longest turn that it begins with, of its own scope, once, before its time is over, and no other.
func TestAPromptGetsOnlyWhatItBeginsWith(t *testing.T) {
	ids := rapid.SliceOfN(rapid.Int32Range(0, 2), 1, 6)
	scopes := rapid.SampledFrom([]string{"", "a", "b"})
	rapid.Check(t, func(t *rapid.T) {
		var turns Turns
		var model []*Turn // those that are there, by their ends
		now := time.Unix(1000, 0)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3).Draw(t, "later")) * time.Second)
			model = slices.DeleteFunc(model, func(x *Turn) bool { return !now.Before(x.OfferUntil) })
			if rapid.Bool().Draw(t, "an answer ends") {
				x := &Turn{Scope: scopes.Draw(t, "scope"), IDs: ids.Draw(t, "ids"), OfferUntil: now.Add(10 * time.Second)}
				turns.Keep(x, now, 1<<20)
				model = append(model, x)
				continue
			}
			scope, prompt := scopes.Draw(t, "scope"), ids.Draw(t, "prompt")
			got := turns.Take(scope, prompt, now, all)
			longest := 0
			for _, x := range model {
				if x.Scope == scope && len(x.IDs) < len(prompt) && slices.Equal(x.IDs, prompt[:len(x.IDs)]) {
					longest = max(longest, len(x.IDs))
				}
			}
			if got == nil {
				require.Zero(t, longest)
				continue
			}
			require.Contains(t, model, got)
			require.Equal(t, scope, got.Scope)
			require.Len(t, got.IDs, longest)
			require.Equal(t, got.IDs, prompt[:longest])
			model = slices.DeleteFunc(model, func(x *Turn) bool { return x == got })
		}
		turns.Take("", nil, now, all)
		require.Equal(t, len(model), turns.Len())
		turns.Take("", nil, now.Add(time.Hour), all)
		require.Zero(t, turns.Len())
		require.Zero(t, turns.bytes)
		require.Empty(t, turns.byHash)
		require.Empty(t, turns.order)
	})
}

func TestTurnsTakeNoMoreMemoryThanTheyMay(t *testing.T) {
	var turns Turns
	now := time.Unix(1000, 0)
	turn := func(first int32) *Turn { return &Turn{IDs: []int32{first, 2, 3}, OfferUntil: now.Add(time.Minute)} }
	most := 3 * turn(0).bytes()
	for i := range int32(5) {
		turns.Keep(turn(i), now, most)
	}
	require.Equal(t, 3, turns.Len())
	require.Nil(t, turns.Take("", []int32{1, 2, 3, 4}, now, all), "the oldest went")
	require.NotNil(t, turns.Take("", []int32{2, 2, 3, 4}, now, all))
	turns.Keep(&Turn{IDs: make([]int32, 1000), OfferUntil: now.Add(time.Minute)}, now, most)
	require.Equal(t, 2, turns.Len(), "one that is too large moves no others")
}

// What is of no use stays for others.
func TestWhatIsOfNoUseIsNotTaken(t *testing.T) {
	var turns Turns
	now := time.Unix(1000, 0)
	turns.Keep(&Turn{IDs: []int32{1}, OfferUntil: now.Add(time.Minute)}, now, 1<<20)
	turns.Keep(&Turn{IDs: []int32{1, 2}, OfferUntil: now.Add(time.Minute)}, now, 1<<20)
	got := turns.Take("", []int32{1, 2, 3}, now, func(x *Turn) bool { return len(x.IDs) < 2 })
	require.Equal(t, []int32{1}, got.IDs)
	require.Equal(t, 1, turns.Len())
	require.Nil(t, turns.Take("", []int32{1, 2}, now, all), "the engine has to compute one token")
}

// One conversation does not go on, and all that come after it do. Turns that were taken take no memory while it waits.
func TestTurnsThatWereTakenTakeNoMemory(t *testing.T) {
	k, now := &Turns{}, time.Now()
	turn := func(i int) *Turn {
		return &Turn{Scope: "s", IDs: []int32{int32(i), 1, 2}, Params: json.RawMessage(`{}`), KeptSince: now, OfferUntil: now.Add(time.Minute)}
	}
	k.Keep(turn(-1), now, 1<<20)
	for i := range 1000 {
		k.Keep(turn(i), now, 1<<20)
		require.NotNil(t, k.Take("s", []int32{int32(i), 1, 2, 3}, now, func(*Turn) bool { return true }))
	}
	require.Equal(t, 1, k.Len())
	require.Len(t, k.order, 1)
}

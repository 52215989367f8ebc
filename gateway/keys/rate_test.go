package keys

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var noon = time.Unix(1_000_000, 0)

func limited(t testing.TB, limits string) Key {
	k, ok := parse(t, "keys:\n"+entryOf("lab", "k", limits)).Authenticate([]byte("Bearer k"))
	require.True(t, ok)
	return k
}

func TestRequestsOfAMinute(t *testing.T) {
	k := limited(t, "    rpm: 60\n")
	for n := range 60 {
		_, ok := k.TakeRequest(noon)
		require.True(t, ok, "request %d of a full minute", n)
	}
	wait, ok := k.TakeRequest(noon)
	require.False(t, ok)
	require.Equal(t, time.Second, wait, "when there is room for one")
	_, ok = k.TakeRequest(noon.Add(wait - time.Millisecond))
	require.False(t, ok)
	_, ok = k.TakeRequest(noon.Add(wait))
	require.True(t, ok)
	_, ok = limited(t, "").TakeRequest(noon)
	require.True(t, ok, "no limit")
	_, ok = Key{}.TakeRequest(noon)
	require.True(t, ok, "no keys")
}

func TestTokensOfAMinute(t *testing.T) {
	k := limited(t, "    tpm: 6000\n")
	_, ok := k.TakeTokens(noon, 5000)
	require.True(t, ok)
	wait, ok := k.TakeTokens(noon, 2000)
	require.False(t, ok)
	require.Equal(t, 10*time.Second, wait, "1000 are missing, 100 a second")

	k.AdjustTokens(noon, 7000) // the answer was long: in debt
	wait, ok = k.TakeTokens(noon, 1)
	require.False(t, ok)
	require.InDelta(t, (60*time.Second + 10*time.Millisecond).Seconds(), wait.Seconds(), 1e-3)

	k.AdjustTokens(noon, -12_000) // it never ran
	_, ok = k.TakeTokens(noon, 6000)
	require.True(t, ok)

	_, ok = k.TakeTokens(noon.Add(time.Minute), 1_000_000)
	require.True(t, ok, "more than a minute's tokens, when the bucket is full")
	_, ok = k.TakeTokens(noon.Add(2*time.Minute), 1)
	require.False(t, ok, "and paid for afterwards")
}

func TestANewVersionOfTheFileKeepsWhatWasTaken(t *testing.T) {
	old := parse(t, "keys:\n"+entryOf("lab", "k", "    rpm: 2\n"))
	k, _ := old.Authenticate([]byte("Bearer k"))
	for range 2 {
		_, ok := k.TakeRequest(noon)
		require.True(t, ok)
	}
	now := parse(t, "keys:\n"+entryOf("lab", "k2", "    rpm: 3\n    priority: -7\n"))
	now.KeepUsageOf(old)
	k, _ = now.Authenticate([]byte("Bearer k2"))
	require.Equal(t, -7, k.Priority)
	_, ok := k.TakeRequest(noon)
	require.True(t, ok, "one more than before")
	_, ok = k.TakeRequest(noon)
	require.False(t, ok)
}

// Over any time a key gets what its rate gives and one bucket, and whoever waits
// as long as told is let in.
func TestARateHoldsAndTheWaitIsRight(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var b bucket
		perMinute := rapid.IntRange(1, 100_000).Draw(r, "per minute")
		now, taken := noon, 0
		for range rapid.IntRange(1, 50).Draw(r, "requests") {
			now = now.Add(time.Duration(rapid.IntRange(0, 20_000).Draw(r, "ms later")) * time.Millisecond)
			n := rapid.IntRange(1, perMinute).Draw(r, "tokens")
			wait, ok := b.take(now, perMinute, n)
			if !ok {
				require.Positive(r, wait)
				now = now.Add(wait + time.Microsecond)
				_, ok = b.take(now, perMinute, n)
				require.True(r, ok)
			}
			taken += n
			require.LessOrEqual(r, float64(taken), float64(perMinute)*(1+now.Sub(noon).Minutes())+1)
		}
	})
}

// A debt of thousands of years is a wait that can be told, not one that overflows.
func TestALongWaitIsCapped(t *testing.T) {
	k := limited(t, "    tpm: 6000\n")
	k.AdjustTokens(noon, 1e15)
	wait, ok := k.TakeTokens(noon, 1)
	require.False(t, ok)
	require.Equal(t, longestWait, wait)
}

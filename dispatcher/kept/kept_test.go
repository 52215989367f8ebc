package kept

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const ttl = 480 * time.Second

func TestKVIsForgottenAtItsTime(t *testing.T) {
	start := time.Unix(1000, 0)
	var k KV
	require.Zero(t, k.Next())
	k.Add(100, start, ttl)
	k.Add(20, start.Add(ttl/2), ttl)
	require.EqualValues(t, 120, k.Tokens())
	require.Equal(t, start.Add(ttl), k.Next())
	require.Zero(t, k.Expire(start.Add(ttl-1)))
	require.EqualValues(t, 100, k.Expire(start.Add(ttl)))
	require.EqualValues(t, 20, k.Add(3, start.Add(2*ttl), ttl), "what is over goes with what comes")
	require.EqualValues(t, 3, k.Clear())
	require.Zero(t, k.Tokens())
	require.Zero(t, k.Next())
}

func TestSharedKVIsKeptAsLongAsTheLastOfItsAnswers(t *testing.T) {
	start := time.Unix(1000, 0)
	var k KV
	k.Add(1000, start, ttl)                      // a turn
	k.Add(1300, start.Add(100*time.Second), ttl) // the next one, which has the blocks of the first
	require.EqualValues(t, 2300, k.AddedBefore(start.Add(101*time.Second)))
	require.EqualValues(t, 1000, k.AddedBefore(start.Add(100*time.Second)))
	require.Zero(t, k.DropSurplus(1000, start), "the gauges are older than what is kept")
	require.EqualValues(t, 1000, k.DropSurplus(1000, start.Add(101*time.Second)))
	require.EqualValues(t, 1300, k.Tokens())
	require.Equal(t, start.Add(100*time.Second+ttl), k.Next(), "the blocks stay until then")
}

// Whatever is kept, seen, cleared and over: what came in is there or went out, nothing goes before
// its time, nothing stays longer than a part of the time after it, and there are never more entries
// than there is room for.
func TestWhatIsKeptAndWhatIsGivenUpAgree(t *testing.T) {
	type answer struct {
		tokens int64
		until  time.Time
	}
	rapid.Check(t, func(rt *rapid.T) {
		var k KV
		k.Reserve()
		now, in, out, whole := time.Unix(1000, 0), int64(0), int64(0), true
		var answers []answer
		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, int(ttl/8)).Draw(rt, "pause")))
			switch rapid.SampledFrom([]string{"add", "add", "add", "expire", "see", "clear"}).Draw(rt, "what") {
			case "add":
				n := int64(rapid.IntRange(1, 1000).Draw(rt, "tokens"))
				in, answers = in+n, append(answers, answer{n, now.Add(ttl)})
				out += k.Add(n, now, ttl)
			case "expire":
				out += k.Expire(now)
			case "see":
				n := int64(rapid.IntRange(-100, 3000).Draw(rt, "fewer"))
				forgotten := k.DropSurplus(n, now)
				require.LessOrEqual(rt, forgotten, max(0, n))
				out, whole = out+forgotten, whole && forgotten == 0
			case "clear":
				out += k.Clear()
				answers, whole = nil, true
			}
			require.Equal(rt, in-out, k.Tokens())
			require.Equal(rt, k.Tokens(), k.SumOfEntries())
			require.LessOrEqual(rt, len(k.entries), mostEntries)
			least, atMost := int64(0), int64(0)
			for _, a := range answers {
				if now.Before(a.until) {
					least += a.tokens
				}
				if now.Before(a.until.Add(ttl / timeParts)) {
					atMost += a.tokens
				}
			}
			c := KV{k.tokens, slices.Clone(k.entries)}
			c.Expire(now)
			require.LessOrEqual(rt, c.Tokens(), atMost)
			if whole {
				require.GreaterOrEqual(rt, c.Tokens(), least)
			}
		}
	})
}

func TestKeepingAllocatesNothing(t *testing.T) {
	var k KV
	k.Reserve()
	now := time.Unix(1000, 0)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		now = now.Add(ttl / 100)
		k.Add(100, now, ttl)
		k.DropSurplus(30, now)
		k.Next()
	}))
}

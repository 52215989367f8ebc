package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/mooncake"
)

// Requests come, are answered and leave while their rank stands still now and then, for less or more than the hold of their KV.
// Whatever the order: no answer is believed that was asked for under a salt under which KV has been lost, and no request is sent
// under such a salt.
func TestNoAnswerIsBelievedUnderASaltThatLostKV(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewLiveness()
		p := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
		now, spoiled := s.begin, map[string]bool{}
		var waits []*PendingPull
		end := func(i int) {
			waits[i].End()
			waits[i] = waits[len(waits)-1]
			waits = waits[:len(waits)-1]
		}
		one := func(t *rapid.T) int {
			if len(waits) == 0 {
				t.Skip("nothing waits")
			}
			return rapid.IntRange(0, len(waits)-1).Draw(t, "wait")
		}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { require.Len(t, s.waits, len(waits)) },
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 40_000).Draw(t, "ms")) * time.Millisecond)
			},
			"the core goes on for a second": func(*rapid.T) {
				for range 10 {
					now = now.Add(100 * time.Millisecond)
					s.Seen(now)
				}
			},
			"a request is sent": func(t *rapid.T) {
				w := s.Await(now, p.Hold(now, now.Add(p.PulledWithin())))
				require.False(t, spoiled[w.Salt()], "it is sent under a salt that lost KV")
				waits = append(waits, w)
			},
			"an answer begins": func(t *rapid.T) {
				i := one(t)
				w := waits[i]
				held := w.Arrived(now)
				require.False(t, held && spoiled[w.Salt()], "it is believed, and others with its salt had lost their KV")
				spoiled[w.Salt()] = spoiled[w.Salt()] || !held
				end(i)
			},
			"a wait is looked at": func(t *rapid.T) {
				w := waits[one(t)]
				spoiled[w.Salt()] = w.Over(now) || spoiled[w.Salt()]
			},
			"KV is known to be lost": func(t *rapid.T) {
				w := waits[one(t)]
				w.Lose()
				spoiled[w.Salt()] = true
			},
			"a client leaves": func(t *rapid.T) { end(one(t)) },
		})
	})
}

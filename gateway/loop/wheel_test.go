package loop

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// Whatever is set, moved and removed, a watch is found at its time: not before, and no more than a
// tick after it if somebody looks as often as due says.
func TestTheWheelFindsEachWatchAtItsTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := wheel{cursor: 1}
		watches := make([]*Watch, rapid.IntRange(1, 20).Draw(t, "watches"))
		for i := range watches {
			watches[i] = &Watch{}
		}
		now := int64(1)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			w := watches[rapid.IntRange(0, len(watches)-1).Draw(t, "which")]
			switch rapid.IntRange(0, 3).Draw(t, "what") {
			case 0:
				w.at = now + rapid.Int64Range(0, 3*slots*int64(tickLength)).Draw(t, "ahead")
				h.schedule(w)
			case 1:
				h.remove(w)
				w.at = 0
			case 2:
				w.at = 0 // never, without a word to the wheel
			case 3:
				now = h.look(t, watches, now, now+rapid.Int64Range(0, 2*slots*int64(tickLength)).Draw(t, "time"))
			}
			count := 0
			for _, w := range watches {
				if w.tick != 0 {
					count++
				}
			}
			require.Equal(t, count, h.count)
		}
		h.look(t, watches, now, now+10*slots*int64(tickLength))
		for _, w := range watches {
			require.Zero(t, w.at, "a watch was never found")
		}
	})
}

// look lets the time pass, and expires what is due whenever the wheel asks for it.
func (h *wheel) look(t *rapid.T, watches []*Watch, now, until int64) int64 {
	for {
		h.findFirst()
		due := h.due()
		if due == 0 || due > until {
			return until
		}
		now = max(now, due)
		at := map[*Watch]int64{}
		for _, w := range watches {
			at[w] = w.at
		}
		for _, w := range h.expire(nil, now) {
			require.NotZero(t, at[w])
			require.LessOrEqual(t, at[w], now, "found before its time")
			require.LessOrEqual(t, now-at[w], int64(tickLength), "found late")
		}
	}
}

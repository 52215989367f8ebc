package board

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

func TestASlotSaysWhatItsRankWasChosenOn(t *testing.T) {
	cfg := realConfig("br0")
	cfg.Explain = true
	h := newHand(t, cfg)
	h.fleet(ranks(3, 2, 0))
	h.put(pool.Entry{Prompt: 900}).slotNow(t)
	w := h.put(pool.Entry{Prompt: 300})
	s := w.slotNow(t)
	e := s.Grounds
	require.NotNil(t, e)
	require.Equal(t, 1, e.Waiting)
	require.Equal(t, 3, e.Able)
	require.EqualValues(t, 900, e.Fullest)
	require.Zero(t, e.KVTokens, "an empty rank took it")
	require.Len(t, e.Best(), 3)
	require.Equal(t, s.Worker, e.Best()[0].Worker, "the best is what was chosen")
	require.EqualValues(t, 900, e.Best()[2].KVTokens)
	require.Less(t, e.Best()[2].Score, e.Best()[0].Score)
}

func TestWithoutExplainASlotHasNoGrounds(t *testing.T) {
	h := newHand(t, realConfig("br0"))
	h.fleet(ranks(2, 2, 0))
	require.Nil(t, h.put(pool.Entry{Prompt: 900}).slotNow(t).Grounds)
	var none *Explanation
	require.Empty(t, none.Best())
}

func TestATickThatIsExplainedDoesNotTouchTheHeap(t *testing.T) {
	for _, spec := range tickPolicies {
		t.Run(spec, func(t *testing.T) {
			h := explained(t, spec)
			var admitted []waiting
			turn := func() {
				h.generate()
				admitted, _ = h.cycle(admitted)
			}
			for range 30 {
				turn()
			}
			compared := 0
			for _, w := range h.waiting { // those that were admitted are back
				if best := w.slot.Grounds.Best(); len(best) > 0 && !math.IsNaN(best[0].Score) {
					compared++
				}
			}
			require.GreaterOrEqual(t, compared, mostScores/144)
			require.Zero(t, testing.AllocsPerRun(20, turn))
		})
	}
}

// explained is a saturated board whose slots have grounds.
func explained(tb testing.TB, spec string) *hand {
	h := saturated(tb, spec)
	h.cfg.Explain = true
	for id, w := range h.boards["m"].waiting {
		w.Trace = &Explanation{}
		h.waiting[w.Entry].slot.Grounds = w.Trace
		h.boards["m"].waiting[id] = w
	}
	return h
}

// BenchmarkExplain is what grounds cost a tick.
func BenchmarkExplain(b *testing.B) {
	for _, spec := range tickPolicies {
		var plain float64
		for _, on := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/explain=%v", spec, on), func(b *testing.B) {
				h := saturated(b, spec)
				if on {
					h = explained(b, spec)
				}
				board := h.boards["m"]
				var admitted []waiting
				for range 30 {
					h.generate()
					admitted, _ = h.cycle(admitted)
				}
				var sum time.Duration
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					h.generate()
					board.groups[0].searchBudget = searchBudget{}
					var d time.Duration
					admitted, d = h.cycle(admitted)
					sum += d
					n++
				}
				mean := float64(sum.Microseconds()) / float64(n)
				b.ReportMetric(mean, "µs/tick")
				if plain == 0 {
					plain = mean
				}
				b.ReportMetric(mean/plain, "ratio")
			})
		}
	}
}

package predictor

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestLiveKnowsWhatCameOfAPrediction(t *testing.T) {
	p := Prediction{0.7, 30}
	for _, row := range []struct {
		name string
		do   func(l *Live)
		want []Row
		lost uint64
	}{
		{"ended inside the horizon", func(l *Live) { l.Used(3, 9, 100, p); l.Finished(3, 9, 180) }, []Row{{0.7, 30, 80, true}}, 0},
		{"ended past it", func(l *Live) { l.Used(3, 9, 100, p); l.Finished(3, 9, 181) }, []Row{{0.7, 30, 81, false}}, 0},
		{"still runs: not known yet", func(l *Live) { l.Used(3, 9, 100, p); l.Used(3, 9, 180, p) }, nil, 0},
		{"still runs past the horizon", func(l *Live) { l.Used(3, 9, 100, p); l.Used(3, 9, 181, p) }, []Row{{0.7, 30, 81, false}}, 0},
		{"cancelled before one could know", func(l *Live) { l.Used(3, 9, 100, p); l.Censored(3, 9, 180) }, nil, 1},
		{"cancelled after", func(l *Live) { l.Used(3, 9, 100, p); l.Censored(3, 9, 200) }, []Row{{0.7, 30, 100, false}}, 0},
		{"another request has the slot", func(l *Live) { l.Used(3, 9, 100, p); l.Finished(3, 10, 120) }, nil, 0},
		{"a slot nobody predicted for", func(l *Live) { l.Finished(8, 10, 120); l.Censored(-1, 10, 120) }, nil, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			l := NewLive(80, 16)
			row.do(l)
			require.Equal(t, row.want, append([]Row(nil), l.Rows()...))
			require.Equal(t, row.lost, l.Lost())
		})
	}
}

func TestLiveKeepsTheLatest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most, n := rapid.IntRange(1, 20).Draw(t, "rows"), rapid.IntRange(0, 60).Draw(t, "requests")
		l := NewLive(80, most)
		for id := range uint64(n) {
			l.Used(0, id, 0, Prediction{P: float64(id)})
			l.Finished(0, id, 10)
		}
		require.Len(t, l.Rows(), min(most, n))
		for _, r := range l.Rows() {
			require.GreaterOrEqual(t, r.P, float64(n-most))
		}
	})
}

func TestLiveDoesNotAllocate(t *testing.T) {
	l := NewLive(80, 64)
	l.Used(100, 1, 0, Prediction{})
	id := uint64(0)
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		id++
		for age := int32(0); age < 200; age += 20 {
			l.Used(int32(id%100), id, age, Prediction{0.5, 10})
		}
		l.Finished(int32(id%100), id, 205)
	}))
}

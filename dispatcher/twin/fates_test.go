package twin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/virtual"
)

// withModel has one rank of model m.
func withModel(t testing.TB) *board.Boards {
	b := empty(t)
	b.Apply(board.SetWorkers{Workers: []board.Worker{{Model: "m", Group: "main", Barrier: true, Slots: 4, Up: true}}}, noon)
	return b
}

// A request that lost its rank and came again is one, with all its tokens; another one that only has the same key is not.
func TestARequestThatCameAgainIsOne(t *testing.T) {
	at := func(s int) time.Duration { return time.Duration(s) * time.Second }
	end := withModel(t)
	w := &Window{Stretches: []*Stretch{
		{
			Boards: end, From: noon, To: noon.Add(at(10)),
			came: []came{
				{at: at(1), id: 1, key: 7, model: "m", prompt: 100},
				{at: at(2), id: 2, key: 8, model: "m", prompt: 100},
				{at: at(4), id: 3, key: 7, model: "m", prompt: 130, age: 30}, // the next leg of 1
				{at: at(5), id: 4, key: 7, model: "m", prompt: 100},          // another that asks the same
				{at: at(6), id: 5, key: 8, model: "m", prompt: 120, age: 20}, // 2 had more: it was under way elsewhere
				{at: at(6), id: 6, key: 9, model: "n", prompt: 100},
			},
			left: []left{{at: at(3), id: 1, generated: 30, lag: 2, failed: true}, {at: at(3), id: 2, generated: 50, lag: 4},
				{at: at(9), id: 3, generated: 12, lag: 9}},
		},
		{Boards: end, From: noon.Add(at(10)), To: noon.Add(at(20)), left: []left{{at: at(1), id: 4, generated: -1, lag: -1}}},
	}, End: end}
	f := w.fates("m")
	require.Equal(t, answer{key: 7, left: at(9), leg: 30, tokens: 42, lag: -1}, *f.of(1))
	require.Same(t, f.of(1), f.of(3))
	require.Equal(t, answer{key: 8, left: at(3), tokens: 50, lag: 4}, *f.of(2))
	require.Equal(t, answer{key: 7, left: at(11), tokens: -1, lag: -1}, *f.of(4))
	require.Equal(t, answer{key: 8, left: hasNotLeft, age: 20, first: 20, leg: 20, tokens: 20, lag: -1}, *f.of(5))
	require.Nil(t, f.of(6), "it is another model's")
	require.Len(t, f.again, 1)
	require.True(t, f.again[&w.Stretches[0].came[2]])
	require.EqualValues(t, 4, f.lag, "the median of those of the first legs")
	require.EqualValues(t, 42, f.rest(1, 0))
	require.EqualValues(t, 12, f.rest(1, 30))
	require.EqualValues(t, 12, f.rest(3, 30), "its later leg is the same request")
	require.EqualValues(t, 1, f.rest(1, 100), "there is always a last token")
	require.Same(t, f, w.fates("m"), "it is learned once")

	var order []uint64
	a := arrivals{stretches: w.Stretches, from: noon, model: "m", skipped: f.again}
	for a.skip(); ; {
		if _, more := a.due(); !more {
			break
		}
		order = append(order, a.take().id)
	}
	require.Equal(t, []uint64{1, 2, 4, 5}, order)
}

func TestAReplayKnowsTheLagOfEarlierWindows(t *testing.T) {
	end := withModel(t)
	w := &Window{Stretches: []*Stretch{{Boards: end, From: noon, To: noon.Add(time.Minute)}}, End: end, Lag: 5}
	require.EqualValues(t, 5, w.fates("m").lag)
	w = &Window{Stretches: w.Stretches, End: end}
	require.EqualValues(t, usualLag, w.fates("m").lag)
}

// What was on a rank before the replay began must not teach its boards that first tokens take as long as it ran for.
func TestARequestThatWasThereKeepsItsFirstStep(t *testing.T) {
	f := &fates{answers: []answer{{lag: 5}}, at: map[uint64]int32{7: 0}, lag: 3}
	r, g := &decoding{Replay: &Replay{fates: f}}, &virtual.Group{StepCounter: virtual.StepCounter{Number: 500}}
	for name, c := range map[string]struct {
		charge board.Charge
		want   uint32
	}{
		"it decodes since long":             {board.Charge{ID: 1, Step: 100, Started: true}, 104},
		"its own lag is known":              {board.Charge{ID: 7, Step: 100, Started: true}, 106},
		"it began sooner than others":       {board.Charge{ID: 7, Step: 498, Started: true}, 500},
		"its KV is on the way":              {board.Charge{ID: 1, Step: 498}, 502},
		"nothing was told before it":        {board.Charge{ID: 1}, 503},
		"nothing was, and it decodes since": {board.Charge{ID: 1, Started: true}, 500},
	} {
		require.Equal(t, c.want, r.firstStep(&c.charge, g), name)
	}
}

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
	w := &Window{Segments: []*Segment{
		{
			Boards: end, From: noon, To: noon.Add(at(10)),
			arrivals: []arrival{
				{at: at(1), id: 1, key: 7, model: "m", prompt: 100},
				{at: at(2), id: 2, key: 8, model: "m", prompt: 100},
				{at: at(4), id: 3, key: 7, model: "m", prompt: 130, age: 30}, // 1 comes back
				{at: at(5), id: 4, key: 7, model: "m", prompt: 100},          // another that asks the same
				{at: at(6), id: 5, key: 8, model: "m", prompt: 120, age: 20}, // 2 had more: it was under way elsewhere
				{at: at(6), id: 6, key: 9, model: "n", prompt: 100},
			},
			departures: []departure{{at: at(3), id: 1, generated: 30, stepsToFirstToken: 2, failed: true},
				{at: at(3), id: 2, generated: 50, stepsToFirstToken: 4},
				{at: at(9), id: 3, generated: 12, stepsToFirstToken: 9}},
		},
		{Boards: end, From: noon.Add(at(10)), To: noon.Add(at(20)),
			departures: []departure{{at: at(1), id: 4, generated: -1, stepsToFirstToken: -1}}},
	}, End: end}
	f := w.history("m")
	require.Equal(t, answer{key: 7, leftAt: at(9), tokensBeforeLastRank: 30, tokensLastSeen: 42, stepsToFirstToken: -1}, *f.answerOf(1))
	require.Same(t, f.answerOf(1), f.answerOf(3))
	require.Equal(t, answer{key: 8, leftAt: at(3), tokensLastSeen: 50, stepsToFirstToken: 4}, *f.answerOf(2))
	require.Equal(t, answer{key: 7, leftAt: at(11), tokensLastSeen: -1, stepsToFirstToken: -1}, *f.answerOf(4))
	require.Equal(t, answer{key: 8, leftAt: hasNotLeft, tokensAtStart: 20, tokensBeforeFirstRank: 20, tokensBeforeLastRank: 20,
		tokensLastSeen: 20, stepsToFirstToken: -1}, *f.answerOf(5))
	require.Nil(t, f.answerOf(6), "it is another model's")
	require.Len(t, f.resumptions, 1)
	require.True(t, f.resumptions[&w.Segments[0].arrivals[2]])
	require.EqualValues(t, 4, f.stepsToFirstToken, "the median of those of the first legs")
	require.EqualValues(t, 42, f.remainingTokens(1, 0))
	require.EqualValues(t, 12, f.remainingTokens(1, 30))
	require.EqualValues(t, 12, f.remainingTokens(3, 30), "its later leg is the same request")
	require.EqualValues(t, 1, f.remainingTokens(1, 100), "there is always a last token")
	require.Same(t, f, w.history("m"), "it is learned once")

	var order []uint64
	a := arrivalQueue{segments: w.Segments, from: noon, model: "m", skipped: f.resumptions}
	for a.skipToNext(); ; {
		if _, more := a.nextAt(); !more {
			break
		}
		order = append(order, a.next().id)
	}
	require.Equal(t, []uint64{1, 2, 4, 5}, order)
}

func TestAReplayKnowsTheLagOfEarlierWindows(t *testing.T) {
	end := withModel(t)
	w := &Window{Segments: []*Segment{{Boards: end, From: noon, To: noon.Add(time.Minute)}}, End: end, StepsToFirstToken: 5}
	require.EqualValues(t, 5, w.history("m").stepsToFirstToken)
	w = &Window{Segments: w.Segments, End: end}
	require.EqualValues(t, usualStepsToFirstToken, w.history("m").stepsToFirstToken)
}

// What was on a rank before the replay began must not teach its boards that first tokens take as long as it ran for.
func TestARequestThatWasThereKeepsItsFirstStep(t *testing.T) {
	f := &history{answers: []answer{{stepsToFirstToken: 5}}, index: map[uint64]int32{7: 0}, stepsToFirstToken: 3}
	r, g := &decodeEngines{Replay: &Replay{history: f}}, &virtual.Group{StepCounter: virtual.StepCounter{Number: 500}}
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
		require.Equal(t, c.want, r.firstTokenStep(&c.charge, g), name)
	}
}

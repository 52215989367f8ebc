package twin

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
)

// A replay begins where the last one of its policy was at the moment at which its window begins. Elsewhere, and where
// requests pile up without end, it begins with the real boards.
func TestWhereAReplayBegins(t *testing.T) {
	holding := func(n uint64) *board.Boards {
		b := withModel(t)
		for id := range n {
			b.Apply(&board.Enqueue{Entry: &board.Entry{ID: id + 1, Model: "m", Prompt: 10, Arrival: noon, Entered: noon}}, noon)
		}
		require.Len(t, b.Waiting("m"), int(n))
		return b
	}
	few, many := &Begun{spec: "a", at: noon, boards: holding(1)}, &Begun{spec: "a", at: noon, boards: holding(mostPiled*fewPiled + 1)}
	w := &Window{Stretches: []*Stretch{{Boards: holding(2), From: noon, To: noon.Add(time.Minute)}}}
	require.Nil(t, w.earlierState("m", "a"))
	w.Begun = []*Begun{{spec: "b", at: noon}, {spec: "a", at: noon.Add(-time.Minute)}}
	require.Nil(t, w.earlierState("m", "a"), "of another policy, or at another time")
	w.Begun = append(w.Begun, few)
	require.Same(t, few, w.earlierState("m", "a"))
	w.Begun[2] = many
	require.Nil(t, w.earlierState("m", "a"), "it has grown too much")
	w.Stretches[0].Boards = holding(fewPiled + 1)
	require.Same(t, many, w.earlierState("m", "a"), "so many are really there")
}

// What is left of a request that ended before the window began is known from where the replay begins.
func TestWhatIsLeftOfARequestThatReallyEndedBefore(t *testing.T) {
	end := withModel(t)
	w := &Window{Stretches: []*Stretch{{Boards: end, From: noon, To: noon.Add(time.Minute),
		came: []came{{id: 2, model: "m"}, {id: 4, model: "m"}}, left: []left{{id: 2, generated: 50}, {id: 4, at: time.Second, generated: -1}}}},
		End: end}
	r := &Replay{fates: w.learnFates("m"), begun: &Begun{rest: map[uint64]int32{1: 7, 2: 9}}}
	require.EqualValues(t, 7, r.rest(1, 20))
	require.EqualValues(t, 30, r.rest(2, 20), "what really came tells it better")
	require.Greater(t, r.rest(3, 20), int32(0))
	r.scheduleQuit(1)
	r.scheduleQuit(2)
	r.scheduleQuit(4)
	require.Equal(t, []quit{{1000, 4}}, r.quits, "it really had no slot, whatever it has here")
}

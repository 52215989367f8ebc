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
	few := &Checkpoint{spec: "a", at: noon, boards: holding(1)}
	many := &Checkpoint{spec: "a", at: noon, boards: holding(maxPiledRatio*minPiledRequests + 1)}
	w := &Window{Segments: []*Segment{{Boards: holding(2), From: noon, To: noon.Add(time.Minute)}}}
	require.Nil(t, w.checkpointFor("m", "a"))
	w.Checkpoints = []*Checkpoint{{spec: "b", at: noon}, {spec: "a", at: noon.Add(-time.Minute)}}
	require.Nil(t, w.checkpointFor("m", "a"), "of another policy, or at another time")
	w.Checkpoints = append(w.Checkpoints, few)
	require.Same(t, few, w.checkpointFor("m", "a"))
	w.Checkpoints[2] = many
	require.Nil(t, w.checkpointFor("m", "a"), "it has grown too much")
	w.Segments[0].Boards = holding(minPiledRequests + 1)
	require.Same(t, many, w.checkpointFor("m", "a"), "so many are really there")
}

// What is left of a request that ended before the window began is known from where the replay begins.
func TestWhatIsLeftOfARequestThatReallyEndedBefore(t *testing.T) {
	end := withModel(t)
	w := &Window{Segments: []*Segment{{Boards: end, From: noon, To: noon.Add(time.Minute),
		arrivals:   []arrival{{id: 2, model: "m"}, {id: 4, model: "m"}},
		departures: []departure{{id: 2, generated: 50}, {id: 4, at: time.Second, generated: -1}}}},
		End: end}
	r := &Replay{history: w.learnHistory("m"), startedFrom: &Checkpoint{remaining: map[uint64]int32{1: 7, 2: 9}}}
	require.EqualValues(t, 7, r.remainingTokens(1, 20))
	require.EqualValues(t, 30, r.remainingTokens(2, 20), "what really came tells it better")
	require.Greater(t, r.remainingTokens(3, 20), int32(0))
	r.scheduleWithdrawal(1)
	r.scheduleWithdrawal(2)
	r.scheduleWithdrawal(4)
	require.Equal(t, []withdrawal{{1000, 4}}, r.withdrawals, "it really had no slot, whatever it has here")
}

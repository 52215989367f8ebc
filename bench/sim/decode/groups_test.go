package decode

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
)

// Two groups of one rank: the first steps in 100 ms, the second in 10.
func twoGroups(slots int) Fleet {
	return Fleet{Groups: []Group{
		{Name: "slow", C0Ms: 100, Ranks: []Rank{{Slots: slots, Cost: 1}}},
		{Name: "fast", C0Ms: 10, Ranks: []Rank{{Slots: slots, Cost: 1}}},
	}}
}

func TestGroupsStepOnTheirOwn(t *testing.T) {
	f := twoGroups(1)
	r, err := newRun(&f, Load{Pool: 1}, of([2]int32{500, 2}, [2]int32{400, 3}, [2]int32{300, 1}, [2]int32{200, 1}), by("pjsq"))
	require.NoError(t, err)
	type at struct {
		ms         float64
		slow, fast int // requests
	}
	var got []at
	for over := false; !over; {
		now := r.Now
		over, err = r.instant()
		require.NoError(t, err)
		got = append(got, at{now, len(r.workers[0].Requests), len(r.workers[1].Requests)})
	}
	require.Equal(t, []at{
		{0, 1, 1}, {10, 1, 1}, {20, 1, 1},
		{30, 1, 1}, // the second is done, the third takes its place; the fourth arrives
		{40, 1, 1}, // so does the fourth
		{50, 1, 0}, {100, 1, 0},
		{200, 0, 0},
	}, got)
}

func TestARequestJoinsAStepInProgressAtItsEnd(t *testing.T) {
	f := twoGroups(1)
	f.Groups[0].Ranks[0].Slots = 2
	w := of([2]int32{100, 2}, [2]int32{100, 5}, [2]int32{100, 1})
	w.jobs[1].at, w.jobs[2].at = 50, 60 // ready at 55, 105 and 115
	r, err := newRun(&f, Load{Rho: 1}, w, by("pjsq"))
	require.NoError(t, err)
	require.NoError(t, r.all(context.Background()))
	require.Equal(t, []float64{155, 115, 255}, []float64{r.jobs[0].first, r.jobs[1].first, r.jobs[2].first},
		"the second finds the fast group idle; the third finds a slot in the slow one, which steps from 55 to 155")
}

func TestTheGroupWithFewerKVTokensARankChoosesFirst(t *testing.T) {
	f := twoGroups(2)
	r, err := newRun(&f, Load{}, of([2]int32{900, 9}, [2]int32{10, 9}, [2]int32{20, 9}, [2]int32{30, 9}), by("pjsq"))
	require.NoError(t, err)
	_, err = r.instant()
	require.NoError(t, err)
	ids := func(w *worker) (ids []uint64) {
		for i := range w.Requests {
			ids = append(ids, uint64(w.Requests[i].Job)+1)
		}
		return ids
	}
	require.Equal(t, []uint64{1, 2}, ids(r.workers[0]), "a tie goes to the lower one")
	require.Equal(t, []uint64{3, 4}, ids(r.workers[1]), "it sees what is left")
}

func TestAnEntryTooLargeForAGroupWaitsForAnother(t *testing.T) {
	f := twoGroups(1)
	f.Groups[0].Ranks[0].Capacity = 1000
	seen := map[string][]int{}
	r, err := newRun(&f, Load{Pool: 3}, of([2]int32{100, 1}, [2]int32{100, 1}, [2]int32{5000, 1}, [2]int32{100, 1}), by("pjsq"))
	require.NoError(t, err)
	r.round = func(round *board.Round) {
		name := map[string]string{"0": "slow", "1": "fast"}[round.Group]
		seen[name] = append(seen[name], len(round.Snapshot.Pool))
	}
	require.NoError(t, r.all(context.Background()))
	require.Equal(t, 4, r.meter.done)
	require.Equal(t, 3, seen["slow"][0], "not the one of 5,000 tokens")
	require.Equal(t, 3, seen["fast"][0], "one went to the slow group, the large one is there")
}

func TestAnEnginePullsInOrderWhatFits(t *testing.T) {
	f := simple(1, 1, 1000)
	r, err := newRun(&f, Load{Pool: 3}, of([2]int32{400, 2}, [2]int32{500, 1}, [2]int32{300, 1}, [2]int32{50, 1}), by("jsq"))
	require.NoError(t, err)
	_, err = r.instant()
	require.NoError(t, err)
	pulled := func() (out []bool) {
		for _, l := range r.workers[0].Requests {
			out = append(out, l.Reserved)
		}
		return out
	}
	require.Equal(t, []bool{true, true, false, false}, pulled(), "900 are there; 300 do not fit, and 50 wait their turn behind them")
	require.EqualValues(t, 900, r.workers[0].KV)
	require.Equal(t, 1, r.workers[0].Active)
	for len(r.workers[0].Requests) == 4 {
		_, err = r.instant()
		require.NoError(t, err)
	}
	require.Equal(t, []bool{true, true, true}, pulled())
	require.NoError(t, r.all(context.Background()))
	require.Equal(t, 4, r.meter.done)
	require.Zero(t, r.meter.preempted)
}

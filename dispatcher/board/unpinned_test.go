package board

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// unpinnedBoards are boards with an engine that runs responses on any of its four ranks, and
// another with two.
func unpinnedBoards(t *testing.T) (h *hand, kv func() []int64) {
	h = newHand(t, realConfig("pjsq-kv"))
	fleet := ranks(6, 4, 10_000)
	for i := range fleet {
		fleet[i].Engine, fleet[i].Unpinned = "d0", true
		if i >= 4 {
			fleet[i].Engine, fleet[i].Unpinned = "d1", false
		}
	}
	h.fleet(fleet)
	return h, func() (all []int64) {
		for _, w := range h.status(h.at).Models[0].Workers {
			all = append(all, w.KVTokens)
		}
		return all
	}
}

func TestAResponseStandsOnAllRanksOfAnEngineThatDoesNotHeedItsRank(t *testing.T) {
	h, kv := unpinnedBoards(t)
	h.shown = &Round{}
	s := h.put(pool.Entry{Prompt: 1003, Response: true, Only: []int32{1}}).slotNow(t)
	require.Equal(t, []int64{250, 253, 250, 250, 0, 0}, kv(), "in equal parts, and the rest where its slot is")
	for i, w := range h.status(h.at).Models[0].Workers {
		require.Equal(t, i == 1, w.Used == 1, "its slot is on the rank that was chosen")
	}

	s.Progress(17)
	require.Equal(t, []int64{255, 255, 255, 255, 0, 0}, kv(), "it grows on all of them")
	h.put(pool.Entry{Prompt: 10}).slotNow(t)
	require.Equal(t, []int64{255, 255, 255, 255, 10, 0}, kv(), "a request with a hand-off goes where there is most room, and stays there")
	for i, w := range h.shown.Snapshot.Workers[:4] {
		require.EqualValues(t, 255, w.KVTokens(), "a policy sees it on all ranks")
		require.Equal(t, i == 1, len(w.Running) == 1)
	}
	whole := h.shown.Snapshot.Workers[1].Running[0]
	require.Equal(t, []int32{1003, 17, 17}, []int32{whole.Prompt, whole.Generated, whole.Age}, "predictors see the whole request")
	require.EqualValues(t, 17, h.Loads().OutputTokens)

	h.do(func(h *hand) { h.apply(Recount{"m", s.index, 383}) })
	require.Equal(t, []int64{100, 100, 100, 100, 10, 0}, kv())
	h.release(s)
	require.Equal(t, []int64{0, 0, 0, 0, 10, 0}, kv())
	require.Zero(t, h.status(h.at).Drift)
}

func TestAResponseStandsOnItsRankWhereTheEngineHeedsThat(t *testing.T) {
	h, kv := unpinnedBoards(t)
	h.put(pool.Entry{Prompt: 1000, Response: true, Only: []int32{4}}).slotNow(t)
	h.put(pool.Entry{Prompt: 600, Only: []int32{0}}).slotNow(t)
	require.Equal(t, []int64{600, 0, 0, 0, 1000, 0}, kv(), "of an engine that heeds the rank, and what is no response")
	early := h.make(pool.Entry{Prompt: 500, Response: true, Only: []int32{2}})
	early.entry.Early = true
	h.do(func(h *hand) { h.enqueue(early) })
	require.Equal(t, []int64{600, 0, 500, 0, 1000, 0}, kv(), "a prefill engine writes to the rank that it was told")
}

func TestRanksThatComeAndGoShareWhatStrays(t *testing.T) {
	h, kv := unpinnedBoards(t)
	var fleet []Worker
	for _, r := range []int32{0, 1, 2, 3, 4, 5} {
		fleet = append(fleet, h.boards["m"].ranks[r].Worker)
	}
	s := h.put(pool.Entry{Prompt: 1200, Response: true, Only: []int32{1}}).slotNow(t)
	require.Equal(t, []int64{300, 300, 300, 300, 0, 0}, kv())
	h.fleet([]Worker{fleet[0], fleet[1], fleet[2], fleet[4], fleet[5]})
	require.Equal(t, []int64{400, 400, 400, 0, 0}, kv())
	h.fleet([]Worker{fleet[0], fleet[2], fleet[4], fleet[5]})
	require.Equal(t, []int64{400, 400, 400, 0, 0}, kv(), "its own rank is gone, and has its part until the release")
	fleet[0].Up, fleet[0].Unpinned = false, false
	h.fleet(fleet)
	require.Equal(t, []int64{300, 300, 300, 300, 0, 0}, kv(), "a rank that drains may have it, and so it began")
	h.fleet(fleet[4:])
	require.Equal(t, []int64{1200, 0, 0}, kv(), "no other rank of its engine is left")
	h.release(s)
	require.Equal(t, []int64{0, 0}, kv())
}

// The gauges of a rank do not say that an orphan is gone because an unpinned response is elsewhere.
func TestWhatStraysProvesNothingOfOrphans(t *testing.T) {
	h := newHand(t, testConfig())
	fleet := early(ranks(2, 4, 10_000))
	for i := range fleet {
		fleet[i].Engine, fleet[i].Unpinned = "d", true
	}
	h.fleet(fleet)
	orphan := h.put(pool.Entry{Prompt: 500, Only: []int32{0}}).slotNow(t)
	w := h.make(pool.Entry{Prompt: 2000, Response: true, Only: []int32{0}})
	w.entry.Early = false
	h.do(func(h *hand) { h.enqueue(w) })
	w.slotNow(t).Started()
	h.orphan(orphan)
	r := h.boards["m"].ranks[0]
	h.at = h.at.Add(1)
	h.gauged(0, 500)
	require.EqualValues(t, 500, r.orphanedKV, "the response runs on rank 1")
	h.gauged(0, 0)
	require.Zero(t, r.orphanedKV)
}

package board

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/fakes"
	"evenkeel/dispatcher/policy"
	"evenkeel/pool"
)

// arriving is a board of entries that are not prefilled yet, with a step of 20 ms and a policy
// that tells what it saw.
func arriving(t *testing.T, fleet []Worker) (h *hand, seen *policy.Snapshot) {
	seen = &policy.Snapshot{}
	var round Round
	decides := fakes.LeastKV(false)
	watched := &fake{Spec: "watched", Decides: func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		round.Copy(&Round{Snapshot: *s})
		*seen = round.Snapshot
		return decides(s, dst)
	}}
	cfg := testConfig(watched)
	cfg.Policy, cfg.StepModel = "watched", StepModel{C0Ms: 20, C1Ms: 1e-9}
	h = newHand(t, cfg)
	h.fleet(early(fleet))
	return h, seen
}

// early has entries bound to ranks before their prefill.
func early(ws []Worker) []Worker {
	for i := range ws {
		ws[i].Early = true
	}
	return ws
}

func TestKVIsReadFromTheFirstEventOn(t *testing.T) {
	h, _ := arriving(t, ranks(1, 8, 0))
	first := h.put(pool.Entry{Prompt: 400}).slotNow(t)
	second := h.put(pool.Entry{Prompt: 500}).slotNow(t)
	r := h.boards["m"].ranks[0]
	see := func(later int64, early int) {
		h.status(h.at)
		require.Equal(t, later, r.notDecodingKV)
		require.Equal(t, early, r.notDecodingSlots)
	}
	see(900, 2)
	first.Started()
	see(500, 1)
	second.Started()
	see(0, 0)
}

func TestSettingsSayHowManyAreAhead(t *testing.T) {
	h := newHand(t, realConfig("pjsq-kv"))
	h.fleet(early(ranks(1, 4, 1000)))
	for range 9 {
		h.put(pool.Entry{Prompt: 50})
	}
	require.Len(t, h.boards["m"].ranks[0].slots, 4)
	require.Error(t, h.set(Settings{BindAhead: -2}))
	require.NoError(t, h.set(Settings{BindAhead: 2}))
	h.do()
	require.Len(t, h.boards["m"].ranks[0].slots, 6)
	require.Equal(t, 6, h.status(h.at).Models[0].Workers[0].Bound)
	h.slotsOf(0)[3].Started()
	require.Equal(t, 5, h.status(h.at).Models[0].Workers[0].Bound)
}

func TestWhatIsBoundBeforeItsPrefillHasItsRoomButIsNoLoad(t *testing.T) {
	h, _ := arriving(t, ranks(2, 1, 1000))
	h.put(pool.Entry{Prompt: 100}).slotNow(t).Started()
	early := h.put(pool.Entry{Prompt: 700}).slotNow(t)
	group := func() GroupStatus { return h.status(h.at).Models[0].Groups[0] }
	require.EqualValues(t, 100, group().ImbalanceTokens, "one rank decodes 100 tokens, the other none")
	require.EqualValues(t, 800, group().KVTokens)
	require.EqualValues(t, 1, h.status(h.at).Models[0].Workers[1].Used, "its slot is taken")
	require.Equal(t, int64(700), h.boards["m"].ranks[1].notDecodingKV)
	h.apply(Recount{Model: "m", Slot: early.index, Prompt: 750})
	require.EqualValues(t, 850, group().KVTokens)
	require.EqualValues(t, 100, group().MostTokens)
	early.Started()
	require.EqualValues(t, 650, group().ImbalanceTokens, "its KV is read from now on")

	h.release(early)
	h.put(pool.Entry{Prompt: 600}).slotNow(t)
	h.release(h.slotsOf(1)...)
	r := h.boards["m"].ranks[1]
	require.Zero(t, r.notDecodingSlots, "it left before it started")
	require.Zero(t, r.notDecodingKV)
	require.Zero(t, r.kv)
}

func TestARankMayHaveMoreThanItsSlotsWhileSomePrefill(t *testing.T) {
	for _, c := range []struct{ ahead, want int }{{0, 4}, {2, 6}} {
		cfg := realConfig("pjsq-kv")
		cfg.BindAhead = c.ahead
		h := newHand(t, cfg)
		h.fleet(early(ranks(1, 4, 1000)))
		for range 9 {
			h.put(pool.Entry{Prompt: 50})
		}
		require.Len(t, h.boards["m"].ranks[0].slots, c.want)
	}
}

// The slots that policies fill because KV is on its way are no affair of requests that
// are bound before their prefill.
func TestNothingIsSentAheadUnlessToldWhereRanksAreBoundFirst(t *testing.T) {
	cfg := realConfig("evenkeel")
	_, most := passingWith(t, cfg, early(ranks(1, 8, 0)), 2, 8)
	require.Equal(t, 8, most)
	cfg.BindAhead = AheadAuto
	_, most = passingWith(t, cfg, early(ranks(1, 8, 0)), 2, 8)
	require.Equal(t, 10, most, "a fifth of a request's time, a quarter at most")
}

func TestOneProcessHasRanksThatAreEarlyAndOthers(t *testing.T) {
	cfg := realConfig("evenkeel")
	cfg.BindAhead = 2
	h := newHand(t, cfg)
	other := ranks(1, 1, 0)
	other[0].ID, other[0].Model = 7, "other"
	h.fleet(append(early(ranks(1, 1, 0)), other...))
	for range 4 {
		h.put(pool.Entry{Prompt: 10})
		h.put(pool.Entry{Prompt: 10, Model: "other"})
	}
	require.Len(t, h.boards["m"].ranks[0].slots, 3, "two ahead of its slot")
	require.Equal(t, 3, h.boards["m"].ranks[0].notDecodingSlots)
	require.Len(t, h.boards["other"].ranks[7].slots, 1)
	require.Zero(t, h.boards["other"].ranks[7].notDecodingSlots)
}

package board

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/step"
	"evenkeel/pool"
)

func TestHearingAStepDoesNotAllocate(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(2, 8, 0))
	var all []*Slot
	for _, w := range h.putAll(16, func() pool.Entry { return pool.Entry{Prompt: 10} }) {
		all = append(all, w.slotNow(t))
	}
	b := h.boards["m"]
	g := b.groups[0]
	n := 0
	require.Zero(t, testing.AllocsPerRun(1000, func() {
		n++
		for _, s := range all {
			s.generated.Store(int32(n))
			s.first, s.last = max(s.first, 1), uint32(n)
			b.rememberEnded(s.index, int32(n), s.first, s.last)
		}
		h.count()
		h.steps.Group, h.steps.List = b.key(g), append(h.steps.List[:0], Step{Number: uint32(n), Length: 20 * time.Millisecond})
		h.apply(&h.steps)
	}))
	require.Greater(t, g.lastStep.Number, uint32(900))
}

func TestWhoHasLeftIsForgotten(t *testing.T) {
	h := newHand(t, testConfig())
	h.fleet(ranks(1, 2, 0))
	b := h.boards["m"]
	r := b.ranks[0]
	s := h.put(pool.Entry{Prompt: 10}).slotNow(t)
	b.rememberEnded(s.index, 1, s.first, s.last)
	require.Empty(t, r.recentlyEnded, "it was in no step")
	s.Progress(1)
	for range 100 { // answers of one token: nobody speaks twice, so no step is told
		b.rememberEnded(s.index, 1, s.first, s.last)
		require.LessOrEqual(t, len(r.recentlyEnded), 4)
	}
	h.release(s)
	require.Empty(t, r.recentlyEnded, "nothing runs")
}

func TestARequestMakesStepsLonger(t *testing.T) {
	cfg := realConfig("br0")
	cfg.StepModel = StepModel{C0Ms: 50, C1Ms: 5e-4, RequestMs: 10}
	h := newHand(t, cfg)
	fleet := ranks(2, 4, 0)
	h.fleet(fleet)
	h.put(pool.Entry{Prompt: 50_000}).slotNow(t)
	for range 3 {
		h.put(pool.Entry{Prompt: 10_000}).slotNow(t)
	}
	require.EqualValues(t, 10_000, h.boards["m"].snapshot.RequestTokens, "and as much on the rank with most requests")
	require.EqualValues(t, 10_000, h.boards["m"].snapshot.RowTokens)
	require.InDelta(t, 50+5e-4*70_000, float64(h.boards["m"].snapshot.StepMs), 1e-3, "one long request, and two short ones on the other rank")

	told := h.status(h.at).Models[0].Groups[0].Step
	require.EqualValues(t, 20_000, told.RequestTokens)
	require.EqualValues(t, 10, told.RequestMs)
	require.InDelta(t, 50+5e-4*30_000+10*3, told.ModelMs, 1e-6, "three short requests take longer than a long one")
	require.InDelta(t, 5, told.LostMs, 1e-6, "ranks that are level would have 10,000 KV tokens less on the fullest one")
}

func TestWhatImbalanceCostsIsSaid(t *testing.T) {
	cfg := realConfig("br0")
	cfg.StepModel = StepModel{C0Ms: 50, C1Ms: 5e-4}
	h := newHand(t, cfg)
	fleet := ranks(2, 2, 0)
	h.fleet(fleet)
	h.put(pool.Entry{Prompt: 100_000}).slotNow(t)
	s := h.boards["m"].snapshot
	require.EqualValues(t, float32(50), s.C0Ms)
	require.EqualValues(t, float32(5e-4), s.C1Ms)
	require.EqualValues(t, 50, s.StepMs, "as the model says of an empty group")

	told := h.status(h.at).Models[0].Groups[0].Step
	require.Equal(t, step.Configured, told.Source)
	require.InDelta(t, 0.25, told.LostShare, 1e-9, "100 ms a step, 75 if both ranks held half")
	require.InDelta(t, 25, told.LostMs, 1e-9)
	require.Equal(t, "this imbalance costs you 25.0 % of every step", told.Says)

	require.Empty(t, told.Why)
	bare := newHand(t, realConfig("br0"))
	bare.fleet(fleet)
	require.Equal(t, "it is learned from 200 steps, and 0 were told so far", bare.status(bare.at).Models[0].Groups[0].Step.Why)

	fleet[1].Cost = 2
	h.fleet(fleet)
	h.put(pool.Entry{Prompt: 10_000}).slotNow(t)
	require.InDelta(t, (100_000.-60_000)*5e-4/100, h.status(h.at).Models[0].Groups[0].Step.LostShare, 1e-9,
		"a KV token on a slow rank weighs more")
}

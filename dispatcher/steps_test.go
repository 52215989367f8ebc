package dispatcher

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/pool"
)

// holding is a board whose policy holds an entry back: a long prompt would
// lengthen everybody's step by more than it gives.
func holding(t *testing.T) (*hand, *Slot, waiting) {
	cfg := realConfig("evenkeel:mode=now,hold=0")
	cfg.StepModel = StepModel{C0Ms: 10, C1Ms: 1e-3}
	h := newHand(t, cfg)
	h.fleet(ranks(2, 8, 0))
	first := h.put(pool.Entry{Prompt: 1000}).slotNow(t)
	for range 13 {
		h.put(pool.Entry{Prompt: 1000}).slotNow(t).Progress(1)
	}
	first.Progress(1)
	require.NoError(t, h.setPolicy("evenkeel:mode=now"))
	long := h.put(pool.Entry{Prompt: 60_000})
	require.True(t, long.waits())
	return h, first, long
}

func TestAHeldEntryIsLookedAtOnceAStep(t *testing.T) {
	h, s, long := holding(t)
	b := h.boards["m"]
	require.Equal(t, 1, b.groups[0].held)
	require.Equal(t, 1, h.status(h.at).Models[0].Groups[0].Held)
	ticks := b.ticks

	h.pass(time.Millisecond)
	require.Equal(t, ticks, b.ticks, "nothing changed and no step is over")

	step := b.step(b.groups[0])
	require.Equal(t, 10*time.Millisecond+time.Duration(b.groups[0].most)*time.Microsecond, step.Round(time.Microsecond))
	require.WithinDuration(t, h.at.Add(-time.Millisecond+step+step/2), h.next(), time.Microsecond, "by the model")
	h.at = h.next()
	h.do()
	require.Equal(t, ticks+1, b.ticks)

	s.Progress(2) // it speaks again: a step is over
	require.Len(t, h.told, 1)
	h.do(h.told...)
	require.Equal(t, ticks+2, b.ticks, "told by a stream, before the timer")
	require.True(t, long.waits())

	h.release(s)
	h.pass(10 * time.Second) // 20 steps and more
	require.False(t, long.waits(), "nobody is held for ever")
	require.Zero(t, b.groups[0].held)
	require.Zero(t, h.next())
}

func TestAHeldEntryThatLeavesEndsTheTicks(t *testing.T) {
	h, _, long := holding(t)
	h.do(func(l *runner) { l.withdraw(long.entry) })
	h.at = h.next()
	h.do()
	require.Zero(t, h.boards["m"].groups[0].held)
	require.Zero(t, h.next())
}

func TestStepsOfAGroupTeachItsModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		d := start(t, cfg)
		d.SetWorkers(ranks(2, 30, 0))
		truth := StepModel{C0Ms: 30, C1Ms: 1e-3}
		var running []*Slot
		for i := range 400 {
			if i%10 == 0 { // the load of the fullest rank changes, or nothing could be learned
				r := <-d.Enqueue(&pool.Entry{ID: uint64(i) + 1, Model: "m", Prompt: 1000 + 211*(i%17)})
				running = append(running, r.Slot)
			}
			if len(running) > 20 {
				d.Release(running[0], Outcome{})
				running = running[1:]
			}
			most := int64(0)
			for _, w := range d.Status(t.Context()).Models[0].Workers {
				most = max(most, w.KVTokens)
			}
			time.Sleep(time.Duration((truth.C0Ms + truth.C1Ms*float64(most)) * float64(time.Millisecond)))
			for _, s := range running {
				s.Progress(s.Generated() + 1)
			}
			synctest.Wait()
		}
		step := d.Status(t.Context()).Models[0].Groups[0].Step
		require.Equal(t, stepLearned, step.Source)
		require.InEpsilon(t, truth.C1Ms, step.C1Ms, 0.05)
		require.InEpsilon(t, truth.C0Ms, step.C0Ms, 0.1)
		require.Greater(t, step.R2, 0.9)
	})
}

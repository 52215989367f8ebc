package prefill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A simulation: engines that prefill one prompt after the other, on a clock of
// its own, in no time of ours.
func TestTheTierRunsOnAClockOfItsOwn(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	scheduler := newScheduler(t, up("a", "b"), withPolicy("finish"), func(c *Config) {
		c.Clock = func() time.Time { return now }
		c.Push.MaxUnanswered = 2
		c.Calibration = CalibrationConfig{Known: true}
	})
	var running []*Lease
	take := func(l *Lease, err error) {
		require.NoError(t, err)
		running = append(running, l)
	}
	for n := range 10 {
		scheduler.Offer(Request{ID: request(n).ID, Model: testModel, PromptTokens: 1000}, take)
	}
	require.Len(t, running, 4, "two on each")
	done := 0
	for ; len(running) > 0; done++ {
		now = now.Add(time.Second)
		l := running[0]
		running = running[1:]
		l.Answered(Usage{}, now.Add(time.Minute))
		l.Release()
	}
	require.Equal(t, 10, done)
	requireIdle(t, scheduler)
}

func TestASimulationIsToldWhenToLookAgain(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	scheduler := newScheduler(t, up("a"), func(c *Config) { c.Clock = func() time.Time { return now } })
	_, ok := scheduler.NextWake()
	require.False(t, ok)
	held := hold(t, scheduler, "a", pooled, 95_000)
	var got *Lease
	scheduler.Offer(Request{Model: testModel}, func(l *Lease, _ error) { got = l })
	at, ok := scheduler.NextWake()
	require.True(t, ok)
	require.Equal(t, now.Add(defaultHold), at)
	now = at
	scheduler.Wake()
	require.NotNil(t, got, "the engine has freed it")
	held[0].Release()
	scheduler.Offer(Request{Model: "none"}, func(_ *Lease, err error) { require.ErrorIs(t, err, ErrModelNotFound) })
}

func TestAnOfferIsTakenBack(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	scheduler := newScheduler(t, up("a"), func(c *Config) {
		c.Clock = func() time.Time { return now }
		c.Push.MaxUnanswered = 1
	})
	var first, third *Lease
	scheduler.Offer(Request{ID: "first", Model: testModel}, func(l *Lease, _ error) { first = l })
	withdraw := scheduler.Offer(Request{ID: "second", Model: testModel}, func(*Lease, error) { t.Error("it was taken back") })
	scheduler.Offer(Request{ID: "third", Model: testModel}, func(l *Lease, _ error) { third = l })
	require.Equal(t, 2, scheduler.Waiting(testModel))
	withdraw()
	require.Equal(t, 1, scheduler.Waiting(testModel))
	first.Release()
	require.NotNil(t, third)
	third.Release()
	requireIdle(t, scheduler)
}

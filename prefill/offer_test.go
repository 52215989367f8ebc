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
	tier := newTier(t, up("a", "b"), withPolicy("finish"), func(c *Config) {
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
		tier.Offer(Request{ID: request(n).ID, Model: testModel, PromptTokens: 1000}, take)
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
	requireIdle(t, tier)
}

func TestASimulationIsToldWhenToLookAgain(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	tier := newTier(t, up("a"), func(c *Config) { c.Clock = func() time.Time { return now } })
	_, ok := tier.NextWake()
	require.False(t, ok)
	held := hold(t, tier, "a", pooled, 95_000)
	var got *Lease
	tier.Offer(Request{Model: testModel}, func(l *Lease, _ error) { got = l })
	at, ok := tier.NextWake()
	require.True(t, ok)
	require.Equal(t, now.Add(defaultHold), at)
	now = at
	tier.Wake()
	require.NotNil(t, got, "the engine has freed it")
	held[0].Release()
	tier.Offer(Request{Model: "none"}, func(_ *Lease, err error) { require.ErrorIs(t, err, ErrModelNotFound) })
}

func TestAnOfferIsTakenBack(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	tier := newTier(t, up("a"), func(c *Config) {
		c.Clock = func() time.Time { return now }
		c.Push.MaxUnanswered = 1
	})
	var first, third *Lease
	tier.Offer(Request{ID: "first", Model: testModel}, func(l *Lease, _ error) { first = l })
	withdraw := tier.Offer(Request{ID: "second", Model: testModel}, func(*Lease, error) { t.Error("it was taken back") })
	tier.Offer(Request{ID: "third", Model: testModel}, func(l *Lease, _ error) { third = l })
	require.Equal(t, 2, tier.Waiting(testModel))
	withdraw()
	require.Equal(t, 1, tier.Waiting(testModel))
	first.Release()
	require.NotNil(t, third)
	third.Release()
	requireIdle(t, tier)
}

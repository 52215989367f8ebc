package handoff

import (
	"encoding/json"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet"
	"evenkeel/mooncake"
)

// The params of a hand-off that an engine refused may go to another rank, but
// not after the deadline: what is pulled then may be somebody else's.
func TestParamsAreNotTakenAfterTheDeadline(t *testing.T) {
	now := time.Now()
	kv := json.RawMessage(`{"block":1}`)
	fresh := func() *Handoff {
		return &Handoff{Handoff: mooncake.NewHandoff(kv, now.Add(time.Second), now.Add(2*time.Second))}
	}
	h := fresh()
	for range 2 { // ranks
		got, err := h.Params(now.Add(time.Second - 1))
		require.NoError(t, err)
		require.Equal(t, kv, got)
	}
	_, err := h.Params(now.Add(time.Second))
	require.ErrorIs(t, err, mooncake.ErrExpired, "taken before")
	_, err = fresh().Params(now.Add(time.Second))
	require.ErrorIs(t, err, mooncake.ErrExpired, "not taken yet")
}

// The limits of an answer may allow more tokens than a time.Duration has seconds.
func TestAnAnswerOfVeryManyTokensIsWaitedFor(t *testing.T) {
	settings := fleet.NewSettings(config.Default())
	now := time.Now()
	r := &fleet.Rank{Signs: new(engine.Traffic).Signs(0)}
	for _, tokens := range []int{1 << 20, 1 << 34, math.MaxInt} {
		require.Equal(t, settings.Limits.ProbeTimeout, Patience(r, settings, now, tokens, now), "%d tokens", tokens)
	}
}

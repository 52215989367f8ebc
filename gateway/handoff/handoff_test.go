package handoff

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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

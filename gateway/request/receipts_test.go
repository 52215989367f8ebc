package request

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/receipt"
	"evenkeel/mooncake"
)

// receipt is what was kept of the last request.
func (b *bed) receipt() *receipt.Receipt {
	b.t.Helper()
	b.over()
	found := b.Journal.Receipts.Find(b.asked[len(b.asked)-1].Record.ID, 1)
	require.Len(b.t, found, 1)
	return found[0]
}

func TestAReceiptHasEveryAttempt(t *testing.T) {
	t.Parallel()
	b := start(t, setup{prefill: both})
	require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Count: 1}))
	require.Equal(t, "right", b.judge("again", ""))
	got := b.receipt()
	require.Len(t, got.Attempts, 2)
	first, second := got.Attempts[0], got.Attempts[1]
	require.Equal(t, 503, first.Status)
	require.True(t, first.Again)
	require.Contains(t, first.Cause, "503")
	require.Nil(t, first.Decode)
	require.Equal(t, 2, second.N)
	require.NotEqual(t, first.Prefill.Candidate, second.Prefill.Candidate)
	require.False(t, second.Again)
	require.NotNil(t, second.Decode)
	require.Equal(t, "ok", got.Outcome)
	require.GreaterOrEqual(t, second.At, first.At)
	b.clean()
}

func TestTheLegsOfAFanOutAreAttemptsOfOneReceipt(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	readSeamless(t, b.post(mooncake.Chat.Path(), chat("two of them", `"n":2,"max_tokens":3,`)))
	got := b.receipt()
	require.Len(t, got.Attempts, 2)
	legs := map[string]bool{}
	for _, a := range got.Attempts {
		legs[a.Leg] = true
		require.NotNil(t, a.Prefill)
		require.NotNil(t, a.Decode)
	}
	require.Equal(t, map[string]bool{"aa": true, "ab": true}, legs)
	require.Equal(t, 6, got.OutputTokens)
	b.clean()
}

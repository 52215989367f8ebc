package request

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/gateway/journal"
	"evenkeel/mooncake"
)

// A decode rank that does not come to a first event with a prompt leaves it to a prefill engine, and no other rank is tried.
func TestARankThatFailsAtAPromptLeavesItToPrefill(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"is refused with 503", "is refused with 500", "is reset before the head", "is reset after the 200", "is garbage", "is an error beneath a 200",
		"is given back at the first token", "begins with an error event", "ends before the first token",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rank := refengine.Config{PrefixCache: 4096}
			b := start(t, alone(setup{decode: []refengine.Config{rank, rank}}))
			rule := ends[name]
			rule.Leg, rule.Count = refengine.LegPlain, 1
			spoil(t, b.d, []*refengine.Rule{&rule, &rule})
			require.Equal(t, "right", b.judge(short, `"stream":true,`))
			b.clean()
			require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_failures_total", ""))
			require.EqualValues(t, 1, b.locals())
			require.Equal(t, 1, b.probes())
			require.Equal(t, journal.Disaggregated, b.asked[0].Told.Route)
			require.Equal(t, 2, b.asked[0].Told.Attempts)
		})
	}
}

func TestWhatTheEngineRefusesIsNotPrefilledFirst(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{}))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Reject}))
	require.Equal(t, http.StatusBadRequest, b.post(mooncake.Chat.Path(), chat(short, "")).status)
	b.clean()
	require.Zero(t, b.probes())
}

func TestAClientThatLeavesALocalPrefillStopsItAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{}))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Leg: refengine.LegPlain}))
	leave, wait := b.send(chat(short, `"stream":true,`))
	b.eventually("it is with the engine", func() bool { return b.d[0].Stats().Plain > 0 })
	leave()
	wait()
	b.clean()
	require.EqualValues(t, 1, b.metric(t, "evenkeel_cancels_total", "prefill"))
	require.EqualValues(t, 1, b.metric(t, "evenkeel_cancel_release_seconds", "prefill"))
	require.Zero(t, b.probes())
	require.Zero(t, b.metric(t, "evenkeel_local_prefill_failures_total", ""))
}

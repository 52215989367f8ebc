package request

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
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

// Legs that ranks were to compute give their slots back when the others of the request find no place in the arrival queue.
func TestLegsGiveTheirSlotsBackWhenTheOthersFindNoPlace(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{configure: func(c *config.Config, _ *Env) {
		c.Pool.Size, c.Prefill.Queue.Max, c.Prefill.Queue.Timeout = 1, 1, time.Hour
	}}))
	require.NoError(t, b.p[0].SetFaults(standing)) // until the first client leaves
	words := func(seed uint64) string { return reftext.MakePrompt(seed, 2000) }
	leave, wait := b.send(chat(words(50), ""))
	b.eventually("the only place is taken", func() bool { return b.Places.Used() == 1 && b.p[0].Stats().Running == 1 })
	queued := make(chan string, 1)
	go func() { queued <- b.judge(words(51), "") }()
	b.eventually("the second waits", func() bool { return b.Tier.Waiting(refModel) == 1 })
	for i, stream := range []string{"", `"stream":true,`} {
		r := b.post(mooncake.Completions.Path(), fmt.Sprintf(`{%s"model":%q,"max_tokens":8,"prompt":["one two three",%q,"four five six"]}`, stream, refModel, words(52)))
		require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
		_, _, fail := read(t, r)
		require.Equal(t, "queue_full", fail)
		require.EqualValues(t, 2*(i+1), b.locals(), "they had slots")
		b.eventually("the slots are free", func() bool { return b.used() == 0 })
	}
	require.NoError(t, b.p[0].SetFaults())
	leave()
	wait()
	require.Equal(t, "right", <-queued)
	b.settle()
}

// A rank without a free slot leaves a short prompt to a prefill engine.
func TestABusyRankLeavesShortPromptsToPrefill(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{decode: []refengine.Config{{Slots: 1, PrefixCache: 4096}}, waits: true}))
	leave := b.endless()
	before := b.probes()
	got := make(chan string, 1)
	go func() { got <- b.judge("hello", "") }()
	b.eventually("it is prefilled", func() bool { return b.probes() > before })
	require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_declined_total", ""))
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, journal.Disaggregated, b.asked[1].Told.Route)
	b.settle()
}

package request

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// What is pulled of a hand-off that was read before are blocks of somebody else. An engine that
// keeps them for the prompt would answer the next one wrongly, even one with a hand-off that is
// right.
func TestADiscardLeavesNothingInAPrefixCache(t *testing.T) {
	t.Parallel()
	e := refengine.Config{KV: refengine.KV{PrefixCache: 64}}
	b := start(t, setup{decode: []refengine.Config{e, e, e}, waits: true,
		configure: func(c *config.Config, _ *Deps) { c.Dispatch.Policy = "prr" }})
	for i := range 5 {
		prompt := reftext.MakePrompt(uint64(i), 300)
		require.NoError(t, b.d[i%3].SetFaults(refengine.Rule{Fault: refengine.SilentEnd, Leg: refengine.LegDecode, Count: 1}))
		for attempts := 1; attempts == 1; attempts = b.asked[len(b.asked)-1].Record.Attempts { // until the engine has its turn
			require.Equal(t, "right", b.judge(prompt, `"stream":true,`))
			b.over()
		}
		b.eventually("it is pulled", func() bool { return b.p[0].Stats().SpentDrains == int64(i+1) })
		for range 3 {
			require.Equal(t, "right", b.judge(prompt, `"stream":true,`))
		}
	}
	b.settle()
	require.EqualValues(t, 5, b.p[0].Stats().SpentDrains)
}

// full is a bed whose only slot is taken until free.
func full(t *testing.T, o setup) (b *bed, free func()) {
	t.Helper()
	if o.decode == nil {
		o.decode = []refengine.Config{{Slots: 1}}
	}
	o.waits = true
	b = start(t, o)
	return b, b.endless()
}

// The pool's TTL is for clients. What they left is pulled when a slot is free, as long as its
// prefill engine holds it.
func TestADiscardOutlivesTheClientsWait(t *testing.T) {
	t.Parallel()
	b, free := full(t, setup{configure: func(c *config.Config, _ *Deps) { c.Pool.TTL = 200 * time.Millisecond }})
	for i := range 4 { // when the last one has waited so long, the discards of the others have, too
		require.Equal(t, http.StatusServiceUnavailable, b.post(mooncake.Chat.Path(), chat(fmt.Sprint("prompt ", i), "")).status)
	}
	require.Empty(t, b.discarded(), "they wait on")
	free()
	b.eventually("they are pulled", func() bool { return len(b.discarded()) == 4 })
	require.Equal(t, []string{"drained", "drained", "drained", "drained"}, b.discarded())
	b.clean()
}

// Discards are bounded: what is beyond stays on the prefill engine's budget.
func TestMoreDiscardsThanPlaces(t *testing.T) {
	t.Parallel()
	b, free := full(t, setup{configure: func(c *config.Config, _ *Deps) { c.Pool.Size = 2 }})
	for i := range 4 {
		leave, wait := b.send(chat(fmt.Sprint("leaver ", i), `"stream":true,`))
		b.eventually("it is pooled", func() bool { return b.pins() == i+1 && b.Places.Used() == 1 })
		leave()
		wait()
		b.eventually("its place is free", func() bool { return b.Places.Used() == 0 })
	}
	require.Equal(t, []string{"crowded", "crowded"}, b.discarded())
	require.Positive(t, b.Prefill.Status()[0].KVTokens)
	free()
	b.eventually("the others are pulled", func() bool { return len(b.discarded()) == 4 })
	b.settle()
	require.Equal(t, []string{"drained", "drained", "crowded", "crowded"}, b.discarded())
	require.Equal(t, []int{2, 2}, []int{b.pins(), b.orphans()}, "which time out")
}

// A decode engine whose core stood still reads a discard, too, when its KV is gone, and keeps
// blocks for it for ever.
func TestBlocksOfADiscardThatComesLateCountAsTaken(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	e := refengine.Config{KV: refengine.KV{HoldTimeout: lease}, Slots: 1}
	b, free := full(t, setup{
		prefill: []refengine.Config{e}, decode: []refengine.Config{e}, late: true,
		profile: mooncake.Profile{Connector: mooncake.NIXLPush, KVHoldTimeout: lease, FirstEventTimeout: lease},
	})
	leave, wait := b.send(chat("a b c", `"stream":true,`))
	pooled(b, 1)
	require.NoError(t, b.d[0].SetFaults(standing))
	leave()
	wait()
	free()
	b.eventually("it is over", func() bool { return len(b.discarded()) == 1 })
	require.Equal(t, []string{"failed"}, b.discarded())
	require.NoError(t, b.d[0].SetFaults())
	b.eventually("its blocks are kept", func() bool { return b.d[0].Stats().Stranded() > 0 })
	require.Positive(t, b.Dispatcher.Status(t.Context()).Models[0].Workers[0].Orphans)
}

// A decode engine that refuses a discard and leaves the hand-off alone is asked again where there
// is no other, but not for ever.
func TestARefusedDiscardIsTriedAgain(t *testing.T) {
	t.Parallel()
	for times, outcome := range map[int]string{2: "drained", 3: "refused"} {
		t.Run(fmt.Sprintf("refused %d times", times), func(t *testing.T) {
			t.Parallel()
			busy := refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegDecode, Skip: 1, Count: times}
			b, free := full(t, setup{decode: []refengine.Config{{Slots: 1, Faults: []refengine.Rule{busy}}}})
			leave, wait := b.send(chat("a b c", ""))
			pooled(b, 1)
			leave()
			wait()
			b.eventually("the proxy notices", func() bool { return b.Open() == 1 })
			free()
			b.eventually("it is over", func() bool { return len(b.discarded()) == 1 })
			b.settle()
			require.Equal(t, []string{outcome}, b.discarded())
			require.Equal(t, times-2, b.pins())
		})
	}
}

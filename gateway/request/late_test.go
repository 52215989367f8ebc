package request

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const latePulls = "evenkeel_late_pulls_total"

// longLease is the hold of tests that lose nothing: a loaded machine stops their process for a second or two, and signs of
// life are believed for three eighths of the hold.
const longLease = 8 * time.Second

// holding is a bed of one engine of each role whose hand-offs are held so long. steps: how long a step of the decode engine takes.
func holding(connector string, hold, margin, steps time.Duration) setup {
	return setup{
		profile: mooncake.Profile{Connector: connector, KVHoldTimeout: hold, HoldMargin: margin},
		prefill: []refengine.Config{{KV: refengine.KV{HoldTimeout: hold}, Prompts: refengine.Prompts{Concurrency: 8}}},
		decode:  []refengine.Config{{KV: refengine.KV{HoldTimeout: hold, PrefixCache: 1000}, Slots: 1, Steps: refengine.Steps{C0: steps}}},
	}
}

// With hand-offs that live for a moment and slots that are always taken, many requests wait too long. They are refused; none
// is decoded from expired KV: settle looks.
func TestExpiredHandoffsAreNeverDecoded(t *testing.T) {
	t.Parallel()
	const all = 30
	o := holding("", 13*time.Second, 12*time.Second, 20*time.Millisecond) // a second in the pool; the pull has its time on a busy machine, too
	o.waits, o.decode[0].Slots = true, 4
	// Only the pool refuses: in the queue for prefill all wait as long as a slow machine takes.
	o.configure = func(c *config.Config, _ *Deps) { c.Prefill.Queue.Timeout = time.Hour }
	b := start(t, o)
	got := <-b.judgeAll(all)
	b.settle()
	require.Positive(t, got["right"], "%v", got)
	require.Positive(t, got["503"], "%v", got)
	require.Equal(t, all, got["right"]+got["503"], "%v", got)
	require.EqualValues(t, got["right"], b.metric(t, "evenkeel_requests_total", "ok"))
	require.EqualValues(t, got["503"], b.metric(t, "evenkeel_requests_total", "pool_timeout"))
}

// A decode engine that reads the KV too late reads somebody else's by then, and answers 200. Nobody gets to see that.
func TestALatePullIsNotBelieved(t *testing.T) {
	t.Parallel()
	const hold = 2 * time.Second
	o := holding("", hold, 0, 0)
	o.late, o.decode[0].KV.TransferBase = true, hold+time.Second
	o.configure = func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts = 1 }
	b := start(t, o)
	for _, more := range []string{`"stream":true,`, ""} {
		require.Equal(t, "504", b.judge("a prompt", more))
	}
	b.settle()
	require.EqualValues(t, 2, b.metric(t, latePulls, ""))
}

// An answer in one piece has no first event that could come in time. If the engine stood still, it is thrown away when it
// comes. The engine has cached the wrong KV by then, and no later request may find it there: settle looks.
func TestWhatAnEngineCachedAfterItStoodStillIsNotFoundAgain(t *testing.T) {
	t.Parallel()
	o := holding(mooncake.NIXLPull, longLease, 0, 0)
	o.late, o.gauged, o.profile.NonStream = true, true, mooncake.NonStreamPassthrough
	b := start(t, o)
	require.NoError(t, b.d[0].SetFaults(standing))
	prompt := strings.Repeat("a prompt whose blocks the decode engine caches ", 40)
	got := b.judging(prompt, "")
	b.eventually("the prefill engine has given its KV away", func() bool { return b.p[0].Stats().Leaks == 1 })
	require.NoError(t, b.d[0].SetFaults())
	require.Equal(t, "right", <-got)
	require.NotZero(t, b.p[0].Stats().ExpiredPulls, "the engine has decoded another prompt's KV")
	require.NotZero(t, b.metric(t, latePulls, ""))
	for range 3 {
		require.Equal(t, "right", b.judge(prompt, `"stream":true,`))
		require.Equal(t, "right", b.judge(prompt, `"stream":true,"cache_salt":null,`), "a salt that is not set is none")
	}
	b.settle()
}

// A decode engine that makes steps renews the hold of requests in its queue. Such an answer is believed however late it
// begins. An engine older than the leases makes steps and renews nothing. The prefill engine counts the hand-offs that it has
// given away, and is asked before an answer is believed that can be right only because of renewals.
func TestAnAnswerThatWaitedInItsEnginesQueue(t *testing.T) {
	t.Parallel()
	for _, renews := range []bool{true, false} {
		t.Run(fmt.Sprintf("renewed %t", renews), func(t *testing.T) {
			t.Parallel()
			o := holding(mooncake.NIXLPull, longLease, 0, 20*time.Millisecond) // quicker events would pile up in the socket, and be no signs of life
			o.late, o.decode[0].KV.NoRenewals = !renews, !renews
			b := start(t, o)
			b.monitor.counts = true
			leave := b.endless()
			got := b.judging("one two three", `"stream":true,`)
			b.eventually("it waits in the engine's queue", func() bool { return b.d[0].Stats().Waiting == 1 })
			if renews {
				b.eventually("its lease is long over and renewed", func() bool { return b.p[0].Stats().Renewals >= 10 }) // six in a lease
			} else {
				b.eventually("the prefill engine has given its KV away", func() bool { return b.p[0].Stats().Leaks == 1 })
				b.monitor.gaveAway(1)
			}
			leave()
			require.Equal(t, "right", <-got)
			b.settle()
			again := 0
			if !renews {
				again = 1
			}
			require.EqualValues(t, again, b.metric(t, latePulls, ""))
			require.Equal(t, 2+again, b.probes())
		})
	}
}

// NIXL keeps a hand-off for a short lease only, which a decode engine renews for what is in its own queue. All slots are taken
// for much longer than the lease and than first_event_timeout, and yet everybody is answered.
func TestWaitsLongerThanALeaseAreAnswered(t *testing.T) {
	t.Parallel()
	// A hand-off that has been bound at its deadline has a quarter of a second to be sent, the longest that there is.
	// After that its KV is kept without a sign of life for three quarters of the margin, in which two heartbeats must go out.
	const hold, margin, waiting = 8 * time.Second, 6 * time.Second, 3
	for _, row := range []struct {
		connector string // one that pushes keeps its KV for a lease where it is asked first
		stream    bool
	}{{mooncake.NIXLPull, true}, {mooncake.NIXLPull, false}, {mooncake.NIXLPush, true}} {
		stream := row.stream
		t.Run(fmt.Sprintf("%s, stream %t", row.connector, stream), func(t *testing.T) {
			t.Parallel()
			o := holding(row.connector, hold, margin, 20*time.Millisecond)
			o.waits, o.decode, o.profile.FirstEventTimeout = true, append(o.decode, o.decode...), time.Second
			o.configure = func(c *config.Config, _ *Deps) { c.Dispatch.Beyond, c.Prefill.Retry.Attempts = 2*waiting, 10 }
			b := start(t, o)
			leaves := []func(){b.endless(), b.endless()}
			var got []<-chan string
			for i := range waiting {
				got = append(got, b.judging(fmt.Sprint("prompt ", i), fmt.Sprintf(`"stream":%t,`, stream)))
			}
			b.eventually("their leases are long over and renewed", func() bool { return b.p[0].Stats().Renewals >= waiting*8 }) // six in a lease
			require.Positive(t, b.metric(t, "evenkeel_beyond_slots_total", ""))
			for _, leave := range leaves {
				leave()
			}
			for _, g := range got {
				require.Equal(t, "right", <-g)
			}
			b.settle()
		})
	}
}

// A request that has its slot must begin, however long it has waited for it.
func TestFirstEventTimeoutCountsFromTheSlot(t *testing.T) {
	t.Parallel()
	// It waits in the pool for a second. Then it has a quarter of a second, the longest that there is, to be sent; on a machine
	// that takes longer it is prefilled again, and no engine has seen it.
	const step, limit = 20 * time.Millisecond, time.Second
	o := holding(mooncake.NIXLPull, 30*time.Second, 29*time.Second, step)
	o.waits, o.profile.FirstEventTimeout = true, limit
	o.configure = func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts = 10 }
	b := start(t, o)
	leave := b.endless()
	require.NoError(t,
		b.d[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseAfterHeaders, Leg: refengine.LegDecode, Count: 1}))
	got := b.judging("a prompt", `"stream":true,`)
	b.eventually("it is in the engine's queue", func() bool { return b.decodes() > 1 })
	tokens := b.d[0].Stats().Tokens
	b.eventually("first_event_timeout is long over", func() bool { return b.d[0].Stats().Tokens-tokens > 2*int64(limit/step) })
	require.Equal(t, 2, b.decodes(), "it was sent once")
	require.Empty(t, got, "nothing is wrong as long as it has no slot")
	leave()
	require.Equal(t, "right", <-got, "from then on the engine has been silent for too long, and it is prefilled again")
	b.settle()
	require.Equal(t, engine.Unclear, b.monitor.judged["decode d0"][0], "a canary finds out whether it computes")
}

package request

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

const latePulls = "evenkeel_late_pulls_total"

// longLease is the hold of tests that lose nothing, although a loaded machine stops their process
// for a second or two.
const longLease = 8 * time.Second

// holding is a bed of one engine of each role whose hand-offs are held so long. steps: how long a
// step of the decode engine takes.
func holding(connector string, hold, margin, steps time.Duration) setup {
	return setup{
		profile: mooncake.Profile{Connector: connector, KVHoldTimeout: hold, HoldMargin: margin},
		prefill: []refengine.Config{{KV: refengine.KV{HoldTimeout: hold}, Prompts: refengine.Prompts{Concurrency: 8}}},
		decode:  []refengine.Config{{KV: refengine.KV{HoldTimeout: hold, PrefixCache: 1000}, Slots: 1, Steps: refengine.Steps{C0: steps}}},
	}
}

// With hand-offs that live for a moment and slots that are always taken, many requests wait too
// long. They are refused; none is decoded from expired KV: settle looks.
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

// A decode engine that reads the KV too late reads somebody else's by then, and answers 200. Nobody
// gets to see that.
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

// An answer in one piece has no first event that could come in time. If the engine stood still, it
// is thrown away when it comes. The engine has cached the wrong KV by then, and no later request
// may find it there: settle looks.
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

// An answer that comes after the hold of its KV may be right, because the engines know of renewals
// that the proxy does not. A stream is prefilled again all the same, and an answer in one piece if
// the prefill engine has freed KV that no decode engine had fetched.
func TestAnAnswerThatWaitedInItsEnginesQueue(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name           string
		stream, renews bool
		again          int
	}{
		{"an answer in one piece whose KV is kept", false, true, 0},
		{"one whose KV is freed", false, false, 1},
		{"a stream", true, true, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			o := holding(mooncake.NIXLPull, longLease, 0, 20*time.Millisecond)
			o.late, o.profile.NonStream = true, mooncake.NonStreamPassthrough
			o.decode[0].KV.NoRenewals = !row.renews
			b := start(t, o)
			b.monitor.counts = true
			leave := b.endless()
			got := b.judging("one two three", fmt.Sprintf(`"stream":%t,`, row.stream))
			b.eventually("it waits in the engine's queue", func() bool { return b.d[0].Stats().Waiting == 1 })
			switch {
			case row.stream:
				b.eventually("its hold is over", func() bool { return b.metric(t, latePulls, "") == 1 })
			case row.renews:
				b.eventually("its lease is long over and renewed", func() bool { return b.p[0].Stats().Renewals >= 10 }) // six in a lease
			default:
				b.eventually("the prefill engine has given its KV away", func() bool { return b.p[0].Stats().Leaks == 1 })
				b.monitor.gaveAway(1)
			}
			leave()
			require.Equal(t, "right", <-got)
			b.settle()
			require.EqualValues(t, row.again, b.metric(t, latePulls, ""))
			require.Equal(t, 2+row.again, b.probes())
		})
	}
}

package request

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// excused are what a client may be told while an engine stands still.
var excused = []string{"right", "500", "502", "503", "504"}

// Either engine of a pair stands still for longer than each time that it or the other one promises.
// No answer is wrong, and all goes on
// afterwards: settle looks for wrong blocks and bad hits. The table of docs/failures.md says what ends each wait.
func TestEitherEngineStandsStillForLongerThanItPromises(t *testing.T) {
	t.Parallel()
	const promise = 3 * time.Second // a machine that pauses the test for less breaks none
	for _, row := range []struct{ name, connector string }{
		{"ascend-mooncake-v1", mooncake.AscendMooncakeV1},
		{"vllm-mooncake", mooncake.VLLMMooncake},
		{"nixl-pull", mooncake.NIXLPull},
		{"nixl-push", mooncake.NIXLPush},
		{"ascend-layerwise", mooncake.AscendLayerwise},
		{"sglang", mooncake.SGLang},
	} {
		for _, side := range []string{"prefill", "decode"} {
			t.Run(row.name+", the "+side+" engine", func(t *testing.T) {
				t.Parallel()
				e := []refengine.Config{{KV: refengine.KV{HoldTimeout: promise, PrefixCache: 1000},
					SGLang: refengine.SGLangOptions{BootstrapTimeout: promise, WaitingTimeout: promise}}}
				o := setup{
					prefill: e, decode: e, late: true, gauged: true,
					profile: mooncake.Profile{Connector: row.connector, FirstEventTimeout: 2 * promise},
					configure: func(c *config.Config, _ *Deps) {
						c.Limits.ProbeTimeout, c.Bind.CallbackTimeout, c.Bind.Grace = 2*promise, promise, promise/2
					},
				}
				if row.connector != mooncake.AscendLayerwise && row.connector != mooncake.SGLang {
					o.profile.KVHoldTimeout = promise
				}
				b := start(t, o)
				stands := map[string]*refengine.Engine{"prefill": b.p[0], "decode": b.d[0]}[side]
				require.NoError(t, stands.SetFaults(refengine.Rule{Fault: refengine.Standstill, DelayMS: int((4 * promise).Milliseconds())}))
				for verdict, n := range <-b.judgeAll(6) {
					require.Contains(t, excused, verdict, "%d of 6", n)
				}
				require.NoError(t, stands.SetFaults())
				b.eventually("it serves again", func() bool { return b.judge("prompt 0 of many", `"stream":true,`) == "right" })
				for i := range 6 {
					b.right(fmt.Sprintf("prompt %d of many", i))
				}
				b.settle()
			})
		}
	}
}

// right asks until the answer is whole and right. Only a machine that woke this process a second
// too late excuses a failure, and nothing excuses a wrong answer.
func (b *bed) right(prompt string) {
	b.t.Helper()
	if b.lateness == nil {
		b.lateness = refclient.Lateness(b.t)
	}
	b.eventually(prompt+" is answered", func() bool {
		before := b.lateness()
		verdict := b.judge(prompt, `"stream":true,`)
		if b.lateness()-before < time.Second {
			require.Equal(b.t, "right", verdict, prompt)
		}
		require.Contains(b.t, excused, verdict)
		return verdict == "right"
	})
}

// A decode engine stands still again and again, while callers ask for the same few prompts.
// Requests are under way under one cache_salt then while others have the next one. No answer is
// made of wrong KV, neither theirs nor a later one: settle looks.
func TestTheSamePromptsOverChangesOfTheSalt(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	e := []refengine.Config{{KV: refengine.KV{HoldTimeout: lease, PrefixCache: 1000}}}
	b := start(t, setup{prefill: e, decode: e, late: true, gauged: true,
		profile: mooncake.Profile{Connector: mooncake.NIXLPull, KVHoldTimeout: lease, FirstEventTimeout: 4 * lease}})
	const callers, prompts = 12, 3
	over, done := make(chan struct{}), make(chan map[string]int, callers)
	for i := range callers {
		go func() {
			got := map[string]int{}
			defer func() { done <- got }()
			for n := 0; ; n++ {
				select {
				case <-over:
					return
				default:
					got[b.judge(fmt.Sprintf("prompt %d", (i+n)%prompts), `"stream":true,`)]++
				}
			}
		}()
	}
	for range 2 {
		b.d[0].StandStill(2 * lease)
		time.Sleep(5 * lease / 2) // that is what is tested: more than the lease
	}
	close(over)
	for range callers {
		for verdict, n := range <-done {
			require.Contains(t, excused, verdict, "%d of them", n)
		}
	}
	require.NotZero(t, b.metric(t, latePulls, ""), "some KV was not certainly kept until it was read")
	for i := range 2 * prompts {
		b.right(fmt.Sprintf("prompt %d", i%prompts))
	}
	b.settle()
}

// A prefill engine that broke off may have written: no other one goes on for the same decode call,
// whose blocks may be lost. They stay on the rank's account until another process has its number.
func TestNoSecondPrefillForABrokenOne(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: both, profile: mooncake.Profile{Connector: mooncake.AscendLayerwise}})
	runs := func(process uint64) {
		b.workers = slices.Clone(b.workers)
		for i := range b.workers {
			b.workers[i].Process = process
		}
		b.Dispatcher.SetWorkers(b.workers)
	}
	runs(1)
	require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Reset, Count: 1}))
	require.Equal(t, "right", b.judge("one two three", `"stream":true,`))
	require.Equal(t, 2, b.decodes())
	orphans := func() (n int64) {
		for _, w := range b.Dispatcher.Status(t.Context()).Models[0].Workers {
			n += w.Orphans
		}
		return n
	}
	b.eventually("the blocks are kept on the rank's account", func() bool { return orphans() > 0 })
	runs(2)
	b.eventually("another process has its blocks back", func() bool { return orphans() == 0 })
	b.settle()
}

// A decode engine whose core stood still asks a prefill engine for KV that is gone, for requests
// whose clients have long had an error, and then keeps their blocks for ever. Their room counts as
// taken.
func TestBlocksForKVThatIsGoneCountAsTaken(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	e := []refengine.Config{{KV: refengine.KV{HoldTimeout: lease}}}
	b := start(t, setup{
		prefill: e, decode: e, late: true,
		profile:   mooncake.Profile{Connector: mooncake.NIXLPush, KVHoldTimeout: lease, FirstEventTimeout: 4 * lease},
		configure: func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts = 1 },
	})
	require.NoError(t, b.d[0].SetFaults(standing))
	require.Contains(t, []string{"502", "503", "504"}, b.judge("a prompt", `"stream":true,`))
	b.eventually("the prefill engine has given the KV away", func() bool { return b.p[0].Stats().Leaks == 1 })
	require.NoError(t, b.d[0].SetFaults())
	b.eventually("its blocks are kept", func() bool { return b.d[0].Stats().Stranded() > 0 })
	require.Positive(t, b.Dispatcher.Status(t.Context()).Models[0].Workers[0].Orphans)
}

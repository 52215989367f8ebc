package request

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/journal"
	"evenkeel/mooncake"
)

// does is an engine of so many ranks that prefill and decode.
func does(ranks int) refengine.Config {
	return refengine.Config{DPSize: ranks, KV: refengine.KV{PrefixCache: 4096}}
}

// All kinds of requests that a pair of engines serves are served by a rank alone, too.
func TestRanksThatPrefillAndDecodeServeAlone(t *testing.T) {
	t.Parallel()
	b := start(t, setup{mixed: []refengine.Config{does(2)}})
	for _, more := range []string{`"stream":true,`, "", `"stream":true,"n":2,"seed":5,`, `"n":2,"seed":5,`} {
		require.Equal(t, "right", b.judge(reftext.MakePrompt(1, 300), more))
	}
	r := b.post(mooncake.Completions.Path(), completion("one two three", `"max_tokens":8,"n":3,"seed":5,`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, readSeamless(t, r).finishes, 3)
	for _, d := range dialects {
		for _, stream := range []bool{true, false} {
			require.Equal(t, "right", d.judge(b, "hello", stream))
		}
	}
	r = b.post(mooncake.Chat.Path(), chat("one two three", `"use_beam_search":true,"n":1,"max_tokens":4,`))
	require.Equal(t, http.StatusOK, r.status, "a beam search is one answer of one engine: %s", r.body)
	b.over()
	for _, in := range b.asked {
		require.Equal(t, journal.Aggregated, in.Record.Route)
		require.Positive(t, in.Record.PromptTokens)
		require.NotEmpty(t, in.Record.Rank)
	}
	b.clean()
	require.EqualValues(t, 2+4+3+4+1, b.d[0].Stats().Requests, "each answer is asked for once")
}

// A client that leaves while its prompt is computed, or while it is answered, has its slot and its
// lease free at once: clean waits for them.
func TestClientsThatLeaveARankThatDoesBoth(t *testing.T) {
	t.Parallel()
	slow := does(1)
	slow.Prompts.Base = 300 * time.Millisecond
	for _, stream := range []string{`"stream":true,`, ""} {
		for name, o := range map[string]setup{"in its prompt": {mixed: []refengine.Config{slow}},
			"in its answer": {mixed: []refengine.Config{does(1)}}} {
			t.Run(name+" "+stream, func(t *testing.T) {
				t.Parallel()
				b := start(t, o)
				leave, wait := b.send(chat(reftext.MakePrompt(1, 300), stream+`"ignore_eos":true,`))
				b.eventually("it runs", func() bool { return b.d[0].Stats().Running == 1 })
				if name == "in its answer" {
					b.eventually("tokens come", func() bool { return b.d[0].Stats().Tokens > 2 })
				}
				leave()
				wait()
				b.clean()
				require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
			})
		}
	}
}

// Half of two groups dies: requests, and answers that have begun, go on with the other one.
func TestAnswersGoOnWhenAGroupDies(t *testing.T) {
	t.Parallel()
	slow := does(2)
	slow.Steps.C0 = 20 * time.Millisecond
	b := start(t, setup{mixed: []refengine.Config{slow, does(2)}, groups: []string{"one", "other"},
		profile: mooncake.Profile{ChatResume: mooncake.ChatResumeContinue}})
	done := b.judgeAll(16)
	b.eventually("both have begun", func() bool { return b.d[0].Stats().Tokens > 20 && b.d[1].Stats().Running+b.d[1].Stats().Finished > 0 })
	b.d[0].Kill()
	b.only(2, 3)
	require.Equal(t, map[string]int{"right": 16}, <-done)
	require.Equal(t, map[string]int{"right": 8}, <-b.judgeAll(8))
	b.settle()
}

// How long a prompt is nobody knows before an engine has counted it. One that looks too long for
// every rank is still sent: only its engine can refuse it.
func TestAPromptThatLooksTooLongIsSent(t *testing.T) {
	t.Parallel()
	e := does(1)
	e.Model.MaxLen, e.KV.Tokens = 2048, 4096
	b := start(t, setup{mixed: []refengine.Config{e}})
	b.route.MaxLen = 2048
	prompt := ""
	for range 40_000 {
		prompt += "a"
	}
	require.Equal(t, journal.Aggregated, b.say(talk("", prompt)))
	require.Less(t, b.asked[0].Record.PromptTokens, 2048)
	b.clean()
}

// A rank whose queue is full is that rank's matter: the other ranks of its address take the request
// at once, and nothing is held against the engine.
func TestAFullRankLeavesItsGroupInService(t *testing.T) {
	t.Parallel()
	e := does(4)
	e.DPMode = "internal"
	b := start(t, setup{mixed: []refengine.Config{e}})
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Count: 1}))
	require.Equal(t, "right", b.judge("hi", ""))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
	require.Equal(t, "503", b.judge("hi", ""), "all its attempts found a full queue")
	require.NoError(t, b.d[0].SetFaults())
	require.Zero(t, b.Prefill.Status()[0].Failures)
	require.Equal(t, "right", b.judge("hi", ""))
	b.settle()
	require.Equal(t, 2, b.asked[0].Record.Attempts)
}

// A turn of a chat goes to the rank that holds the turns before it, which computes only what is
// new.
func TestATurnGoesToTheRankThatHoldsTheChat(t *testing.T) {
	t.Parallel()
	b := start(t, setup{mixed: []refengine.Config{does(2)}, waits: true})
	first := reftext.MakePrompt(1, 3000)
	b.say(talk("", first))
	was := b.asked[0].Record.Rank
	for i := range 3 {
		b.say(talk("", first, "well", fmt.Sprint("and then, number ", i)))
		r := b.asked[1+i].Record
		require.Equal(t, was, r.Rank)
		require.Less(t, r.LocalTokens, 257)
		require.Greater(t, r.CachedTokens, 2800, "as the engine counts")
	}
	b.clean()
}

// One caller asks for nothing but prompts that begin with what one rank holds, while there are more
// requests than slots. Others ask beside it. The rank is not kept for that caller, and the caller
// does not wait for that rank: all are answered, and all ranks take part in both.
func TestOneCallerWhosePrefixOneRankHolds(t *testing.T) {
	t.Parallel()
	ranks := refengine.Config{DPSize: 4, Slots: 2, KV: refengine.KV{PrefixCache: 1 << 16}}
	for name, o := range map[string]setup{
		"decode ranks that may prefill": alone(setup{decode: []refengine.Config{ranks}}), "ranks that prefill and decode": {mixed: []refengine.Config{ranks}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o.waits = true
			more := o.configure
			o.configure = func(c *config.Config, deps *Deps) {
				if more != nil {
					more(c, deps)
				}
				c.Dispatch.Policy = config.Default().Dispatch.Policy
			}
			b := start(t, o)
			prefix := reftext.MakePrompt(1, 3000)
			b.say(talk(`"stream":true,`, prefix))
			holder := b.asked[0].Record.Rank
			const each = 24
			var wg sync.WaitGroup
			for i := range each {
				for _, body := range []string{
					talk(`"stream":true,`, prefix, "well", reftext.MakePrompt(uint64(100+i), 1500)), talk(`"stream":true,`, reftext.MakePrompt(uint64(200+i), 9000)),
				} {
					wg.Go(func() {
						p, err := reftext.Render(true, []byte(body))
						require.NoError(t, err)
						text, _, fail := read(t, b.post(mooncake.Chat.Path(), body))
						require.Empty(t, fail)
						require.Equal(t, reftext.NaturalLength(p.Answer), right(t, p.Answer, text))
					})
				}
			}
			wg.Wait()
			b.over()
			on := map[string]map[string]int{"near": {}, "far": {}}
			for _, in := range b.asked[1:] {
				who := "near"
				if in.Record.PromptTokens > 7000 {
					who = "far"
				}
				on[who][in.Record.Rank]++
			}
			t.Log(holder, on)
			require.Len(t, on["near"], ranks.DPSize, "it does not wait for the rank that holds the prefix")
			require.Contains(t, on["far"], holder, "the rank is not kept for one caller")
			b.settle()
		})
	}
}

// sum is what the values of a histogram add up to.
func (b *bed) sum(name string) float64 {
	b.t.Helper()
	all, err := b.registry.Gather()
	require.NoError(b.t, err)
	for _, family := range all {
		if family.GetName() == name {
			return family.GetMetric()[0].GetHistogram().GetSampleSum()
		}
	}
	b.t.Fatalf("no histogram %s", name)
	return 0
}

// Whom the default policy holds for a round on ranks that prefill and decode: no client that asks
// alone, but many that ask together, and none with patience 0. The log says for how long; on a
// machine with two idle cores 0.1 to 0.6 ms beside two answers, and 13 to 15 ms among 24 users.
func TestWhoIsHeldForARound(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, policy string) (b *bed, asks func(client, n int), held func(name string, load func()) float64) {
		b = start(t, setup{
			mixed: []refengine.Config{{DPSize: 4, Slots: 8, Steps: refengine.Steps{C0: 5e6},
				Prompts: refengine.Prompts{PerToken: 50e3, Shared: 100e3, MaxBatchedTokens: 512}}},
			waits: true,
			configure: func(c *config.Config, _ *Deps) {
				c.Dispatch.Policy, c.Dispatch.Window = policy, config.Default().Dispatch.Window
			},
		})
		asks = func(client, n int) {
			for i := range n {
				prompt := reftext.MakePrompt(uint64(1000*client+i), 200+100*(client*7+i*3)%1200)
				require.Equal(t, http.StatusOK, b.post(mooncake.Chat.Path(), talk(`"stream":true,"max_tokens":24,`, prompt)).status)
			}
		}
		held = func(name string, load func()) float64 {
			const hold = "evenkeel_round_hold_seconds"
			sum, n := b.sum(hold), b.metric(t, hold, "")
			load()
			placed := b.metric(t, hold, "") - n
			require.Positive(t, placed)
			mean := (b.sum(hold) - sum) / placed
			t.Logf("%s: %.0f requests were held for %.2f ms in the mean", name, placed, 1000*mean)
			return mean
		}
		return b, asks, held
	}
	crowd := func(asks func(client, n int), n int) {
		var all sync.WaitGroup
		for i := range 24 {
			all.Go(func() { asks(3+i, n) })
		}
		all.Wait()
	}
	t.Run("with patience", func(t *testing.T) {
		t.Parallel()
		b, asks, held := begin(t, "evenkeel")
		require.Zero(t, held("one at a time", func() { asks(1, 6) }))
		held("one at a time, beside two answers", func() {
			for range 2 {
				defer b.endless()()
			}
			asks(2, 6)
		})
		mean := 0.0
		for range 3 { // on a busy machine a crowd may come one by one
			if mean = held("24 users", func() { crowd(asks, 3) }); mean > 0 {
				break
			}
		}
		require.Positive(t, mean)
		b.settle()
	})
	t.Run("without patience", func(t *testing.T) {
		t.Parallel()
		b, asks, held := begin(t, "evenkeel:patience=0")
		require.Zero(t, held("24 users with patience 0", func() { crowd(asks, 2) }))
		b.settle()
	})
}

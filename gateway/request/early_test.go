package request

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

var earlyConnectors = []string{mooncake.AscendLayerwise, mooncake.SGLang}

// confirm waits so long for the end of a prefill before a token goes out.
func confirm(d time.Duration) func(*config.Config, *Deps) {
	return func(c *config.Config, _ *Deps) { c.Bind.Confirm = d }
}

// both are two engines of a role.
var both = []refengine.Config{{}, {}}

// A prefill engine that fails ends the decode call at once: SGLang's would wait for 300 s. Here the
// second one fails, too. What comes of one alone is in TestWhatComesOfTheEndOfALeg.
func TestTwoPrefillEnginesThatFail(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		for _, name := range []string{"is refused with 500", "is refused with 503", "is reset before the head", "is reset after the 200"} {
			t.Run(connector+" "+name, func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{prefill: both, profile: mooncake.Profile{Connector: connector}, configure: confirm(patience)})
				rule := ends[name]
				rule.Count = 1
				spoil(t, b.p, []*refengine.Rule{&rule, &rule})
				require.Contains(t, []string{"right", "502"}, b.judge(short, `"stream":true,`))
				for _, p := range b.p {
					require.NoError(t, p.SetFaults())
				}
				require.Equal(t, "right", b.judge(short, `"stream":true,`))
				b.settle()
			})
		}
	}
}

// A decode engine that refuses a request leaves none behind on the prefill engine: settle waits
// until nothing runs there.
func TestTwoDecodeEnginesThatRefuse(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: both, profile: mooncake.Profile{Connector: connector}})
			rule := &refengine.Rule{Fault: refengine.Busy, Count: 1}
			spoil(t, b.d, []*refengine.Rule{rule, rule})
			require.Equal(t, "right", b.judge(short, `"stream":true,`))
			b.settle()
		})
	}
}

// A decode engine that takes no connections is reported to the monitor, which need not wait for its
// next health check.
func TestADecodeEngineThatIsGoneIsReported(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: mooncake.Profile{Connector: connector}, configure: confirm(patience)})
			b.d[0].Kill() // keeps its port, which no other test can take
			require.NotEqual(t, "right", b.judge(short, `"stream":true,`))
			b.settle()
			b.monitor.mu.Lock()
			defer b.monitor.mu.Unlock()
			reported := slices.ContainsFunc(b.monitor.broken, func(id string) bool { return strings.HasPrefix(id, "decode ") })
			require.True(t, reported, "%v", b.monitor.broken)
		})
	}
}

// A prefill of SGLang that is aborted in its transfer may answer as if it were whole. It is not
// believed, whether its answer comes before the first token is due, when that of the decode engine
// is all there, or when tokens have gone out already.
func TestAnAbortedTransferIsNotBelieved(t *testing.T) {
	t.Parallel()
	aborts := refengine.Rule{Fault: refengine.PrefillAbort200}
	bedOf := func(t *testing.T, d time.Duration) *bed {
		t.Parallel()
		return start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}, configure: confirm(d)})
	}
	t.Run("in time", func(t *testing.T) {
		b := bedOf(t, patience)
		require.NoError(t, b.p[0].SetFaults(aborts))
		require.Equal(t, "502", b.judge(short, `"stream":true,`))
		require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.PrefillAbort200, Count: 1}))
		require.Equal(t, "right", b.judge(short, `"stream":true,`))
		b.settle()
	})
	t.Run("behind the answer of the decode engine", func(t *testing.T) {
		b := bedOf(t, config.Default().Bind.Confirm)
		require.NoError(t, b.p[0].SetFaults(aborts, refengine.Rule{Fault: refengine.Slow, DelayMS: 700}))
		require.Equal(t, "502", b.judge(short, ""))
		r := b.post(mooncake.Chat.Path(), chat(short, `"stream":true,`))
		require.Equal(t, http.StatusOK, r.status, r.body)
		_, _, fail := read(t, r)
		require.NotEmpty(t, fail)
		b.settle()
	})
	t.Run("when tokens are out", func(t *testing.T) {
		b := bedOf(t, 0)
		late := refengine.Rule{Fault: refengine.PrefillAbort200, DelayMS: 500}
		require.NoError(t, b.p[0].SetFaults(late))
		for _, stream := range []bool{true, false} {
			r := b.post(mooncake.Chat.Path(), chat(short, fmt.Sprintf(`"stream":%v,`, stream)))
			if r.status == http.StatusOK { // tokens had come by then
				require.True(t, stream, r.body)
				_, _, fail := read(t, r)
				require.Equal(t, "prefill_failed", fail)
				continue
			}
			require.Equal(t, http.StatusBadGateway, r.status, r.body)
		}
		late.Count = 1
		require.NoError(t, b.p[0].SetFaults(late))
		require.Contains(t, []string{"right", "502"}, b.judge(short, ""))
		b.settle()
	})
}

// unconfirmed is a prefill engine of SGLang that hands its KV over and never ends its answer.
var unconfirmed = refengine.Rule{Fault: refengine.Hang, Phase: refengine.PhaseMidStream, Leg: refengine.LegProbe}

// When a decode engine has ended an answer, its slot is free, even if the prefill engine has not
// said yet that the KV was whole. If the client leaves then, nothing stays charged.
func TestADecodeThatHasEndedHoldsNoSlotForItsPrefill(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprintf("stream %t", stream), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}, configure: func(c *config.Config, _ *Deps) {
				c.Bind.Grace, c.Bind.Confirm = time.Minute, time.Millisecond
			}})
			require.NoError(t, b.p[0].SetFaults(unconfirmed))
			leave, wait := b.send(chat(short, fmt.Sprintf(`"stream":%t,`, stream)))
			b.eventually("the request has its slot", func() bool { return b.decodes() == 1 })
			b.eventually("the slot is free again", func() bool { return b.used() == 0 })
			require.EqualValues(t, 1, b.Open(), "it waits for the prefill engine")
			leave()
			wait()
			b.eventually("nothing is left of it", func() bool { return b.Open() == 0 && b.p[0].Stats().Running == 0 })
			b.eventually("the prefill leg has ended, too", func() bool { return b.Prefill.Status()[0].Inflight == 0 })
			b.settle()
		})
	}
}

// The wait for the prefill engine's confirmation has a bound of its own. An answer that is not
// confirmed by then ends with an error.
func TestAnAnswerThatIsNotConfirmedInTimeEndsWithAnError(t *testing.T) {
	t.Parallel()
	const grace = 3 * time.Second // a right answer is confirmed in time on a loaded machine, too
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}, configure: func(c *config.Config, _ *Deps) {
		c.Bind.Grace, c.Bind.Confirm = grace, time.Millisecond
	}})
	require.NoError(t, b.p[0].SetFaults(unconfirmed))
	r := b.post(mooncake.Chat.Path(), chat(long, `"stream":true,`)) // one that comes at once has no status before its confirmation
	require.Equal(t, http.StatusOK, r.status, r.body)
	_, _, fail := read(t, r)
	require.Equal(t, "prefill_timeout", fail)
	r = b.post(mooncake.Chat.Path(), chat(short, ""))
	require.Equal(t, http.StatusGatewayTimeout, r.status, r.body)
	require.Contains(t, r.body, "prefill_timeout")
	require.NoError(t, b.p[0].SetFaults())
	require.Equal(t, "right", b.judge(short, `"stream":true,`))
	b.settle()
}

// If a prefill engine stands still, the slot of a client that has left is free after the grace. The
// decode engine may keep blocks for KV that comes late, so their room stays charged.
func TestAPrefillThatStandsStillHoldsNoSlotOfAClientThatLeft(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: []refengine.Config{{Slots: 2}}, profile: mooncake.Profile{Connector: connector},
				configure: func(c *config.Config, _ *Deps) {
					c.Bind.Grace = 300 * time.Millisecond
				}})
			require.NoError(t, b.p[0].SetFaults(standing))
			for i := range int64(2) {
				leave, wait := b.send(chat(short, `"stream":true,`))
				b.eventually("its prefill is under way", func() bool { return b.p[0].Stats().Requests > i && b.p[0].Stats().Running > 0 })
				leave()
				wait()
			}
			b.eventually("both slots are free", func() bool { return b.used() == 0 })
			b.eventually("nothing is open", func() bool { return b.Open() == 0 })
			require.NoError(t, b.p[0].SetFaults())
			b.eventually("it serves again", func() bool { return b.judge(short, `"stream":true,`) == "right" })
			b.settle()
		})
	}
}

// What the client's leaving means for both legs, in each phase.
func TestTheClientOfABoundRequestLeaves(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: 30 * time.Millisecond}}},
				decode:  []refengine.Config{{Steps: refengine.Steps{C0: 5 * time.Millisecond}}},
				profile: mooncake.Profile{Connector: connector},
			})
			for _, after := range []time.Duration{0, 5, 15, 30, 45, 80} {
				leave, wait := b.send(chat(strings.Repeat("a b ", int(after)), `"stream":true,"max_tokens":50,`))
				time.Sleep(after * time.Millisecond) // the phase is whatever it has reached by then
				leave()
				wait()
			}
			require.Equal(t, "right", b.judge(short, `"stream":true,`))
			b.settle()
		})
	}
}

// KV that does not arrive is no fault of the request: the third decode engine serves what two could
// not get.
func TestTransfersThatFailAreNotTheRequestsFault(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"in a stream": `"stream":true,`, "as a status": ``} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				decode: []refengine.Config{{}, {}, {}}, profile: mooncake.Profile{Connector: mooncake.SGLang, NonStream: mooncake.NonStreamPassthrough},
				configure: func(c *config.Config, _ *Deps) { c.Prefill.Retry.Attempts, c.Prefill.Retry.Budget = 3, 1 },
			})
			for _, d := range b.d[:2] {
				require.NoError(t, d.SetFaults(refengine.Rule{Fault: refengine.TransferFails, Count: 2}))
			}
			for range 6 {
				require.Equal(t, "right", b.judge(short, more))
			}
			b.settle()
			require.Positive(t, b.d[0].Stats().FailedPulls+b.d[1].Stats().FailedPulls)
		})
	}
}

// judgeAll has so many streamed chats at once judged. done says what came of them.
func (b *bed) judgeAll(n int) (done chan map[string]int) { return b.judgeEach(n, `"stream":true,`) }

// judgeEach is judgeAll of chats with more members.
func (b *bed) judgeEach(n int, more string) (done chan map[string]int) {
	done = make(chan map[string]int, 1)
	verdicts := make(chan string, n)
	for i := range n {
		go func() {
			got := "no verdict" // if judge fails
			defer func() { verdicts <- got }()
			got = b.judge(fmt.Sprintf("prompt %d of many", i), more)
		}()
	}
	go func() {
		got := map[string]int{}
		for range n {
			got[<-verdicts]++
		}
		done <- got
	}()
	return done
}

// A decode engine that is killed while prefills run for it: every request goes on elsewhere.
func TestBoundRequestsSurviveTheirDecodeEngine(t *testing.T) {
	t.Parallel()
	for _, connector := range earlyConnectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{
				prefill: []refengine.Config{{Prompts: refengine.Prompts{Concurrency: 64}}}, decode: both,
				profile:   mooncake.Profile{Connector: connector},
				configure: func(c *config.Config, _ *Deps) { c.Prefill.Push.MaxUnanswered = 64 },
			})
			require.NoError(t, b.p[0].SetFaults(standing))
			done := b.judgeAll(16)
			b.eventually("the decode engine has some", func() bool { return b.d[0].Stats().Requests >= 4 })
			b.d[0].Kill()
			require.NoError(t, b.p[0].SetFaults())
			require.Equal(t, map[string]int{"right": 16}, <-done)
			b.settle()
		})
	}
}

// standing is an engine that computes nothing until its faults are cleared.
var standing = refengine.Rule{Fault: refengine.Standstill, DelayMS: int(time.Hour / time.Millisecond)}

// A request waits for a prefill engine that can begin before it takes a slot: here one request at a
// time.
func TestNothingIsBoundBeforeAPrefillCanBegin(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: []refengine.Config{{Slots: 8}}, profile: mooncake.Profile{Connector: mooncake.SGLang},
		configure: func(c *config.Config, _ *Deps) {
			c.Prefill.Push.MaxUnanswered, c.Bind.Lead = 1, 0
		}})
	require.NoError(t, b.p[0].SetFaults(standing))
	done := b.judgeAll(4)
	b.eventually("one is bound, and the others wait",
		func() bool { return b.d[0].Stats().Requests > 0 && b.Open() == 4 && b.Prefill.Waiting(refModel) == 3 })
	require.EqualValues(t, 1, b.d[0].Stats().Requests)
	require.NoError(t, b.p[0].SetFaults())
	b.eventually("all are answered", func() bool { // the decode engine first: what it has meanwhile does not count
		bound := b.d[0].Stats().Requests
		require.LessOrEqual(t, bound, b.p[0].Stats().Tokens+1, "bound, and prompts that are prefilled")
		return b.Open() == 0
	})
	require.Equal(t, map[string]int{"right": 4}, <-done)
	b.settle()
}

// As many requests wait to be bound as the pool has places, for pool.ttl.
func TestTooManyWaitToBeBound(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang}, configure: func(c *config.Config, _ *Deps) {
		c.Prefill.Push.MaxUnanswered, c.Pool.Size, c.Pool.TTL = 1, 11, 3*time.Second // within which all come, on a busy machine, too
	}})
	require.NoError(t, b.p[0].SetFaults(standing))
	first := b.judgeAll(1)
	b.eventually("the first is bound", func() bool { return b.d[0].Stats().Requests == 1 })
	got := <-b.judgeAll(14)
	require.NotZero(t, got["429"], "%v", got)
	require.NotZero(t, got["503"], "%v", got)
	require.Equal(t, 14, got["429"]+got["503"], "%v", got)
	require.NoError(t, b.p[0].SetFaults())
	require.Equal(t, map[string]int{"right": 1}, <-first)
	b.clean()
	require.EqualValues(t, 1, b.d[0].Stats().Requests)
}

// A pushing prefill engine that is asked first keeps its KV for a lease. A hand-off waits for a
// rank that long and no
// longer: past it none is dispatched, and the next request is prefilled anew.
func TestAPushedPrefillWaitsForItsRank(t *testing.T) {
	t.Parallel()
	const hold, margin = 8 * time.Second, 5 * time.Second
	e := refengine.Config{KV: refengine.KV{HoldTimeout: hold}, Slots: 1}
	b, leave := full(t, setup{prefill: []refengine.Config{e}, decode: []refengine.Config{e}, profile: mooncake.Profile{
		Connector: mooncake.NIXLPush, KVHoldTimeout: hold, HoldMargin: margin,
	}})
	begun := time.Now()
	require.Equal(t, "503", b.judge(short, `"stream":true,`))
	require.GreaterOrEqual(t, time.Since(begun), hold-margin-250*time.Millisecond, "less what it is sent in")
	require.Equal(t, 1, b.decodes(), "the one that has the slot")
	next := b.judgeAll(1)
	pooled(b, 1)
	leave()
	require.Equal(t, map[string]int{"right": 1}, <-next)
	b.settle()
	require.EqualValues(t, 3, b.p[0].Stats().Requests)
}

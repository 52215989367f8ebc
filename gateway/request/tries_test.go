package request

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// spoil has each engine do what the rule of its place says, nil: nothing.
func spoil(t *testing.T, engines []*refengine.Engine, rules []*refengine.Rule) {
	t.Helper()
	for i, r := range rules {
		if r != nil {
			require.NoError(t, engines[i].SetFaults(*r))
		}
	}
}

func (b *bed) decodes() (n int) {
	for _, e := range b.d {
		n += int(e.Stats().Decodes)
	}
	return n
}

// A request that two engines could not bear is not shown to a third.
func TestARequestThatBreaksEngines(t *testing.T) {
	t.Parallel()
	internal, busy := &refengine.Rule{Fault: refengine.Internal, Leg: refengine.LegProbe}, &refengine.Rule{Fault: refengine.Busy}
	decode := &refengine.Rule{Fault: refengine.Internal, Count: 1} // what is discarded is decoded, too
	for _, row := range []struct {
		name            string
		prefill, decode []*refengine.Rule
		outcome         string
		probes, decodes int // the discards of hand-offs that may have been read are not in it
	}{
		{"500 of two prefill engines", []*refengine.Rule{internal, internal}, nil, "502", 2, 0},
		{"500 of two decode engines", nil, []*refengine.Rule{decode, decode}, "502", 2, 2},
		{"500 of one on each side", []*refengine.Rule{internal}, []*refengine.Rule{decode}, "502", 2, 1},
		{"one 500 and an engine that is full", []*refengine.Rule{internal, busy}, nil, "right", 3, 1},
		{"an engine that is full and one 500", []*refengine.Rule{busy, internal}, nil, "right", 3, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			three := []refengine.Config{{}, {}, {}}
			b := start(t, setup{prefill: three, decode: three})
			spoil(t, b.p, row.prefill)
			spoil(t, b.d, row.decode)
			require.Equal(t, row.outcome, b.judge(short, `"stream":true,`))
			b.settle()
			require.Equal(t, row.probes, b.probes())
			require.Equal(t, row.decodes, b.decodes()-len(b.discarded()))
		})
	}
}

// A request at which two engines fail is the cause, so that it counts against neither. Otherwise a
// client could take every engine out.
func TestARequestThatTwoEnginesFailAtCountsAgainstNeither(t *testing.T) {
	t.Parallel()
	three := []refengine.Config{{}, {}, {}}
	for name, o := range map[string]setup{
		"prefill engines": {prefill: three},
		"prefill engines beside a decode leg": {prefill: three, decode: three,
			profile: mooncake.Profile{Connector: mooncake.SGLang}},
		"ranks that do both": {mixed: three, groups: []string{"a", "b", "c"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, o)
			internal := &refengine.Rule{Fault: refengine.Internal}
			if b.p == nil {
				spoil(t, b.d, []*refengine.Rule{internal, internal, internal})
			} else {
				internal.Leg = refengine.LegProbe
				spoil(t, b.p, []*refengine.Rule{internal, internal, internal})
			}
			for range 20 {
				require.Equal(t, "502", b.judge(short, `"stream":true,`))
			}
			b.settle()
			for _, c := range b.Prefill.Status() {
				require.Zero(t, c.Failures, c.ID)
			}
		})
	}
}

// Engines that cannot be reached are no attempts: nothing ran there.
func TestEnginesThatAreGoneCostNoAttempts(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"prefill", "decode"} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			five := []refengine.Config{{}, {}, {}, {}, {}}
			b := start(t, setup{prefill: five, decode: five})
			for i := range 4 {
				map[string][]*refengine.Engine{"prefill": b.p, "decode": b.d}[side][i].Kill()
			}
			require.Equal(t, "right", b.judge(short, `"stream":true,`))
			b.settle()
			require.Equal(t, 1, b.probes(), "a hand-off that no decode engine got is as good as new")
			require.Equal(t, 1, b.decodes())
			require.Zero(t, b.metric(t, "evenkeel_prefill_retry_budget_exhausted_total", ""))
		})
	}
}

// A rank that refused a request does not get it again while there is another, whatever the policy
// would say. Nor does any other rank get the hand-off it came with: who answered 503 is not known
// for sure, and what became of the KV neither.
func TestARefusedRequestGoesToAnotherRank(t *testing.T) {
	t.Parallel()
	b := start(t, setup{decode: []refengine.Config{{}, {}},
		configure: func(c *config.Config, _ *Deps) { c.Dispatch.Policy = config.Default().Dispatch.Policy }})
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
	for range 20 {
		require.Equal(t, "right", b.judge(short, `"stream":true,`))
	}
	b.settle()
	again := 0
	for _, in := range b.asked {
		require.LessOrEqual(t, in.Record.Attempts, 2)
		again += in.Record.Attempts - 1
	}
	require.Positive(t, again, "some met the bad rank first")
	require.Equal(t, 20+again, b.probes())
}

// An engine that answers 500 may fail for what all engines of its host have. One that has crashed
// says nothing of the others.
func TestOnlyAFailureThatIsAnsweredSpeaksAgainstTheHost(t *testing.T) {
	t.Parallel()
	for how, want := range map[string]string{
		"is refused with 500":      "the host of d0",
		"is refused with 503":      "d0",
		"is reset before the head": "d0",
		"is reset after the 200":   "d0",
		"is reset in the middle":   "d0",
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{decode: both})
			rule := ends[how]
			rule.Count = 1
			require.NoError(t, b.d[0].SetFaults(rule))
			b.judge(long, `"stream":true,`)
			b.over()
			b.engines.mu.Lock()
			defer b.engines.mu.Unlock()
			require.Equal(t, []string{want}, b.engines.shunned)
		})
	}
}

// A refusal has run nothing, so the first few are no attempts.
func TestRefusalsOfPrefillEnginesAreNoAttempts(t *testing.T) {
	t.Parallel()
	for _, status := range []float64{503, 429} {
		b := start(t, setup{})
		rule := refengine.Rule{Fault: refengine.Status, Value: status, Leg: refengine.LegProbe, Count: 4}
		require.NoError(t, b.p[0].SetFaults(rule))
		require.Equal(t, "right", b.judge(short, `"stream":true,`))
		rule.Count = 0
		require.NoError(t, b.p[0].SetFaults(rule))
		probes := b.p[0].Stats().Requests
		require.Contains(t, []string{"503", "429"}, b.judge(short, `"stream":true,`))
		require.EqualValues(t, 6, b.p[0].Stats().Requests-probes, "three refusals, and three attempts")
		b.settle()
	}
}

// What a client can bring about must not take an engine from all others.
func TestRefusedRequestsTakeNoPrefillEngineOut(t *testing.T) {
	t.Parallel()
	for _, status := range []int{400, 422, 501} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{})
			require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Status, Value: float64(status)}))
			for range 6 {
				require.NotEqual(t, "right", b.judge(short, ""))
			}
			b.settle()
			require.Zero(t, b.metric(t, "evenkeel_prefill_attempts_total", "failed"))
		})
	}
}

// A first token that ends the answer hands nothing off: it is asked for again without that token.
func TestAnAnswerThatBeginsWithItsEnd(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{ProbeMinTokens: mooncake.MinTokensOmit}})
	require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.EOSFirst}))
	require.Equal(t, "right", b.judge(short, `"stream":true,`))
	b.settle()
	require.Equal(t, 2, b.asked[0].Record.Attempts)
	require.EqualValues(t, 1, b.p[0].Stats().NullHandoffs)
	require.Zero(t, b.metric(t, "evenkeel_prefill_attempts_total", "failed"),
		"it is the prompt's doing, and no client may take engines out with it")
}

// Whatever is logged of a failed attempt is true of one that the client never heard of.
func TestTheLogOfARetryIsTrue(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.ErrorEvent, Leg: refengine.LegDecode, Count: 1}))
	require.Equal(t, "right", b.judge(short, `"stream":true,`))
	b.settle()
	l := b.logs.FilterMessage("an attempt failed, and the request is tried again").FilterLevelExact(zap.InfoLevel).All()
	require.Len(t, l, 1)
	require.Contains(t, l[0].ContextMap()["error"], "the engine's log has its text")
	require.NotContains(t, l[0].ContextMap()["error"], "client")
}

// An engine that dies under a request may have died of it; one that only loses the connection has
// not.
func TestEnginesThatDieUnderARequest(t *testing.T) {
	t.Parallel()
	three := []refengine.Config{{}, {}, {}}
	t.Run("two that die are enough", func(t *testing.T) {
		t.Parallel()
		b := start(t, setup{prefill: three})
		b.engines.down = []string{"prefill p0"} // as it will be said when the second one has died
		hang := &refengine.Rule{Fault: refengine.Hang}
		spoil(t, b.p, []*refengine.Rule{hang, hang})
		got := make(chan string, 1)
		go func() {
			defer close(got)
			got <- b.judge(short, `"stream":true,`)
		}()
		for _, e := range b.p[:2] {
			b.eventually("it is there", func() bool { return e.Stats().Probes == 1 })
			e.Kill()
		}
		require.Equal(t, "502", <-got)
		b.settle()
		require.Zero(t, b.p[2].Stats().Probes)
	})
	t.Run("connections that break are only that", func(t *testing.T) {
		t.Parallel()
		b := start(t, setup{prefill: three})
		reset := &refengine.Rule{Fault: refengine.Reset}
		spoil(t, b.p, []*refengine.Rule{reset, reset})
		require.Equal(t, "right", b.judge(short, `"stream":true,`))
		b.settle()
		require.Equal(t, 3, b.probes())
	})
}

// A client that tells how long it waits is not kept beyond that.
func TestNoRetryAfterTheClientsOwnTime(t *testing.T) {
	t.Parallel()
	b := start(t, setup{})
	for i, row := range []struct {
		patience time.Time
		outcome  string
		attempts int
	}{{time.Now(), "429", 1}, {time.Now().Add(time.Second / 2), "429", 1}, {time.Time{}, "right", 2}} {
		require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.Throttle, RetryAfter: 1, Count: 1}))
		b.options.ClientGivesUpAt = row.patience
		began := time.Now()
		require.Equal(t, row.outcome, b.judge(short, ""))
		b.over()
		require.Equal(t, row.attempts, b.asked[i].Record.Attempts)
		if row.attempts > 1 {
			require.GreaterOrEqual(t, time.Since(began), time.Second, "an engine that says when to come back is believed")
		}
	}
	b.settle()
}

// An answer in which an event is damaged goes on elsewhere, like an answer that broke, and its
// client sees no damage.
func TestADamagedEventBreaksItsAnswer(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, more string
		after      int // events
	}{
		{"a stream", `"stream":true,`, 8},
		{"a stream at its beginning", `"stream":true,`, 1},
		{"a whole answer", "", 8},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var struck atomic.Bool
			b := start(t, setup{front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
				body, _ := io.ReadAll(r.Body)
				r.Body = io.NopCloser(bytes.NewReader(body))
				if !bytes.Contains(body, []byte(`"do_remote_prefill":true`)) || !struck.CompareAndSwap(false, true) {
					engine.ServeHTTP(w, r)
					return
				}
				answer := httptest.NewRecorder()
				engine.ServeHTTP(answer, r)
				events := bytes.SplitAfter(answer.Body.Bytes(), []byte("\n\n"))
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = w.Write(bytes.Join(slices.Insert(events, min(row.after, len(events)), []byte("data: {\"choices\":[{\"ind\n\n")), nil))
			}})
			require.Equal(t, "right", b.judge(long, row.more))
			b.settle()
			require.Equal(t, 2, b.asked[0].Record.Attempts)
		})
	}
}

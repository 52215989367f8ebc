package request

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/mooncake"
)

// Each needs the other: what ends one leg ends the other, says why, and gives the lease back once.
func TestWhatOneLegDoesToTheOther(t *testing.T) {
	const sglang, layerwise = mooncake.SGLang, mooncake.AscendLayerwise
	quick := func(c *config.Config) { c.Bind.CallbackTimeout = 20 * time.Millisecond }
	for _, row := range []struct {
		name, connector string
		change          func(*config.Config)
		do              func(c *pair) *failure.Fault // why there is no answer, or none that is believed
		why             lifecycle.Reason
		leg             lifecycle.CallKind // of the fault
		fine            bool               // no fault
		orphan          bool               // the lease is left to the prefill engine
		aborted         string             // the engines that are told to abort
		rebind, drain   string             // what is counted
	}{
		{
			name: "both answer", connector: sglang, fine: true,
			do: func(c *pair) *failure.Fault {
				c.answer <- says(7)
				<-c.prefillOver
				require.Nil(c.t, c.firstEventCame(7))
				f := c.confirmKV(7, nil)
				c.answerEnded(false)
				return f
			},
		},
		{
			name: "the prefill engine has counted less of the prompt than the decode engine has", connector: sglang,
			why: lifecycle.Incomplete, aborted: "decode", rebind: "prefill",
			do: func(c *pair) *failure.Fault {
				c.answer <- says(5)
				<-c.prefillOver
				f := c.firstEventCame(7)
				_, _ = c.decodeFailed(lifecycle.Died)
				return f
			},
		},
		{
			name: "it says so after the first event", connector: sglang, why: lifecycle.Incomplete, aborted: "decode",
			do: func(c *pair) *failure.Fault {
				require.Nil(c.t, c.firstEventCame(7), "the first event is held back for a moment only")
				c.answer <- says(5)
				<-c.prefillOver
				require.NotNil(c.t, c.pairFault())
				defer c.answerEnded(false)
				return c.confirmKV(7, nil)
			},
		},
		{
			name: "it never says so", connector: sglang, why: lifecycle.Unconfirmed, aborted: "prefill",
			do: func(c *pair) *failure.Fault {
				c.sent()
				require.Nil(c.t, c.firstEventCame(7))
				c.answerEnded(false)
				f := c.confirmKV(7, nil)
				<-c.prefillOver
				return f
			},
		},
		{
			name: "the client leaves while it is waited for", connector: sglang,
			why: lifecycle.Left, aborted: "prefill", change: func(c *config.Config) { c.Bind.Grace = time.Hour },
			do: func(c *pair) *failure.Fault {
				c.sent()
				require.Nil(c.t, c.firstEventCame(7))
				c.answerEnded(false)
				gone := make(chan struct{})
				close(gone)
				f := c.confirmKV(7, gone)
				<-c.prefillOver
				return f
			},
		},
		{
			name: "the prefill engine breaks off", connector: sglang, why: lifecycle.Broke, aborted: "decode", rebind: "prefill",
			do: func(c *pair) *failure.Fault { c.answer <- resets; return c.isEnded() },
		},
		{
			name: "the prefill engine refuses", connector: sglang, why: lifecycle.Busy, aborted: "decode", rebind: "prefill",
			do: func(c *pair) *failure.Fault { c.answer <- status(503); return c.isEnded() },
		},
		{
			name: "the prefill engine finds a fault of the request", connector: sglang, why: lifecycle.Rejected, aborted: "decode",
			do: func(c *pair) *failure.Fault { c.answer <- status(400); return c.isEnded() },
		},
		{
			name: "no first event follows the prefill", connector: sglang,
			why: lifecycle.Unbegun, leg: lifecycle.Decode, aborted: "decode", rebind: "silent",
			change: func(c *config.Config) { c.Profiles["a"] = mooncake.Profile{FirstEventTimeout: 100 * time.Millisecond} },
			do:     func(c *pair) *failure.Fault { c.answer <- says(7); return c.isEnded() },
		},
		{
			name: "the decode engine dies", connector: sglang, fine: true, aborted: "prefill", rebind: "decode",
			do: func(c *pair) *failure.Fault {
				c.sent()
				f, blocksMayLeak := c.decodeFailed(lifecycle.Died)
				require.False(c.t, blocksMayLeak, "it gives blocks of what was aborted away at once")
				<-c.prefillOver
				return f
			},
		},
		{
			name: "the decode engine dies, and the prefill engine says that it has aborted the request", connector: sglang,
			fine: true, aborted: "prefill", rebind: "decode",
			do: func(c *pair) *failure.Fault {
				c.sent()
				f, _ := c.decodeFailed(lifecycle.Died)
				c.answer <- saysAborted
				<-c.prefillOver
				require.EqualValues(c.t, 1, c.attempts("dropped"))
				require.Zero(c.t, c.attempts("failed"))
				return f
			},
		},
		{
			name: "the client leaves before the first event", connector: sglang, why: lifecycle.HungUp, aborted: "decode prefill",
			change: func(c *config.Config) { c.Bind.Grace = time.Hour }, // the answer must come before its end
			do: func(c *pair) *failure.Fault {
				c.sent()
				c.clientLeft()
				c.answer <- saysAborted
				<-c.prefillOver
				return c.isEnded()
			},
		},
		{
			name: "both answer", connector: layerwise, fine: true,
			do: func(c *pair) *failure.Fault {
				c.calls()
				c.answer <- says(7)
				<-c.prefillOver
				require.Nil(c.t, c.firstEventCame(7))
				require.Equal(c.t, 7, c.probed.PromptTokens)
				require.Positive(c.t, c.calledBackAfter)
				c.answerEnded(false)
				return c.confirmKV(7, nil)
			},
		},
		{
			name: "no callback comes", connector: layerwise, change: quick, why: lifecycle.Uncalled, leg: lifecycle.Decode, rebind: "callback",
			do: func(c *pair) *failure.Fault { defer func() { <-c.prefillOver }(); return c.isEnded() },
		},
		{
			name: "it comes too late, when only the end of a prefill frees the blocks", connector: layerwise,
			why: lifecycle.Uncalled, leg: lifecycle.Decode, rebind: "callback", drain: "late_callback",
			change: func(c *config.Config) { c.Bind.CallbackTimeout, c.Bind.Grace = 20*time.Millisecond, time.Minute },
			do: func(c *pair) *failure.Fault {
				f := c.isEnded()
				c.calls()
				c.answer <- says(7)
				<-c.prefillOver
				return f
			},
		},
		{
			name: "it names a host that is not known", connector: layerwise, why: lifecycle.Misplaced, leg: lifecycle.Decode,
			do: func(c *pair) *failure.Fault {
				c.calls("127.0.0.1", "10.0.0.6")
				defer func() { <-c.prefillOver }()
				return c.isEnded()
			},
		},
		{
			name: "it names another request", connector: layerwise, why: lifecycle.Garbled, leg: lifecycle.Decode, rebind: "callback",
			do: func(c *pair) *failure.Fault {
				c.calls("ek-1-0b", "ek-2")
				defer func() { <-c.prefillOver }()
				return c.isEnded()
			},
		},
		{
			name: "the decode engine has the whole prompt", connector: layerwise, fine: true,
			do: func(c *pair) *failure.Fault {
				c.calls("[[7,8,9]]", "[]")
				<-c.prefillOver
				require.Nil(c.t, c.firstEventCame(7))
				c.answerEnded(false)
				require.Zero(c.t, c.requests(), "nothing is prefilled")
				return nil
			},
		},
		{
			name: "another prefill engine takes the place of one that took nothing", connector: layerwise, fine: true,
			do: func(c *pair) *failure.Fault {
				c.answer <- status(503)
				c.answer <- says(7)
				c.calls()
				<-c.prefillOver
				require.Nil(c.t, c.firstEventCame(7))
				require.Equal(c.t, 2, c.requests())
				require.Equal(c.t, c.tried[1], c.prefillEngine().ID)
				c.answerEnded(false)
				return nil
			},
		},
		{
			name: "all prefill engines take nothing", connector: layerwise,
			why: lifecycle.Busy, rebind: "prefill", change: func(c *config.Config) { c.Prefill.Retry.Attempts = 2 },
			do: func(c *pair) *failure.Fault {
				c.answer <- status(503)
				c.answer <- status(503)
				c.calls()
				return c.isEnded()
			},
		},
		{
			name: "the decode engine refuses before it calls back", connector: layerwise, fine: true, rebind: "decode",
			do: func(c *pair) *failure.Fault {
				f, blocksMayLeak := c.decodeFailed(lifecycle.Refused)
				require.False(c.t, blocksMayLeak)
				<-c.prefillOver
				return f
			},
		},
		{
			name: "the decode engine dies while its KV is prefilled, and may keep the blocks", connector: layerwise, fine: true, rebind: "decode",
			do: func(c *pair) *failure.Fault {
				c.calls()
				c.sent()
				f, blocksMayLeak := c.decodeFailed(lifecycle.Died)
				require.True(c.t, blocksMayLeak)
				<-c.prefillOver
				return f
			},
		},
		{
			name: "the client leaves before the callback", connector: layerwise, why: lifecycle.Left,
			do: func(c *pair) *failure.Fault { c.clientLeft(); defer func() { <-c.prefillOver }(); return c.isEnded() },
		},
		{
			name: "the client leaves while its KV is on its way, which is let come to its end", connector: layerwise,
			fine: true, change: func(c *config.Config) { c.Bind.Grace = time.Hour },
			do: func(c *pair) *failure.Fault {
				c.calls()
				c.sent()
				c.clientLeft()
				c.answer <- says(7)
				require.False(c.t, c.awaitEndOrLeak(), "the prefill has ended, and nothing writes any more")
				f, _ := c.decodeFailed(lifecycle.Died)
				return f
			},
		},
		{
			name: "the prefill engine counts more tokens than a prompt can have", connector: layerwise, why: lifecycle.Garbled, rebind: "prefill",
			do: func(c *pair) *failure.Fault {
				c.calls()
				c.answer <- says(1 << 40)
				f := c.isEnded()
				<-c.prefillOver
				require.Zero(c.t, c.probed.PromptTokens)
				return f
			},
		},
		{
			name: "the prefill engine has more of the prompt cached than there is", connector: layerwise, fine: true,
			do: func(c *pair) *failure.Fault {
				c.calls()
				c.answer <- func(w http.ResponseWriter) {
					_, _ = io.WriteString(w, handOff("7", `,"prompt_tokens_details":{"cached_tokens":8}`))
				}
				<-c.prefillOver
				require.Nil(c.t, c.firstEventCame(7))
				require.Equal(c.t, -1, c.probed.CachedTokens, "it is not known")
				c.answerEnded(false)
				return nil
			},
		},
	} {
		t.Run(row.connector+": "+row.name, func(t *testing.T) {
			c := newPair(t, row.connector, row.change)
			f := row.do(c)
			require.Equal(t, row.fine, f == nil, "%v", f)
			if f != nil {
				require.Equal(t, row.why, f.Reason)
				require.Equal(t, row.leg, f.Call)
				require.NotNil(t, f.ClientError)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			select {
			case <-c.srv.prefillCalls.Close():
			case <-ctx.Done():
				t.Fatal("a leg goes on")
			}
			orphans := 0
			for _, s := range c.srv.Prefill.Status() {
				require.Zero(t, s.Inflight+s.Pooled+s.Dispatched)
				orphans += s.Orphans
			}
			require.Equal(t, row.orphan, orphans == 1)
			require.Eventually(t, func() bool { return c.srv.Callbacks.Expected() == 0 }, time.Minute, time.Millisecond)
			c.mu.Lock()
			defer c.mu.Unlock()
			require.ElementsMatch(t, strings.Fields(row.aborted), c.aborted)
			for _, cause := range []string{causeDecode, causePrefill, causeCallback, causeSilent} {
				require.EqualValues(t, map[bool]int{true: 1}[cause == row.rebind], testutil.ToFloat64(c.srv.metrics.rebinds.WithLabelValues(cause)),
					cause)
			}
			for _, cause := range []string{drainLeft, drainLate} {
				require.EqualValues(t, map[bool]int{true: 1}[cause == row.drain], testutil.ToFloat64(c.srv.metrics.drains.WithLabelValues(cause)),
					cause)
			}
		})
	}
}

// An answer that is lost before its end was as wrong as one that is whole, if its prefill was
// aborted.
func TestALostAnswerIsNotBelievedEither(t *testing.T) {
	for _, row := range []struct {
		name      string
		prefilled int
		lost      bool
		wrong     bool
	}{{"whole", 10, false, false}, {"lost", 10, true, false}, {"lost, and its prefill aborted", 5, true, true}} {
		t.Run(row.name, func(t *testing.T) {
			c := newPair(t, mooncake.SGLang, nil)
			c.sent()
			require.Nil(t, c.firstEventCame(0))
			c.answer <- says(row.prefilled)
			<-c.prefillOver
			if row.lost {
				c.answerEnded(false)
			}
			f := c.confirmKV(10, nil)
			require.Equal(t, row.wrong, f != nil)
			if f != nil {
				require.ErrorIs(t, f.Err, errPrefillBroke)
			}
			c.answerEnded(false)
		})
	}
}

// A callback and the end of the answer may come at the same moment, and be seen in either order.
// Its token is forgotten then.
func TestACallbackAtTheEndIsForgotten(t *testing.T) {
	for name, late := range map[string]bool{"the callback first": false, "the end first": true} {
		t.Run(name, func(t *testing.T) {
			c := newPair(t, mooncake.AscendLayerwise, nil)
			require.Nil(t, c.firstEventCame(7))
			if late {
				c.answerEnded(false)
			}
			require.False(t, c.calledBack(metaserver.Callback{Err: errors.New("bad")}, 0))
			c.answerEnded(false)
			<-c.prefillOver
			require.Zero(t, c.srv.Callbacks.Expected())
		})
	}
}

// SGLang ends every request whose id begins with the one that it is told to abort.
// prefill.retry.attempts is at most 100.
func TestNoIDBeginsAnotherOne(t *testing.T) {
	var all []string
	for attempt := 1; attempt <= 120; attempt++ {
		all = append(all, pairRequestID("r", attempt), pairRequestID("r-1", attempt))
	}
	for i, id := range all {
		for k, other := range all {
			require.False(t, i != k && strings.HasPrefix(other, id), "an abort of %s would end %s", id, other)
		}
	}
}

// The decode engine calls back behind bind.callback_timeout, while its call ends: its blocks wait
// for a prefill, so the prompt is computed.
func TestACallbackThatComesWhileTheDecodeLegEndsGetsItsPrefill(t *testing.T) {
	for range 30 { // where two things are ready at once, one of them is chosen at random
		c := newPair(t, mooncake.AscendLayerwise, func(c *config.Config) {
			c.Bind.CallbackTimeout, c.Bind.Grace = 5*time.Millisecond, time.Minute
		})
		require.Eventually(t, func() bool { return c.pairFault() != nil }, time.Minute, time.Millisecond, "it is overdue")
		c.calls()
		c.answer <- says(7)
		_ = c.isEnded()
		<-c.prefillOver
		require.Equal(t, 1, c.requests(), "a prefill frees the blocks")
	}
}

// The wait for an answer in one piece may end at the very moment when it would be made longer. Then
// it stays ended: a wait that goes on would keep the request's body in memory.
func TestAWaitThatHasEndedIsNotMadeLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		settings := fleet.NewSettings(config.Default())
		j := &job{srv: &Server{Deps: Deps{Settings: func() *fleet.Settings { return settings }}}}
		p := &concurrentPrefill{job: j, rank: &roster.Rank{Signs: engine.NewLiveness()}, maxTokens: 1000}
		j.mu.Lock()
		p.startFirstTimer(lifecycle.ByWhole)
		timer := p.firstTimer
		time.Sleep(settings.Limits.ProbeTimeout) // the timer's goroutine waits for the mutex now
		p.answeredAt = time.Now()
		p.do(lifecycle.Effect{Kind: lifecycle.StopWaiting}, nil)
		j.mu.Unlock()
		synctest.Wait()
		require.False(t, timer.Stop())
	})
}

// SGLang ignores an abort that comes before the request itself, so the abort is repeated until the
// prefill has ended.
func TestAnAbortIsRepeatedUntilThePrefillHasEnded(t *testing.T) {
	c := newPair(t, mooncake.SGLang, func(c *config.Config) { c.Bind.Grace = time.Hour })
	c.sent()
	c.clientLeft()
	aborts := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.aborted)
	}
	require.Eventually(t, func() bool { return aborts() > 1 }, time.Minute, time.Millisecond)
	c.answer <- saysAborted
	<-c.prefillOver
	require.Equal(t, lifecycle.HungUp, c.isEnded().Reason)
	require.Eventually(t, func() bool {
		n := aborts()
		time.Sleep(2 * abortEvery)
		return aborts() == n
	}, time.Minute, time.Millisecond, "it ends with the prefill")
}

// An engine that refuses a decode call has no pages to protect, so its prefill call is ended at
// once.
func TestAPrefillEndsAtOnceIfItsDecodeIsRefused(t *testing.T) {
	c := newPair(t, mooncake.SGLang, func(c *config.Config) { c.Bind.Grace = time.Hour })
	c.sent()
	_, blocksMayLeak := c.decodeFailed(lifecycle.Refused)
	require.False(t, blocksMayLeak)
	<-c.prefillOver
}

// As long as an engine does not answer an abort, no second one is sent.
func TestAnAbortIsNotRepeatedBeforeItsAnswer(t *testing.T) {
	t.Parallel()
	c := newPair(t, mooncake.SGLang, func(c *config.Config) { c.Bind.Grace = 4 * abortEvery })
	c.mute = true
	c.sent()
	c.decodeFailed(lifecycle.Died)
	<-c.prefillOver // at the end of the grace
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Equal(t, []string{"prefill"}, c.aborted)
}

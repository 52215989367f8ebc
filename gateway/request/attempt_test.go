package request

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

func TestAThrottledClientIsToldWhenToComeBack(t *testing.T) {
	require.Positive(t, failure.FromStream(sse.Failure{Status: http.StatusTooManyRequests}).RetryAfter)
}

// An answer that has begun is tried again without a budget, too, and the pauses before that grow no
// longer than any other.
func TestThePauseOfAnAnswerThatHasBegunIsBounded(t *testing.T) {
	srv := newServer(t, func(cfg *config.Config, _ *Deps) { cfg.Prefill.Retry.Attempts = 100 })
	j := &job{srv: srv.Server, incoming: &Incoming{}}
	fault := &failure.Fault{Err: &engine.Error{Sent: true, Aborted: true, Err: errors.New("cut")}}
	wait, granted := j.askRetryBudget(lifecycle.Retry{Budget: lifecycle.Counted, N: 48, Despite: true}, fault)
	require.True(t, granted)
	require.LessOrEqual(t, wait, 256*srv.Settings().Prefill.Retry.Base)
}

// A client that leaves while a probe is being answered must not take the engine
// out of service, however often it does.
func TestAProbeThatIsCutInItsAnswerIsNoFailure(t *testing.T) {
	srv := newServer(t)
	srv.Prefill.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "prefill p", Models: []string{"m"}, Live: true,
		Profile: &mooncake.Profile{KVHoldTimeout: time.Minute}}})
	kid := edge.NewCloseNotifier(zap.NewNop())
	kid.MarkGone()
	for range 6 {
		lease, err := srv.Prefill.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
		require.NoError(t, err)
		srv.Places.Release()
		j := &job{srv: srv.Server, client: kid, isLeg: true}
		call := &probeCall{Call: upstream.Call{Engine: "prefill p"}, srv: srv.Server, entry: &fleet.TrackedCall{}}
		fault := call.reportUnpairedEnd(j, call.FaultOf(&engine.Error{Sent: true, Answered: true, Aborted: true, Err: errors.New("cut")}))
		fault.Kept = true
		v := fault.Verdict()
		require.Equal(t, lifecycle.Over, v.Next, "its client has left")
		require.Equal(t, lifecycle.Orphan, v.KV, "it may have finished the prefill")
		handoff.SettleLease(lease, v.KV, nil)
	}
	c := srv.Prefill.Status()[0]
	require.Zero(t, c.Failures)
	require.Equal(t, 6, c.Orphans)
}

package gateway

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// The timer of a deadline may have gone off already when an operator takes the
// drain back or sets another.
func TestADeadlineThatIsNotTheDrainsEndsNothing(t *testing.T) {
	at := time.Now()
	s := newService(t.Context())
	defer s.close()
	require.False(t, s.ends(at), "it does not drain")
	s.draining, s.limit = true, at
	require.True(t, s.ends(at))
	s.limit = at.Add(time.Second)
	require.False(t, s.ends(at), "it has another deadline")
}

func TestAThrottledClientIsToldWhenToComeBack(t *testing.T) {
	require.Positive(t, engineError(sse.Failure{Status: http.StatusTooManyRequests}).RetryAfter)
}

// A client that leaves while a probe is being answered must not take the engine
// out of service, however often it does.
func TestAProbeThatIsCutInItsAnswerIsNoFailure(t *testing.T) {
	g, err := New(config.Default(), zap.NewNop())
	require.NoError(t, err)
	defer g.stop()
	g.tier.SetCandidates([]prefill.Candidate{{ID: "p/0", Instance: "prefill p", Models: []string{"m"}, Live: true, Profile: &mooncake.Profile{KVHoldTimeout: time.Minute}}})
	kid := &child{gone: make(chan struct{})}
	kid.leave()
	for range 6 {
		lease, err := g.tier.Acquire(t.Context(), prefill.Request{Model: "m", PromptTokens: 7})
		require.NoError(t, err)
		g.places.Release()
		j := &job{srv: g.requests, client: kid}
		fault := j.probeFailed(lease, &run{}, &engine.Error{Sent: true, Answered: true, Aborted: true, Err: errors.New("cut")})
		require.False(t, fault.moved)
	}
	c := g.tier.Status()[0]
	require.Zero(t, c.Failures)
	require.Equal(t, 6, c.Orphans, "it may have finished the prefill")
}

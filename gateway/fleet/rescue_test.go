package fleet_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
)

// A prefill engine that stands still may keep its probes for minutes. Once it is declared down,
// they are asked again at an engine that is up, and what the first one may hold stays charged to
// it.
func TestProbesLeaveAnEngineThatIsDeclaredDown(t *testing.T) {
	t.Parallel()
	t.Run("which is to keep the KV", func(t *testing.T) {
		t.Parallel()
		leavesWhatIsDown(t, start, false)
	})
	t.Run("of a request that is bound before", func(t *testing.T) { // each such connector has its prefill under way in the same place
		t.Parallel()
		leavesWhatIsDown(t, func(t *testing.T, o options) *bed { return early(t, refengine.AscendLayerwise, o) }, true)
	})
}

// leavesWhatIsDown lets a probe wait at an engine that stands still and is declared down, while
// another engine drains. The probe goes to that one once it may. bound: the request has its decode
// rank by then.
func leavesWhatIsDown(t *testing.T, start func(*testing.T, options) *bed, bound bool) {
	var still, down atomic.Bool
	held := make(chan struct{}, 8)
	var first string
	b := start(t, options{dirty: true, prefill: []refengine.Config{{}, {}}, configure: func(cfg *config.Config) {
		behind, err := url.Parse(cfg.Engines.Prefill[0].URL)
		require.NoError(t, err)
		through := httputil.NewSingleHostReverseProxy(behind)
		front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case (r.URL.Path == "/health" || r.URL.Path == "/ready") && down.Load():
				w.WriteHeader(http.StatusServiceUnavailable)
			case r.Method == http.MethodPost && still.Load():
				_, _ = io.Copy(io.Discard, r.Body) // net/http notices only behind it that the client left
				held <- struct{}{}
				<-r.Context().Done()
			default:
				through.ServeHTTP(w, r)
			}
		}))
		t.Cleanup(front.Close)
		cfg.Engines.Prefill[0].URL, first = front.URL, strings.TrimPrefix(front.URL, "http://")
		cfg.Health.Interval, cfg.Health.SlowStart = 20*time.Millisecond, 0
	}})
	b.allUp()
	second := refclient.AddressOf(b.Prefill[1])
	for _, other := range []string{first, second} { // where an engine is reached is learned from its answers
		require.NoError(t, b.fleet.Drain(roster.Prefill, other, 0))
		require.Equal(t, "right", b.Judge("one of the first", streamed))
		require.NoError(t, b.fleet.Undrain(roster.Prefill, other))
	}
	require.NoError(t, b.fleet.Drain(roster.Prefill, second, 0))
	still.Store(true)
	got := b.Judging("its prefill stands still", streamed)
	<-held
	if bound {
		b.Eventually("its decode rank is bound", func() bool { return b.Decode[0].Stats().Running+b.Decode[0].Stats().Waiting == 1 })
	}
	down.Store(true)
	b.Eventually("the engine is down", func() bool {
		for _, s := range b.now().Engines {
			if s.ID == first && s.State == "down" {
				return true
			}
		}
		return false
	})
	require.Empty(t, got, "no other engine could have it")
	require.NoError(t, b.fleet.Undrain(roster.Prefill, second))
	select {
	case answer := <-got:
		require.Equal(t, "right", answer)
	case <-time.After(patience):
		t.Fatal("the probe waits on at an engine that is down")
	}
	for _, p := range b.now().Prefill {
		if strings.HasPrefix(p.ID, first) {
			require.Zero(t, p.Inflight)
			orphans := 1 // what it may have finished, and keeps for a decode engine
			if bound {   // it keeps nothing
				orphans = 0
			}
			require.Equal(t, orphans, p.Orphans)
		}
	}
}

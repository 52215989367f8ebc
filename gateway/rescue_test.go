package gateway_test

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

	"evenkeel/bench/refengine"
	"evenkeel/gateway/config"
)

// A prefill engine that stands still may keep its probes for minutes. Once it is declared down, they are asked again at
// an engine that is up, and what the first one may hold stays charged to it.
func TestProbesLeaveAnEngineThatIsDeclaredDown(t *testing.T) {
	t.Parallel()
	t.Run("which is to keep the KV", func(t *testing.T) {
		t.Parallel()
		leavesWhatIsDown(t, start, 1)
	})
	for _, connector := range earlyConnectors {
		t.Run("of a request that is bound before: "+string(connector), func(t *testing.T) {
			t.Parallel()
			kept := 0
			if connector == refengine.NIXLPush {
				kept = 1
			}
			leavesWhatIsDown(t, func(t *testing.T, o options) *cluster { return early(t, connector, o) }, kept)
		})
	}
}

// leavesWhatIsDown lets a probe wait at an engine that stands still and is declared down, while another engine drains. The
// probe goes to that one once it may. kept is how many prompts the first engine may keep.
func leavesWhatIsDown(t *testing.T, start func(*testing.T, options) *cluster, kept int) {
	var still, down atomic.Bool
	held := make(chan struct{}, 8)
	var first string
	c := start(t, options{dirty: true, prefill: []refengine.Config{{}, {}}, configure: func(cfg *config.Config) {
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
	c.allUp()
	for range 4 { // where engines are reached is learned from answers
		require.Equal(t, "right", c.judge("one of the first", streamed))
	}
	second := addressOf(c.prefill[1])
	require.Equal(t, http.StatusNoContent, c.ask("POST", c.admin+"/workers/"+second+"/drain?role=prefill", "").status)
	still.Store(true)
	got := make(chan string, 1)
	go func() { got <- c.judge("its prefill stands still", `"stream":true,`) }()
	<-held
	down.Store(true)
	c.eventually("the engine is down", func() bool {
		for _, s := range c.gw.Status(t.Context()).Engines {
			if s.ID == first && s.State == "down" {
				return true
			}
		}
		return false
	})
	require.Empty(t, got, "no other engine could have it")
	require.Equal(t, http.StatusNoContent, c.ask("DELETE", c.admin+"/workers/"+second+"/drain?role=prefill", "").status)
	select {
	case answer := <-got:
		require.Equal(t, "right", answer)
	case <-time.After(patience):
		t.Fatal("the probe waits on at an engine that is down")
	}
	for _, p := range c.gw.Status(t.Context()).Prefill {
		if strings.HasPrefix(p.ID, first) {
			require.Zero(t, p.Inflight)
			require.Equal(t, kept, p.Orphans, "what it may have finished, and keeps for a decode engine")
		}
	}
}

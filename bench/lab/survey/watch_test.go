package survey

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/engine"
)

func target(t *testing.T, addr string) *engine.Target {
	u, err := url.Parse(addr)
	require.NoError(t, err)
	return &engine.Target{ID: u.Host, URL: u, Rank: -1}
}

// Engines that serve over sockets are found, and what they do is seen.
func TestASurveyOfEnginesThatServe(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  refengine.Config
	}{
		{"ranks of one address", refengine.Config{Role: refengine.Aggregated, DPMode: "internal", DPSize: 4, Slots: 8,
			Steps: refengine.Steps{C0: 10 * time.Millisecond}, Prompts: refengine.Prompts{PerToken: 20 * time.Microsecond}}},
		{"an address for each rank", refengine.Config{Role: refengine.Aggregated, DPSize: 2, Slots: 8,
			Steps: refengine.Steps{C0: 10 * time.Millisecond}, Prompts: refengine.Prompts{PerToken: 20 * time.Microsecond}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := refengine.Start(c.cfg)
			require.NoError(t, err)
			defer e.Close()
			client := engine.NewClient(engine.Options{})
			defer client.Close()
			var targets []*engine.Target
			for _, u := range slices.Compact(e.URLs()) {
				targets = append(targets, target(t, u))
			}
			served := make(chan *load.Result, 1)
			go func() {
				r, err := load.Run(t.Context(), load.Config{
					URLs: e.URLs(), Concurrency: 6, Duration: 4 * time.Second,
					Requests: []trace.Request{{Prompt: 200, Output: 10}, {Prompt: 50, Output: 20}},
				})
				if err != nil {
					t.Error(err)
				}
				served <- r
			}()
			all, err := Watch(t.Context(), client, targets, 200*time.Millisecond, 3*time.Second, func(time.Duration) {})
			require.NoError(t, err)
			<-served
			found := Judge(t.Context(), all, Given{}, func(int, int) {})
			require.Len(t, found, 1)
			f := found[0]
			require.Equal(t, both, f.Kind)
			require.Len(t, f.Ranks, c.cfg.DPSize)
			require.Positive(t, f.Tokens)
			require.Positive(t, f.Prompts)
			require.GreaterOrEqual(t, f.GapMs, 10.)
			require.Zero(t, f.Lost)
			var text, page bytes.Buffer
			r := NewReport("evenkeel survey", 3*time.Second, all, found)
			require.NoError(t, r.Text(&text))
			require.NoError(t, r.HTML(&page))
			require.Contains(t, text.String(), "time between two tokens of an answer")
			require.Contains(t, page.String(), "What evenkeel could gain here")
		})
	}
}

func TestAnAddressThatIsNoEngineIsSaidAtOnce(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	_, err := Watch(t.Context(), client, []*engine.Target{target(t, s.URL), target(t, "http://127.0.0.1:1")}, time.Second, time.Minute,
		func(time.Duration) {})
	require.ErrorContains(t, err, "404 Not Found; SGLang has metrics with --enable-metrics")
	require.ErrorContains(t, err, "127.0.0.1:1")
}

// An engine under load may miss a page, also the first one.
func TestAFollowedEngineIsAskedAgain(t *testing.T) {
	var asked atomic.Int64
	ctx, enough := context.WithCancel(t.Context())
	defer enough()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch n := asked.Add(1); {
		case n == 1:
			http.Error(w, "busy", http.StatusServiceUnavailable)
			return
		case n > 4:
			enough()
		}
		_, _ = w.Write([]byte("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 1\n"))
	}))
	defer s.Close()
	client := engine.NewClient(engine.Options{})
	defer client.Close()
	all := Follow(ctx, client, []*engine.Target{target(t, s.URL)}, time.Millisecond)
	require.Positive(t, all[0].Silent)
	require.NotEmpty(t, all[0].samples)
	unread, _ := Unread(all)
	require.False(t, unread)

	ctx, ended := context.WithCancel(t.Context())
	defer ended()
	gone := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(-1) < 0 {
			ended()
		}
		http.Error(w, "busy", http.StatusServiceUnavailable)
	}))
	defer gone.Close()
	unread, why := Unread(Follow(ctx, client, []*engine.Target{target(t, gone.URL)}, time.Millisecond))
	require.True(t, unread)
	require.ErrorContains(t, why, "503 Service Unavailable")
}

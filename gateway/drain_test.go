package gateway_test

import (
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// paced is a decode engine whose answers last.
func paced() refengine.Config {
	return refengine.Config{Steps: refengine.Steps{C0: 5 * time.Millisecond}}
}

// What a proxy does that goes out of service, and comes back, and ends.
func TestTheProxyDrains(t *testing.T) {
	t.Parallel()
	grace := patience
	c := start(t, options{
		decode:    []refengine.Config{{Steps: refengine.Steps{C0: 25 * time.Millisecond}, Slots: 2}},
		configure: func(cfg *config.Config) { cfg.Limits.DrainGrace = grace },
		later:     func(cfg *config.Config) { cfg.Limits.DrainGrace = grace },
	})
	t.Run("load balancers are told first, clients later", func(t *testing.T) {
		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/drain", "").Status)
		require.Equal(t, http.StatusServiceUnavailable, c.get("/readyz").Status)
		require.Equal(t, http.StatusOK, c.Ask("GET", c.URL+"/v1/models", "").Status)
		require.Equal(t, "right", c.Judge("its client has not heard of it", `"stream":true,`))
		require.Equal(t, http.StatusNoContent, c.Ask("DELETE", c.admin+"/drain", "").Status)
		require.Equal(t, http.StatusOK, c.get("/readyz").Status)
	})
	t.Run("what runs has its time, and what comes is refused", func(t *testing.T) {
		grace = 100 * time.Millisecond
		r, _ := c.reload("")
		require.Equal(t, "used", r.Outcome, r.Error)
		before := c.Metric("evenkeel_ttft_seconds_count")
		var running sync.WaitGroup
		bodies := make(chan reply, 3)
		for range cap(bodies) { // the last has to wait for a slot
			running.Go(func() {
				bodies <- c.Post(refclient.CompletionPath, completion("endless", `"stream":true,"ignore_eos":true,"max_tokens":100000,`))
			})
		}
		c.Eventually("two run", func() bool { return c.Metric("evenkeel_ttft_seconds_count") == before+2 })
		c.Eventually("one waits", func() bool { return c.Prefill[0].Stats().Pins == 1 })
		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/drain", `{"deadline":"3s"}`).Status)
		c.Eventually("others are refused", func() bool { return c.Post(refclient.ChatPath, `{`).Status == http.StatusServiceUnavailable })
		require.NotEmpty(t, c.Post(refclient.ChatPath, `{`).Header.Get("Retry-After"))
		running.Wait()
		cut, refused := 0, 0
		for range cap(bodies) {
			r := <-bodies
			require.NoError(t, r.Err)
			if r.Status == http.StatusServiceUnavailable {
				refused++
				continue
			}
			a := read(t, r.Body)
			require.Equal(t, "draining", a.Fail)
			require.True(t, a.Done)
			cut++
		}
		require.Equal(t, []int{2, 1}, []int{cut, refused})
		s := c.gw.Status(t.Context()).Drain
		require.NotNil(t, s)
		require.True(t, s.Over)
		require.Equal(t, http.StatusNoContent, c.Ask("DELETE", c.admin+"/drain", "").Status)
		require.Equal(t, "right", c.Judge("back again", `"stream":true,`))
		require.Nil(t, c.gw.Status(t.Context()).Drain)
	})
	// Not ready at once, nothing new is taken, what runs finishes.
	t.Run("the end lets streams finish", func(t *testing.T) {
		got := make(chan string, 2)
		for range cap(got) {
			go func() { got <- c.Judge("prompt 107", `"stream":true,`) }() // 200 tokens
		}
		c.Eventually("all are decoded", func() bool { return c.Decode[0].Stats().Running == int64(cap(got)) })
		down := make(chan error, 1)
		go func() { down <- c.gw.Shutdown(t.Context()) }()
		c.Eventually("not ready", func() bool { r := c.get("/readyz"); return r.Status == http.StatusServiceUnavailable })
		require.Positive(t, c.Decode[0].Stats().Running, "first of all")
		r := c.Post(refclient.ChatPath, chat("a", ""))
		require.True(t, r.Err != nil || r.Status == http.StatusServiceUnavailable, "nobody listens any more, or an open connection says so: %v",
			r)
		for range cap(got) {
			require.Equal(t, "right", <-got)
		}
		require.NoError(t, <-down)
		require.Error(t, c.get("/livez").Err)
	})
}

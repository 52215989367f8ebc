package gateway_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
)

// An operator who looks at the log alone finds out which engines are missing.
func TestTheLogSaysWhyTheProxyIsNotReady(t *testing.T) {
	t.Parallel()
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!doctype html><title>It works!</title>")
	}))
	t.Cleanup(page.Close)
	const gone = "http://127.0.0.1:9" // no test is given a port that low
	c := start(t, options{partly: true, configure: func(cfg *config.Config) {
		cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: page.URL}, config.Engine{URL: gone})
	}})
	of := func(message, engine string) (errors []string) {
		for _, l := range c.logs.FilterMessageSnippet(message).All() {
			if m := l.ContextMap(); engine == "" || strings.HasSuffix(m["engine"].(string), engine) {
				errors = append(errors, fmt.Sprint(m["error"]))
			}
		}
		return errors
	}
	web, nobody := strings.TrimPrefix(page.URL, "http://"), strings.TrimPrefix(gone, "http://")
	c.Eventually("both are told of", func() bool {
		return len(of("does not answer yet", web)) == 1 && len(of("does not answer yet", nobody)) == 1
	})
	require.Contains(t, of("does not answer yet", nobody)[0], "connection refused")
	require.Contains(t, of("does not answer yet", web)[0], "not a list of models")
	require.Empty(t, of("an engine is up", web))
	require.Equal(t, "down", c.status(web).State)

	said := func() int { return c.logs.FilterMessageSnippet("not ready: ").Len() }
	c.Eventually("what it said before its engines were up is over",
		func() bool { return c.logs.FilterMessage("the proxy is ready again").Len() == said() })
	before := said()
	c.Prefill[0].Kill()
	c.Eventually("it says why it is not ready", func() bool { return said() > before })
	require.NoError(t, c.Prefill[0].Revive())
	c.Eventually("and that it is again", func() bool { return c.logs.FilterMessage("the proxy is ready again").Len() > before })
	require.Equal(t, before+1, said(), "not every second")
	l := c.logs.FilterMessage("not ready: no healthy prefill engine").All()
	engines := fmt.Sprint(l[len(l)-1].ContextMap()["engines"])
	for _, want := range []string{"prefill " + refclient.AddressOf(c.Prefill[0]) + " is down: ", "prefill " + nobody + " is down: ",
		"connection refused", "not a list of models"} {
		require.Contains(t, engines, want)
	}
}

func TestReasonsOfEngines(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("sesame\n"), 0o600))
	o := twoDecodes(func(cfg *config.Config) { cfg.Admin.TokenFile, cfg.Health.Interval = file, 50*time.Millisecond })
	o.token = "sesame"
	var c *cluster
	var asked atomic.Int64
	o.decode[0].Hooks.OnBreak = func(uint64, int) { // else a busy machine may find the connection reset before it has read the head
		c.Eventually("the answer has begun", func() bool { return c.Metric("evenkeel_ttft_seconds_count") >= float64(asked.Load()) })
	}
	c = start(t, o)
	// That nobody takes the connection says more than the requests that failed by it.
	t.Run("the better reason is shown", func(t *testing.T) {
		bad := c.Decode[0]
		require.NoError(t,
			bad.SetFaults(refengine.Rule{Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 2, Leg: refengine.LegDecode}))
		for i := 0; c.engineStatus(bad).State == "up"; i++ {
			require.Less(t, i, 50)
			asked.Add(1)
			c.Judge(fmt.Sprint("prompt ", i), `"stream":true,`)
		}
		for _, l := range c.logs.FilterMessageSnippet("engine is out of service").All() {
			require.Contains(t, l.ContextMap()["error"], "read response body")
			require.NotContains(t, l.ContextMap()["error"], "upstream_broken")
		}
		bad.Kill()
		c.Eventually("the reason is that it is gone", func() bool {
			s := c.engineStatus(bad)
			return s.State == "down" && strings.Contains(s.Error, "connection refused")
		})
		require.NoError(t, bad.SetFaults())
		require.NoError(t, bad.Revive())
		c.Eventually("it is up again", func() bool { return c.engineStatus(bad).State == "up" })
	})
	// Who asks for readiness is told which engines are missing and why, if it may know their
	// addresses.
	t.Run("readiness tells them by engine", func(t *testing.T) {
		decode, dead, drained := refclient.AddressOf(c.Decode[0]), refclient.AddressOf(c.Prefill[0]), refclient.AddressOf(c.Decode[1])
		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/workers/"+drained+"/drain", "", "Authorization", "Bearer sesame").Status)
		c.Prefill[0].Kill()
		var got []string
		c.Eventually("it is not ready", func() bool {
			r := c.get("/readyz")
			got = strings.Split(strings.TrimSpace(r.Body), "\n")
			return r.Status == http.StatusServiceUnavailable && len(got) > 1
		})
		require.Equal(t, "no healthy prefill engine", got[0])
		require.Len(t, got, 3, "%q: one for each that is missing", got)
		for _, want := range []string{"prefill " + dead + " is down: ", "decode " + drained + " is draining: it drains"} {
			require.True(t, slices.ContainsFunc(got, func(line string) bool { return strings.HasPrefix(line, want) }), "%q: %s", got, want)
		}
		require.NotContains(t, strings.Join(got, " "), decode)
		for _, header := range [][]string{nil, {"Authorization", "Bearer wrong"}} {
			r := c.Ask("GET", c.admin+"/readyz", "", header...)
			require.Equal(t, http.StatusServiceUnavailable, r.Status, "kubelets need no token")
			require.Equal(t, "no healthy prefill engine\n", r.Body, "strangers learn no address")
		}
		require.NoError(t, c.Prefill[0].Revive())
		c.Eventually("it is ready again", func() bool { return c.get("/readyz").Body == "ok\n" })
	})
	t.Run("others are asked for the token", func(t *testing.T) { c.tokenIsAskedFor(t, file) })
}

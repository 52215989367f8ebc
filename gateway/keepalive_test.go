package gateway_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
)

// alive has clients that wait get comments.
func alive(after time.Duration) func(*config.Config) {
	return func(cfg *config.Config) { cfg.Limits.KeepAlive = after }
}

// slowPrefills are engines whose prompts take so long.
func slowPrefills(d time.Duration) []refengine.Config {
	return []refengine.Config{{Prompts: refengine.Prompts{Base: d, Concurrency: 8}, Answers: refengine.Answers{PromptTokensDetails: true}}}
}

// Comments go over TLS, come from ranks that do both, and come while another region serves the
// request: from the proxy whose client it is, whatever that region has in its config. How they pass
// an nginx is in bench/outside/api.
func TestCommentsOnEveryWay(t *testing.T) {
	t.Parallel()
	const span, takes = 20 * time.Millisecond, 300 * time.Millisecond
	hears := func(t *testing.T, c *cluster, ready func()) {
		t.Helper()
		ready()
		r := c.Post(refclient.ChatPath, chat("one two three", `"stream":true,`))
		require.NoError(t, r.Err)
		require.Equal(t, http.StatusOK, r.Status, r.Body)
		require.True(t, strings.HasPrefix(r.Body, ": keep-alive\n"), r.Body)
		require.NotContains(t, r.Body, ": keep-alive\n\n", "some clients take a blank line for the end of an event")
		require.Empty(t, r.Header.Get("X-Evenkeel-Route"), "the head was out before the way was known")
		got := read(t, r.Body)
		require.Empty(t, got.Fail)
		key := reftext.OfUser("one two three").Answer
		refclient.WholeText(t, key, got.Text[0])
		ready()
		r = c.Post(refclient.ChatPath, chat("one two three", ""))
		require.True(t, strings.HasPrefix(r.Body, "{"), r.Body)
	}
	t.Run("TLS", func(t *testing.T) {
		t.Parallel()
		a := certtest.New(t)
		certFile, keyFile := a.Issue(t, "proxy", nextHour)
		c := start(t, options{ca: a, prefill: slowPrefills(takes), configure: func(cfg *config.Config) {
			cfg.TLS, cfg.Limits.KeepAlive = config.TLS{CertFile: certFile, KeyFile: keyFile}, span
			cfg.Admin.TLS = cfg.TLS
		}})
		hears(t, c, func() {})
	})
	t.Run("ranks that do both", func(t *testing.T) {
		t.Parallel()
		c := start(t, options{mixed: slowPrefills(takes), configure: alive(span)})
		hears(t, c, func() {})
	})
	for name, theirs := range map[string]time.Duration{"another region": 0, "another region with the key": span} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			us, eu := pair(t, options{configure: func(cfg *config.Config) { remote(cfg); alive(span)(cfg) }}, options{
				prefill: slowPrefills(takes), configure: func(cfg *config.Config) { cfg.Geo.Policy = "local-only"; alive(theirs)(cfg) },
			})
			hears(t, us, func() { us.reaches("eu-1") })
			us.Accounted()
			eu.Accounted()
			require.EqualValues(t, 2, us.Metric(`evenkeel_geo_forwards_total{outcome="ok",peer="eu-1"}`))
		})
	}
}

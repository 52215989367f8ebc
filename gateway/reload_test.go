package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/reload"
)

// write replaces the config file as editors do.
func (c *cluster) write(text string) {
	c.Helper()
	next := filepath.Join(filepath.Dir(c.config), ".next")
	require.NoError(c, os.WriteFile(next, []byte(text), 0o600))
	require.NoError(c, os.Rename(next, c.config))
}

// yaml is a config of the cluster's own prefillers and of these decode engines,
// with more behind it.
func (c *cluster) yaml(more string, decode ...*refengine.Engine) string {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: \"127.0.0.1:0\"\nadmin: {listen: \"127.0.0.1:0\"}\nlog: {requests: %q}\nengines:\n  prefill:\n", c.RequestLog)
	for _, e := range c.Prefill {
		fmt.Fprintf(&b, "    - url: %s\n", e.URLs()[0])
	}
	b.WriteString("  decode:\n")
	for _, e := range decode {
		fmt.Fprintf(&b, "    - {url: %s, slots: %d}\n", e.URLs()[0], e.Config().Slots)
	}
	return b.String() + more
}

const usual = "prefill: {scrape: {interval: 50ms}, retry: {base: 1ms}}\n"

func (c *cluster) reload(query string) (r reload.Reload, status int) {
	c.Helper()
	answer := c.Ask("POST", c.admin+"/reload"+query, "")
	require.NoError(c, json.Unmarshal([]byte(answer.Body), &r), answer.Body)
	return r, answer.Status
}

func paths(r reload.Reload) (list []string) {
	for _, c := range r.Changes {
		list = append(list, c.Path)
	}
	return list
}

// reloading starts a cluster that runs on a file with its first engine, of two
// decode engines.
func reloading(t *testing.T) *cluster {
	t.Helper()
	return start(t, options{decode: []refengine.Config{paced(), paced()}, file: func(c *cluster) string { return c.yaml(usual, c.Decode[0]) }})
}

func TestReloads(t *testing.T) {
	t.Parallel()
	c := reloading(t)
	// A file that is wrong changes nothing, and whoever looks finds where.
	t.Run("a bad one is refused whole", func(t *testing.T) {
		for _, row := range []struct{ name, text, says string }{
			{"a value", c.yaml(usual+"dispatch: {policy: fastest}\npool: {size: 5}\n", c.Decode[1]), "unknown policy"},
			{"a key", c.yaml(usual+"pol: {size: 5}\n", c.Decode[1]), "no such key"},
			{"no YAML", c.yaml(usual, c.Decode[1]) + "x: [", ""},
			{"nothing", " \n", "empty"},
			{"a file that it names", c.yaml(usual+"keys_file: /nowhere\n", c.Decode[1]), "/nowhere"},
			{"a policy without its predictor", c.yaml(usual+"dispatch: {policy: \"brh:predictor=magic\"}\n", c.Decode[1]), "predictor=magic"},
		} {
			c.write(row.text)
			r, status := c.reload("?dry=1")
			require.Equal(t, http.StatusUnprocessableEntity, status, row.name)
			require.Contains(t, r.Error, row.says, row.name)
			r, status = c.reload("")
			require.Equal(t, http.StatusUnprocessableEntity, status, row.name)
			require.Equal(t, "refused", r.Outcome, row.name)
			require.Empty(t, r.Changes)
			if row.name == "a value" {
				require.Positive(t, r.Line)
				require.Positive(t, r.Column)
			}
			require.Equal(t, "refused", c.gw.Status(t.Context()).Config.Last.Outcome)
			require.Equal(t, "evenkeel", c.gw.Policy())
			require.Equal(t, 1024, c.gw.Status(t.Context()).PoolPlaces)
			require.NotContains(t, c.get("/workers").Body, refclient.AddressOf(c.Decode[1]))
		}
		status := c.gw.Status(t.Context())
		require.Equal(t, status.Started, status.Config.Since, "the config of the start is in force")
		require.Zero(t, c.Metric("evenkeel_config_last_reload_successful"))
		require.Positive(t, c.Metric(`evenkeel_reloads_total{key="config",outcome="refused"}`))
		require.Equal(t, "right", c.Judge("a story", ""))
		hash := c.Metric("evenkeel_config_hash")
		c.write(c.yaml(usual+"pool: {size: 5}\n", c.Decode[0]))
		c.Eventually("a good one is used", func() bool { return c.Metric("evenkeel_config_last_reload_successful") == 1 })
		require.NotEqual(t, hash, c.Metric("evenkeel_config_hash"))
	})
	// The disk that the config lies on may hang: who looks how the proxy is, and so
	// the live page, does not wait for a reload.
	t.Run("the status does not wait for one that cannot be read", func(t *testing.T) {
		hangs := filepath.Join(filepath.Dir(c.config), ".next")
		require.NoError(t, syscall.Mkfifo(hangs, 0o600))
		require.NoError(t, os.Rename(hangs, c.config))
		writer, err := os.OpenFile(c.config, os.O_WRONLY, 0) // returns once the reload reads
		require.NoError(t, err)
		c.write(c.yaml(usual, c.Decode[0])) // for whoever reads next
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			c.gw.Status(context.Background())
		}()
		select {
		case <-answered:
		case <-time.After(10 * time.Second):
			t.Error("it waits")
		}
		require.NoError(t, writer.Close())
		<-answered
	})
	// What only a restart changes is named, and the rest is not lost over it.
	t.Run("what needs a restart is named", func(t *testing.T) {
		c.write(strings.Replace(c.yaml(usual+"health: {canary: 9s}\nlimits: {body_bytes: 1000, probe_timeout: 1m}\n", c.Decode[0]),
			"listen: \"127.0.0.1:0\"", "listen: \":1234\"", 1))
		dry, _ := c.reload("?dry=1")
		require.Contains(t, []string{"dry", "unchanged"}, dry.Outcome, "unchanged: it was found before")
		var r *reload.Reload
		c.Eventually("it is in force, and said to be", func() bool {
			r = c.gw.Status(t.Context()).Config.Last
			inForce := c.gw.Config().Limits.ProbeTimeout == time.Minute // before Last says so
			return inForce && r != nil && len(r.Restart) > 0
		})
		require.Equal(t, []string{"listen", "health.canary", "limits.body_bytes"}, r.Restart)
		require.Equal(t, "right", c.Judge("as before", ""))
		again, status := c.reload("?dry=1")
		require.Equal(t, 200, status)
		require.Equal(t, []string{"listen", "health.canary", "limits.body_bytes"}, paths(again), "still to come")
		require.Equal(t, http.StatusBadRequest, c.Ask("POST", c.admin+"/reload?dry=perhaps", "").Status)
	})
	// While streams run the fleet, the policy and every limit change; nothing of the streams does.
	t.Run("in the middle of streams", func(t *testing.T) {
		c.write(c.yaml(usual, c.Decode[0]))
		c.Eventually("the usual config is in force", func() bool { return c.gw.Config().Limits.ProbeTimeout != time.Minute })
		first, second := c.Decode[0], c.Decode[1]
		stop := c.KeepAsking(6)
		c.Eventually("they run", func() bool { return first.Stats().Running > 3 })
		id := c.gw.Status(t.Context()).Dispatch.Models[0].Workers[0].ID

		c.write(c.yaml(usual, first, second))
		c.Eventually("the new engine is found by itself", func() bool { return second.Stats().Decodes > 3 })
		require.Equal(t, id, c.gw.Status(t.Context()).Dispatch.Models[0].Workers[0].ID)

		c.write(c.yaml("prefill: {policy: round-robin, kv_threshold: 0.8, scrape: {interval: 20ms}, retry: {base: 1ms}}\ndispatch: {policy: "+
			"br0, window: 1ms}\npool: {size: 77, ttl: 9s}\npredictor: {kind: none}\n", second))
		var r *reload.Reload
		c.Eventually("it is in force, and told", func() bool {
			r = c.gw.Status(t.Context()).Config.Last
			return c.gw.Policy() == "br0" && slices.Contains(paths(*r), "dispatch.policy")
		})
		require.Equal(t, "used", r.Outcome)
		require.ElementsMatch(t, []string{
			"engines.decode[" + refclient.AddressOf(first) + "]", "dispatch.policy", "dispatch.window", "predictor.kind", "pool.size", "pool.ttl",
			"prefill.policy", "prefill.kv_threshold", "prefill.scrape.interval",
		}, paths(*r))
		c.Eventually("what ran on the engine that is gone has finished", func() bool { s := first.Stats(); return s.Running+s.Waiting == 0 })
		require.Equal(t, 77, c.gw.Status(t.Context()).PoolPlaces)
		before := second.Stats().Decodes
		c.Eventually("the other goes on", func() bool { return second.Stats().Decodes > before+6 })

		c.write(c.yaml(usual, first, second))
		c.Eventually("both are there again", func() bool { return first.Stats().Running > 0 && c.gw.Policy() == "evenkeel" })
		found := false
		for _, w := range c.gw.Status(t.Context()).Dispatch.Models[0].Workers {
			found = found || w.ID == id && w.Name == refclient.AddressOf(first)
		}
		require.True(t, found, "a rank that comes back is who it was")
		stop()
		require.Zero(t, c.logs.FilterMessage("an answer goes on after its decode engine lost it").Len(), "nobody had to move")
	})
	// What an operator changed since stays, but where the file speaks of the same.
	t.Run("operators' changes survive", func(t *testing.T) {
		c.write(c.yaml(usual, c.Decode[0]))
		c.Eventually("it has one engine", func() bool { return !strings.Contains(c.get("/workers").Body, refclient.AddressOf(c.Decode[1])) })
		first, second, before := refclient.AddressOf(c.Decode[0]), refclient.AddressOf(c.Decode[1]), c.Decode[0].Stats().Decodes
		require.Equal(t, http.StatusCreated, c.Ask("POST", c.admin+"/workers", fmt.Sprintf(`{"url":%q,"slots":3}`, second)).Status)
		require.Equal(t, http.StatusNoContent, c.Ask("POST", c.admin+"/workers/"+first+"/drain", "").Status)
		require.Equal(t, 200, c.Ask("PUT", c.admin+"/policy", `{"policy":"jsq"}`).Status)
		c.write(c.yaml(usual+"pool: {size: 99}\n", c.Decode[0]))
		c.Eventually("it is read", func() bool { return c.gw.Status(t.Context()).PoolPlaces == 99 })
		s := c.gw.Status(t.Context())
		require.Equal(t, "jsq", c.gw.Policy())
		require.Equal(t, []any{first, true, second, 3}, []any{s.Engines[1].ID, s.Engines[1].Draining, s.Engines[2].ID, s.Engines[2].Slots})
		c.Eventually("it is up", func() bool { return c.Judge("on the second", "") == "right" })
		require.Equal(t, before, c.Decode[0].Stats().Decodes)

		c.write(c.yaml(usual+"dispatch: {policy: br0}\n", c.Decode[1], c.Decode[0]))
		c.Eventually("the file speaks of it", func() bool { // the policy is in force before the engines are
			s = c.gw.Status(t.Context())
			return c.gw.Policy() == "br0" && s.Engines[1].ID == second
		})
		require.Equal(t, []any{second, 16, first, true}, []any{s.Engines[1].ID, s.Engines[1].Slots, s.Engines[2].ID, s.Engines[2].Draining})
	})
}

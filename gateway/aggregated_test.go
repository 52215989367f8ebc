package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/prefill"
)

func together(more func(*config.Config)) options {
	return options{
		mixed: []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			if more != nil {
				more(cfg)
			}
		},
	}
}

// What ranks that do both have in their caches is known from their KV events, while conversations push each other out.
func TestKVEventsTellWhatRanksThatDoBothHold(t *testing.T) {
	t.Parallel()
	c := start(t, options{mixed: []refengine.Config{publisher(nil), publisher(nil)}, configure: followed})
	ranks := func() []prefill.RankEvents {
		var o prefill.Overview
		require.NoError(c, json.Unmarshal([]byte(c.get("/prefill").body), &o))
		return o.Ranks
	}
	caughtUp := func() {
		c.eventually("all events are taken in", func() bool {
			all := ranks()
			for _, r := range all {
				i := slices.IndexFunc(c.decode, func(e *refengine.Engine) bool { return strings.Contains(e.URLs()[0], strings.TrimSuffix(r.ID, "/0")) })
				want := c.decode[i].Stats().Ranks[0].KVBatches
				if r.Mode != "precise" || r.Events.Batches < want || want > 0 && !r.Events.Complete {
					return false
				}
			}
			return len(all) == 2
		})
	}
	caughtUp()
	talk := newTalks(12)
	c.hits(talk.next())
	c.eventually("the size of a block is known", func() bool { return c.gw.Prefill().BlockTokens(model) == 128 })
	sum := 0
	for range 60 {
		predicted, actual := c.hits(talk.next())
		require.Equal(t, actual, predicted)
		sum += actual
		caughtUp()
	}
	require.Positive(t, sum)
	for _, r := range ranks() {
		require.Equal(t, 1.0, c.metric(fmt.Sprintf("evenkeel_kv_events_precise{candidate=%q}", r.ID)))
		require.Equal(t, float64(r.Events.Batches), c.metric(fmt.Sprintf("evenkeel_kv_events_batches_total{candidate=%q}", r.ID)))
	}
}

// Where each engine prefills and decodes, no answer speaks of engines that there are not.
func TestWithoutPairsNobodyIsToldOfThem(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"one group":                 {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal"}}, dirty: true},
		"nobody has told its model": {mixed: []refengine.Config{{DPSize: 2, DPMode: "internal", Model: "other"}}, dirty: true},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, o)
			told := func(r reply, status int, code string) {
				t.Helper()
				require.Equal(t, status, r.status, r.body)
				require.NotContains(t, r.body, "prefill")
				require.NotContains(t, r.body, "decode")
				require.Contains(t, r.body, code)
			}
			if name == "one group" {
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy}))
				told(c.post(chatPath, chat("a", "")), http.StatusServiceUnavailable, `"engine_unavailable"`)
				require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
				told(c.post(chatPath, chat("a", "")), http.StatusBadGateway, `"engine_failed"`)
				require.NoError(t, c.decode[0].SetFaults())
			}
			c.decode[0].Kill()
			c.eventually("the proxy is not ready", func() bool { ok, _ := c.gw.Ready(); return !ok })
			for path, body := range map[string]string{chatPath: chat("a", ""), completionPath: completion("a", `"stream":true,`), responsesPath: respond("a", ""), messagesPath: wordsOf("a", "")} {
				r := c.post(path, body)
				if name != "one group" {
					require.Equal(t, http.StatusNotFound, r.status, r.body)
					continue
				}
				if told(r, http.StatusServiceUnavailable, "(down)"); path != messagesPath {
					require.Contains(t, r.body, `"engine_unavailable"`)
				}
			}
			_, why := c.gw.Ready()
			require.Equal(t, "no healthy aggregated engine", why)
		})
	}
}

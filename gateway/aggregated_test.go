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
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
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

func TestRanksThatPrefillAndDecodeServeAlone(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	for _, more := range []string{`"stream":true,`, ""} {
		_, route := c.say(talk(more, reftext.MakePrompt(1, 300)))
		require.Equal(t, "aggregated", route)
	}
	c.settledRequests(2)
	r := c.records()[1]
	require.Equal(t, "aggregated", r.Route)
	require.Positive(t, r.PromptTokens)
	require.NotEmpty(t, r.Rank)
}

// All kinds of requests that engines serve as a pair are served by a rank alone, too.
func TestEveryEndpointIsServedByRanksThatDoBoth(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	r := c.post(completionPath, fmt.Sprintf(`{"model":%q,"max_tokens":8,"n":3,"seed":5,"prompt":"one two three"}`, model))
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Len(t, whole(t, r.body), 3)
	r = c.post("/v1/messages", fmt.Sprintf(`{"model":%q,"max_tokens":8,"messages":[{"role":"user","content":"hello"}]}`, model))
	require.Equal(t, http.StatusOK, r.status, r.body)
	r = c.post("/v1/responses", fmt.Sprintf(`{"model":%q,"max_output_tokens":8,"input":"hello"}`, model))
	require.Equal(t, http.StatusOK, r.status, r.body)
	c.settledRequests(3)
	for _, r := range c.records() {
		require.Equal(t, "aggregated", r.Route)
	}
}

// A client that leaves while its prompt is computed, or while it is answered, has its slot and its lease free at once.
func TestAClientThatLeavesARankThatDoesBoth(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	for range 3 {
		leave := c.endless()
		leave()
	}
	c.settled(false)
}

// Half of two groups fails: requests, and answers that have begun, go on with the other one.
func TestAnswersGoOnWhenAGroupDies(t *testing.T) {
	t.Parallel()
	o := together(func(cfg *config.Config) {
		for i := range cfg.Engines.Aggregated {
			cfg.Engines.Aggregated[i].Group = []string{"one", "other"}[i/2]
		}
		cfg.Profiles[config.DefaultAggregated] = mooncake.Profile{Connector: mooncake.None, ChatResume: mooncake.ChatResumeContinue}
	})
	o.mixed = append(o.mixed, o.mixed[0])
	c := start(t, o)
	stop := c.keepAsking(4)
	served := func(i int) int64 { return c.decode[i].Stats().Finished }
	c.eventually("both groups have served", func() bool { return served(0) > 2 && served(1) > 2 })
	c.decode[0].Kill()
	was := served(1)
	c.eventually("the other group serves on", func() bool { return served(1) > was+8 })
	stop()
}

// Where a model has engines of both kinds, a pair serves it as long as there is one, and ranks that do both when there is none.
func TestOfBothKindsOneIsPreferred(t *testing.T) {
	t.Parallel()
	for prefer, want := range map[string][2]string{config.PreferPD: {"disaggregated", "aggregated"}, config.PreferAggregated: {"aggregated", "aggregated"}} {
		t.Run(prefer, func(t *testing.T) {
			t.Parallel()
			o := together(func(cfg *config.Config) { cfg.Engines.Prefer = prefer })
			o.prefill, o.decode = []refengine.Config{{}}, []refengine.Config{{DPSize: 2}}
			c := start(t, o)
			_, route := c.say(talk("", "hi"))
			require.Equal(t, want[0], route)
			for _, url := range c.decode[0].URLs() {
				require.NoError(t, c.gw.DrainEngine("decode", strings.TrimPrefix(url, "http://"), 0))
			}
			_, route = c.say(talk("", "hi again"))
			require.Equal(t, want[1], route)
		})
	}
}

// How long a prompt is nobody knows before an engine has counted it. One that looks too long for every rank is still sent:
// only its engine can refuse it.
func TestAPromptThatLooksTooLongIsSent(t *testing.T) {
	t.Parallel()
	o := together(nil)
	o.mixed[0].MaxModelLen, o.mixed[0].KVTokens = 2048, 4096
	c := start(t, o)
	c.say(talk("", strings.Repeat("a", 40_000)))
	c.settledRequests(1)
	require.Less(t, c.records()[0].PromptTokens, 2048)
}

// A rank whose queue is full is that rank's matter: the other ranks of its address take the request at once, and nothing is held
// against the engine.
func TestAFullRankLeavesItsGroupInService(t *testing.T) {
	t.Parallel()
	o := together(nil)
	o.mixed[0].DPMode, o.mixed[0].DPSize = "internal", 4
	c := start(t, o)
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Count: 6}))
	require.Equal(t, http.StatusServiceUnavailable, c.post(chatPath, talk("", "hi")).status, "all its attempts found a full queue")
	require.Equal(t, "up", c.gw.Status(t.Context()).Engines[0].State)
	require.Zero(t, c.gw.Status(t.Context()).Prefill[0].Failures)
	c.say(talk("", "hi"))
}

// A turn of a chat goes to the rank that holds the turns before it, which computes only what is new.
func TestATurnGoesToTheRankThatHoldsTheChat(t *testing.T) {
	t.Parallel()
	c := start(t, together(nil))
	first := reftext.MakePrompt(1, 3000)
	c.say(talk("", first))
	c.settledRequests(1)
	was := c.records()[0].Rank
	for i := range 3 {
		c.say(talk("", first, "well", fmt.Sprint("and then, number ", i)))
		c.settledRequests(2 + i)
		r := c.records()[1+i]
		require.Equal(t, was, r.Rank)
		require.Less(t, r.LocalTokens, 257)
		require.Greater(t, r.CachedTokens, 2800, "as the engine counts")
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

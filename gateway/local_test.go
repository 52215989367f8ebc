package gateway_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// conditional is a cluster whose decode ranks may compute short prompts.
func conditional(more func(*config.Config)) options {
	return options{
		profile: mooncake.Profile{AllowLocalPrefill: true},
		decode:  []refengine.Config{{DPSize: 2, PrefixCache: 4096, PromptTokensDetails: true}},
		configure: func(cfg *config.Config) {
			cfg.ExposeRoute = true
			cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateConditional
			cfg.Prefill.Index.TokenizeTimeout = patience // a busy machine counts the prompt, too
			if more != nil {
				more(cfg)
			}
		},
	}
}

// talk is a chat of turns, the user's first.
func talk(more string, turns ...string) string {
	var messages []string
	for i, text := range turns {
		messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%q}`, [...]string{"user", "assistant"}[i%2], text))
	}
	return fmt.Sprintf(`{%s"model":%q,"messages":[%s]}`, more, model, strings.Join(messages, ","))
}

// say posts a chat, checks its answer and returns it with the way it took.
func (c *cluster) say(body string, header ...string) (text, route string) {
	c.Helper()
	p, err := reftext.Render(true, []byte(body))
	require.NoError(c, err)
	r := c.post(chatPath, body, header...)
	require.NoError(c, r.err)
	require.Equal(c, http.StatusOK, r.status, r.body)
	if strings.Contains(body, `"stream":true`) {
		text = read(c.T, r.body).text[0]
	} else {
		text = whole(c.T, r.body)[0]
	}
	wholeText(c.T, p.Answer, text)
	return text, r.header.Get("X-Evenkeel-Route")
}

func TestShortTurnsOfAChatAreServedByTheRankThatHasIt(t *testing.T) {
	t.Parallel()
	c := start(t, conditional(nil))
	first := reftext.MakePrompt(1, 3000)
	_, route := c.say(talk(`"stream":true,`, first))
	require.Equal(t, "disaggregated", route, "3000 new tokens")
	c.settledRequests(1)
	was := c.records()[0].Rank
	for i, more := range []string{`"stream":true,`, ""} {
		_, route = c.say(talk(more, first, "well", fmt.Sprint("and then, number ", i)))
		require.Equal(t, "local-prefill", route)
		c.settledRequests(2 + i)
		r := c.records()[1+i]
		require.Equal(t, was, r.Rank, "which pulled the beginning")
		require.Equal(t, "local-prefill", r.Route)
		require.Less(t, r.LocalTokens, 257)
		require.Positive(t, r.LocalTokens)
		require.Empty(t, r.Prefill)
		require.Greater(t, r.CachedTokens, 2800, "as the engine counts")
		require.Greater(t, r.PromptTokens, 3000)
		require.Equal(t, 1, r.Attempts)
	}
	_, route = c.say(talk("", reftext.MakePrompt(2, 3000)))
	require.Equal(t, "disaggregated", route)
	require.Equal(t, http.StatusOK, c.ask("POST", c.admin+"/reset_prefix_cache", "").status)
	_, route = c.say(talk("", first, "well", "once more"))
	require.Equal(t, "disaggregated", route, "no engine has anything any more")
	require.EqualValues(t, 2, c.metric(`evenkeel_local_prefill_requests_total{reason="short"}`))
	require.EqualValues(t, 2, c.decode[0].Stats().LocalPrefills)
	require.EqualValues(t, 3, c.prefill[0].Stats().Probes)
}

func TestEveryPromptIsDisaggregatedUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"by default": {configure: func(cfg *config.Config) { cfg.ExposeRoute = true }},
		"where the profile allows it and the mode does not": conditional(func(cfg *config.Config) { cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := start(t, o)
			_, route := c.say(talk("", "hi"))
			require.Equal(t, "disaggregated", route)
			require.Zero(t, c.sum("evenkeel_local_prefill_requests_total"))
		})
	}
}

func TestLegsDecideForThemselves(t *testing.T) {
	t.Parallel()
	c := start(t, conditional(nil))
	const short = "one two three"
	for i, stream := range []string{"", `"stream":true,`} {
		long := reftext.MakePrompt(uint64(30+i), 2000)
		r := c.post(completionPath, fmt.Sprintf(`{%s"model":%q,"max_tokens":8,"prompt":[%q,%q,%q]}`, stream, model, short, long, short))
		require.Equal(t, http.StatusOK, r.status, r.body)
		var texts map[int]string
		if i == 1 {
			texts = read(t, r.body).text
		} else {
			texts = map[int]string{}
			for k, text := range whole(t, r.body) {
				texts[k] = text
			}
		}
		for k, prompt := range []string{short, long, short} {
			require.Equal(t, 8, rightText(t, reftext.Of(prompt).Answer, texts[k]))
		}
	}
	c.settled(false)
	require.EqualValues(t, 4, c.metric(`evenkeel_local_prefill_requests_total{reason="short"}`))
	r := c.post(chatPath, talk(`"n":3,"seed":5,`, "hello there"))
	for k, text := range whole(t, r.body) {
		p, err := reftext.Render(true, []byte(talk(fmt.Sprintf(`"seed":%d,`, 5+k), "hello there")))
		require.NoError(t, err)
		wholeText(t, p.Answer, text)
	}
	require.EqualValues(t, 7, c.metric(`evenkeel_local_prefill_requests_total{reason="short"}`))
}

func TestATrustedCallerChoosesTheWay(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	keyFile(t, file, "ops ek-ops , trusted: true", "team ek-team")
	c := start(t, conditional(func(cfg *config.Config) {
		cfg.KeysFile = file
		cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways
	}))
	ask := func(key, way, prompt string) reply {
		return c.post(chatPath, talk(`"max_tokens":4,`, prompt), "Authorization", "Bearer "+key, "X-Evenkeel-Disaggregate", way)
	}
	way := func(key, way, prompt string) string { return ask(key, way, prompt).header.Get("X-Evenkeel-Route") }
	long := reftext.MakePrompt(4, 3000)
	require.Equal(t, "local-prefill", way("ek-ops", "auto", "hi"))
	require.Equal(t, "disaggregated", way("ek-ops", "auto", long))
	require.Equal(t, "disaggregated", way("ek-ops", "always", "hi"))
	require.Equal(t, "local-prefill", way("ek-ops", "never", reftext.MakePrompt(5, 3000)))
	require.Equal(t, "disaggregated", way("ek-team", "never", "hi"), "not trusted: without effect")
	r := ask("ek-ops", "sometimes", "hi")
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Equal(t, "bad_target", r.header.Get("X-Evenkeel-Reason"))
	require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="asked"}`))
}

// A probe whose first token ends the answer again and again has nothing to hand
// off: a decode rank does without, where it may.
func TestAPromptThatHandsNothingOff(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{true, false} {
		t.Run(fmt.Sprint(allowed), func(t *testing.T) {
			t.Parallel()
			var bird atomic.Pointer[parrot]
			o := conditional(func(cfg *config.Config) {
				cfg.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways
				inFront(t, &cfg.Engines.Prefill[0], &bird)
			})
			o.profile.AllowLocalPrefill = allowed
			c := start(t, o)
			var probes atomic.Int64
			bird.Store(new(parrot(func(w http.ResponseWriter, _ string) bool {
				probes.Add(1)
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprint(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}],"usage":{"prompt_tokens":900,"completion_tokens":1,"total_tokens":901},"kv_transfer_params":null}`)
				return true
			})))
			body := talk(`"stream":true,`, reftext.MakePrompt(6, 900))
			if !allowed {
				require.Equal(t, http.StatusBadGateway, c.post(chatPath, body).status)
				require.EqualValues(t, 3, probes.Load())
				return
			}
			_, route := c.say(body)
			require.Equal(t, "local-prefill", route)
			require.EqualValues(t, 2, probes.Load(), "the second one masks the end")
			require.EqualValues(t, 1, c.metric(`evenkeel_local_prefill_requests_total{reason="ended"}`))
		})
	}
}

// An engine whose cache holds nothing is found out before it has computed many
// long prompts.
func TestAnEngineWithoutAPrefixCacheIsFoundOut(t *testing.T) {
	t.Parallel()
	o := conditional(nil)
	o.decode = []refengine.Config{{PromptTokensDetails: true}}
	c := start(t, o)
	for i := range 3 {
		first := reftext.MakePrompt(uint64(10+i), 3000)
		_, _ = c.say(talk("", first))
		_, route := c.say(talk("", first, "well", "go on"))
		require.Equal(t, [...]string{"local-prefill", "disaggregated", "disaggregated"}[i], route)
		_, route = c.say(talk("", fmt.Sprint("hi ", i)))
		require.Equal(t, "local-prefill", route, "it is short, cache or not")
	}
	require.Equal(t, 1, c.logs.FilterMessageSnippet("what a decode engine's prefix cache holds").Len())
}

// Many at once: right answers, and no rank computes more than its bound.
func TestManyShortAndLongPromptsAtOnce(t *testing.T) {
	t.Parallel()
	c := start(t, conditional(func(cfg *config.Config) { cfg.Prefill.Disaggregation.ThresholdTokens = "auto" }))
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Go(func() {
			body := talk(`"stream":true,"max_tokens":12,`, reftext.MakePrompt(uint64(i), []int{20, 60, 1500}[i%3]))
			p, err := reftext.Render(true, []byte(body))
			if r := c.post(chatPath, body); err != nil || r.status != http.StatusOK || !strings.HasPrefix(reftext.Text(p.Answer, 12), read(t, r.body).text[0]) {
				t.Errorf("%d: %d %s", i, r.status, r.body)
			}
		})
	}
	wg.Wait()
	c.settled(false)
	locals, declined := c.sum("evenkeel_local_prefill_requests_total"), c.metric("evenkeel_local_prefill_declined_total")
	require.Positive(t, locals)
	require.EqualValues(t, 40, locals+declined)
}

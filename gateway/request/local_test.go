package request

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/journal"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A decode rank that does not come to a first event with a prompt leaves it to a prefill engine,
// and no other rank is tried.
func TestARankThatFailsAtAPromptLeavesItToPrefill(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"is refused with 503", "is refused with 500", "is reset before the head", "is reset after the 200", "is garbage",
		"is an error beneath a 200",
		"is given back at the first token", "begins with an error event", "ends before the first token",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rank := refengine.Config{KV: refengine.KV{PrefixCache: 4096}}
			b := start(t, alone(setup{decode: []refengine.Config{rank, rank}}))
			rule := ends[name]
			rule.Leg, rule.Count = refengine.LegPlain, 1
			spoil(t, b.d, []*refengine.Rule{&rule, &rule})
			require.Equal(t, "right", b.judge(short, `"stream":true,`))
			b.clean()
			require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_failures_total", ""))
			require.EqualValues(t, 1, b.locals())
			require.Equal(t, 1, b.probes())
			require.Equal(t, journal.Disaggregated, b.asked[0].Record.Route)
			require.Equal(t, 2, b.asked[0].Record.Attempts)
		})
	}
}

func TestWhatTheEngineRefusesIsNotPrefilledFirst(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{}))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Reject}))
	require.Equal(t, http.StatusBadRequest, b.post(mooncake.Chat.Path(), chat(short, "")).status)
	b.clean()
	require.Zero(t, b.probes())
}

func TestAClientThatLeavesALocalPrefillStopsItAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{}))
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Hang, Leg: refengine.LegPlain}))
	leave, wait := b.send(chat(short, `"stream":true,`))
	b.eventually("it is with the engine", func() bool { return b.d[0].Stats().Plain > 0 })
	leave()
	wait()
	b.clean()
	require.EqualValues(t, 1, b.metric(t, "evenkeel_cancels_total", "prefill"))
	require.EqualValues(t, 1, b.metric(t, "evenkeel_cancel_release_seconds", "prefill"))
	require.Zero(t, b.probes())
	require.Zero(t, b.metric(t, "evenkeel_local_prefill_failures_total", ""))
}

// Legs that ranks were to compute give their slots back when the others of the request find no
// place in the arrival queue.
func TestLegsGiveTheirSlotsBackWhenTheOthersFindNoPlace(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{configure: func(c *config.Config, _ *Deps) {
		c.Pool.Size, c.Prefill.Queue.Max, c.Prefill.Queue.Timeout = 1, 1, time.Hour
	}}))
	require.NoError(t, b.p[0].SetFaults(standing)) // until the first client leaves
	words := func(seed uint64) string { return reftext.MakePrompt(seed, 2000) }
	leave, wait := b.send(chat(words(50), ""))
	b.eventually("the only place is taken", func() bool { return b.Places.Used() == 1 && b.p[0].Stats().Running == 1 })
	queued := make(chan string, 1)
	go func() { queued <- b.judge(words(51), "") }()
	b.eventually("the second waits", func() bool { return b.Prefill.Waiting(refModel) == 1 })
	for i, stream := range []string{"", `"stream":true,`} {
		r := b.post(mooncake.Completions.Path(), fmt.Sprintf(`{%s"model":%q,"max_tokens":8,"prompt":["one two three",%q,"four five six"]}`, stream, refModel, words(52)))
		require.Equal(t, http.StatusTooManyRequests, r.status, r.body)
		_, _, fail := read(t, r)
		require.Equal(t, "queue_full", fail)
		require.EqualValues(t, 2*(i+1), b.locals(), "they had slots")
		b.eventually("the slots are free", func() bool { return b.used() == 0 })
	}
	require.NoError(t, b.p[0].SetFaults())
	leave()
	wait()
	require.Equal(t, "right", <-queued)
	b.settle()
}

// A rank without a free slot leaves a short prompt to a prefill engine.
func TestABusyRankLeavesShortPromptsToPrefill(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{decode: []refengine.Config{{Slots: 1, KV: refengine.KV{PrefixCache: 4096}}}, waits: true}))
	leave := b.endless()
	before := b.probes()
	got := make(chan string, 1)
	go func() { got <- b.judge("hello", "") }()
	b.eventually("it is prefilled", func() bool { return b.probes() > before })
	require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_declined_total", ""))
	leave()
	require.Equal(t, "right", <-got)
	require.Equal(t, journal.Disaggregated, b.asked[1].Record.Route)
	b.settle()
}

// talk is a chat of turns, the user's first.
func talk(more string, turns ...string) string {
	var messages []string
	for i, text := range turns {
		messages = append(messages, fmt.Sprintf(`{"role":%q,"content":%q}`, [...]string{"user", "assistant"}[i%2], text))
	}
	return fmt.Sprintf(`{%s"model":%q,"messages":[%s]}`, more, refModel, strings.Join(messages, ","))
}

// say posts a chat whose answer has to be right, and returns the way it took.
func (b *bed) say(body string) (route string) {
	b.t.Helper()
	p, err := reftext.Render(true, []byte(body))
	require.NoError(b.t, err)
	text, finished, fail := read(b.t, b.post(mooncake.Chat.Path(), body))
	require.Empty(b.t, fail)
	require.True(b.t, finished)
	require.Equal(b.t, reftext.NaturalLength(p.Answer), right(b.t, p.Answer, text))
	b.over()
	return b.asked[len(b.asked)-1].Record.Route
}

func TestEveryPromptIsDisaggregatedUnlessToldOtherwise(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]setup{
		"by default": {},
		"where the profile allows it and the mode does not": alone(setup{configure: func(c *config.Config, _ *Deps) {
			c.Prefill.Disaggregation.Mode = prefill.DisaggregateAlways
		}}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, o)
			require.Equal(t, journal.Disaggregated, b.say(talk("", "hi")))
			require.Zero(t, b.locals())
			b.clean()
		})
	}
}

func TestLegsDecideForThemselves(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{decode: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}}}}))
	const few = "one two three"
	for i, stream := range []string{"", `"stream":true,`} {
		prompts := []string{few, reftext.MakePrompt(uint64(30+i), 2000), few}
		body := fmt.Sprintf(`{%s"model":%q,"max_tokens":8,"prompt":[%q,%q,%q]}`, stream, refModel, prompts[0], prompts[1], prompts[2])
		got := readSeamless(t, b.post(mooncake.Completions.Path(), body))
		require.Len(t, got.finishes, 3)
		for k, prompt := range prompts {
			require.Equal(t, 8, right(t, reftext.Of(prompt).Answer, got.texts[k]))
		}
	}
	b.over()
	require.EqualValues(t, 4, b.locals())
	got := readSeamless(t, b.post(mooncake.Chat.Path(), chat("hello there", `"n":3,"seed":5,`)))
	require.Len(t, got.finishes, 3)
	for k, text := range got.texts {
		p, err := reftext.Render(true, []byte(chat("hello there", fmt.Sprintf(`"seed":%d,`, 5+k))))
		require.NoError(t, err)
		require.Equal(t, reftext.NaturalLength(p.Answer), right(t, p.Answer, text))
	}
	require.EqualValues(t, 7, b.locals())
	b.clean()
}

// A probe whose first token ends the answer again and again has nothing to hand
// off: a decode rank does without, where it may.
func TestAPromptThatHandsNothingOff(t *testing.T) {
	t.Parallel()
	for _, allowed := range []bool{true, false} {
		t.Run(fmt.Sprint(allowed), func(t *testing.T) {
			t.Parallel()
			var probes atomic.Int64
			b := start(t, setup{profile: mooncake.Profile{AllowLocalPrefill: allowed},
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					body, _ := io.ReadAll(r.Body)
					if r.Body = io.NopCloser(bytes.NewReader(body)); !bytes.Contains(body, []byte(`"do_remote_decode":true`)) {
						engine.ServeHTTP(w, r)
						return
					}
					probes.Add(1)
					w.Header().Set("Content-Type", "application/json")
					_, _ = io.WriteString(w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":""},"finish_reason":"stop"}],`+
						`"usage":{"prompt_tokens":900,"completion_tokens":1,"total_tokens":901},"kv_transfer_params":null}`)
				}})
			body := talk(`"stream":true,`, reftext.MakePrompt(6, 900))
			if !allowed {
				require.Equal(t, http.StatusBadGateway, b.post(mooncake.Chat.Path(), body).status)
				b.clean()
				require.EqualValues(t, 3, probes.Load())
				return
			}
			require.Equal(t, journal.Local, b.say(body))
			require.EqualValues(t, 2, probes.Load(), "the second one masks the end")
			require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_requests_total", localNoHandOff))
			b.settle()
		})
	}
}

// An engine whose cache holds nothing is found out before it has computed many
// long prompts.
func TestAnEngineWithoutAPrefixCacheIsFoundOut(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{}))
	for i := range 3 {
		first := reftext.MakePrompt(uint64(10+i), 3000)
		b.say(talk("", first))
		require.Equal(t, [...]string{journal.Local, journal.Disaggregated, journal.Disaggregated}[i], b.say(talk("", first, "well", "go on")))
		require.Equal(t, journal.Local, b.say(talk("", fmt.Sprint("hi ", i))), "it is short, cache or not")
	}
	require.Equal(t, 1, b.logs.FilterMessageSnippet("prefix cache works as expected").Len())
	b.clean()
}

// Many at once: right answers, and no rank computes more than its bound.
func TestManyShortAndLongPromptsAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{waits: true, decode: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}}},
		configure: func(c *config.Config, _ *Deps) {
			c.Prefill.Disaggregation.ThresholdTokens = "auto"
		}}))
	var all sync.WaitGroup
	for i := range 60 {
		all.Go(func() {
			body := talk(`"stream":true,"max_tokens":12,`, reftext.MakePrompt(uint64(i), []int{20, 60, 1500}[i%3]))
			p, err := reftext.Render(true, []byte(body))
			r := b.post(mooncake.Chat.Path(), body)
			if err != nil || r.status != http.StatusOK || !strings.HasPrefix(reftext.Text(p.Answer, 12), readSeamless(t, r).texts[0]) {
				t.Errorf("%d: %d %s", i, r.status, r.body)
			}
		})
	}
	all.Wait()
	b.clean()
	locals := b.locals()
	require.Positive(t, locals)
	require.EqualValues(t, 40, locals+b.metric(t, "evenkeel_local_prefill_declined_total", ""))
}

// A short turn of a chat is computed by the rank that pulled the turns before it. What is
// remembered of that is forgotten with the engines' caches, and at the last turn of a session.
func TestShortTurnsOfAChatAreServedByTheRankThatHasIt(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{decode: []refengine.Config{{DPSize: 2, KV: refengine.KV{PrefixCache: 4096}}}, waits: true,
		configure: func(c *config.Config, _ *Deps) {
			c.Prefill.Index.TokenizeTimeout = patience // a busy machine counts the prompt, too
		}}))
	first := reftext.MakePrompt(1, 3000)
	require.Equal(t, journal.Disaggregated, b.say(talk(`"stream":true,`, first)), "3000 new tokens")
	was := b.asked[0].Record.Rank
	for i, more := range []string{`"stream":true,`, ""} {
		require.Equal(t, journal.Local, b.say(talk(more, first, "well", fmt.Sprint("and then, number ", i))))
		r := b.asked[1+i].Record
		require.Equal(t, was, r.Rank, "which pulled the beginning")
		require.Less(t, r.LocalTokens, 257)
		require.Positive(t, r.LocalTokens)
		require.Empty(t, r.Prefill)
		require.Greater(t, r.CachedTokens, 2800, "as the engine counts")
		require.Greater(t, r.PromptTokens, 3000)
		require.Equal(t, 1, r.Attempts)
	}
	b.options.EndsSession = true
	require.Equal(t, journal.Disaggregated, b.say(talk("", reftext.MakePrompt(2, 3000))))
	b.options.EndsSession = false
	require.Equal(t, journal.Disaggregated, b.say(talk("", reftext.MakePrompt(2, 3000), "well", "go on")), "the session was over")
	b.LocalRanks.Forget(b.LocalRanks.IDs())
	require.Equal(t, journal.Disaggregated, b.say(talk("", first, "well", "once more")), "no engine has anything any more")
	require.EqualValues(t, 2, b.locals())
	require.EqualValues(t, 2, b.d[0].Stats().LocalPrefills)
	require.Equal(t, 4, b.probes())
	b.clean()
}

// A trusted caller chooses the way of a request, its engines and the policy for its prefill.
func TestACallerChoosesTheWay(t *testing.T) {
	t.Parallel()
	b := start(t, alone(setup{prefill: both, decode: both, configure: func(c *config.Config, _ *Deps) {
		c.Prefill.Disaggregation.Mode, c.ExposeRoute = prefill.DisaggregateAlways, true
		c.Prefill.Policy = config.Default().Prefill.Policy
	}}))
	long, few := reftext.MakePrompt(4, 3000), "hi"
	for _, row := range []struct {
		options Options
		prompt  string
		route   string
	}{
		{Options{Disaggregate: DisaggregateAuto}, few, journal.Local},
		{Options{Disaggregate: DisaggregateAuto}, long, journal.Disaggregated},
		{Options{Disaggregate: DisaggregateAlways}, few, journal.Disaggregated},
		{Options{Disaggregate: DisaggregateNever}, reftext.MakePrompt(5, 3000), journal.Local},
		{Options{}, few, journal.Disaggregated},
		{Options{ToPrefill: "p0/0"}, few, journal.Disaggregated},
		{Options{ToPrefill: "p1/0"}, few, journal.Disaggregated},
		{Options{ToDecode: []int32{0}}, few, journal.Disaggregated},
		{Options{ToDecode: []int32{1}}, few, journal.Disaggregated},
		{Options{PrefillPolicy: "gorgo:qs=2"}, few, journal.Disaggregated},
	} {
		b.options = row.options
		times := 3 // so that it is no chance
		if row.options.Disaggregate != "" {
			times = 1
		}
		for range times {
			require.Equal(t, row.route, b.say(talk("", row.prompt)), "%+v", row.options)
			r := b.asked[len(b.asked)-1].Record
			if row.options.ToPrefill != "" {
				require.Equal(t, row.options.ToPrefill, r.Prefill)
			}
			if len(row.options.ToDecode) > 0 {
				require.Equal(t, fmt.Sprint("d", row.options.ToDecode[0]), r.Rank)
			}
			if row.options.PrefillPolicy != "" {
				require.Equal(t, "gorgo", r.PrefillPolicy)
			}
		}
	}
	require.EqualValues(t, 1, b.metric(t, "evenkeel_local_prefill_requests_total", localAsked))
	b.settle()
}

// The turns of a session go to one prefill engine, whatever the policy says, until a request ends
// it.
func TestASessionStaysAtItsEngine(t *testing.T) {
	t.Parallel()
	b := start(t, setup{prefill: []refengine.Config{{}, {}, {}}, configure: func(c *config.Config, _ *Deps) {
		c.Prefill.Policy = "random"
		c.Prefill.Affinity.Enabled, c.Prefill.Affinity.LoadFactor = true, 100 // whatever the load
	}})
	for i, session := range []uint64{7, 8} {
		b.options = Options{Session: session}
		engines := map[string]bool{}
		for range 6 {
			require.Equal(t, "right", b.judge("hi", ""))
			b.over()
			engines[b.asked[len(b.asked)-1].Record.Prefill] = true
		}
		require.Len(t, engines, 1)
		require.EqualValues(t, i+1, b.metric(t, "evenkeel_affinity_total", "new"))
		require.EqualValues(t, 5*(i+1), b.metric(t, "evenkeel_affinity_total", "kept"))
	}
	b.options.EndsSession = true
	require.Equal(t, "right", b.judge("hi", ""))
	b.over()
	b.options.EndsSession = false
	require.Equal(t, "right", b.judge("hi", ""))
	require.EqualValues(t, 3, b.metric(t, "evenkeel_affinity_total", "new"), "the session that had ended began anew")
	b.clean()
}

// Where expose_route is set, answers say which way they came. Else nothing of that is in them.
func TestAnswersSayWhichWayTheyCame(t *testing.T) {
	t.Parallel()
	body := chat(strings.Repeat("the same long story ", 200), `"max_tokens":4,`)
	for _, exposed := range []bool{true, false} {
		t.Run(fmt.Sprint(exposed), func(t *testing.T) {
			t.Parallel()
			b := start(t, setup{prefill: []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}}}, configure: func(c *config.Config, _ *Deps) {
				c.ExposeRoute, c.Prefill.Policy = exposed, config.Default().Prefill.Policy
			}})
			first, second := b.post(mooncake.Chat.Path(), body), b.post(mooncake.Chat.Path(), body)
			require.Equal(t, http.StatusOK, second.status)
			if !exposed {
				for name := range second.header {
					require.NotContains(t, strings.ToLower(name), "evenkeel")
				}
				return
			}
			require.Equal(t, "0", first.header.Get("X-Evenkeel-Hit-Tokens"))
			require.NotEqual(t, "0", second.header.Get("X-Evenkeel-Hit-Tokens"))
			require.Equal(t, "1", second.header.Get("X-Evenkeel-Attempts"))
			require.Equal(t, "lmetric", second.header.Get("X-Evenkeel-Policy"), "finish knows no times yet")
			require.Equal(t, "disaggregated", second.header.Get("X-Evenkeel-Route"))
			require.Equal(t, "p0/0", second.header.Get("X-Evenkeel-Prefill"))
			b.clean()
		})
	}
}

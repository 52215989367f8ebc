package gateway_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/refengine"
	"evenkeel/bench/reftext"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

func TestAWholeResponseThatItsOnlyEngineFails(t *testing.T) {
	t.Parallel()
	c := start(t, nixl(options{dirty: true, decode: []refengine.Config{{Version: "0.18.0"}}, profile: mooncake.Profile{AllowLocalPrefill: true}}))
	require.NoError(t, c.decode[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
	r := c.post(responsesPath, respond("a", ""))
	require.Equal(t, http.StatusBadGateway, r.status, r.body)
	code, _, _ := failure(t, r)
	require.Equal(t, "decode_failed", code)
}

func TestClientsThatLeaveARequestThatGoesWhole(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		for path, body := range map[string]string{
			responsesPath: respond("a b", fmt.Sprintf(`"stream":%t,`, stream)), messagesPath: wordsOf("a b", fmt.Sprintf(`"stream":%t,`, stream)),
		} {
			t.Run(fmt.Sprintf("%s, streamed %t", path, stream), func(t *testing.T) {
				t.Parallel()
				c := start(t, nixl(options{decode: []refengine.Config{{Version: "0.18.0", PrefillBase: time.Hour}}, profile: mooncake.Profile{AllowLocalPrefill: true}}))
				leave, wait := c.sendTo(path, body)
				c.eventually("it is computed", func() bool { return c.decode[0].Stats().Running == 1 })
				leave()
				wait()
				c.eventually("it is over", func() bool { return c.sum("evenkeel_cancels_total") == 1 && c.decode[0].Stats().Running == 0 })
				require.EqualValues(t, 1, c.metric(`evenkeel_cancels_total{phase="prefill"}`))
				require.Zero(t, c.metric("evenkeel_local_prefill_failures_total"), "the engine did not fail")
				c.accounted()
				require.Equal(t, []string{"client_closed"}, c.outcomes())
				require.Zero(t, c.prefill[0].Stats().Requests)
			})
		}
	}
}

func TestAResponseOrAMessageThatIsLostInTheMiddle(t *testing.T) {
	t.Parallel()
	after := func(f refengine.Fault, phase string) refengine.Rule {
		return refengine.Rule{Fault: f, Phase: phase, AfterTokens: 3}
	}
	for name, row := range map[string]struct {
		rule refengine.Rule
		code string // of a response's event, and of the request log
	}{
		"reset":      {after(refengine.Reset, refengine.PhaseMidStream), "upstream_broken"},
		"silent end": {after(refengine.SilentEnd, ""), "upstream_incomplete"},
		"drain":      {refengine.Rule{}, "engine_drained"},
	} {
		for _, path := range []string{responsesPath, messagesPath} {
			t.Run(name+" of "+path, func(t *testing.T) {
				t.Parallel()
				slow := refengine.Config{C0: 100 * time.Millisecond}
				c := start(t, takesMessages(options{dirty: true, decode: []refengine.Config{slow, slow}}))
				for _, e := range c.decode {
					if name != "drain" {
						require.NoError(t, e.SetFaults(row.rule))
					}
				}
				body := wordsOf("words to prefill", `"stream":true,`)
				if path == responsesPath {
					body = respond("words to prefill", `"stream":true,`)
				}
				done := make(chan reply, 1)
				go func() { done <- c.post(path, body) }()
				if name == "drain" {
					c.eventually("it has begun", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 1 })
					for _, e := range c.decode {
						if e.Stats().Running > 0 {
							c.drainOut(e)
						}
					}
				}
				r := <-done
				require.Equal(t, http.StatusOK, r.status, r.body)
				tier := `evenkeel_decode_losses_total{tier="4"}`
				if name == "drain" {
					tier = `evenkeel_drained_answers_total{tier="4"}`
				}
				c.eventually("it is counted", func() bool { return c.metric(tier) == 1 })
				if path == responsesPath {
					require.Equal(t, row.code, readResponse(t, r.body).fail)
				} else {
					require.Contains(t, []string{"api_error", "overloaded_error"}, readMessage(t, r.body).fail)
				}
				c.accounted()
				require.Equal(t, []string{row.code}, c.outcomes())
				require.EqualValues(t, 1, c.prefill[0].Stats().Probes, "nothing is prefilled again")
			})
		}
	}
}

func (c *cluster) judgeResponse(prompt string, stream bool) string {
	c.Helper()
	r := c.post(responsesPath, respond(prompt, fmt.Sprintf(`"stream":%t,`, stream)))
	key := reftext.OfUser(prompt).Answer
	require.NoError(c, r.err, "an answer ends as HTTP says, whatever it says")
	if r.status != http.StatusOK {
		require.Contains(c, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		return fmt.Sprint(r.status)
	}
	if !stream {
		var got struct {
			Status string
			Output []struct{ Content []struct{ Text string } }
		}
		require.NoError(c, json.Unmarshal([]byte(r.body), &got), r.body)
		require.Equal(c, "completed", got.Status)
		wholeText(c.T, key, got.Output[0].Content[0].Text)
		return "right"
	}
	got := readResponse(c.T, r.body)
	rightText(c.T, key, got.text)
	if got.fail != "" {
		return got.fail
	}
	wholeText(c.T, key, got.text)
	require.Equal(c, got.text, got.last.Output[0].Content[0].Text)
	return "right"
}

func TestEveryFaultOfAResponse(t *testing.T) {
	t.Parallel()
	judgeEveryFault(t, nixl, (*cluster).judgeResponse)
}

func judgeEveryFault(t *testing.T, with func(options) options, judge func(c *cluster, prompt string, stream bool) string) {
	t.Helper()
	for _, name := range refengine.FaultNames() {
		fault := refengine.Fault(name)
		if fault == refengine.WrongKey {
			continue // KV of another prompt: only the engine could tell
		}
		if fault == refengine.Recomputed {
			continue // of vllm-ascend alone: see TestEnginesOfAscendDoNotServeResponses
		}
		for i, rule := range fault.Forms() {
			for _, side := range []string{"prefill", "decode"} {
				t.Run(fmt.Sprintf("%s %d on %s", name, i, side), func(t *testing.T) {
					t.Parallel()
					within := func(silence time.Duration) func(*config.Config) {
						return func(cfg *config.Config) {
							cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: mooncake.NIXLPull, FirstEventTimeout: silence, RejectReleases: new(true)}}
							cfg.Limits.ProbeTimeout, cfg.Limits.EventTimeout = silence, silence
						}
					}
					o := options{dirty: true, configure: within(patience)}
					if fault == refengine.Hang { // an answer that is right needs its time, too: later
						o.configure, o.later = within(250*time.Millisecond), within(patience)
					}
					c := start(t, with(o))
					e := map[string]*refengine.Engine{"prefill": c.prefill[0], "decode": c.decode[0]}[side]
					for j := range 4 {
						rule := rule
						rule.Count = 1 + j%2
						require.NoError(t, e.SetFaults(rule))
						got := judge(c, fmt.Sprintf("p%d words to prefill", j), j < 2)
						if fault.Harmless() && fault != refengine.MissingDone {
							require.Equal(t, "right", got)
						}
					}
					require.NoError(t, e.SetFaults())
					if o.later != nil {
						r, _ := c.reload("")
						require.Equal(t, "used", r.Outcome, r.Error)
					}
					c.eventually("all is well again", func() bool { return judge(c, "and now", true) == "right" })
				})
			}
		}
	}
}

func TestClientsThatLeaveAResponse(t *testing.T) {
	t.Parallel()
	for _, stream := range []bool{true, false} {
		more := fmt.Sprintf(`"stream":%t,"ignore_eos":true,"max_output_tokens":4000,`, stream)
		t.Run(fmt.Sprintf("in prefill, streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			c := start(t, nixl(options{prefill: []refengine.Config{{PrefillBase: time.Hour}}}))
			leave, wait := c.sendTo(responsesPath, respond("a b", more))
			c.eventually("it is prefilled", func() bool { return c.prefill[0].Stats().Probes == 1 })
			leave()
			wait()
			c.eventually("it is over", func() bool { return c.metric(`evenkeel_cancels_total{phase="prefill"}`) == 1 })
		})
		t.Run(fmt.Sprintf("in its answer, streamed %t", stream), func(t *testing.T) {
			t.Parallel()
			c := start(t, nixl(options{
				profile: mooncake.Profile{FirstEventTimeout: 2 * time.Second}, // an answer in one piece is left after that time
				decode:  []refengine.Config{{C0: 20 * time.Millisecond}},
			}))
			leave, wait := c.sendTo(responsesPath, respond("a b", more))
			c.eventually("it runs", func() bool { return c.decode[0].Stats().Running == 1 })
			if stream {
				c.eventually("it has begun", func() bool { return c.metric("evenkeel_ttft_seconds_count") == 1 })
			}
			leave()
			wait()
			c.eventually("it is over", func() bool { return c.sum("evenkeel_cancels_total") == 1 })
		})
	}
}

package request

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/reftext"
	"evenkeel/gateway/config"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/internal/race"
	"evenkeel/mooncake"
)

// A dialect is an API beside chats and completions.
type dialect struct {
	path string
	form string // of a body: more members, the model, the prompt
	read func(t *testing.T, body string, stream bool) (text, fail string)
}

var dialects = []dialect{
	{"/v1/messages", `{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, readMessage},
	{"/v1/responses", `{%s"model":%q,"input":%q}`, readResponse},
}

func (d dialect) body(prompt, more string) string { return fmt.Sprintf(d.form, more, refModel, prompt) }

func readMessage(t *testing.T, body string, stream bool) (text, fail string) {
	if !stream {
		got := answertest.ReadWholeMessage(t, body)
		require.Equal(t, "end_turn", got.Stop)
		return got.Text(), ""
	}
	got := answertest.ReadMessage(t, body)
	return got.Text(), got.Fail
}

func readResponse(t *testing.T, body string, stream bool) (text, fail string) {
	if !stream {
		var got struct {
			Status string
			Output []struct{ Content []struct{ Text string } }
		}
		require.NoError(t, json.Unmarshal([]byte(body), &got), body)
		require.Equal(t, "completed", got.Status)
		return got.Output[0].Content[0].Text, ""
	}
	got := answertest.ReadResponse(t, body)
	if got.Fail == "" {
		require.Equal(t, got.Text, got.Last.Output[0].Content[0].Text)
	}
	return got.Text, got.Fail
}

// judge is the bed's, of another API.
func (d dialect) judge(b *bed, prompt string, stream bool) string {
	b.t.Helper()
	r, key := b.post(d.path, d.body(prompt, fmt.Sprintf(`"stream":%t,`, stream))), reftext.OfUser(prompt).Answer
	if r.status != http.StatusOK {
		require.Contains(b.t, []int{400, 422, 429, 500, 501, 502, 503, 504}, r.status, r.body)
		if strings.HasSuffix(d.path, "messages") {
			answertest.Refused(b.t, r.body)
		}
		return strconv.Itoa(r.status)
	}
	text, fail := d.read(b.t, r.body, stream)
	if tokens := right(b.t, key, text); fail == "" {
		require.Equal(b.t, reftext.NaturalLength(key), tokens)
		return "right"
	}
	return fail
}

// The connectors of engines that serve them: those of vllm-ascend do not.
var (
	ofVLLM = []string{mooncake.NIXLPull}
	anyone = []string{mooncake.NIXLPull, mooncake.SGLang}
)

// shortGrace is for tests of many failures. SGLang cannot be told to end a prefill of an answer in
// one piece, so that each failure of its decode would take bind.grace, 5 s. An answer that is right
// is confirmed within this time, on a loaded machine, too.
func shortGrace(c *config.Config) {
	if c.Bind.Grace = 500 * time.Millisecond; race.Enabled {
		c.Bind.Grace = 3 * time.Second
	}
}

// eachDialect runs a test with each of them, over engines with each connector. Under the race
// detector, it runs each connector with one dialect, and each dialect with one connector: what is
// read and written in which goroutine does not depend on the two together.
func eachDialect(t *testing.T, connectors []string, f func(t *testing.T, d dialect, o setup)) {
	t.Parallel()
	for i, connector := range connectors {
		for k, d := range dialects {
			if race.Enabled && len(connectors) > 1 && (i+k)%2 != 0 {
				continue
			}
			t.Run(connector+d.path, func(t *testing.T) {
				t.Parallel()
				f(t, d, setup{profile: mooncake.Profile{Connector: connector}})
			})
		}
	}
}

// Whatever an engine does wrong, on either side: the client gets the right text whole, or is told
// that it did not.
func TestEveryFaultOfAResponseOrAMessage(t *testing.T) {
	eachDialect(t, anyone, func(t *testing.T, d dialect, o setup) {
		for _, name := range refengine.FaultNames() {
			fault := refengine.Fault(name)
			if fault == refengine.WrongKey || fault == refengine.Recomputed {
				continue // KV of another prompt: only the engine could tell. And vllm-ascend alone gives answers back.
			}
			forms := fault.Forms()
			if race.Enabled { // TestEveryFault has all of them under the race detector, too
				forms = forms[:1]
			}
			for i, rule := range forms {
				for _, side := range []string{"prefill", "decode"} {
					if o.profile.Connector == mooncake.SGLang && d.path == "/v1/messages" && side == "decode" &&
						(fault == refengine.FinishError || fault == refengine.MissingFinish) {
						continue // SGLang says there that the answer came to its end
					}
					t.Run(fmt.Sprintf("%s %d on %s", name, i, side), func(t *testing.T) {
						t.Parallel()
						o, silence := o, patience
						if fault == refengine.Hang { // an answer that is right needs its time, too
							if silence = 300 * time.Millisecond; race.Enabled {
								silence = 2 * time.Second
							}
						}
						o.profile.FirstEventTimeout, o.profile.RejectReleases = silence, new(true)
						o.configure = func(c *config.Config, _ *Deps) {
							shortGrace(c)
							c.Limits.ProbeTimeout, c.Limits.EventTimeout = silence, silence
						}
						b := start(t, o)
						e := map[string]*refengine.Engine{"prefill": b.p[0], "decode": b.d[0]}[side]
						for j := range 4 {
							rule := rule
							rule.Count = 1 + j%2 // once, and on the retry as well
							require.NoError(t, e.SetFaults(rule))
							got := d.judge(b, fmt.Sprintf("p%d words to prefill", j), j < 2)
							if fault.Harmless() && fault != refengine.MissingDone {
								require.Equal(t, "right", got)
							}
						}
						require.NoError(t, e.SetFaults())
						b.eventually("all is well again", func() bool { return d.judge(b, "and now", true) == "right" })
						b.settle()
					})
				}
			}
		}
	})
}

// Of what only legs meet that are under way at once.
func TestEveryFaultOfALegThatIsBoundInADialect(t *testing.T) {
	eachDialect(t, []string{mooncake.SGLang}, func(t *testing.T, d dialect, o setup) {
		o.decode = both
		for _, fault := range []refengine.Fault{refengine.DoneLost, refengine.FailedSent, refengine.TransferFails, refengine.BootstrapSlow} {
			for i, rule := range fault.Forms() {
				t.Run(fmt.Sprintf("%s %d", fault, i), func(t *testing.T) {
					t.Parallel()
					o := o
					silence := 600 * time.Millisecond // more than the shorter delay of a bootstrap that is slow
					if race.Enabled {
						silence = 2 * time.Second
					}
					o.profile.FirstEventTimeout = silence
					o.configure = func(c *config.Config, _ *Deps) {
						shortGrace(c)
						c.Limits.ProbeTimeout, c.Limits.EventTimeout = 2*silence, 2*silence
					}
					b := start(t, o)
					for j := range 4 {
						rule := rule
						rule.Count = 1 + j%2
						require.NoError(t, b.p[0].SetFaults(rule))
						_ = d.judge(b, fmt.Sprintf("p%d words to prefill", j), j < 2) // right, or an error
					}
					require.NoError(t, b.p[0].SetFaults())
					b.eventually("all is well again", func() bool { return d.judge(b, "and now", true) == "right" })
					b.settle()
				})
			}
		}
	})
}

// An aborted transfer is known by the prompt tokens that the prefill engine counts, whenever it
// says so.
func TestAnAbortedTransferOfADialectIsNotBelieved(t *testing.T) {
	eachDialect(t, []string{mooncake.SGLang}, func(t *testing.T, d dialect, o setup) {
		for _, stream := range []bool{true, false} {
			for _, delay := range []int{0, 500} {
				t.Run(fmt.Sprintf("stream %t, after %d ms", stream, delay), func(t *testing.T) {
					t.Parallel()
					o := o
					o.configure = confirm(time.Duration(0))
					b := start(t, o)
					require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.PrefillAbort200, DelayMS: delay}))
					r := b.post(d.path, d.body(short, fmt.Sprintf(`"stream":%t,`, stream)))
					if r.status == http.StatusOK {
						require.True(t, stream, r.body)
						_, fail := d.read(t, r.body, true)
						require.NotEmpty(t, fail)
					} else {
						require.Equal(t, http.StatusBadGateway, r.status, r.body)
					}
					require.NoError(t, b.p[0].SetFaults())
					require.Equal(t, "right", d.judge(b, short, stream))
					b.settle()
				})
			}
		}
	})
}

// Where there are tools, SGLang tells nothing of a response's text before its end. That is no
// silence of an engine that fails.
func TestATextThatIsHeldBackToItsEnd(t *testing.T) {
	t.Parallel()
	b := start(t, setup{
		decode:    []refengine.Config{{Steps: refengine.Steps{C0: 20 * time.Millisecond}}},
		profile:   mooncake.Profile{Connector: mooncake.SGLang, FirstEventTimeout: 200 * time.Millisecond},
		configure: func(c *config.Config, _ *Deps) { c.Limits.EventTimeout = 200 * time.Millisecond },
	})
	began := time.Now()
	r := b.post(dialects[1].path, dialects[1].body(short, `"stream":true,"tools":[{"type":"function","name":"f","parameters":{}}],`))
	require.Equal(t, http.StatusOK, r.status, r.body)
	got := answertest.ReadResponse(t, r.body)
	require.Empty(t, got.Fail)
	require.Equal(t, got.Text, got.Last.Output[0].Content[0].Text)
	require.Greater(t, time.Since(began), 400*time.Millisecond, "the answer was long enough to be taken for silence")
	b.settle()
}

// SGLang finds out by itself that nobody waits for a message in one piece. The decode engine keeps
// its pages until the prefill engine may not write any more.
func TestADecodeOutlivesAPrefillThatCannotBeAborted(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Second
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.SGLang},
		configure: func(c *config.Config, _ *Deps) { c.Bind.Grace = grace }})
	require.NoError(t, b.p[0].SetFaults(standing))
	leave, wait := b.sendTo(dialects[0].path, dialects[0].body(short, ""))
	b.eventually("both legs run", func() bool { return b.p[0].Stats().Requests == 1 && b.d[0].Stats().Waiting+b.d[0].Stats().Running == 1 })
	leave()
	left := time.Now()
	b.eventually("the prefill leg ends", func() bool { return b.p[0].Stats().Aborted == 1 })
	require.Less(t, time.Since(left), grace)
	b.eventually("the decode leg ends", func() bool { return b.d[0].Stats().Aborted == 1 })
	require.GreaterOrEqual(t, time.Since(left), grace)
	wait()
	require.NoError(t, b.p[0].SetFaults())
	b.settle()
}

func TestAResponseOrAMessageThatIsLostInTheMiddle(t *testing.T) {
	eachDialect(t, anyone, func(t *testing.T, d dialect, o setup) {
		o.decode = both
		for code, rule := range map[string]refengine.Rule{
			"upstream_broken":     {Fault: refengine.Reset, Phase: refengine.PhaseMidStream, AfterTokens: 3},
			"upstream_incomplete": {Fault: refengine.SilentEnd, AfterTokens: 3},
			"engine_drained":      {Fault: refengine.Hang, Phase: refengine.PhaseMidStream, AfterTokens: 3},
		} {
			t.Run(code, func(t *testing.T) {
				t.Parallel()
				b := start(t, o)
				for _, e := range b.d {
					require.NoError(t, e.SetFaults(rule))
				}
				done := make(chan string, 1)
				go func() { done <- d.judge(b, "words to prefill", true) }()
				counted := "evenkeel_decode_losses_total"
				if code == "engine_drained" {
					counted = "evenkeel_drained_answers_total"
					b.eventually("it has begun", func() bool { return b.begun() == 1 })
					require.Equal(t, 1, b.move("decode d0")+b.move("decode d1"))
				}
				if got := <-done; d.path == "/v1/responses" {
					require.Equal(t, code, got)
				} else {
					require.Contains(t, []string{"api_error", "overloaded_error"}, got)
				}
				b.settle()
				require.EqualValues(t, 1, b.metric(t, counted, "4"))
				require.Equal(t, code, b.asked[0].Record.Outcome)
				require.Equal(t, 1, b.probes(), "nothing is prefilled again")
			})
		}
	})
}

// An engine says how an answer begins, and is lost before the first token. Another answers, and the
// client reads one beginning. Where an engine has said so much that it did not wait for the token,
// the answer ends with an error.
func TestAnAnswerThatIsLostBeforeItsFirstTokenBeginsOnce(t *testing.T) {
	t.Parallel()
	begins := func(kind, more string, n int) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf("event: %s\ndata: {\"type\":%q,\"index\":%d,\"sequence_number\":%d%s}\n\n", kind, kind, i, i, more))
		}
		return all
	}
	message := begins("message_start", `,"message":{"id":"x","type":"message","role":"assistant","content":[],"usage":{"input_tokens":4,"output_tokens":0}}`, 1)
	block := `,"content_block":{"type":"text","text":""}`
	response := append(begins("response.created", `,"response":{"id":"x","output":[]}`, 1), begins("response.output_item.added", `,"item":{}`, 1)...)
	for _, row := range []struct {
		name string
		sent []string
		of   dialect
		want string
	}{
		{"a message", message, dialects[0], "right"},
		{"a message's block", append(message, begins("content_block_start", block, 1)...), dialects[0], "right"},
		{"many blocks", append(message, begins("content_block_start", block, 5)...), dialects[0], "api_error"},
		{"a response", response, dialects[1], "right"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var spoke atomic.Bool
			var b *bed
			b = start(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull},
				front: func(w http.ResponseWriter, r *http.Request, engine http.Handler) {
					body, _ := io.ReadAll(r.Body)
					r.Body = io.NopCloser(strings.NewReader(string(body)))
					if !strings.Contains(string(body), "do_remote_prefill") || !strings.Contains(string(body), `"stream":true`) || spoke.Swap(true) {
						engine.ServeHTTP(w, r)
						return
					}
					w.Header().Set("Content-Type", "text/event-stream")
					for _, event := range row.sent {
						_, _ = io.WriteString(w, event)
						w.(http.Flusher).Flush()
						time.Sleep(10 * time.Millisecond) // nothing tells that the proxy has read an event by itself
					}
					if row.want != "right" { // it ends once the client has what came, however busy the machine is
						b.eventually("the client has it", func() bool { return b.begun() > 0 })
					}
				}})
			require.Equal(t, row.want, row.of.judge(b, "a prompt", true))
			require.True(t, spoke.Load())
			b.settle()
		})
	}
}

// What an engine refuses reaches the client in the engine's words.
func TestAnEnginesRefusalOfAMessage(t *testing.T) {
	t.Parallel()
	b := start(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull}})
	r := b.post(dialects[0].path, dialects[0].body("a", `"temperature":-1,`))
	require.Equal(t, http.StatusBadRequest, r.status, r.body)
	kind, _ := answertest.Refused(t, r.body)
	require.Equal(t, "BadRequestError", kind)
	b.clean()
}

// A message has no word that keeps an engine from ending at once. vLLM 0.32 hands its prefill off
// all the same, to a decode engine that pulls by NIXL. An engine that does not is asked twice.
func TestAMessageWithAnEmptyAnswer(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		fault   refengine.Fault
		allowed bool // decode ranks may compute prompts
		probes  int
	}{{"handed off", refengine.EOSFirst, false, 1}, {"whole", refengine.NullHandoff, true, 2}, {"refused", refengine.NullHandoff, false, 0}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			d := dialects[0]
			e := []refengine.Config{{Version: "0.32.0"}}
			b := start(t, setup{prefill: e, decode: e, profile: mooncake.Profile{Connector: mooncake.NIXLPull, AllowLocalPrefill: row.allowed}})
			require.NoError(t, b.p[0].SetFaults(refengine.Rule{Fault: refengine.EOSFirst}, refengine.Rule{Fault: row.fault}))
			if row.probes == 0 {
				r := b.post(d.path, d.body("ends at once", `"stream":true,`))
				require.Equal(t, http.StatusBadGateway, r.status, r.body)
				kind, says := answertest.Refused(t, r.body)
				require.Equal(t, "api_error", kind)
				require.Contains(t, says, "no usable hand-off")
				b.settle()
				return
			}
			require.Equal(t, "right", d.judge(b, "ends at once", true))
			b.settle()
			require.Equal(t, row.probes, b.probes())
			require.Equal(t, row.allowed, b.metric(t, "evenkeel_local_prefill_requests_total", localNoHandOff) == 1)
		})
	}
}

func TestClientsThatLeaveAResponseOrAMessage(t *testing.T) {
	eachDialect(t, ofVLLM, func(t *testing.T, d dialect, o setup) {
		for _, stream := range []bool{true, false} {
			more := fmt.Sprintf(`"stream":%t,"ignore_eos":true,`, stream)
			if d.path == "/v1/messages" {
				more = fmt.Sprintf(`"stream":%t,"thinking":{"type":"enabled","budget_tokens":1024},`, stream) +
					`"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"tool","name":"f"},`
			}
			body := d.body("a b c", more)
			leaves := func(name string, p parting) {
				t.Run(fmt.Sprintf("%s, stream %t", name, stream), func(t *testing.T) {
					t.Parallel()
					p.path, p.o.profile.Connector = d.path, mooncake.NIXLPull
					p.leaves(t, body, 1)
				})
			}
			leaves("in prefill", parting{
				phase: journal.Prefill, o: setup{prefill: []refengine.Config{{Prompts: refengine.Prompts{Base: time.Hour}}}}, here: computed,
				engines: work{probes: 1},
			})
			leaves("pooled", parting{
				phase: journal.Pooled, o: setup{decode: []refengine.Config{{Slots: 1}}}, hold: (*bed).endless, here: pooled,
				engines: work{probes: 1, discarded: 1, pulls: 1},
			})
			answer := parting{
				phase: journal.Streaming, o: setup{decode: []refengine.Config{{Steps: refengine.Steps{C0: 50 * time.Millisecond}}}}, here: decoded,
				engines: work{probes: 1, decodes: 1, pulls: 1},
			}
			if !stream { // an answer in one piece is left after that time
				answer.phase, answer.o.profile.FirstEventTimeout = journal.Transfer, 2*time.Second
				answer.here = func(b *bed, _ int64) { b.eventually("it runs", func() bool { return b.d[0].Stats().Running == 1 }) }
			}
			leaves("in its answer", answer)
		}
	})
}

// whole is a bed whose decode engine computes what takes no hand-off.
func whole(t *testing.T, o setup) *bed {
	t.Helper()
	o.profile.AllowLocalPrefill = true
	b := start(t, o)
	b.options.NoHandOff = true
	return b
}

func TestClientsThatLeaveARequestThatGoesWhole(t *testing.T) {
	eachDialect(t, ofVLLM, func(t *testing.T, d dialect, o setup) {
		o.decode = []refengine.Config{{Prompts: refengine.Prompts{Base: time.Hour}}}
		for _, stream := range []bool{true, false} {
			t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
				t.Parallel()
				b := whole(t, o)
				leave, wait := b.sendTo(d.path, d.body("a b", fmt.Sprintf(`"stream":%t,`, stream)))
				b.eventually("it is computed", func() bool { return b.d[0].Stats().Running == 1 })
				leave()
				wait()
				b.settle()
				require.EqualValues(t, 1, b.metric(t, "evenkeel_cancels_total", "prefill"))
				require.Zero(t, b.metric(t, "evenkeel_local_prefill_failures_total", ""), "the engine did not fail")
				require.Equal(t, "client_closed", b.asked[0].Record.Outcome)
				require.Zero(t, b.p[0].Stats().Requests)
			})
		}
	})
}

func TestAWholeResponseThatItsOnlyEngineFails(t *testing.T) {
	t.Parallel()
	b := whole(t, setup{profile: mooncake.Profile{Connector: mooncake.NIXLPull}})
	require.NoError(t, b.d[0].SetFaults(refengine.Rule{Fault: refengine.Internal}))
	r := b.post(dialects[1].path, dialects[1].body("a", ""))
	require.Equal(t, http.StatusBadGateway, r.status, r.body)
	require.Contains(t, r.body, `"code":"decode_failed"`)
	b.settle()
}

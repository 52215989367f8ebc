package refengine

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
)

// struck is what a client of a decode engine gets under a rule.
func struck(t *testing.T, rule Rule, more string) (stream, reply) {
	t.Helper()
	e := start(t, Config{Faults: []Rule{rule}})
	c := client(t)
	c.Timeout = 300 * time.Millisecond // ends the hangs
	r := do(c, "POST", e.URLs()[0]+"/v1/chat/completions", chatBody("a b", more+`"max_tokens":8,"ignore_eos":true,"return_token_ids":true,`))
	if r.status != 200 || !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") || rule.Fault == Garbage {
		return stream{}, r
	}
	whole := strings.LastIndex(r.body, "\n")
	return parseStream(t, r.body[:whole+1]), r
}

func TestEveryFaultOfAStream(t *testing.T) {
	key := reftext.OfUser("a b").Answer
	text := func(n int) string { return reftext.Text(key, n) }
	const streaming = `"stream":true,`
	const usageToo = `"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true},`
	broken := func(content string) func(*testing.T, stream, reply) {
		return func(t *testing.T, s stream, r reply) {
			require.Error(t, r.err)
			require.Equal(t, 200, r.status)
			require.Equal(t, content, s.content)
		}
	}
	noAnswer := func(t *testing.T, s stream, r reply) {
		require.Error(t, r.err)
		require.Zero(t, r.status)
	}
	status := func(want int, says string) func(*testing.T, stream, reply) {
		return func(t *testing.T, s stream, r reply) {
			require.NoError(t, r.err)
			require.Equal(t, want, r.status)
			require.Contains(t, r.body, says)
		}
	}
	// tested elsewhere
	seen := map[Fault]bool{FrozenGauges: true, SlowPages: true, EOSFirst: true, NullHandoff: true, EmptyBlocks: true, StringBlocks: true,
		NoRequestID: true, WrongHost: true, WrongKey: true, LostKV: true}
	for _, row := range []struct {
		name  string
		rule  Rule
		more  string
		check func(t *testing.T, s stream, r reply)
	}{
		{"silence before the headers", Rule{Fault: Hang}, streaming, noAnswer},
		{"silence after the headers", Rule{Fault: Hang, Phase: PhaseAfterHeaders}, streaming, broken("")},
		{"silence in the middle", Rule{Fault: Hang, Phase: PhaseMidStream, AfterTokens: 3}, streaming, broken(text(3))},
		{"reset when the connection is accepted", Rule{Fault: Reset, Phase: PhaseAccept}, streaming, noAnswer},
		{"reset before the headers", Rule{Fault: Reset}, streaming, noAnswer},
		{"reset after the headers", Rule{Fault: Reset, Phase: PhaseAfterHeaders}, streaming, func(t *testing.T, s stream, r reply) { require.Error(t, r.err) }},
		{"reset in the middle", Rule{Fault: Reset, Phase: PhaseMidStream, AfterTokens: 3}, streaming, func(t *testing.T, s stream, r reply) { require.Error(t, r.err) }},
		{"reset inside a chunk", Rule{Fault: Reset, Phase: PhaseInsideChunk, AfterTokens: 3}, streaming, broken(text(3))},
		{"400", Rule{Fault: Reject}, streaming, status(400, "BadRequestError")},
		{"503", Rule{Fault: Busy}, streaming, status(503, "ServiceUnavailable")},
		{"429 says when to come back", Rule{Fault: Throttle, RetryAfter: 7}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, 429, r.status)
			require.Equal(t, "7", r.header.Get("Retry-After"))
		}},
		{"500", Rule{Fault: Internal}, streaming, status(500, "InternalServerError")},
		{"any status, any body", Rule{Fault: Status, Value: 502, Shape: ShapeHTML}, streaming, status(502, "<html>")},
		{"error event in the new shape", Rule{Fault: ErrorEvent, AfterTokens: 2}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, text(2), s.content)
			require.Contains(t, s.errorMessage, `"code":500`)
			require.True(t, s.done)
			require.Empty(t, s.finish)
		}},
		{"error event in the old shape", Rule{Fault: ErrorEvent, Shape: ShapeOld}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, `{"object":"error","message":"Internal server error","type":"InternalServerError","param":null,"code":500}`, s.events[0])
		}},
		{"error event in Rust's shape", Rule{Fault: ErrorEvent, Shape: ShapeRust}, streaming, func(t *testing.T, s stream, r reply) {
			require.Contains(t, s.errorMessage, `"code":"server_error"`)
		}},
		{"a JSON error under 200", Rule{Fault: Error200}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, 200, r.status)
			require.Equal(t, typeJSON, r.header.Get("Content-Type"))
			require.Contains(t, r.body, "error")
		}},
		{"the stream ends silently before anything", Rule{Fault: SilentEnd}, streaming, func(t *testing.T, s stream, r reply) {
			require.NoError(t, r.err)
			require.Empty(t, r.body)
		}},
		{"the stream ends silently in the middle", Rule{Fault: SilentEnd, AfterTokens: 3}, streaming, func(t *testing.T, s stream, r reply) {
			require.NoError(t, r.err)
			require.Equal(t, text(3), s.content)
			require.False(t, s.done)
		}},
		{"role chunk and [DONE] only", Rule{Fault: MissingFinish, Role: true}, streaming, func(t *testing.T, s stream, r reply) {
			require.True(t, s.role && s.done)
			require.Empty(t, s.content+s.finish)
		}},
		{"all the text, no finish_reason", Rule{Fault: MissingFinish}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, text(8), s.content)
			require.True(t, s.done)
			require.Empty(t, s.finish)
		}},
		{"no [DONE]", Rule{Fault: MissingDone}, streaming, func(t *testing.T, s stream, r reply) {
			require.NoError(t, r.err)
			require.Equal(t, "length", s.finish)
			require.False(t, s.done)
		}},
		{"finish_reason error", Rule{Fault: FinishError, AfterTokens: 1}, streaming, func(t *testing.T, s stream, r reply) { require.Equal(t, "error", s.finish) }},
		{"recomputed without prior tokens", Rule{Fault: Recomputed, Role: true}, usageToo, func(t *testing.T, s stream, r reply) {
			require.Equal(t, []string{"stop", `"recomputed"`, ""}, []string{s.finish, s.stop, s.content})
			require.Zero(t, s.usage.Completion)
		}},
		{"recomputed with prior tokens", Rule{Fault: Recomputed, AfterTokens: 4}, usageToo, func(t *testing.T, s stream, r reply) {
			require.Equal(t, []string{"stop", `"recomputed"`, text(4)}, []string{s.finish, s.stop, s.content})
			require.Equal(t, 4, s.usage.Completion)
		}},
		{"recomputed with text in the last chunk", Rule{Fault: Recomputed, AfterTokens: 4, Text: true}, usageToo,
			func(t *testing.T, s stream, r reply) {
				require.Equal(t, text(4), s.content)
				require.Len(t, s.ids, 4)
				require.Contains(t, s.events[len(s.events)-2], string(reftext.AppendTokenJSON(nil, reftext.TokenID(key, 3))))
			}},
		{"garbage", Rule{Fault: Garbage}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, 200, r.status)
			require.NotContains(t, r.body, "data:")
		}},
		{"the wrong content type", Rule{Fault: WrongType}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, "text/plain; charset=utf-8", r.header.Get("Content-Type"))
			require.Contains(t, r.body, "data: [DONE]")
		}},
		{"slow", Rule{Fault: Slow, DelayMS: 1}, streaming, func(t *testing.T, s stream, r reply) { require.Equal(t, text(8), s.content) }},
		{"a parser swallows tokens and gives them back in one chunk", Rule{Fault: Swallow, AfterTokens: 2, Tokens: 3}, usageToo,
			func(t *testing.T, s stream, r reply) {
				require.Equal(t, text(8), s.content)
				require.Equal(t, 5, s.contentEvents, "2, one of 4, 2")
				require.Len(t, s.ids, 5, "the ids of what it swallowed are gone")
				require.Equal(t, 8, s.usage.Completion)
			}},
		{"comments", Rule{Fault: Comments}, streaming, func(t *testing.T, s stream, r reply) {
			require.Equal(t, 10, s.comments)
			require.Equal(t, text(8), s.content)
		}},
		{"line ends of two bytes", Rule{Fault: CRLF}, streaming, func(t *testing.T, s stream, r reply) {
			require.Contains(t, r.body, "data: [DONE]\r\n\r\n")
			require.Equal(t, text(8), s.content)
		}},
		{"an event cut at every byte", Rule{Fault: SplitBytes}, streaming, func(t *testing.T, s stream, r reply) { require.Equal(t, text(8), s.content) }},
		{"a core that stands still for a moment", Rule{Fault: Standstill, DelayMS: 50}, streaming, func(t *testing.T, s stream, r reply) { require.Equal(t, text(8), s.content) }},
		{"usage on every chunk", Rule{Fault: UsageAlways}, streaming, func(t *testing.T, s stream, r reply) { require.Equal(t, 10, s.usages) }},
	} {
		seen[row.rule.Fault] = true
		t.Run(row.name, func(t *testing.T) {
			s, r := struck(t, row.rule, row.more)
			row.check(t, s, r)
		})
	}
	for _, name := range FaultNames() {
		require.True(t, seen[Fault(name)], "fault %s has no test", name)
	}
}

func TestFaultsOfAnAnswerWithoutStream(t *testing.T) {
	for _, row := range []struct {
		name   string
		rule   Rule
		status int
		says   string
		broken bool
	}{
		{"an error event is a status", Rule{Fault: ErrorEvent, AfterTokens: 2}, 500, "Internal server error", false},
		{"recomputed", Rule{Fault: Recomputed, AfterTokens: 2}, 200, `"stop_reason":"recomputed"`, false},
		{"finish_reason error", Rule{Fault: FinishError}, 200, `"finish_reason":"error"`, false},
		{"no finish_reason", Rule{Fault: MissingFinish, Role: true}, 200, `"finish_reason":null`, false},
		{"half a body", Rule{Fault: SilentEnd}, 200, `{"id":`, true},
		{"reset before the headers", Rule{Fault: Reset, Phase: PhaseMidStream}, 0, "", true},
		{"reset after the headers", Rule{Fault: Reset, Phase: PhaseAfterHeaders}, 200, "", true},
		{"silence after the headers", Rule{Fault: Hang, Phase: PhaseAfterHeaders}, 200, "", true},
		{"silence", Rule{Fault: Hang, Phase: PhaseMidStream, AfterTokens: 2}, 0, "", true},
		{"the wrong content type", Rule{Fault: WrongType}, 200, "chat.completion", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			for _, more := range []string{"", `"stop":"zzz",`} { // a text that may end in its middle is kept otherwise
				_, r := struck(t, row.rule, more)
				require.Equal(t, row.status, r.status)
				require.Equal(t, row.broken, r.err != nil, "%v", r.err)
				require.Contains(t, r.body, row.says)
			}
		})
	}
}

func TestFaultsOfAHandoff(t *testing.T) {
	p, d := start(t, Config{Role: Prefill}), start(t, Config{Role: Decode})
	c := client(t)
	for fault, says := range map[Fault]string{EmptyBlocks: `[[]]`, StringBlocks: `[["`, WrongHost: `203.0.113.7`, NullHandoff: "null"} {
		require.NoError(t, p.SetFaults(Rule{Fault: fault, Leg: LegProbe}))
		require.Contains(t, string(probe(t, c, p, "a b")), says)
	}
	require.NoError(t, p.SetFaults(Rule{Fault: NoRequestID, Leg: LegProbe}))
	require.NotContains(t, string(probe(t, c, p, "a b")), "remote_request_id")
	require.NoError(t, p.SetFaults())
	require.NoError(t, d.SetFaults(Rule{Fault: WrongKey}))
	s, _ := streamOf(t, c, d.URLs()[0]+"/v1/chat/completions", chatBody("a b", decodeMore(probe(t, c, p, "a b"), `"stream":true,`)))
	_, err := reftext.Check(reftext.OfUser("a b").Answer, 0, s.content)
	require.Error(t, err)
}

// min_tokens keeps the end of the sequence from being drawn, also where an
// answer that ignored it goes on behind its natural end.
func TestAProbeBehindTheNaturalEndHandsOff(t *testing.T) {
	p := start(t, Config{Role: Prefill})
	q := reftext.OfUser("a b")
	ids := q.IDs
	for i := range reftext.NaturalLength(q.Answer) + 3 {
		ids = append(ids, reftext.TokenID(q.Answer, i))
	}
	list, err := json.Marshal(ids)
	require.NoError(t, err)
	for more, hands := range map[string]bool{`"min_tokens":1,`: true, "": false} {
		r := do(client(t), "POST", p.URLs()[0]+"/v1/completions", fmt.Sprintf(`{%s"prompt":%s,"max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}`, more, list))
		require.Equal(t, 200, r.status, r.body)
		require.Equal(t, hands, strings.Contains(r.body, "do_remote_prefill"), r.body)
	}
}

func TestARejectionFreesThePrefillOnlyWithCleanup(t *testing.T) {
	for _, row := range []struct {
		name string
		d    Config
		more string
		pins int
	}{
		{"rejected, no cleanup", Config{Faults: []Rule{{Fault: Reject}}}, "", 1},
		{"rejected with cleanup", Config{Faults: []Rule{{Fault: Reject, Cleanup: true}}}, "", 0},
		{"too long, no cleanup", Config{Model: Model{MaxLen: 100}}, `"max_tokens":100,`, 1},
		{"too long, a version that cleans up", Config{Model: Model{MaxLen: 100}, KV: KV{RejectReleases: true}}, `"max_tokens":100,`, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.d.Role = Decode
			p, d := start(t, Config{Role: Prefill}), start(t, row.d)
			c := client(t)
			kv := probe(t, c, p, "a b")
			r := do(c, "POST", d.URLs()[0]+"/v1/chat/completions", chatBody("a b", decodeMore(kv, row.more)))
			require.Equal(t, 400, r.status)
			require.Equal(t, row.pins, p.Stats().Pins)
			require.EqualValues(t, 1-row.pins, p.Stats().Releases)
		})
	}
}

func TestFrozenGauges(t *testing.T) {
	e := start(t, Config{KV: KV{Tokens: 1280}, DPSize: 2})
	c := client(t)
	usage := func() float64 {
		return gauge(t, do(c, "GET", e.URLs()[0]+"/metrics", "").body, "vllm:kv_cache_usage_perc")[0]
	}
	zero := 0
	require.NoError(t, e.SetFaults(Rule{Fault: FrozenGauges, Rank: &zero}))
	require.Zero(t, usage())
	probe(t, c, e, "a b")
	require.Zero(t, usage(), "a pin, and the gauge does not move")
	require.NoError(t, e.SetFaults(Rule{Fault: FrozenGauges, Value: 0.97}))
	require.Equal(t, 0.97, usage())
	require.NoError(t, e.SetFaults())
	require.Equal(t, 0.1, usage())
}

func TestPagesAreSlowWhileThereAreRequests(t *testing.T) {
	e := start(t, Config{Steps: Steps{C0: time.Hour}})
	c := client(t)
	require.NoError(t, e.SetFaults(Rule{Fault: SlowPages, DelayMS: 3_600_000}))
	for _, page := range []string{"/health", "/metrics"} {
		require.Equal(t, 200, do(c, "GET", e.URLs()[0]+page, "").status)
	}
	asker := &http.Client{Transport: c.Transport}
	busy := make(chan struct{})
	go func() {
		do(asker, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", ""))
		close(busy)
	}()
	eventually(t, "it runs", func() bool { return e.Stats().Running == 1 })
	asker.Timeout = 50 * time.Millisecond
	for _, page := range []string{"/health", "/metrics"} {
		require.Error(t, do(asker, "GET", e.URLs()[0]+page, "").err)
	}
	require.Equal(t, 200, do(c, "GET", e.URLs()[0]+"/version", "").status)
	e.Kill()
	<-busy
}

func TestAFullQueueAnswers503(t *testing.T) {
	e := start(t, Config{Slots: 1, MaxQueued: 1, Steps: Steps{C0: time.Hour}})
	c := client(t)
	c.Timeout = 5 * time.Second
	busy := make(chan struct{})
	for range 2 {
		go func() {
			do(&http.Client{Transport: c.Transport}, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", ""))
			busy <- struct{}{}
		}()
	}
	eventually(t, "one runs, one waits", func() bool { s := e.Stats(); return s.Running == 1 && s.Waiting == 1 })
	require.Equal(t, 503, do(c, "POST", e.URLs()[0]+"/v1/completions", completionBody("a", "")).status)
	e.Kill()
	<-busy
	<-busy
}

func TestAProbabilityIsDrawnFromTheSeed(t *testing.T) {
	draw := func(seed uint64) (hits string) {
		var f faults
		f.set(seed, []Rule{{Fault: Busy, Probability: 0.5}})
		for range 64 {
			if len(f.strike(func(Rule) bool { return true })) > 0 {
				hits += "x"
			} else {
				hits += "."
			}
		}
		return hits
	}
	require.Equal(t, draw(1), draw(1))
	require.NotEqual(t, draw(1), draw(2))
	require.InDelta(t, 32, strings.Count(draw(1), "x"), 20)
}

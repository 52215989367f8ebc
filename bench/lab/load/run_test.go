package load

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/reftext"
	"evenkeel/bench/lab/trace"
)

func TestRightAnswersOfEveryShape(t *testing.T) {
	for name, shape := range map[string]func([]string, wire) []string{
		"a token an event": nil,
		"several events a write, and comments between them": func(e []string, _ wire) []string {
			return []string{": keep-alive\n\n" + strings.Join(e, ": hi\n\n")}
		},
		"CRLF, cut anywhere": func(e []string, _ wire) []string {
			return strings.SplitAfter(strings.ReplaceAll(strings.Join(e, ""), "\n", "\r\n"), "o")
		},
		"escapes in the text": func(e []string, _ wire) []string {
			var out []string
			for _, s := range e {
				s = strings.NewReplacer("é", `\u00e9`, "🚢", `\ud83d\udea2`, "日", `\u65e5`).Replace(s)
				out = append(out, s)
			}
			return out
		},
		"several tokens an event": func(e []string, in wire) []string {
			end := e[len(e)-1]
			out := []string{in.event(reftext.Text(in.prompt.Answer, in.tokens), "length")}
			if in.usage {
				out = append(out, e[len(e)-2])
			}
			return append(out, end)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{stream: shape}
			r := mustRun(t, Config{URLs: []string{serve(t, f)}, Requests: same(5, 12, 20, 0), Count: 60, Concurrency: 6, Chat: 0.5, Stream: 0.7,
				Usage: 0.5, Seed: 11})
			requireAllOK(t, r)
			require.Equal(t, 60, r.Sent)
			require.EqualValues(t, 60*20, r.All.OutputTokens)
			require.NotNil(t, r.Window)
			var chats, streams, usages int
			prompts := map[uint64]bool{}
			for _, in := range f.requests() {
				prompts[in.prompt.Key] = true
				require.Equal(t, 12, in.prompt.Tokens())
				require.Equal(t, "true", string(in.body["ignore_eos"]))
				require.Equal(t, `"ref"`, string(in.body["model"]), "from /v1/models")
				chats += count(in.chat())
				streams += count(in.stream)
				usages += count(in.usage)
			}
			require.Len(t, prompts, 60, "every prompt is another one")
			require.InDelta(t, 30, chats, 12)
			require.InDelta(t, 42, streams, 12)
			require.InDelta(t, 21, usages, 12)
		})
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestOtherEnginesAreCheckedByShape(t *testing.T) {
	f := &fake{stream: func(e []string, in wire) []string {
		for i, s := range e {
			e[i] = strings.NewReplacer(`"content":" `, `"content":"other `, `"text":" `, `"text":"other `).Replace(s)
		}
		return e
	}}
	cfg := Config{URLs: []string{serve(t, f)}, Requests: same(1, 12, 5, 0), Count: 20, Concurrency: 2, Chat: 0.5, Stream: 1, Usage: 0.5,
		Check: CheckShape}
	r := mustRun(t, cfg)
	requireAllOK(t, r)
	cfg.Check = CheckText
	require.Equal(t, 20, mustRun(t, cfg).Wrong)
}

func TestLatenciesAreTheServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{before: 100 * time.Millisecond, step: 10 * time.Millisecond}
		cfg := Config{Model: "ref", Requests: same(8, 10, 11, 50*time.Millisecond), Stream: 1}
		pipes(t, f, &cfg)
		r := mustRun(t, cfg)
		requireAllOK(t, r)
		for name, m := range map[string]struct {
			got  Millis
			want float64
			n    int64
		}{
			"TTFT": {r.All.TTFT, 100, 8}, "TPOT": {r.All.TPOT, 10, 8}, "ITL": {r.All.ITL, 10, 80}, "E2E": {r.All.E2E, 210, 8},
		} {
			require.Equal(t, m.n, m.got.N, name)
			require.InDelta(t, m.want, m.got.Mean, 1e-6, name)
			require.InDelta(t, m.want, m.got.Max, 1e-6, name)
			require.InDelta(t, m.want, m.got.P99, m.want/128, name)
		}
		require.Equal(t, 350*time.Millisecond, r.LastSend.Sub(r.FirstSend), "the trace's own times")
		require.Equal(t, 560*time.Millisecond, r.End.Sub(r.Start))
		require.Zero(t, r.Lag.Max)
		require.Equal(t, r.FirstSend.Add(210*time.Millisecond), r.Warm, "an eighth of the requests has ended")
		require.Equal(t, 3, r.Window.Requests, "sent at 250, 300 and 350 ms")
	})
}

func TestARateScalesTheTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Model: "ref", Requests: []trace.Request{{At: time.Hour, Prompt: 3, Output: 1},
			{At: time.Hour + 3*time.Second, Prompt: 3, Output: 1}, {At: time.Hour + 4*time.Second, Prompt: 3, Output: 1}},
			Rate: 5, Count: 6, Stream: 1}
		pipes(t, &fake{}, &cfg)
		r := mustRun(t, cfg)
		requireAllOK(t, r)
		require.Equal(t, time.Second, r.LastSend.Sub(r.FirstSend), "5 gaps of 0.2 s; the trace goes round")
	})
}

func TestABoundedOpenLoopSaysHowLateItIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Model: "ref", Requests: same(3, 3, 1, 0), MaxOutstanding: 1, Stream: 1}
		pipes(t, &fake{before: time.Second}, &cfg)
		r := mustRun(t, cfg)
		requireAllOK(t, r)
		require.InDelta(t, 2000, r.Lag.Max, 1e-6)
		require.InDelta(t, 1000, r.Lag.Mean, 1e-6)
	})
}

func TestAClosedLoopKeepsItsConcurrency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var most, last Progress
		cfg := Config{Model: "ref", Requests: same(1, 3, 2, 0), Count: 40, Concurrency: 4, Stream: 1,
			Warm: func(p Progress) bool { return p.OK >= 8 },
			OnProgress: func(p Progress) {
				if p.Sent-p.Ended > most.Sent-most.Ended {
					most = p
				}
				last = p
			}}
		pipes(t, &fake{before: time.Second, step: time.Second}, &cfg)
		r := mustRun(t, cfg)
		requireAllOK(t, r)
		require.Equal(t, 3, most.Sent-most.Ended, "asked when one of four has just ended")
		require.Equal(t, Progress{Total: 40, Sent: 40, Ended: 40, OK: 40}, last)
		require.Equal(t, 30*time.Second, r.End.Sub(r.Start), "ten rounds of 3 s: before, token, [DONE]")
		require.Equal(t, r.Start.Add(6*time.Second), r.Warm)
		require.InDelta(t, 21, r.Window.Seconds, 1e-9)
		require.InDelta(t, 8.0/3, r.Window.TokensPerS, 0.2)
	})
}

func TestDurationEndsTheSending(t *testing.T) {
	for name, concurrency := range map[string]int{"closed loop": 2, "open loop": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := Config{Model: "ref", Requests: same(2, 3, 1, time.Second), Duration: 5500 * time.Millisecond, Concurrency: concurrency,
					Stream: 1}
				pipes(t, &fake{before: 2 * time.Second}, &cfg)
				r := mustRun(t, cfg)
				requireAllOK(t, r)
				require.Equal(t, 6, r.Sent)
			})
		})
	}
}

func TestCancelsHitTheirPhase(t *testing.T) {
	for _, row := range []struct {
		name  string
		phase Phase
		least time.Duration // after sending, with a time to first token of 1 s
		most  time.Duration
		where Left
	}{
		{"while waiting for prefill", Waiting, 0, 300 * time.Millisecond, Left{Unanswered: 10}},
		{"in the pool", Pooled, 300 * time.Millisecond, 800 * time.Millisecond, Left{Unanswered: 10}},
		{"during the transfer", Transferring, 800 * time.Millisecond, time.Second, Left{Unanswered: 10}},
		{"while tokens stream", Streaming, time.Second, 3 * time.Second, Left{Streaming: 10}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fake{before: time.Second, step: 100 * time.Millisecond}
				cfg := Config{Model: "ref", Requests: same(10, 3, 20, 0), Concurrency: 1, Stream: 1, Chat: 0,
					Cancel: Cancel{Share: 1, Phases: []Phase{row.phase}, TTFT: time.Second}}
				pipes(t, f, &cfg)
				r := mustRun(t, cfg)
				require.Equal(t, map[Kind]int{Cancelled: 10}, r.Kinds, "%+v", r.Failures)
				require.Equal(t, map[Phase]Left{row.phase: row.where}, r.Cancels)
				require.Zero(t, r.Failed)
				took := r.End.Sub(r.Start) / 10
				require.Greater(t, took, row.least)
				require.LessOrEqual(t, took, row.most)
				synctest.Wait()
				require.Equal(t, 10, f.left, "the server sees every client leave")
			})
		})
	}
}

func TestATransferIsLeftAtTheResponseHead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{instead: func(w http.ResponseWriter, _ wire) bool {
			w.Header().Set("Content-Type", "text/event-stream")
			w.(http.Flusher).Flush()
			time.Sleep(time.Second)
			return true
		}}
		cfg := Config{Model: "ref", Requests: same(1, 3, 20, 0), Concurrency: 1, Stream: 1,
			Cancel: Cancel{Share: 1, Phases: []Phase{Transferring}, TTFT: time.Minute}}
		pipes(t, f, &cfg)
		r := mustRun(t, cfg)
		require.Equal(t, map[Phase]Left{Transferring: {Headers: 1}}, r.Cancels)
		require.Zero(t, r.End.Sub(r.Start))
		time.Sleep(2 * time.Second)
	})
}

func TestCancelsLearnTheTimeToFirstToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{before: 2 * time.Second}
		cfg := Config{Model: "ref", Requests: same(200, 3, 2, 0), Concurrency: 1, Stream: 1, Cancel: Cancel{Share: 0.5, Phases: []Phase{Pooled}}}
		pipes(t, f, &cfg)
		r := mustRun(t, cfg)
		ok, left := r.OK, r.Cancelled
		require.Equal(t, 200, ok+left)
		require.InDelta(t, 100, left, 25)
		mean := (r.End.Sub(r.Start) - time.Duration(ok)*2*time.Second) / time.Duration(left)
		require.InDelta(t, 1.1, mean.Seconds(), 0.15, "between 0.3 and 0.8 of 2 s")
	})
}

func TestAnEndedContextStopsTheRun(t *testing.T) {
	for name, concurrency := range map[string]int{"closed loop": 3, "open loop": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithTimeout(t.Context(), 2500*time.Millisecond)
				defer stop()
				cfg := Config{Model: "ref", Requests: same(100, 3, 1, 300*time.Millisecond), Concurrency: concurrency, Stream: 1}
				pipes(t, &fake{before: time.Second}, &cfg)
				r, err := Run(ctx, cfg)
				require.NoError(t, err)
				require.Positive(t, r.Stopped)
				require.Zero(t, r.Failed)
				require.Equal(t, r.Sent, r.OK+r.Stopped)
				require.Equal(t, 2500*time.Millisecond, r.End.Sub(r.Start))
			})
		})
	}
}

func TestServersTakeTurnsAndSeeTheKey(t *testing.T) {
	a, b := &fake{}, &fake{}
	r := mustRun(t, Config{URLs: []string{serve(t, a) + "/v1/", serve(t, b)}, APIKey: "sk-x", Requests: same(10, 3, 1, 0), Concurrency: 2})
	requireAllOK(t, r)
	require.Len(t, a.requests(), 5)
	require.Len(t, b.requests(), 5)
	ids := map[string]bool{}
	for _, in := range append(a.requests(), b.requests()...) {
		require.Equal(t, "Bearer sk-x", in.header.Get("Authorization"))
		ids[in.header.Get("X-Request-Id")] = true
	}
	require.Len(t, ids, 10)
}

func TestRequestsOfTheCallersOwn(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]int{}
	r := mustRun(t, Config{URLs: []string{"http://a/v1/", "http://b"}, Count: 10, Concurrency: 3,
		Own: func(_ context.Context, url string, i int) (Kind, string) {
			mu.Lock()
			defer mu.Unlock()
			seen[url]++
			if i == 4 {
				return WrongText, "another word"
			}
			return OK, ""
		}})
	require.Equal(t, map[string]int{"http://a": 5, "http://b": 5}, seen)
	require.Equal(t, map[Kind]int{OK: 9, WrongText: 1}, r.Kinds)
	require.Regexp(t, "^load-.*-4 wrong_text: another word$", r.Failures[0].String())

	ctx, end := context.WithCancel(t.Context())
	r, err := Run(ctx, Config{URLs: []string{"http://a"}, Concurrency: 2, Own: func(_ context.Context, _ string, i int) (Kind, string) {
		if i == 20 {
			end()
		}
		return OK, ""
	}})
	require.NoError(t, err)
	require.GreaterOrEqual(t, r.OK, 20, "without a count they go on until the context ends")
	r = mustRun(t, Config{URLs: []string{"http://a"}, Own: func(context.Context, string, int) (Kind, string) { panic("there is no client") }})
	require.Zero(t, r.Sent)
}

func TestTheModelCannotBeFound(t *testing.T) {
	for body, want := range map[string]string{`{"data":[]}`: "lists no model", `{`: "name the model yourself"} {
		srv := http.NewServeMux()
		srv.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(body)) })
		url := serveHandler(t, srv)
		_, err := Run(t.Context(), Config{URLs: []string{url}, Requests: same(1, 1, 1, 0), Concurrency: 1})
		require.ErrorContains(t, err, want)
	}
	url := serveHandler(t, http.NotFoundHandler())
	_, err := Run(t.Context(), Config{URLs: []string{url}, Requests: same(1, 1, 1, 0), Concurrency: 1})
	require.ErrorContains(t, err, "404")
}

func TestTheReportHoldsWhatHappened(t *testing.T) {
	f := &fake{}
	f.stream = func(e []string, in wire) []string {
		if in.prompt.Answer%2 == 0 {
			return e[:2]
		}
		return e
	}
	r := mustRun(t, Config{URLs: []string{serve(t, f)}, Requests: same(20, 8, 6, 0), Concurrency: 2, Stream: 1, Chat: 0.5, Usage: 1,
		KeepFailures: 3})
	require.Positive(t, r.Failed)
	require.Equal(t, 20, r.OK+r.Failed)
	require.Len(t, r.Failures, min(3, r.Failed))
	require.Equal(t, "cmpl-"+r.Failures[0].Request, r.Failures[0].ID, "the answer's id and the request's")
	require.Equal(t, r.PromptTokens, r.ReportedPromptTokens)

	b, err := json.Marshal(r)
	require.NoError(t, err)
	var names map[string]any
	require.NoError(t, json.Unmarshal(b, &names))
	for _, name := range []string{"loop", "sent", "ok", "failed", "wrong", "kinds", "failures", "first_send", "warm", "last_send", "all",
		"window", "prompt_tokens"} {
		require.Contains(t, names, name)
	}
	for _, name := range []string{"seconds", "output_tokens", "tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"} {
		require.Contains(t, names["all"], name)
	}
	var table bytes.Buffer
	require.NoError(t, r.WriteTable(&table))
	for _, part := range []string{"20 sent", "TTFT", "p99", "truncated", r.Failures[0].Request} {
		require.Contains(t, table.String(), part)
	}
}

func TestConfigsThatMakeNoSense(t *testing.T) {
	good := Config{URLs: []string{"http://x"}, Requests: same(1, 1, 1, 0)}
	require.NoError(t, good.Validate())
	for want, spoil := range map[string]func(*Config){
		"no URL":            func(c *Config) { c.URLs = nil },
		"is no URL like":    func(c *Config) { c.URLs = []string{"localhost:80"} },
		"no requests":       func(c *Config) { c.Requests = nil },
		"at least 1":        func(c *Config) { c.Requests = same(1, 1, 0, 0) },
		"the chat share":    func(c *Config) { c.Chat = 1.1 },
		"the cancel share":  func(c *Config) { c.Cancel.Share = -1 },
		"unknown phase":     func(c *Config) { c.Cancel.Phases = []Phase{"later"} },
		"count is negative": func(c *Config) { c.Count = -1 },
		"rate or duration":  func(c *Config) { c.Rate = -1 },
		"exclude each":      func(c *Config) { c.Rate, c.Concurrency = 1, 1 },
		"unknown check":     func(c *Config) { c.Check = "hard" },
	} {
		c := good
		spoil(&c)
		_, err := Run(t.Context(), c)
		require.ErrorContains(t, err, want)
	}
}

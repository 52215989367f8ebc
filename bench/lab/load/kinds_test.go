package load

import (
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func replace(old, by string) func([]string, wire) []string {
	return func(events []string, _ wire) []string {
		for i, e := range events {
			events[i] = strings.ReplaceAll(e, old, by)
		}
		return events
	}
}

func without(part string) func([]string, wire) []string {
	return func(events []string, _ wire) []string {
		return slices.DeleteFunc(events, func(e string) bool { return strings.Contains(e, part) })
	}
}

func say(status int, contentType, body string) func(http.ResponseWriter, wire) bool {
	return func(w http.ResponseWriter, _ wire) bool {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
		return true
	}
}

// cut writes the beginning of a stream onto the socket, and closes it.
func cut(raw string, reset bool) func(http.ResponseWriter, wire) bool {
	return func(w http.ResponseWriter, _ wire) bool {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(conn, raw)
		if reset {
			_ = conn.(*net.TCPConn).SetLinger(0)
		}
		_ = conn.Close()
		return true
	}
}

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

func TestEveryFailureHasItsKind(t *testing.T) {
	const tokens = 4
	swap := func(events []string, _ wire) []string { // events[0] is the role chunk
		events[2], events[3] = events[3], events[2]
		return events
	}
	for _, row := range []struct {
		name   string
		fake   *fake
		want   Kind
		detail string
		whole  bool // a request that is not streamed
	}{
		{"another token", &fake{stream: replace(`"content":" `, `"content":" x`)}, WrongText, "want", false},
		{"two tokens in the wrong order", &fake{stream: swap}, WrongText, "token 1", false},
		{"a token twice", &fake{stream: func(e []string, _ wire) []string { return slices.Insert(e, 2, e[1]) }}, WrongText, "token 1", false},
		{"a token is missing", &fake{stream: func(e []string, _ wire) []string { return slices.Delete(e, 2, 3) }}, WrongText, "token 1", false},
		{"the answer goes on after its end", &fake{stream: func(e []string, in wire) []string {
			return slices.Insert(e, tokens+1, in.event(" w1", ""))
		}}, WrongText, "after the finish reason", false},
		{"more tokens than asked for", &fake{stream: func(_ []string, in wire) []string {
			in.tokens++
			return in.events()
		}}, WrongText, "more than the 4 tokens", false},
		{"fewer tokens, ended as if whole", &fake{stream: func(_ []string, in wire) []string {
			in.tokens--
			return in.events()
		}}, MissingTokens, "3 of 4", false},
		{"no finish reason", &fake{stream: replace(`"finish_reason":"length"`, `"finish_reason":null`)}, NoFinish, "4 of 4", false},
		{"no [DONE]", &fake{stream: without("[DONE]")}, NoDone, "length", false},
		{"the stream just ends", &fake{stream: func(e []string, _ wire) []string { return e[:3] }}, Truncated, "after 2 of 4", false},
		{"the stream ends inside an event", &fake{stream: func(e []string, _ wire) []string {
			return append(e[:2], e[2][:len(e[2])-1])
		}}, Truncated, "inside an event", false},
		{"the engine gives the request back", &fake{stream: replace(`"stop_reason":null`, `"stop_reason":"recomputed"`)}, BadFinish, "recomputed", false},
		{"a stop where length is due", &fake{stream: replace(`"length"`, `"stop"`)}, BadFinish, "stop instead of length", false},
		{"the id changes", &fake{stream: func(e []string, _ wire) []string {
			e[3] = strings.Replace(e[3], "cmpl-", "cmpl-x", 1)
			return e
		}}, BadShape, "id changes", false},
		{"another choice", &fake{stream: replace(`"index":0`, `"index":1`)}, BadShape, "index 1", false},
		{"an event after [DONE]", &fake{stream: func(e []string, _ wire) []string { return append(e, e[0]) }}, BadShape, "after [DONE]", false},
		{"an event that is no JSON", &fake{stream: replace(`"choices":[`, `"choices":[,`)}, BadJSON, "at byte", false},
		{"an error event, new shape", &fake{stream: func(e []string, in wire) []string {
			return append(e[:2],
				in.data(map[string]any{"error": map[string]any{"message": "KV load failed", "type": "InternalServerError", "code": 500}}),
				"data: [DONE]\n\n")
		}}, ErrorEvent, "KV load failed", false},
		{"an error event, old shape", &fake{stream: func(e []string, in wire) []string {
			return append(e[:2], in.data(map[string]any{"object": "error", "message": "gone", "type": "x", "code": 400}))
		}}, ErrorEvent, "gone", false},
		{"an error with status 200", &fake{instead: say(200, "application/json", `{"error":{"message":"late","code":"server_error"}}`)}, ErrorEvent, "late", false},
		{"a stream of the wrong type", &fake{instead: say(200, "text/plain", "hello")}, BadShape, "text/plain", false},
		{"a usage that was asked for does not come", &fake{stream: without("completion_tokens")}, BadUsage, "did not come", false},
		{"a usage that counts wrong", &fake{stream: replace(`"completion_tokens":4`, `"completion_tokens":5`)}, BadUsage, "5 completion", false},
		{"a refusal with a code", &fake{instead: say(404, "application/json", `{"error":{"message":"no such model","type":"NotFoundError","code":"model_not_found"}}`)}, "http_404/model_not_found", "no such model", false},
		{"a refusal whose code is the status", &fake{instead: say(400, "application/json", `{"error":{"message":"bad","code":400}}`)}, "http_400", "bad", false},
		{"too many requests", &fake{instead: say(429, "text/plain", "later")}, "http_429", "later", false},
		{"a gateway's HTML", &fake{instead: say(502, "text/html", "<h1>x</h1>")}, "http_502", "<h1>", false},
		{"the body breaks off", &fake{instead: cut(streamHead+"5\r\n: hi\n\r\n", false)}, Truncated, "0 of 4", false},
		{"a reset before the answer", &fake{instead: cut("", true)}, Reset, "", false},
		{"a close before the answer", &fake{instead: cut("", false)}, Reset, "EOF", false},
		{"no HTTP at all", &fake{instead: cut("SSH-2.0-x\r\n\r\n", false)}, BadHTTP, "malformed", false},

		{"a whole answer with another text", &fake{instead: func(w http.ResponseWriter, in wire) bool {
			_, _ = io.WriteString(w, strings.Replace(in.whole(tokens), `"content":" `, `"content":"?`, 1))
			return true
		}}, WrongText, "token 0", true},
		{"a whole answer that is too short", &fake{instead: func(w http.ResponseWriter, in wire) bool {
			_, _ = io.WriteString(w, in.whole(tokens-1))
			return true
		}}, MissingTokens, "3 of 4", true},
		{"a whole answer without usage", &fake{instead: func(w http.ResponseWriter, in wire) bool {
			_, _ = io.WriteString(w, strings.Replace(in.whole(tokens), `"usage"`, `"used"`, 1))
			return true
		}}, BadUsage, "did not come", true},
		{"a whole answer in chunks", &fake{instead: func(w http.ResponseWriter, in wire) bool {
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			_, _ = io.WriteString(w, in.whole(tokens))
			return true
		}}, BadShape, "Content-Length", true},
		{"a stream instead of a whole answer", &fake{instead: say(200, "text/event-stream", "data: {}\n\n")}, BadShape, "event-stream", true},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := row.fake
			if row.whole && f.instead != nil {
				answer := f.instead
				f.instead = func(w http.ResponseWriter, in wire) bool {
					w.Header().Set("Content-Type", "application/json")
					return answer(w, in)
				}
			}
			cfg := Config{URLs: []string{serve(t, f)}, Model: "ref", Requests: same(1, 9, tokens, 0), Concurrency: 1, Chat: 1, Stream: 1, Usage: 1,
				Seed: 3}
			if row.whole {
				cfg.Stream = 0
			}
			r := mustRun(t, cfg)
			require.Equal(t, map[Kind]int{row.want: 1}, r.Kinds, "%+v", r.Failures)
			require.Len(t, r.Failures, 1)
			require.Contains(t, r.Failures[0].Detail, row.detail)
			require.Equal(t, 1, r.Failed)
			require.Equal(t, row.want.Wrong(), r.Wrong == 1)
		})
	}
}

func TestUsageNobodyAskedForIsWrong(t *testing.T) {
	f := &fake{stream: func(_ []string, in wire) []string {
		in.usage = true
		return in.events()
	}}
	r := mustRun(t, Config{URLs: []string{serve(t, f)}, Requests: same(1, 9, 2, 0), Concurrency: 1, Stream: 1})
	require.Equal(t, map[Kind]int{BadUsage: 1}, r.Kinds)
}

func TestNobodyListens(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	url := "http://" + l.Addr().String()
	require.NoError(t, l.Close())
	r := mustRun(t, Config{URLs: []string{url}, Model: "ref", Requests: same(2, 9, 2, 0), Concurrency: 1})
	require.Equal(t, map[Kind]int{Connect: 2}, r.Kinds)
}

func TestAServerThatHangs(t *testing.T) {
	for name, f := range map[string]*fake{
		"before the answer":   {before: time.Hour},
		"in the middle of it": {step: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			r := mustRun(t, Config{URLs: []string{serve(t, f)}, Model: "ref", Requests: same(1, 9, 3, 0), Concurrency: 1, Stream: 1,
				Timeout: 50 * time.Millisecond})
			require.Equal(t, map[Kind]int{Timeout: 1}, r.Kinds, "%+v", r.Failures)
		})
	}
}

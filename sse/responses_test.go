package sse

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/rawjson"
)

const (
	created = "event: response.created\ndata: " +
		"{\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"status\":\"in_progress\",\"kv_transfer_params\":null," +
		"\"usage\":null},\"sequence_number\":0}\n\n"
	added = "event: response.output_item.added\ndata: " +
		"{\"type\":\"response.output_item.added\",\"item\":{\"type\":\"message\"},\"sequence_number\":1}\n\n"
	delta     = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\",\"sequence_number\":1}\n\n"
	completed = "event: response.completed\ndata: " +
		"{\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"status\":\"completed\"," +
		"\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{" +
		"\"cached_tokens\":9,\"cached_tokens_per_turn\":[9]},\"output_tokens\":3,\"total_tokens\":12}," +
		"\"kv_transfer_params\":{\"a\":1}},\"sequence_number\":2}\n\n"
)

// respond feeds a stream to an answer, so many bytes at once.
func respond(stream string, options Options, pieces int) (out string, end End, a *Answer) {
	return feed(stream, Responses, options, pieces)
}

func feed(stream string, form Form, options Options, pieces int) (out string, end End, a *Answer) {
	a = &Answer{}
	options.Form = form
	a.Reset(options)
	a.Reader.Reset(Limits{})
	var dst []byte
	for len(stream) > 0 && end == NotEnded {
		n := min(pieces, len(stream))
		var fx Effects
		dst, fx = a.Feed(dst, []byte(stream[:n]), time.Time{})
		stream, end = stream[n:], fx.End
	}
	if end == NotEnded {
		end = a.Closed()
	}
	return string(dst), end, a
}

func TestAResponseIsMirrored(t *testing.T) {
	for _, pieces := range []int{1, 7, 1 << 20} {
		out, end, a := respond(created+delta+completed, Options{Cached: 4}, pieces)
		require.Equal(t, Complete, end)
		require.Equal(t, 3, a.Filter.Tokens())
		require.Equal(t, 9, a.Filter.Prompt())
		require.NotContains(t, out, "kv_transfer_params")
		require.Contains(t, out, `"cached_tokens":4,"cached_tokens_per_turn":[4]`)
		require.Contains(t, out, delta)
		require.Less(t, strings.Index(out, "response.created"), strings.Index(out, "output_text.delta"))
		require.Empty(t, a.Ending(nil, false, "", "", ""))
	}
}

func TestAResponseThatIsNotWhole(t *testing.T) {
	for name, row := range map[string]struct {
		stream string
		end    End
		out    string
	}{
		"nothing is an answer before a token":       {created, Short, ""},
		"an end without response.completed":         {created + delta, Short, delta},
		"an item that begins is no token":           {created + added, Short, ""},
		"an event of an error":                      {created + delta + "event: error\ndata: {\"type\":\"error\",\"code\":\"x\",\"message\":\"no\"}\n\n", Refused, delta},
		"a response that failed":                    {created + strings.NewReplacer("completed", "failed", ".completed", ".failed").Replace(completed), Refused, ""},
		"a chat's error":                            {"data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\n", Refused, ""},
		"too many events that tell of no answer":    {strings.Repeat(created, maxHeldEvents+1), Broken, ""},
		"[DONE] does not stand for what is missing": {created + delta + Done, Short, delta},
	} {
		t.Run(name, func(t *testing.T) {
			out, end, a := respond(row.stream, Options{}, 1<<20)
			require.Equal(t, row.end, end)
			require.True(t, strings.HasSuffix(out, row.out) && (row.out != "" || out == ""), out)
			said := string(a.Ending(nil, true, "it \"broke\"", "server_error", "upstream_broken"))
			require.True(t, strings.HasPrefix(said,
				"event: error\ndata: {\"type\":\"error\",\"code\":\"upstream_broken\",\"message\":\"it \\\"broke\\\"\""), said)
		})
	}
}

func TestWholeResponses(t *testing.T) {
	for status, want := range map[string]string{"completed": "stop", "incomplete": "length", "in_progress": "", "failed": ""} {
		_, _, a := respond("data: {\"object\":\"response\",\"status\":\""+status+"\",\"output\":[],\"kv_transfer_params\":null}\n\n", Options{},
			1<<20)
		require.Equal(t, want, a.Filter.FinishReason(), status)
	}
}

// An engine sends what tells of the request at once, and only then waits for the KV.
func TestEventsThatOpenAResponseDoNotEndTheWaitForItsFirst(t *testing.T) {
	const first, gap = 5 * time.Second, time.Minute
	var a Answer
	a.Reset(Options{Form: Responses, Choice: -1})
	a.Reader.Reset(Limits{First: first, Gap: gap})
	now := time.Unix(1, 0)
	step := func(d time.Duration, sent string) time.Duration {
		now = now.Add(d)
		_, fx := a.Feed(nil, []byte(sent), now)
		require.Equal(t, NotEnded, fx.End)
		return a.Reader.Wait(now)
	}
	require.Equal(t, first, a.Reader.Wait(now))
	require.Equal(t, 4*time.Second, step(time.Second, created), "the wait goes on, and does not begin anew")
	require.Equal(t, 2*time.Second, step(2*time.Second, created[:9]))
	require.Equal(t, time.Second, step(time.Second, created[9:]))
	a.Feed(nil, nil, now.Add(time.Second))
	require.ErrorIs(t, a.Err(), ErrSilent)

	a.Reset(Options{Form: Responses, Choice: -1})
	a.Reader.Reset(Limits{First: 0, Gap: gap})
	require.Zero(t, a.Reader.Wait(now))
	require.Zero(t, step(time.Hour, created), "a wait for ever stays one")
	require.Equal(t, gap, step(time.Hour, delta), "the first token ends it")
}

// A piece of an event tells neither what the event is nor what must be taken out of it.
func TestAnEventOfAResponseThatIsTooLargeIsAFault(t *testing.T) {
	long := strings.Repeat("x", 5000)
	for name, row := range map[string]struct{ stream, out string }{
		"the first":             {strings.Replace(created, `"id":"r"`, `"id":"`+long+`"`, 1), ""},
		"the first with tokens": {created + strings.Replace(delta, `"a"`, `"`+long+`"`, 1), ""},
		"the last":              {created + delta + strings.Replace(completed, `"id":"r"`, `"id":"`+long+`"`, 1), delta},
		"the last, KV first":    {created + delta + strings.Replace(completed, `"id":"r"`, `"kv_transfer_params":{"remote_host":"h"},"id":"`+long+`"`, 1), delta},
	} {
		for _, pieces := range []int{1, 700, 1 << 20} {
			var a Answer
			a.Reset(Options{Form: Responses, Choice: -1})
			a.Reader.Reset(Limits{Event: 1 << 10})
			var out []byte
			var fx Effects
			for rest := row.stream; fx.End == NotEnded; {
				n := min(pieces, len(rest))
				require.NotZero(t, n, name)
				out, fx = a.Feed(out, []byte(rest[:n]), time.Time{})
				rest = rest[n:]
			}
			require.Equal(t, Broken, fx.End, name)
			require.ErrorIs(t, a.Err(), ErrLargeEvent)
			require.True(t, strings.HasSuffix(string(out), row.out) && (len(out) > 0) == (row.out != ""), name)
			require.Equal(t, row.out != "", a.Filter.Started(), name)
			require.False(t, a.Filter.Finished())
		}
	}
}

func TestWhatIsTakenOutOfAResponse(t *testing.T) {
	for in, want := range map[string]string{
		`{"kv_transfer_params":1,"ec_transfer_params":2}`:                       `{}`,
		`{"kv_transfer_params":1,"ec_transfer_params":2,"status":"completed"}`:  `{"status":"completed"}`,
		`{"kv_transfer_params":1,"status":"completed","ec_transfer_params":2}`:  `{"status":"completed"}`,
		`{"status":"completed","kv_transfer_params":1,"ec_transfer_params":2}`:  `{"status":"completed"}`,
		`{"kv_transfer_params":1,"kv_transfer_params":2,"status":"completed"}`:  `{"status":"completed"}`,
		`{"kv\u005ftransfer_params":1,"status":"completed"}`:                    `{"status":"completed"}`,
		`{"status":"completed"},"response":{"kv_transfer_params":1}`:            `{"status":"completed"},"response":{}`,
		`{"kv_transfer_params":1},"response":{"status":"completed","usage":{}}`: `{},"response":{"status":"completed","usage":{}}`,
	} {
		frame := func(response string) string {
			return "data: {\"type\":\"response.completed\",\"response\":" + response + "}\n\n"
		}
		out, _, _ := respond(frame(in), Options{}, 1<<20)
		require.Equal(t, frame(want), out)
	}
	out, _, _ := respond(`data: {"response":{"kv_transfer_params":1},"kv_transfer_params":1,"object":"response","status":"completed","ec_transfer_params":2}`+"\n\n", Options{}, 1<<20)
	require.Equal(t, `data: {"response":{},"object":"response","status":"completed"}`+"\n\n", out)
}

func FuzzResponse(f *testing.F) {
	for _, stream := range []string{created, delta, completed} {
		for _, e := range frames(f, stream) {
			f.Add(e.Data)
		}
	}
	f.Add([]byte(`{"type":"response.completed","response":{"kv_transfer_params":1,"ec_transfer_params":2}}`))
	f.Add([]byte(`{"object":"response","kv_transfer_params":1,"response":{"ec_transfer_params":2},"usage":{"total_tokens":1,"input_tokens_details":{"cached_tokens":5,"cached_tokens_per_turn":[5]}}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		stream := "data: " + strings.ReplaceAll(strings.ReplaceAll(string(data), "\n", " "), "\r", " ") + "\n\n"
		out, end, a := respond(stream, Options{Cached: 7}, 1<<20)
		if !json.Valid(data) || len(out) == 0 || end == Refused {
			return
		}
		require.True(t, a.Filter.Started())
		_, sent, ok := strings.Cut(out, "data: ")
		require.True(t, ok, out)
		require.True(t, json.Valid([]byte(sent)), "%s -> %s", data, sent)
		for key, response := range rawjson.Members([]byte(strings.TrimSpace(sent))) {
			if key != "response" {
				continue
			}
			for inner := range rawjson.Members(response) {
				require.NotContains(t, []string{"kv_transfer_params", "ec_transfer_params"}, inner, "%s -> %s", data, sent)
			}
		}
	})
}

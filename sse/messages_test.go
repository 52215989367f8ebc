package sse

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/rawjson"
)

const (
	messageStart = "event: message_start\ndata: " +
		"{\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"type\":\"message\",\"content\":[],\"stop_reason\":null," +
		"\"usage\":{\"input_tokens\":9,\"output_tokens\":0}}}\n\n"
	blockStart = "event: content_block_start\ndata: " +
		"{\"index\":0,\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\n\n"
	blockDelta = "event: content_block_delta\ndata: " +
		"{\"index\":0,\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n"
	signature = "event: content_block_delta\ndata: " +
		"{\"index\":0,\"type\":\"content_block_delta\",\"delta\":{\"type\":\"signature_delta\",\"signature\":\"s\"}}\n\n"
	messageDelta = "event: message_delta\ndata: " +
		"{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null}," +
		"\"usage\":{\"input_tokens\":1,\"output_tokens\":3,\"cache_read_input_tokens\":8}}\n\n"
	ping = "event: ping\ndata: {\"type\":\"ping\"}\n\n"
)

// message feeds a stream to an answer, so many bytes at once.
func message(stream string, options Options, pieces int) (out string, end End, a *Answer) {
	return feed(stream, Messages, options, pieces)
}

func TestAMessageIsMirrored(t *testing.T) {
	for _, pieces := range []int{1, 7, 1 << 20} {
		out, end, a := message(messageStart+ping+blockStart+blockDelta+blockDelta+signature+messageDelta+messageStop, Options{Cached: 4}, pieces)
		require.Equal(t, Complete, end)
		require.Equal(t, 3, a.Filter.Tokens())
		require.Equal(t, 9, a.Filter.Prompt())
		require.Equal(t, "stop", a.Filter.FinishReason())
		drift, told := a.Filter.Drift()
		require.True(t, told)
		require.Equal(t, -1, drift, "two chunks were three tokens, and a signature is none")
		require.Equal(t, messageStart+ping+blockStart+blockDelta+blockDelta+signature+
			strings.Replace(messageDelta, `"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":8`, `"input_tokens":5,"output_tokens":3,"cache_read_input_tokens":4`, 1)+messageStop, out)
		require.Empty(t, a.Ending(nil, false, "", "", ""))
	}
}

// SGLang counts the prompt in the first event alone, and ends a failure as it ends an answer.
func TestAMessageOfSGLang(t *testing.T) {
	end := strings.Replace(messageDelta, `"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":8`, `"output_tokens":3`, 1)
	out, how, a := message(messageStart+blockStart+blockDelta+end+messageStop, Options{Cached: OwnCached}, 1<<20)
	require.Equal(t, Complete, how)
	require.Equal(t, messageStart+blockStart+blockDelta+end+messageStop, out)
	u, _ := a.Filter.Usage()
	require.Equal(t, Usage{Prompt: 9, Completion: 3, Total: 12}, u)

	failed := "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":%q,\"message\":\"KVTransferError\"}}\n\n"
	for kind, status := range map[string]int{"api_error": 500, "overloaded_error": 503, "rate_limit_error": 429, "not_found_error": 404,
		"invalid_request_error": 400} {
		out, how, a = message(messageStart+fmt.Sprintf(failed, kind)+messageStop, Options{Cached: OwnCached}, 1<<20)
		require.Equal(t, Refused, how)
		require.Empty(t, out, "the client has nothing yet")
		require.Equal(t, status, a.Filter.Failure().Status)
		require.Equal(t, "KVTransferError", a.Filter.Failure().Message)
	}
}

// An answer that is not believed must not end as a whole one.
func TestAnEndThatIsTakenBack(t *testing.T) {
	out, how, a := message(messageStart+blockStart+blockDelta+messageDelta+messageStop, Options{Cached: OwnCached}, 7)
	require.Equal(t, Complete, how)
	require.Equal(t, messageStart+blockStart+blockDelta+messageDelta, string(a.DropEnd([]byte(out))))
	require.Equal(t, out, string(a.DropEnd([]byte(out))), "once")
	_, _, a = message(messageStart+blockStart+blockDelta, Options{Cached: OwnCached}, 7)
	require.Equal(t, "as it is", string(a.DropEnd([]byte("as it is"))))
}

func TestWhatAMessageTellsOfCachedTokens(t *testing.T) {
	for cached, want := range map[int]string{
		4:         `"input_tokens":5,"output_tokens":3,"cache_read_input_tokens":4`,
		-1:        `"input_tokens":9,"output_tokens":3,"cache_read_input_tokens":0`,
		99:        `"input_tokens":0,"output_tokens":3,"cache_read_input_tokens":9`,
		OwnCached: `"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":8`,
	} {
		out, _, a := message(messageStart+messageDelta, Options{Cached: cached}, 1<<20)
		require.Contains(t, out, want)
		require.Equal(t, 9, a.Filter.Prompt())
	}
	created := strings.Replace(messageDelta, `"cache_read`, `"cache_creation_input_tokens":2,"cache_read`, 1)
	for cached, want := range map[int]string{
		4:  `"input_tokens":5,"output_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":4`,
		99: `"input_tokens":0,"output_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":9`,
	} {
		out, _, a := message(messageStart+created, Options{Cached: cached}, 1<<20)
		require.Contains(t, out, want, "the three counts are those of the prompt")
		require.Equal(t, 11, a.Filter.Prompt())
	}
	out, _, _ := message(messageStart+blockDelta, Options{Cached: 4}, 1<<20)
	require.Equal(t, messageStart+blockDelta, out, "an engine that does not tell keeps its count")
}

func TestAMessageThatIsNotWhole(t *testing.T) {
	for name, row := range map[string]struct {
		stream string
		end    End
		out    string
		begun  bool
	}{
		"nothing":                                {"", Short, "", false},
		"a ping is no answer":                    {ping, Short, "", false},
		"an end before a token":                  {messageStart, Short, "", false},
		"an end before a token, in a block":      {messageStart + ping + blockStart, Short, "", false},
		"an end without a message_delta":         {messageStart + blockDelta, Short, messageStart + blockDelta, true},
		"a message_stop alone":                   {messageStart + messageStop, Short, "", false},
		"a message_stop behind a token":          {messageStart + blockDelta + messageStop, Short, messageStart + blockDelta, true},
		"an error first":                         {"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"no\"}}\n\n", Refused, "", false},
		"an error before a token":                {messageStart + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"no\"}}\n\n", Refused, "", false},
		"an error in the middle":                 {messageStart + blockDelta + "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"internal_error\",\"message\":\"no\"}}\n\n", Refused, messageStart + blockDelta, true},
		"an end without a reason":                {messageStart + blockDelta + strings.Replace(messageDelta, `"end_turn"`, "null", 1) + messageStop, Refused, messageStart + blockDelta, true},
		"an end without a reason or a token":     {messageStart + strings.Replace(messageDelta, `"end_turn"`, "null", 1) + messageStop, Refused, "", false},
		"a chat's error":                         {"data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\n", Refused, "", false},
		"[DONE] does not stand for the rest":     {messageStart + blockDelta + Done, Short, messageStart + blockDelta, true},
		"[DONE] before a token":                  {messageStart + Done, Short, "", false},
		"a reason that begins is none that ends": {strings.Replace(messageStart, `"stop_reason":null`, `"stop_reason":"end_turn"`, 1) + blockDelta, Short, strings.Replace(messageStart, `"stop_reason":null`, `"stop_reason":"end_turn"`, 1) + blockDelta, true},
	} {
		t.Run(name, func(t *testing.T) {
			out, end, a := message(row.stream, Options{}, 1<<20)
			require.Equal(t, row.end, end)
			require.Equal(t, row.out, out)
			require.Equal(t, row.begun, a.Filter.Started())
			require.Equal(t, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"it \\\"broke\\\"\"}}\n\n",
				string(a.Ending(nil, true, `it "broke"`, "api_error", "upstream_broken")))
		})
	}
}

// An engine that ends its body behind the reason has said all, and the client waits for
// message_stop.
func TestAMessageWithoutItsLastEventGetsIt(t *testing.T) {
	out, end, a := message(messageStart+blockDelta+messageDelta, Options{Cached: OwnCached}, 1<<20)
	require.Equal(t, Complete, end)
	require.Equal(t, messageStart+blockDelta+messageDelta, out)
	require.Equal(t, messageStop, string(a.Ending(nil, false, "", "", "")))
}

func TestWholeMessages(t *testing.T) {
	for reason, want := range map[string]string{`"end_turn"`: "stop", `"stop_sequence"`: "stop", `"max_tokens"`: "length", `"tool_use"`: "tool_calls", `"refusal"`: "refusal", `null`: ""} {
		out, _, a := message(`data: {"id":"m","type":"message","stop_reason":`+reason+`,"usage":{"cache_read_input_tokens":8,"input_tokens":1,"output_tokens":3},"kv_transfer_params":{"a":1},"ec_transfer_params":null}`+"\n\n", Options{Cached: 2}, 1<<20)
		require.Equal(t, want, a.Filter.FinishReason(), reason)
		require.Equal(t, 3, a.Filter.Tokens())
		require.Equal(t, `data: {"id":"m","type":"message","stop_reason":`+reason+`,"usage":{"cache_read_input_tokens":2,"input_tokens":7,"output_tokens":3}}`+"\n\n", out)
	}
}

// A ping does not end the wait for the first event, and a large event is passed on as it comes.
func TestPingsAndLargeEventsOfAMessage(t *testing.T) {
	var a Answer
	a.Reset(Options{Form: Messages})
	a.Reader.Reset(Limits{First: 5 * time.Second, Gap: time.Minute, Event: 1 << 10})
	now := time.Unix(1, 0)
	require.Equal(t, 5*time.Second, a.Reader.Wait(now))
	_, fx := a.Feed(nil, []byte(ping), now.Add(time.Second))
	require.Equal(t, NotEnded, fx.End)
	require.Equal(t, 4*time.Second, a.Reader.Wait(now.Add(time.Second)))
	large := strings.Replace(blockDelta, `"a"`, `"`+strings.Repeat("x", 5000)+`"`, 1)
	out, fx := a.Feed(nil, []byte(messageStart+large+messageDelta+messageStop), now.Add(2*time.Second))
	require.Equal(t, Complete, fx.End)
	require.True(t, strings.HasPrefix(string(out), messageStart+large), "what waited for it stands before it")
}

// What a message begins with waits for its first token: an engine that fails before that has told
// the client nothing.
func TestWhatAMessageBeginsWithWaitsForItsFirstToken(t *testing.T) {
	for _, row := range []struct{ held, first string }{
		{messageStart, blockDelta},
		{messageStart + blockStart, blockDelta},
		{messageStart + ping + blockStart, blockDelta},
		{messageStart + ping + ping + ping, blockStart},                                    // not more than so many
		{messageStart + blockStart, messageDelta},                                          // an empty answer
		{"data: {\"type\":\"message_start\"}\r\nevent: message_start\r\n\r\n", blockDelta}, // as the engine writes it
		{messageStart, ": a comment\n" + blockDelta},                                       // a line of the event
		{"", strings.Replace(blockDelta, `"text":"a"`, `"text":""`, 1)},                    // a token without text
	} {
		var a Answer
		a.Reset(Options{Form: Messages, Cached: OwnCached})
		out, fx := a.Feed(nil, []byte(row.held), time.Unix(1, 0))
		require.Empty(t, out, row.held)
		require.Equal(t, NotEnded, fx.End)
		require.False(t, a.Filter.Started())
		out, _ = a.Feed(nil, []byte(row.first), time.Unix(1, 0))
		require.Equal(t, row.held+row.first, string(out))
		require.True(t, a.Filter.Started())
		out, _ = a.Feed(nil, []byte(blockStart+ping), time.Unix(1, 0))
		require.Equal(t, blockStart+ping, string(out), "nothing waits any more")
	}
}

func TestFormsOfPaths(t *testing.T) {
	for path, want := range map[string]Form{"/v1/messages": Messages, "/v1/responses": Responses, "/v1/chat/completions": Chunks,
		"/v1/completions": Chunks} {
		require.Equal(t, want, FormOf(path))
	}
}

func FuzzMessage(f *testing.F) {
	for _, stream := range []string{messageStart, blockStart, blockDelta, signature, messageDelta, messageStop, ping} {
		for _, e := range frames(f, stream) {
			f.Add(e.Data)
		}
	}
	f.Add([]byte(`{"type":"message","kv_transfer_params":1,"message":{"ec_transfer_params":2},"stop_reason":"end_turn","usage":{"input_tokens":1,"cache_read_input_tokens":5,"input_tokens":2}}`))
	f.Add([]byte(`{"type":"message_start","message":{"kv_transfer_params":1,"usage":{"cache_read_input_tokens":5}}}`))
	f.Add([]byte(`{"type":"\0"`))
	f.Fuzz(func(t *testing.T, data []byte) {
		stream := "data: " + strings.ReplaceAll(strings.ReplaceAll(string(data), "\n", " "), "\r", " ") + "\n\n"
		out, end, a := message(stream+blockDelta, Options{Cached: 7}, 1<<20) // with the token that it may wait for
		if !json.Valid(data) || len(out) == 0 || end == Refused {
			return
		}
		require.True(t, a.Filter.Started())
		out, _, _ = strings.Cut(out, "\n\n")
		_, sent, ok := strings.Cut(out, "data: ")
		require.True(t, ok, out)
		require.True(t, json.Valid([]byte(sent)), "%s -> %s", data, sent)
		for key, message := range rawjson.Members([]byte(strings.TrimSpace(sent))) {
			if key != "message" {
				continue
			}
			for inner := range rawjson.Members(message) {
				require.NotContains(t, []string{"kv_transfer_params", "ec_transfer_params"}, inner, "%s -> %s", data, sent)
			}
		}
	})
}

package sse

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMirrorCountsByTheBestSource(t *testing.T) {
	const text = `{"choices":[{"index":0,"delta":{"content":"a"}}]}`
	for _, tt := range []struct {
		name     string
		perChunk float64
		events   []string
		want     int
	}{
		{"usage wins over token ids", 0, []string{`{"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1,2,3]}],"usage":{"completion_tokens":2}}`}, 2},
		{"usage is cumulative", 0, []string{`{"choices":[],"usage":{"completion_tokens":2}}`, `{"choices":[],"usage":{"completion_tokens":5}}`}, 5},
		{"token ids add up, several in a chunk", 0, []string{`{"choices":[{"token_ids":[1,2,3]}]}`, `{"choices":[{"token_ids":[ 4 ]}]}`}, 4},
		{"an empty list and null are no token", 0, []string{`{"choices":[{"token_ids":[ ]}]}`, `{"choices":[{"token_ids":null}]}`}, 0},
		{"token ids win over chunks", 9, []string{`{"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}`, text}, 1},
		{"a chunk counts as one token where nothing is known", 0, []string{text, text}, 2},
		{"chunks count what this engine's chunks held on average", 1.98, []string{text, text, text, text}, 8},
		{"a role alone is no token", 0, []string{`{"choices":[{"delta":{"role":"assistant","content":""}}]}`}, 0},
		{"reasoning is content", 0, []string{`{"choices":[{"delta":{"reasoning":"a"}}]}`, `{"choices":[{"delta":{"reasoning_content":"a"}}]}`}, 2},
		{"a tool call is content", 0, []string{`{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}`}, 1},
		{"a completion's text is content", 0, []string{`{"choices":[{"text":"a"}]}`, `{"choices":[{"text":""}]}`}, 1},
		{"token ids count between usages", 0, []string{`{"choices":[{"token_ids":[1]}],"usage":{"completion_tokens":1}}`, `{"choices":[{"token_ids":[1,2]}]}`, `{"choices":[{"token_ids":[3]}]}`}, 4},
		{"the next usage has counted them", 0, []string{`{"choices":[{"token_ids":[1]}],"usage":{"completion_tokens":1}}`, `{"choices":[{"token_ids":[1,2]}]}`, `{"choices":[{"token_ids":[3]}],"usage":{"completion_tokens":4}}`}, 4},
		{"ids that a usage has seen before them count behind it", 0, []string{`{"choices":[],"usage":{"completion_tokens":0}}`, `{"choices":[{"token_ids":[1,2]}]}`}, 2},
		{"chunks count between usages where there are no ids", 2, []string{`{"choices":[],"usage":{"completion_tokens":1}}`, text, text}, 5},
		{"a usage corrects what chunks were taken for", 3, []string{text, text, `{"choices":[],"usage":{"completion_tokens":4}}`}, 4},
		{"a usage without completion tokens does not count", 0, []string{text, `{"choices":[],"usage":{"prompt_tokens":4}}`, `{"choices":[],"usage":null}`}, 1},
		{"what is not JSON counts nothing", 0, []string{text, `{"choices":[{"token_ids":[1,2`}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			options := nothing
			options.TokensPerChunk = tt.perChunk
			f := NewFilter(options)
			for _, data := range tt.events {
				f.Event(event(t, data), nil)
			}
			require.Equal(t, tt.want, f.Tokens())
		})
	}
}

func TestMirrorEditsWhatTheClientDidNotAskFor(t *testing.T) {
	usage := Options{Usage: true, Cached: 7, Choice: -1}
	all := Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 7, Choice: -1}
	fan := Options{Usage: true, Cached: -1, ID: []byte(`a"b`), Created: 12, Choice: 3, DropFinalUsage: true}
	const final = `{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}}`
	const counted = `{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":9}}}`
	for _, tt := range []struct {
		name    string
		options Options
		data    string
		want    string // "" for dropped
	}{
		{"token ids go, wherever they stand", nothing, `{"prompt_token_ids":[1],"choices":[{"token_ids":[1],"index":0,"text":"a","prompt_token_ids":[1]}],"x":1}`, `{"choices":[{"index":0,"text":"a"}],"x":1}`},
		{"the first, middle and last member may go, and all of them", nothing, `{"usage":1,"prompt_token_ids":[], "kv_transfer_params":{}}`, `{ }`},
		{"white space does not matter", nothing, `{ "usage" : { } , "a" : 1 , "prompt_token_ids" : [ 1 ] }`, `{  "a" : 1  }`},
		{"a key is removed as often as it comes", nothing, `{"usage":1,"a":2,"usage":3}`, `{"a":2}`},
		{"numbers, order and escapes stay", nothing, `{"b":1e400,"a":1.0,"s":"\u00e9\/","usage":null,"n":12345678901234567890}`, `{"b":1e400,"a":1.0,"s":"\u00e9\/","n":12345678901234567890}`},
		{"a key in a text is text", nothing, `{"choices":[{"delta":{"content":"\"usage\":{},\\\""}}],"usage":{}}`, `{"choices":[{"delta":{"content":"\"usage\":{},\\\""}}]}`},
		{"the same key elsewhere is not ours", nothing, `{"choices":[{"delta":{"usage":1,"token_ids":[1]}}],"x":{"usage":2}}`, `{"choices":[{"delta":{"usage":1,"token_ids":[1]}}],"x":{"usage":2}}`},
		{"kv_transfer_params go even where token ids stay", all, `{"choices":[{"kv_transfer_params":{"a":1},"token_ids":[1]}],"kv_transfer_params":{"b":1}}`, `{"choices":[{"token_ids":[1]}]}`},
		{"the usage of a chunk is null for who asked for the last only", usage, `{"choices":[{"text":"a"}],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":9}}}`, `{"choices":[{"text":"a"}],"usage":null}`},
		{"continuous usage without usage means nothing", Options{ContinuousUsage: true, Choice: -1}, `{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}`, `{"choices":[{"text":"a"}]}`},
		{"the last usage goes as a whole event", nothing, counted, ``},
		{"the last usage stays, with prefill's cached tokens", usage, counted, `{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}}}`},
		{"continuous usage has prefill's cached tokens too", all, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens_details":{"cached_tokens":9},"completion_tokens":1}}`, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens_details":{"cached_tokens":7},"completion_tokens":1}}`},
		{"unknown cached tokens take their details with them", Options{Usage: true, Cached: -1, Choice: -1}, final, `{"choices":[],"usage":{"prompt_tokens":9}}`},
		{"prefill's cached tokens stand where decode reports none", usage, `{"choices":[],"usage":{"completion_tokens":1}}`, `{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":7}}}`},
		{"also in place of null", usage, `{"choices":[],"usage":{"prompt_tokens_details":null,"completion_tokens":1}}`, `{"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":7},"completion_tokens":1}}`},
		{"also beside other details", usage, `{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"audio_tokens":1}}}`, `{"choices":[],"usage":{"completion_tokens":1,"prompt_tokens_details":{"audio_tokens":1,"cached_tokens":7}}}`},
		{"also in empty ones", all, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens_details":{ },"completion_tokens":1}}`, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens_details":{ "cached_tokens":7},"completion_tokens":1}}`},
		{"not in a usage that goes", nothing, `{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}`, `{"choices":[{"text":"a"}]}`},
		{"decode's own count stays where it computed the prompt", Options{Usage: true, Cached: OwnCached, Choice: -1}, final, final},
		{"other details stay", Options{Usage: true, Cached: -1, Choice: -1}, `{"choices":[],"usage":{"prompt_tokens_details":{"audio_tokens":1,"cached_tokens":9}}}`, `{"choices":[],"usage":{"prompt_tokens_details":{"audio_tokens":1}}}`},
		{"details without cached tokens are left alone", Options{Usage: true, Cached: -1, Choice: -1}, `{"choices":[],"usage":{"prompt_tokens_details":{}}}`, `{"choices":[],"usage":{"prompt_tokens_details":{}}}`},
		{"null details are left alone", usage, `{"choices":[],"usage":{"prompt_tokens_details":null}}`, `{"choices":[],"usage":{"prompt_tokens_details":null}}`},
		{"a leg of a fan-out speaks for the whole", fan, `{"id":"x","created":1,"choices":[{"index":0,"text":"a"}]}`, `{"id":"a\"b","created":12,"choices":[{"index":3,"text":"a"}]}`},
		{"a leg of a fan-out does not tell its usage", fan, counted, ``},
		{"a chunk that only carries token ids goes", nothing, `{"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[4]}]}`, ``},
		{"but stays for who asked for them", all, `{"choices":[{"index":0,"delta":{},"finish_reason":null,"token_ids":[4]}]}`, `{"choices":[{"index":0,"delta":{},"finish_reason":null,"token_ids":[4]}]}`},
		{"or if it finishes", nothing, `{"choices":[{"delta":{},"finish_reason":"stop","token_ids":[4]}]}`, `{"choices":[{"delta":{},"finish_reason":"stop"}]}`},
		{"or has logprobs", nothing, `{"choices":[{"delta":{},"logprobs":{"content":[]},"token_ids":[4]}]}`, `{"choices":[{"delta":{},"logprobs":{"content":[]}}]}`},
		{"a chunk without choices and usage is none of ours", nothing, `{"choices":[],"prompt_filter_results":[]}`, `{"choices":[],"prompt_filter_results":[]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := event(t, tt.data)
			out, end := NewFilter(tt.options).Event(e, []byte("kept"))
			require.Equal(t, NotEnded, end)
			if tt.want == "" {
				require.Nil(t, out)
				return
			}
			require.NotNil(t, out)
			if tt.want == tt.data {
				require.Same(t, &e.Raw[0], &out[0], "an event that does not change is not copied")
				return
			}
			require.Equal(t, "keptdata: "+tt.want+"\n\n", string(out))
		})
	}
}

func TestMirrorKeepsTheFrame(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"line ends and the missing space", "data:{\"usage\":1}\r\n\r\n", "data:{}\r\n\r\n"},
		{"other lines", "id: 1\ndata: {\"usage\":1}\n: c\n\n", "id: 1\ndata: {}\n: c\n\n"},
		{"several data lines", "id: 1\r\ndata: {\"usage\":1,\r\ndata: \"a\":\r\ndata: 2}\r\n\r\n", "id: 1\ndata: {\ndata: \"a\":\ndata: 2}\n\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			client, _ := relay(NewFilter(nothing), frames(t, tt.in))
			require.Equal(t, tt.want, string(client))
		})
	}
}

func TestMirrorJudges(t *testing.T) {
	for _, tt := range []struct {
		name     string
		stream   string
		want     End
		started  bool
		finished string
	}{
		{"a comment says nothing about the KV", ": keep-alive\n\n", NotEnded, false, ""},
		{"a data event says that decode has the KV", "data: {\"choices\":[]}\n\n", NotEnded, true, ""},
		{"a finish is a finish", "data: {\"choices\":[{\"finish_reason\":\"length\"}]}\n\n", NotEnded, true, "length"},
		{"an unknown finish too", "data: {\"choices\":[{\"finish_reason\":\"tired\"}]}\n\n", NotEnded, true, "tired"},
		{"an error as the finish is a failure", "data: {\"choices\":[{\"finish_reason\":\"error\"}]}\n\n", Refused, false, ""},
		{"an abort nobody asked for is a failure", "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n", Refused, false, ""},
		{"recomputed is no finish, whatever stands beside it", "data: {\"choices\":[{\"finish_reason\":\"stop\",\"stop_reason\":\"recomputed\"}]}\n\n", Preempted, true, ""},
		{"a stop string and a stop token are a stop", "data: {\"choices\":[{\"finish_reason\":\"stop\",\"stop_reason\":17}]}\n\n", NotEnded, true, "stop"},
		{"[DONE] alone is an end, not a finish", Done, Short, false, ""},
		{"a null error is none", "data: {\"error\":null,\"choices\":[]}\n\n", NotEnded, true, ""},
		{"text that looks like an error is text", "data: {\"choices\":[{\"text\":\"\\\"error\\\":1\"}]}\n\n", NotEnded, true, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := NewFilter(nothing)
			events := frames(t, tt.stream)
			require.Len(t, events, 1)
			_, end := f.Event(events[0], nil)
			require.Equal(t, tt.want, end)
			require.Equal(t, tt.started, f.Started(), "started")
			require.Equal(t, tt.finished, f.FinishReason())
			require.Equal(t, tt.finished != "", f.Finished())
		})
	}
}

func TestFailureReadsEveryShape(t *testing.T) {
	for _, tt := range []struct {
		name, data string
		want       Failure
	}{
		{"new", `{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}`, Failure{"m", "BadRequestError", "400", 400}},
		{"old", `{"object":"error","message":"m","type":"NotFoundError","param":null,"code":404}`, Failure{"m", "NotFoundError", "404", 404}},
		{"Rust, by the code's name", `{"error":{"message":"m","type":"server_error","code":"server_error"}}`, Failure{"m", "server_error", "server_error", 500}},
		{"Rust, by the type", `{"error":{"message":"m","type":"invalid_request_error","code":"model_not_found"}}`, Failure{"m", "invalid_request_error", "model_not_found", 400}},
		{"Rust, by the code's name where the type says nothing", `{"error":{"message":"m","type":"error","code":"model_not_found"}}`, Failure{"m", "error", "model_not_found", 404}},
		{"by the type alone", `{"error":{"message":"m","type":"NotFoundError"}}`, Failure{"m", "NotFoundError", "", 404}},
		{"a plain text", `{"error":"boom"}`, Failure{"boom", "", "", 500}},
		{"a number in a string", `{"error":{"message":"m","code":"503"}}`, Failure{"m", "", "503", 503}},
		{"a code that is no error status", `{"error":{"message":"m","code":200}}`, Failure{"m", "", "200", 500}},
		{"a client that left, as a hop in between saw it", `{"error":{"message":"m","code":499}}`, Failure{"m", "", "499", 500}},
		{"nothing said", `{"error":{}}`, Failure{"the decode engine failed and did not say why", "", "", 500}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := NewFilter(nothing)
			e := event(t, tt.data)
			out, end := f.Event(e, nil)
			require.Equal(t, Refused, end)
			require.Equal(t, string(e.Raw), string(out))
			require.Equal(t, tt.want, f.Failure())
			require.False(t, f.Started(), "a failure says nothing about the KV")
		})
	}
}

func TestMirrorLearnsTokensPerChunk(t *testing.T) {
	run := func(before float64, events ...string) float64 {
		f := NewFilter(nothing)
		for _, data := range events {
			f.Event(event(t, data), nil)
		}
		return f.TokensPerChunk(before)
	}
	const text, usage = `{"choices":[{"text":"a"}]}`, `{"choices":[],"usage":{"completion_tokens":12}}`
	require.InDelta(t, 1.2, run(0, text, text, text, text, usage), 1e-9, "the first leg moves it from 1 by a tenth")
	require.InDelta(t, 1.2, run(1, text, text, text, text, usage), 1e-9, "so do later ones")
	require.InDelta(t, 1.5, run(1.5, text, text, text, text), 1e-9, "a leg without a true count does not")
	require.Zero(t, run(0, text, text, usage), "nor does one of few chunks: a whole tool call may come as one")
	per := 0.0
	for range 100 {
		per = run(per, text, text, text, text, `{"choices":[],"usage":{"completion_tokens":4000}}`)
	}
	require.InDelta(t, maxPerChunk, per, 1e-3, "no engine makes more at once")
}

func TestDriftComparesWithTheFinalUsage(t *testing.T) {
	f := NewFilter(nothing)
	f.Event(event(t, `{"choices":[{"text":"a"}]}`), nil)
	_, known := f.Drift()
	require.False(t, known)
	f.Event(event(t, `{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":4}}`), nil)
	drift, known := f.Drift()
	require.True(t, known)
	require.Equal(t, -3, drift)
	u, ok := f.Usage()
	require.True(t, ok)
	require.Equal(t, Usage{Prompt: 2, Completion: 4, Total: 6, Cached: -1}, u)
}

func TestWhatDecodeSaysOfAPromptItComputed(t *testing.T) {
	options := nothing
	transcript := Transcript{KeepPrompt: true}
	options.Cached, options.Transcript = OwnCached, &transcript
	f := NewFilter(options)
	f.Event(event(t, `{"choices":[{"text":"a","token_ids":[9],"prompt_token_ids":[1,2, 3]}]}`), nil)
	f.Event(event(t, `{"choices":[{"text":"b","token_ids":[8],"prompt_token_ids":null}]}`), nil)
	require.Equal(t, []int{3, 3}, []int{f.Prompt(), transcript.Prompt}, "null is no list of one id")
	f.Event(event(t, `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}}`), nil)
	require.Equal(t, "[1,2, 3]", string(transcript.PromptIDs))
	u, _ := f.Usage()
	require.Equal(t, 2, u.Cached)
	f.Reset(options)
	f.Event(event(t, `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}`), nil)
	u, _ = f.Usage()
	require.Equal(t, -1, u.Cached, "it did not say")
	f.Reset(options)
	f.Event(event(t, `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`), nil)
	u, _ = f.Usage()
	require.Equal(t, -1, u.Cached, "no more than the prompt can be cached")
}

func TestResetForgetsTheLegBefore(t *testing.T) {
	f := NewFilter(Options{ID: []byte("x"), Choice: -1})
	relay(f, frames(t, `data: {"choices":[{"text":"a","finish_reason":"stop","token_ids":[1]}],"usage":{"completion_tokens":4}}`+"\n\n"+`data: {"error":"boom"}`+"\n\n"))
	require.NotZero(t, f.Tokens())
	f.Reset(nothing)
	fresh := NewFilter(nothing)
	fresh.id, fresh.marks, fresh.preparedUsage, fresh.details = f.id, f.marks, f.preparedUsage, f.details // memory it may keep
	require.Equal(t, fresh, f)
}

// A filter is used again for many streams, so what one strange event needed must not stay.
func TestAFilterDoesNotKeepWhatARareEventNeeded(t *testing.T) {
	large := strings.Repeat("x", maxKeptBuffer)
	f := NewFilter(Options{ID: []byte(large), Usage: true, Cached: OwnCached, Choice: -1})
	f.Event(event(t, `{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":4,"note":"`+large+`"}}`), nil)
	require.Greater(t, len(f.MissingUsage(nil)), len(large), "the client gets it all the same")
	f.Reset(nothing)
	require.LessOrEqual(t, cap(f.id), maxKeptBuffer)
	require.LessOrEqual(t, cap(f.preparedUsage), maxKeptBuffer)
}

func TestDetailsOfTheUsageAreKeptWhileTheyAreSmall(t *testing.T) {
	f := NewFilter(Options{Usage: true, Cached: OwnCached, Choice: -1, DropFinalUsage: true})
	usage := func(name string) string {
		return `{"choices":[],"usage":{"completion_tokens":4,"prompt_tokens_details":{"` + name + `":3}}}`
	}
	f.Event(event(t, usage("audio_tokens")), nil)
	require.Equal(t, map[string]int{"audio_tokens": 3}, f.PromptDetails())
	f.Event(event(t, usage(strings.Repeat("x", maxDetails))), nil)
	require.Empty(t, f.PromptDetails(), "an engine may send what it likes, and the filter lasts as long as the stream")
	require.LessOrEqual(t, cap(f.details), maxDetails)
	u, _ := f.Usage()
	require.Equal(t, 4, u.Completion, "the counts are those of the usage all the same")
}

func TestUsageAndErrorEventsAreSafe(t *testing.T) {
	got := string(UsageEvent(nil, []byte("id\"\n\x01\xff"), []byte("m"), 5, true, Usage{Prompt: 1, Completion: 2, Total: 3, Cached: 0},
		map[string]int{"z": 1, "a": 2, "cached_tokens": 9}))
	require.Equal(t, `data: {"id":"id\"\n\u0001`+"\uFFFD"+`","object":"chat.completion.chunk","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":1,"total_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":0,"a":2,"z":1}}}`+"\n\n", got)
	got = string(UsageEvent(nil, []byte("a"), []byte("m"), 5, false, Usage{Cached: -1}, nil))
	require.Equal(t, `data: {"id":"a","object":"text_completion","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":0,"total_tokens":0,"completion_tokens":0}}`+"\n\n", got)
	require.Equal(t, `data: {"error":{"message":"a \"b\"","type":"server_error","param":null,"code":"x"}}`+"\n\n", string(ErrorEvent(nil, `a "b"`, "server_error", "x")))
	require.True(t, strings.Contains(string(ErrorEvent(nil, "m", "t", "")), `"code":null`))
}

// A count that no machine's number holds is no missing count.
func TestACountOfManyDigitsIsTooLarge(t *testing.T) {
	const huge = "9223372036854775807"
	for name, row := range map[string]struct {
		form   Form
		stream string
	}{
		"chat":     {Chunks, `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":` + huge + `}}` + "\n\n"},
		"prompt":   {Chunks, `data: {"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":` + huge + `,"completion_tokens":1}}` + "\n\n"},
		"message":  {Messages, messageStart + blockDelta + strings.Replace(messageDelta, `"output_tokens":3`, `"output_tokens":`+huge, 1)},
		"response": {Responses, created + delta + strings.Replace(completed, `"output_tokens":3`, `"output_tokens":`+huge, 1)},
		"generate": {Generated, `data: {"text":"a","output_ids":[1],"meta_info":{"id":"x","finish_reason":null,"prompt_tokens":3,"completion_tokens":` + huge + `,"cached_tokens":0}}` + "\n\n"},
	} {
		out, end, a := feed(row.stream, row.form, Options{Cached: OwnCached, Choice: -1, MaxTokens: 9, Context: 100}, 1<<20)
		require.Equal(t, Broken, end, name)
		require.ErrorIs(t, a.Err(), ErrBadCount, name)
		require.NotContains(t, out, huge, name)
	}
}

// An engine that was asked for a model by another name tells that name.
func TestTheClientReadsTheNameThatItGave(t *testing.T) {
	const theirs, ours = `"model":"base:x"`, `"model":"x"`
	chat := fmt.Sprintf(`data: {"id":"1","object":"chat.completion.chunk","created":1,%s,"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}`+"\n\n", theirs, `\"model\":\"base:x\"`)
	last := fmt.Sprintf(`data: {"id":"1","object":"chat.completion.chunk","created":1,%s,"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n", theirs)
	whole := fmt.Sprintf(`data: {"id":"1","object":"chat.completion","created":1,%s,"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":null}`+"\n\n", theirs)
	message := `{"id":"m","type":"message","role":"assistant","content":[],` + theirs + `,"stop_reason":"end_turn","usage":{"input_tokens":9,"output_tokens":1}}`
	begins := strings.Replace(messageStart, `"id":"m"`, `"id":"m",`+theirs, 1)
	for _, row := range []struct {
		name, stream string
		options      Options
	}{
		{"a stream", chat + chat + last, Options{}},
		{"a stream that goes on", chat + last, Options{Continuation: &Continuation{Head: Head{ID: []byte(`"1"`), Model: []byte(`"base:x"`)}}}},
		{"an answer in one piece", whole, Options{Unstreamed: true, ContinuousUsage: true, Usage: true}},
		{"a message", "data: " + message + "\n\n", Options{Form: Messages, Unstreamed: true}},
		{"the events of a message", begins + blockStart + blockDelta + messageDelta + messageStop, Options{Form: Messages}},
	} {
		row.options.Choice, row.options.Cached, row.options.Model = -1, OwnCached, "x"
		out, _, _ := feed(row.stream, row.options.Form, row.options, 1<<20)
		require.Equal(t, strings.ReplaceAll(row.stream, theirs, ours), out, row.name)
		row.options.Model = "base:x"
		out, _, _ = feed(row.stream, row.options.Form, row.options, 1<<20)
		require.Equal(t, row.stream, out, row.name)
	}
}

func TestAnEventCostsNoAllocation(t *testing.T) {
	for _, tt := range []struct {
		name    string
		options Options
	}{
		{"forwarded as it is", Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: 9, Choice: -1}},
		{"token ids and usage taken out", nothing},
		{"cached tokens overwritten", Options{Usage: true, ContinuousUsage: true, Cached: math.MaxInt32, Choice: -1}},
		{"a leg of a fan-out", Options{Usage: true, Cached: 3, ID: []byte("chatcmpl-one"), Created: 1790000000, Choice: 5}},
		{"a model by another name", Options{Usage: true, ContinuousUsage: true, Cached: OwnCached, Choice: -1, Model: "a long name of an adapter of this model"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, filter := NewFramer(0), NewFilter(tt.options)
			dst := make([]byte, 0, 4096)
			one := func() {
				f.Feed(chunk)
				f.Feed(usageChunk)
				for e, ok := f.Next(); ok; e, ok = f.Next() {
					filter.Event(e, dst[:0])
				}
			}
			one() // buffers grow once
			require.Zero(t, testing.AllocsPerRun(100, one))
			require.Equal(t, 2047, filter.Tokens())
		})
	}
}

var (
	chunk      = []byte(`data: {"id":"chatcmpl-ek-7f3c-d1","object":"chat.completion.chunk","created":1790000000,"model":"dsv3","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":[1234]}],"usage":{"prompt_tokens":1024,"total_tokens":3070,"completion_tokens":2046}}` + "\n\n")
	usageChunk = []byte(`data: {"id":"chatcmpl-ek-7f3c-d1","object":"chat.completion.chunk","created":1790000000,"model":"dsv3","choices":[],"usage":{"prompt_tokens":1024,"total_tokens":3071,"completion_tokens":2047,"prompt_tokens_details":{"cached_tokens":1008}}}` + "\n\n")
	plainChunk = []byte(`data: {"id":"chatcmpl-ek-7f3c-d1","object":"chat.completion.chunk","created":1790000000,"model":"dsv3","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],"usage":{"prompt_tokens":10,"total_tokens":14,"completion_tokens":4}}` + "\n\n")
)

// BenchmarkEvent is framing and filtering of one event, at 64 events a read.
func BenchmarkEvent(b *testing.B) {
	for _, bb := range []struct {
		name    string
		options Options
		data    []byte
	}{
		{"frame+count", Options{Usage: true, ContinuousUsage: true, TokenIDs: true, Cached: -1, Choice: -1}, plainChunk},
		{"frame+count+edit", nothing, chunk},
		{"frame+count+fan-out", Options{Cached: -1, ID: []byte("chatcmpl-one"), Created: 1, Choice: 5}, chunk},
	} {
		b.Run(bb.name, func(b *testing.B) {
			f, filter := NewFramer(0), NewFilter(bb.options)
			const batch = 64
			read, dst := []byte(strings.Repeat(string(bb.data), batch)), make([]byte, 0, 4096)
			b.SetBytes(int64(len(bb.data)))
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if n%batch == 0 {
					f.Feed(read)
				}
				e, _ := f.Next()
				filter.Event(e, dst[:0])
				n++
			}
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

func BenchmarkFramerAlone(b *testing.B) {
	f := NewFramer(0)
	const batch = 64
	read := []byte(strings.Repeat(string(plainChunk), batch))
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		if n%batch == 0 {
			f.Feed(read)
		}
		f.Next()
		n++
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
}

// BenchmarkFramerLineEnds is a read of short lines: those that end in CR must cost about as much as
// those that end in LF.
func BenchmarkFramerLineEnds(b *testing.B) {
	for name, line := range map[string]string{"LF": "a\n", "CR": "a\r"} {
		b.Run(name, func(b *testing.B) {
			read := bytes.Repeat([]byte(line), 32<<10)
			b.SetBytes(int64(len(read)))
			for b.Loop() {
				f := NewFramer(0)
				f.Feed(read)
				for _, more := f.Next(); more; _, more = f.Next() {
				}
			}
		})
	}
}

// BenchmarkFramerGathers is one event that comes in many reads: what a byte costs must
// not grow with the length of the event.
func BenchmarkFramerGathers(b *testing.B) {
	for _, reads := range []int{16, 1024} {
		b.Run(strconv.Itoa(reads*4)+"KiB", func(b *testing.B) {
			f := NewFramer(0)
			read := bytes.Repeat([]byte("x"), 4<<10)
			b.SetBytes(int64(reads * len(read)))
			for b.Loop() {
				for range reads {
					f.Feed(read)
					f.Next()
				}
				f.Feed([]byte("\n\n"))
				if _, whole := f.Next(); !whole {
					b.Fatal("the event has not ended")
				}
			}
		})
	}
}

func TestAnAnswerHasNoMoreTokensThanItMay(t *testing.T) {
	ids := func(n int) string {
		return `{"choices":[{"text":"a","token_ids":[1` + strings.Repeat(",1", n-1) + `]}]}`
	}
	const text = `{"choices":[{"index":0,"delta":{"content":"a"}}]}`
	for _, tt := range []struct {
		name   string
		events []string
		want   error
		tokens int // counted before the fault
	}{
		{"as many as asked for", []string{ids(4), `{"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":4}}`}, nil, 4},
		{"some more, of an engine that speculates", []string{ids(4 + allowedExtraTokens)}, nil, 4 + allowedExtraTokens},
		{"ids without end", []string{ids(4), ids(20), ids(20)}, ErrTooManyTokens, 24},
		{"all at once", []string{ids(100)}, ErrTooManyTokens, 0},
		{"a usage that says so", []string{text, `{"choices":[],"usage":{"completion_tokens":1000000000000000}}`}, ErrBadCount, 1},
		{"a usage that understates the ids", []string{`{"choices":[{"text":"a","token_ids":[` + strings.Repeat("1,", 99) + `1]}],"usage":{"completion_tokens":1}}`}, ErrTooManyTokens, 0},
		{"chunks without end", slices.Repeat([]string{text}, 500), ErrTooManyTokens, chunksPerToken * (4 + allowedExtraTokens)},
		{"an answer beyond the context", []string{`{"choices":[],"usage":{"prompt_tokens":14,"completion_tokens":33}}`}, ErrBadCount, 0},
		{"a prompt beyond the context", []string{`{"choices":[],"usage":{"prompt_tokens":1000000000000000,"completion_tokens":1}}`}, ErrBadCount, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := NewFilter(Options{MaxTokens: 4, Context: 14, Cached: -1, Choice: -1})
			for _, data := range tt.events {
				if out, end := f.Event(event(t, data), nil); end == Broken {
					require.Nil(t, out)
					break
				}
			}
			require.Equal(t, tt.want, f.Fault())
			require.Equal(t, tt.tokens, f.Tokens())
		})
	}
}

// A list of the prompt's token ids is a count, too.
func TestAPromptHasNoMoreTokenIDsThanItsContext(t *testing.T) {
	for n, want := range map[int]End{14 + allowedExtraTokens: NotEnded, 15 + allowedExtraTokens: Broken} {
		f := NewFilter(Options{MaxTokens: 4, Context: 14, Cached: -1, Choice: -1, Transcript: &Transcript{}})
		_, end := f.Event(event(t, `{"choices":[{"text":"a"}],"prompt_token_ids":[1`+strings.Repeat(",1", n-1)+`]}`), nil)
		require.Equal(t, want, end)
		if want == Broken {
			require.Equal(t, ErrBadCount, f.Fault())
			require.Zero(t, f.Prompt())
		}
	}
}

// Some engines tell the usage with the finish_reason and in no event of its own,
// which is where clients look for it.
func TestAUsageOnTheLastChunkIsOwed(t *testing.T) {
	const text, last = `{"id":"x","model":"m","choices":[{"text":"a"}],"usage":{"completion_tokens":1}}`, `{"id":"x","created":3,"model":"m","kv_transfer_params":{},"choices":[{"text":"b","finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}`
	asked := Options{Usage: true, Cached: 4, Choice: -1}
	leg := Options{Usage: true, Cached: -1, Choice: 1, ID: []byte("whole"), Created: 7}
	with := func(change func(*Options)) Options { o := asked; change(&o); return o }
	for _, tt := range []struct {
		name    string
		options Options
		events  []string
		want    string
	}{
		{"to who asked for it, with prefill's cached tokens", asked, []string{text, last}, `{"id":"x","created":3,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`},
		{"as part of a whole", leg, []string{last}, `{"id":"whole","created":7,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}`},
		{"not before the end", asked, []string{text}, ""},
		{"not where the engine sends it", asked, []string{last, `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}`}, ""},
		{"not to who has it in every chunk", with(func(o *Options) { o.ContinuousUsage = true }), []string{last}, ""},
		{"nor to who did not ask", nothing, []string{last}, ""},
		{"nor of a leg whose usage is summed", with(func(o *Options) { o.DropFinalUsage = true }), []string{last}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := NewFilter(tt.options)
			for _, data := range tt.events {
				f.Event(event(t, data), nil)
			}
			got := string(f.MissingUsage([]byte("kept")))
			if tt.want == "" {
				require.Equal(t, "kept", got)
				return
			}
			require.Equal(t, "keptdata: "+tt.want+"\n\n", got)
			require.Equal(t, "kept", string(f.MissingUsage([]byte("kept"))), "once")
			require.Equal(t, 2, f.Tokens())
		})
	}
}

// Source: vLLM 0.33, request_finished in nixl/pull_scheduler.py, and the streams of
// entrypoints/openai.
func TestWhatAnEngineKeepsIsSeenAtTheEnd(t *testing.T) {
	for _, row := range []struct {
		name, event string
		form        Form
		kept        bool
	}{
		{"the end of the sequence", `{"choices":[{"finish_reason":"stop","stop_reason":null}]}`, Chunks, true},
		{"a stop token", `{"choices":[{"finish_reason":"stop","stop_reason":17}]}`, Chunks, true},
		{"the length", `{"choices":[{"finish_reason":"length","stop_reason":null}]}`, Chunks, true},
		{"a call of a tool", `{"choices":[{"finish_reason":"tool_calls","stop_reason":null}]}`, Chunks, true},
		{"a text of the request's stop, at which the front end ends it", `{"choices":[{"finish_reason":"stop","stop_reason":"END"}],"kv_transfer_params":null}`, Chunks, false},
		{"such a text in the last token that the engine makes", `{"choices":[{"finish_reason":"stop","stop_reason":"END"}],"kv_transfer_params":{"do_remote_decode":true}}`, Chunks, true},
		{"repetition", `{"choices":[{"finish_reason":"repetition","stop_reason":null}]}`, Chunks, false},
		{"no end", `{"choices":[{"finish_reason":null}],"kv_transfer_params":null}`, Chunks, false},
		{"a message's length", `{"type":"message","stop_reason":"max_tokens","usage":{"input_tokens":1,"output_tokens":3}}`, Messages, true},
		{"a text that a message stops at", `{"type":"message","stop_reason":"stop_sequence","usage":{"input_tokens":1,"output_tokens":3}}`, Messages, false},
		{"a response's end", `{"object":"response","status":"completed","usage":{"input_tokens":1,"output_tokens":3}}`, Responses, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			filter := NewFilter(Options{Form: row.form, Choice: -1})
			f := NewFramer(0)
			f.Feed([]byte("data: " + row.event + "\n\n"))
			e, ok := f.Next()
			require.True(t, ok)
			out, end := filter.Event(e, nil)
			require.Equal(t, NotEnded, end)
			require.NotNil(t, out)
			require.Equal(t, row.kept, filter.Kept())
		})
	}
}

// An event that is too large is not read, so that its id and its index stay as the engine wrote
// them: for one of several answers, a client would take it for a part of another answer.
func TestALargeEventOfOneOfSeveralAnswersIsRefused(t *testing.T) {
	for form, event := range map[Form]string{
		Chunks:    `{"id":"e","choices":[{"index":0,"delta":{"content":"` + strings.Repeat("a", 100) + `"}}]}`,
		Tokens:    `{"request_id":"e","choices":[{"index":0,"token_ids":[` + strings.Repeat("1,", 100) + `1]}]}`,
		Generated: `{"text":"` + strings.Repeat("a", 100) + `","output_ids":[1],"meta_info":{"id":"e","completion_tokens":1}}`,
	} {
		for _, leg := range []bool{false, true} {
			filter, f := NewFilter(Options{Form: form, ID: []byte("ours"), Choice: 1, DropDone: leg}), NewFramer(64)
			f.Feed([]byte("data: " + event + BlankLine))
			e, ok := f.Next()
			require.True(t, ok)
			require.Equal(t, KindOpaque, e.Kind)
			out, end := filter.Event(e, nil)
			if !leg {
				require.Equal(t, NotEnded, end)
				require.NotNil(t, out, "its client gets it all the same")
				continue
			}
			require.Equal(t, Broken, end)
			require.Empty(t, out)
			require.ErrorIs(t, filter.Fault(), ErrLargeEvent)
		}
	}
}

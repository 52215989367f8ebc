package admission

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"evenkeel/gateway/config"
	"evenkeel/gateway/edge"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/openai/answertest"
	"evenkeel/mooncake"
)

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
	responsesPath  = "/v1/responses"
	messagesPath   = "/v1/messages"
	countPath      = "/v1/messages/count_tokens"
	embeddingsPath = "/v1/embeddings"
	speechPath     = "/v1/audio/transcriptions"
)

// fault is what an answer in OpenAI's shape says of a refusal, or one in Anthropic's, which has a
// kind and a message only.
type fault struct{ code, param, kind, message string }

func faultOf(t *testing.T, ctx *fasthttp.RequestCtx) (f fault) {
	t.Helper()
	require.Equal(t, "application/json", string(ctx.Response.Header.ContentType()))
	body := string(ctx.Response.Body())
	if strings.HasPrefix(string(ctx.Path()), messagesPath) {
		f.kind, f.message = answertest.Refused(t, body)
		return f
	}
	var said struct {
		Error struct {
			Message, Type, Code string
			Param               *string
		}
	}
	require.NoError(t, json.Unmarshal([]byte(body), &said), body)
	require.NotEmpty(t, said.Error.Message)
	f = fault{code: said.Error.Code, kind: said.Error.Type, message: said.Error.Message}
	if said.Error.Param != nil {
		f.param = *said.Error.Param
	}
	return f
}

// form is a request to transcribe a file, and its content type.
func form(t *testing.T, file string, fields ...string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = io.WriteString(part, file)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String(), "Content-Type: " + w.FormDataContentType()
}

// Whatever engines must not get is refused with a status, a code and the member that is wrong, in
// the words of its API.
func TestWhatEnginesMustNotGetIsRefused(t *testing.T) {
	h := open(t)
	const message = `"model":"m","messages":[{"role":"user","content":"a"}]`
	turn := func(content string) string {
		return `{"model":"m","max_tokens":5,"messages":[{"role":"user","content":` + content + `}]}`
	}
	before := func(member string) string {
		return strings.Replace(turn(`"a"`), `"max_tokens"`, member+`,"max_tokens"`, 1)
	}
	respond := func(more string) string { return `{` + more + `"model":"m","input":"a"}` }
	const elsewhere = `{"type":"url","url":"http://10.0.0.1/"}`
	whole, kind := form(t, "x", "model", "m")
	urgent, urgentKind := form(t, "x", "model", "m", "priority", "-1")
	double, doubleKind := form(t, "x", "model", "m", "model", "ref")
	for _, row := range []struct {
		name, path, body string
		status           int
		code, param      string // of Anthropic's API, which has neither: what the message says, and nothing
		header           string
	}{
		{"a model that no engine has", chatPath, strings.Replace(chat, `"m"`, `"gpt-9"`, 1), 404, "model_not_found", "model", ""},
		{"malformed JSON", chatPath, `{` + message, 400, "invalid_json", "", ""},
		{"no JSON at all", completionPath, `hello`, 400, "invalid_json", "", ""},
		{"an empty body", completionPath, ``, 400, "invalid_json", "", ""},
		{"a list", chatPath, `[]`, 400, "invalid_json", "", ""},
		{"bytes behind the object", chatPath, `{` + message + `} x`, 400, "invalid_json", "", ""},
		{"NaN", chatPath, `{"temperature":NaN,` + message + `}`, 400, "invalid_json", "", ""},
		{"too deep", chatPath, `{"x":` + strings.Repeat("[", 70) + strings.Repeat("]", 70) + `,` + message + `}`, 400, "invalid_json", "", ""},
		{"a key twice", chatPath, `{"max_tokens":3,"max_tokens":4,` + message + `}`, 400, "duplicate_key", "max_tokens", ""},
		{"a key twice, once escaped", chatPath, `{"stream":false,"str\u0065am":true,` + message + `}`, 400, "duplicate_key", "stream", ""},
		{"a key of ours twice", chatPath, `{"kv_transfer_params":{},"kv_transfer_params":{"a":1},` + message + `}`, 400, "duplicate_key", "kv_transfer_params", ""},
		{"a string for a number", chatPath, `{"max_tokens":"3",` + message + `}`, 400, "invalid_type", "max_tokens", ""},
		{"a fraction for a number", chatPath, `{"n":1.5,` + message + `}`, 400, "invalid_type", "n", ""},
		{"a number for a flag", chatPath, `{"stream":1,` + message + `}`, 400, "invalid_type", "stream", ""},
		{"a string for messages", chatPath, `{"model":"m","messages":"a"}`, 400, "invalid_type", "messages", ""},
		{"n of 0", chatPath, `{"n":0,` + message + `}`, 400, "invalid_value", "n", ""},
		{"n of 9", chatPath, `{"n":9,` + message + `}`, 400, "invalid_value", "n", ""},
		{"max_tokens of 0", chatPath, `{"max_tokens":0,` + message + `}`, 400, "invalid_value", "max_tokens", ""},
		{"too many logprobs", chatPath, `{"logprobs":true,"top_logprobs":-2,` + message + `}`, 400, "invalid_value", "top_logprobs", ""},
		{"too many stop strings", chatPath, `{"stop":["1","2","3","4","5","6","7","8","9","a","b","c","d","e","f","g","h"],` + message + `}`, 400, "invalid_value", "stop", ""},
		{"a priority", chatPath, `{"priority":-5,` + message + `}`, 400, "invalid_value", "priority", ""},
		{"stream_options without a stream", chatPath, `{"stream_options":{"include_usage":true},` + message + `}`, 400, "invalid_value", "stream_options", ""},
		{"beam search", chatPath, `{"use_beam_search":true,` + message + `}`, 400, "unsupported_parameter", "use_beam_search", ""},
		{"a medium that engines would load", chatPath, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/x"}}]}]}`, 400, "invalid_value", "messages[0].content[0].image_url.url", ""},
		{"an empty prompt", completionPath, `{"model":"m","prompt":[]}`, 400, "invalid_value", "prompt", ""},
		{"a prompt of mixed kinds", completionPath, `{"model":"m","prompt":["a",1]}`, 400, "invalid_type", "prompt", ""},

		{"a response that is stored", responsesPath, respond(`"store":true,`), 400, "unsupported_parameter", "store", ""},
		{"background mode", responsesPath, respond(`"background":true,`), 400, "unsupported_parameter", "background", ""},
		{"a response before", responsesPath, respond(`"previous_response_id":"resp_1",`), 400, "unsupported_parameter", "previous_response_id", ""},
		{"a conversation", responsesPath, respond(`"conversation":"conv_1",`), 400, "unsupported_parameter", "conversation", ""},
		{"a template of a response", responsesPath, respond(`"prompt":{"id":"p"},`), 400, "unsupported_parameter", "prompt", ""},
		{"a prompt that is cut", responsesPath, respond(`"truncation":"auto",`), 400, "unsupported_parameter", "truncation", ""},
		{"a tool of the engine's", responsesPath, respond(`"tools":[{"type":"web_search"}],`), 400, "unsupported_parameter", "tools[0].type", ""},
		{"a tool twice over", responsesPath, respond(`"tools":[{"type":"function","type":"mcp"}],`), 400, "unsupported_parameter", "tools[0].type", ""},
		{"a response of no tokens", responsesPath, respond(`"max_output_tokens":0,`), 400, "invalid_value", "max_output_tokens", ""},
		{"a response with its model twice", responsesPath, respond(`"model":"m",`), 400, "duplicate_key", "model", ""},
		{"instructions of a list", responsesPath, respond(`"instructions":[],`), 400, "invalid_type", "instructions", ""},
		{"no input", responsesPath, `{"model":"m"}`, 400, "missing_required_parameter", "input", ""},
		{"an empty input", responsesPath, `{"model":"m","input":[]}`, 400, "invalid_value", "input", ""},
		{"an input of a number", responsesPath, `{"model":"m","input":5}`, 400, "invalid_type", "input", ""},
		{"an item that is kept", responsesPath, `{"model":"m","input":[{"type":"item_reference","id":"msg_1"}]}`, 400, "unsupported_parameter", "input[0].type", ""},
		{"a medium of a response", responsesPath, `{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]}`, 400, "invalid_value", "input[0].content[0].image_url", ""},
		{"a medium of a tool's", responsesPath, `{"model":"m","input":[{"type":"function_call_output","call_id":"1","output":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]}`, 400, "invalid_value", "input[0].output[0].image_url", ""},

		{"a message of no JSON", messagesPath, `{`, 400, "not acceptable", "", ""},
		{"no messages", messagesPath, `{"model":"m","max_tokens":5}`, 400, `no "messages"`, "", ""},
		{"no turn", messagesPath, `{"model":"m","max_tokens":5,"messages":[]}`, 400, "at least one", "", ""},
		{"no length", messagesPath, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, 400, `no "max_tokens"`, "", ""},
		{"a length of nothing", messagesPath, strings.Replace(turn(`"a"`), "5", "0", 1), 400, "an integer", "", ""},
		{"a length twice", messagesPath, before(`"max_tokens":6`), 400, "once", "", ""},
		{"a budget above the length", messagesPath, before(`"thinking":{"type":"enabled","budget_tokens":1024}`), 400, "below", "", ""},
		{"a budget of little", messagesPath, before(`"thinking":{"type":"enabled","budget_tokens":4}`), 400, "1024", "", ""},
		{"two ways to think", messagesPath, before(`"thinking":{"type":"enabled","type":"disabled"}`), 400, "thinking.type", "", ""},
		{"a system of a number", messagesPath, before(`"system":5`), 400, "a list of blocks", "", ""},
		{"a template of a message", messagesPath, before(`"chat_template_kwargs":{"chat_template":"x"}`), 400, "not allowed", "", ""},
		{"a block of no type", messagesPath, turn(`[{"text":"a"}]`), 400, `no "type"`, "", ""},
		{"a block of an unknown type", messagesPath, turn(`[{"type":"hologram"}]`), 400, "hologram", "", ""},
		{"a picture from anywhere", messagesPath, turn(`[{"type":"image","source":` + elsewhere + `}]`), 400, "messages[0].content[0].source.url: media must come", "", ""},
		{"a picture of two places", messagesPath, turn(`[{"type":"image","source":{"type":"base64","data":"AA","url":"http://10.0.0.1/"}}]`), 400, "source.url", "", ""},
		{"a picture that a tool found", messagesPath, turn(`[{"type":"tool_result","tool_use_id":"1","content":[{"type":"text","text":"x"},{"type":"image","source":` + elsewhere + `}]}]`), 400, "content[0].content[1].source.url", "", ""},
		{"a picture before it", messagesPath, before(`"system":[{"type":"image","source":` + elsewhere + `}]`), 400, "system[0].source.url", "", ""},
		{"a picture whose tokens to count", countPath, turn(`[{"type":"image","source":` + elsewhere + `}]`), 400, "source.url", "", ""},
		{"a count of nothing", countPath, `{"messages":[]}`, 400, "at least one", "", ""},
		{"a message for another model", messagesPath, strings.Replace(turn(`"a"`), `"m"`, `"nope"`, 1), 404, "nope", "", ""},

		{"tokens of no JSON", "/tokenize", `{"model":`, 400, "invalid_json", "", ""},
		{"embeddings of a model that is no text", embeddingsPath, `{"model":1,"input":"a"}`, 400, "invalid_type", "model", ""},
		{"embeddings with a model twice", embeddingsPath, `{"model":"m","model":"ref","input":"a"}`, 400, "duplicate_key", "model", ""},
		{"embeddings with a key of ours twice", embeddingsPath, `{"model":"m","request_id":1,"request_id":2,"input":"a"}`, 400, "duplicate_key", "request_id", ""},
		{"embeddings of another model", embeddingsPath, `{"model":"other","input":"a"}`, 404, "model_not_found", "model", ""},
		{"a turn before others", embeddingsPath, `{"model":"m","input":"a","priority":-5}`, 400, "invalid_value", "priority", ""},
		{"a template of the client's", "/tokenize", `{"model":"m","messages":[],"chat_template":"x"}`, 400, "unsupported_parameter", "chat_template", ""},
		{"a medium that is embedded", embeddingsPath, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]}`, 400, "invalid_value", "messages[0].content[0].image_url.url", ""},
		{"a medium deep in a query", "/v1/score", `{"model":"m","data_1":{"content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]},"data_2":"a"}`, 400, "invalid_value", "data_1.content[0].image_url.url", ""},
		{"an address for a plugin", "/pooling", `{"model":"m","data":{"data":["http://10.0.0.1/"],"data_format":"url"}}`, 400, "invalid_value", "data.data[0]", ""},
		{"JSON where a form belongs", speechPath, `{"model":"m"}`, 400, "invalid_type", "", ""},
		{"a form that is cut", speechPath, whole[:len(whole)-70], 400, "invalid_value", "", kind},
		{"a form with a field of ours", speechPath, urgent, 400, "unsupported_parameter", "priority", urgentKind},
		{"a form with two models", speechPath, double, 400, "duplicate_key", "model", doubleKind},
	} {
		t.Run(row.name, func(t *testing.T) {
			ctx := asking("POST", row.path, row.body, by("plain"), "X-Request-Id: theirs")
			if name, value, ok := strings.Cut(row.header, ": "); ok {
				ctx.Request.Header.Set(name, value)
			}
			h.Handle(ctx)
			require.Zero(t, h.deps.Requests.Open())
			require.Equal(t, row.status, ctx.Response.StatusCode(), string(ctx.Response.Body()))
			require.Equal(t, "theirs", string(ctx.Response.Header.Peek("X-Request-Id")))
			got := faultOf(t, ctx)
			if strings.HasPrefix(row.path, messagesPath) {
				require.Contains(t, got.message, row.code)
				require.Equal(t, map[int]string{400: "invalid_request_error", 404: "not_found_error"}[row.status], got.kind)
				return
			}
			require.Equal(t, []string{row.code, row.param, "invalid_request_error"}, []string{got.code, got.param, got.kind}, got.message)
		})
	}
}

// packed is a body in a content coding.
func packed(t *testing.T, how, body string) string {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser = gzip.NewWriter(&b)
	if how == "zstd" {
		z, err := zstd.NewWriter(&b)
		require.NoError(t, err)
		w = z
	}
	_, err := io.WriteString(w, body)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.String()
}

// A body in a coding is unpacked at each endpoint, as far as limits.body allows, and one that
// cannot be is refused.
func TestAPackedBody(t *testing.T) {
	h := open(t, func(c *config.Config) { c.Limits.Body = 64 << 10 })
	h.version = "0.32.1" // takes hand-offs of messages
	h.says(roster.Prefill, prefiller, true, "m")
	h.says(roster.Decode, decoder, true, "m")
	bodies := map[string]string{
		chatPath: chat, completionPath: short, messagesPath: messages, responsesPath: `{"model":"m","input":"hi"}`, countPath: messages,
		embeddingsPath: `{"model":"m","input":"hi"}`, "/tokenize": short, speechPath: "",
	}
	for path, body := range bodies {
		bomb := strings.Replace(chat, "hi", strings.Repeat("a ", 32<<10), 1)
		for _, row := range []struct {
			name, how, body string
			want            string // status and code; empty: it is let in
		}{
			{"gzip", "gzip", packed(t, "gzip", body), ""},
			{"zstd", "zstd", packed(t, "zstd", body), ""},
			{"no coding", "identity", body, ""},
			{"a coding that is not known", "br", chat, "415 unsupported_encoding"},
			{"two codings", "identity, gzip, zstd", packed(t, "gzip", chat), "415 unsupported_encoding"},
			{"another coding than it says", "zstd", packed(t, "gzip", chat), "400 bad_encoding"},
			{"a body that is cut off", "gzip", packed(t, "gzip", chat)[:30], "400 bad_encoding"},
			{"a bomb of gzip", "gzip", packed(t, "gzip", bomb), "413 body_too_large"},
			{"a bomb of zstd", "zstd", packed(t, "zstd", bomb), "413 body_too_large"},
		} {
			ctx := asking("POST", path, row.body, by("plain"), "Content-Encoding: "+row.how)
			if body == "" && row.want == "" {
				continue // JSON is not its form
			}
			got := h.got(ctx)
			at := path + ", " + row.name
			require.NotEmpty(t, ctx.Response.Header.Peek("X-Request-Id"), at)
			require.Equal(t, strings.HasPrefix(row.want, "415"), string(ctx.Response.Header.Peek("Accept-Encoding")) == "gzip, zstd", at)
			switch {
			case row.want == "":
				require.Equal(t, http.StatusInternalServerError, ctx.Response.StatusCode(), "%s: it is let in: %s", at, ctx.Response.Body())
			case strings.HasPrefix(path, messagesPath): // whose errors have no code
				require.Equal(t, row.want[:4], got, at)
				answertest.Refused(t, string(ctx.Response.Body()))
			default:
				require.Equal(t, row.want, got, at)
			}
		}
	}
}

// At which endpoints a request is served, by what its engines are. One that may end an answer early
// must be able to say so, and one that reads no hand-off there would drop it without a word.
func TestWhatIsServedAtWhichEndpoint(t *testing.T) {
	ascend := mooncake.Profile{Connector: mooncake.AscendMooncakeV1}
	quiet := mooncake.Profile{Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)}
	pull := mooncake.Profile{Connector: mooncake.NIXLPull}
	local := mooncake.Profile{Connector: mooncake.NIXLPull, AllowLocalPrefill: true}
	rooms := mooncake.Profile{Connector: mooncake.SGLang, BootstrapPort: 8998}
	const early = "decode engines of vllm-ascend, which may end an answer early"
	for _, row := range []struct {
		name                string
		prefill, decode     mooncake.Profile
		made, taken         string // version of the prefill engine, and of the decode engine
		responses, messages string // what a refusal says there; empty: it is let in
	}{
		{"vllm-ascend", ascend, ascend, "0.32.1", "0.32.1", early, early},
		{"vllm-ascend that gives nothing back", quiet, quiet, "0.32.1", "0.32.1", "", ""},
		{"the word of prefill engines, which write no answer", ascend, quiet, "0.32.1", "0.32.1", "", ""},
		{"nor does it stand for that of decode engines", quiet, ascend, "0.32.1", "0.32.1", early, early},
		{"vllm-ascend that gives nothing back, and reads no salt of a message", quiet, quiet, "0.26.0", "0.26.0", "", "takes no hand-off at /v1/messages"},
		{"vLLM", pull, pull, "0.32.1", "0.32.1", "", ""},
		{"vLLM whose decode engine reads no salt of a message", pull, pull, "0.32.1", "0.26.0", "", "allow_local_prefill"},
		{"likewise, and it may compute prompts", local, local, "0.32.1", "0.26.0", "", ""},
		{"vLLM that reads no hand-off of a response", pull, pull, "0.32.1", "0.18.0", "takes no hand-off at /v1/responses", "takes no hand-off at /v1/messages"},
		{"likewise, and it may compute prompts alone", local, local, "0.32.1", "0.18.0", "", ""},
		{"SGLang", rooms, rooms, "0.5.23", "0.5.23", "", ""},
		{"SGLang of 0.5.22", rooms, rooms, "0.5.23", "0.5.22", "it needs SGLang 0.5.23 or later", "it needs SGLang 0.5.23 or later"},
		{"SGLang of an unknown version", rooms, rooms, "0.5.23", "main", "it needs SGLang 0.5.23 or later", "it needs SGLang 0.5.23 or later"},
	} {
		t.Run(row.name, func(t *testing.T) {
			h := build(t, func(c *config.Config) {
				c.Profiles = map[string]mooncake.Profile{"prefill": row.prefill, "decode": row.decode}
				c.Engines.Prefill[0].Profile, c.Engines.Decode[0].Profile = "prefill", "decode"
				c.Bind.Listen = "127.0.0.1:0"
			})
			h.version = row.made
			h.says(roster.Prefill, prefiller, true, "m")
			h.version = row.taken
			h.says(roster.Decode, decoder, true, "m")
			require.Equal(t, letIn, h.got(asking("POST", chatPath, chat, by("plain"))), "a chat is served by all of them")
			regex := strings.Replace(chat, "{", `{"stop_regex":"(a+)+$",`, 1)
			require.Equal(t, row.prefill.Connector == mooncake.SGLang,
				h.got(asking("POST", chatPath, regex, by("plain"))) == "400 unsupported_parameter", "only SGLang obeys it")
			for path, ask := range map[string]struct{ body, says string }{
				responsesPath: {`{"model":"m","input":"hi"}`, row.responses}, messagesPath: {messages, row.messages},
			} {
				ctx := asking("POST", path, ask.body, by("plain"))
				h.Handle(ctx)
				require.Zero(t, h.deps.Requests.Open())
				got := faultOf(t, ctx)
				if ask.says == "" {
					require.Equal(t, http.StatusInternalServerError, ctx.Response.StatusCode(), got.message)
					continue
				}
				require.Equal(t, http.StatusNotFound, ctx.Response.StatusCode(), "another try would not help")
				require.Empty(t, ctx.Response.Header.Peek("Retry-After"))
				require.Contains(t, got.message, ask.says)
				require.Contains(t, got.message, "use /v1/chat/completions")
			}
		})
	}
}

// Beam search is one answer of one engine, and SGLang knows neither it nor prompt_logprobs. No pair
// of its engines tells logprobs of a prompt.
func TestWhatAPairOfSGLangDoesNotCompute(t *testing.T) {
	h := open(t, func(c *config.Config) {
		c.Profiles = map[string]mooncake.Profile{"pull": {Connector: mooncake.SGLang, BootstrapPort: 8998}}
	})
	for more, want := range map[string]string{
		`"use_beam_search":true,"n":1,"max_tokens":4`:          "400 unsupported_parameter",
		`"prompt_logprobs":1`:                                  "400 unsupported_parameter",
		`"prompt":"a","echo":true,"logprobs":1,"max_tokens":1`: "400 unsupported_parameter echo",
		`"prompt":"a","echo":true,"logprobs":1,"max_tokens":5`: "400 unsupported_parameter echo",
		`"echo":true,"max_tokens":4`:                           letIn, // it does not know it there
	} {
		path, body := chatPath, strings.Replace(chat, "{", "{"+more+",", 1)
		if strings.Contains(more, "prompt\"") {
			path, body = completionPath, `{"model":"m",`+more+`}`
		}
		ctx := asking("POST", path, body, by("plain"))
		got := h.got(ctx)
		if f := faultOf(t, ctx); f.param == "echo" {
			got += " echo"
		}
		require.Equal(t, want, got, more)
	}
}

// An engine's own word that it gives answers back counts more than the profile's.
func TestAnEngineThatGivesBackAgainstTheProfilesWord(t *testing.T) {
	h := open(t, func(c *config.Config) {
		c.Profiles = map[string]mooncake.Profile{"pull": {Connector: mooncake.AscendMooncakeV1, GivesBack: new(false)}}
	})
	respond := func() string {
		return h.got(asking("POST", responsesPath, `{"model":"m","input":"hi"}`, by("plain")))
	}
	require.Equal(t, letIn, respond())
	h.fleet.GaveBack(roster.Decode + " " + decoder)
	require.Equal(t, "404 no_such_route", respond())
	require.Equal(t, letIn, h.got(asking("POST", chatPath, chat, by("plain"))))
}

// A page of a listed site may read each kind of answer, and each kind of refusal. A page of another
// site, and every page where no site is listed, may read nothing.
func TestAPageReadsWhatItsSiteMay(t *testing.T) {
	const ours, theirs = "https://chat.example", "https://other.example"
	for name, row := range map[string]struct{ origins, may, mayNot []string }{
		"no site":   {nil, nil, []string{ours, theirs, "null"}},
		"two sites": {[]string{ours, "http://localhost:3000"}, []string{ours, "http://localhost:3000"}, []string{theirs, "null", "https://chat.example.evil", "http://chat.example"}},
		"all sites": {[]string{"*"}, []string{ours, theirs, "null"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := open(t, func(c *config.Config) { c.CORS.Origins = row.origins })
			listed := len(row.origins) > 0 && row.origins[0] != "*"
			values := func(ctx *fasthttp.RequestCtx, name string) (all []string) {
				for _, v := range ctx.Response.Header.PeekAll(name) {
					all = append(all, string(v))
				}
				return all
			}
			for _, ask := range []struct {
				method, path, body string
				status             int
				header             []string
			}{
				{"POST", chatPath, chat, 500, nil}, // it is let in
				{"POST", embeddingsPath, `{"model":"m","input":"a"}`, 500, nil},
				{"GET", "/v1/models", "", 200, nil},
				{"GET", "/health", "", 200, nil},
				{"POST", chatPath, "{", 400, nil},
				{"POST", chatPath, chat, 415, []string{"Content-Encoding: br"}},
				{"POST", messagesPath, "{", 400, nil},
				{"GET", chatPath, "", 405, nil},
				{"GET", "/nowhere", "", 404, nil},
				{"POST", chatPath, strings.Replace(chat, `"m"`, `"gone"`, 1), 404, nil},
				{"", chatPath, "", 413, nil}, // turned away before it is handled
			} {
				for _, origin := range append(append([]string{""}, row.may...), row.mayNot...) {
					ctx := asking(ask.method, ask.path, ask.body, append(ask.header, by("plain"))...)
					if origin != "" {
						ctx.Request.Header.Set("Origin", origin)
					}
					if ask.method == "" {
						h.AnswerRefused(ctx, edge.Refusal{Status: 413, Code: "body_too_large", Message: "too large"})
					} else {
						h.Handle(ctx)
					}
					at := fmt.Sprint(ask.method, " ", ask.path, " from ", origin)
					require.Equal(t, ask.status, ctx.Response.StatusCode(), at)
					var want, exposed []string
					for _, may := range row.may {
						if origin == may {
							want, exposed = []string{may}, []string{"*"}
							if !listed {
								want = []string{"*"}
							}
						}
					}
					require.Equal(t, want, values(ctx, "Access-Control-Allow-Origin"), at)
					require.Equal(t, exposed, values(ctx, "Access-Control-Expose-Headers"), at)
					require.Equal(t, listed, strings.Contains(strings.Join(values(ctx, "Vary"), ","), "Origin"), at)
					require.Empty(t, values(ctx, "Access-Control-Allow-Credentials"), at)
				}
			}
			for _, origin := range append(append([]string{}, row.may...), row.mayNot...) {
				first := func(path string, headers ...string) *fasthttp.RequestCtx {
					ctx := asking("OPTIONS", path, "", append(headers, "Origin: "+origin)...)
					h.Handle(ctx)
					return ctx
				}
				const asks, with = "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,content-type"
				ctx := first(chatPath, asks, with)
				if len(values(ctx, "Access-Control-Allow-Origin")) == 0 {
					require.Contains(t, row.mayNot, origin)
					require.Equal(t, http.StatusMethodNotAllowed, ctx.Response.StatusCode())
					require.Empty(t, values(ctx, "Access-Control-Allow-Headers"))
					continue
				}
				require.Contains(t, row.may, origin)
				require.Equal(t, http.StatusNoContent, ctx.Response.StatusCode(), "without a key")
				require.Equal(t, []string{"POST"}, values(ctx, "Access-Control-Allow-Methods"))
				require.Equal(t, []string{"authorization,content-type"}, values(ctx, "Access-Control-Allow-Headers"))
				require.Equal(t, []string{"600"}, values(ctx, "Access-Control-Max-Age"))
				require.Equal(t, http.StatusMethodNotAllowed, first(chatPath).Response.StatusCode(), "that is no preflight")
				require.Equal(t, http.StatusNotFound, first("/nowhere", asks).Response.StatusCode())
			}
		})
	}
}

// A request without a model is for the only one that there is, and numbers are taken in each form
// that JSON has. Where engines have several models, or had them and one of them is away, it is not
// known which one is meant.
func TestARequestWithoutAModel(t *testing.T) {
	nameless, kind := form(t, "x")
	asks := []struct{ path, body, header string }{
		{chatPath, `{"messages":[{"role":"user","content":"one two"}],"max_tokens":4.0,"n":2.0,"seed":7.0}`, ""},
		{chatPath, `{"model":"","messages":[{"role":"user","content":"one two"}],"max_completion_tokens":4e0,"stream":true}`, ""},
		{completionPath, `{"model":null,"prompt":"one two","max_tokens":40e-1,"seed":7.0,"logprobs":1.0}`, ""},
		{completionPath, `{"prompt":["one","two"],"max_tokens":4.0,"n":1.0}`, ""},
		{responsesPath, `{"input":"one two","max_output_tokens":4.0}`, ""},
		{messagesPath, `{"max_tokens":4.0,"messages":[{"role":"user","content":"one two"}]}`, ""},
		{countPath, `{"messages":[{"role":"user","content":"one two"}]}`, ""},
		{"/tokenize", `{"prompt":"one two"}`, ""},
		{embeddingsPath, `{"input":"a"}`, ""},
		{speechPath, nameless, kind},
	}
	for name, row := range map[string]struct {
		second string // model of the decode engine
		up     bool   // the decode engine is
		want   int
	}{
		"one model":                     {"m", true, http.StatusInternalServerError}, // it is let in
		"two models":                    {"emb", true, http.StatusBadRequest},
		"two models, of which one went": {"emb", false, http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			h := build(t)
			h.version = "0.32.1"
			h.says(roster.Prefill, prefiller, true, "m")
			h.says(roster.Decode, decoder, true, row.second)
			h.says(roster.Decode, decoder, row.up, row.second)
			for _, ask := range asks {
				ctx := asking("POST", ask.path, ask.body, by("plain"))
				if name, value, ok := strings.Cut(ask.header, ": "); ok {
					ctx.Request.Header.Set(name, value)
				}
				h.Handle(ctx)
				require.Equal(t, row.want, ctx.Response.StatusCode(), "%s %s: %s", ask.path, ask.body, ctx.Response.Body())
				if row.want == http.StatusBadRequest && !strings.HasPrefix(ask.path, messagesPath) {
					require.Equal(t, "missing_required_parameter", faultOf(t, ctx).code, ask.path)
				}
			}
			if row.second == "emb" && row.up {
				require.Equal(t, "503 prefill_unavailable, retry after 1", h.got(asking("POST", chatPath, strings.Replace(chat, `"m"`, `"emb"`, 1), by("plain"))), "no engine prefills for it")
			}
		})
	}
}

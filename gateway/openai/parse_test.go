package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/build"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

func TestImportsArePure(t *testing.T) { // reading a request needs no clock and no network
	pkg, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	pure := []string{"bytes", "cmp", "encoding/json", "errors", "fmt", "io", "math", "mime", "mime/multipart", "net/http", "net/url", "slices",
		"strconv", "strings", "evenkeel/mooncake", "evenkeel/internal/rawjson"}
	require.Subset(t, pure, pkg.Imports, "let the gateway do it and pass the value in") // net/http: names of statuses
}

// chat and completion are requests with extra members, "" for none.
func chat(extra string) string {
	return `{"model":"m","messages":[{"role":"user","content":"Hi"}]` + comma(extra) + `}`
}

func completion(extra string) string { return `{"model":"m","prompt":"Hi"` + comma(extra) + `}` }

// usual are limits as the config has them where it says nothing.
var usual = Limits{VocabSize: 1000, Answers: 128, AnswersPerPrompt: 8, StopStrings: 16}

func comma(extra string) string {
	if extra == "" {
		return ""
	}
	return "," + extra
}

func TestAPlainChat(t *testing.T) {
	raw := chat("")
	r, e := Parse(mooncake.Chat, []byte(raw), Limits{})
	require.Nil(t, e)
	require.Equal(t, "m", r.Model)
	require.Equal(t, 1, r.N)
	require.False(t, r.Stream || r.IncludeUsage || r.ContinuousUsage || r.ReturnTokenIDs || r.Passthrough)
	require.Zero(t, r.MaxTokens)
	require.Empty(t, r.MaxTokensKey)
	require.Equal(t, len(`[{"role":"user","content":"Hi"}]`), r.PromptBytes)
	require.Equal(t, raw, string(r.Body.Raw()))
	require.Equal(t, []SubRequest{{}}, r.Parts(), "the single leg differs in nothing")
}

func TestWhatAClientAsksFor(t *testing.T) {
	for _, tc := range []struct {
		name, raw string
		ep        mooncake.Endpoint
		want      func(t *testing.T, r *Request)
	}{
		{"a stream with usage", chat(`"stream":true,"stream_options":{"include_usage":true,"include_obfuscation":false}`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.True(t, r.Stream && r.IncludeUsage && !r.ContinuousUsage)
		}},
		{"continuous usage", chat(`"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.True(t, r.IncludeUsage && r.ContinuousUsage)
		}},
		{"continuous usage alone does nothing, as in vLLM", chat(`"stream":true,"stream_options":{"continuous_usage_stats":true}`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.False(t, r.IncludeUsage || r.ContinuousUsage)
		}},
		{"token ids", chat(`"return_token_ids":true`), mooncake.Chat, func(t *testing.T, r *Request) { require.True(t, r.ReturnTokenIDs) }},
		{"a key spelled with escapes", chat(`"str\u0065am":true`), mooncake.Chat, func(t *testing.T, r *Request) { require.True(t, r.Stream) }},
		{"another case is another key", chat(`"Stream":"x","N":99,"stream":true`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.True(t, r.Stream)
			require.Equal(t, 1, r.N)
		}},
		{"null is absent", chat(`"stream":null,"stream_options":null,"n":null,"max_tokens":null,"stop":null,"best_of":null,"priority":null,"prompt_logprobs":null,"chat_template":null,"logit_bias":null,"logprobs":null,"seed":null`),
			mooncake.Chat, func(t *testing.T, r *Request) { require.Equal(t, 1, r.N) }},
		{"max_tokens", completion(`"max_tokens":2147483647`), mooncake.Completions, func(t *testing.T, r *Request) {
			require.Equal(t, 2147483647, r.MaxTokens)
			require.Equal(t, 2147483647, r.Limit)
			require.Equal(t, "max_tokens", r.MaxTokensKey)
		}},
		{"no max_tokens is the default of a completion", completion(""), mooncake.Completions, func(t *testing.T, r *Request) {
			require.Zero(t, r.MaxTokens)
			require.Equal(t, DefaultCompletionTokens, r.Limit)
		}},
		{"a max_tokens of null is no limit", completion(`"max_tokens":null,"min_tokens":20`), mooncake.Completions, func(t *testing.T, r *Request) {
			require.Zero(t, r.Limit)
			require.Empty(t, r.MaxTokensKey)
		}},
		{"max_completion_tokens wins in a chat", chat(`"max_tokens":7,"max_completion_tokens":5`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.Equal(t, 5, r.MaxTokens)
			require.Equal(t, "max_completion_tokens", r.MaxTokensKey)
		}},
		{"and means nothing in a completion", completion(`"max_tokens":7,"max_completion_tokens":5`), mooncake.Completions, func(t *testing.T, r *Request) {
			require.Equal(t, 7, r.MaxTokens)
			require.Equal(t, "max_tokens", r.MaxTokensKey)
		}},
		{"echo with logprobs comes from the engine itself", completion(`"echo":true,"logprobs":0`), mooncake.Completions, func(t *testing.T, r *Request) {
			require.True(t, r.Passthrough)
		}},
		{"but not as a stream", completion(`"echo":true,"logprobs":1,"stream":true`), mooncake.Completions, func(t *testing.T, r *Request) {
			require.False(t, r.Passthrough)
		}},
		{"token ids are counted", `{"model":"m","prompt":[1,2,3]}`, mooncake.Completions, func(t *testing.T, r *Request) {
			require.Equal(t, 3, r.PromptTokens)
			require.Nil(t, r.Prompts)
		}},
		{"a list of one prompt is one prompt", `{"model":"m","prompt":[[1,2,3]]}`, mooncake.Completions, func(t *testing.T, r *Request) {
			require.Equal(t, 3, r.PromptTokens)
			require.Nil(t, r.Prompts)
		}},
		{"tools shape the prompt, inline images do not lengthen it", `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"Hi"},{"type":"image_url","image_url":{"url":"data:image/png;base64,` +
			strings.Repeat("A", 5000) + `"}},{"type":"input_audio","input_audio":{"data":"` + strings.Repeat("A", 5000) + `"}}]}],"tools":[{"type":"function"}]}`, mooncake.Chat, func(t *testing.T, r *Request) {
			require.Less(t, r.PromptBytes, 250)
			require.Greater(t, r.PromptBytes, len(`[{"type":"function"}]`))
		}},
		{"beam search that is off", chat(`"use_beam_search":false,"best_of":1`), mooncake.Chat, func(t *testing.T, r *Request) { require.False(t, r.Passthrough) }},
		{"keys that are not ours may repeat and hold anything", chat(`"x":1,"x":2,"temperature":"hot"`), mooncake.Chat, func(t *testing.T, r *Request) {
			require.Equal(t, 2, r.Body.Count("x"))
		}},
		{"reserved keys are dropped later, whatever they hold", chat(`"kv_transfer_params":{"do_remote_prefill":true},"request_id":[],"vllm_xargs":{},"_vllm_ascend_x":1,"prompt_token_ids":[7],"priority":0`), mooncake.Chat, func(t *testing.T, r *Request) {
			p := mooncake.Profile{}.WithDefaults()
			var sent []byte
			for _, s := range p.DecodeBody(&r.Body, mooncake.Chat, nil, nil, "", true, nil) {
				sent = append(sent, s...)
			}
			for _, key := range []string{"kv_transfer_params", "request_id", "vllm_xargs", "_vllm_ascend_x", "prompt_token_ids", "priority"} {
				require.NotContains(t, string(sent), key)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, e := Parse(tc.ep, []byte(tc.raw), Limits{})
			require.Nil(t, e)
			tc.want(t, r)
		})
	}
}

func TestParseNamesTheKeyAtFault(t *testing.T) {
	numbers := func(n int) string { return strings.TrimSuffix(strings.Repeat("1,", n), ",") }
	texts := func(n int) string { return strings.TrimSuffix(strings.Repeat(`"x",`, n), ",") }
	lim := usual
	for _, tc := range []struct {
		name, raw, param, code string
	}{
		{"not JSON", `{"model"`, "", CodeInvalidJSON},
		{"not an object", `[]`, "", CodeInvalidJSON},
		{"NaN", chat(`"temperature":NaN`), "", CodeInvalidJSON},
		{"nested too deep", chat(`"x":` + strings.Repeat("[", 64) + strings.Repeat("]", 64)), "", CodeInvalidJSON},
		{"no model", `{"messages":[{}]}`, "model", CodeMissing},
		{"an empty model", `{"model":"","messages":[{}]}`, "model", CodeMissing},
		{"a null model", `{"model":null,"messages":[{}]}`, "model", CodeMissing},
		{"a model of another type", `{"model":1,"messages":[{}]}`, "model", CodeInvalidType},
		{"no messages", `{"model":"m","prompt":"x"}`, "messages", CodeMissing},
		{"null messages", `{"model":"m","messages":null}`, "messages", CodeMissing},
		{"empty messages", `{"model":"m","messages":[]}`, "messages", CodeInvalidValue},
		{"messages of another type", `{"model":"m","messages":"Hi"}`, "messages", CodeInvalidType},
		{"a message of another type", `{"model":"m","messages":[{},"Hi"]}`, "messages[1]", CodeInvalidType},

		{"stream twice", chat(`"stream":true,"stream":false`), "stream", CodeDuplicateKey},
		{"stream twice, once in disguise", chat(`"stream":true,"str\u0065am":false`), "stream", CodeDuplicateKey},
		{"params of a handoff twice", chat(`"kv_transfer_params":{},"kv_transfer_params":{}`), "kv_transfer_params", CodeDuplicateKey},
		{"a reserved key twice", chat(`"rid":"a","rid":"b"`), "rid", CodeDuplicateKey},
		{"messages twice", chat(`"messages":[{}]`), "messages", CodeDuplicateKey},
		{"include_usage twice", chat(`"stream":true,"stream_options":{"include_usage":true,"include_usage":false}`), "stream_options.include_usage", CodeDuplicateKey},

		{"n zero", chat(`"n":0`), "n", CodeInvalidValue},
		{"n beyond 8", chat(`"n":9`), "n", CodeInvalidValue},
		{"n below zero", chat(`"n":-1`), "n", CodeInvalidValue},
		{"n huge", chat(`"n":99999999999999999999999`), "n", CodeInvalidValue},
		{"n a fraction", chat(`"n":1.5`), "n", CodeInvalidType},
		{"n a fraction in another form", chat(`"n":15e-1`), "n", CodeInvalidType},
		{"n a whole number that is too large in another form", chat(`"n":1e400`), "n", CodeInvalidValue},
		{"n zero in another form", chat(`"n":0.0e5`), "n", CodeInvalidValue},
		{"a token in a form that does not fit its place", chat(`"stop_token_ids":[1e2,1e3]`), "stop_token_ids[1]", CodeInvalidValue},
		{"n a string", chat(`"n":"5"`), "n", CodeInvalidType},
		{"n true", chat(`"n":true`), "n", CodeInvalidType},
		{"n a list", chat(`"n":[1]`), "n", CodeInvalidType},
		{"best_of", chat(`"best_of":2`), "best_of", CodeInvalidValue},
		{"beam search in a stream", chat(`"use_beam_search":true,"stream":true`), "use_beam_search", CodeUnsupported},
		{"priority", chat(`"priority":-1`), "priority", CodeInvalidValue},
		{"stream a string", chat(`"stream":"true"`), "stream", CodeInvalidType},
		{"stream a number", chat(`"stream":1`), "stream", CodeInvalidType},
		{"stream_options without stream", chat(`"stream_options":{"include_usage":true}`), "stream_options", CodeInvalidValue},
		{"stream_options of another type", chat(`"stream":true,"stream_options":true`), "stream_options", CodeInvalidType},
		{"include_usage of another type", chat(`"stream":true,"stream_options":{"include_usage":1}`), "stream_options.include_usage", CodeInvalidType},
		{"return_token_ids of another type", chat(`"return_token_ids":"yes"`), "return_token_ids", CodeInvalidType},

		{"max_tokens zero", chat(`"max_tokens":0`), "max_tokens", CodeInvalidValue},
		{"max_tokens beyond 31 bits", chat(`"max_tokens":2147483648`), "max_tokens", CodeInvalidValue},
		{"max_completion_tokens a fraction", chat(`"max_completion_tokens":1e-2`), "max_completion_tokens", CodeInvalidType},
		{"min_tokens below zero", chat(`"min_tokens":-1`), "min_tokens", CodeInvalidValue},
		{"min_tokens above max_tokens", chat(`"min_tokens":6,"max_tokens":5`), "min_tokens", CodeInvalidValue},
		{"seed beyond 64 bits in another form", chat(`"seed":9223372036854775808.0`), "seed", CodeInvalidValue},
		{"seed beyond 64 bits", chat(`"seed":9223372036854775808`), "seed", CodeInvalidValue},
		{"logprobs a count in a chat", chat(`"logprobs":3`), "logprobs", CodeInvalidType},
		{"top_logprobs that no engine has", chat(`"logprobs":true,"top_logprobs":-2`), "top_logprobs", CodeInvalidValue},
		{"all top_logprobs without logprobs", chat(`"top_logprobs":-1`), "top_logprobs", CodeInvalidValue},
		{"top_logprobs without logprobs", chat(`"top_logprobs":2`), "top_logprobs", CodeInvalidValue},
		{"prompt_logprobs of another type", chat(`"prompt_logprobs":true`), "prompt_logprobs", CodeInvalidType},
		{"prompt_logprobs in a stream", chat(`"prompt_logprobs":1,"stream":true`), "prompt_logprobs", CodeInvalidValue},
		{"fewer than all of them", chat(`"prompt_logprobs":-2`), "prompt_logprobs", CodeInvalidValue},
		{"prompt_embeds", chat(`"prompt_embeds":"AA=="`), "prompt_embeds", CodeUnsupported},
		{"logits_processors", chat(`"logits_processors":["os.system"]`), "logits_processors", CodeUnsupported},
		{"a template", chat(`"chat_template":"{{ x }}"`), "chat_template", CodeUnsupported},
		{"a template among the template's arguments", chat(`"chat_template_kwargs":{"enable_thinking":false,"chat_t\u0065mplate":"{{ x }}"}`), "chat_template_kwargs.chat_template", CodeUnsupported},
		{"arguments of a template of another type", chat(`"chat_template_kwargs":[]`), "chat_template_kwargs", CodeInvalidType},

		{"17 stops", chat(`"stop":[` + texts(17) + `]`), "stop", CodeInvalidValue},
		{"an empty stop", chat(`"stop":["x",""]`), "stop[1]", CodeInvalidValue},
		{"a stop of another type", chat(`"stop":5`), "stop", CodeInvalidType},
		{"129 stop tokens", chat(`"stop_token_ids":[` + numbers(129) + `]`), "stop_token_ids", CodeInvalidValue},
		{"a stop token beyond the vocabulary", chat(`"stop_token_ids":[5,1000]`), "stop_token_ids[1]", CodeInvalidValue},
		{"a stop token below zero", chat(`"stop_token_ids":[-1]`), "stop_token_ids[0]", CodeInvalidValue},
		{"a stop token that is text", chat(`"stop_token_ids":["5"]`), "stop_token_ids[0]", CodeInvalidType},
		{"an allowed token beyond the vocabulary", chat(`"allowed_token_ids":[1000]`), "allowed_token_ids[0]", CodeInvalidValue},
		{"a bias that names no token", chat(`"logit_bias":{"x":1}`), "logit_bias", CodeInvalidValue},
		{"a bias with brackets in its key", chat(`"logit_bias":{"[":1}`), "logit_bias", CodeInvalidValue},
		{"a bias beyond the vocabulary", chat(`"logit_bias":{"1000":1}`), "logit_bias", CodeInvalidValue},
		{"a bias out of range", chat(`"logit_bias":{"5":101}`), "logit_bias.5", CodeInvalidValue},
		{"a bias of another type", chat(`"logit_bias":[1]`), "logit_bias", CodeInvalidType},
		{"1025 biases", chat(`"logit_bias":{` + strings.TrimSuffix(strings.Repeat(`"5":1,`, 1025), ",") + `}`), "logit_bias", CodeInvalidValue},
		{"a penalty that no float holds", chat(`"presence_penalty":1e400`), "presence_penalty", CodeInvalidValue},
		{"a penalty out of range", chat(`"frequency_penalty":-2.1`), "frequency_penalty", CodeInvalidValue},
		{"a repetition penalty of zero", chat(`"repetition_penalty":0`), "repetition_penalty", CodeInvalidValue},
		{"min_p of another type", chat(`"min_p":"0.1"`), "min_p", CodeInvalidType},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, e := Parse(mooncake.Chat, []byte(tc.raw), lim)
			refusal(t, e, tc.param, tc.code)
		})
	}
}

func refusal(t *testing.T, e *Error, param, code string) {
	t.Helper()
	require.NotNil(t, e)
	require.Equal(t, 400, e.Status)
	require.Equal(t, "invalid_request_error", e.Type)
	require.Equal(t, param, e.Param, e.Message)
	require.Equal(t, code, e.Code, e.Message)
	require.NotEmpty(t, e.Message)
	require.Less(t, len(e.Message), 400)
}

func TestCompletionsHaveRulesOfTheirOwn(t *testing.T) {
	for _, tc := range []struct {
		name, raw, param, code string
	}{
		{"no prompt", `{"model":"m","messages":[{}]}`, "prompt", CodeMissing},
		{"a null prompt", `{"model":"m","prompt":null}`, "prompt", CodeMissing},
		{"an empty list", `{"model":"m","prompt":[]}`, "prompt", CodeInvalidValue},
		{"an object", `{"model":"m","prompt":{}}`, "prompt", CodeInvalidType},
		{"a list of truths", `{"model":"m","prompt":[true]}`, "prompt[0]", CodeInvalidType},
		{"text and tokens", `{"model":"m","prompt":["a",1]}`, "prompt", CodeInvalidType},
		{"tokens and lists", `{"model":"m","prompt":[1,[2]]}`, "prompt", CodeInvalidType},
		{"a fraction of a token", `{"model":"m","prompt":[1,2.5]}`, "prompt[1]", CodeInvalidType},
		{"a token beyond the vocabulary", `{"model":"m","prompt":[1,1000]}`, "prompt[1]", CodeInvalidValue},
		{"a token below zero", `{"model":"m","prompt":[[1],[-1]]}`, "prompt[1][0]", CodeInvalidValue},
		{"an empty prompt in a list", `{"model":"m","prompt":[[1],[]]}`, "prompt[1]", CodeInvalidValue},
		{"lists nested too deep", `{"model":"m","prompt":[[[1]]]}`, "prompt[0][0]", CodeInvalidType},
		{"129 prompts", `{"model":"m","prompt":[` + strings.TrimSuffix(strings.Repeat(`"x",`, 129), ",") + `]}`, "prompt", CodeInvalidValue},
		{"17 prompts with 8 answers each", `{"model":"m","n":8,"prompt":[` + strings.TrimSuffix(strings.Repeat(`"x",`, 17), ",") + `]}`, "prompt", CodeInvalidValue},
		{"logprobs a switch", completion(`"logprobs":true`), "logprobs", CodeInvalidType},
		{"logprobs that no engine has", completion(`"logprobs":-2`), "logprobs", CodeInvalidValue},
		{"min_tokens above the default of 16", completion(`"min_tokens":17`), "min_tokens", CodeInvalidValue},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, e := Parse(mooncake.Completions, []byte(tc.raw), usual)
			refusal(t, e, tc.param, tc.code)
		})
	}
}

// A whole number is one in each form that JSON has for it, and engines get it with digits alone.
func TestWholeNumbersInEveryForm(t *testing.T) {
	for form, want := range map[string]int64{
		"4": 4, "4.0": 4, "4.000": 4, "4e0": 4, "4E+0": 4, "40e-1": 4, "0.4e1": 4, "4.0e0": 4, "4000.00e-3": 4, "4e2": 400, "4.25e2": 425, "0.0": 0, "-0.0": 0, "0e9999999999": 0, "-0": 0,
		"9007199254740993.0": 9007199254740993, "-9223372036854775808.0": math.MinInt64, "9223372036854775807": math.MaxInt64, "-7.0": -7, "2e18": 2_000_000_000_000_000_000,
	} {
		n, ok := parseInteger(json.RawMessage(form), math.MinInt64, math.MaxInt64)
		require.True(t, ok, form)
		require.Equal(t, want, n, form)
	}
	for _, form := range []string{"4.5", "4e-1", "1e-9999999999", "0.1", "41e-1", "-1.5", `"4"`, "true", "[4]"} {
		require.False(t, isInteger(json.RawMessage(form)), form)
	}
	for _, form := range []string{"1e19", "1e9999999999", "-1e400", "9223372036854775808.0"} {
		_, ok := parseInteger(json.RawMessage(form), math.MinInt64, math.MaxInt64)
		require.False(t, ok, form)
		require.True(t, isInteger(json.RawMessage(form)), form)
	}
	forms := map[mooncake.Endpoint][2]string{
		mooncake.Chat: {`{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":4.0,"max_completion_tokens":2e5,"min_tokens":0.0,"n":2.0,"seed":7.0,"logprobs":true,"top_logprobs":3e0,"stop_token_ids":[5.0,6]}`,
			`{"max_tokens":4,"max_completion_tokens":200000,"min_tokens":0,"seed":7,"top_logprobs":3,"stop_token_ids":[5,6],"logprobs":true}`},
		mooncake.Completions: {`{"model":"m","prompt":[1.0,2e0,3],"max_tokens":1e1,"seed":-7.0,"best_of":1.0,"logprobs":2.0}`,
			`{"prompt":[1,2,3],"max_tokens":10,"seed":-7,"logprobs":2}`},
		mooncake.Responses: {`{"model":"m","input":"a","max_output_tokens":4.0,"seed":7e0,"top_logprobs":0.0}`, `{"input":"a","max_output_tokens":4,"seed":7,"top_logprobs":0}`},
		mooncake.Messages: {`{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":4e3,"top_k":5.0,"thinking":{"type":"enabled","budget_tokens":2000.0}}`,
			`{"max_tokens":4000,"top_k":5,"thinking":{"type":"enabled","budget_tokens":2000}}`},
	}
	profile := mooncake.Profile{Connector: mooncake.NIXLPull, VocabSize: 1000}.WithDefaults()
	for ep, form := range forms {
		r, e := Parse(ep, []byte(form[0]), usual)
		require.Nil(t, e, "%d: %v", ep, e)
		var want, got map[string]json.RawMessage
		require.NoError(t, json.Unmarshal([]byte(form[1]), &want))
		sent := bytes.Join(profile.DecodeBody(&r.Body, ep, nil, json.RawMessage(`{}`), "", true, nil), nil)
		require.NoError(t, json.Unmarshal(sent, &got))
		for key, value := range want {
			require.Equal(t, string(value), strings.ReplaceAll(string(got[key]), " ", ""), "%s: %s", key, sent)
		}
		require.NotRegexp(t, `[0-9](\.|e[0-9])`, string(bytes.Join(profile.ProbeBody(&r.Body, ep, nil, nil, nil), nil)))
		if ep == mooncake.Chat {
			require.Equal(t, []int{200000, 2}, []int{r.MaxTokens, r.N})
			second := bytes.Join(profile.DecodeBody(&r.Body, ep, &r.Parts()[1].Patch, json.RawMessage(`{}`), "", true, nil), nil)
			require.Contains(t, string(second), `"seed":8`)
		}
	}
}

// A request without a model is for the only one that there is, and engines get its name.
func TestTheOnlyModelNeedsNoName(t *testing.T) {
	lim := usual
	lim.OnlyModel = func() string { return `o"m` }
	profile := mooncake.Profile{Connector: mooncake.NIXLPull}.WithDefaults()
	for _, model := range []string{``, `"model":null,`, `"model":"",`} {
		for ep, form := range map[mooncake.Endpoint]string{
			mooncake.Chat: `{%s"messages":[{"role":"user","content":"a"}]}`, mooncake.Completions: `{%s"prompt":"a"}`,
			mooncake.Responses: `{%s"input":"a"}`, mooncake.Messages: `{%s"max_tokens":9,"messages":[{"role":"user","content":"a"}]}`,
		} {
			_, e := Parse(ep, fmt.Appendf(nil, form, model), usual)
			refusal(t, e, "model", CodeMissing)
			r, e := Parse(ep, fmt.Appendf(nil, form, model), lim)
			require.Nil(t, e)
			require.Equal(t, `o"m`, r.Model)
			for _, sent := range [][][]byte{
				profile.ProbeBody(&r.Body, ep, nil, nil, nil), profile.DecodeBody(&r.Body, ep, nil, json.RawMessage(`{}`), "", false, nil), r.Body.Splice(nil, mooncake.Reserved, nil),
			} {
				b, err := mooncake.ScanBody(bytes.Join(sent, nil), 0)
				require.NoError(t, err)
				got, _ := b.Get("model")
				require.Equal(t, []any{1, `"o\"m"`}, []any{b.Count("model"), string(got)})
			}
		}
		r, e := ParsePassed(fmt.Appendf(nil, `{%s"input":"a"}`, model), lim)
		require.Nil(t, e)
		require.Contains(t, string(bytes.Join(r.Body.Splice(nil, mooncake.Reserved, nil), nil)), `"model":"o\"m"`)
	}
	nameless := bytes.Replace(form("Content-Disposition: form-data; name=\"x\"\r\n"), []byte(`name="model"`), []byte(`name="y"`), 1)
	r, e := ParseForm(nameless, formKind, lim)
	require.Nil(t, e)
	require.Equal(t, `o"m`, r.Model)
	named, e := Parse(mooncake.Chat, []byte(chat("")), lim)
	require.Nil(t, e)
	require.Equal(t, "m", named.Model)
}

// What a request may ask for is the operator's to say where evenkeel or an engine has a bound, and
// the engines' alone otherwise.
func TestBoundsAreTheOperatorsOrTheEngines(t *testing.T) {
	list := func(n int, of string) string { return "[" + strings.TrimSuffix(strings.Repeat(of+",", n), ",") + "]" }
	for _, tc := range []struct {
		name string
		ep   mooncake.Endpoint
		raw  string
		lim  Limits
		at   string // refused there; empty: it passes
	}{
		{"n at its bound", mooncake.Chat, chat(`"n":64`), Limits{AnswersPerPrompt: 64, Answers: 64}, ""},
		{"n beyond its bound", mooncake.Chat, chat(`"n":65`), Limits{AnswersPerPrompt: 64, Answers: 128}, "n"},
		{"n beyond all answers", mooncake.Chat, chat(`"n":65`), Limits{AnswersPerPrompt: 128, Answers: 64}, "messages"},
		{"n without a bound", mooncake.Chat, chat(`"n":1000`), Limits{}, ""},
		{"prompts at their bound", mooncake.Completions, `{"model":"m","prompt":` + list(300, `"x"`) + `}`, Limits{Answers: 300}, ""},
		{"prompts beyond it", mooncake.Completions, `{"model":"m","prompt":` + list(301, `[1]`) + `}`, Limits{Answers: 300}, "prompt"},
		{"answers beyond it", mooncake.Completions, `{"model":"m","n":2,"prompt":` + list(151, `"x"`) + `}`, Limits{Answers: 300, AnswersPerPrompt: 2}, "prompt"},
		{"answers whose number no word holds", mooncake.Completions, `{"model":"m","n":2147483647,"prompt":` + list(3, `"x"`) + `}`, Limits{}, "prompt"},
		{"stop strings at their bound", mooncake.Chat, chat(`"stop":` + list(40, `"x"`)), Limits{StopStrings: 40}, ""},
		{"stop strings beyond it", mooncake.Completions, completion(`"stop":` + list(5, `"x"`)), Limits{StopStrings: 4}, "stop"},
		{"stop strings of a response", mooncake.Responses, `{"model":"m","input":"a","stop":` + list(5, `"x"`) + `}`, Limits{StopStrings: 4}, "stop"},
		{"stop strings of a message", mooncake.Messages, `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"a"}],"stop_sequences":` + list(17, `"x"`) + `}`, Limits{StopStrings: 17}, ""},
		{"too many of a message", mooncake.Messages, `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"a"}],"stop_sequences":` + list(17, `"x"`) + `}`, Limits{StopStrings: 16}, "stop_sequences"},
		{"bad words are the engines' to bound", mooncake.Chat, chat(`"bad_words":` + list(2000, `"x"`)), usual, ""},
		{"so are the likeliest tokens of a chat", mooncake.Chat, chat(`"logprobs":true,"top_logprobs":100`), usual, ""},
		{"and all of them", mooncake.Chat, chat(`"logprobs":true,"top_logprobs":-1`), usual, ""},
		{"those of a completion", mooncake.Completions, completion(`"logprobs":50`), usual, ""},
		{"and of a response", mooncake.Responses, `{"model":"m","input":"a","top_logprobs":50}`, usual, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, e := Parse(tc.ep, []byte(tc.raw), tc.lim)
			if tc.at != "" {
				refusal(t, e, tc.at, CodeInvalidValue)
				return
			}
			require.Nil(t, e)
			require.NotNil(t, r)
		})
	}
}

func TestStopTokensNeedAKnownVocabularyOnlyWithMinTokens(t *testing.T) {
	for _, tc := range []struct {
		name, extra string
		vocab       int
		ok          bool
	}{
		{"unknown, nothing masked", `"stop_token_ids":[5]`, 0, true},
		{"unknown, masked", `"stop_token_ids":[5],"min_tokens":1`, 0, false},
		{"unknown, min_tokens first", `"min_tokens":1,"stop_token_ids":[5]`, 0, false},
		{"unknown, but there are none", `"stop_token_ids":[],"min_tokens":1`, 0, true},
		{"known", `"stop_token_ids":[5],"min_tokens":1`, 1000, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, e := Parse(mooncake.Chat, []byte(chat(tc.extra)), Limits{VocabSize: tc.vocab})
			if tc.ok {
				require.Nil(t, e)
				return
			}
			refusal(t, e, "stop_token_ids", CodeUnsupported)
		})
	}
}

func TestATemplatePassesWhereTheOperatorAllowsIt(t *testing.T) {
	for _, extra := range []string{`"chat_template":"{{ x }}"`, `"chat_template_kwargs":{"chat_template":"{{ x }}"}`} {
		_, e := Parse(mooncake.Chat, []byte(chat(extra)), Limits{ChatTemplate: true})
		require.Nil(t, e, extra)
	}
	_, e := Parse(mooncake.Chat, []byte(chat(`"chat_template_kwargs":{"enable_thinking":false}`)), Limits{})
	require.Nil(t, e, "arguments for the model's own template are the client's")
}

func TestMediaURLs(t *testing.T) {
	trusted := Limits{MediaHosts: []string{"cdn.example.com", "media.local:8080"}}
	url := func(u string) string { return fmt.Sprintf(`{"type":"image_url","image_url":{"url":%q}}`, u) }
	const at = "messages[0].content[0]"
	for _, tc := range []struct {
		name, part string
		lim        Limits
		param      string // "" passes
	}{
		{"data passes", url("data:image/png;base64,AAAA"), Limits{}, ""},
		{"text about a URL passes", `{"type":"text","text":"see http://169.254.169.254/"}`, Limits{}, ""},
		{"http does not", url("http://169.254.169.254/latest"), Limits{}, at + ".image_url.url"},
		{"https does not", url("https://cdn.example.com/a.png"), Limits{}, at + ".image_url.url"},
		{"a file does not", url("file:///etc/passwd"), trusted, at + ".image_url.url"},
		{"the short form does not", `{"type":"image_url","image_url":"http://x/"}`, Limits{}, at + ".image_url"},
		{"nor the form without a type", `{"video_url":"http://x/"}`, Limits{}, at + ".video_url"},
		{"nor one written with escapes", `{"audio_url":{"u\u0072l":"\u0068ttp:\/\/x\/"}}`, Limits{}, at + ".audio_url.url"},
		{"nor one of two", `{"image_url":{"url":"http://x/","url":"data:,"}}`, Limits{}, at + ".image_url.url"},
		{"a trusted host passes", url("https://CDN.example.com/a.png?x=@y"), trusted, ""},
		{"a trusted port passes", url("http://media.local:8080/a"), trusted, ""},
		{"another port does not", url("http://cdn.example.com:22/"), trusted, at + ".image_url.url"},
		{"a host that only begins like it does not", url("https://cdn.example.com.evil.net/"), trusted, at + ".image_url.url"},
		{"a user part does not", url("https://cdn.example.com@evil.net/"), trusted, at + ".image_url.url"},
		{"credentials for a trusted host do not", url("https://user:secret@cdn.example.com/"), trusted, at + ".image_url.url"},
		{"a backslash does not", url(`https://cdn.example.com\@evil.net/`), trusted, at + ".image_url.url"},
		{"white space does not", url(" https://cdn.example.com/"), trusted, at + ".image_url.url"},
		{"tensors do not", `{"type":"image_embeds","image_embeds":"AAAA"}`, trusted, at + ".image_embeds"},
		{"of sound neither", `{"type":"audio_embeds","audio_embeds":"AAAA"}`, trusted, at + ".audio_embeds"},
		{"nor of film", `{"video_embeds":{}}`, trusted, at + ".video_embeds"},
		{"nor of a prompt", `{"type":"prompt_embeds","data":"AAAA"}`, trusted, at + ".type"},
		{"nor of one without a type", `{"prompt_embeds":null,"data":"AAAA"}`, trusted, at + ".prompt_embeds"},
		{"a type that nobody knows does not", `{"type":"hologram","text":"a"}`, trusted, at + ".type"},
		{"a type that is none does not", `{"type":["image_url"],"image_url":{"url":"data:,"}}`, trusted, at + ".type"},
		{"a list of URLs does not", `{"type":"image_url","image_url":["http://x/"]}`, trusted, at + ".image_url"},
		{"a list in an object does not", `{"type":"image_url","image_url":{"url":["http://x/"]}}`, trusted, at + ".image_url.url"},
		{"an object in an object does not", `{"type":"image_url","image_url":{"url":{"url":"http://x/"}}}`, trusted, at + ".image_url.url"},
		{"an object without a url does not", `{"type":"image_url","image_url":{"detail":"low"}}`, trusted, at + ".image_url.url"},
		{"a name in place of a picture does not", `{"type":"image_url","image_url":null,"uuid":"a"}`, trusted, at + ".image_url"},
		{"a name in place of any medium does not", `{"type":"input_audio","uuid":"a"}`, trusted, at + ".input_audio"},
		{"one of the responses API is looked at, too", `{"type":"input_image","image_url":"http://x/"}`, Limits{}, at + ".image_url"},
		{"text beside what is null passes", `{"type":"text","text":"a","image_url":null}`, Limits{}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, e := Parse(mooncake.Chat, []byte(`{"model":"m","messages":[{"role":"user","content":[`+tc.part+`]}]}`), tc.lim)
			if tc.param == "" {
				require.Nil(t, e)
				return
			}
			require.NotNil(t, e)
			require.Equal(t, tc.param, e.Param)
			require.Equal(t, 400, e.Status)
		})
	}
	_, e := Parse(mooncake.Chat, []byte(`{"model":"m","messages":[{"content":"x","content":{"image_url":"http://x/"}}]}`), Limits{})
	refusal(t, e, "messages[0].content.image_url", CodeInvalidValue) // every content is checked, whichever the engine reads
}

func TestNoClientNamesAMediumInACacheOfAll(t *testing.T) {
	const url = `"image_url":{"url":"data:image/png;base64,AAAA"}`
	for part, want := range map[string]string{
		`{"type":"image_url",` + url + `,"uuid":"sku-1"}`:           `{"type":"image_url",` + url + `}`,
		`{"uuid" : "sku-1" , "type":"image_url",` + url + `}`:       `{"type":"image_url",` + url + `}`,
		`{"uu\u0069d":7,` + url + `,"uuid":{"a":[1]},"uuid":null }`: `{` + url + `}`,
		`{"type":"text","text":"the uuid: \"uuid\":1","uuid":"x"}`:  `{"type":"text","text":"the uuid: \"uuid\":1"}`,
		`{"type":"text","text":"uuid"}`:                             `{"type":"text","text":"uuid"}`,
	} {
		r, e := Parse(mooncake.Chat, []byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"},`+part+`]}]}`), Limits{})
		require.Nil(t, e, part)
		messages, ok := r.Body.Get("messages")
		require.True(t, ok)
		require.JSONEq(t, `[{"role":"user","content":[{"type":"text","text":"a"},`+want+`]}]`, string(messages))
		require.NotRegexp(t, `"uuid"\s*:|sku-1`, strings.ReplaceAll(string(messages), `\"uuid\"`, ""))
	}
}

func TestLegsOfSeveralAnswers(t *testing.T) {
	r, e := Parse(mooncake.Completions, []byte(`{"model":"m","prompt":["a", [ ],"c"],"n":2}`), Limits{})
	require.NotNil(t, e)
	require.Nil(t, r)
	r, e = Parse(mooncake.Completions, []byte(`{"model":"m","prompt":["a","b" ],"n":3}`), Limits{})
	require.Nil(t, e)
	require.Equal(t, 3, r.N)
	legs := r.Parts()
	require.Len(t, legs, 6)
	for i, leg := range legs {
		require.Equal(t, i, leg.Choice, "choice = prompt * n + sample")
		require.Equal(t, i/3, leg.Prompt)
		require.Equal(t, i%3, leg.SeedOffset)
		require.Equal(t, []string{`"a"`, `"b"`}[i/3], string(leg.Patch.Prompt))
	}
	r, e = Parse(mooncake.Chat, []byte(chat(`"n":2`)), Limits{})
	require.Nil(t, e)
	require.Equal(t, []SubRequest{{}, {Patch: mooncake.Patch{SeedOffset: 1}, Choice: 1}}, r.Parts())
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		chat(""), completion(""), chat(`"stream":true,"stream_options":{"include_usage":true},"n":2,"seed":1,"stop":["a"],"logit_bias":{"5":1}`),
		`{"model":"m","prompt":[[1,2],[3]],"n":2}`, `{"model":"m","prompt":["a","b"],"logprobs":5,"echo":true}`, `{"model":"m","prompt":[1,2]}`,
		`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]}`,
		chat(`"stop_token_ids":[1,-2]`), chat(`"logit_bias":{"[":1}`), chat(`"str\u0065am":1`), `{"model":"m","messages":[ ] }`, `{`,
	} {
		f.Add([]byte(s), false)
		f.Add([]byte(s), true)
	}
	p := mooncake.Profile{}.WithDefaults()
	f.Fuzz(func(t *testing.T, raw []byte, completions bool) {
		ep := mooncake.Chat
		if completions {
			ep = mooncake.Completions
		}
		lim := usual
		lim.MediaHosts = []string{"x"}
		r, e := Parse(ep, raw, lim)
		if e != nil {
			require.Equal(t, 400, e.Status)
			require.True(t, json.Valid(e.JSON()))
			return
		}
		require.NotEmpty(t, r.Model)
		legs := r.Parts()
		require.NotEmpty(t, legs)
		require.LessOrEqual(t, len(legs), usual.Answers)
		for i := range legs { // what goes out is JSON with every key of ours once
			var sent []byte
			for _, s := range p.DecodeBody(&r.Body, ep, &legs[i].Patch, json.RawMessage(`{"a":1}`), "", true, nil) {
				sent = append(sent, s...)
			}
			b, err := mooncake.ScanBody(sent, 0)
			require.NoError(t, err)
			for _, key := range []string{"model", "stream", "stream_options", "kv_transfer_params"} {
				require.Equal(t, 1, b.Count(key), key)
			}
		}
	})
}

func BenchmarkParse(b *testing.B) {
	turn := `{"role":"user","content":"` + strings.Repeat("plain text with a \\n now and then, ", 50) + `"},`
	raw := []byte(`{"model":"m","messages":[` + strings.Repeat(turn, 200) + `{"role":"user","content":"Hi"}],"stream":true,"max_tokens":100}`)
	b.ReportAllocs()
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if _, e := Parse(mooncake.Chat, raw, Limits{}); e != nil {
			b.Fatal(e)
		}
	}
}

// The echo of a chat is its last message, which would stand in the prompt twice if the answer went
// on elsewhere.
func TestTheEchoOfAChatCannotGoOnElsewhere(t *testing.T) {
	r, fail := Parse(mooncake.Chat, []byte(`{"model":"m","echo":true,"add_generation_prompt":false,"messages":[{"role":"assistant","content":"a"}]}`), Limits{})
	require.Nil(t, fail)
	require.True(t, CannotResume(&r.Body, r.Endpoint))
	r, fail = Parse(mooncake.Completions, []byte(`{"model":"m","echo":true,"prompt":"a"}`), Limits{})
	require.Nil(t, fail)
	require.False(t, CannotResume(&r.Body, r.Endpoint))
}

package main

import (
	"encoding/json"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"evenkeel/bench/rigs/asked"
)

// rule is a difference that is none. when is nil for one that always is.
type rule struct {
	path *regexp.Regexp
	when func(d difference, got map[string]any) bool
	why  string
}

// mayDiffer are all of them. Every other field of an answer must be what the
// plain engine says.
var mayDiffer = []rule{
	{regexp.MustCompile(`^body\.(id|request_id)$`), nil, "every request has an id of its own"},
	{regexp.MustCompile(`^body\.created$`), nil, "it is the time of the request"},
	{regexp.MustCompile(`^body\.system_fingerprint$`), nil, "it names an engine and its settings, and the engines have other settings"},
	{regexp.MustCompile(`^body\.usage\.prompt_tokens_details\.cached_tokens$`), nil,
		"evenkeel reports what the prefill engine had cached; the plain engine has a cache of its own"},
	{regexp.MustCompile(`^body\.kv_transfer_params$`), nil, "a [hand-off](../glossary.md#hand-off) is between a prefill engine and a decode engine; the plain engine has none"},
	{regexp.MustCompile(`\.tool_calls\[\d+\]\.id$`), nil, "vLLM draws it at random"},
	{
		regexp.MustCompile(`^body\.choices\[\d+\]\.weight_versions\[0\]\.start$`),
		func(d difference, _ map[string]any) bool {
			return d.Plain == json.Number("0") && d.Got != asked.Missing{}
		},
		"which weights have made an answer, an engine says at its end; of an answer that went on elsewhere, the first engine never said it, so " +
			"that evenkeel tells it only from there on",
	},
	{
		regexp.MustCompile(`\.tool_calls\[\d+\]\.function\.arguments$`),
		func(d difference, _ map[string]any) bool { return sameJSON(d.Plain, d.Got) },
		"vLLM reads the arguments of an answer in one piece and writes them anew (`0e02` becomes `0.0`), and those of a stream it sends as " +
			"they were generated; they are the same value",
	},
	{
		regexp.MustCompile(`^body\.(service_tier|prompt_logprobs|prompt_token_ids|prompt_text|ec_transfer_params|metrics|choices\[\d+\]\.(token_ids|prompt_token_ids|prompt_logprobs|routed_experts)` +
			`|choices\[\d+\]\.message\.(refusal|annotations|audio|function_call|reasoning)|usage\.(completion_tokens_details|prompt_tokens_details\.(multimodal_tokens|created_cache_tokens)))$`),
		func(d difference, _ map[string]any) bool { return d.Plain == nil && d.Got == asked.Missing{} },
		"it is null in the plain engine's answer and absent in evenkeel's: evenkeel puts an answer in one piece together from the engine's " +
			"stream, where vLLM leaves these fields out, " +
			"and evenkeel removes token ids from a stream whose client did not ask for them",
	},
	{
		regexp.MustCompile(`^body\.choices\[\d+\]\.prompt_token_ids\[\d+\]$`),
		func(d difference, got map[string]any) bool {
			_, wanted := asked.Leaves(got)[d.Path[:strings.LastIndex(d.Path, ".")]+".token_ids[0]"]
			return !wanted && d.Got == asked.Missing{}
		},
		"vLLM sends them in the stream of an answer with `echo`; evenkeel sends token ids only to clients that asked for them",
	},
	{
		regexp.MustCompile(`^body\.error\.(message|type|param|code)$`),
		func(_ difference, got map[string]any) bool {
			_, own := asked.Leaves(got)["body.error.code"].(string)
			return own
		},
		"where evenkeel itself refuses a request, the text is its own, and the code is OpenAI's, which is a word and not a number; the status " +
			"is the same as the engine's",
	},
}

// sameJSON says whether two texts are the same JSON value.
func sameJSON(a, b any) bool {
	x, isX := a.(string)
	y, isY := b.(string)
	var v, w any
	return isX && isY && json.Unmarshal([]byte(x), &v) == nil && json.Unmarshal([]byte(y), &w) == nil && reflect.DeepEqual(v, w)
}

// hidden says whether a rule explains the difference.
func hidden(d difference, got map[string]any) bool {
	return slices.ContainsFunc(mayDiffer, func(r rule) bool { return r.path.MatchString(d.Path) && (r.when == nil || r.when(d, got)) })
}

// early is a document with its status where it belongs. vLLM answers 200 to some
// streams that it then refuses with the first event, and evenkeel answers them with
// the status of the refusal.
func early(doc map[string]any) map[string]any {
	events, _ := doc["body"].(map[string]any)
	refusal, _ := events["error"].(map[string]any)
	if choices, _ := events["choices"].([]any); refusal == nil || doc["content_type"] != "text/event-stream" || len(choices) > 0 {
		return doc
	}
	return map[string]any{"status": refusal["code"], "content_type": "application/json", "body": map[string]any{"error": refusal}}
}

type difference = asked.Difference

// compare returns what differs and no rule explains, and how many fields were compared.
func compare(plain, got map[string]any) (different []difference, fields int) {
	return asked.Compare(plain, got, func(d difference) bool { return hidden(d, got) })
}

// number is the value of a leaf that is a number with a fraction.
func number(v any) (float64, bool) {
	n, ok := v.(json.Number)
	if !ok || !strings.ContainsAny(n.String(), ".e") {
		return 0, false
	}
	f, err := n.Float64()
	return f, err == nil
}

// beyondSpread are the differences that the plain engine's own two answers do
// not explain. A field in which it agrees with itself must be the same; a text
// must be one of its two; a number may be as far from one of its two as its
// numbers are from each other anywhere in this answer.
func beyondSpread(first, second, got map[string]any) (left []difference) {
	own, _ := compare(first, second)
	spread := 0.0
	for _, d := range own {
		a, isA := number(d.Plain)
		b, isB := number(d.Got)
		if isA && isB {
			spread = max(spread, math.Abs(a-b))
		}
	}
	against, _ := compare(first, got)
	for _, d := range against {
		i := slices.IndexFunc(own, func(o difference) bool { return o.Path == d.Path })
		a, isA := number(d.Plain)
		b, isB := number(d.Got)
		switch {
		case i >= 0 && own[i].Got == d.Got:
		case isA && isB && math.Abs(a-b) <= spread:
		default:
			left = append(left, d)
		}
	}
	return left
}

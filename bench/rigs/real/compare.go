package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
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
		func(d difference, _ map[string]any) bool { return d.plain == json.Number("0") && d.got != missing{} },
		"which weights have made an answer, an engine says at its end; of an answer that went on elsewhere, the first engine never said it, so that evenkeel tells it only from there on",
	},
	{
		regexp.MustCompile(`\.tool_calls\[\d+\]\.function\.arguments$`),
		func(d difference, _ map[string]any) bool { return sameJSON(d.plain, d.got) },
		"vLLM reads the arguments of an answer in one piece and writes them anew (`0e02` becomes `0.0`), and those of a stream it sends as they were generated; they are the same value",
	},
	{
		regexp.MustCompile(`^body\.(service_tier|prompt_logprobs|prompt_token_ids|prompt_text|ec_transfer_params|metrics|choices\[\d+\]\.(token_ids|prompt_token_ids|prompt_logprobs|routed_experts)` +
			`|choices\[\d+\]\.message\.(refusal|annotations|audio|function_call|reasoning)|usage\.(completion_tokens_details|prompt_tokens_details\.(multimodal_tokens|created_cache_tokens)))$`),
		func(d difference, _ map[string]any) bool { return d.plain == nil && d.got == missing{} },
		"it is null in the plain engine's answer and absent in evenkeel's: evenkeel puts an answer in one piece together from the engine's stream, where vLLM leaves these fields out, " +
			"and evenkeel removes token ids from a stream whose client did not ask for them",
	},
	{
		regexp.MustCompile(`^body\.choices\[\d+\]\.prompt_token_ids\[\d+\]$`),
		func(d difference, got map[string]any) bool {
			_, asked := leaves("", got, map[string]any{})[d.path[:strings.LastIndex(d.path, ".")]+".token_ids[0]"]
			return !asked && d.got == missing{}
		},
		"vLLM sends them in the stream of an answer with `echo`; evenkeel sends token ids only to clients that asked for them",
	},
	{
		regexp.MustCompile(`^body\.error\.(message|type|param|code)$`),
		func(_ difference, got map[string]any) bool {
			_, own := leaves("", got, map[string]any{})["body.error.code"].(string)
			return own
		},
		"where evenkeel itself refuses a request, the text is its own, and the code is OpenAI's, which is a word and not a number; the status is the same as the engine's",
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
	return slices.ContainsFunc(mayDiffer, func(r rule) bool { return r.path.MatchString(d.path) && (r.when == nil || r.when(d, got)) })
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

// leaves are the values of a document by their paths. Empty lists and objects
// count as values, so that nothing disappears.
func leaves(path string, v any, into map[string]any) map[string]any {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			leaves(strings.TrimPrefix(path+"."+key, "."), value, into)
		}
		if len(v) == 0 {
			into[path] = "{}"
		}
	case []any:
		for i, value := range v {
			leaves(fmt.Sprintf("%s[%d]", path, i), value, into)
		}
		if len(v) == 0 {
			into[path] = "[]"
		}
	default:
		into[path] = v
	}
	return into
}

// difference is a field in which two documents differ. An absent field is
// missing.
type difference struct {
	path       string
	plain, got any
}

type missing struct{}

func (missing) String() string { return "no such field" }

func (d difference) String() string {
	return fmt.Sprintf("%s: %s, not %s", d.path, show(d.got), show(d.plain))
}

func show(v any) string {
	if text, ok := v.(string); ok {
		return fmt.Sprintf("%.120q", text)
	}
	if v == nil {
		return "null"
	}
	return fmt.Sprint(v)
}

// compare returns what differs, and how many fields were compared.
func compare(plain, got map[string]any) (different []difference, fields int) {
	a, b := leaves("", plain, map[string]any{}), leaves("", got, map[string]any{})
	for key := range b {
		if _, ok := a[key]; !ok {
			a[key] = missing{}
		}
	}
	for _, path := range slices.Sorted(maps.Keys(a)) {
		v, ok := b[path]
		if !ok {
			v = missing{}
		}
		d := difference{path, a[path], v}
		if a[path] != v && hidden(d, got) {
			continue
		}
		fields++
		if a[path] != v {
			different = append(different, d)
		}
	}
	return different, fields
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
		a, isA := number(d.plain)
		b, isB := number(d.got)
		if isA && isB {
			spread = max(spread, math.Abs(a-b))
		}
	}
	against, _ := compare(first, got)
	for _, d := range against {
		i := slices.IndexFunc(own, func(o difference) bool { return o.path == d.path })
		a, isA := number(d.plain)
		b, isB := number(d.got)
		switch {
		case i >= 0 && own[i].got == d.got:
		case isA && isB && math.Abs(a-b) <= spread:
		default:
			left = append(left, d)
		}
	}
	return left
}

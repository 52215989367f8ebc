package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
)

// A difference of these fields is none. Every other field of an answer must be
// what the plain engine says.
var mayDiffer = []struct {
	path *regexp.Regexp
	why  string
}{
	{regexp.MustCompile(`^body\.id$`), "every request has an id of its own"},
	{regexp.MustCompile(`^body\.created$`), "it is the time of the request"},
	{regexp.MustCompile(`^body\.system_fingerprint$`), "it names an engine and its settings, and the engines have other settings"},
	{regexp.MustCompile(`^body\.usage\.prompt_tokens_details\.cached_tokens$`), "evenkeel tells what the prefill engine had cached; the plain engine has a cache of its own"},
	{regexp.MustCompile(`^body\.kv_transfer_params$`), "a hand-off is between the engines, and the plain engine has none"},
	{regexp.MustCompile(`\.tool_calls\[\d+\]\.id$`), "vLLM draws it at random"},
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
		if slices.ContainsFunc(mayDiffer, func(m struct {
			path *regexp.Regexp
			why  string
		}) bool {
			return m.path.MatchString(path)
		}) {
			continue
		}
		v, ok := b[path]
		if !ok {
			v = missing{}
		}
		fields++
		if a[path] != v {
			different = append(different, difference{path, a[path], v})
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

package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

// The base model's name has a colon, behind which SGLang looks for an adapter. It allows that for
// such addresses only.
const (
	base    = "s3://models/tiny"
	adapter = "lora1"
	full    = base + ":" + adapter
)

// spoken are requests to the endpoints at which SGLang can be asked for an adapter.
var spoken = map[string]body{
	"/v1/chat/completions": {"max_tokens": 12, "temperature": 0, "messages": []body{{"role": "user", "content": "Hello there"}}},
	"/v1/completions":      {"max_tokens": 12, "temperature": 0, "prompt": "The capital of France is"},
	"/v1/messages":         {"max_tokens": 12, "temperature": 0, "messages": []body{{"role": "user", "content": "Hello there"}}},
	generate:               asks(nil, nil),
}

// speaks is the text of an answer, and the names that it gives the model.
func speaks(a answer) (text string, models []string, err error) {
	take := func(data []byte) error {
		v, err := asked.Parse(data)
		doc, _ := v.(map[string]any)
		leaves := asked.Leaves(doc)
		for _, path := range slices.Sorted(maps.Keys(leaves)) {
			s, _ := leaves[path].(string)
			switch name := path[strings.LastIndexByte(path, '.')+1:]; {
			case name == "model":
				models = append(models, s)
			case path == "text": // of /generate, whose events have all of the answer so far
				text = s
			case name == "content" || name == "text":
				text += s
			}
		}
		return err
	}
	if a.Err != nil || a.Status != 200 {
		return "", nil, fmt.Errorf("%v", a)
	}
	if strings.HasPrefix(a.Head.Get("Content-Type"), "text/event-stream") {
		_, err = testbed.Events(a.Body, take)
	} else {
		err = take(a.Body)
	}
	slices.Sort(models)
	return text, slices.Compact(models), err
}

// adapts asks for the adapter by both of its names, and for the base model, at each endpoint, whole
// and in a stream. The answer must be what the server itself says to its own name, and must have
// the name that was asked for.
func adapts(ctx context.Context, w *site) (string, error) {
	n := 0
	for path, form := range spoken {
		for _, stream := range []bool{false, true} {
			own := map[string]string{} // what the server itself says, by its own name
			for _, name := range []string{base, full} {
				b := form.With(body{"model": name, "stream": stream})
				if path == generate && name == full {
					b["lora_path"] = adapter
				}
				text, _, err := speaks(ask(ctx, "POST", w.url(plain)+path, b))
				if err != nil {
					return "", fmt.Errorf("directly, %s of %s: %w", name, path, err)
				}
				own[name] = text
			}
			if own[base] == own[full] || own[full] == "" {
				return "", fmt.Errorf("%s: the server itself answers the same with the adapter and without: %q", path, own)
			}
			for _, proxy := range []*testbed.Proxy{w.alone, w.pair} {
				for name, is := range map[string]string{base: base, full: full, adapter: full} {
					text, models, err := speaks(ask(ctx, "POST", proxy.URL()+path, form.With(body{"model": name, "stream": stream})))
					if err != nil {
						return "", fmt.Errorf("%s of %s, stream %t: %w", name, path, stream, err)
					}
					if text != own[is] || path != generate && !slices.Equal(models, []string{name}) {
						return "", fmt.Errorf("%s of %s, stream %t: %q of %q, not %q", name, path, stream, text, models, own[is])
					}
					n++
				}
			}
		}
	}
	for path, proxy := range map[string]*testbed.Proxy{"/v1/score": w.alone, "/v1/responses": w.pair} {
		if a := ask(ctx, "POST", proxy.URL()+path, body{"model": full, "query": "a", "items": []string{"b"}, "input": "a"}); a.Status != 404 {
			return "", fmt.Errorf("the adapter at %s, which SGLang would not use: %v", path, a)
		}
	}
	return fmt.Sprintf("%d answers, alone and by a pair, are of the model that was asked for", n), nil
}

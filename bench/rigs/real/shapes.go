package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	"evenkeel/bench/rigs/real/vllm"
)

// shape is a request whose answer must be the plain engine's.
type shape struct {
	name string
	path string
	body body
}

// everyone are the engines of most rows.
var everyone = []string{"plain", "p0", "d0", "d1"}

// row asks for a JSON answer and for a stream.
func (s shape) row() row {
	return usually(s.name, func(ctx context.Context, w *site) (outcome, error) {
		all := outcome{verdict: pass}
		var seen []string
		for _, form := range []struct {
			name string
			more body
		}{{"JSON", nil}, {"stream", body{"stream": true}}} {
			b := s.body.With(form.more)
			if form.name == "stream" && b["stream_options"] == nil {
				b["stream_options"] = body{"include_usage": true}
			}
			one := w.same(ctx, s.path, b)
			if one.verdict != pass && all.verdict != fail {
				all.verdict = one.verdict
			}
			seen = append(seen, form.name+": "+one.seen)
		}
		all.seen = strings.Join(seen, "; ")
		return all, nil
	})
}

// same asks the plain engine twice and evenkeel once.
func (w *site) same(ctx context.Context, path string, b body) outcome {
	var docs [3]map[string]any
	for i, url := range []string{w.engines["plain"].url(), w.engines["plain"].url(), w.proxy.URL()} {
		a := ask(ctx, "POST", url+path, b)
		var err error
		if docs[i], err = documentOf(a); err != nil {
			return failed("%s: no document: %v: %v", []string{"plain", "plain", "evenkeel"}[i], err, a)
		}
	}
	return w.judge(ctx, question{path: path, body: b, want: early(docs[0])}, early(docs[1]), docs[2])
}

// judge compares evenkeel's answer with two of the plain engine.
func judge(first, second, got map[string]any) outcome {
	own, _ := compare(first, second)
	if len(own) > 0 {
		if left := beyondSpread(first, second, got); len(left) > 0 {
			return failed("differs by more than the plain engine from itself: %s", some(left))
		}
		return outcome{unsteady, fmt.Sprintf("the plain engine differs from itself in %s", some(own))}
	}
	different, fields := compare(first, got)
	if len(different) > 0 {
		return failed("%s", some(different))
	}
	if status := fmt.Sprint(got["status"]); status != "200" {
		return passed("%s, %d fields", status, fields)
	}
	return passed("%d fields", fields)
}

// some are the first of many differences.
func some(list []difference) string {
	var text []string
	for _, d := range list[:min(3, len(list))] {
		text = append(text, d.String())
	}
	if more := len(list) - len(text); more > 0 {
		text = append(text, fmt.Sprintf("and %d more fields", more))
	}
	return strings.Join(text, ", ")
}

// ids are n token ids, other ones for each seed.
func ids(n int, seed uint64) []int { return vllm.TokenIDs(n, rand.New(rand.NewPCG(seed, 0))) }

var (
	talk    = []body{{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is a proxy?"}}
	greedy  = body{"model": model, "temperature": 0, "max_tokens": 24}
	seeded  = body{"model": model, "temperature": 1, "seed": 5, "max_tokens": 24}
	weather = body{"type": "function", "function": body{"name": "weather", "description": "tells the weather", "parameters": body{
		"type": "object", "additionalProperties": false, "required": []string{"city", "unit"},
		"properties": body{"city": body{"type": "string", "enum": []string{"Paris", "Oslo"}}, "unit": body{"type": "string", "enum": []string{"C", "F"}}},
	}}}
	verdictSchema = body{"type": "object", "additionalProperties": false, "required": []string{"answer", "sure"},
		"properties": body{"answer": body{"type": "string", "enum": []string{"yes", "no"}}, "sure": body{"type": "boolean"}}}
)

func says(more body) body      { return greedy.With(body{"messages": talk}).With(more) }
func completes(more body) body { return greedy.With(body{"prompt": "hello there"}).With(more) }

var shapes = []shape{
	{name: "chat, greedy", path: chat, body: says(nil)},
	{name: "chat, seeded", path: chat, body: seeded.With(body{"messages": talk})},
	{name: "chat, no limit of its own", path: chat, body: body{"model": model, "messages": talk}},
	{name: "chat, max_completion_tokens", path: chat, body: body{"model": model, "temperature": 0, "messages": talk, "max_completion_tokens": 9}},
	{name: "chat, logprobs", path: chat, body: says(body{"logprobs": true, "top_logprobs": 3})},
	{name: "chat, n", path: chat, body: seeded.With(body{"messages": talk, "n": 3})},
	{name: "chat, n with logprobs", path: chat, body: seeded.With(body{"messages": talk, "n": 2, "logprobs": true, "top_logprobs": 2})},
	{name: "chat, stop", path: chat, body: says(body{"stop": []string{"a", "e"}, "max_tokens": 80})},
	{name: "chat, penalties", path: chat, body: says(body{"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2})},
	{name: "chat, logit_bias", path: chat, body: says(body{"logit_bias": body{"100": 50, "200": -100}})},
	{name: "chat, structured output: choice", path: chat, body: says(body{"structured_outputs": body{"choice": []string{"yes", "no"}}})},
	{name: "chat, structured output: regex", path: chat, body: says(body{"structured_outputs": body{"regex": "[a-c]{3}-[0-9]{2}"}})},
	{name: "chat, response_format: json_schema", path: chat, body: says(body{"max_tokens": 60,
		"response_format": body{"type": "json_schema", "json_schema": body{"name": "verdict", "strict": true, "schema": verdictSchema}}})},
	{name: "chat, response_format: json_object", path: chat, body: says(body{"response_format": body{"type": "json_object"}})},
	{name: "chat, tools: a named function", path: chat, body: says(body{"max_tokens": 60, "tools": []body{weather},
		"tool_choice": body{"type": "function", "function": body{"name": "weather"}}})},
	{name: "chat, tools: required", path: chat, body: says(body{"max_tokens": 100, "tools": []body{weather}, "tool_choice": "required"})},
	{name: "chat, tools: a call that max_tokens cuts", path: chat, body: says(body{"max_tokens": 20, "tools": []body{weather}, "tool_choice": "required"})},
	{name: "chat, prompt_logprobs", path: chat, body: says(body{"prompt_logprobs": 2})},
	{name: "chat, prompt_logprobs with one token", path: chat, body: says(body{"prompt_logprobs": 2, "max_tokens": 1})},
	{name: "chat, tools: auto", path: chat, body: says(body{"tools": []body{weather}, "tool_choice": "auto"})},
	{name: "chat, return_token_ids", path: chat, body: says(body{"return_token_ids": true})},
	{name: "chat, stream_options: none", path: chat, body: says(body{"stream_options": nil})},
	{name: "chat, stream_options: continuous usage", path: chat, body: says(body{"stream_options": body{"include_usage": true, "continuous_usage_stats": true}})},
	{name: "completion, greedy", path: completions, body: completes(nil)},
	{name: "completion, seeded", path: completions, body: seeded.With(body{"prompt": "hello there"})},
	{name: "completion, no limit of its own", path: completions, body: body{"model": model, "prompt": "hello there"}},
	{name: "completion, max_tokens null", path: completions, body: completes(body{"max_tokens": nil})},
	{name: "completion, max_tokens 1", path: completions, body: completes(body{"max_tokens": 1})},
	{name: "completion, min_tokens and ignore_eos", path: completions, body: completes(body{"min_tokens": 40, "max_tokens": 50, "ignore_eos": true})},
	{name: "completion, logprobs", path: completions, body: completes(body{"logprobs": 2})},
	{name: "completion, echo", path: completions, body: completes(body{"echo": true})},
	{name: "completion, echo with logprobs and one token", path: completions, body: completes(body{"echo": true, "logprobs": 2, "max_tokens": 1})},
	{name: "completion, echo with logprobs and no token", path: completions, body: completes(body{"echo": true, "logprobs": 2, "max_tokens": 0})},
	{name: "completion, n", path: completions, body: seeded.With(body{"prompt": "hello there", "n": 3})},
	{name: "completion, stop", path: completions, body: completes(body{"stop": []string{"a", "e"}, "max_tokens": 80})},
	{name: "completion, stop that is shown", path: completions, body: completes(body{"stop": "e", "include_stop_str_in_output": true, "max_tokens": 80})},
	{name: "completion, stop_token_ids", path: completions, body: completes(body{"stop_token_ids": ids(100, 3), "max_tokens": 80})},
	{name: "completion, penalties", path: completions, body: completes(body{"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2})},
	{name: "completion, structured output: JSON", path: completions, body: completes(body{"max_tokens": 60, "structured_outputs": body{"json": verdictSchema}})},
	{name: "completion, 3 token ids", path: completions, body: completes(body{"prompt": ids(3, 3)})},
	{name: "completion, 100 token ids", path: completions, body: completes(body{"prompt": ids(100, 100)})},
	{name: "completion, 800 token ids with return_token_ids", path: completions, body: completes(body{"prompt": ids(800, 800), "return_token_ids": true})},
	{name: "completion, 1900 token ids", path: completions, body: completes(body{"prompt": ids(1900, 1900)})},
	{name: "completion, 800 token ids with logprobs", path: completions, body: completes(body{"prompt": ids(800, 801), "logprobs": 2})},
	{name: "completion, a list of prompts", path: completions, body: completes(body{"prompt": []string{"one", "two", "three"}})},
	{name: "completion, a list of prompts with n and echo", path: completions, body: seeded.With(body{"prompt": []string{"one", "two"}, "n": 2, "echo": true})},
	{name: "completion, a list of token-id prompts", path: completions, body: completes(body{"prompt": [][]int{ids(40, 1), ids(70, 2)}})},
	{name: "completion, stream_options: none", path: completions, body: completes(body{"stream_options": nil})},
	{name: "completion, stream_options: continuous usage", path: completions,
		body: completes(body{"stream_options": body{"include_usage": true, "continuous_usage_stats": true}})},

	{name: "context: 7 tokens fit, 7 are asked for", path: completions, body: completes(body{"prompt": ids(2041, 4), "max_tokens": 7, "ignore_eos": true})},
	{name: "context: 7 tokens fit, 8 are asked for", path: completions, body: completes(body{"prompt": ids(2041, 3), "max_tokens": 8, "ignore_eos": true})},
	{name: "context: one token fits", path: completions, body: completes(body{"prompt": ids(2047, 5), "max_tokens": 5})},
	{name: "context: the prompt fills it", path: completions, body: completes(body{"prompt": ids(2048, 6), "max_tokens": 1})},
	{name: "context: the prompt has one token more", path: completions, body: completes(body{"prompt": ids(2049, 7)})},
	{name: "context: the prompt has 652 tokens more", path: completions, body: completes(body{"prompt": ids(2700, 8)})},
	{name: "context: max_tokens is more than it", path: completions, body: completes(body{"max_tokens": 5000})},
	{name: "context: chat, max_completion_tokens is more than it", path: chat, body: body{"model": model, "messages": talk, "max_completion_tokens": 5000}},
	{name: "context: chat, a text that is too long", path: chat, body: says(body{"messages": []body{{"role": "user",
		"content": strings.Repeat("what is a proxy? ", 600)}}})},

	{name: "error: an unknown model", path: chat, body: says(body{"model": "nope"})},
	{name: "error: temperature below 0", path: chat, body: says(body{"temperature": -1})},
	{name: "error: n is 0", path: completions, body: completes(body{"n": 0})},
	{name: "error: max_tokens below 0", path: completions, body: completes(body{"max_tokens": -3})},
	{name: "error: no prompt", path: completions, body: greedy},
	{name: "error: no messages", path: chat, body: greedy.With(body{"messages": []body{}})},
	{name: "error: a role that is none", path: chat, body: says(body{"messages": []body{{"role": 5, "content": "x"}}})},
	{name: "error: too many logprobs", path: completions, body: completes(body{"logprobs": 1000})},
	{name: "error: a schema that is none", path: chat, body: says(body{"response_format": body{"type": "json_schema",
		"json_schema": body{"name": "x", "schema": body{"type": "nonsense"}}}})},
	{name: "error: a token id beyond the vocabulary", path: completions, body: completes(body{"prompt": []int{5, 100000}})},
}

package main

import (
	"context"
	"strings"
	"sync"

	"evenkeel/bench/rigs/asked"
)

// generate is vLLM's endpoint of token ids.
const generate = "/inference/v1/generate"

func generates(more, params body) body {
	return body{"model": model, "token_ids": ids(90, 11), "sampling_params": body{"temperature": 0, "max_tokens": 24}.With(params)}.With(more)
}

var generateShapes = []shape{
	{name: "generate, greedy", path: generate, body: generates(nil, nil)},
	{name: "generate, seeded", path: generate, body: generates(nil, body{"temperature": 1, "seed": 5})},
	{name: "generate, no limit of its own", path: generate, body: body{"model": model, "token_ids": ids(90, 11), "sampling_params": body{"temperature": 0}}},
	{name: "generate, a request_id of its own", path: generate, body: generates(body{"request_id": "mine"}, nil)},
	{name: "generate, text", path: generate, body: generates(body{"output_mode": "text"}, nil)},
	{name: "generate, text and stop", path: generate, body: generates(body{"output_mode": "text"}, body{"stop": []string{"a", "e"}, "max_tokens": 80})},
	{name: "generate, logprobs", path: generate, body: generates(nil, body{"logprobs": 2})},
	{name: "generate, logprobs with text", path: generate, body: generates(body{"output_mode": "text"}, body{"logprobs": 2})},
	{name: "generate, n", path: generate, body: generates(nil, body{"temperature": 1, "seed": 5, "n": 3})},
	{name: "generate, n with logprobs and text", path: generate, body: generates(body{"output_mode": "text"}, body{"temperature": 1, "seed": 5, "n": 2, "logprobs": 1})},
	{name: "generate, return_token_ids", path: generate, body: generates(body{"return_token_ids": true}, nil)},
	{name: "generate, min_tokens and ignore_eos", path: generate, body: generates(nil, body{"min_tokens": 40, "max_tokens": 50, "ignore_eos": true})},
	{name: "generate, stop_token_ids", path: generate, body: generates(nil, body{"stop_token_ids": ids(100, 3), "max_tokens": 80})},
	{name: "generate, stream_options: continuous usage", path: generate, body: generates(body{"stream_options": body{"include_usage": true, "continuous_usage_stats": true}}, nil)},
	{name: "generate, no token", path: generate, body: generates(body{"token_ids": []int{}}, nil)},
	{name: "generate, a token that the model lacks", path: generate, body: generates(body{"token_ids": []int{99_999_999}}, nil)},
	{name: "generate, an output_mode that there is not", path: generate, body: generates(body{"output_mode": "song"}, nil)},
}

var generating = []row{
	usually("generate, 40 at once", func(ctx context.Context, w *site) (outcome, error) {
		t, err := w.served(ctx, tokenPrompts(40, 60, 95))
		if err != nil {
			return failed("%v", err), nil
		}
		return passed("%v", t), nil
	}),
	usually("generate, kill -9 of a decode engine under streams and answers in one piece, and its restart", generateDies),
	usually("generate, a request is aborted by its name", generateAborts),
	// It comes last, because the decode engine computes the prompt anew: nobody fetches the KV of the
	// prefill engine, which keeps it for a while.
	shape{name: "generate, prompt_logprobs", path: generate, body: generates(body{"stream_options": nil}, body{"prompt_logprobs": 2})}.row(),
}

// tokenPrompts is prompts of generate, every second of which is answered in one piece.
func tokenPrompts(n, tokens int, seed uint64) (list []question) {
	for i := range n {
		b := generates(body{"token_ids": ids(50+13*i%600, seed*1000+uint64(i))}, body{"max_tokens": tokens, "ignore_eos": true, "logprobs": 1})
		if i%2 == 0 {
			b = b.With(body{"stream": true, "stream_options": body{"include_usage": true}})
		}
		list = append(list, question{path: generate, body: b})
	}
	return list
}

func generateDies(ctx context.Context, w *site) (outcome, error) {
	t, err := w.under(ctx, tokenPrompts(14, 400, 96), func() error { w.engines["d1"].Kill(); return nil })
	if err != nil {
		return outcome{}, err
	}
	again, err := back(ctx, w, "d1", 97)
	if err != nil {
		return failed("answers: %v; %v", t, err), nil
	}
	lost := w.proxy.Metric("evenkeel_decode_losses_total{")
	if !t.all() || !again.all() || lost == 0 {
		return failed("answers: %v, of which %g went on; after the restart: %v", t, lost, again), nil
	}
	return passed("answers: %v, of which %g went on; after the restart: %v", t, lost, again), nil
}

// generateAborts ends a stream by its name, in its middle. The client has what there is of it, and
// its end.
func generateAborts(ctx context.Context, w *site) (outcome, error) {
	var abort sync.Once
	ended := answer{}
	b := generates(body{"request_id": "to-end", "stream": true}, body{"max_tokens": 1900, "ignore_eos": true})
	got := listen(ctx, "POST", w.proxy.URL()+generate, b, func([]byte) {
		abort.Do(func() {
			ended = ask(ctx, "POST", w.proxy.URL()+"/inference/v1/abort_requests", body{"request_ids": []string{"generate-tokens-to-end"}})
		})
	})
	doc, err := documentOf(got)
	if err != nil {
		return failed("the answer: %v, %v; the abort: %v", got, err, ended), nil
	}
	said := asked.Leaves(doc)
	if finish := said["body.choices[0].finish_reason"]; ended.Status != 200 || finish != "abort" {
		return failed("the answer: %v; the abort: %v", got, ended), nil
	}
	if err := w.idle(ctx, w.behind...); err != nil {
		return failed("%v", err), nil
	}
	tokens := 0
	for path := range said {
		if strings.HasPrefix(path, "body.choices[0].token_ids[") {
			tokens++
		}
	}
	return passed("finish_reason abort, %d tokens; nothing is held", tokens), nil
}

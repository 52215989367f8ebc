package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"evenkeel/bench/rigs/testbed"
	"evenkeel/internal/stats"
)

// rollouts have what a trainer of a model does in a step and between two of them.
var rollouts = []row{
	usually("rollouts: 64 prompts with 8 samples, and pause, flush and resume between two steps", rolloutSteps),
	usually("rollouts: /tokenize and /v1/chat/completions/render tell the same ids", rendered),
}

// rolloutPrompts are those of each step, and samples how many answers each has.
const rolloutPrompts, samples = 64, 8

// rolloutSteps has two steps of the same prompts. Between them all engines are paused while the
// second step's requests come already, their prefix caches are emptied, and they are resumed. Every
// sample must be what a plain engine says, and the prompts of the second step must be computed
// again.
func rolloutSteps(ctx context.Context, w *site) (outcome, error) {
	step := func(number uint64) (list []question, tokens float64) {
		for i := range rolloutPrompts {
			length := 100 + 7*i
			tokens += float64(length)
			list = append(list, question{path: generate, body: generates(body{"token_ids": ids(length, 9800+uint64(i))},
				body{"n": samples, "temperature": 1, "seed": 1000*number + uint64(i), "max_tokens": 12, "ignore_eos": true})})
		}
		return list, tokens
	}
	first, _ := step(1)
	t, err := w.served(ctx, first)
	if err != nil || !t.all() {
		return failed("the first step: %v; %v", t, err), nil
	}
	if err := errors.Join(w.idle(ctx, w.behind...), w.callFleet(ctx, "/pause?mode=keep")); err != nil {
		return failed("%v", err), nil
	}
	second, tokens := step(2)
	if err := w.know(ctx, second); err != nil { // the plain engine is not paused
		return outcome{}, err
	}
	before, err := w.computed(ctx)
	if err != nil {
		return outcome{}, err
	}
	during := 0.0
	t, err = w.crowd(ctx, second, func() error {
		err := testbed.Await(ctx, time.Minute, "the requests wait for the paused engines", func() bool {
			return w.proxy.Metric("evenkeel_prefill_queue_requests{") >= rolloutPrompts
		})
		sofar, while := w.computed(ctx)
		during = sofar
		return errors.Join(err, while, w.callFleet(ctx, "/reset_prefix_cache"), w.callFleet(ctx, "/resume"))
	})
	if err != nil {
		return failed("%v", err), nil
	}
	if during > before {
		return failed("%g tokens were computed while the engines were paused", during-before), nil
	}
	after, err := w.computed(ctx)
	switch {
	case err != nil:
		return outcome{}, err
	case !t.all():
		return failed("the second step: %v", t), nil
	case after-before < tokens:
		return failed("of the second step's %g prompt tokens only %g were computed: some came from a cache of before", tokens, after-before), nil
	}
	return passed("%d samples in each step; all %g prompt tokens of the second were computed again", rolloutPrompts*samples, tokens),
		w.idle(ctx, w.behind...)
}

// computed is how many tokens of prompts the engines behind evenkeel have computed, and not found
// in their caches.
func (w *site) computed(ctx context.Context) (sum float64, err error) {
	for _, name := range w.behind {
		series, err := w.engines[name].series(ctx)
		if err != nil {
			return 0, err
		}
		sum += gauge(series, "prefix_cache_queries_total") - gauge(series, "prefix_cache_hits_total")
	}
	return sum, nil
}

// callFleet has evenkeel call all engines.
func (w *site) callFleet(ctx context.Context, path string) error {
	got := ask(ctx, "POST", "http://"+w.proxy.Address+"/admin/fleet/call", body{"path": path})
	if got.Status != 200 {
		return errors.Join(got.Err, fmt.Errorf("%s: %d %s", path, got.Status, got.Body))
	}
	return nil
}

// rendered has the plain engine tell the ids of the same chats at both of its endpoints.
func rendered(ctx context.Context, w *site) (outcome, error) {
	const chats = 20
	took := map[string][]float64{}
	tokens := 0
	for i := range chats {
		text := ""
		for j := range 12 * (i + 1) {
			text += fmt.Sprintf("%d and ", i*j)
		}
		b := body{"model": model, "messages": []body{{"role": "user", "content": text}}}
		var told [2][]int32
		for k, path := range []string{"/tokenize", chat + "/render"} {
			began := time.Now()
			got := ask(ctx, "POST", w.engines["plain"].url()+path, b)
			took[path] = append(took[path], time.Since(began).Seconds()*1e3)
			var said struct {
				Tokens   []int32 `json:"tokens"`
				TokenIDs []int32 `json:"token_ids"`
			}
			if err := json.Unmarshal(got.Body, &said); err != nil {
				return failed("%s: %d %.200s: %v", path, got.Status, got.Body, err), nil
			}
			told[k] = slices.Concat(said.Tokens, said.TokenIDs)
		}
		if len(told[0]) == 0 || !slices.Equal(told[0], told[1]) {
			return failed("a chat of %d characters has %d tokens and %d", len(text), len(told[0]), len(told[1])), nil
		}
		tokens = len(told[0])
	}
	for _, ms := range took {
		slices.Sort(ms)
	}
	return passed("the same ids for %d chats of up to %d tokens; in the median %.1f ms and %.1f ms", chats, tokens,
		stats.Median(took["/tokenize"]), stats.Median(took[chat+"/render"])), nil
}

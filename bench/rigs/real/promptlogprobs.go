package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

var promptLogprobs = []row{
	usually("completion, echo with logprobs", echoWithLogprobs),
}

// echoWithLogprobs asks for what an engine only has of prompts that it computes
// itself: the logprobs of the prompt. A decode engine gets the KV of a prompt and
// computes one token of it. The row asks a decode engine with a hand-off and
// without evenkeel, too, so that it knows whose fault a wrong answer is.
func echoWithLogprobs(ctx context.Context, w *site) (outcome, error) {
	defer w.killHung(ctx, "d0", "d1", "p0")
	short := func(url string, b body) answer {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		return ask(ctx, "POST", url+completions, b)
	}
	b := completes(body{"prompt": ids(100, 140), "max_tokens": 8, "echo": true, "logprobs": 2})
	plain, err := documentOf(short(w.engines["plain"].url(), b))
	if err != nil {
		return outcome{}, err
	}
	through := short(w.proxy.URL(), b)
	doc, err := documentOf(through)
	if err == nil {
		if different, fields := compare(plain, doc); len(different) == 0 {
			return passed("%d fields", fields), nil
		}
	}
	handoff, err := w.handoff(ctx, b)
	if err != nil {
		return failed("evenkeel: %v; then %v", through, err), nil
	}
	direct := short(w.engines["d1"].url(), b.With(body{"kv_transfer_params": handoff}))
	said := func(a answer) string {
		doc, err := documentOf(a)
		if errors.Is(err, context.DeadlineExceeded) {
			return "no answer within 30 s"
		}
		if err != nil {
			return strings.TrimSpace(a.String())
		}
		different, _ := compare(plain, doc)
		if len(different) == 0 {
			return "the plain engine's answer"
		}
		return some(different)
	}
	seen := fmt.Sprintf("a decode engine with a hand-off, without evenkeel: %s; evenkeel: %s", said(direct), said(through))
	if said(direct) == "the plain engine's answer" {
		return failed("%s", seen), nil
	}
	return outcome{fault, seen}, nil
}

// killHung kills engines that answer nothing any more although /health says that
// they are well. Rows that need them start them again.
func (w *site) killHung(ctx context.Context, names ...string) {
	for _, name := range names {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		if a := ask(ctx, "POST", w.engines[name].url()+completions, completes(body{"max_tokens": 1})); a.Status != 200 {
			fmt.Fprintf(w.said, "       %s hangs (%v) and is killed\n", name, a)
			w.engines[name].Kill()
		}
		cancel()
	}
}

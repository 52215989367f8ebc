package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

// question is a request, and what the plain engine answers to it.
type question struct {
	path string
	body body
	want map[string]any
}

// prompts makes n streamed completions of so many tokens. Their prompts differ
// in length and from each other, and from those of other seeds.
func prompts(n, tokens int, seed uint64) (list []question) {
	for i := range n {
		list = append(list, question{path: completions, body: greedy.With(body{
			"prompt": ids(50+13*i%600, seed*1000+uint64(i)), "max_tokens": tokens, "ignore_eos": true, "stream": true, "stream_options": body{"include_usage": true},
		})})
	}
	return list
}

// know asks the plain engine.
func (w *site) know(ctx context.Context, list []question) error {
	answers, err := askAll(ctx, w.engines["plain"].url(), list, new(atomic.Int64), nil)
	if err != nil {
		return err
	}
	for i, a := range answers {
		if list[i].want, err = documentOf(a); err != nil || a.Status != 200 {
			return fmt.Errorf("the plain engine answered %v, %w", a, err)
		}
	}
	return nil
}

// askAll asks a server all questions at once while act happens, and waits for the answers. It
// counts those that have begun.
func askAll(ctx context.Context, url string, list []question, begun *atomic.Int64, act func() error) ([]answer, error) {
	answers := make([]answer, len(list))
	one := func(ctx context.Context, url string, i int) (load.Kind, string) {
		first := sync.OnceFunc(func() { begun.Add(1) })
		answers[i] = listen(ctx, "POST", url+list[i].path, list[i].body, func([]byte) { first() })
		return load.OK, "" // count judges it, when all have ended
	}
	_, err := testbed.Drive(ctx, act, load.Config{URLs: []string{url}, Count: len(list), Concurrency: len(list), Own: one})
	return answers, err
}

// tally is what became of a crowd.
type tally struct {
	*testbed.Tally
	longest time.Duration // until the first byte
}

// all says that every answer was right.
func (t *tally) all() bool { return len(t.Wrong) == 0 && t.Refused == 0 }

// crowd asks evenkeel all questions at once while act happens, and before that the plain engine
// unless it was asked already.
func (w *site) crowd(ctx context.Context, list []question, act func() error) (*tally, error) {
	return w.askBoth(ctx, list, new(atomic.Int64), act)
}

// askBoth is crowd, and counts the answers of evenkeel that have begun.
func (w *site) askBoth(ctx context.Context, list []question, begun *atomic.Int64, act func() error) (*tally, error) {
	if list[0].want == nil {
		if err := w.know(ctx, list); err != nil {
			return nil, err
		}
	}
	answers, err := askAll(ctx, w.proxy.URL(), list, begun, act)
	if err != nil {
		return nil, err
	}
	return w.count(ctx, list, answers), nil
}

// under is a crowd that streams: act happens once as many answers have begun as there are streams.
func (w *site) under(ctx context.Context, list []question, act func() error) (*tally, error) {
	streams, begun := int64(0), atomic.Int64{}
	for _, q := range list {
		if q.body["stream"] == true {
			streams++
		}
	}
	return w.askBoth(ctx, list, &begun, func() error {
		if err := testbed.Await(ctx, time.Minute, "every stream has begun", func() bool { return begun.Load() >= streams }); err != nil {
			return err
		}
		return act()
	})
}

// How answers differ from the plain engine's. The first two may be.
const (
	asItself  load.Kind = "as far from the plain engine as it is from itself"
	undecided load.Kind = "that part from the plain engine where it was undecided"
	broken    load.Kind = "broken"
	unlike    load.Kind = "unlike the plain engine's"
)

// count judges answers by those of the plain engine.
func (w *site) count(ctx context.Context, list []question, answers []answer) *tally {
	r, t := &load.Result{Sent: len(answers)}, &tally{}
	for i, a := range answers {
		t.longest = max(t.longest, a.First)
		if kind, detail := w.like(ctx, list[i], i, a); kind == load.OK {
			r.OK++
		} else {
			r.Failures = append(r.Failures, load.Failure{Request: fmt.Sprint("question ", i), Kind: kind, Detail: detail})
		}
	}
	t.Tally = testbed.Count(func(f load.Failure) bool { return f.Kind != broken && f.Kind != unlike }, r)
	return t
}

// like judges an answer by the plain engine's. Of a wrong one, both go into a file.
func (w *site) like(ctx context.Context, q question, i int, a answer) (load.Kind, string) {
	doc, err := documentOf(a)
	switch {
	case err != nil:
		return broken, fmt.Sprint(a)
	case a.Status != 200:
		return load.Kind(fmt.Sprintf("http_%d/%v", a.Status, asked.Leaves(doc)["body.error.code"])), ""
	}
	different, _ := compare(q.want, doc)
	if len(different) == 0 {
		return load.OK, ""
	}
	// The plain engine answered while it had other requests, too, so it is asked
	// once more.
	why := some(different)
	again, err := documentOf(ask(ctx, "POST", w.engines["plain"].url()+q.path, q.body))
	if err == nil {
		switch o := w.judge(ctx, q, again, doc); o.verdict {
		case unsteady:
			return asItself, ""
		case pass:
			return undecided, "" // or off by rounding
		default:
			why = o.seen
		}
	}
	if text, err := json.MarshalIndent(map[string]any{"asked": q.body, "plain": q.want, "evenkeel": doc}, "", " "); err == nil {
		file := w.File(fmt.Sprintf("wrong-%v-%d.json", q.body["max_tokens"], i))
		if os.WriteFile(file, text, 0o644) == nil {
			why += " (both are in " + file + ")"
		}
	}
	return unlike, why
}

// served is a crowd that is right, and behind which nothing is held.
func (w *site) served(ctx context.Context, list []question) (t *tally, err error) {
	if t, err = w.crowd(ctx, list, nil); err != nil {
		return nil, err
	}
	return t, w.settled(ctx, t, w.behind...)
}

// settled says what is wrong of a crowd: answers, or what engines still hold behind
// it.
func (w *site) settled(ctx context.Context, t *tally, engines ...string) error {
	if err := w.idle(ctx, engines...); err != nil {
		return fmt.Errorf("%v; %w", t, err)
	}
	if !t.all() {
		return errors.New(t.String())
	}
	return nil
}

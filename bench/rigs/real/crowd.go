package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

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
	answers := make([]answer, len(list))
	w.ask(ctx, w.engines["plain"].url(), list, answers, nil)
	for i, a := range answers {
		var err error
		if list[i].want, err = a.document(); err != nil || a.Status != 200 {
			return fmt.Errorf("the plain engine answered %v, %w", a, err)
		}
	}
	return nil
}

// ask sends all questions at once and waits for the answers. heard is called
// whenever bytes of an answer come.
func (w *site) ask(ctx context.Context, url string, list []question, answers []answer, heard func(i, bytes int)) {
	var all sync.WaitGroup
	for i, q := range list {
		all.Go(func() {
			answers[i] = listen(ctx, "POST", url+q.path, q.body, func(sofar []byte) {
				if heard != nil {
					heard(i, len(sofar))
				}
			})
		})
	}
	all.Wait()
}

// tally is what became of a crowd.
type tally struct {
	right, unsteady int
	undecided       int // they part where the plain engine was undecided, or are off by rounding
	wrong           []string
	refused         map[string]int // by status and code
	longest         time.Duration  // until the first byte
}

func (t *tally) String() string {
	var parts []string
	parts = append(parts, fmt.Sprintf("%d right", t.right))
	if t.unsteady > 0 {
		parts = append(parts, fmt.Sprintf("%d as far from the plain engine as it is from itself", t.unsteady))
	}
	if t.undecided > 0 {
		parts = append(parts, fmt.Sprintf("%d that part from the plain engine where it was undecided", t.undecided))
	}
	for _, code := range slices.Sorted(maps.Keys(t.refused)) {
		parts = append(parts, fmt.Sprintf("%d refused with %s", t.refused[code], code))
	}
	if len(t.wrong) > 0 {
		parts = append(parts, fmt.Sprintf("%d wrong or broken: %s", len(t.wrong), strings.Join(t.wrong[:min(2, len(t.wrong))], "; ")))
	}
	return strings.Join(parts, ", ")
}

// all says that every answer was right.
func (t *tally) all() bool { return len(t.wrong) == 0 && len(t.refused) == 0 }

// crowd asks evenkeel all questions at once, and before that the plain engine unless
// it was asked already. during runs meanwhile.
func (w *site) crowd(ctx context.Context, list []question, heard func(i, bytes int), during func() error) (t *tally, err error) {
	if list[0].want == nil {
		if err := w.know(ctx, list); err != nil {
			return nil, err
		}
	}
	answers, done := make([]answer, len(list)), make(chan error, 1)
	go func() {
		if during == nil {
			done <- nil
			return
		}
		done <- during()
	}()
	w.ask(ctx, w.proxy.URL(), list, answers, heard)
	if err := <-done; err != nil {
		return nil, err
	}
	return w.count(ctx, list, answers), nil
}

func (w *site) count(ctx context.Context, list []question, answers []answer) *tally {
	t := &tally{refused: map[string]int{}}
	for i, a := range answers {
		t.longest = max(t.longest, a.First)
		doc, err := a.document()
		switch {
		case err != nil:
			t.wrong = append(t.wrong, fmt.Sprintf("%v", a))
			continue
		case a.Status != 200:
			t.refused[fmt.Sprintf("%d %v", a.Status, asked.Leaves(doc)["body.error.code"])]++
			continue
		}
		different, _ := compare(list[i].want, doc)
		if len(different) == 0 {
			t.right++
			continue
		}
		// The plain engine answered while it had other requests, too, so it is asked
		// once more.
		why := some(different)
		again, err := ask(ctx, "POST", w.engines["plain"].url()+list[i].path, list[i].body).document()
		if err == nil {
			switch o := w.judge(ctx, list[i], again, doc); {
			case o.verdict == unsteady:
				t.unsteady++
				continue
			case o.verdict == pass:
				t.undecided++
				continue
			default:
				why = o.seen
			}
		}
		if text, err := json.MarshalIndent(map[string]any{"asked": list[i].body, "plain": list[i].want, "evenkeel": doc}, "", " "); err == nil {
			file := w.File(fmt.Sprintf("wrong-%v-%d.json", list[i].body["max_tokens"], i))
			if os.WriteFile(file, text, 0o644) == nil {
				why += " (both are in " + file + ")"
			}
		}
		t.wrong = append(t.wrong, why)
	}
	return t
}

// under is a crowd that streams; trouble comes once every answer has begun.
func (w *site) under(ctx context.Context, list []question, trouble func() error) (*tally, error) {
	var mu sync.Mutex
	begun := map[int]bool{}
	heard := func(i, _ int) {
		mu.Lock()
		defer mu.Unlock()
		begun[i] = true
	}
	return w.crowd(ctx, list, heard, func() error {
		if err := testbed.Await(ctx, time.Minute, "every answer has begun", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(begun) == len(list)
		}); err != nil {
			return err
		}
		return trouble()
	})
}

// served is a crowd that is right, and behind which nothing is held.
func (w *site) served(ctx context.Context, list []question) (t *tally, err error) {
	if t, err = w.crowd(ctx, list, nil, nil); err != nil {
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

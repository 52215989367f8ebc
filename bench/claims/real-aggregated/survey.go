package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"time"

	"evenkeel/bench/lab/survey"
	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/tools/page"
	"evenkeel/engine"
)

// surveyed is what a survey saw of the engine while that balanced its ranks itself, and what its
// own log of steps says.
type surveyed struct {
	found *survey.Finding
	steps []step
}

// survey looks at the first engine while it serves a list.
func (w *site) survey(ctx context.Context) (*surveyed, error) {
	u, err := url.Parse(w.engines[0].URL)
	if err != nil {
		return nil, err
	}
	client := engine.NewClient(engine.Options{ReadBuffer: 64 << 10})
	defer client.Close()
	watched, over := context.WithCancel(ctx)
	defer over()
	began := time.Now()
	failed := make(chan error, 1)
	go func() {
		_, err := w.play(ctx, variant{theirs, 0}, w.closed(w.draw(200)))
		failed <- err
		over()
	}()
	all, err := survey.Watch(watched, client, []*engine.Target{{ID: u.Host, URL: u, Rank: -1}}, time.Second, time.Hour, func(time.Duration) {})
	over()
	if err := errors.Join(err, <-failed); err != nil {
		return nil, err
	}
	found := survey.Judge(ctx, all, survey.Given{Slots: ranks.Slots, Budget: budget}, func(int, int) {})
	if len(found) != 1 {
		return nil, fmt.Errorf("the survey found %d groups, and the engine is one", len(found))
	}
	if w.report != "" {
		var b bytes.Buffer
		if err := survey.NewReport("evenkeel survey --engines "+u.Host, time.Since(began), all, found).HTML(&b); err != nil {
			return nil, err
		}
		if err := os.WriteFile(w.report, b.Bytes(), 0o644); err != nil {
			return nil, err
		}
	}
	steps, err := w.steps(0)
	if err != nil {
		return nil, err
	}
	return &surveyed{found: found[0], steps: within(steps, began, began.Add(time.Duration(found[0].Seconds*float64(time.Second))))}, nil
}

// writeSurvey prints what the survey saw beside what the steps were.
func writeSurvey(out io.Writer, s *surveyed) {
	var some, prefilling, gaps, decodes, tokens float64
	var length time.Duration
	for i := range s.steps {
		x := &s.steps[i]
		length += x.length
		if n := x.prefilling(); n > 0 {
			some++
			prefilling += float64(n)
		}
		for _, r := range x.ranks {
			gaps, decodes, tokens = gaps+r.decodes*ms(x.length), decodes+r.decodes, tokens+r.prompt
		}
	}
	f := s.found
	t := page.Markdown{Head: []string{"what", "the survey", "the engine's own log of steps"}, Text: 1}
	add := func(what, format string, seen, was float64) {
		t.Add(what, fmt.Sprintf(format, seen), fmt.Sprintf(format, was))
	}
	add("time between two tokens of an answer, ms", "%.1f", f.GapMs, gaps/decodes)
	add("tokens of prompts computed, a second", "%.0f", f.Prompts, tokens/length.Seconds())
	add("steps with a prompt, %", "%.0f", 100*f.Prefilling.Share, 100*some/float64(len(s.steps)))
	add("ranks that have one in those", "%.2f", f.Prefilling.Ranks, prefilling/some)
	fmt.Fprintf(out, "%d steps in %.0f s, vLLM's own balancing.\n\n%v\n%s\n", len(s.steps), f.Seconds, &t, f.Verdict())
}

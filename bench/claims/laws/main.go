// Command law measures what a step of engines that nobody else uses takes: against its requests,
// its KV tokens and the tokens of its prompts. It sends requests of its own, on each rank as many,
// and fits `c0 + cr * requests + c1 * KV tokens` to the times between their tokens; then prompts
// beside them, on one rank and on all.
//
//	go run ./bench/claims/laws -engine http://10.0.0.4:8000 -ranks 8 -requests 1,16,64 -contexts 512,4096,16384 -prompts 1024,4096,8192
//
// The engine's prefix cache should be off, and no prompt longer than what it computes in a step.
//
// Without arguments it makes the laws of bench/lab/laws and the tables of docs/results/laws.md,
// from times of kernels that NVIDIA measured; then it holds them against what was measured on two
// GPUs (-check), and says what it is worth to know the form of a law (-gate).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/internal/stats"
)

func main() {
	testbed.Main("laws", testbed.Page(run, []string{"-table"}, []string{"-check", "-out", "docs/results/laws.md"},
		[]string{"-gate", "-out", "docs/results/laws.md"}))
}

type options struct {
	engine                      string
	ranks, steps, repeats, most int
	requests, contexts, prompts numbers
	client                      ranks.Client
	out                         io.Writer
	sent                        uint64 // requests, so that no two begin alike
}

// numbers is a list such as 1,16,64.
type numbers []int

func (n *numbers) String() string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint([]int(*n)), " ", ","), "[]")
}

func (n *numbers) Set(text string) error {
	*n = nil
	for part := range strings.SplitSeq(text, ",") {
		x, err := strconv.Atoi(part)
		if err != nil || x < 1 {
			return fmt.Errorf("%q is not a number from 1 on", part)
		}
		*n = append(*n, x)
	}
	return nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) > 0 && args[0] == "-gate" {
		return runGate(ctx, args[1:], out)
	}
	o := options{requests: numbers{1, 4, 16, 64}, contexts: numbers{256, 2048, 8192}, prompts: numbers{512, 2048, 4096}, out: out}
	flags := flag.NewFlagSet("law", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.StringVar(&o.engine, "engine", "", "URL of the engine, such as http://10.0.0.4:8000")
	flags.IntVar(&o.ranks, "ranks", 1,
		"data-parallel ranks that it has behind this address; more than one are named by the header X-Data-Parallel-Rank")
	flags.Var(&o.requests, "requests", "that decode on each rank at once")
	flags.Var(&o.contexts, "contexts", "tokens of their prompts")
	flags.Var(&o.prompts, "prompts",
		"tokens of prompts that are computed beside them; with the requests no more than a step of the engine computes")
	flags.IntVar(&o.steps, "steps", 128, "that are measured of each")
	flags.IntVar(&o.repeats, "repeats", 3, "how often each is measured")
	flags.IntVar(&o.most, "kv", 0, "tokens that a rank has room for: what does not fit is left out; 0: everything is tried")
	_ = flags.Bool("gate", false, "as the first flag: what it is worth to know the form of a law, with flags of its own, which -gate -h lists")
	table := flags.Bool("table", false, "make bench/lab/laws/laws.json and the tables of docs/results/laws.md; no engine is asked")
	against := flags.Bool("check", false, "hold the laws against what check.py printed on a GPU: into the page that -out names, the files in "+
		"bench/claims/laws/measured; else its output from standard input")
	into := flags.String("out", "", "with -check: the page")
	cache := flags.String("cache", "", "with -table or -check: folder for the Python packages; empty: one in the user's cache folder")
	model := flags.String("model", "", "its name; empty: the one that /v1/models names")
	if err := testbed.Parse(flags, args); err != nil {
		return err
	}
	if *table && o.engine == "" && flags.NArg() == 0 {
		return tabulate(ctx, *cache, ".", out)
	}
	if *against && o.engine == "" && flags.NArg() == 0 {
		files := []string{"-"}
		if *into != "" {
			var err error
			if files, err = measuredFiles(); err != nil {
				return err
			}
		}
		return check(ctx, *cache, *into, files, out)
	}
	if o.engine == "" || flags.NArg() > 0 || o.ranks < 1 || o.steps < 16 || o.repeats < 1 {
		return errors.New("law wants -table, -check, or -engine URL, at least 16 -steps, one of -ranks and one of -repeats, and nothing else")
	}
	o.engine = strings.TrimRight(o.engine, "/")
	o.client = ranks.NewClient()
	o.client.Timeout = 10 * time.Minute
	o.client.Transport.(*http.Transport).MaxIdleConnsPerHost = 4096 //nolint:forcetypeassert // NewClient made it
	defer o.client.CloseIdleConnections()
	if o.client.Model = *model; o.client.Model == "" {
		var err error
		if o.client.Model, err = o.model(ctx); err != nil {
			return err
		}
	}
	return o.measure(ctx)
}

// model asks the engine for the name of its model.
func (o *options) model(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.engine+"/v1/models", nil)
	if err != nil {
		return "", err
	}
	resp, err := o.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("the engine does not tell its model: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	var list struct{ Data []struct{ ID string } }
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil || len(list.Data) == 0 {
		return "", fmt.Errorf("%s/v1/models names no model (%s): give -model", o.engine, resp.Status)
	}
	return list.Data[0].ID, nil
}

// measure measures everything and prints it.
func (o *options) measure(ctx context.Context) error {
	var l found
	for repeat := range o.repeats + 1 {
		for _, n := range o.requests {
			for _, context := range o.contexts {
				if o.most > 0 && n*(context+o.steps+o.steps/2) > o.most {
					continue
				}
				// An answer has half as many tokens more than are measured, and half of it is there in the
				// mean.
				c := cell{requests: n, kv: float64(n) * (float64(context) + 0.75*float64(o.steps))}
				var err error
				if c.ms, err = o.decode(ctx, n, context); err != nil {
					return fmt.Errorf("%d requests of %d tokens on each rank: %w", n, context, err)
				}
				if repeat > 0 { // an engine's first steps of each kind are slow
					l.cells = append(l.cells, c)
				}
			}
		}
	}
	if err := l.fit(); err != nil {
		return err
	}
	on := []int{1, o.ranks}
	if o.ranks == 1 {
		on = on[:1]
	}
	for repeat := range o.repeats + 1 {
		for _, tokens := range o.prompts {
			for _, ranks := range on {
				p, err := o.prompt(ctx, &l, tokens, ranks)
				if err != nil {
					return fmt.Errorf("prompts of %d tokens on %d ranks: %w", tokens, ranks, err)
				}
				if repeat > 0 {
					l.beside = append(l.beside, p)
				}
			}
		}
	}
	l.fitPrompts()
	return l.write(o.out, o)
}

// hold has n requests decode on each rank, and does something until all have ended. It returns what
// came of them.
func (o *options) hold(ctx context.Context, n, prompt, output int, meanwhile func(ctx context.Context)) []*ranks.Answer {
	var all sync.WaitGroup
	var answers []*ranks.Answer
	for rank := range o.ranks {
		for range n {
			a, r := &ranks.Answer{}, o.request(prompt, output)
			answers = append(answers, a)
			all.Go(func() { *a = o.client.Ask(ctx, o.engine, r, o.rank(rank)) })
		}
	}
	until, stop := context.WithCancel(ctx)
	var beside sync.WaitGroup
	beside.Go(func() { meanwhile(until) })
	all.Wait()
	stop()
	beside.Wait()
	return answers
}

// request is one that begins like no other.
func (o *options) request(prompt, output int) ranks.Request {
	o.sent++
	return ranks.Request{Prompt: prompt, Output: output, Seed: o.sent}
}

func (o *options) rank(i int) int {
	if o.ranks == 1 {
		return ranks.AnyRank
	}
	return i
}

// decode is the time between two tokens while n requests with such a context decode on each rank,
// and nothing else happens.
func (o *options) decode(ctx context.Context, n, prompt int) (ms float64, err error) {
	ms, _, _, _, err = ranks.Together(o.hold(ctx, n, prompt, o.steps+o.steps/2, func(context.Context) {}))
	return ms, err
}

// prompt has prompts of so many tokens computed on some ranks at once, again and again, beside a
// few requests that decode. What their tokens took longer meanwhile, the prompts cost. Rounds whose
// prompts did not end together are left out.
func (o *options) prompt(ctx context.Context, l *found, tokens, on int) (p beside, err error) {
	p.tokens, p.share = tokens, float64(on)/float64(o.ranks)
	n, about := o.requests[0], o.contexts[0]
	alone := l.at(float64(n), float64(n)*(float64(about)+2*float64(o.steps)))
	step := time.Duration(alone * float64(time.Millisecond))
	var rounds []round
	var failed error
	answers := o.hold(ctx, n, about, 4*o.steps, func(ctx context.Context) {
		for failed == nil && testbed.Pause(ctx, 3*step) == nil { // so that no step has prompts of two rounds
			var all sync.WaitGroup
			prompts := make([]ranks.Answer, on)
			for rank := range on {
				r := o.request(tokens, 1)
				all.Go(func() { prompts[rank] = o.client.Ask(ctx, o.engine, r, o.rank(rank)) })
			}
			all.Wait()
			if ctx.Err() == nil {
				var r round
				r, failed = newRound(prompts)
				rounds = append(rounds, r)
			}
		}
	})
	_, _, from, to, err := ranks.Together(answers)
	if err = errors.Join(err, failed); err != nil {
		return p, err
	}
	var more []float64
	for _, r := range rounds {
		if r.ended.Sub(r.first) > step/2 || r.began.Before(from) || r.ended.After(to) {
			continue
		}
		if ms, ok := r.longer(answers[0], alone); ok {
			more = append(more, ms)
		}
	}
	if len(more) == 0 {
		return p, fmt.Errorf("no prompts of %d rounds ended together while %d requests decoded: take more -steps", len(rounds), len(answers))
	}
	slices.Sort(more)
	p.rounds, p.ms = len(more), stats.Median(more)
	return p, nil
}

// round is prompts that were sent at once.
type round struct{ began, first, ended time.Time } // sent; the first and the last of their tokens

func newRound(prompts []ranks.Answer) (r round, err error) {
	for i, a := range prompts {
		if a.Err != nil {
			return r, a.Err
		}
		at := a.Chunks[0].At
		if i == 0 || a.Sent.Before(r.began) {
			r.began = a.Sent
		}
		if i == 0 || at.Before(r.first) {
			r.first = at
		}
		if at.After(r.ended) {
			r.ended = at
		}
	}
	return r, nil
}

// longer is how much longer the tokens of an answer took while a round was computed; not ok: it
// began or ended meanwhile.
func (r *round) longer(a *ranks.Answer, alone float64) (ms float64, ok bool) {
	before, after := -1, -1
	for i, c := range a.Chunks {
		if !c.At.After(r.began) {
			before = i
		}
		if after < 0 && c.At.After(r.ended) {
			after = i
		}
	}
	if before < 0 || after < 0 {
		return 0, false
	}
	x, y := a.Chunks[before], a.Chunks[after]
	return y.At.Sub(x.At).Seconds()*1e3 - float64(y.Tokens-x.Tokens)*alone, true
}

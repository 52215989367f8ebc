package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync"

	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/real/vllm"
	"evenkeel/internal/stats"
)

// placement is what lies on each rank: prompts, each of a request.
type placement struct {
	name  string
	ranks [ranks.Count][]int
	seen  byte // by which fits
}

// Which fits see a placement.
const (
	byAll  = iota
	byCost // of requests alone: on the ranks that the others see are as many requests everywhere
	byNone
)

func times(n, prompt int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = prompt
	}
	return list
}

// placements are what the law is fitted to and what it has to predict: the same
// KV evenly and unevenly, mixed lengths, the other rank the full one, and fewer
// requests. The first two fits see full ranks only, as the policies keep them, with as much
// KV as a rank has under the policies: a step grows a little faster than its KV,
// so that a line through small placements is too low for big ones.
var placements = []placement{
	{"short, 8 and 8 of 0.1k", [ranks.Count][]int{times(8, 100), times(8, 100)}, byAll},
	{"even, 8 and 8 of 0.5k", [ranks.Count][]int{times(8, 500), times(8, 500)}, byAll},
	{"even, 8 and 8 of 1.3k", [ranks.Count][]int{times(8, 1300), times(8, 1300)}, byAll},
	{"skewed, 8 of 1.7k and 8 of 0.1k", [ranks.Count][]int{times(8, 1700), times(8, 100)}, byAll},
	{"even, 8 and 8 of 2.4k", [ranks.Count][]int{times(8, 2400), times(8, 2400)}, byAll},
	{"skewed, 8 of 3.2k and 8 of 0.1k", [ranks.Count][]int{times(8, 3200), times(8, 100)}, byAll},
	{"few, 4 and 4 of 1k", [ranks.Count][]int{times(4, 1000), times(4, 1000)}, byCost},
	{"few, 2 and 2 of 2k", [ranks.Count][]int{times(2, 2000), times(2, 2000)}, byCost},
	{"even, 8 and 8 of 1.9k", [ranks.Count][]int{times(8, 1900), times(8, 1900)}, byNone},
	{"even, 8 and 8 of 0.9k", [ranks.Count][]int{times(8, 900), times(8, 900)}, byNone},
	{"mixed, on each 2 of 3.3k and 6 of 0.1k", [ranks.Count][]int{append(times(2, 3300), times(6, 100)...), append(times(2, 3300), times(6, 100)...)}, byNone},
	{"skewed, 8 of 0.1k and 8 of 1.7k", [ranks.Count][]int{times(8, 100), times(8, 1700)}, byNone},
	{"half full, 4 of 3.4k and 4 of 0.2k", [ranks.Count][]int{times(4, 3400), times(4, 200)}, byNone},
	{"few, 2 of 3.4k and 1 of 1.7k", [ranks.Count][]int{times(2, 3400), {1700}}, byNone},
}

// pinned is what the steps of a placement were.
type pinned struct {
	placement
	requests int
	most     int       // requests of a rank
	fullest  float64   // KV tokens of the fullest rank, in the middle of the steps
	all      float64   // of both
	ms       []float64 // mean step of each run
	steps    int
}

// pinnedTokens are how long the answers of a placement are: the requests do not
// begin in the same step, and its steps count while all of them decode.
const pinnedTokens = 110

// law measures every placement so many times, one after the other in each round.
func (w *site) law(ctx context.Context, rounds int) ([]pinned, error) {
	rows := make([]pinned, len(placements))
	c := ranks.NewClient()
	defer c.CloseIdleConnections()
	if _, _, err := w.pin(ctx, c, placements[0]); err != nil { // an engine's first steps are slow
		w.Logf("the first placement, which is not measured: %v", err)
	}
	for range rounds {
		for i, p := range placements {
			r := &rows[i]
			r.placement = p
			ms, steps, err := w.pin(ctx, c, p)
			for range 2 { // something else had the machine, so that not all requests decoded at one time
				if err != nil && ctx.Err() == nil {
					w.Logf("once more: %s: %v", p.name, err)
					ms, steps, err = w.pin(ctx, c, p)
				}
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			r.ms, r.steps = append(r.ms, ms), r.steps+steps
		}
	}
	for i := range rows {
		r := &rows[i]
		for _, rank := range r.ranks {
			sum := 0.0
			for _, prompt := range rank {
				sum += float64(prompt) + pinnedTokens/2
			}
			r.fullest, r.all, r.requests, r.most = max(r.fullest, sum), r.all+sum, r.requests+len(rank), max(r.most, len(rank))
		}
	}
	return rows, nil
}

// pin sends a placement to the engine, every request to its rank, and returns
// the mean gap while all of them decode.
func (w *site) pin(ctx context.Context, c ranks.Client, p placement) (ms float64, steps int, err error) {
	var answers []*ranks.Answer
	var all sync.WaitGroup
	for rank, prompts := range p.ranks {
		for _, prompt := range prompts {
			a := &ranks.Answer{}
			answers = append(answers, a)
			all.Go(func() { *a = c.Ask(ctx, w.decode.URL, ranks.Request{Prompt: prompt, Output: pinnedTokens}, rank) })
		}
	}
	all.Wait()
	ms, steps, _, _, err = ranks.Together(answers)
	return ms, steps, err
}

// law is how long a step takes, in ms, as the placements that are not kept back
// show it: by the KV tokens of the fullest rank alone, as evenkeel learns it, and
// by those of all ranks beside them. The ranks share the memory's bandwidth, so a
// rank is slower where the others read much, too. The third counts requests in place of
// that: it is what evenkeel learns where requests cost something.
type law struct {
	line stats.Line
	both stats.Regression // the first is a constant, the others are for 1,000 tokens of the fullest rank and of all
	cost stats.Regression // and for a request of the fullest rank in place of all tokens
}

func (l law) at(fullest, all float64) float64 {
	return l.both.At([]float64{1, fullest / 1e3, all / 1e3})
}

func fitLaw(rows []pinned) (l law) {
	var points []stats.Point
	var x, counted [][]float64
	var y, all []float64
	for _, r := range rows {
		for _, ms := range r.ms {
			if r.seen == byAll {
				points = append(points, stats.Point{X: r.fullest, Y: ms})
				x, y = append(x, []float64{1, r.fullest / 1e3, r.all / 1e3}), append(y, ms)
			}
			if r.seen != byNone {
				counted, all = append(counted, []float64{1, r.fullest / 1e3, float64(r.most)}), append(all, ms)
			}
		}
	}
	l.line = stats.LeastSquares(points)
	l.both, _ = stats.Regress(x, y) // the placements are many enough, and far from singular
	l.cost, _ = stats.Regress(counted, all)
	return l
}

func writeLaw(out io.Writer, rows []pinned, l law) {
	fmt.Fprintf(out,
		"vLLM %s on %d cores of a %s/%s machine. Fitted to %d measurements, of whose variation the first law explains %.4f (R2):\n\n"+
			"1. step = %.1f ms + %.3f ms per 1,000 KV tokens of the fullest rank\n"+
			"2. step = %.1f ms + %.3f ms per 1,000 KV tokens of the fullest rank + %.3f ms per 1,000 of both\n"+
			"3. step = %.1f ms + %.3f ms per 1,000 KV tokens of the fullest rank + %.2f ms for each of its requests\n\n",
		vllm.Version, runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, l.line.N, l.line.R2, l.line.Intercept, 1000*l.line.Slope, l.both.Of[0],
		l.both.Of[1], l.both.Of[2], l.cost.Of[0], l.cost.Of[1], l.cost.Of[2])
	fmt.Fprint(out, "| placement | requests | KV tokens | of the fullest rank | measured ms, each run | by the fullest rank, ms | off | by "+
		"both ranks, ms | off | with its requests, ms | off | seen by "+
		"the fits |\n|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|---|\n")
	var worst [3]float64
	for _, r := range rows {
		runs := ""
		for _, ms := range r.ms {
			runs += fmt.Sprintf("%.1f ", ms)
		}
		laws := [3]float64{l.line.At(r.fullest), l.at(r.fullest, r.all), l.cost.At([]float64{1, r.fullest / 1e3, float64(r.most)})}
		fmt.Fprintf(out, "| %s | %d | %.0f | %.0f | %s|", r.name, r.requests, r.all, r.fullest, runs)
		for k, at := range laws {
			wrong := off(stats.Mean(r.ms), at)
			if r.seen == byNone {
				worst[k] = max(worst[k], math.Abs(wrong))
			}
			fmt.Fprintf(out, " %.1f | %+.1f %% |", at, wrong)
		}
		fmt.Fprintf(out, " %s |\n", [...]string{byAll: "yes", byCost: "the third", byNone: "**no**"}[r.seen])
	}
	fmt.Fprintf(out, "\nThe rows that no fit saw are at most %.1f %% off the first law, %.1f %% off the second and %.1f %% off the third.\n",
		worst[0], worst[1], worst[2])
}

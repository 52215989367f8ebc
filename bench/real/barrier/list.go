package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/report"
	"evenkeel/stats"
)

// clients are how many requests are in the system: half as many again as there
// are slots, so that a policy has something to choose from.
const clients = 24

// draw is a list of requests: most prompts are short and a few are as long as
// twenty of them, so that where they lie matters.
func draw(seed uint64, n int) []request {
	rng := rand.New(rand.NewPCG(seed, 1))
	logNormal := func(median, sigma, least, most float64) int {
		return int(min(most, max(least, median*math.Exp(sigma*rng.NormFloat64()))))
	}
	list := make([]request, n)
	for i := range list {
		list[i] = request{logNormal(400, 1.6, 32, 5000), logNormal(60, .6, 15, 200)}
	}
	return list
}

// run is what one policy made of a list.
type run struct {
	policy string
	report.Sample
	failed int
	why    error // of the first that failed
	model  stepModel
}

// What a run shows beside report's metrics. The full part is from the first
// request that ended until the list is empty.
const (
	wholeTokens report.Metric = "whole_tokens_per_s"
	gapMean     report.Metric = "gap_mean_ms"
	gapP50      report.Metric = "gap_p50_ms"
	gapP99      report.Metric = "gap_p99_ms"
	engineLevel report.Metric = "engine_imbalance_tokens"
	engineRuns  report.Metric = "engine_running"
	engineWaits report.Metric = "engine_waiting"
	engineTop   report.Metric = "engine_fullest_tokens"
)

// play sends a list through evenkeel under a policy, always so many requests at
// once, and measures.
func (w *site) play(ctx context.Context, policy string, list []request) (_ *run, err error) {
	if err := w.serve(ctx, policy); err != nil {
		return nil, fmt.Errorf("%s: %w", policy, err)
	}
	defer func() { err = errors.Join(err, w.proxy.End(time.Minute)) }()
	c := newClient()
	defer c.CloseIdleConnections()
	watch := w.watch(ctx)
	answers := make([]answer, len(list))
	var next, ended int
	var full, empty time.Time
	var mu sync.Mutex
	take := func() (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		if next == len(list) {
			return 0, false
		}
		if next++; next == len(list) {
			empty = time.Now()
		}
		return next - 1, true
	}
	began := time.Now()
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for i, ok := take(); ok; i, ok = take() {
				answers[i] = c.ask(ctx, w.proxy.URL(), list[i], anyRank)
				mu.Lock()
				if ended++; ended == 1 {
					full = time.Now()
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	r := &run{policy: policy, Sample: report.Sample{}}
	r.measure(answers, began, full, empty)
	seen := watch()
	r.levels(seen, full, empty)
	r.model = seen.model
	return r, ctx.Err()
}

// measure takes what the clients saw.
func (r *run) measure(answers []answer, began, full, empty time.Time) {
	var end time.Time
	whole, inFull := 0, 0
	var gaps, first []float64
	for _, a := range answers {
		if a.err != nil {
			if r.failed++; r.why == nil {
				r.why = a.err
			}
			continue
		}
		had := 0
		for i, x := range a.chunks {
			whole += x.tokens - had
			if !x.at.Before(full) && !x.at.After(empty) {
				inFull += x.tokens - had
				if i > 0 && !a.chunks[i-1].at.Before(full) {
					gaps = append(gaps, x.at.Sub(a.chunks[i-1].at).Seconds()*1e3)
				}
			}
			had = x.tokens
			if x.at.After(end) {
				end = x.at
			}
		}
		if !a.sent.Before(full) {
			first = append(first, a.chunks[0].at.Sub(a.sent).Seconds()*1e3)
		}
	}
	r.Sample[wholeTokens] = float64(whole) / end.Sub(began).Seconds()
	r.Sample[report.TokensPerS] = float64(inFull) / empty.Sub(full).Seconds()
	r.Sample[report.WindowS] = empty.Sub(full).Seconds()
	if len(gaps) > 0 {
		slices.Sort(gaps)
		r.Sample[gapMean], r.Sample[gapP50], r.Sample[gapP99] = stats.Mean(gaps), stats.Median(gaps), gaps[len(gaps)*99/100]
	}
	if len(first) > 0 {
		r.Sample[report.TTFTMean] = stats.Mean(first)
	}
}

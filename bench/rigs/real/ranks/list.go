package ranks

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/internal/stats"
)

// Lengths are drawn log-normally.
type Lengths struct {
	Median, Sigma float64
	Least, Most   int
}

func (l Lengths) draw(rng *rand.Rand) int {
	return int(min(float64(l.Most), max(float64(l.Least), l.Median*math.Exp(l.Sigma*rng.NormFloat64()))))
}

// Draw is a list of so many requests. The same seed draws the same list.
func Draw(seed uint64, n int, prompt, output Lengths) []Request {
	rng := rand.New(rand.NewPCG(seed, 1))
	list := make([]Request, n)
	for i := range list {
		list[i] = Request{Prompt: prompt.draw(rng), Output: output.draw(rng)}
	}
	return list
}

// Rounds plays each of n in every round, in an order of the round's own, and returns what came of
// them, by rounds.
func Rounds[T any](rounds, n int, seed uint64, play func(round, i int) (T, error)) (all [][]T, err error) {
	for round := range rounds {
		made := make([]T, n)
		for _, i := range rand.New(rand.NewPCG(seed+uint64(round), 2)).Perm(n) {
			if made[i], err = play(round, i); err != nil {
				return nil, err
			}
		}
		all = append(all, made)
	}
	return all, nil
}

// Played is what became of a list.
type Played struct {
	Answers []Answer
	Began   time.Time
	// The full part is what measures are taken of. Of a closed list it is from the first request that
	// ended until the list was empty.
	Full, Empty time.Time
}

// Closed sends a list with so many requests at any time.
func (c Client) Closed(ctx context.Context, url string, list []Request, clients int) *Played {
	p := &Played{Answers: make([]Answer, len(list)), Began: time.Now()}
	var next, ended int
	var mu sync.Mutex
	take := func() (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		if next == len(list) {
			return 0, false
		}
		if next++; next == len(list) {
			p.Empty = time.Now()
		}
		return next - 1, true
	}
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for i, ok := take(); ok; i, ok = take() {
				p.Answers[i] = c.Ask(ctx, url, list[i], AnyRank)
				mu.Lock()
				if ended++; ended == 1 {
					p.Full = time.Now()
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return p
}

// Open sends each request of a list at its time, whatever has ended by then. The full part begins
// with the list and ends when the last request is sent.
func (c Client) Open(ctx context.Context, url string, list []Request, starts []time.Duration) *Played {
	p := &Played{Answers: make([]Answer, len(list)), Began: time.Now()}
	p.Full = p.Began
	var all sync.WaitGroup
	for i, r := range list {
		if testbed.Pause(ctx, time.Until(p.Began.Add(starts[i]))) != nil {
			p.Answers[i].Err = ctx.Err()
			continue
		}
		p.Empty = time.Now()
		all.Go(func() { p.Answers[i] = c.Ask(ctx, url, r, AnyRank) })
	}
	all.Wait()
	return p
}

// What a list shows beside report's metrics.
const (
	WholeTokens report.Metric = "whole_tokens_per_s" // of the whole list; TokensPerS is of the full part
	GapMean     report.Metric = "gap_mean_ms"
	GapP50      report.Metric = "gap_p50_ms"
	GapP99      report.Metric = "gap_p99_ms"
)

// Measure takes what the clients saw. Gaps and first tokens are those of the full part.
func (p *Played) Measure() (s report.Sample, failed int, why error) {
	s = report.Sample{}
	var end time.Time
	whole, inFull := 0, 0
	var gaps, first, each []float64
	for _, a := range p.Answers {
		if a.Err != nil {
			if failed++; why == nil {
				why = a.Err
			}
			continue
		}
		had := 0
		for i, x := range a.Chunks {
			whole += x.Tokens - had
			if !x.At.Before(p.Full) && !x.At.After(p.Empty) {
				inFull += x.Tokens - had
				if i > 0 && !a.Chunks[i-1].At.Before(p.Full) {
					gaps = append(gaps, ms(x.At.Sub(a.Chunks[i-1].At)))
				}
			}
			had = x.Tokens
			if x.At.After(end) {
				end = x.At
			}
		}
		if !a.Sent.Before(p.Full) {
			first = append(first, ms(a.Chunks[0].At.Sub(a.Sent)))
		}
		if last := a.Chunks[len(a.Chunks)-1]; last.Tokens > a.Chunks[0].Tokens {
			each = append(each, ms(last.At.Sub(a.Chunks[0].At))/float64(last.Tokens-a.Chunks[0].Tokens))
		}
	}
	s[WholeTokens] = float64(whole) / end.Sub(p.Began).Seconds()
	s[report.TokensPerS] = float64(inFull) / p.Empty.Sub(p.Full).Seconds()
	s[report.WindowS] = p.Empty.Sub(p.Full).Seconds()
	if len(gaps) > 0 {
		slices.Sort(gaps)
		s[GapMean], s[GapP50], s[GapP99] = stats.Mean(gaps), stats.Median(gaps), gaps[len(gaps)*99/100]
	}
	if len(first) > 0 {
		slices.Sort(first)
		s[report.TTFTMean], s[report.TTFTP99] = stats.Mean(first), stats.Percentile(first, .99)
	}
	if len(each) > 0 {
		slices.Sort(each)
		s[report.TPOTP95] = stats.Percentile(each, .95)
	}
	return s, failed, why
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

// Summary is a metric's mean and deviation for the i-th of each round.
func Summary(rounds [][]report.Sample, i int) report.Metrics {
	samples := make([]report.Sample, len(rounds))
	for k, round := range rounds {
		samples[k] = round[i]
	}
	return report.Summarize(samples...)
}

// Paired is by how many percent the i-th of each round is above the base of its round.
func Paired(rounds [][]report.Sample, i, base int) report.Metrics {
	differences := make([]report.Sample, len(rounds))
	for k, round := range rounds {
		differences[k] = report.Sample{}
		for m, v := range round[i] {
			if was, ok := round[base][m]; ok {
				differences[k][m] = 100 * (v/was - 1)
			}
		}
	}
	return report.Summarize(differences...)
}

// Off is a difference in % as a page shows it, with its interval of 95 % over so many rounds.
func Off(v report.Value, rounds int) string {
	return fmt.Sprintf("%+.1f ± %.1f", v.Mean, v.Interval(rounds))
}

// Show is a value as a page shows it, ± its standard deviation.
func Show(v report.Value, digits int) string {
	if math.IsNaN(v.Mean) {
		return ""
	}
	return fmt.Sprintf("%.*f ± %.*f", digits, v.Mean, digits, v.SD)
}

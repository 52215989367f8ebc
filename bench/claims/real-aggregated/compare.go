package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/rigs/real/ranks"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/tools/page"
)

const (
	theirs  = "engine" // requests go to the engine itself, without a rank, so that vLLM balances: what the others are compared with
	clients = 14       // of a closed loop: two slots are free in the mean, as where somebody sized the engine
)

// draw is a list of requests.
func (w *site) draw(round int) []ranks.Request {
	return ranks.Draw(w.Seed+uint64(round), w.Requests, ranks.Lengths{Median: 500, Sigma: 1, Least: 32, Most: 4000},
		ranks.Lengths{Median: 60, Sigma: .6, Least: 15, Most: 200})
}

// variant is a policy in front of an engine.
type variant struct {
	policy string
	engine int
}

func (v variant) String() string {
	return fmt.Sprintf("%s, interval %d", v.policy, intervals[v.engine])
}

// variants are all policies in front of all engines.
func (w *site) variants() (list []variant) {
	for i := range w.engines {
		for policy := range strings.SplitSeq(w.policies, ",") {
			list = append(list, variant{policy, i})
		}
	}
	return list
}

// run is what a variant made of a list.
type run struct {
	variant
	report.Sample
	failed int
	why    error // of the first that failed
}

// What the engine's steps show of a run beside what its clients saw.
const (
	alone    report.Metric = "one_rank_prefills"
	together report.Metric = "all_ranks_prefill"
)

func (r *run) String() string {
	s := fmt.Sprintf("%v: %.0f tokens/s, first token after %.0f ms (p99 %.0f), TPOT p95 %.0f ms, one rank prefills %.0f %% of the time",
		r.variant,
		r.Sample[report.TokensPerS], r.Sample[report.TTFTMean], r.Sample[report.TTFTP99], r.Sample[report.TPOTP95], 100*r.Sample[alone])
	if r.failed > 0 {
		s += fmt.Sprintf(", %d FAILED: %v", r.failed, r.why)
	}
	return s
}

// learn has the engines serve a list without evenkeel, and fits the law to all that they have done
// by then.
func (w *site) learn(ctx context.Context) error {
	for i := range w.engines {
		if _, err := w.play(ctx, variant{theirs, i}, w.closed(w.draw(-1)[:min(40, w.Requests)])); err != nil {
			return err
		}
	}
	steps, err := w.allSteps()
	if err != nil {
		return err
	}
	if w.law = fit(steps); !w.law.known {
		return fmt.Errorf("no law explains %d steps", len(steps))
	}
	w.Logf("the law of %d steps: %s, R2 %.2f", w.law.steps, w.law.config(), w.law.r2)
	return nil
}

// send is how a list is sent.
type send func(ctx context.Context, c ranks.Client, url string) *ranks.Played

func (w *site) closed(list []ranks.Request) send {
	return func(ctx context.Context, c ranks.Client, url string) *ranks.Played {
		return c.Closed(ctx, url, list, clients)
	}
}

// open sends so many requests per second, as many clients would who know nothing of each other.
func (w *site) open(list []ranks.Request, rate float64, seed uint64) send {
	rng, at := rand.New(rand.NewPCG(seed, 3)), time.Duration(0)
	starts := make([]time.Duration, len(list))
	for i := range starts {
		starts[i] = at
		at += time.Duration(rng.ExpFloat64() / rate * float64(time.Second))
	}
	return func(ctx context.Context, c ranks.Client, url string) *ranks.Played {
		return c.Open(ctx, url, list, starts)
	}
}

// compare plays every variant on closed lists, and then on open ones.
func (w *site) compare(ctx context.Context) (closed, open [][]*run, err error) {
	list := w.variants()
	each := func(kind string, how func(round int) send) ([][]*run, error) {
		return ranks.Rounds(w.Rounds, len(list), w.Seed, func(round, i int) (*run, error) {
			r, err := w.play(ctx, list[i], how(round))
			if err == nil {
				w.Logf("%s, round %d: %v", kind, round+1, r)
			}
			return r, err
		})
	}
	if closed, err = each("closed", func(round int) send { return w.closed(w.draw(round)) }); err != nil || w.Rounds == 0 {
		return nil, nil, err
	}
	rate := w.load * ranks.Summary(samples(closed), base(list))[perSecond].Mean
	w.Logf("open: %.2f requests per second", rate)
	open, err = each("open", func(round int) send { return w.open(w.draw(100+round), rate, w.Seed+uint64(round)) })
	return closed, open, err
}

// perSecond is how many requests per second a run served.
const perSecond report.Metric = "requests_per_s"

// base is the variant that the others are compared with: vLLM's own balancing at the first engine,
// or what is first.
func base(list []variant) int { return max(0, slices.Index(list, variant{theirs, 0})) }

// play has a variant serve a list, with an evenkeel that is new.
func (w *site) play(ctx context.Context, v variant, how send) (_ *run, err error) {
	url := w.engines[v.engine].URL
	if v.policy != theirs {
		var p *testbed.Proxy
		if p, err = w.serve(ctx, v.policy, v.engine); err != nil {
			return nil, fmt.Errorf("%v: %w", v, err)
		}
		defer func() { err = errors.Join(err, p.End(time.Minute)) }()
		url = p.URL()
	}
	c := ranks.NewClient()
	defer c.CloseIdleConnections()
	played := how(ctx, c, url)
	r := &run{variant: v}
	r.Sample, r.failed, r.why = played.Measure()
	r.Sample[perSecond] = float64(len(played.Answers)-r.failed) / time.Since(played.Began).Seconds()
	steps, err := w.steps(v.engine)
	if err != nil {
		return nil, err
	}
	r.Sample[alone], r.Sample[together] = shares(within(steps, played.Full, played.Empty))
	return r, ctx.Err()
}

func samples(rounds [][]*run) [][]report.Sample {
	return ranks.Samples(rounds, func(r *run) report.Sample { return r.Sample })
}

// columns of the tables.
var columns = []struct {
	metric report.Metric
	title  string
	scale  float64
	digits int
	paired bool
}{
	{report.TokensPerS, "tokens/s", 1, 0, true},
	{report.TTFTMean, "first token, mean, ms", 1, 0, true},
	{report.TTFTP99, "p99, ms", 1, 0, true},
	{report.TPOTP95, "TPOT p95, ms", 1, 1, true},
	{alone, "one rank prefills, % of the time", 100, 1, false},
	{together, "both prefill, %", 100, 1, false},
}

// writeRuns prints the variants beside each other, and each compared with the base of its own
// round.
func writeRuns(out io.Writer, rounds [][]*run, o options) {
	var list []variant
	for _, r := range rounds[0] {
		list = append(list, r.variant)
	}
	all, from := samples(rounds), base(list)
	fmt.Fprintf(out, "%d rounds, seed %d. Each list has %d requests; %.2f requests per second were served by %v.\n\n", len(rounds), o.Seed,
		o.Requests,
		ranks.Summary(all, from)[perSecond].Mean, list[from])
	values, differences := page.Markdown{Head: []string{"policy", "interval"}}, page.Markdown{Head: []string{"policy", "interval"}}
	for _, c := range columns {
		values.Head = append(values.Head, c.title)
		if c.paired {
			differences.Head = append(differences.Head, c.title)
		}
	}
	values.Head = append(values.Head, "failed")
	for i, v := range list {
		first := []string{page.Code(v.policy), fmt.Sprint(intervals[v.engine])}
		value, difference := slices.Clone(first), slices.Clone(first)
		m, off := ranks.Summary(all, i), ranks.Paired(all, i, from)
		for _, c := range columns {
			x := m[c.metric]
			value = append(value, ranks.Show(report.Value{Mean: c.scale * x.Mean, SD: c.scale * x.SD}, c.digits))
			if c.paired {
				difference = append(difference, ranks.Off(off[c.metric], len(rounds)))
			}
		}
		failed := 0
		for _, round := range rounds {
			failed += round[i].failed
		}
		values.Add(append(value, fmt.Sprint(failed))...)
		if i != from {
			differences.Add(difference...)
		}
	}
	fmt.Fprintf(out, "%v\n", &values)
	if len(rounds) > 1 {
		fmt.Fprintf(out, "The difference to %v in the same round, in %%, with the 95 %% interval over %d rounds:\n\n%v", list[from], len(rounds),
			&differences)
	}
}

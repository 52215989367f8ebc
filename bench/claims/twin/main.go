// Command twin holds what the proxy's twin says against what happens: reference engines over sockets, the
// same requests at the same times under one policy and then under another, each with the other in
// dispatch.twin. Each run foretells the mean step of the other one.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/bench/sim/decode"
	"evenkeel/bench/sim/draw"
	"evenkeel/bench/tools/page"
	"evenkeel/dispatcher/board"
	"evenkeel/dispatcher/twin"
	"evenkeel/internal/stats"
)

// most tokens a second of a load: engines, proxies and clients of three such loads are not late on two cores.
const most = 2000

// judgement is the seed of the loads, none of which was looked at before.
const judgement = 20261216

type options struct {
	testbed.Options
	lasts time.Duration
	price bool
	only  string
	out   string
}

func main() {
	testbed.Main("twin", testbed.Page(testbed.Judged(func(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
		var o options
		f := o.Flags("twin")
		f.DurationVar(&o.lasts, "for", 15*time.Minute, "how long each run lasts")
		f.BoolVar(&o.price, "price", false, "what the twin costs at 144 ranks of 40 slots: two proxies at once, one of them without a twin")
		f.StringVar(&o.only, "only", "", "only the scenes whose names contain this")
		f.StringVar(&o.out, "out", "", "document to write the table into; empty: it is printed")
		if err := testbed.Parse(f, args); err != nil {
			return false, err
		}
		if o.price {
			return o.prices(ctx, out)
		}
		return o.run(ctx, out)
	}), []string{"-out", document}))
}

const document = "docs/results/twin.md"

// scene is a load on engines.
type scene struct {
	name     string
	fleet    decode.Fleet
	requests []trace.Request
	rate     float64 // requests a second
}

// scenes are a real trace, and the first two loads of make claim NAME=regret that have an open loop, equal ranks, not more tokens
// than this machine carries, and something to foretell: the simulator has the policies differ on them, and both keep
// up. Where requests pile up, what a step costs depends on all that was sent since the start.
func (o options) scenes(ctx context.Context) (list []scene, err error) {
	fleet := decode.Uniform(8, 8, 0)
	fleet.Transfer = 2
	fleet.Groups[0].C0Ms, fleet.Groups[0].C1Ms = 20, 0.0025
	all := trace.Azure().Requests[:6000]
	list = append(list, scene{
		name: "Azure's conversations, 8 x 8, rho 0.85, c0 20, c1 0.0025", fleet: fleet, requests: all,
		rate: fleet.Rate(0.85, all),
	})
	for number := 0; len(list) < 3; number++ {
		l := draw.New(judgement, number)
		if l.Rho == 0 || !l.Even() || float64(l.Ranks*l.Slots)*l.Rho/l.C0*1000 > most {
			continue
		}
		p := l.Plan(policies[:], 0)
		requests := p.Source.Drawn.Requests[len(p.Source.Drawn.Ages):]
		s := scene{name: "load " + l.String(), fleet: p.Fleet, requests: requests, rate: p.Fleet.Rate(l.Rho, requests)}
		tells, err := s.tells(ctx, o.lasts)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if tells {
			list = append(list, s)
		}
	}
	return list, nil
}

// tells simulates the beginning of a load, and says whether the policies differ on it and keep up with it.
func (s scene) tells(ctx context.Context, lasts time.Duration) (bool, error) {
	begin := s.requests[:min(len(s.requests), int(s.rate*lasts.Seconds()))]
	p := decode.Plan{
		Source: decode.Source{Drawn: &decode.Drawn{Requests: begin, Warm: len(begin) / 5}}, Policies: policies[:], Seeds: 1,
		Window: board.DefaultWindow, Fleet: s.fleet,
		Load: decode.Load{Rho: s.rate / s.fleet.Rate(1, begin)},
	}
	got, err := p.Run(ctx)
	if err != nil {
		return false, err
	}
	of := func(i int, m report.Metric) float64 { return got.Runs[i].Metrics[m].Mean }
	late := max(of(0, report.WaitMax), of(1, report.WaitMax))
	return math.Abs(of(0, report.StepMean)/of(1, report.StepMean)-1) > differ && late < float64(lasts.Milliseconds())*longest, nil
}

// chance is by what share of itself the mean step of a run under a policy is off by chance in nineteen of twenty cases:
// twice the deviation of simulated runs whose requests come up to 2 ms later, each differently.
func (s scene) chance(ctx context.Context, policy string, lasts time.Duration) (float64, error) {
	const runs, later = 12, 2 * time.Millisecond
	begin := s.requests[:min(len(s.requests), int(s.rate*lasts.Seconds()))]
	var steps []float64
	for i := range runs {
		chance := rand.New(rand.NewPCG(uint64(i), 0))
		requests := slices.Clone(begin)
		for k := range requests {
			requests[k].At += time.Duration(s.rate / rateOf(begin) * float64(chance.Int64N(int64(later))))
		}
		slices.SortStableFunc(requests, func(a, b trace.Request) int { return cmp.Compare(a.At, b.At) })
		p := decode.Plan{
			Source: decode.Source{Drawn: &decode.Drawn{Requests: requests, Warm: len(requests) / 10}}, Policies: []string{policy}, Seeds: 1,
			Window: board.DefaultWindow, Fleet: s.fleet,
			Load: decode.Load{Rho: s.rate / s.fleet.Rate(1, requests)},
		}
		got, err := p.Run(ctx)
		if err != nil {
			return 0, err
		}
		steps = append(steps, got.Runs[0].Metrics[report.StepMean].Mean)
	}
	return 2 * stats.Deviation(steps) / stats.Mean(steps), nil
}

// rateOf is how many requests a second there are before they are paced.
func rateOf(all []trace.Request) float64 {
	return float64(len(all)-1) / (all[len(all)-1].At - all[0].At).Seconds()
}

// differ is from what share of a step on policies differ.
const differ = 0.03

// leastWithin is for what share of the windows at least the forecast is to be within its error: the twin promises 0.95, and
// windows overlap.
const leastWithin = 0.85

// longest is what share of a run a request waits at most where a policy keeps up.
const longest = 0.2

var policies = [2]string{"jsq-kv", "evenkeel"}

func (o options) run(ctx context.Context, out io.Writer) (ok bool, err error) {
	m := page.Markdown{Head: []string{
		"load", "in force", "minutes", "its step, ms", "as replayed", "the other's step, as told", "really", "off by, %", "error, %",
		"by chance, %", "within", "of the windows", "the policies differ by, %",
		"sign", "error is at most a third of that", "a verdict every", "its share of a core, %", "memory of the proxy, MiB",
	}, Text: 2}
	list, err := o.scenes(ctx)
	if err != nil {
		return false, err
	}
	list = slices.DeleteFunc(list, func(s scene) bool { return !strings.Contains(s.name, o.only) })
	runs, errs := make([][2]*found, len(list)), make([]error, len(list))
	var all sync.WaitGroup
	for i, s := range list { // side by side, each with a proxy and engines of its own
		all.Go(func() { runs[i], errs[i] = o.both(ctx, s, i) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return false, err
	}
	ok = true
	within := 0
	for i, s := range list {
		for k, f := range runs[i] {
			chance, err := s.chance(ctx, policies[1-k], o.lasts)
			if err != nil {
				return false, err
			}
			held := f.against(runs[i][1-k], chance, s.name, &m)
			if held.within {
				within++
			}
			ok = ok && held.sign && held.within && held.rest
		}
	}
	fmt.Fprintf(out, "\n%s\n%d of %d forecasts are within their error\n", m.String(), within, 2*len(list))
	if o.out != "" {
		err = page.Write(o.out, "claim NAME=twin", "twin", "Foretold and really", m.String())
	}
	return ok, err
}

// found is what a run showed.
type found struct {
	policy  string
	engines []*refengine.Engine // of decode groups
	began   time.Time
	lasts   time.Duration // for which requests come
	all     []*verdict    // of the model, of windows that end while requests come
	seen    int           // verdicts
	oldest  float64       // seconds, that a verdict was old before the next one came
	cpu     float64       // of a core, that the twin used
	rss     float64       // MiB
}

// verdict is what GET /status says of a group.
type verdict struct {
	AgeSeconds    float64 `json:"age_seconds"`
	WindowSeconds float64 `json:"window_seconds"`
	StepMs        float64 `json:"step_ms"`
	TwinStepMs    float64 `json:"twin_step_ms"`
	ErrorRatio    float64 `json:"error_ratio"`
	Against       []struct {
		StepMs     float64 `json:"step_ms"`
		SavedMs    float64 `json:"saved_ms"`
		ErrorRatio float64 `json:"error_ratio"`
		Hour       *hour   `json:"hour"`
	} `json:"against"`

	from, to time.Duration // since the load began
}

// hour is the mean over the verdicts of the run.
type hour struct {
	AgeSeconds float64 `json:"age_seconds"`
	Seconds    float64 `json:"seconds"`
	StepMs     float64 `json:"step_ms"`
	SavedMs    float64 `json:"saved_ms"`
	ErrorRatio float64 `json:"error_ratio"`
}

// both runs a load under each policy, one after the other.
func (o options) both(ctx context.Context, s scene, number int) (runs [2]*found, err error) {
	if o.Keep != "" {
		o.Keep = filepath.Join(o.Keep, strconv.Itoa(number))
	}
	for i, p := range policies {
		if runs[i], err = o.play(ctx, s, p, policies[1-i]); err != nil {
			return runs, fmt.Errorf("%s under %s: %w", s.name, p, err)
		}
	}
	return runs, nil
}

// play runs a load under a policy, with another one in the twin.
func (o options) play(ctx context.Context, s scene, policy, other string) (f *found, err error) {
	w, err := testbed.New(ctx, "twin", o.Options)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, w.Close(err == nil)) }()
	p, engines, err := serve(ctx, w, s, "evenkeel", fmt.Sprintf("policy: %q, twin: [%q]", policy, other))
	if err != nil {
		return nil, err
	}
	f = &found{policy: policy, engines: engines, lasts: o.lasts}
	stop := f.watching(ctx, p)
	pid := p.Pid
	r, err := load.Run(ctx, load.Config{
		URLs: []string{p.URL()}, Requests: s.requests, Rate: s.rate, Duration: o.lasts, Chat: 0.5, Stream: 1, Usage: 0.5, Seed: 1,
		Check:   load.CheckShape,
		Timeout: max(10*time.Minute, 2*o.lasts), // an answer may take longer than clients wait by default
	})
	f.rss = testbed.MiB(testbed.RSS(pid))
	stop()
	if err != nil {
		return nil, err
	}
	books, err := p.Series()
	f.cpu = books["evenkeel_twin_work_seconds_total"] / time.Since(f.began).Seconds()
	if r.Failed > 0 && err == nil {
		err = fmt.Errorf("%d of %d requests failed: %v", r.Failed, r.Sent, r.Kinds)
	}
	return f, err
}

// unlimited is the KV room of an engine that has no limit. A prefill engine that is full of KV which nobody pulls yet
// begins no other prompt: when requests come to the pool would depend on the policy.
const unlimited = 1 << 30

// serve starts a proxy with engines of its own. The engines returned are those of the decode groups. Where a policy
// lets requests wait in engines, they may wait as long as they do in the simulator.
func serve(ctx context.Context, w *testbed.World, s scene, name, dispatch string) (p *testbed.Proxy, engines []*refengine.Engine,
	err error) {
	prefill, err := w.Engines(refengine.Config{
		Role: refengine.Prefill, Model: refengine.Model{Name: "m"}, KV: refengine.KV{Tokens: unlimited},
		Prompts: refengine.Prompts{Base: 5 * time.Millisecond, PerToken: time.Microsecond, Concurrency: 64},
		Answers: refengine.Answers{PromptTokensDetails: true},
	})
	if err != nil {
		return nil, nil, err
	}
	decode := []string{}
	for _, g := range s.fleet.Groups {
		e, err := w.Engines(refengine.Config{
			Role: refengine.Decode, Model: refengine.Model{Name: "m"}, Group: g.Name, DPSize: len(g.Ranks), Slots: g.Ranks[0].Slots,
			KV: refengine.KV{Tokens: cmp.Or(int(g.Ranks[0].Capacity), unlimited), HoldTimeout: time.Hour,
				TransferBase: time.Duration(s.fleet.Transfer) * millis(g.C0Ms)},
			Steps:   refengine.Steps{C0: millis(g.C0Ms), C1: millis(g.C1Ms), CR: millis(g.RequestMs), Log: 1 << 20},
			Answers: refengine.Answers{PromptTokensDetails: true},
		})
		if err != nil {
			return nil, nil, err
		}
		engines = append(engines, e...)
		kv := ""
		if c := g.Ranks[0].Capacity; c > 0 {
			kv = fmt.Sprintf(", kv_tokens: %d", c)
		}
		decode = append(decode, testbed.EnginesAt(e[0].URLs(), ", group: %q, slots: %d%s", g.Name, g.Ranks[0].Slots, kv)...)
	}
	p, err = proxy(ctx, w, name, dispatch, "ascend: {first_event_timeout: 1h, kv_hold_timeout: 1h}",
		testbed.Engines(testbed.EnginesAt(prefill[0].URLs(), ""), decode))
	return p, engines, err
}

// proxy starts one in front of engines. Requests may wait in it and in the engines for as long as they do.
func proxy(ctx context.Context, w *testbed.World, name, dispatch, profiles, engines string) (*testbed.Proxy, error) {
	p := w.Proxies(name)[0]
	return p, p.ServeWith(ctx, fmt.Sprintf(`listen: %q
admin: {listen: %q}
dispatch: {%s}
pool: {size: 100000}
limits: {body_bytes: 67108864}
profiles: {%s}
%s`, p.Clients, p.Address, dispatch, profiles, engines))
}

func millis(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

// watching reads the verdicts until the function that it returns is called.
func (f *found) watching(ctx context.Context, p *testbed.Proxy) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	f.began = time.Now()
	go func() { defer close(done); f.watch(ctx, p) }()
	return func() { cancel(); <-done }
}

// watch reads the verdicts.
func (f *found) watch(ctx context.Context, p *testbed.Proxy) {
	last := time.Time{}
	for testbed.Pause(ctx, time.Second) == nil {
		var s struct {
			Dispatch struct {
				Models []struct {
					Groups []struct {
						Name string   `json:"name"`
						Twin *verdict `json:"twin"`
					} `json:"groups"`
				} `json:"models"`
			} `json:"dispatch"`
		}
		if !p.Read("/status", &s) {
			continue
		}
		now := time.Now()
		for _, m := range s.Dispatch.Models {
			for _, g := range m.Groups { // each has that of the model
				if g.Twin == nil || len(g.Twin.Against) == 0 {
					continue
				}
				to := now.Add(-seconds(g.Twin.AgeSeconds))
				g.Twin.to, g.Twin.from = to.Sub(f.began), to.Add(-seconds(g.Twin.WindowSeconds)).Sub(f.began)
				f.oldest = max(f.oldest, g.Twin.AgeSeconds)
				if to.Sub(last) <= time.Second {
					continue
				}
				if f.seen, last = f.seen+1, to; g.Twin.to <= f.lasts {
					f.all = append(f.all, g.Twin)
				}
			}
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// mean is the mean step of all engines between two times of the load, of those in which an answer goes on: a proxy sees no others.
func (f *found) mean(from, to time.Duration) float64 {
	sum, n := time.Duration(0), 0
	for _, e := range f.engines {
		for _, s := range e.Steps() {
			goesOn := slices.ContainsFunc(s.Ranks, func(r steplog.RankLoad) bool { return r.Running > 0 })
			if at := s.Start.Sub(f.began); goesOn && at >= from && at < to {
				sum, n = sum+s.Length, n+1
			}
		}
	}
	return float64(sum) / float64(n) / float64(time.Millisecond)
}

// held is which of the conditions a forecast met.
type held struct {
	within bool // it is off by at most its error
	sign   bool // it named the better policy, where they differ
	rest   bool // what else a cell says "no" about
}

// against holds what a run foretold of another against that, and says what held.
func (f *found) against(other *found, chance float64, name string, m *page.Markdown) held {
	if len(f.all) == 0 || f.all[len(f.all)-1].Against[0].Hour == nil {
		m.Add(name, f.policy, "no verdict")
		return held{}
	}
	v := f.all[len(f.all)-1]
	h := v.Against[0].Hour
	to := v.to - seconds(h.AgeSeconds-v.AgeSeconds)
	from := to - seconds(h.Seconds)
	own, really := f.mean(from, to), other.mean(from, to)
	off, apart := math.Abs(h.StepMs/really-1), (really-own)/own
	met := held{within: off <= h.ErrorRatio, sign: true, rest: true}
	sign, third := "–", "–"
	if math.Abs(apart) > differ {
		met.sign, met.rest = (h.SavedMs > 0) == (apart > 0), h.ErrorRatio <= math.Abs(apart)/3
		sign, third = yes(met.sign), yes(met.rest)
	}
	counted, within := 0, 0
	for _, v := range f.all {
		if v.WindowSeconds >= twin.MinClaimWindow.Seconds() {
			counted++
			if off := math.Abs(v.Against[0].StepMs/other.mean(v.from, v.to) - 1); off <= v.Against[0].ErrorRatio {
				within++
			}
		}
	}
	windows := fmt.Sprintf("%d of %d", within, counted)
	if float64(within) < leastWithin*float64(counted) {
		met.rest, windows = false, "**no**, "+windows
	}
	two, one := func(x float64) string { return fmt.Sprintf("%.2f", x) }, func(x float64) string { return fmt.Sprintf("%.1f", x) }
	m.Add(name, f.policy, fmt.Sprintf("%.1f", h.Seconds/60),
		two(own), two(h.StepMs-h.SavedMs), two(h.StepMs), two(really),
		one(100*off), one(100*h.ErrorRatio), one(100*chance), yes(met.within), windows,
		fmt.Sprintf("%+.1f", 100*apart), sign, third,
		fmt.Sprintf("%.0f s", v.to.Seconds()/float64(len(f.all))), two(100*f.cpu), fmt.Sprintf("%.0f", f.rss))
	return met
}

func yes(held bool) string {
	if !held {
		return "**no**"
	}
	return "yes"
}

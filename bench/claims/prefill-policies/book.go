package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/prefill"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
	"evenkeel/prefill/policy"
)

// blocks are the tables of docs/results/prefill-policies.md.
var blocks = []page.Block[*book]{
	{Name: "claims", Title: "What should be seen", Tables: (*book).claims},
	{Name: "loads", Title: "Policies at four loads", Tables: func(b *book) string {
		return b.tables(b.sources(), loadsOn, b.policies, usualColumns...)
	}},
	{Name: "curve", Title: "Attention over long prompts", Tables: func(b *book) string {
		return b.tables(b.sources(), curvesOn, these("lmetric", "bailian", "ttft-sim", "gorgo", "finish"), usualColumns...)
	}},
	{Name: "slow", Title: "An engine that is slower than its kind", Tables: func(b *book) string {
		return b.eachSharing(func(s *policytables.Source) string {
			return b.tables([]*policytables.Source{s}, slowOn, these("lmetric", "vllm-queue", "ttft-sim", "finish"), usualColumns...)
		})
	}},
	{Name: "caches", Title: "Caches of other sizes, and told wrongly", Tables: (*book).caches},
	{Name: "burst", Title: "A burst of one class", Tables: (*book).burst},
	{Name: "both", Title: "Engines that also decode", Tables: func(b *book) string {
		return b.tables(b.sources(), bothOn, b.policies, usualColumns[0], ttftP99, tpotMean, policytables.TPOT, hits, busy)
	}},
	{Name: "push", Title: "Holding back", Tables: (*book).push},
}

// book makes the tables of one run.
type book struct{ *policytables.Book }

// scenario is a load on prefill engines. Zero fields are as evenkeel simulate has them.
type scenario struct {
	on       *policytables.Source
	load     float64
	capacity int64
	told     float64 // times the capacity
	burst    float64
	unwatch  bool // no hotspot detector
	both     bool
	push     int
	beta2    float64
	slow     float64
}

// What the engines are where a scenario says nothing else: how many, and the tokens that each one's
// cache holds.
const (
	engines  = 8
	capacity = 1_000_000
)

// What engines that also decode have: the step of evenkeel simulate.
const (
	bothC0    = 55 * time.Millisecond
	bothC1    = 200 * time.Nanosecond
	bothChunk = 2048
)

// curve is what attention adds, ms for each pair of tokens: 32 layers of width 4,096 at 150 TFLOPS.
const curve = 3.5e-6

// own is a policy as users write them, in the tables beside the built-in ones.
const (
	own      = "own"
	ownScore = "p_tokens*(bs+1)*(1+kv_usage)"
)

// Columns of the tables.
var (
	ttftMean     = page.Column{Metric: report.TTFTMean, Title: "TTFT mean, ms", Scale: 1}
	ttftP99      = page.Column{Metric: report.TTFTP99, Title: "p99", Scale: 1}
	hits         = page.Column{Metric: report.HitRatio, Title: "hits, %", Scale: 100, Digits: 1}
	busy         = page.Column{Metric: report.Utilisation, Title: "busy, %", Scale: 100, Digits: 1}
	usualColumns = []page.Column{
		{Metric: report.TTFTP50, Title: "p50", Scale: 1}, {Metric: report.TTFTP90, Title: "p90", Scale: 1}, ttftP99,
		hits, busy, {Metric: report.Uneven, Title: "imbalance, 1,000 tokens", Scale: 1e-3},
	}
	hitError  = page.Column{Metric: report.HitError, Title: "predicted wrongly, %", Scale: 100, Digits: 1}
	tpotMean  = page.Column{Metric: report.TPOTMean, Title: "TPOT mean, ms", Scale: 1, Digits: 1}
	burstTTFT = page.Column{Metric: report.BurstMean, Title: "TTFT of the class, ms", Scale: 1}
)

// at is what policies did in a scenario.
func (b *book) at(sc scenario, policies ...string) *page.Outcome {
	return b.In(sc, policies, func(o *page.Outcome, lacking []string) error {
		plan := prefill.Plan{
			Policies: lacking, Trace: sc.on.From.Trace, Seeds: b.Seeds, Load: sc.load, Pace: o.Pace, CapacityFactor: sc.told, Burst: sc.burst,
			NoHotspots: sc.unwatch, Push: sc.push,
			Engines: prefill.Engines{
				Ranks: engines, Capacity: cmp.Or(sc.capacity, capacity), Hold: 500 * time.Millisecond,
				Line: policy.Latency{T0Ms: 150.72, TPMs: 0.0938, Beta2: sc.beta2}, Slow: sc.slow,
			},
			Definitions: map[string]policy.Definition{own: {Score: ownScore}},
		}
		if b.Most > 0 && b.Most < len(plan.Trace.Requests) {
			plan.Requests = b.Most
		}
		if sc.both {
			plan.Engines.Decode = &prefill.Decode{C0: bothC0, C1: bothC1, Chunk: bothChunk}
		}
		if err := plan.Validate(); err != nil {
			return o.Refuse(err)
		}
		result, err := plan.Run(b.Ctx)
		if err != nil {
			return err
		}
		o.Pace = result.Pace
		o.Sampled(lacking, result.Seeds)
		return nil
	})
}

func (sc scenario) String() string {
	s := report.Words{Text: fmt.Sprintf("%s, load %g", sc.on.Name, sc.load), Before: ", "}
	s.Add(sc.capacity > 0, "caches of %s tokens", report.Grouped(float64(sc.capacity), 0))
	s.Add(sc.told > 0, "told %g times as many", sc.told)
	s.Add(sc.burst > 0, "a burst of %.0f %%", 100*sc.burst)
	s.Add(sc.unwatch, "no detector")
	s.Add(sc.both, "engines that also decode")
	s.Add(sc.push > 0, "%d probes an engine", sc.push)
	s.Add(sc.beta2 > 0, "attention of %g ms per pair of tokens", sc.beta2)
	s.Add(sc.slow > 0, "one engine takes %g times as long", sc.slow)
	return s.Text
}

// command simulates the scenario by itself.
func (b *book) command(sc scenario, policies []string) string {
	line := report.Words{Text: fmt.Sprintf("evenkeel simulate --tier prefill --load %g --trace %s", sc.load, sc.on.Flag), Before: " "}
	line.Add(b.Most > 0 && b.Most < len(sc.on.From.Trace.Requests), "--requests %d", b.Most)
	line.Add(sc.capacity > 0, "--capacity %d", sc.capacity)
	line.Add(sc.told > 0, "--wrong-capacity %g", sc.told)
	line.Add(sc.burst > 0, "--burst %g", sc.burst)
	line.Add(sc.unwatch, "--no-hotspots")
	line.Add(sc.both, "--both --c0 %v --c1 %v --chunk %d", bothC0, bothC1, bothChunk)
	line.Add(sc.push > 0, "--push %d", sc.push)
	line.Add(sc.beta2 > 0, "--beta2 %g", sc.beta2)
	line.Add(sc.slow > 0, "--slow %g", sc.slow)
	line.Add(true, "--seeds %d --policies %s", b.Seeds, strings.Join(policies, ","))
	line.Add(slices.Contains(policies, own), "--define '%s=%s'", own, ownScore)
	return line.Text
}

// sources are the traces of the widest tables.
func (b *book) sources() []*policytables.Source {
	if b.Traces.Prefixed == nil {
		return b.Traces.Real
	}
	return append(slices.Clone(b.Traces.Real), b.Traces.Prefixed)
}

// sharing are the public traces whose prompts share blocks, or a user's.
func (b *book) sharing() []*policytables.Source {
	return slices.DeleteFunc(slices.Clone(b.Traces.Real), func(s *policytables.Source) bool { return !s.Shares() })
}

// eachSharing makes a part of a block for each trace whose prompts share blocks.
func (b *book) eachSharing(part func(*policytables.Source) string) string {
	sources := b.sharing()
	if len(sources) == 0 {
		return "No trace says which prompts share blocks."
	}
	return page.Joined(sources, part)
}

// policies are those of the widest tables: all on Mooncake's trace, and on a user's. The
// others show what holds there, too, for one of each sort.
func (b *book) policies(s *policytables.Source) []string {
	if s == b.Traces.Azure || s == b.Traces.Prefixed {
		return slices.Clone(ofEachSort)
	}
	return append(prefill.Policies(), own)
}

var ofEachSort = []string{"lmetric", "least-tokens", "vllm-queue", "bailian", "ttft-sim", "finish"}

// beside is a mean, and its ratio to another with the interval.
func beside(o *page.Outcome, p, reference string) string {
	mean := ttftMean.Show(o.Of(p, report.TTFTMean))
	if p == reference {
		return mean
	}
	low, high := o.Interval(p, reference, report.TTFTMean)
	return fmt.Sprintf("%s (%.2f; %.2f to %.2f)", mean, o.Ratio(p, reference, report.TTFTMean), low, high)
}

// table is a line for each policy; the first is what others are measured by.
func (b *book) table(sc scenario, policies []string, columns ...page.Column) string {
	o := b.at(sc, policies...)
	if o.Refused != "" {
		return policytables.LeftOut(sc, o.Refused)
	}
	mean := page.Cells[string]{Title: ttftMean.Title + " (of `" + policies[0] + "`)",
		Of: func(p string) string { return beside(o, p, policies[0]) }}
	cells := append([]page.Cells[string]{mean}, o.Columns("", true, columns...)...)
	return fmt.Sprintf("**%s**\n\n%s%s", sc, page.Rows("policy", policies, page.Code, cells...), page.Fenced(b.command(sc, policies)))
}

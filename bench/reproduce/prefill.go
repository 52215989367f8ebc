package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/prefillsim"
	"evenkeel/bench/report"
	"evenkeel/bench/trace"
	"evenkeel/prefill/policy"
	"evenkeel/stats"
)

// prefillBlocks are the tables of docs/results/prefill-policies.md.
var prefillBlocks = []report.Block[*book]{
	{Name: "prefill-claims", Title: "What should be seen", Tables: (*book).prefillClaims},
	{Name: "prefill-loads", Title: "Policies at four loads", Tables: (*book).prefillLoads},
	{Name: "prefill-curve", Title: "Attention over long prompts", Tables: (*book).prefillCurve},
	{Name: "prefill-slow", Title: "An engine that is slower than its kind", Tables: (*book).prefillSlow},
	{Name: "prefill-caches", Title: "Caches of other sizes, and told wrongly", Tables: (*book).prefillCaches},
	{Name: "prefill-burst", Title: "A burst of one class", Tables: (*book).prefillBurst},
	{Name: "prefill-both", Title: "Engines that also decode", Tables: (*book).prefillBoth},
	{Name: "prefill-push", Title: "Holding back", Tables: (*book).prefillPush},
}

// prefillScenario is a load on prefill engines. Zero fields are as evenkeel
// simulate has them.
type prefillScenario struct {
	on       *source
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

const (
	prefillEngines  = 8
	prefillCapacity = 1_000_000
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

var prefillLoads = []float64{0.5, 0.7, 0.85, 0.95}

// Columns of the prefill tables.
var (
	prefillMean = column{report.TTFTMean, "TTFT mean, ms", 1, 0}
	prefillCols = []column{
		{report.TTFTP50, "p50", 1, 0}, {report.TTFTP90, "p90", 1, 0}, {report.TTFTP99, "p99", 1, 0},
		{report.HitRatio, "hits, %", 100, 1}, {report.Utilisation, "busy, %", 100, 1}, {report.Uneven, "imbalance, 1,000 tokens", 1e-3, 0},
	}
	hitError   = column{report.HitError, "predicted wrongly, %", 100, 1}
	tpotMean   = column{report.TPOTMean, "TPOT mean, ms", 1, 1}
	burstTTFT  = column{report.BurstMean, "TTFT of the class, ms", 1, 0}
	prefillP99 = prefillCols[2]
)

// prefill simulates what of the policies was not simulated yet.
func (b *book) prefill(sc prefillScenario, policies ...string) *outcome {
	out, lacking := b.known(sc, policies)
	if lacking == nil {
		return out
	}
	plan := prefillsim.Plan{
		Policies: lacking, Trace: sc.on.from.Trace, Seeds: b.seeds, Load: sc.load, Pace: out.pace, CapacityFactor: sc.told, Burst: sc.burst, NoHotspots: sc.unwatch, Push: sc.push,
		Engines: prefillsim.Engines{
			Ranks: prefillEngines, Capacity: prefillCapacity, Hold: 500 * time.Millisecond, Line: policy.Line{T0Ms: 150.72, TPMs: 0.0938, Beta2: sc.beta2}, Slow: sc.slow,
		},
		Definitions: map[string]policy.Definition{own: {Score: ownScore}},
	}
	if b.most > 0 && b.most < len(plan.Trace.Requests) {
		plan.Requests = b.most
	}
	if sc.capacity > 0 {
		plan.Engines.Capacity = sc.capacity
	}
	if sc.both {
		plan.Engines.Decode = &prefillsim.Decode{C0: bothC0, C1: bothC1, Chunk: bothChunk}
	}
	if out.refused = b.refuses(&plan); out.refused != "" {
		return out
	}
	began := time.Now()
	result, err := plan.Run(b.ctx)
	if err != nil {
		out.refused = b.fails(fmt.Errorf("%s: %w", sc, err))
		return out
	}
	out.pace = result.Pace
	for i, r := range result.Runs {
		out.metrics[r.Policy], out.seeds[r.Policy] = r.Metrics, result.Seeds[i]
	}
	fmt.Fprintf(b.progress, "%s: %.0f s\n", sc, time.Since(began).Seconds())
	return out
}

func (sc prefillScenario) String() string {
	s := report.Words{Text: fmt.Sprintf("%s, load %g", sc.on.name, sc.load), Before: ", "}
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

// prefillCommand simulates the scenario by itself.
func (b *book) prefillCommand(sc prefillScenario, policies []string) string {
	line := report.Words{Text: fmt.Sprintf("evenkeel simulate --tier prefill --load %g --trace %s", sc.load, sc.on.flag), Before: " "}
	line.Add(b.most > 0 && b.most < len(sc.on.from.Trace.Requests), "--requests %d", b.most)
	line.Add(sc.capacity > 0, "--capacity %d", sc.capacity)
	line.Add(sc.told > 0, "--wrong-capacity %g", sc.told)
	line.Add(sc.burst > 0, "--burst %g", sc.burst)
	line.Add(sc.unwatch, "--no-hotspots")
	line.Add(sc.both, "--both --c0 %v --c1 %v --chunk %d", bothC0, bothC1, bothChunk)
	line.Add(sc.push > 0, "--push %d", sc.push)
	line.Add(sc.beta2 > 0, "--beta2 %g", sc.beta2)
	line.Add(sc.slow > 0, "--slow %g", sc.slow)
	line.Add(true, "--seeds %d --policies %s", b.seeds, strings.Join(policies, ","))
	line.Add(slices.Contains(policies, own), "--define '%s=%s'", own, ownScore)
	return line.Text
}

// prefillSources are the traces of the widest tables.
func (b *book) prefillSources() []*source {
	if b.traces.prefixed == nil {
		return b.traces.real
	}
	return append(slices.Clone(b.traces.real), b.traces.prefixed)
}

// sharing are the public traces whose prompts share blocks, or a user's.
func (b *book) sharing() []*source {
	return slices.DeleteFunc(slices.Clone(b.traces.real), func(s *source) bool { return !s.shares() })
}

func (s *source) shares() bool {
	return slices.ContainsFunc(s.from.Trace.Requests, func(r trace.Request) bool { return len(r.HashIDs) > 0 })
}

// eachSharing makes a part of a block for each trace whose prompts share blocks.
func (b *book) eachSharing(part func(*source) string) string {
	sources := b.sharing()
	if len(sources) == 0 {
		return "No trace says which prompts share blocks."
	}
	return joined(sources, part)
}

// prefillPolicies are those of the widest tables: all on Mooncake's trace, and on a user's. The
// others show what holds there, too, for one of each sort.
func (b *book) prefillPolicies(s *source) []string {
	if s == b.traces.azure || s == b.traces.prefixed {
		return slices.Clone(ofEachSort)
	}
	return append(prefillsim.Policies(), own)
}

var ofEachSort = []string{"lmetric", "least-tokens", "vllm-queue", "bailian", "ttft-sim", "finish"}

// versus is the ratio of two policies' mean TTFT, and where it lies at 95 %, over the seeds, which
// are blocks that no two of them share. All three are as they are written.
func (o *outcome) versus(p, reference string) (ratio, low, high float64) {
	mine, theirs := o.seeds[p], o.seeds[reference]
	low, high = stats.Bootstrap(len(mine), 0.95, func(drawn []int) float64 {
		var x, y float64
		for _, i := range drawn {
			x, y = x+mine[i][report.TTFTMean], y+theirs[i][report.TTFTMean]
		}
		return x / y
	})
	return o.ratioOf(p, reference, report.TTFTMean), rounded(low, hundredths), rounded(high, hundredths)
}

// beside is a mean, and its ratio to another with the interval.
func beside(o *outcome, p, reference string) string {
	mean := prefillMean.show(o.of(p, report.TTFTMean))
	if p == reference {
		return mean
	}
	ratio, low, high := o.versus(p, reference)
	return fmt.Sprintf("%s (%.2f; %.2f to %.2f)", mean, ratio, low, high)
}

// prefillTable is a line a policy; the first is what others are measured by.
func (b *book) prefillTable(sc prefillScenario, policies []string, columns ...column) string {
	o := b.prefill(sc, policies...)
	if o.refused != "" {
		return leftOut(sc, o.refused)
	}
	t := report.Markdown{Head: append([]string{"policy"}, titles(prefillMean.title+" (of `"+policies[0]+"`)", columns)...)}
	for _, p := range policies {
		row := []string{"`" + p + "`", beside(o, p, policies[0])}
		for _, c := range columns {
			row = append(row, c.alone(o.of(p, c.metric)))
		}
		t.Add(row...)
	}
	return fmt.Sprintf("**%s**\n\n%s%s", sc, &t, fenced(b.prefillCommand(sc, policies)))
}

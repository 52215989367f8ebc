package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

const ms = time.Millisecond

var model = StepModel{C0: 5 * ms, C1: 200}

// saw makes steps of four ranks whose loads differ by spread.
func saw(n, spread int) []Step {
	var steps []Step
	at := time.Duration(0)
	for i := range n {
		s := Step{Start: at, Late: time.Duration(i%10) * 10 * time.Microsecond, Running: []int{4, 4, 4, 4}}
		for rank := range 4 {
			wave := math.Sin(float64(i)/(20+7*float64(rank)) + float64(rank))
			s.KVTokens = append(s.KVTokens, 20_000+int(wave*float64(spread)))
		}
		largest, _, _ := s.load()
		s.Length = model.C0 + time.Duration(float64(largest)*model.C1)
		at += s.Length
		steps = append(steps, s)
	}
	return steps
}

// example is a report of three runs with plain numbers.
func example() *Report {
	r := &Report{
		Title: "A demo", Command: "evenkeel demo --seed 1", Model: model,
		Facts: []Fact{{"machine", "2 CPUs & <none> spare"}, {"seed", "1"}},
		Notes: []string{"c0 is compressed 11 times and c1 is not."},
	}
	var bounds []Sample
	for i, policy := range []string{"jsq", "jsq-kv", "br0:window=4"} {
		steps := saw(600, 6000/(i+1))
		w := Window{time.Second, 4 * time.Second}
		run, bound := Measure(w.Cut(steps), model)
		bounds = append(bounds, bound)
		run[TPOTP50], run[TPOTP95], run[TTFTP50], run[TTFTP99] = 10-float64(i)/4, 11, 500, 1000
		run[PoolWaitMax], run[TickP99] = float64(12*i), 80
		run[OK], run[Failed] = 1000, 0
		r.Runs = append(r.Runs, Run{Policy: policy, Seeds: 1, Metrics: Summarize(run), Steps: steps, Window: w})
	}
	r.Bound = Summarize(bounds...)
	return r
}

func TestJSONHasTheShapeOthersRead(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, example().JSON(&b))
	golden(t, "demo.json", b.Bytes())

	var doc struct {
		Runs []struct {
			Policy  string
			Seeds   int
			Metrics map[string]struct{ Mean, SD *float64 }
		}
		Bound map[string]struct{ Mean, SD *float64 }
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &doc))
	require.Len(t, doc.Runs, 3)
	for _, name := range []string{"imbalance_tokens", "max_minus_min", "idle_share", "tokens_per_s", "tpot_p50_ms", "tpot_p95_ms",
		"ttft_p50_ms",
		"ttft_p99_ms", "pool_wait_max_ms", "tick_p99_us", "ok", "failed"} {
		v, ok := doc.Runs[2].Metrics[name]
		require.True(t, ok, name)
		require.NotNil(t, v.Mean, name)
		require.NotNil(t, v.SD, name)
	}
	require.Zero(t, *doc.Bound["imbalance_tokens"].Mean)
	require.Greater(t, *doc.Bound["tokens_per_s"].Mean, *doc.Runs[2].Metrics["tokens_per_s"].Mean)
}

func TestWhatWasNotMeasuredIsAbsent(t *testing.T) {
	run, bound := Measure(nil, model)
	require.Empty(t, run)
	require.Empty(t, bound)

	r := &Report{Runs: []Run{{Policy: "rr", Seeds: 1, Metrics: Summarize(Sample{OK: 3, TTFTP50: math.NaN(), TPOTP50: math.Inf(1)})}}}
	var b bytes.Buffer
	require.NoError(t, r.JSON(&b))
	require.JSONEq(t, `{"runs":[{"policy":"rr","seeds":1,"metrics":{"ok":{"mean":3,"sd":0}}}],"bound":{}}`, b.String())
	b.Reset()
	require.NoError(t, r.Table(&b))
	require.NotContains(t, b.String(), "TTFT")
	require.NoError(t, r.HTML(&b))
	require.NotContains(t, b.String(), "<svg")
}

func TestMeasure(t *testing.T) {
	steps := []Step{
		{Start: 10 * ms, Length: 10 * ms, Late: 0, Running: []int{1, 2}, KVTokens: []int{100, 300}},
		{Start: 20 * ms, Length: 20 * ms, Late: ms, Running: []int{1, 0}, KVTokens: []int{200, 0}},
		{Start: 40 * ms, Length: 10 * ms, Late: 3 * ms, Running: []int{0, 0}, KVTokens: []int{0, 0}},
	}
	run, bound := Measure(steps, StepModel{C0: ms, C1: 10_000})
	require.InDelta(t, (200.+200.)/3, run[Imbalance], 1e-9)
	require.InDelta(t, (200.+200.)/3, run[MaxMinusMin], 1e-9)
	require.InDelta(t, (200./600.+200./400.)/3, run[IdleShare], 1e-9)
	require.InDelta(t, 4/0.040, run[TokensPerS], 1e-9)
	require.InDelta(t, 40./3, run[StepMean], 1e-9)
	require.InDelta(t, 600./3, run[KVTokens], 1e-9)
	require.InDelta(t, (3.+2.)/40, run[KVShare], 1e-9)
	require.InDelta(t, 1, run[StepLateP50], 1e-9)
	require.InDelta(t, 3, run[StepLateP99], 1e-9)
	require.InDelta(t, 0.040, run[WindowS], 1e-9)
	require.InDelta(t, (3.+2.+1.)/3, bound[StepMean], 1e-9, "c0 + c1 * mean load")
	require.InDelta(t, 4/0.006, bound[TokensPerS], 1e-9)
}

func TestMeasureOfRanksThatPrefill(t *testing.T) {
	steps := []Step{
		{Start: 0, Length: 10 * ms, Running: []int{1, 2}, KVTokens: []int{100, 300}, Prefill: []int{0, 500}},
		{Start: 10 * ms, Length: 10 * ms, Running: []int{1, 2}, KVTokens: []int{100, 300}, Prefill: []int{0, 0}},
		{Start: 20 * ms, Length: 10 * ms, Running: []int{1, 2}, KVTokens: []int{100, 300}, Prefill: []int{300, 200}},
		{Start: 30 * ms, Length: 10 * ms, Running: []int{1, 2}, KVTokens: []int{100, 300}, Prefill: []int{0, 0}},
	}
	run, bound := Measure(steps, StepModel{C0: ms, C1: 10_000, Own: 6 * time.Microsecond, Shared: 4 * time.Microsecond, Prefill: 2 * ms})
	require.InDelta(t, 0.5, run[MixedSteps], 1e-9)
	require.InDelta(t, 0.25, run[EmptyRanks], 1e-9, "half of the ranks in one of two steps")
	require.InDelta(t, 1+2+0.5*(2+2.5), bound[StepMean], 1e-9,
		"c0 + c1 * mean load, and in half of the steps what 250 tokens for each rank take")
	require.NotContains(t, bound, MixedSteps)

	run, _ = Measure(steps[1:2], StepModel{})
	require.Zero(t, run[MixedSteps])
	require.NotContains(t, run, EmptyRanks, "no rank waited for another one's prompt")
	steps[0].Prefill = nil
	run, _ = Measure(steps[:1], StepModel{})
	require.NotContains(t, run, MixedSteps, "the ranks only decode")
}

func TestTheWindowKeepsWholeSteps(t *testing.T) {
	steps := saw(100, 100)
	w := Window{steps[10].Start, steps[20].End()}
	require.Equal(t, steps[10:21], w.Cut(steps))
	w.From++
	w.To--
	require.Equal(t, steps[11:20], w.Cut(steps))
	require.Empty(t, Window{}.Cut(steps))
	require.Zero(t, Window{From: 2, To: 1}.Length())
}

func TestABalancedGroupIsItsOwnBound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 8).Draw(t, "ranks")
		level := rapid.Bool().Draw(t, "level")
		var steps []Step
		at := time.Duration(0)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			s := Step{Start: at, KVTokens: make([]int, ranks), Running: make([]int, ranks)}
			load := rapid.IntRange(1, 50_000)
			same := load.Draw(t, "load")
			for i := range ranks {
				if s.KVTokens[i], s.Running[i] = same, 4; !level {
					s.KVTokens[i] = load.Draw(t, "own")
				}
			}
			largest, _, _ := s.load()
			s.Length = model.C0 + time.Duration(float64(largest)*model.C1)
			at += s.Length
			steps = append(steps, s)
		}
		run, bound := Measure(steps, model)
		require.GreaterOrEqual(t, run[Imbalance], 0.0)
		require.GreaterOrEqual(t, run[Imbalance], run[MaxMinusMin], "the sum holds the largest difference")
		require.InDelta(t, 0.5, run[IdleShare], 0.5)
		require.GreaterOrEqual(t, bound[TokensPerS], run[TokensPerS]*(1-1e-9))
		if level {
			require.Zero(t, run[Imbalance])
			require.InEpsilon(t, bound[TokensPerS], run[TokensPerS], 1e-9)
			require.InEpsilon(t, bound[StepMean], run[StepMean], 1e-9)
		}
	})
}

func TestSummarize(t *testing.T) {
	got := Summarize(Sample{OK: 1, Failed: 4}, Sample{OK: 3, TPOTP50: 7})
	require.InDelta(t, math.Sqrt2, got[OK].SD, 1e-9)
	require.Equal(t, Value{2, got[OK].SD}, got[OK])
	require.Equal(t, Value{Mean: 4}, got[Failed], "one seed has no deviation")
	require.Equal(t, Value{Mean: 7}, got[TPOTP50])
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, example().Table(&b))
	golden(t, "table.txt", b.Bytes())
	first, rest, _ := strings.Cut(b.String(), "\n")
	require.Regexp(t, `jsq .*jsq-kv .*br0:window=4 .*balanced`, first)
	require.Contains(t, rest, "idle share, %")
}

func TestHeadline(t *testing.T) {
	r := example()
	require.Equal(t,
		"Imbalance, in KV tokens a step: 15,413 under jsq, 5,116 under br0:window=4, 0.33 times as much. Idle share: 15.8 % and 5.9 %.",
		r.Headline())
	last := len(r.Runs) - 1
	r.Runs[0].Metrics[MixedSteps], r.Runs[0].Metrics[EmptyRanks] = Value{Mean: 0.4}, Value{Mean: 0.8}
	r.Runs[last].Metrics[MixedSteps], r.Runs[last].Metrics[EmptyRanks] = Value{Mean: 0.1}, Value{Mean: 0.3}
	require.Equal(t, "Compare throughput, TPOT and TTFT: where ranks prefill, too, KV may be less level although more tokens come. "+
		"Steps that compute a prompt: 40.0 % under jsq, 10.0 % under br0:window=4, 0.25 times as many. In these, ranks without "+
		"one: 80.0 % and 30.0 %.", r.Headline())
	var b bytes.Buffer
	require.NoError(t, r.Table(&b))
	require.Less(t, strings.Index(b.String(), "throughput, tokens/s"), strings.Index(b.String(), "imbalance, KV tokens"))
	require.Greater(t, strings.Index(b.String(), "max - min, KV tokens"), strings.Index(b.String(), "imbalance, KV tokens"))
	r.Runs = r.Runs[:1]
	require.Empty(t, r.Headline(), "there is nothing to compare")
	r.Runs = nil
	require.Empty(t, r.Headline())
}

func TestNumbersAreGrouped(t *testing.T) {
	for _, tt := range []struct {
		name   string
		x      float64
		digits int
		want   string
	}{
		{"small ones stay", 12.345, 2, "12.35"},
		{"thousands", 1234.5, 1, "1,234.5"},
		{"millions", 1234567, 0, "1,234,567"},
		{"just below", 999.4, 0, "999"},
		{"below zero", -123456, 0, "-123,456"},
	} {
		require.Equal(t, tt.want, Grouped(tt.x, tt.digits), tt.name)
	}
}

func TestThePageNeedsNothingBesideItself(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, example().HTML(&b))
	html := b.String()
	require.NotRegexp(t, regexp.MustCompile(`(?i)\b(?:src|href)\s*=|@import|url\(|<script|<link|http`), html)
	require.Contains(t, html, "prefers-color-scheme: dark")
	require.Contains(t, html, "2 CPUs &amp; &lt;none&gt; spare")
	require.Contains(t, html, "c0 is compressed 11 times")

	for _, name := range []string{"ink", "muted", "grid", "paper", "series0", "series2"} {
		require.Contains(t, html, "var(--"+name+")")
		require.Equal(t, 2, strings.Count(html, "--"+name+":"), "light and dark")
	}
	require.NotRegexp(t, `(?:fill|stroke|color):#`, html, "a colour was not replaced")
	require.Less(t, len(html), 500_000)
}

func TestEveryPlotShowsWhatItIsOf(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, example().HTML(&b))
	plots := regexp.MustCompile(`(?s)<svg viewBox="[^"]*" role.*?</svg>`).FindAllString(b.String(), -1)
	require.Len(t, plots, 3+2, "one a policy, imbalance, step time")
	for _, svg := range plots {
		dec := xml.NewDecoder(strings.NewReader(svg))
		paths, texts := 0, 0
		for {
			token, err := dec.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err)
			if e, ok := token.(xml.StartElement); ok {
				switch e.Name.Local {
				case "path":
					paths++
				case "text":
					texts++
				}
			}
		}
		require.Greater(t, paths, 5)
		require.Greater(t, texts, 8, "ticks and labels")
		require.Contains(t, svg, "seconds")
		require.Contains(t, svg, "<title>")
		require.Regexp(t, `L\d+`, svg)
	}
	for i, svg := range plots[:3] {
		require.Contains(t, svg, seriesVar(i))
		require.Contains(t, svg, ">20k<", "all have the same scale")
	}
}

func TestCondense(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := saw(rapid.IntRange(1, 500).Draw(t, "steps"), 1000)
		stretches := rapid.IntRange(1, 400).Draw(t, "stretches")
		points := condense(steps, stretches)
		require.NotEmpty(t, points)
		require.LessOrEqual(t, len(points), stretches)
		n, last := 0, -1.0
		for _, p := range points {
			require.Greater(t, p.at, last)
			last = p.at
			n += p.stepsIn
			require.LessOrEqual(t, p.smallest, p.mean)
			require.LessOrEqual(t, p.mean, p.meanLargest)
			require.LessOrEqual(t, p.meanLargest, p.largest)
		}
		require.Equal(t, len(steps), n, "no step is lost")
	})
	require.Empty(t, condense(nil, 10))
}

func TestTicks(t *testing.T) {
	for _, tt := range []struct {
		top  float64
		want []float64
	}{{23_000, []float64{0, 5000, 10_000, 15_000, 20_000}}, {9.7, []float64{0, 2, 4, 6, 8}}, {0, nil}, {math.Inf(1), nil}} {
		var got []float64
		for _, tick := range Ticks(tt.top, 4, thousands) {
			got = append(got, tick.Value)
		}
		require.Equal(t, tt.want, got, "up to %v", tt.top)
	}
	require.Equal(t, "12.5k", thousands(12_500))
	require.Equal(t, "0", thousands(0))
}

// Seeds are pairs: what differs from seed to seed under both policies is no doubt about the gain.
func TestTheGainOfOneRunOverAnother(t *testing.T) {
	run := func(values ...float64) (r Run) {
		for _, v := range values {
			r.Samples = append(r.Samples, Sample{TokensPerS: v})
		}
		return r
	}
	mean, low, high, seeds := Gain(run(100, 1000, 10), run(110, 1100, 11), TokensPerS)
	require.Equal(t, 3, seeds)
	require.InDelta(t, 0.1, mean, 1e-9)
	require.InDelta(t, 0.1, low, 1e-9, "each seed gains as much")
	require.InDelta(t, 0.1, high, 1e-9)
	mean, low, high, _ = Gain(run(100, 100), run(100, 121), TokensPerS) // logarithms 0 and 2 ln 1.1
	require.InDelta(t, 0.1, mean, 1e-9)
	off := 12.706 * math.Log(1.21) / 2
	require.InDelta(t, 1.1*math.Exp(-off)-1, low, 1e-6)
	require.InDelta(t, 1.1*math.Exp(off)-1, high, 1e-6)
	mean, low, high, seeds = Gain(run(100), run(90), TokensPerS)
	require.Equal(t, 1, seeds)
	require.InDelta(t, -0.1, mean, 1e-9)
	require.InDelta(t, mean, low, 1e-9)
	require.InDelta(t, mean, high, 1e-9)
	_, _, _, seeds = Gain(run(100, math.NaN(), 0), run(math.NaN(), 100, 100), TokensPerS)
	require.Zero(t, seeds, "nothing was measured under both")
}

func TestTheIntervalOfAMean(t *testing.T) {
	require.Zero(t, Value{Mean: 1, SD: 1}.Interval(1))
	require.InDelta(t, 2.776*2/2.2360679, Value{SD: 2}.Interval(5), 1e-3)
	require.InDelta(t, 2.048, Value{SD: math.Sqrt(29)}.Interval(29), 1e-3)
	require.InDelta(t, 0.196, Value{SD: 1}.Interval(100), 1e-3)
}

package survey

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/refengine/bind"
	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/engine"
)

// watchGroup has uneven ranks decode for some minutes of virtual time, and returns what a survey
// reads of their pages as SGLang.
// counts: the engine is told to count its barrier.
func watchGroup(t *testing.T, cfg group.Config, counts bool) *Series {
	var pages [300][]byte // one a second
	synctest.Test(t, func(t *testing.T) {
		var unused atomic.Int64
		g := group.New(cfg, group.Counts{OverAdmitted: &unused, Preemptions: &unused, LocalPrefills: &unused, Tokens: &unused},
			steplog.New(1, "", nil), make([]*cache.Cache, cfg.Ranks))
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { g.Run(ctx) })
		for client := range cfg.Ranks * cfg.Slots {
			r, rank := rand.New(rand.NewPCG(1, uint64(client))), client%cfg.Ranks
			running.Go(func() {
				for ctx.Err() == nil {
					time.Sleep(time.Duration(r.ExpFloat64() * float64(10*time.Second)))
					j := group.NewJob(rank, make([]int32, int(200*math.Pow(100, r.Float64()))), "", false, 50+r.IntN(500))
					for g.Submit(j); ctx.Err() == nil && j.End.Load() == group.GoingOn; {
						select {
						case <-j.Wake:
						case <-ctx.Done():
						}
					}
				}
			})
		}
		for i := range pages {
			time.Sleep(time.Second)
			pages[i] = sglangPage(g, cfg, counts)
		}
		cancel()
		running.Wait()
	})
	s := &Series{Address: "virtual"}
	for i, text := range pages {
		p, err := Read(text)
		require.NoError(t, err)
		require.NoError(t, s.Add(i, began.Add(time.Duration(i)*time.Second), p))
	}
	return s
}

func sglangPage(g *group.Group, cfg group.Config, counts bool) []byte {
	var ranks []bind.Gauges
	for i := range cfg.Ranks {
		of := g.Gauges(i)
		on := bind.Gauges{
			Rank: i, Running: of.Running.Load(), Used: of.KVBlocks.Load() * cache.BlockSize, Capacity: int64(cfg.Blocks) * cache.BlockSize,
			Decoded: of.Generated.Load() - of.Begun.Load(),
		}
		if counts {
			on.Steps, on.WaitNanos, on.Pairs, on.FewerPairs = of.Steps.Load(), of.WaitNanos.Load(), of.Pairs.Load(), of.FewerPairs.Load()
		}
		ranks = append(ranks, on)
	}
	return bind.AppendMetrics(nil, "m", "decode", ranks)
}

// What an engine counts of its own barrier is what a survey computes of it from samples, if the
// survey is right.
func TestTheEngineAgreesWithTheSurvey(t *testing.T) {
	cfg := group.Config{Ranks: 4, Slots: 12, Blocks: 8192, TokensPerChunk: 1, C0: 20 * time.Millisecond, C1: 300 * time.Nanosecond}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is simulated
	for _, counts := range []bool{false, true} {
		s := watchGroup(t, cfg, counts)
		f := Judge(ctx, []*Series{s}, Given{}, func(int, int) {})[0]
		require.True(t, f.Law.ok)
		asks := 1 // however many groups there are
		if b := f.barrier; counts {
			t.Logf("a rank waits for %.2f ms in a step, by its own clock for %.2f; KV beyond the mean: %.3f, counted %.3f", f.WaitMs,
				b.WaitedMs/b.Steps, f.KVExcess, b.FewerPairs/b.Pairs)
			require.InEpsilon(t, b.WaitedMs/b.Steps, f.WaitMs, 0.05)
			require.InEpsilon(t, b.FewerPairs/b.Pairs, f.KVExcess, 0.05)
			asks = 0
		}
		var text, page bytes.Buffer
		r := NewReport("", time.Minute, []*Series{s}, []*Finding{f, f})
		require.NoError(t, r.Text(&text))
		require.NoError(t, r.HTML(&page))
		for _, report := range []string{text.String(), html.UnescapeString(page.String())} {
			require.Equal(t, counts, strings.Contains(report, "ms at the gather before it, by SGLang's own clock; "))
			require.Equal(t, counts, strings.Contains(report, "by SGLang's own count of all steps"))
			require.Equal(t, asks, strings.Count(report, "SGLANG_ENABLE_METRICS_DP_ATTENTION=1"))
		}
	}
}

// A survey names the law of the table by which its ranks step, and says so where none is near.
func TestASurveyNamesTheNearestLaw(t *testing.T) {
	e, err := laws.Find("Qwen3-235B-A22B-FP8,sglang,H200,4")
	require.NoError(t, err)
	ms := func(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }
	law := e.Law()
	cfg := group.Config{
		Ranks: 4, Slots: 24, Blocks: 8192, TokensPerChunk: 1, C0: ms(law.C0Ms), C1: ms(law.C1Ms), CR: ms(law.RequestMs), CM: ms(law.MostRowsMs),
		CS: ms(law.MeanRowsMs), Form: law.Form, Captured: law.Sizes[len(law.Sizes)-1],
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is simulated
	s := watchGroup(t, cfg, false)
	told := func() (*Near, string) {
		f := Judge(ctx, []*Series{s}, Given{}, func(int, int) {})[0]
		var text bytes.Buffer
		require.NoError(t, NewReport("", time.Minute, []*Series{s}, []*Finding{f}).Text(&text))
		return f.Nearest, text.String()
	}
	near, text := told()
	require.Less(t, near.Error, 0.03, "%+v", near)
	require.False(t, near.Same, "no page of these engines names a model of the table")
	require.Contains(t, text, " for as many ranks, because none is for this model; it is ")
	s.Model = "Qwen/Qwen3-235B-A22B-FP8"
	near, text = told()
	require.True(t, near.Same)
	require.Equal(t, e.Name(), near.Name)
	require.Contains(t, text, e.Name()+" (graphs, unmasked), out of 5 for this model and as many ranks; it is ")
	require.NotContains(t, text, "does not hold here")
	s.Model = "gpt-oss-120b" // its steps are shorter
	near, text = told()
	require.Greater(t, near.Error, Far)
	require.Contains(t, text, "that is more than 20 %, so what is simulated by it does not hold here")
	require.Nil(t, Nearest("sglang", "", 3, []Window{{StepMs: 1, Steps: 1}}), "no law has three ranks")
	require.Nil(t, Nearest("sglang", "", 4, nil), "nothing was seen")
}

// countedPage is a page after so many seconds, of two ranks that read 300 and 100 KV tokens in each
// of 20 steps a second. The barrier's series of the first rank are replaced.
func countedPage(at int64, instead map[string]string) []byte {
	n := 20 * at
	text := string(bind.AppendMetrics(nil, "m", "decode", []bind.Gauges{
		{Running: 3, Used: 300, Capacity: 1000, Decoded: 3 * n, Steps: n, Pairs: 300 * n},
		{Running: 1, Used: 100, Capacity: 1000, Decoded: n, Rank: 1, Steps: n, WaitNanos: n * 2e6, Pairs: 100 * n, FewerPairs: 200 * n},
	}))
	for series, value := range instead {
		name, label, _ := strings.Cut(series, " ")
		line := regexp.MustCompile(`(?m)^(sglang:dp_attention_` + name + `\{.*dp_rank="0".*` + label + `.*}) .*$`)
		text = line.ReplaceAllString(text, "$1 "+value)
	}
	return []byte(text)
}

func TestABarrierIsReadFromPages(t *testing.T) {
	s := &Series{}
	for i := range 11 {
		p, err := Read(countedPage(int64(100+i), nil))
		require.NoError(t, err)
		require.NoError(t, s.Add(i, began.Add(time.Duration(i)*time.Second), p))
	}
	require.Equal(t, Barrier{Steps: 400, WaitedMs: 400, Pairs: 80_000, FewerPairs: 40_000}, s.barrier, "what came while it was watched")
	half := s.last.Ranks[0].Barrier
	half.Steps, half.FewerPairs = math.NaN(), math.NaN()
	require.Zero(t, half.since(Barrier{}), "a sum without its count says nothing")
	for _, c := range []struct{ series, value, says string }{
		{"sync_wait_seconds_sum", "+Inf", "sync_wait_seconds_sum says +Inf"},
		{"sync_wait_seconds_count", "-1", "sync_wait_seconds_count says -1"},
		{"pairs_total scheduled", "1e21", "pairs_total says 1e+21"},
		{"pairs_total imbalance", "-5", "pairs_total says -5"},
		{"sync_wait_seconds_sum", "1e6", "sync_wait_seconds_sum says 1000000 s more for 20 steps"},
		{"sync_wait_seconds_count", "9e15", "more within 1s"},
		{"sync_wait_seconds_sum", "NaN", ""}, // it is not told
	} {
		p, err := Read(countedPage(111, map[string]string{c.series: c.value}))
		if err == nil {
			was := *s
			err = was.Add(11, began.Add(11*time.Second), p)
		}
		if c.says == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorAs(t, err, new(*engine.PageError), c.says)
		require.ErrorContains(t, err, c.says)
	}
}

// Whatever pages say of a barrier, a report has figures that can be right.
func TestNoReportHasNonsenseOfABarrier(t *testing.T) {
	values := []string{"0", "1", "NaN", "+Inf", "-1", "1e300", "5e-324", "1e15", "9007199254740992", "99999999999999999999", "0.5", "1e11",
		"1e6"}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rapid.Check(t, func(t *rapid.T) {
		s := &Series{Address: "a"}
		for i := range rapid.IntRange(2, 9).Draw(t, "pages") {
			instead := map[string]string{}
			for _, series := range []string{"sync_wait_seconds_sum", "sync_wait_seconds_count", "pairs_total scheduled", "pairs_total imbalance"} {
				if rapid.IntRange(0, 3).Draw(t, "odd") == 0 {
					instead[series] = rapid.OneOf(rapid.SampledFrom(values),
						rapid.Map(rapid.Float64(), func(v float64) string { return fmt.Sprint(v) })).Draw(t, series)
				}
			}
			if p, err := Read(countedPage(int64(10*i), instead)); err == nil {
				_ = s.Add(i, began.Add(time.Duration(10*i)*time.Second), p)
			}
		}
		var text bytes.Buffer
		require.NoError(t, NewReport("", time.Second, nil, Judge(ctx, []*Series{s}, Given{}, func(int, int) {})).Text(&text))
		require.NotRegexp(t, nonsense, text.String())
	})
}

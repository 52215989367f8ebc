package survey

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var random = rand.New(rand.NewPCG(1, 1))

func dice() *rand.Rand { return random }

var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// told is a series of an address whose ranks each answer 10 tokens a second, with so many prompts
// of another kind.
func told(address string, ranks int, seconds int, computed, pulled, answers float64) *Series {
	s := &Series{Address: address}
	for i := range seconds {
		p := Page{Model: "m", Started: 1}
		at := float64(i)
		for k := range ranks {
			r := Rank{Name: string(rune('0' + k)), Running: 2, KV: 100, Room: 1000, Output: 10 * at, Prompt: 50 * at, Computed: computed * at,
				Pulled: pulled * at}
			r.Gaps, r.GapsMs = 9*at, 9*at*50
			ended := make([]int32, int(at))
			for e := range ended {
				ended[e] = int32(answers)
			}
			if answers > 0 {
				r.Outputs, r.Prompts = histogram(ended), histogram(ended)
			}
			p.Ranks = append(p.Ranks, r)
		}
		s.Add(i, began.Add(time.Duration(i)*time.Second), p)
	}
	return s
}

func TestWhoStepsTogether(t *testing.T) {
	all := []*Series{
		told("d0", 1, 5, 0, 50, 20), told("d1", 1, 5, 0, 50, 20), told("p0", 1, 5, 50, 0, 1), told("a0", 4, 5, 50, 0, 20),
		told("a1", 4, 5, 50, 0, 20),
		told("short", 1, 1, 0, 50, 20), told("cached", 2, 5, 0, 20, 20), // of whose prompts most are in its own cache
	}
	got := groups(all)
	require.Len(t, got, 5)
	require.Equal(t, decodes, got[4].Kind)
	require.Equal(t, []kind{decodes, prefills, both, both}, []kind{got[0].Kind, got[1].Kind, got[2].Kind, got[3].Kind})
	require.Equal(t, []string{"d0", "d1"}, got[0].Ranks)
	require.Equal(t, []string{"a0/0", "a0/1", "a0/2", "a0/3"}, got[2].Ranks)
	require.Len(t, got[0].windows, 4)
	w := got[0].windows[1]
	require.InDelta(t, 50, w.stepMs, 1e-9)
	require.InDelta(t, 20, w.output, 1e-9)
}

func TestAWindowInWhichAnEngineBeganAnewDoesNotCount(t *testing.T) {
	s := told("d0", 1, 6, 0, 50, 20)
	for i := 3; i < 6; i++ {
		s.samples[i].life = 2
		s.samples[i].ranks[0].Output -= 25
	}
	g := groups([]*Series{s})[0]
	require.Equal(t, 1, g.Lost)
	require.Len(t, g.windows, 4)
}

// An address that is silent for a while has no windows then, and neither has its group.
func TestSamplesOfAGroupAreOfTheSameTime(t *testing.T) {
	a, b := told("d0", 1, 10, 0, 50, 20), told("d1", 1, 10, 0, 50, 20)
	b.samples = append(b.samples[:4:4], b.samples[6:]...)
	g := groups([]*Series{a, b})[0]
	require.Len(t, g.windows, 3+3)
}

func TestASeriesIsBounded(t *testing.T) {
	s := told("d0", 1, 3*mostSamples, 0, 50, 0)
	require.LessOrEqual(t, len(s.samples), mostSamples)
	g := groups([]*Series{s})[0]
	require.Greater(t, len(g.windows), mostSamples/3)
	require.InDelta(t, 4, g.windows[0].seconds, 1e-9)
	require.InDelta(t, 50, g.windows[0].stepMs, 1e-9)
}

// vLLM tells of a prompt when all of it is computed. Its KV tells of each chunk.
func TestChunksAreSeenInTheKV(t *testing.T) {
	x := Rank{KV: 1000, Output: 50, Ended: 300, Hits: 10}
	y := Rank{KV: 2000, Output: 80, Ended: 900, Hits: 110, Computed: 5, Pulled: math.NaN()}
	require.InDelta(t, 1000-30+600-100, computedIn(&x, &y, false), 1e-9)
	require.InDelta(t, 5, computedIn(&x, &y, true), 1e-9, "SGLang counts chunks")
	y.KV = math.NaN()
	require.InDelta(t, 5, computedIn(&x, &y, false), 1e-9)
}

// A rank to which nobody sends anything belongs to the others.
func TestAnIdleRankIsPartOfItsGroup(t *testing.T) {
	still := told("d1", 1, 20, 0, 50, 20)
	for i := range still.samples {
		r := &still.samples[i].ranks[0]
		r.Output, r.Running, r.KV = 0, 0, 0
	}
	still.output = 0
	got := groups([]*Series{told("d0", 1, 20, 0, 50, 20), still})
	require.Len(t, got, 1)
	f := &Finding{Group: got[0]}
	f.see()
	require.InDelta(t, 1, f.KVExcess, 1e-9, "the other one holds twice the mean")
}

// What came before an engine began anew counts as well.
func TestTotalsOutliveARestart(t *testing.T) {
	s := &Series{}
	for i, output := range []float64{1000, 1100, 0, 50} {
		p := Page{Model: "m", Started: float64(i / 2), Ranks: []Rank{{Output: output, Prompt: output, Computed: output, Running: 1}}}
		s.Add(i, began.Add(time.Duration(i)*time.Second), p)
	}
	require.InDelta(t, 150, s.output, 1e-9)
	require.Equal(t, both, s.does())
}

// A slope that hardly any window tells is uncertain, and not nothing: all ranks but one hold 60,000
// tokens for hours.
func TestWhatNoWindowTellsIsNotNothing(t *testing.T) {
	f := &Finding{Group: &Group{Kind: decodes, Ranks: []string{"a"}}, Closed: true}
	var points []point
	for range 300 {
		kv := 100_000 * (1 + 0.002*(2*random.Float64()-1))
		points = append(points, point{ms: (20 + 0.0003*kv) * (1 + 0.03*(2*random.Float64()-1)), steps: 20, kv: kv, meanKV: 60_000,
			running: 10 + random.Float64(), meanRunning: 10})
	}
	f.Law = fit(points, surely)
	require.True(t, f.Law.ok)
	c := change(levelled, f.levelling(points, becomes{running: 10}))
	require.Greater(t, c.Gain.High, 0.31, "level ranks would gain so much")
	require.False(t, c.Narrow)
}

func TestAMetricThatIsNoNumberLeavesItsWindowOut(t *testing.T) {
	s := told("d0", 1, 8, 0, 50, 20)
	s.samples[3].ranks[0].Running = math.NaN()
	s.samples[6].ranks[0].Output = math.NaN()
	g := groups([]*Series{s})[0]
	require.Len(t, g.windows, 3)
	require.Equal(t, 4, g.Lost)
	s = told("d0", 2, 60, 0, 50, 20)
	for i := range s.samples {
		s.samples[i].ranks[1].KV = math.NaN()
	}
	all := Judge(t.Context(), []*Series{s}, Given{}, func(int, int) {})
	require.ErrorContains(t, all[0].Why, "do not tell how many KV tokens")
	var b bytes.Buffer
	require.NoError(t, NewReport("survey", time.Minute, []*Series{s}, all).Text(&b))
	require.NotContains(t, b.String(), "NaN")
}

// Whatever a survey cannot tell, its reader knows what to do next.
func TestWhatCannotBeToldHasANextStep(t *testing.T) {
	filling := func(s *Series) *Series { // vLLM's KV grows with each chunk
		for i := range s.samples {
			for k := range s.samples[i].ranks {
				s.samples[i].ranks[k].KV, s.samples[i].ranks[k].Room = float64(60*i), 1e5
			}
		}
		return s
	}
	trial := "prompts were computed in all windows, so no page tells what steps take without them; to measure the gain, " +
		"play a trial on one address that nobody else uses: evenkeel survey --trial --engines ADDR"
	for name, tt := range map[string]struct {
		of   *Series
		says string
	}{
		"busy ranks that do both":           {filling(told("a", 2, 90, 50, 0, 20)), trial},
		"ranks that do both, with no chunk": {told("a", 2, 90, 50, 0, 20), "survey again while clients send new prompts"},
		"ranks that do both, for a moment":  {told("a", 2, 30, 50, 0, 20), "29 windows are too few, and 50 are needed; watch for longer"},
		"ranks that only prefill":           {told("p", 2, 90, 50, 0, 1), "name the addresses of those that decode, too"},
		"decode ranks, for a moment":        {told("d", 2, 12, 0, 50, 20), "22 requests ended meanwhile, and 50 are needed to know how long prompts and answers are; watch for longer"},
	} {
		f := Judge(t.Context(), []*Series{tt.of}, Given{}, func(int, int) {})[0]
		require.Error(t, f.Why, name)
		require.Contains(t, f.Verdict(), "What a change would gain cannot be told: ", name)
		require.Contains(t, f.Verdict(), tt.says, name)
	}
	most := Finding{Group: &Group{Kind: both}, Most: Span{0.1, 0.2, 0.3}}
	require.Contains(t, most.Verdict(), "cannot be told from metrics; to measure the gain, play a trial")
}

func TestARankAloneHasNothingToGain(t *testing.T) {
	f := Judge(t.Context(), []*Series{told("a", 1, 60, 0, 50, 10)}, Given{}, func(int, int) {})[0]
	require.Equal(t, "There is nothing to gain here: one rank waits for no other.", f.Verdict())
}

// The fullest rank is that of each sample: where two take turns, each looks like the mean over a
// while.
func TestTheFullestRankIsThatOfEachSample(t *testing.T) {
	s := told("a", 2, 2, 0, 50, 10)
	for i := range s.samples {
		s.samples[i].ranks[i].KV, s.samples[i].ranks[i].Running = 300, 8
	}
	w := groups([]*Series{s})[0].windows[0]
	require.Equal(t, 300., w.most.kv)
	require.Equal(t, 8., w.most.running)
	require.Equal(t, 200., w.ranks[0].kv)
}

// No more requests run than there are, than have slots, and than find KV room.
func TestHowManyRequestsCouldRun(t *testing.T) {
	f := &Finding{Group: &Group{Ranks: []string{"a", "b"}}, Running: 40}
	for _, c := range []struct{ inFlight, full, most float64 }{
		{40, 0.1, 40},
		{60, 0.1, 60},
		{400, 0.1, 128}, // of 2 x 64 slots
		{400, 0.95 / 1.2, 48},
		{400, 0.99, 40},
		{400, math.NaN(), 128},
	} {
		f.InFlight, f.KVFull = c.inFlight, c.full
		require.InDelta(t, c.most, (&traffic{Finding: f, slots: 64}).atMost(), 1e-9)
	}
}

// What a router that fills ranks otherwise makes of a group counts little.
func TestRoutersThatFillRanksOtherwiseCountLittle(t *testing.T) {
	alike, other := levels{kv: 0.5, requests: 0.1}, levels{kv: 1, requests: 0.1}
	a, b := alike.unlike(0.52, 0.1), other.unlike(0.52, 0.1)
	mean, deviation := weighed([]float64{0.3, 0.9}, []float64{1 / (a * a), 1 / (b * b)})
	require.InDelta(t, 0.3, mean, 0.01)
	require.Less(t, deviation, 0.1)
	require.Positive(t, levels{}.unlike(0, 0))
}

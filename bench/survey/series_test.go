package survey

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var random = rand.New(rand.NewPCG(1, 1))

func dice() *rand.Rand { return random }

var began = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// told is a series of an address whose ranks each answer 10 tokens a second, with so many prompts of another kind.
func told(address string, ranks int, seconds int, computed, pulled, answers float64) *Series {
	s := &Series{Address: address}
	for i := range seconds {
		p := Page{Model: "m", Started: 1}
		at := float64(i)
		for k := range ranks {
			r := Rank{Name: string(rune('0' + k)), Running: 2, KV: 100, Room: 1000, Output: 10 * at, Prompt: 50 * at, Computed: computed * at, Pulled: pulled * at}
			r.Gaps, r.GapsMs = 9*at, 9*at*50
			ended := make([]int32, int(at))
			for e := range ended {
				ended[e] = int32(answers)
			}
			r.Outputs, r.Prompts = histogram(ended), histogram(ended)
			p.Ranks = append(p.Ranks, r)
		}
		s.Add(began.Add(time.Duration(i)*time.Second), p)
	}
	return s
}

func TestWhoStepsTogether(t *testing.T) {
	all := []*Series{
		told("d0", 1, 5, 0, 50, 20), told("d1", 1, 5, 0, 50, 20), told("p0", 1, 5, 50, 0, 1), told("a0", 4, 5, 50, 0, 20), told("a1", 4, 5, 50, 0, 20),
		told("short", 1, 1, 0, 50, 20),
	}
	got := groups(all)
	require.Len(t, got, 4)
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
		s.samples[i].started = 2
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

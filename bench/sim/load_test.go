package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/trace"
)

func TestASeedRotatesATrace(t *testing.T) {
	tr := &trace.Trace{Format: trace.AzureCSV}
	for i := range 100 {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(i) * time.Second, Prompt: 1000 + i, Output: 1 + i})
	}
	src := Source{Trace: tr}
	w, err := src.draw(1, 0)
	require.NoError(t, err)
	require.Len(t, w.history, 25, "a quarter")
	require.Len(t, w.jobs, 75, "and all others")
	first := int(w.history[0].prompt)
	for i, a := range append(w.history, w.jobs...) {
		require.EqualValues(t, 1000+(first-1000+i)%100, a.prompt, "in the trace's order, the beginning after the end")
		require.InDelta(t, float64(i-25)*1000, a.at, 0.1, "the gap from the end to the beginning is a mean one")
	}
	other, err := src.draw(2, 0)
	require.NoError(t, err)
	require.NotEqual(t, w.jobs, other.jobs)

	few, err := src.draw(1, 10)
	require.NoError(t, err)
	require.Equal(t, w.jobs[:10], few.jobs)
	_, err = src.draw(1, 76)
	require.ErrorContains(t, err, "the trace has 100")
}

func TestFewSeedsBeginAllOverTheTrace(t *testing.T) {
	for _, seeds := range []int{3, 5, 8, 20} {
		tenths := map[int]int{}
		for seed := range seeds {
			at := startOf(uint64(seed)+1, 1000)
			require.Less(t, at, 1000)
			tenths[at*seeds/1000]++
		}
		require.Greater(t, len(tenths), seeds/2, "%d seeds", seeds)
	}
}

func TestMooncakesTimesAreSpreadOverTheirTick(t *testing.T) {
	tr := &trace.Trace{Format: trace.MooncakeJSONL}
	for _, s := range []int{0, 0, 0, 3, 4, 4, 9} {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(s) * time.Second})
	}
	var got []float64
	for _, q := range rotate(tr, 0, 7) {
		got = append(got, q.At.Seconds())
	}
	require.Equal(t, []float64{0, 1, 2, 3, 4, 5.5, 9}, got, "three in 3 s; one; two until the next, but 3 s at most; one")
	tr.Format = trace.AzureCSV
	require.Equal(t, tr.Requests, rotate(tr, 0, 7), "another clock is taken as it is")
}

func TestAnOpenLoopIsPacedByWhatALevelFleetServes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := Uniform(rapid.IntRange(1, 64).Draw(t, "ranks"), rapid.IntRange(1, 64).Draw(t, "slots"), 0)
		rho := rapid.Float64Range(0.1, 2).Draw(t, "rho")
		w := &workload{}
		outputs, resident := 0.0, 0.0
		for range rapid.IntRange(2, 50).Draw(t, "requests") {
			s, o := rapid.Int32Range(1, 50_000).Draw(t, "prompt"), rapid.Int32Range(1, 2000).Draw(t, "output")
			w.jobs = append(w.jobs, arrival{at: float64(len(w.jobs)) * 3, prompt: s, output: o})
			outputs += float64(o)
			for a := range o {
				resident += float64(s + a)
			}
		}
		n := float64(len(w.jobs))
		w.pace(rho, &f)
		slots := float64(f.slots())
		stepMs := DefaultC0Ms + DefaultC1Ms*resident/outputs*slots/float64(f.Ranks())
		rate := rho * slots / (outputs / n * stepMs) // requests per ms
		require.InEpsilon(t, (n-1)/rate, w.jobs[len(w.jobs)-1].at, 1e-9)
		require.InEpsilon(t, 1/rate, w.jobs[1].at, 1e-9, "gaps keep their proportions")
	})
}

func TestADrawnTraceIsAnotherForEverySeed(t *testing.T) {
	src := Source{Synth: "mix"}
	a, err := src.draw(1, 400)
	require.NoError(t, err)
	require.Len(t, a.history, 100)
	require.Len(t, a.jobs, 400)
	require.Zero(t, a.jobs[0].at)
	b, err := src.draw(2, 400)
	require.NoError(t, err)
	require.NotEqual(t, a.jobs, b.jobs)
	replay, history, err := src.size(0)
	require.NoError(t, err)
	require.Equal(t, 12_000, replay)
	require.Equal(t, 2000, history)
	_, err = (&Source{Synth: "none"}).draw(1, 10)
	require.Error(t, err)
}

package decode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/bench/lab/trace"
)

// drawn is what the only seed of a plan replays.
func drawn(t testing.TB, from Source, requests int) *workload {
	t.Helper()
	w, err := (&Plan{Source: from, Requests: requests, Seeds: 1, Fleet: Uniform(8, 16, 0)}).draw(1)
	require.NoError(t, err)
	return w
}

// numbered is a trace of n requests, one a second, whose prompts tell which is which.
func numbered(n int) *trace.Trace {
	tr := &trace.Trace{Format: trace.AzureCSV}
	for i := range n {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(i) * time.Second, Prompt: 1000 + i, Output: 1 + i, Key: uint64(1 + i)})
	}
	return tr
}

func TestASeedIsABlockOfATrace(t *testing.T) {
	p := &Plan{Source: Source{Trace: numbered(200)}, Fleet: Uniform(1, 1, 0), Seeds: 4}
	next := 0
	for seed := range 4 {
		w, err := p.draw(seed + 1)
		require.NoError(t, err)
		require.Len(t, w.jobs, 50)
		for i, a := range w.jobs {
			require.EqualValues(t, 1000+next, a.prompt, "in the trace's order, and in no other block")
			require.InDelta(t, float64(i)*1000, a.at, 0.1)
			next++
		}
		require.Len(t, w.history, 50, "a quarter")
		for i, a := range w.history {
			require.EqualValues(t, 1000+(50*seed+150+i)%200, a.prompt, "what comes before the block, the end before the beginning")
			require.InDelta(t, float64(i-50)*1000, a.at, 0.1, "a mean gap is between the end and the beginning")
		}
	}
	require.Equal(t, 200, next, "all of the trace")
}

func TestASeedThatIsAloneHasAllButTheHistory(t *testing.T) {
	w := drawn(t, Source{Trace: numbered(2000)}, 0)
	require.Len(t, w.history, 500)
	require.Len(t, w.jobs, 1500)
	require.EqualValues(t, 1000, w.history[0].prompt)
	require.EqualValues(t, 1500, w.jobs[0].prompt)
	require.Equal(t, w.jobs[:10], drawn(t, Source{Trace: numbered(2000)}, 10).jobs)
}

func TestABlockComesAgainUntilTheFleetHasEnough(t *testing.T) {
	p := &Plan{Source: Source{Trace: numbered(100)}, Fleet: Uniform(1, 1, 0), Load: Load{Pool: 1}, Seeds: 5}
	replay, _, err := p.size()
	require.NoError(t, err)
	require.Equal(t, 69, replay)
	require.GreaterOrEqual(t, replay-max(replay/8, 1), 30*(1+1), "thirty times what is in the system, after the warm-up")
	w, err := p.draw(2)
	require.NoError(t, err)
	require.Len(t, w.jobs, replay)
	seen := map[uint64]bool{}
	for i, a := range w.jobs {
		require.EqualValues(t, 1020+i%20, a.prompt)
		require.InDelta(t, float64(i)*1000, a.at, 0.1, "arrivals go on after a mean gap")
		require.False(t, seen[a.key], "the same prompt again would be known by its key")
		seen[a.key] = true
	}
	p.Fleet = Uniform(2, 2, 0)
	replay, _, err = p.size()
	require.NoError(t, err)
	require.Equal(t, 75, replay, "at most as many as a seed that is alone has")
}

func TestMooncakesTimesAreSpreadOverTheirTick(t *testing.T) {
	tr := &trace.Trace{Format: trace.MooncakeJSONL}
	for _, s := range []int{0, 0, 0, 3, 4, 4, 9} {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(s) * time.Second})
	}
	var got []float64
	for _, at := range spread(tr) {
		got = append(got, at.Seconds())
	}
	require.Equal(t, []float64{0, 1, 2, 3, 4, 5.5, 9}, got, "three in 3 s; one; two until the next, but 3 s at most; one")
	tr.Format = trace.AzureCSV
	for i, at := range spread(tr) {
		require.Equal(t, tr.Requests[i].At, at, "another clock is taken as it is")
	}
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
	p := &Plan{Source: Source{Synth: "mix"}, Requests: 400, Fleet: Uniform(8, 16, 0), Load: Load{Pool: 32}, Seeds: 5}
	a, err := p.draw(1)
	require.NoError(t, err)
	require.Len(t, a.history, 100)
	require.Len(t, a.jobs, 400)
	require.Zero(t, a.jobs[0].at)
	b, err := p.draw(2)
	require.NoError(t, err)
	require.NotEqual(t, a.jobs, b.jobs)
	p.Requests = 0
	replay, history, err := p.size()
	require.NoError(t, err)
	require.Equal(t, 12_000, replay)
	require.Equal(t, 2000, history)
	p.Source.Synth, p.Requests = "none", 10
	_, err = p.draw(1)
	require.Error(t, err)
}

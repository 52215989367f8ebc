package fit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"evenkeel/internal/stats"
)

// engine makes a trace as a barrier group would write it.
type engine struct {
	c0, c1 float64
	costs  []float64
	noise  float64 // ms, standard deviation
	jitter float64 // ms between the lines of a step
	began  float64 // ms
}

func (e engine) trace(steps int, seed uint64) string {
	rng := rand.New(rand.NewPCG(seed, 1))
	loads := make([]float64, len(e.costs))
	for r := range loads {
		loads[r] = 20_000 + 20_000*rng.Float64()
	}
	var b strings.Builder
	now := e.began
	for k := range steps {
		most := 0.0
		for r := range loads {
			if loads[r] += 16; rng.IntN(40) == 0 { // a long request came, or ended
				loads[r] = 20_000 + 60_000*rng.Float64()
			}
			most = max(most, e.costs[r]*math.Round(loads[r]))
		}
		for r := range loads {
			fmt.Fprintf(&b, `{"t_ms":%.3f,"group":"main","rank":%d,"step":%d,"running":16,"kv_tokens":%.0f}`+"\n", now+e.jitter*rng.Float64(), r, k+1, loads[r])
		}
		now += e.c0 + e.c1*most + e.noise*rng.NormFloat64()
	}
	return b.String()
}

func equal(ranks int) []float64 { return ones(ranks) }

func fitStep(t *testing.T, trace string) GroupFit {
	t.Helper()
	s, err := ReadStepTrace(write(t, "steps.jsonl", trace))
	require.NoError(t, err)
	f := StepModels(s)
	require.Len(t, f.Groups, 1)
	return f.Groups[0]
}

func TestStepModel(t *testing.T) {
	g := fitStep(t, engine{c0: 55, c1: 2e-4, costs: equal(8)}.trace(500, 1))
	require.InDelta(t, 55, float64(g.C0), 1e-2)
	require.InEpsilon(t, 2e-4, float64(g.C1), 1e-3)
	require.Greater(t, float64(g.R2), 0.9999)
	require.Equal(t, StepsLeft{Gaps: 1}, g.LeftOut, "the last step has no end")
	require.Equal(t, []int{8, 500, 499}, []int{g.Ranks, g.Steps, g.N})
	require.Empty(t, g.Costs, "ranks are equal")
	require.Empty(t, g.Refused)
	require.Contains(t, g.config(), "step_model: {c0_ms: 55, c1_ms: 0.0002}")

	g = fitStep(t, engine{c0: 55, c1: 2e-4, costs: equal(8), noise: 2, jitter: 3}.trace(2000, 1))
	require.InDelta(t, 55, float64(g.C0), 0.7)
	require.InEpsilon(t, 2e-4, float64(g.C1), 0.05)
	require.Empty(t, g.Costs, "noise is not a slow rank")
}

func TestUnequalRanks(t *testing.T) {
	for _, tc := range []struct {
		name  string
		costs []float64
		noise float64
	}{
		{"one rank is slow", []float64{1, 1, 1.6, 1}, 0},
		{"one rank is slow, and steps vary", []float64{1, 1, 1.6, 1}, 0.5},
		{"each is different", []float64{0.7, 0.9, 1.1, 1.3}, 0.2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := fitStep(t, engine{c0: 55, c1: 2e-4, costs: tc.costs, noise: tc.noise}.trace(3000, 7))
			require.Len(t, g.Costs, len(tc.costs))
			mean := 0.0
			for _, c := range tc.costs {
				mean += c / float64(len(tc.costs))
			}
			for r, c := range g.Costs {
				require.Equal(t, r, c.Rank)
				if c.N >= minBound {
					require.InEpsilon(t, tc.costs[r]/mean, c.Cost, 0.05)
				}
			}
			require.InDelta(t, 55, float64(g.C0), 1)
			require.InEpsilon(t, 2e-4*mean, float64(g.C1), 0.05)
			require.Contains(t, g.config(), "rank 2, by")
		})
	}
}

// change edits the numbers of a trace's lines.
func change(trace string, edit func(at *float64, rank int, step *int, kv *int) (keep bool)) string {
	var b strings.Builder
	for line := range strings.Lines(trace) {
		var at float64
		var rank, step, running, kv int
		if _, err := fmt.Sscanf(line, `{"t_ms":%f,"group":"main","rank":%d,"step":%d,"running":%d,"kv_tokens":%d}`, &at, &rank, &step, &running, &kv); err != nil {
			panic(err)
		}
		if edit(&at, rank, &step, &kv) {
			fmt.Fprintf(&b, `{"t_ms":%.3f,"group":"main","rank":%d,"step":%d,"running":%d,"kv_tokens":%d}`+"\n", at, rank, step, running, kv)
		}
	}
	return b.String()
}

func TestStepsThatSayNothingAreLeftOut(t *testing.T) {
	whole := engine{c0: 55, c1: 2e-4, costs: equal(4)}.trace(600, 3)
	for _, tc := range []struct {
		name string
		edit func(at *float64, rank int, step *int, kv *int) bool
		left StepsLeft
	}{
		{"nobody had work for a minute", func(at *float64, _ int, step *int, _ *int) bool {
			if *step > 300 {
				*at += 60_000
			}
			return true
		}, StepsLeft{Gaps: 1, Pauses: 1}},
		{"the host slept for half a second, and for a quarter", func(at *float64, _ int, step *int, _ *int) bool {
			if *step > 100 {
				*at += 500
			}
			if *step > 200 {
				*at += 250
			}
			return true
		}, StepsLeft{Gaps: 1, Outliers: 2}},
		{"ten steps were not written", func(_ *float64, _ int, step *int, _ *int) bool { return *step < 100 || *step >= 110 }, StepsLeft{Gaps: 2}},
		{"five steps had nothing to do", func(_ *float64, _ int, step *int, kv *int) bool {
			if *step > 50 && *step <= 55 {
				*kv = 0
			}
			return true
		}, StepsLeft{Gaps: 1, Idle: 5}},
		{"the engine was started again", func(at *float64, _ int, step *int, _ *int) bool {
			if *step > 400 {
				*step -= 400
				*at += 1e6
			}
			return true
		}, StepsLeft{Gaps: 2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := fitStep(t, change(whole, tc.edit))
			require.Equal(t, tc.left, g.LeftOut)
			require.InDelta(t, 55, float64(g.C0), 1e-2)
			require.InEpsilon(t, 2e-4, float64(g.C1), 1e-3)
		})
	}
}

func TestARankWithoutWorkWritesNoLine(t *testing.T) { // as the vLLM plugin: no line, no count
	whole := engine{c0: 55, c1: 2e-4, costs: equal(4), jitter: 5}.trace(800, 5)
	missed := 0
	sparse := change(whole, func(_ *float64, rank int, step *int, kv *int) bool {
		if rank != 3 {
			*kv += 10_000 // so that the idle rank never was the fullest
			return true
		}
		*kv = min(*kv, 20_000)
		if *step > 200 && *step <= 500 {
			missed++
			return false
		}
		*step -= missed
		return true
	})
	s, err := ReadStepTrace(write(t, "steps.jsonl", sparse))
	require.NoError(t, err)
	g := s.Groups[0]
	require.Len(t, g.Steps, 800, "the others' steps go on")
	require.Zero(t, g.Steps[300].kvTokens(3))
	require.Len(t, g.Steps[300].Loads, 3)
	for i := 1; i < len(g.Steps); i++ {
		require.True(t, follows(g.Steps[i-1], g.Steps[i]), "step %d follows", i)
	}
}

func TestStepsAreToldApartByTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { // whatever order the lines of a step come in, within a third of it
		ranks, steps := rapid.IntRange(1, 6).Draw(t, "ranks"), rapid.IntRange(2, 30).Draw(t, "steps")
		var lines []RankLoad
		for k := range steps {
			for _, r := range rapid.Permutation(numbers(ranks)).Draw(t, "order") {
				at := 1000*float64(k) + float64(rapid.IntRange(0, 300).Draw(t, "late"))
				lines = append(lines, RankLoad{Rank: r, Step: int64(k), At: at, KVTokens: 100*k + r})
			}
		}
		g, err := newStepGroup("g", lines)
		require.NoError(t, err)
		require.Len(t, g.Steps, steps)
		for k, s := range g.Steps {
			require.Len(t, s.Loads, ranks)
			require.Equal(t, 100*k+ranks-1, s.largest().KVTokens)
		}
	})
}

func numbers(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func TestAStepModelIsRefused(t *testing.T) {
	flat := func(_ *float64, _ int, _ *int, kv *int) bool { *kv = 5000; return true }
	for _, tc := range []struct{ name, trace, says string }{
		{"too few steps", engine{c0: 55, c1: 2e-4, costs: equal(2)}.trace(150, 1), "149 steps; 200 are needed"},
		{"a load that never changes", change(engine{c0: 55, c1: 0, costs: equal(2)}.trace(300, 1), flat), "the largest load was always 5000 tokens"},
		{"steps that shrink with the load", engine{c0: 100, c1: -2e-4, costs: equal(2)}.trace(300, 1), "steps did not grow"},
		{"steps of no fixed cost at all", engine{c0: -5, c1: 1e-3, costs: equal(2)}.trace(300, 1), "less than no time"},
		{"steps that vary by themselves", engine{c0: 55, c1: 2e-5, costs: equal(2), noise: 5}.trace(300, 1), "does not explain the step"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := ReadStepTrace(write(t, "steps.jsonl", tc.trace))
			require.NoError(t, err)
			f := StepModels(s)
			require.Contains(t, f.Groups[0].Refused, tc.says)
			require.Empty(t, f.Config)
			var b bytes.Buffer
			require.NoError(t, f.WriteText(&b))
			require.Contains(t, b.String(), "not used: ")
		})
	}
}

func TestAStepTraceThatCannotBeRead(t *testing.T) {
	good := `{"t_ms":1,"group":"main","rank":0,"step":1,"running":1,"kv_tokens":49}` + "\n"
	for _, tc := range []struct{ name, text, says string }{
		{"an empty file", "", "no steps; `evenkeel engine --step-trace FILE`"},
		{"another kind of line", good + `{"id":"x"}` + "\n", "steps.jsonl:2: not a line of a step trace: it has t_ms"},
		{"no JSON", "step 1\n" + good, "steps.jsonl:1: not a line of a step trace"},
		{"a negative load", strings.Replace(good, "49", "-49", 1), "a negative number"},
		{"two traces of one clock each", engine{c0: 55, costs: equal(2)}.trace(30, 1) + engine{c0: 55, costs: equal(2)}.trace(30, 2), "are these two traces in one file?"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ReadStepTrace(write(t, "steps.jsonl", tc.text))
			require.ErrorContains(t, err, tc.says)
		})
	}
}

func TestGroupsAreFittedApart(t *testing.T) {
	a := engine{c0: 55, c1: 2e-4, costs: equal(2)}.trace(300, 1)
	b := strings.ReplaceAll(engine{c0: 30, c1: 1e-4, costs: equal(3)}.trace(300, 2), `"main"`, `"east"`)
	s, err := ReadStepTrace(write(t, "steps.jsonl", a+b))
	require.NoError(t, err)
	f := StepModels(s)
	require.Len(t, f.Groups, 2)
	require.Equal(t, "east", f.Groups[0].Group)
	require.InDelta(t, 30, float64(f.Groups[0].C0), 0.01)
	require.InDelta(t, 55, float64(f.Groups[1].C0), 0.01)

	data, err := json.Marshal(f)
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(data, &got))
	require.ElementsMatch(t, []string{"groups", "config"}, slices.Sorted(maps.Keys(got)))
	require.ElementsMatch(t, []string{"group", "ranks", "steps", "n", "c0_ms", "c1_ms", "r2", "left_out", "lost_share"},
		slices.Sorted(maps.Keys(got["groups"].([]any)[0].(map[string]any))))
}

func TestLostShare(t *testing.T) { // two ranks, one always holds twice the other's tokens
	steps := []timed{{loads: []float64{100, 50}, largest: 100}, {loads: []float64{200, 100}, largest: 200}}
	require.InDelta(t, (25+50)/(10.0+100+10+200), lost(steps, equal(2), stats.Line{Intercept: 10, Slope: 1}), 1e-12)
}

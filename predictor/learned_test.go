package predictor

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func drawForest(t *rapid.T, label string) forest {
	f := forest{base: rapid.Float64Range(-2, 2).Draw(t, label+" base")}
	for range rapid.IntRange(0, 6).Draw(t, label+" trees") {
		var tr tree
		for i := range tr.feature {
			tr.feature[i] = rapid.SampledFrom([]uint8{fPrompt, fLogPrompt, fAge, fLogAge, fP, fMu, fOutput, fInput + 3, noSplit}).Draw(t, "feature")
			tr.bin[i] = uint8(rapid.IntRange(0, 6).Draw(t, "bin"))
		}
		for i := range tr.leaf {
			tr.leaf[i] = float32(rapid.IntRange(-20, 20).Draw(t, "leaf"))
		}
		f.trees = append(f.trees, tr)
	}
	return f
}

func TestCompiledTreesAreTheTrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &model{classifier: drawForest(t, "classifier"), regressor: drawForest(t, "regressor")}
		for f := range m.edges {
			most := float32(300)
			switch f {
			case fP:
				most = 1
			case fLogPrompt, fLogAge:
				most = 6
			}
			m.edges[f] = rapid.SliceOfNDistinct(rapid.Float32Range(0, most), 0, 6, rapid.ID[float32]).Draw(t, featureNames[f])
			slices.Sort(m.edges[f])
		}
		h := rapid.IntRange(1, 100).Draw(t, "h")
		table := NewSurvival(rapid.SliceOfN(rapid.Int32Range(1, 400), 0, 40).Draw(t, "outputs"))
		outputs, prompts := newRecent(), newRecent()
		for range rapid.IntRange(0, 5).Draw(t, "finished") {
			outputs.push(rapid.Int32Range(1, 400).Draw(t, "output"))
			prompts.push(rapid.Int32Range(1, 400).Draw(t, "prompt"))
		}
		l := m.compile(h, table, outputs, prompts)
		for range 20 {
			q := Query{Prompt: rapid.Int32Range(0, 420).Draw(t, "prompt"), Age: rapid.Int32Range(0, 500).Draw(t, "age")}
			var v vector
			v.ofRequest(q.Prompt, q.Age)
			v.ofTable(ask(table, h, q))
			v.ofTraffic(outputs.features(), prompts.features())
			requirePrediction(t, m.predict(&v, h), ask(l, h, q), "%+v", q)
		}
		requirePrediction(t, ask(table, h+1, Query{Age: 3}), ask(l, h+1, Query{Age: 3}), "another horizon is answered from the table")
	})
}

// grownOn boosts one forest on rows whose columns hold bins of random values
// but for the prompt, which decides the label.
func grownOn(n int, l loss, base float64, label func(prompt float32) float64) (forest, *samples, *model) {
	rng := rand.New(rand.NewPCG(1, 2))
	m, s := &model{}, &samples{label: make([]float64, n)}
	for f := range features {
		values := make([]float32, n)
		for i := range values {
			values[i] = rng.Float32() * 1000
		}
		m.edges[f] = edgesOf(values, false)
		for i, x := range values {
			s.bins[f] = append(s.bins[f], binOf(m.edges[f], x))
			if f == fPrompt {
				s.label[i] = label(x)
			}
		}
	}
	return grow(s, base, l), s, m
}

func TestTreesFindWhatDecides(t *testing.T) {
	step := func(prompt float32) float64 {
		if prompt > 600 {
			return 1
		}
		return 0
	}
	f, _, m := grownOn(2000, logLoss, 0, step)
	score := func(prompt float32) float64 {
		b := m.bins(&vector{fPrompt: prompt})
		return 1 / (1 + math.Exp(-f.score(&b)))
	}
	require.Less(t, score(500), 0.02)
	require.Greater(t, score(700), 0.98)

	f, _, m = grownOn(2000, squaredLoss, 500, func(prompt float32) float64 { return float64(prompt) })
	for _, prompt := range []float32{50, 400, 900} {
		b := m.bins(&vector{fPrompt: prompt})
		require.InDelta(t, float64(prompt), f.score(&b), 25)
	}
}

func TestEveryLeafHasItsRows(t *testing.T) {
	f, s, _ := grownOn(1500, squaredLoss, 0, func(prompt float32) float64 { return math.Sin(float64(prompt) / 50) })
	require.Len(t, f.trees, forestTrees)
	for k := range f.trees {
		var reached [treeNodes + treeLeaves]int
		for i := range s.label {
			for at := 0; at < treeNodes; {
				reached[at]++
				f, bin := f.trees[k].feature[at], f.trees[k].bin[at]
				if f == noSplit {
					break
				}
				at = 2*at + 1
				if s.bins[f][i] > bin {
					at++
				}
				if at >= treeNodes {
					reached[at]++
				}
			}
		}
		for at, feature := range f.trees[k].feature {
			if feature != noSplit && reached[at] > 0 {
				require.GreaterOrEqual(t, reached[2*at+1], leafRows, "tree %d, left of node %d", k, at)
				require.GreaterOrEqual(t, reached[2*at+2], leafRows, "tree %d, right of node %d", k, at)
			}
		}
	}
}

func TestTooFewRowsGrowNothing(t *testing.T) {
	f, _, _ := grownOn(2*leafRows-1, logLoss, 0.3, func(float32) float64 { return 1 })
	require.Equal(t, forest{base: 0.3}, f)
}

func TestEdgesPartValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float32Range(-5, 5), 1, 300).Draw(t, "values")
		edges := edgesOf(values, rapid.Bool().Draw(t, "wide"))
		require.Less(t, len(edges), binsMost)
		require.True(t, slices.IsSorted(edges))
		if len(edges) > 0 {
			require.Less(t, edges[len(edges)-1], slices.Max(values), "an edge with nothing above it splits nothing")
		}
		for _, x := range values {
			below := 0
			for _, e := range edges {
				if e < x {
					below++
				}
			}
			require.Equal(t, uint8(below), binOf(edges, x))
		}
	})
	require.Empty(t, edgesOf([]float32{3, 3, 3}, false))
	require.Empty(t, edgesOf(nil, true))
}

func TestRecentIsItsDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRecent()
		require.Zero(t, r.features())
		pushed := rapid.SliceOfN(rapid.Int32Range(1, 100), 1, 600).Draw(t, "pushed")
		fast := float64(pushed[0])
		for i, v := range pushed {
			if i > 0 {
				fast = 0.9*fast + 0.1*float64(v)
			}
			r.push(v)
		}
		last := slices.Clone(pushed[max(0, len(pushed)-recentMost):])
		sum := 0.0
		for _, v := range last {
			sum += float64(v)
		}
		slices.SortFunc(last, cmp.Compare[int32])
		got := r.features()
		require.InDelta(t, fast, got[0], 1e-3)
		require.InDelta(t, sum/float64(len(last)), got[2], 1e-3)
		require.Equal(t, float32(last[len(last)*9/10]), got[3])
		require.Equal(t, got, r.export().restore().features(), "a fit file carries it")
	})
}

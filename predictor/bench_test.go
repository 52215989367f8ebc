package predictor

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// queries are of a fleet of 144 ranks with 40 requests each.
func queries() []Query {
	rng := rand.New(rand.NewPCG(1, 9))
	q := make([]Query, 144*40)
	for i := range q {
		q[i] = Query{Prompt: rng.Int32N(8000), Age: rng.Int32N(700), Key: rng.Uint64N(60)}
	}
	return q
}

// everyKind is a predictor of each kind.
func everyKind(t testing.TB) map[string]Predictor {
	exact, err := Train("exact", recurrent(1200), Options{})
	require.NoError(t, err)
	kinds := map[string]Predictor{"none": None{}}
	p, table, err := exact.Build()
	require.NoError(t, err)
	kinds["exact"], kinds["survival"] = p, table
	return kinds
}

func TestPredictDoesNotAllocate(t *testing.T) {
	q := queries()
	out := make([]Prediction, len(q))
	for name, p := range everyKind(t) {
		require.Zero(t, testing.AllocsPerRun(10, func() { p.Predict(80, q, out) }), name)
	}
}

func TestAdvanceDoesNotAllocate(t *testing.T) {
	r, states := DefaultRules(80), make([]State, 5760)
	age := int32(0)
	require.Zero(t, testing.AllocsPerRun(10, func() {
		for i := range states {
			if r.Advance(&states[i], age, age+1) {
				r.Set(&states[i], Prediction{0.6, 20})
			}
		}
		age++
	}))
}

func TestFinishedDoesNotAllocate(t *testing.T) {
	o := newOnline(t, KindSurvival, nil)
	for range OutputsMost {
		o.Finished(10, 10, 0)
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { o.Finished(10, 20, 0) }))
}

func BenchmarkPredict(b *testing.B) {
	q := queries()
	out := make([]Prediction, len(q))
	for name, p := range everyKind(b) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Predict(80, q, out)
			}
		})
	}
}

func BenchmarkAdvance(b *testing.B) { // every request of the fleet by a token
	r, states := DefaultRules(80), make([]State, 5760)
	for i := range states {
		r.Set(&states[i], Prediction{0.6, 20})
	}
	age := int32(0)
	b.ReportAllocs()
	for b.Loop() {
		for i := range states {
			if r.Advance(&states[i], age, age+1) {
				r.Set(&states[i], Prediction{0.6, 20})
			}
		}
		age++
	}
}

func BenchmarkRebuild(b *testing.B) {
	exact, err := Train("exact", recurrent(1200), Options{})
	require.NoError(b, err)
	for name, fit := range map[string]*Fit{"survival": nil, "exact": exact} {
		b.Run(name, func(b *testing.B) {
			o := newOnline(b, Kind(name), fit)
			rng := rand.New(rand.NewPCG(1, 1))
			b.ReportAllocs()
			for b.Loop() {
				for range rebuildCount {
					o.Finished(rng.Int32N(8000), 1+rng.Int32N(1000), 1+rng.Uint64N(200))
				}
				o.Build()
			}
		})
	}
}

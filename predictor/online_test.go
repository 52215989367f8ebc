package predictor

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func newOnline(t require.TestingT, kind Kind, fit *Fit) *Online {
	o, err := NewOnline(OnlineConfig{Kind: kind, Fit: fit})
	require.NoError(t, err)
	return o
}

func TestOnlineIsATableOfTheLast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := newOnline(t, KindSurvival, nil)
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var outputs []int32
		for range rapid.IntRange(0, 3).Draw(t, "rounds") {
			for range rapid.IntRange(0, 2*OutputsMost).Draw(t, "finished") {
				v := 1 + rng.Int32N(1000)
				outputs = append(outputs, v)
				o.Finished(10, v, 0)
			}
			p, table := o.Build()
			want := NewSurvival(outputs[max(0, len(outputs)-OutputsMost):])
			require.Equal(t, want.Outputs(), table.Outputs())
			require.Equal(t, want.Version(), table.Version())
			require.Same(t, table, p)
			require.LessOrEqual(t, len(o.outputs.buf), OutputsMost)
		}
	})
}

func TestOnlineExactIsTheLastOfEachKey(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := newOnline(t, KindExact, nil)
		byKey, all := map[uint64][]int32{}, []int32{}
		var before Predictor
		for i := range rapid.IntRange(1, 400).Draw(t, "finished") {
			key, output := rapid.Uint64Range(0, 4).Draw(t, "key"), rapid.Int32Range(1, 300).Draw(t, "output")
			byKey[key], all = append(byKey[key], output), append(all, output)
			o.Finished(50, output, key)
			if i == 100 {
				before, _ = o.Build()
			}
		}
		was := Prediction{}
		q := Query{Prompt: 50, Age: rapid.Int32Range(0, 300).Draw(t, "age"), Key: rapid.Uint64Range(0, 4).Draw(t, "key")}
		if before != nil {
			was = ask(before, 80, q)
		}
		p, _ := o.Build()
		want := counted(all, int(q.Age), 80) // one prompt length: its bucket is all
		if own := byKey[q.Key]; q.Key != 0 && len(own) >= MinKeyOutputs {
			want = counted(own[max(0, len(own)-KeyOutputsMost):], int(q.Age), 80)
		} else if len(all) >= LengthBuckets*MinLengthOutputs {
			return // length buckets remember less than all
		}
		requirePrediction(t, want, ask(p, 80, q))
		if before != nil {
			require.Equal(t, was, ask(before, 80, q), "a predictor handed out earlier has changed")
		}
	})
}

func TestOnlineMemoryIsBounded(t *testing.T) {
	o := newOnline(t, KindExact, nil)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 60_000 {
		key := uint64(i + 1000) // never seen again
		if i%3 == 0 {
			key = 1 + rng.Uint64N(50) // recurs
		}
		o.Finished(rng.Int32N(5000), 1+rng.Int32N(500), key)
		if i%5000 == 0 {
			o.Build()
		}
	}
	p, _ := o.Build()
	require.LessOrEqual(t, len(o.outputs.buf), OutputsMost)
	require.LessOrEqual(t, o.Counts().Keys, 2*KeysMost)
	require.Empty(t, o.prompts.buf, "needed for the edges only")
	for k := range o.byLength {
		require.LessOrEqual(t, len(o.byLength[k].buf), LengthOutputsMost)
	}
	e := p.(*Exact)
	require.Len(t, e.byKey, 50, "keys that recur are not pushed out by those that do not")
	for _, b := range e.byKey {
		require.Len(t, b.sorted, KeyOutputsMost)
	}
	require.Equal(t, Counts{Finished: 60_000, Outputs: OutputsMost, Keys: KeysMost + 50}, o.Counts())
}

func TestKeysInUseForgetTheStalest(t *testing.T) {
	k := newKeyBuckets(3)
	for key := uint64(1); key <= 5; key++ {
		for range MinKeyOutputs {
			k.push(key, 9)
		}
		k.push(1, 9) // always fresh
	}
	tables := k.tables()
	require.Len(t, tables, 3)
	for _, key := range []uint64{1, 4, 5} {
		require.Contains(t, tables, key)
	}
	for range MinKeyOutputs {
		k.push(2, 7)
	}
	require.Equal(t, repeat(7, MinKeyOutputs), k.tables()[2].sorted, "a key that returns starts anew")
	require.NotContains(t, k.tables(), uint64(4))
}

func TestRebuildIsDue(t *testing.T) {
	start := time.Unix(1000, 0)
	for _, row := range []struct {
		name     string
		kind     Kind
		finished int
		after    time.Duration
		want     bool
	}{
		{"nothing finished", KindSurvival, 0, time.Hour, false},
		{"one finished a moment ago", KindSurvival, 1, time.Second - 1, false},
		{"one finished, a second later", KindSurvival, 1, time.Second, true},
		{"63 in no time", KindSurvival, 63, 0, false},
		{"64 in no time", KindSurvival, 64, 0, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			o := newOnline(t, row.kind, nil)
			_, _, due := o.Rebuild(start)
			require.True(t, due, "there is nothing in force yet")
			for range row.finished {
				o.Finished(10, 100, 0)
			}
			p, table, due := o.Rebuild(start.Add(row.after))
			require.Equal(t, row.want, due)
			require.Equal(t, due, p != nil && table != nil)
		})
	}
}

func TestCensoredRequestsTeachNothing(t *testing.T) {
	o := newOnline(t, KindSurvival, nil)
	o.Censored(3)
	o.Finished(10, 0, 0) // ended before its first token
	p, table := o.Build()
	require.Zero(t, table.Len())
	require.Equal(t, Prediction{0, 80}, ask(p, 80, Query{}), "without history as none")
	require.Equal(t, Counts{Censored: 3}, o.Counts())
}

func TestAFitIsForgottenAsRequestsFinish(t *testing.T) {
	fit := &Fit{Kind: KindSurvival, Outputs: NewRuns(append(repeat(100, 5000), repeat(900, 5000)...))}
	o := newOnline(t, KindSurvival, fit)
	_, table := o.Build()
	require.InDelta(t, 500, table.MeanOutput(), 1, "a draw of the fit as large as the ring")
	for range OutputsMost / 2 {
		o.Finished(10, 500, 0)
	}
	_, table = o.Build()
	require.Equal(t, OutputsMost, table.Len())
	require.InDelta(t, 500, table.MeanOutput(), 2, "short and long outputs are forgotten alike")
	require.InDelta(t, 0.75, float64(OutputsMost-table.countAtMost(100))/OutputsMost, 0.01)
}

func TestDrift(t *testing.T) {
	outputs := make([]int32, 2000)
	rng := rand.New(rand.NewPCG(5, 6))
	for i := range outputs {
		outputs[i] = 1 + rng.Int32N(1000)
	}
	o := newOnline(t, KindSurvival, &Fit{Kind: KindSurvival, Outputs: NewRuns(outputs)})
	require.Zero(t, o.Drift(), "no table yet")
	o.Build()
	for range recentMost {
		o.Finished(10, 1+rng.Int32N(1000), 0)
	}
	require.False(t, o.Drift().Drifted(), "more of the same: %+v", o.Drift())
	require.False(t, o.DriftFromFit().Drifted())
	for range recentMost {
		o.Finished(10, 1+rng.Int32N(500), 0)
	}
	d := o.DriftFromFit()
	require.True(t, d.Drifted(), "half as long: %+v", d)
	require.InDelta(t, 0.5, d.Distance, 0.1)
	require.Equal(t, recentMost, d.Recent)
}

func TestDriftIsTheLargestDifference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, recent := rapid.SliceOfN(rapid.Int32Range(1, 60), 1, 40).Draw(t, "table"),
			rapid.SliceOfN(rapid.Int32Range(1, 60), 1, 40).Draw(t, "recent")
		o := newOnline(t, KindSurvival, nil)
		for _, v := range recent {
			o.Finished(10, v, 0)
		}
		share := func(of []int32, v int32) float64 {
			n := 0
			for _, x := range of {
				if x <= v {
					n++
				}
			}
			return float64(n) / float64(len(of))
		}
		want := 0.0
		for v := int32(0); v <= 60; v++ {
			want = max(want, share(recent, v)-share(table, v), share(table, v)-share(recent, v))
		}
		require.InDelta(t, want, o.drift(NewSurvival(table)).Distance, 1e-12)
	})
}

func TestOnlineRefusesWhatCannotLearn(t *testing.T) {
	_, err := NewOnline(OnlineConfig{Kind: KindOracle})
	require.ErrorContains(t, err, "oracle")
	none := newOnline(t, KindNone, nil)
	none.Finished(10, 40, 0)
	p, table := none.Build()
	require.Equal(t, None{}, p)
	require.Equal(t, 1, table.Len(), "policies read the mean output whatever predicts")
}

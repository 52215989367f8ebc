package predictor

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// recurrent is traffic in which templates recur and long prompts get long answers.
func recurrent(n int) []Sample {
	rng := rand.New(rand.NewPCG(11, 12))
	reqs := make([]Sample, n)
	for i := range reqs {
		template := rng.IntN(30)
		reqs[i] = Sample{
			At: time.Duration(i) * 200 * time.Millisecond, Prompt: int32(100 * (1 + template%6)),
			Output: int32(20*(1+template) + rng.IntN(10)), Key: uint64(template + 1),
		}
	}
	return reqs
}

func TestAutoTakesTheBest(t *testing.T) {
	f, err := Train(Auto, recurrent(1200), Options{Created: time.Unix(0, 0).UTC(), Source: Source{File: "x"}})
	require.NoError(t, err)
	require.Len(t, f.Compared, 2)
	require.Equal(t, KindExact, f.Kind, "the template tells the length: %+v", f.Compared)
	require.Equal(t, 1200, f.Source.Rows)
	base := f.Holdout.Base
	require.InDelta(t, 0.5, float64(base.AUC), 1e-9)
	for _, c := range f.Compared {
		require.Equal(t, base.Rows, c.Rows, "%s is scored on other rows", c.Kind)
		require.Less(t, float64(c.Brier), float64(base.Brier), "%s", c.Kind)
		require.Greater(t, float64(c.AUC), 0.6, "%s", c.Kind)
	}
	require.Less(t, float64(f.Compared[1].Brier), float64(f.Compared[0].Brier), "exact sees the prompt, survival does not")
	rows := 0
	for _, r := range f.Holdout.Reliability {
		rows += r.Rows
	}
	require.Equal(t, f.Holdout.Rows, rows)
}

func TestTiesGoToTheSimplerKind(t *testing.T) {
	reqs := make([]Sample, 200)
	for i := range reqs {
		reqs[i] = Sample{At: time.Duration(i) * time.Second, Prompt: 10, Output: 30}
	}
	f, err := Train(Auto, reqs, Options{})
	require.NoError(t, err)
	require.Equal(t, KindSurvival, f.Kind)
	require.False(t, f.Holdout.AUC.Defined(), "all end inside the horizon")
}

// What scores is a fit to the earlier requests: the base rate and the tables know nothing of the
// later ones before they have ended (TestRowsKnowOnlyWhatHadFinished).
func TestHeldOutRequestsDoNotTrainWhatIsScored(t *testing.T) {
	reqs := recurrent(400)
	other := slices.Clone(reqs)
	for i := 300; i < 400; i++ {
		other[i].Output, other[i].Prompt = 700, 9000
	}
	opt := Options{}.withDefaults()
	a, b := trial{reqs: reqs, trainCount: 300, opt: opt}, trial{reqs: other, trainCount: 300, opt: opt}
	a.prepareRows()
	b.prepareRows()
	require.Equal(t, a.baseRate, b.baseRate)
	first := agePoint{time: other[300].At, request: 300}
	a.points, b.points = []agePoint{first}, []agePoint{first}
	for _, kind := range []Kind{KindSurvival, KindExact} {
		x, err := a.predictHeldOut(kind, lengthBoundsOf(a.reqs[:300]))
		require.NoError(t, err)
		y, err := b.predictHeldOut(kind, lengthBoundsOf(b.reqs[:300]))
		require.NoError(t, err)
		require.Len(t, x, 1)
		if kind == KindSurvival { // exact looks at the prompt, which is another
			require.Equal(t, []float64{x[0].P, x[0].Mu}, []float64{y[0].P, y[0].Mu})
		}
		require.NotEqual(t, x[0].Remaining, y[0].Remaining)
	}
}

// The newest requests say the most of the next, so the file has them, too.
func TestTheFileHasAllRequests(t *testing.T) {
	reqs := recurrent(400)
	for i := 300; i < 400; i++ { // a template that comes up only at the end
		reqs[i].Output, reqs[i].Prompt, reqs[i].Key = 700, 9000, 99
	}
	for _, kind := range []string{"survival", "exact"} {
		t.Run(kind, func(t *testing.T) {
			f, err := Train(kind, reqs, Options{})
			require.NoError(t, err)
			require.Equal(t, 400, f.Outputs.Len())
			require.Equal(t, Holdout{Requests: 100, Horizon: 80, Scores: f.Holdout.Scores, Base: f.Holdout.Base, Reliability: f.Holdout.Reliability},
				f.Holdout)
			p, _, err := f.Build()
			require.NoError(t, err)
			got := ask(p, 80, Query{Prompt: 9000, Age: 650, Key: 99})
			require.Equal(t, Prediction{P: 1, Mu: 50}, got, "all answers of more than 650 tokens have 700")
			if kind == "exact" {
				require.Contains(t, f.Buckets, Bucket{Name: keyName(99), Outputs: NewRuns(repeat(700, KeyOutputsMost))})
				require.Equal(t, lengthBoundsOf(reqs), f.PromptQuantiles)
			}
		})
	}
}

func TestRowsKnowOnlyWhatHadFinished(t *testing.T) {
	reqs := recurrent(300)
	const step = 55 * time.Millisecond
	online := newOnline(t, KindSurvival, nil)
	p := newReplay(reqs, step, online)
	points := agePoints(reqs, 0, 20, step)
	require.True(t, slices.IsSortedFunc(points, func(a, b agePoint) int { return int(a.time - b.time) }))
	rng := rand.New(rand.NewPCG(1, 1))
	for _, at := range points {
		p.finishUntil(at.time)
		if rng.IntN(20) > 0 {
			continue
		}
		var outputs []int32
		for _, r := range reqs {
			if r.At+time.Duration(r.Output)*step <= at.time {
				outputs = append(outputs, r.Output)
			}
		}
		table, _ := online.Build()
		requirePrediction(t, counted(outputs, int(at.age), 80), ask(table, 80, Query{Prompt: reqs[at.request].Prompt, Age: at.age}))
	}
}

func TestSamplesWithAnEndUseIt(t *testing.T) {
	points := agePoints([]Sample{{At: time.Second, End: 5 * time.Second, Output: 40}}, 0, 20, time.Hour)
	require.Equal(t, []agePoint{{time.Second, 0, 0}, {3 * time.Second, 0, 20}}, points)
}

func TestTrainSaysWhatIsWrong(t *testing.T) {
	good := recurrent(100)
	unsorted := slices.Clone(good)
	unsorted[7].At = 0
	silent := slices.Clone(good)
	silent[3].Output = 0
	for _, row := range []struct {
		name, kind string
		reqs       []Sample
		opt        Options
		want       string
	}{
		{"a kind nobody trains", "oracle", good, Options{}, `"oracle" cannot be trained`},
		{"too few", "survival", good[:20], Options{}, "15 requests to train on and 5 held out of 20"},
		{"none held out", "survival", good, Options{Holdout: 0.001}, "0 held out"},
		{"out of order", "survival", unsorted, Options{}, "request 7 arrived"},
		{"no output", "survival", silent, Options{}, "request 3 has 200 prompt and 0 output"},
		{"no horizon", "survival", good, Options{Horizon: -1}, "horizon -1"},
		{"all held out", "survival", good, Options{Holdout: 1}, "holdout 1"},
		{"rows that never advance", "survival", good, Options{Every: -20}, "every -20"},
		{"time that runs back", "survival", good, Options{Step: -1}, "step -1ns"},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := Train(row.kind, row.reqs, row.opt)
			require.ErrorContains(t, err, row.want)
		})
	}
}

// Tables are scored as they would serve: they go on learning from what finishes.
func TestTablesLearnWhileTheyAreScored(t *testing.T) {
	race.Alone(t)
	reqs := recurrent(1600)
	for i := 1200; i < len(reqs); i++ { // the traffic changes with the held-out part
		reqs[i].Output += 600
	}
	f, err := Train(Auto, reqs, Options{})
	require.NoError(t, err)
	frozen, err := Train("survival", reqs[:1200], Options{})
	require.NoError(t, err)
	asFitted, _, err := frozen.Build()
	require.NoError(t, err)
	var rows []Row
	for _, at := range agePoints(reqs, 1200, 20, 55*time.Millisecond) {
		rest := int(reqs[at.request].Output - at.age)
		said := ask(asFitted, 80, Query{Age: at.age})
		rows = append(rows, Row{P: said.P, Mu: said.Mu, Remaining: float64(rest), Ended: rest <= 80})
	}
	was := Score(rows)
	for _, c := range f.Compared {
		require.Equal(t, was.Rows, c.Rows)
		require.Less(t, float64(c.Brier), 0.9*float64(was.Brier), "%s", c.Kind)
	}
}

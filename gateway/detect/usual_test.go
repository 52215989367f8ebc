package detect

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/internal/race"
)

// fleet is ranks of a group, in seconds that a test lets pass.
type fleetOf struct {
	t       *testing.T
	watch   Watch
	barrier bool
	now     time.Time
	outputs []float64
	running []int
	tokenMs []float64 // of each rank
	stepMs  float64
	model   StepModel
	tokens  int64 // of the fullest rank
	said    func(i int) *Gauges
	unknown bool // there is no step model
	length  int  // tokens of an answer; 0: none ends
	answers []float64
}

func ranksOf(t *testing.T, n int, barrier bool) *fleetOf {
	f := &fleetOf{t: t, barrier: barrier, now: time.Unix(1e9, 0), stepMs: 43, model: StepModel{BaseMs: 40, PerTokenMs: 1e-4}, tokens: 30_000}
	for range n {
		f.outputs, f.running, f.tokenMs, f.answers = append(f.outputs, 1000), append(f.running, 8), append(f.tokenMs, 43), append(f.answers, 0)
	}
	return f
}

// pass lets seconds go by, and returns what is found in the end.
func (f *fleetOf) pass(seconds int, each func(s int)) (kinds []Kind, d Facts) {
	for s := range seconds {
		if each != nil {
			each(s)
		}
		f.now = f.now.Add(time.Second)
		g := Group{GroupLoads: board.GroupLoads{Barrier: f.barrier, Name: "main", MostTokens: f.tokens}, StepMs: f.stepMs, ModelMs: f.stepMs,
			StepModel: f.model}
		if f.unknown {
			g.ModelMs, g.StepModel = 0, StepModel{}
		}
		for i := range f.outputs {
			later := 1000 / f.tokenMs[i] * float64(f.running[i])
			f.outputs[i] += later
			if f.length > 0 { // one token of each answer more
				f.answers[i] += later / float64(f.length-1)
				f.outputs[i] += later / float64(f.length-1)
			}
			g.Ranks = append(g.Ranks, Rank{ID: int32(i), Name: "d:" + string(rune('0'+i)), State: RankUp, InSteps: true, Running: f.running[i],
				Output: int64(f.outputs[i]), Answers: uint64(f.answers[i])})
			if f.said != nil {
				g.Gauges = append(g.Gauges, f.said(i))
			}
		}
		d = Facts{At: f.now, Models: []Model{{Name: "m", Groups: []Group{g}}}}
		d.Proxy.Ready = true
		f.watch.Update(&d, sampleOf(&d))
		kinds = nil
		for _, x := range Find(&d, Ended{}) {
			kinds = append(kinds, x.Kind)
		}
	}
	return kinds, d
}

// sampleOf is the sample of the same moment.
func sampleOf(f *Facts) Sample {
	s := Sample{At: f.At}
	for _, g := range f.groups() {
		for _, r := range g.Ranks {
			s.Ranks = append(s.Ranks, RankAt{
				ID: r.ID, Running: r.Running, KVTokens: r.KVTokens, Output: r.Output - int64(r.Answers), AnswerCounts: AnswerCounts{r.Answers, r.Empty},
			})
		}
	}
	return s
}

func TestASlowRankIsFound(t *testing.T) {
	f := ranksOf(t, 12, false)
	kinds, d := f.pass(30, nil)
	require.Empty(t, kinds)
	require.InDelta(t, 43, d.Models[0].Groups[0].TokenMs, 1)
	f.tokenMs[5] = 205
	kinds, d = f.pass(30, nil)
	require.Equal(t, []Kind{RankSlow}, kinds)
	require.Equal(t, "Rank d:5 gives a token in 205 ms, and the middle one of group main in 43 ms", Find(&d, Ended{})[0].What)
	f.tokenMs[6] = 180
	_, d = f.pass(30, nil)
	found := Find(&d, Ended{})[0]
	require.Contains(t, found.What, "2 decode ranks of group main give a token in up to 205 ms, and the middle one in 43 ms: d:5")
	require.Equal(t, []string{"d:5", "d:6"}, found.Ranks, "the live page marks them")
	f.tokenMs[5], f.tokenMs[6] = 43, 43
	kinds, _ = f.pass(50, nil)
	require.Empty(t, kinds)
}

// What the config says of a barrier does not matter: the rank's own pace does. One that is slow
// only while it has long prompts is slow at times.
func TestARankThatIsSlowAtTimesIsFound(t *testing.T) {
	for _, barrier := range []bool{false, true} {
		f := ranksOf(t, 6, barrier)
		kinds, _ := f.pass(90, nil)
		require.Empty(t, kinds)
		kinds, d := f.pass(60, func(s int) {
			f.tokenMs[2] = 55
			if s%20 < 8 { // two fifths of the time
				f.tokenMs[2] = 300
			}
		})
		require.Equal(t, []Kind{RankSlow}, kinds)
		require.Equal(t, "Rank d:2 gives a token in 300 ms, and the middle one of group main in 43 ms", Find(&d, Ended{})[0].What)
	}
}

// Behind a barrier all ranks are slow together, so their law as it was tells.
func TestSlowStepsAreFoundByTheLawOfTheHourBefore(t *testing.T) {
	race.Alone(t)
	f := ranksOf(t, 8, true)
	kinds, _ := f.pass(600, nil)
	require.Empty(t, kinds)
	slow := func(factor float64) {
		f.stepMs *= factor
		f.model.BaseMs, f.model.PerTokenMs = f.model.BaseMs*factor, f.model.PerTokenMs*factor // it is learned at once
		for i := range f.tokenMs {
			f.tokenMs[i] *= factor
		}
	}
	slow(5)
	kinds, _ = f.pass(10, nil)
	require.Empty(t, kinds, "not yet")
	kinds, d := f.pass(20, nil)
	require.Equal(t, []Kind{StepsSlow}, kinds)
	require.Equal(t, 29*time.Second, Find(&d, Ended{})[0].LastedFor)
	require.Equal(t, "Steps of group main, all on host d, take 215 ms, and took 43 ms at such a load before", Find(&d, Ended{})[0].What)
	kinds, _ = f.pass(3600, nil)
	require.Equal(t, []Kind{StepsSlow}, kinds, "still, though the law of now explains it")
	slow(1. / 5)
	kinds, _ = f.pass(30, nil)
	require.Empty(t, kinds)
	f.tokens, f.stepMs = 300_000, 70
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds, "steps that are longer because of the load are not slow")
	clear(f.running)
	f.tokens = 0
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds, "nothing runs, and the last steps were long")
}

// An hour of a healthy fleet: bursts, ranks that come and go, answers of every length.
func TestAHealthyFleetIsQuiet(t *testing.T) {
	race.Alone(t)
	for _, barrier := range []bool{false, true} {
		rng := rand.New(rand.NewPCG(3, 3))
		f := ranksOf(t, 12, barrier)
		for range 60 {
			kinds, _ := f.pass(60, func(s int) {
				for i := range f.running {
					if rng.IntN(20) == 0 {
						f.running[i] = rng.IntN(33)
					}
					f.tokenMs[i] = 40 + 3*rng.Float64() + float64(f.running[i])
					if barrier {
						f.tokenMs[i] = f.stepMs
					}
					if rng.IntN(600) == 0 {
						f.outputs[i] = 0 // it begins anew
					}
				}
				f.tokens = int64(20_000 + rng.IntN(100_000))
				f.stepMs = f.model.BaseMs + f.model.PerTokenMs*float64(f.tokens) + 3*rng.Float64()
				if rng.IntN(30) == 0 {
					f.stepMs *= 3 // one step in which a prompt is computed
				}
			})
			require.Empty(t, kinds)
		}
	}
}

func TestPacesOfRanksThatAreGoneAreForgotten(t *testing.T) {
	f := ranksOf(t, 12, false)
	f.pass(30, nil)
	f.outputs, f.running, f.tokenMs = f.outputs[:2], f.running[:2], f.tokenMs[:2]
	f.pass(1, nil)
	require.Len(t, f.watch.ranksPace, 2)
}

// Where the load hardly changes, no law can be learned. What steps took at such a load tells, too.
func TestSlowStepsAreFoundWithoutALaw(t *testing.T) {
	f := ranksOf(t, 8, true)
	f.unknown = true
	kinds, _ := f.pass(600, nil)
	require.Empty(t, kinds)
	f.tokens, f.stepMs = 60_000, 80
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds, "at twice the load, a step may take twice as long")
	f.tokens, f.stepMs, f.running[3] = 30_000, 80, 16
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds, "with twice the requests, too")
	f.running[3] = 8
	f.tokens, f.stepMs = 33_000, 215
	kinds, d := f.pass(30, nil)
	require.Equal(t, []Kind{StepsSlow}, kinds)
	require.Contains(t, Find(&d, Ended{})[0].What, "take 215 ms, and took 43 ms")
}

func TestStepsThatGiveFewerTokensAreFound(t *testing.T) {
	f := ranksOf(t, 8, true)
	pace := func(ms float64) {
		for i := range f.tokenMs {
			f.tokenMs[i] = ms
		}
	}
	pace(43. / 3)
	kinds, d := f.pass(600, nil)
	require.Empty(t, kinds)
	require.InDelta(t, 3, d.Models[0].Groups[0].StepTokens, 0.1)
	pace(43)
	kinds, _ = f.pass(20, nil)
	require.Empty(t, kinds, "not yet")
	kinds, d = f.pass(30, nil)
	require.Equal(t, []Kind{TokensFew}, kinds)
	require.Contains(t, Find(&d, Ended{})[0].What,
		"A step of group main, all on host d, gives 1.0 tokens to an answer, and gave 3.0 before, so that a token takes 43 ms")
	pace(43. / 3)
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds)
	f.stepMs, f.model = 43./3, StepModel{BaseMs: 40. / 3, PerTokenMs: 1e-4 / 3} // the engine sends each token by itself
	kinds, _ = f.pass(60, nil)
	require.Empty(t, kinds, "the tokens are as fast as before")
}

// Steps that take longer keep the same requests for longer, so that the load rises with them.
func TestSlowStepsStayFoundWhileTheLoadRisesWithThem(t *testing.T) {
	f := ranksOf(t, 8, true)
	f.unknown = true
	f.pass(600, nil)
	f.stepMs = 130
	found := 0
	for range 30 {
		f.tokens = min(90_000, f.tokens+10_000)
		kinds, _ := f.pass(60, nil)
		found += len(kinds)
	}
	require.Equal(t, 30, found)
	f.stepMs, f.tokens = 43, 30_000
	kinds, _ := f.pass(60, nil)
	require.Empty(t, kinds)
}

func TestSlowStepsAreForgottenWhileNothingRuns(t *testing.T) {
	f := ranksOf(t, 8, true)
	f.pass(600, nil)
	f.stepMs = 215
	f.pass(5, nil)
	clear(f.running)
	f.pass(600, nil)
	for i := range f.running {
		f.running[i] = 8
	}
	kinds, _ := f.pass(1, nil)
	require.Empty(t, kinds, "they have been slow for a second")
}

// Where answers are short, their first tokens are many. Those take no step of a stream.
func TestLongerAnswersAreNotFewerTokens(t *testing.T) {
	f := ranksOf(t, 8, true)
	f.length = 2
	kinds, d := f.pass(600, nil)
	require.Empty(t, kinds)
	require.InDelta(t, 1, d.Models[0].Groups[0].StepTokens, 0.05)
	f.length = 400
	kinds, _ = f.pass(120, nil)
	require.Empty(t, kinds)
}

func TestOneLongPromptIsNoBacklog(t *testing.T) {
	var w Watch
	now := noon
	look := func(seconds, waiting int, backlog float64) float64 {
		f := &Facts{Prefill: Prefill{Waiting: waiting, BacklogS: backlog}}
		for range seconds {
			now = now.Add(time.Second)
			f.At = now
			w.Update(f, sampleOf(f))
		}
		return f.Prefill.LongBacklogS
	}
	require.Zero(t, look(12, 1, 15), "it is computed in 12 s")
	require.Zero(t, look(60, 0, 15), "nothing waits")
	require.Positive(t, look(30, 9, 15))
	require.Zero(t, look(30, 0, 0))
}

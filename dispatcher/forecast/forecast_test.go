package forecast

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// lengths are outputs around a hundred tokens, the same every time.
func lengths(n int) []int32 {
	rng := rand.New(rand.NewPCG(5, 6))
	all := make([]int32, n)
	for i := range all {
		all[i] = 20 + rng.Int32N(200)
	}
	return all
}

func TestFollowingDoesNotAllocate(t *testing.T) {
	f, workers := manyRunning()
	p := predictor.NewSurvival(lengths(4000))
	f.Update(workers, p)
	require.Zero(t, testing.AllocsPerRun(50, func() {
		age(workers)
		f.Update(workers, p)
	}))
}

// manyRunning are 144 ranks with 40 requests each.
func manyRunning() (*Running, []policy.Worker) {
	rng := rand.New(rand.NewPCG(1, 2))
	workers := make([]policy.Worker, 144)
	slot := int32(0)
	for g := range workers {
		for range 40 {
			n := rng.Int32N(200)
			workers[g].Running = append(workers[g].Running, policy.Request{ID: uint64(slot) + 1, Slot: slot, Prompt: 100, Generated: n, Age: n})
			slot++
		}
	}
	f := &Running{}
	f.SetNeeds(policy.Requirements{Predictor: "survival", Horizon: 80, Tau: 0.5, Every: 20})
	f.KeepScores()
	return f, workers
}

func age(workers []policy.Worker) {
	for g := range workers {
		for i := range workers[g].Running {
			workers[g].Running[i].Age++
			workers[g].Running[i].Generated++
		}
	}
}

func BenchmarkFollow(b *testing.B) {
	f, workers := manyRunning()
	p := predictor.NewSurvival(lengths(4000))
	f.Update(workers, p)
	b.ReportAllocs()
	for b.Loop() {
		age(workers)
		f.Update(workers, p)
	}
}

func TestPredictionsOfRemovedRequestsAreNotReused(t *testing.T) {
	f := &Running{}
	f.SetNeeds(policy.Requirements{Predictor: "survival", Horizon: 80, Tau: 0, Every: 20})
	p := predictor.NewSurvival([]int32{10, 50})
	one := []policy.Worker{{Running: []policy.Request{{ID: 1, Slot: 3, Age: 5, Generated: 5}}}}
	f.Update(one, p)
	require.EqualValues(t, 25, one[0].Running[0].Rhat)
	one[0].Running[0] = policy.Request{ID: 2, Slot: 3, Age: 20, Generated: 20}
	f.Update(one, p)
	require.EqualValues(t, 30, one[0].Running[0].Rhat, "another request in the same slot")
	require.True(t, slices.ContainsFunc(f.estimates, func(t estimate) bool { return t.id == 2 }))
}

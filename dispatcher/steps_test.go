package dispatcher

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/dispatcher/board"
	"evenkeel/pool"
)

func TestStepsOfAGroupTeachItsModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := testConfig()
		d := start(t, cfg)
		d.SetWorkers(ranks(2, 30, 0))
		truth := board.StepModel{C0Ms: 30, C1Ms: 1e-3}
		var running []*Slot
		for i := range 400 {
			if i%10 == 0 { // the load of the fullest rank changes, or nothing could be learned
				r := <-d.Enqueue(&pool.Entry{ID: uint64(i) + 1, Model: "m", Prompt: 1000 + 211*(i%17)})
				running = append(running, r.Slot)
			}
			if len(running) > 20 {
				d.Release(running[0], board.Outcome{})
				running = running[1:]
			}
			most := int64(0)
			for _, w := range d.Status(t.Context()).Models[0].Workers {
				most = max(most, w.KVTokens)
			}
			time.Sleep(time.Duration((truth.C0Ms + truth.C1Ms*float64(most)) * float64(time.Millisecond)))
			for _, s := range running {
				s.Progress(s.Generated() + 1)
			}
			synctest.Wait()
		}
		step := d.Status(t.Context()).Models[0].Groups[0].Step
		require.Equal(t, "learned", step.Source)
		require.InEpsilon(t, truth.C1Ms, step.C1Ms, 0.05)
		require.InEpsilon(t, truth.C0Ms, step.C0Ms, 0.1)
		require.Greater(t, step.R2, 0.9)
	})
}

// inside is a request that an engine has, or that is under way to it.
type inside struct {
	*Slot
	prompt, arrives, left, owed int // tokens; the step from which the engine has it; tokens to come; of these, late
}

// An engine steps with the requests that it runs. The proxy has charged others,
// too: they are under way, or wait in the engine's queue. And when the first token
// of a step comes, the requests that end with it are still charged.
func TestAStepTakesWhatItsOwnRequestsHold(t *testing.T) {
	for _, c := range []struct {
		name    string
		late    int     // steps that a request is under way
		runs    int     // requests of a rank that the engine runs at once
		charged int     // requests in all
		output  int     // mean tokens
		lost    float64 // share of the steps whose tokens come with those of the next
	}{
		{"requests arrive at once", 0, 8, 32, 20, 0},
		{"requests are under way for two steps", 2, 8, 32, 20, 0},
		{"requests wait in the engine's queue", 0, 8, 48, 20, 0},
		{"tokens of some steps come with those of the next", 0, 8, 32, 20, 0.2},
		{"every rank has another request in every step", 2, 8, 32, 8, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				truth := board.StepModel{C0Ms: 10, C1Ms: 3e-3}
				step := teach(t, truth, c.late, c.runs, c.charged, c.output, c.lost)
				require.Equal(t, "learned", step.Source)
				require.InEpsilon(t, truth.C1Ms, step.C1Ms, 0.05)
				require.InEpsilon(t, truth.C0Ms, step.C0Ms, 0.1)
				require.Greater(t, step.R2, 0.9)
			})
		})
	}
}

// teach runs four ranks for a while and returns what was learned.
func teach(t *testing.T, truth board.StepModel, late, runs, charged, output int, lost float64) *board.StepStatus {
	d := start(t, testConfig())
	d.SetWorkers(ranks(4, 30, 0))
	rng := rand.New(rand.NewPCG(1, 2))
	var requests []*inside
	id := uint64(0)
	send := func(step int) {
		id++
		prompt := 20 + int(min(5000, 400*math.Exp(1.5*rng.NormFloat64())))
		r := <-d.Enqueue(&pool.Entry{ID: id, Model: "m", Prompt: prompt})
		requests = append(requests, &inside{Slot: r.Slot, prompt: prompt, arrives: step + late, left: 1 + rng.IntN(2*output)})
	}
	for range charged {
		send(0)
	}
	for step := range 700 {
		var members []*inside
		var count [4]int
		var kv [4]int64
		for _, r := range requests { // the engine's queue is first come, first served
			if w := r.Worker; r.arrives <= step && count[w] < runs {
				members = append(members, r)
				count[w]++
				kv[w] += int64(r.prompt + r.Generated())
			}
		}
		length := time.Duration((truth.C0Ms + truth.C1Ms*float64(slices.Max(kv[:]))) * float64(time.Millisecond))
		speaking := 5 * time.Millisecond // from the first token to the last, while the next step is made
		time.Sleep(length - speaking)
		if rng.Float64() < lost {
			for _, r := range members {
				if r.left > r.owed+1 { // its last token comes by itself
					r.owed++
				}
			}
			time.Sleep(speaking)
			continue
		}
		rng.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
		for _, r := range members {
			r.Progress(r.Generated() + 1 + r.owed)
			r.left -= r.owed
			r.owed = 0
			time.Sleep(speaking / time.Duration(len(members)))
			if r.left--; r.left == 0 {
				d.Release(r.Slot, board.Outcome{})
				requests = slices.DeleteFunc(requests, func(x *inside) bool { return x == r })
				send(step + 1)
			}
		}
		time.Sleep(speaking % time.Duration(max(1, len(members))))
		synctest.Wait()
	}
	return d.Status(t.Context()).Models[0].Groups[0].Step
}

package vectors

import (
	"encoding/json"
	"fmt"
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

func profile(in struct {
	Outputs   []int32 `json:"outputs"`
	Prompt    int64   `json:"prompt"`
	Generated int     `json:"generated"`
	Steps     []int   `json:"steps"`
}, want struct {
	Loads []float64 `json:"loads"`
}) error {
	if len(in.Steps) != len(want.Loads) {
		return fmt.Errorf("in: %d steps and %d loads", len(in.Steps), len(want.Loads))
	}
	table := predictor.NewSurvival(in.Outputs)
	var got []float64
	for _, h := range in.Steps {
		got = append(got, policy.Expected(table, in.Prompt+int64(in.Generated), in.Generated, h))
	}
	return nearAll("loads", got, want.Loads)
}

func weights(in struct {
	Horizon int     `json:"H"`
	Gamma   float64 `json:"gamma"`
}, want struct {
	Steps   []int     `json:"steps"`
	Weights []float64 `json:"weights"`
}) error {
	if got := policy.Grid(in.Horizon); !slices.Equal(got, want.Steps) {
		return fmt.Errorf("steps = %v, want %v", got, want.Steps)
	}
	return nearAll("weights", policy.Weights(in.Horizon, in.Gamma), want.Weights)
}

func cost(in struct {
	Loads   [][]float64 `json:"loads"`
	Weights []float64   `json:"weights"`
}, want struct{ J float64 }) error {
	return near("J", policy.Cost(in.Loads, in.Weights), want.J)
}

// jointPolicy is the policy by its cost alone.
const jointPolicy = "evenkeel:mode=mean,age_weight=0,hold=0,max_age_ms=0,objective=max"

// joint holds the policy to what it is for: near the optimum over all
// placements, far from first come, least loaded.
func joint(rawIn json.RawMessage, want struct {
	Best      float64 `json:"best"`
	FirstCome float64 `json:"first_come"`
	Limit     float64 `json:"limit"`
}) error {
	s, params, err := ReadSnapshot(rawIn)
	if err != nil {
		return err
	}
	r, err := Decide(rawIn, jointPolicy)
	if err != nil {
		return err
	}
	horizon, gamma := deref(params.Horizon), deref(params.Gamma)
	grid := policy.Grid(horizon)
	loads := make([][]float64, len(s.Workers))
	at := map[int32]int{}
	add := func(g int, held int64, age int32) {
		for c, h := range grid {
			loads[g][c] += policy.Expected(s.Outlook, held, int(age), h)
		}
	}
	free := 0
	for g, w := range s.Workers {
		at[w.ID], loads[g] = g, make([]float64, len(grid))
		free += int(w.Free)
		for _, q := range w.Running {
			add(g, int64(q.Prompt)+int64(q.Generated), q.Age)
		}
	}
	for _, a := range r.Assignments {
		i := slices.IndexFunc(s.Pool, func(e policy.Entry) bool { return e.ID == a.Entry })
		g, ok := at[a.Worker]
		if i < 0 || !ok {
			return fmt.Errorf("entry %d on worker %d: placed twice, or there is no such pair", a.Entry, a.Worker)
		}
		add(g, int64(s.Pool[i].Prompt), s.Pool[i].Age)
		s.Pool = slices.Delete(s.Pool, i, i+1)
		if s.Workers[g].Free--; s.Workers[g].Free < 0 {
			return fmt.Errorf("worker %d got more than it has slots", a.Worker)
		}
	}
	if n := min(free, len(s.Pool)+len(r.Assignments)); len(r.Assignments) != n {
		return fmt.Errorf("placed %d, want %d", len(r.Assignments), n)
	}
	got := policy.Cost(loads, policy.Weights(horizon, gamma))
	if slack := 1e-6 * max(1, want.Limit); got > want.Limit+slack || got < want.Best-slack {
		return fmt.Errorf("cost J = %v, want from %v to %v (first come: %v)", got, want.Best, want.Limit, want.FirstCome)
	}
	return nil
}

func hold(in struct {
	Loads  []int64 `json:"loads"`
	Placed []struct {
		Worker      int     `json:"worker"`
		Tokens      int64   `json:"tokens"`
		WaitedSteps float64 `json:"waited_steps"`
		Overdue     bool    `json:"overdue"`
	} `json:"placed"`
	Running int     `json:"running"`
	C0Ms    float64 `json:"c0_ms"`
	C1Ms    float64 `json:"c1_ms"`
	Hold    float64 `json:"hold"`
	Steps   float64 `json:"hold_steps"`
}, want struct {
	Dropped []int `json:"dropped"`
}) error {
	placed := make([]policy.Placed, len(in.Placed))
	for i, p := range in.Placed {
		if p.Worker < 0 || p.Worker >= len(in.Loads) {
			return fmt.Errorf("in: placed[%d] is on worker %d of %d", i, p.Worker, len(in.Loads))
		}
		placed[i] = policy.Placed{Rank: p.Worker, Tokens: p.Tokens, WaitedSteps: p.WaitedSteps, Overdue: p.Overdue}
	}
	rule := policy.HoldRule{C0Ms: in.C0Ms, C1Ms: in.C1Ms, Running: in.Running, Share: in.Hold, Steps: in.Steps}
	rule.Apply(in.Loads, placed)
	got := []int{}
	for i, p := range placed {
		if p.Held {
			got = append(got, i)
		}
	}
	if !slices.Equal(got, want.Dropped) {
		return fmt.Errorf("dropped = %v, want %v", got, want.Dropped)
	}
	return nil
}

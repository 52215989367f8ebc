package vectors

import (
	"fmt"
	"slices"

	"evenkeel/dispatcher/policy"
)

// cost is of several columns, which count by their weights: evenkeel has one of them.
func cost(in struct {
	Loads   [][]float64 `json:"loads"` // [worker][column]
	Weights []float64   `json:"weights"`
}, want struct{ J float64 }) error {
	sum, column := 0.0, make([]float64, len(in.Loads))
	for c, weight := range in.Weights {
		for g, row := range in.Loads {
			if len(row) != len(in.Weights) {
				return fmt.Errorf("in: worker %d has %d columns, there are %d weights", g, len(row), len(in.Weights))
			}
			column[g] = row[c]
		}
		sum += weight * policy.Cost(column)
	}
	return near("J", sum, want.J)
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

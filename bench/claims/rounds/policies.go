package main

import (
	"fmt"

	"evenkeel/bench/sim/mixed"
	"evenkeel/dispatcher/rounds"
)

const ours = "rounds"

// policies are the ones that are compared, first those of which the best is taken.
func policies() []mixed.Contender {
	held := func(name string, patience, most float64, exact bool) mixed.Contender {
		return mixed.Contender{Name: name, Spec: fmt.Sprintf("evenkeel:patience=%g,max_hold=%g", patience, most), Exact: exact}
	}
	d := rounds.Default
	every := held("rounds, interval 2 in the engines", d.Patience, d.MaxHold, false)
	every.Every = 2
	learned := held("rounds, the law of a step learned", d.Patience, d.MaxHold, false)
	learned.Learn = true
	return []mixed.Contender{
		{Name: "round robin", Spec: "rr"},
		{Name: "vLLM's own", Route: mixed.VLLM},
		{Name: "least tokens", Route: mixed.LeastTokens},
		{Name: "delayer in the engines, 30 passes", Route: mixed.LeastTokens, Delay: 30},
		held(ours, d.Patience, d.MaxHold, false),
		held("rounds, lengths known", d.Patience, d.MaxHold, true),
		learned,
		held("rounds, patience 0", 0, d.MaxHold, false),
		held("rounds, patience 0.5", 0.5, d.MaxHold, false),
		held("rounds, patience 1", 1, d.MaxHold, false),
		held("rounds, max_hold 2 s", d.Patience, 2, false),
		held("rounds, max_hold 10 s", d.Patience, 10, false),
		{Name: "least tokens, interval 2 in the engines", Route: mixed.LeastTokens, Every: 2},
		every,
	}
}

// set is how many of them the best is taken of.
const set = 5

// base is what the others are held against.
const base = 2

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
	fewer := held(fmt.Sprintf("rounds, %d tokens in a step", fewTokens), d.Patience, d.MaxHold, false)
	fewer.Budget = fewTokens
	return []mixed.Contender{
		{Name: "vLLM's own", Route: mixed.VLLM},
		{Name: "least tokens", Route: mixed.LeastTokens},
		{Name: "SGLang's own: round robin", Spec: "rr"},
		{Name: "a router by counts", Spec: "jsq"},
		{Name: "delayer in the engines, 30 passes", Route: mixed.LeastTokens, Delay: 30},
		held(ours, d.Patience, d.MaxHold, false),
		held("rounds, whatever waits", whatever, d.MaxHold, false),
		held("rounds, lengths known", d.Patience, d.MaxHold, true),
		learned,
		held("rounds, patience 0", 0, d.MaxHold, false),
		held("rounds, patience 1", 1, d.MaxHold, false),
		held("rounds, patience 5", 5, d.MaxHold, false),
		held("rounds, patience 10", 10, d.MaxHold, false),
		held("rounds, max_hold 2 s", d.Patience, 2, false),
		held("rounds, max_hold 10 s", d.Patience, 10, false),
		{Name: "least tokens, interval 2 in the engines", Route: mixed.LeastTokens, Every: 2},
		every,
		{Name: "vLLM's own, interval 2 in the engines", Route: mixed.VLLM, Every: 2},
		{Name: fmt.Sprintf("vLLM's own, %d tokens in a step", fewTokens), Route: mixed.VLLM, Budget: fewTokens},
		fewer,
	}
}

// fewTokens are fewer in a step of a rank than most loads have: what one flag of the engine
// changes.
const fewTokens = 2048

// whatever is so much patience that it does not matter how many wait for their first token: prompts
// are held for a quarter of what they spare, as they were before that mattered.
const whatever = 100

// set is how many of them the best is taken of.
const set = 6

// base is what the others are held against, and beside is the second one of which no load may lose
// much.
const (
	base   = 0
	beside = 1
)

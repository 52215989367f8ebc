package policy

import "evenkeel/internal/namedargs"

// score is lowest for the candidate that wins. v is the policy's parameter.
type score func(v float64, q *Query, e *Engine) float64

// tieKey orders candidates with equal scores: the smaller key comes first.
type tieKey func(e *Engine) float64

// cacheAwareTies is for policies that consider the prefix cache, loadTies for the others.
var (
	cacheAwareTies = []tieKey{
		func(e *Engine) float64 { return -e.HitTokens },
		func(e *Engine) float64 { return e.PTokens },
		func(e *Engine) float64 { return e.BS },
	}
	loadTies = []tieKey{func(e *Engine) float64 { return e.BS }}
)

type builtin struct {
	name string
	ties []tieKey

	params       []namedargs.Key[float64] // at most one; nil: none
	defaultParam float64
	score        score
	source       string // of the score and the default, for users
	takesTurns   bool   // see Policy.TakesTurns
	loadBlind    bool   // see Policy.LoadBlind
	advice       string // for users, if the policy may only be used in simulations; empty: it may serve requests
}

func numberUpTo(most float64, name string) []namedargs.Key[float64] {
	return []namedargs.Key[float64]{namedargs.Number(name, 0, most, paramField)}
}

// oneOf is a parameter that is stored as the word's index.
func oneOf(name string, allowed ...string) []namedargs.Key[float64] {
	return []namedargs.Key[float64]{namedargs.Words(name, paramField, func(i int) float64 { return float64(i) }, allowed...)}
}

// paramField is the value itself, because a policy has at most one parameter.
func paramField(v *float64) *float64 { return v }

// noBound is an upper bound that no sensible parameter reaches.
const noBound = 1e9

// roundRobinLap moves candidates up to the cursor behind the others. It exceeds the number of
// candidates, and is small enough that the scores of two candidates never count as equal.
const roundRobinLap = 1 << 20

// kvShare is the weight of held KV tokens relative to tokens still to be computed, as in
// vllm-ascend's proxy.
const kvShare = 0.3

// builtins are listed to users in this order.
var builtins = []builtin{
	{
		name: "round-robin", takesTurns: true, loadBlind: true, source: "next in configured order",
		score: func(_ float64, q *Query, e *Engine) float64 {
			if e.Order > q.Cursor {
				return float64(e.Order)
			}
			return float64(e.Order) + roundRobinLap
		},
	},
	{
		name: "least-tokens", ties: loadTies, params: oneOf("work", "tokens", "vllm-ascend"), source: "vllm-ascend's example proxy",
		score: func(v float64, _ *Query, e *Engine) float64 {
			if v == 0 {
				return e.ActiveTokens + kvShare*e.KVTokens
			}
			return e.ActiveWork + kvShare*e.KVWork
		},
	},
	{
		name: "vllm-queue", ties: loadTies, source: "vLLM's DP load balancer",
		score: func(_ float64, _ *Query, e *Engine) float64 { return 4*e.Waiting + e.Running },
	},
	{
		name: "bailian", ties: cacheAwareTies, params: numberUpTo(1, "lambda"), defaultParam: 0.7, source: "LMetric 4.4",
		score: func(v float64, _ *Query, e *Engine) float64 {
			return v*(1-e.HitRatio) + (1-v)*e.BS/max(e.MaxBS, 1)
		},
	},
	{
		name: "aibrix-filter", ties: loadTies, params: numberUpTo(noBound, "range"), defaultParam: 8, source: "AIBrix",
		score: func(v float64, _ *Query, e *Engine) float64 {
			if e.MaxBS-e.MinBS > v {
				return e.BS
			}
			return -e.HitRatio
		},
	},
	{
		name: "dynamo-sum", ties: cacheAwareTies, params: numberUpTo(noBound, "w"), defaultParam: 1, source: "Dynamo at temperature 0",
		score: func(v float64, _ *Query, e *Engine) float64 {
			return v*e.PTokens/max(1, e.BlockTokens) + e.ActiveBlocks
		},
	},
	{
		name: "ttft-sim", ties: cacheAwareTies, source: "llm-d",
		score: func(_ float64, _ *Query, e *Engine) float64 {
			return e.RTTMs + e.T0Ms + e.TPMs*e.PTokens + e.Beta2*(e.QueuedAttention+e.attention())
		},
	},
	{
		name: "lmetric", ties: cacheAwareTies, source: "LMetric 5",
		score: lmetric,
	},
	{
		name: "gorgo", ties: cacheAwareTies, params: numberUpTo(noBound, "qs"), defaultParam: 1, source: "GORGO 3.4",
		score: func(v float64, _ *Query, e *Engine) float64 {
			return e.RTTMs + e.TPMs*e.NewTokens + v*e.TPMs*e.QueuedNewTokens
		},
	},
	{
		name: "random", loadBlind: true, source: "baseline",
		score: func(float64, *Query, *Engine) float64 { return 0 },
	},
	{
		name: "sticky-ring", loadBlind: true, source: "SkyLB's ring hash",
		advice: "write finish, and prefill.affinity.enabled: true, which keeps a session on its engine while that is not loaded",
		score:  func(_ float64, q *Query, e *Engine) float64 { return ringDistance(e.Ring, q.Key) },
	},
	{
		name: "finish", ties: cacheAwareTies, source: "earliest predicted end of this prefill",
		score: func(_ float64, _ *Query, e *Engine) float64 {
			return e.RTTMs + e.BacklogMs + e.T0Ms + e.TPMs*e.NewTokens + e.Beta2*e.attention()
		},
	},
}

// lmetric is the number of queued new tokens times the batch size. Both include this request:
// otherwise every idle candidate would have the score 0, whatever its cache holds.
func lmetric(_ float64, _ *Query, e *Engine) float64 { return e.PTokens * (e.BS + 1) }

package policy

import "math"

// Needs is what a policy wants to find in its Snapshot in addition to loads, slots and
// the pool. The board and the simulator provide it. Without it, a policy still works, but decides
// worse.
type Needs struct {
	// Predictor sets Request.Rhat: none, survival, exact or oracle (in
	// simulations only). Empty: Rhat is not read and the next four do not count.
	Predictor       string
	Horizon         int     // horizon H of Rhat, in steps; when it changes, every running request is predicted anew
	Tau             float64 // if a request ends within the horizon with a smaller probability, Rhat is H (see predictor.Rules)
	Every           int     // tokens between two predictions for a request
	DecrementAnchor bool    // an Rhat that is H because of Tau counts down, too, as in the paper; see predictor.Rules

	MeanOutput bool // the policy reads Snapshot.MeanOutput
	Hits       bool // the policy reads Snapshot.Waits, for what ranks hold of prompts
}

// needy is a policy that has Needs.
type needy interface {
	needs(meanOutput float64) Needs
}

// NeedsOf returns what p wants. meanOutput is that of the next Snapshot, 0 at first: the horizon
// depends on it if it is auto.
func NeedsOf(p Policy, meanOutput float64) Needs {
	if n, ok := p.(needy); ok {
		return n.needs(meanOutput)
	}
	return Needs{}
}

// Held returns how many entries p's last decision held for a round although they had a slot.
func Held(p Policy) int {
	if e, ok := p.(*evenkeel); ok {
		return e.gather.planner.Held()
	}
	return 0
}

// auto is the value of a setting that the policy computes itself: of horizon and gamma from the mean output, of age_weight from the loads.
const auto = -1

// ageWeightFor returns the weight of waiting, in KV tokens per step. For auto it is a share of
// what a request holds on average. With a fixed weight, waiting would count too much where prompts are
// short, and too little where they are long.
func ageWeightFor(weight float64, s *Snapshot) float64 {
	if weight != auto {
		return weight
	}
	tokens, requests := int64(0), 0
	for i := range s.Workers {
		tokens += s.Workers[i].KVTokens()
		requests += len(s.Workers[i].Running)
	}
	if requests == 0 {
		for i := range s.Pool {
			tokens += int64(s.Pool[i].Prompt)
		}
		requests = len(s.Pool)
	}
	return float64(tokens) / float64(max(1, requests)) / ageShare
}

// ageShare divides the mean KV tokens of a request: the result is what a step of waiting is
// worth, about 15 tokens on Azure's conversations and 160 on Mooncake's. A
// third more or less moved idle time there by a few tenths of a percentage point.
const ageShare = 80

// maxHorizon bounds the horizon that a user may set, in steps: the memory of a policy grows with it.
const maxHorizon = 512

// horizonFor returns the horizon in steps, and computes it for auto. It is short for short answers: farther
// ahead, the requests that run now will be gone.
func horizonFor(horizon int, meanOutput float64) int {
	if horizon != auto {
		return horizon
	}
	if meanOutput == 0 {
		return 80
	}
	return int(min(80, max(1, math.Round(meanOutput/4))))
}

// gammaFor returns the discount per step, and computes it for auto.
func gammaFor(gamma, meanOutput float64) float64 {
	if gamma != auto {
		return gamma
	}
	if meanOutput == 0 {
		return 1 - 1./20
	}
	return 1 - 1/min(20, max(2, meanOutput/15))
}

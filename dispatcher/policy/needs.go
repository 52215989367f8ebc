package policy

import "math"

// Requirements says what a policy reads in its Snapshot in addition to loads, slots and the pool. The board or the simulator provides it. A
// policy that does not get what it needs still works, but decides worse.
type Requirements struct {
	// Predictor is the kind of predictor that sets Request.Rhat: none, survival, exact or, only in simulations, oracle. Empty: the policy
	// does not read Rhat, and the next four fields have no meaning.
	Predictor       string
	Horizon         int     // horizon H of Rhat, in steps; when it changes, every running request is predicted anew
	Tau             float64 // if the probability that a request ends within the horizon is smaller, Rhat is H (see predictor.Rules)
	Every           int     // tokens that a request gets between two predictions for it
	DecrementAnchor bool    // an Rhat that is H because of Tau counts down, too, as in the paper; see predictor.Rules

	MeanOutput bool // the policy reads Snapshot.MeanOutput
	Hits       bool // the policy reads EntryDetails.Hits: which ranks hold a part of a prompt
}

// hasRequirements is implemented by policies that have Requirements.
type hasRequirements interface {
	requirements(meanOutput float64) Requirements
}

// NeedsOf returns what p needs. meanOutput is the value in the next Snapshot, 0 if it is not known: a horizon of auto depends on it.
func RequirementsOf(p Policy, meanOutput float64) Requirements {
	if n, ok := p.(hasRequirements); ok {
		return n.requirements(meanOutput)
	}
	return Requirements{}
}

// Held returns how many entries p's last decision held back although a slot was free for them: on ranks that prefill, to send them
// together, and on others, because they would have made each step much longer.
func Held(p Policy) int {
	if e, ok := p.(*evenkeel); ok {
		return e.gather.planner.Held() + e.heldBack.count
	}
	return 0
}

// auto as the value of a setting means that the policy computes it: horizon and gamma from the mean output, age_weight from the loads.
const auto = -1

// ageWeightFor returns by how many KV tokens each step that an entry waits lowers the cost of placing it. For auto it is a share of the KV
// tokens that a request holds on average. A fixed weight would count the wait too much if prompts are short, and too little if they are
// long.
func ageWeightFor(weight float64, s *Snapshot) float64 {
	if weight != auto {
		return weight
	}
	tokens, requests := int64(0), 0
	for i := range s.Workers {
		tokens += s.Workers[i].KVTokens()
		requests += len(s.Workers[i].Running)
	}
	if requests == 0 { // no rank has a request: take the mean of those that wait
		for i := range s.Pool {
			tokens += int64(s.Pool[i].Prompt)
		}
		requests = len(s.Pool)
	}
	return float64(tokens) / float64(max(1, requests)) / ageShare
}

// ageShare is the divisor of the mean KV tokens of a request that gives the weight of one step of waiting: about 15 tokens in Azure's trace
// of conversations, and 160 in Mooncake's. A weight that is a third larger or smaller changed the idle time there by a few tenths of a
// percentage point.
const ageShare = 80

// maxHorizon bounds the horizon that a user may set, in steps: the memory of a policy grows with it.
const maxHorizon = 512

// horizonFor returns the horizon in steps. For auto, it computes a shorter horizon for shorter answers, because beyond it the requests that
// run now will have ended.
func horizonFor(horizon int, meanOutput float64) int {
	if horizon != auto {
		return horizon
	}
	if meanOutput == 0 {
		return longestAuto
	}
	return int(min(longestAuto, max(1, math.Round(meanOutput/4))))
}

const longestAuto = 80 // steps: the longest horizon that auto gives, and the one for an unknown mean output

// gammaFor returns the factor by which a step counts less than the step before. With a factor of 1-1/n, the weights of all steps add up to
// n. For auto, n is a fifteenth of the mean output, but 2 to 20; 20 if the mean output is not known.
func gammaFor(gamma, meanOutput float64) float64 {
	if gamma != auto {
		return gamma
	}
	if meanOutput == 0 {
		return 1 - 1./20
	}
	return 1 - 1/min(20, max(2, meanOutput/15))
}

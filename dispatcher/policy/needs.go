package policy

import "math"

// Requirements says which optional parts of a Snapshot a policy reads. Without them, it still
// works, but decides worse.
type Requirements struct {
	// Predictor sets Request.Rhat: none, survival, exact or, only in simulations, oracle. Empty: the
	// policy does not read Rhat, and the next four fields have no meaning.
	Predictor       string
	Horizon         int     // horizon H of Rhat, in decode steps; when it changes, every running request is predicted anew
	Tau             float64 // least probability of an end within the horizon; below it, Rhat is H (see predictor.Rules)
	Every           int     // tokens after which a running request is predicted anew
	DecrementAnchor bool    // Rhat counts down even if it is H because of Tau, as in the paper

	MeanOutput bool
}

type hasRequirements interface {
	requirements(meanOutput float64) Requirements
}

// RequirementsOf returns what p reads. meanOutput is Snapshot.MeanOutput of the next round (0:
// unknown), from which a horizon auto follows.
func RequirementsOf(p Policy, meanOutput float64) Requirements {
	if n, ok := p.(hasRequirements); ok {
		return n.requirements(meanOutput)
	}
	return Requirements{}
}

// Held returns how many entries p's last decision held back although a slot was free for them.
func Held(p Policy) int {
	if e, ok := p.(*evenkeel); ok {
		return e.gather.planner.Held() + e.heldBack.count
	}
	return 0
}

// auto is the value of a setting that the policy computes itself.
const auto = -1

// ageWeightFor returns how many KV tokens each step of waiting takes off the cost of placing an
// entry. For auto, it follows from the mean KV tokens of a request: a fixed weight would count the
// wait too much if prompts are short, and too little if they are long.
func ageWeightFor(weight float64, s *Snapshot) float64 {
	if weight != auto {
		return weight
	}
	tokens, requests := int64(0), 0
	for i := range s.Workers {
		tokens += s.Workers[i].KVTokens()
		requests += len(s.Workers[i].Running)
	}
	if requests == 0 { // no rank has a request, so the waiting entries count
		for i := range s.Pool {
			tokens += int64(s.Pool[i].Prompt)
		}
		requests = len(s.Pool)
	}
	return float64(tokens) / float64(max(1, requests)) / ageDivisor
}

// ageDivisor makes a step of waiting worth about 15 tokens in Azure's trace of conversations, and
// 160 in Mooncake's. A weight that is a third larger or smaller changed the idle time in these
// traces by a few tenths of a percentage point.
const ageDivisor = 80

// maxHorizon bounds the memory of a policy, in decode steps.
const maxHorizon = 512

// horizonFor returns the horizon in decode steps. For auto, it is a quarter of the mean output: if
// answers are short, most running requests will have ended before a long horizon. meanOutput is in
// tokens; 0: unknown.
func horizonFor(horizon int, meanOutput float64) int {
	if horizon != auto {
		return horizon
	}
	if meanOutput == 0 {
		return longestAuto
	}
	return int(min(longestAuto, max(1, math.Round(meanOutput/4))))
}

const longestAuto = 80 // longest horizon of auto, in decode steps; also used if the mean output is unknown

// gammaFor returns the factor by which each step weighs less than the one before. With a factor of
// 1-1/n, the weights of all steps add up to n. For auto, n is a fifteenth of the mean output.
func gammaFor(gamma, meanOutput float64) float64 {
	if gamma != auto {
		return gamma
	}
	if meanOutput == 0 {
		return 1 - 1./20
	}
	return 1 - 1/min(20, max(2, meanOutput/15))
}

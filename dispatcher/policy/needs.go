package policy

import "math"

// Needs is what a policy wants to find in its Snapshot beside loads, slots and
// the pool. The board and the simulator provide it; a policy does without, at
// a loss.
type Needs struct {
	// Predictor sets Request.Rhat: none, survival, exact or oracle (in
	// simulations only). Empty: Rhat is not read and the next four do not count.
	Predictor       string
	Horizon         int     // H of Rhat; when it changes, every running request is asked about anew
	Tau             float64 // gate: r^ = H below this p^
	Every           int     // tokens between two predictions for a request
	DecrementAnchor bool    // count a closed gate's r^ = H down too, by the paper's letter

	MeanOutput bool // Snapshot.MeanOutput
	Hits       bool // Snapshot.Waits, for what ranks hold of prompts
}

// needy is a policy that wants more than loads.
type needy interface {
	needs(meanOutput float64) Needs
}

// NeedsOf tells what p wants. The mean output is the one that the next Snapshot will
// hold, 0 at first: a horizon=auto follows it.
func NeedsOf(p Policy, meanOutput float64) Needs {
	if n, ok := p.(needy); ok {
		return n.needs(meanOutput)
	}
	return Needs{}
}

// Held is how many entries p's last decision held for a round though they had a slot.
func Held(p Policy) int {
	if e, ok := p.(*evenkeel); ok {
		return e.gather.planner.Held()
	}
	return 0
}

// auto as a horizon or a discount stands for one that follows the mean output.
const auto = -1

// ageWeightFor resolves age_weight=auto, in tokens a step of waiting: a share of
// what a request holds, or the age of short prompts would drown their balance
// and that of long ones count for nothing.
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

// ageShare of the tokens that a request holds is what a step of its waiting is
// worth: about 15 tokens on Azure's conversations and 160 on Mooncake's. A
// third more or less moved idle time there by a few tenths of a point.
const ageShare = 80

// maxHorizon bounds what a user may ask for; scratch grows with it.
const maxHorizon = 512

// horizonFor resolves horizon=auto. Far beyond what a slot keeps its request, a
// look ahead sees only requests that will be gone.
func horizonFor(horizon int, meanOutput float64) int {
	if horizon != auto {
		return horizon
	}
	if meanOutput == 0 {
		return 80
	}
	return int(min(80, max(1, math.Round(meanOutput/4))))
}

// gammaFor resolves gamma=auto.
func gammaFor(gamma, meanOutput float64) float64 {
	if gamma != auto {
		return gamma
	}
	if meanOutput == 0 {
		return 1 - 1./20
	}
	return 1 - 1/min(20, max(2, meanOutput/15))
}

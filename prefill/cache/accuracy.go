package cache

import "math"

// Accuracy compares the predicted hits in a candidate's prefix cache with those that its engine
// reports. Recent answers weigh most.
type Accuracy struct {
	answers          float64
	prompt           float64 // prompt tokens
	predicted, found float64 // tokens predicted to be cached, and found cached
	tooHigh, tooLow  float64 // tokens by which single predictions were too high, and too low
	Suspect          Suspicion
	capacity         int64 // KV tokens that were assumed while the answers came
}

// Suspicion is a doubt about a candidate's known capacity that wrong predictions raise; empty:
// none.
type Suspicion string

const (
	HoldsLess Suspicion = "less" // the engine holds less than the known capacity
	HoldsMore Suspicion = "more" // it holds more
)

const (
	accuracyHalfLife = 128.0 // newer answers after which an answer counts half
	// minAnswers is the weighted number of answers below which the suspicion does not change.
	minAnswers   = 32.0
	suspectShare = 0.2  // wrong share of the predicted (or of the found) tokens above which a suspicion begins
	trustShare   = 0.1  // wrong share down to which it lasts; the gap keeps it from flapping
	fullShare    = 0.95 // share of the capacity in use from which on the index has probably dropped blocks
)

var accuracyDecay = math.Exp2(-1 / accuracyHalfLife)

// add counts one answer, in tokens.
func (a *Accuracy) add(prompt, predicted, found float64) {
	for _, sum := range []*float64{&a.answers, &a.prompt, &a.predicted, &a.found, &a.tooHigh, &a.tooLow} {
		*sum *= accuracyDecay
	}
	a.answers++
	a.prompt += prompt
	a.predicted += predicted
	a.found += found
	a.tooHigh += max(0, predicted-found)
	a.tooLow += max(0, found-predicted)
}

// nextSuspicion is the suspicion that the answers so far justify. capacityBinds says that the index
// drops blocks of the candidate because of this capacity.
func (a *Accuracy) nextSuspicion(capacityBinds bool) Suspicion {
	switch {
	case a.answers < minAnswers:
		return a.Suspect
	case a.tooHigh > suspectShare*a.predicted:
		return HoldsLess
	case capacityBinds && a.tooLow > suspectShare*a.found: // else the index lacks these tokens for another reason
		return HoldsMore
	}
	stillLess := a.Suspect == HoldsLess && a.tooHigh > trustShare*a.predicted
	stillMore := a.Suspect == HoldsMore && capacityBinds && a.tooLow > trustShare*a.found
	if stillLess || stillMore {
		return a.Suspect
	}
	return ""
}

// HitShare is the share of prompt tokens that were in the cache; 0 before the first answer.
func (a *Accuracy) HitShare() float64 {
	if a.prompt == 0 {
		return 0
	}
	return a.found / a.prompt
}

// ErrorShare is the error of the predictions, as a share of the predicted tokens.
func (a *Accuracy) ErrorShare() float64 {
	if a.predicted == 0 {
		return 0
	}
	return (a.tooHigh + a.tooLow) / a.predicted
}

// AddErrors makes ErrorShare the error over both candidates.
func (a *Accuracy) AddErrors(other *Accuracy) {
	a.predicted += other.predicted
	a.tooHigh += other.tooHigh
	a.tooLow += other.tooLow
}

// SuspicionChange says that a suspicion has begun, has become another one, or has ended.
type SuspicionChange struct {
	Suspicion
	CapacityTokens int64   // KV tokens, as configured or scraped
	Over, Under    float64 // share of predicted tokens that the engine lacked, and of found tokens that were not predicted
}

// compareHit compares the predicted hit of a probe with the one that its engine found. nil: the
// suspicion stays.
func (h *PredictedHit) compareHit(u Usage, capacity int64) *SuspicionChange {
	if len(h.prompt.Keys) == 0 || h.beingComputed { // no prediction, or one that says nothing about the capacity (see ExpectHit)
		return nil
	}
	b := h.blocks
	a, slot := &b.Accuracy, b.slots[h.prompt.unit()]
	if capacity != a.capacity { // the sums judge a capacity that is no longer used
		*a = Accuracy{capacity: capacity, Suspect: a.Suspect}
	}
	a.add(float64(u.PromptTokens), float64(h.hit), float64(u.CachedTokens))
	// With a nearly full capacity (slot.blocks; 0: unknown), the index drops blocks that a larger
	// engine would still hold.
	capacityBinds := slot.blocks > 0 && float64(b.cache.index.Held(slot.handle)) >= fullShare*float64(slot.blocks)
	suspicion := a.nextSuspicion(capacityBinds)
	if suspicion == a.Suspect {
		return nil
	}
	a.Suspect = suspicion
	return &SuspicionChange{Suspicion: suspicion, CapacityTokens: a.capacity,
		Over: a.tooHigh / max(1, a.predicted), Under: a.tooLow / max(1, a.found)}
}

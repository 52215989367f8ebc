package cache

import "math"

// Accuracy compares the predicted hits in a candidate's prefix cache with the hits that its engine reports. All sums
// weight recent answers most.
type Accuracy struct {
	answers          float64 // number of compared answers
	prompt           float64 // prompt tokens of the compared answers
	predicted, found float64 // tokens predicted to be cached, and tokens that the engine found cached
	tooHigh, tooLow  float64 // tokens by which single predictions were too high, and too low
	Suspect          Suspicion
	capacity         int64 // KV tokens that the candidate was assumed to hold while the answers came
}

// Suspicion is a doubt about a candidate's known capacity that wrong predictions raise.
type Suspicion string

// The suspicions. An empty Suspicion means that predictions and answers agree well enough.
const (
	HoldsLess Suspicion = "less" // the engine holds less than the known capacity
	HoldsMore Suspicion = "more" // the engine holds more than the known capacity
)

const (
	accuracyHalfLife = 128.0 // number of newer answers after which an answer counts half
	// minAnswers is the weighted number of answers below which the suspicion does not change.
	minAnswers   = 32.0
	suspectShare = 0.2  // wrong share of the predicted (or of the found) tokens above which a suspicion begins
	trustShare   = 0.1  // wrong share down to which the suspicion lasts; the gap to suspectShare keeps it from flapping
	fullShare    = 0.95 // when a candidate uses this share of its capacity, the index has probably dropped blocks to stay within it
)

var accuracyDecay = math.Exp2(-1 / accuracyHalfLife)

// add counts one answer. prompt is the length of the prompt, predicted the predicted hit and found the hit that the
// engine found, all in tokens.
func (a *Accuracy) add(prompt, predicted, found float64) {
	for _, sum := range []*float64{&a.answers, &a.prompt, &a.predicted, &a.found, &a.tooHigh, &a.tooLow} {
		*sum *= accuracyDecay // so that older answers count less
	}
	a.answers++
	a.prompt += prompt
	a.predicted += predicted
	a.found += found
	a.tooHigh += max(0, predicted-found)
	a.tooLow += max(0, found-predicted)
}

// nextSuspicion returns the suspicion about the known capacity that the answers so far justify. capacityBinds means that the index drops
// blocks of the candidate because of this capacity. A suspicion begins when predictions were too high by more than suspectShare of the
// predicted tokens, or too low by more than this share of the tokens found. It lasts until the share falls to trustShare.
func (a *Accuracy) nextSuspicion(capacityBinds bool) Suspicion {
	switch {
	case a.answers < minAnswers: // too few to judge
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

// ErrorShare is the error of the predictions, as a share of the predicted tokens; 0 if none were predicted.
func (a *Accuracy) ErrorShare() float64 {
	if a.predicted == 0 {
		return 0
	}
	return (a.tooHigh + a.tooLow) / a.predicted
}

// AddErrors adds the predictions of another candidate. ErrorShare is then the error over both candidates.
func (a *Accuracy) AddErrors(other *Accuracy) {
	a.predicted += other.predicted
	a.tooHigh += other.tooHigh
	a.tooLow += other.tooLow
}

// SuspicionChange says that a suspicion about a candidate's capacity has begun, has become another one, or has ended.
type SuspicionChange struct {
	Suspicion
	CapacityTokens int64   // capacity in KV tokens, as configured or scraped
	Over, Under    float64 // share of predicted tokens that the engine lacked, and of found tokens that were not predicted
}

// compareHit compares the predicted hit of a probe with the hit that its engine found, and adds both to the sums for this capacity. It
// returns the change of the suspicion about the capacity; nil: no change. Over and Under of the change are the tokens by which predictions
// were too high, as a share of the predicted tokens, and by which they were too low, as a share of the tokens found.
func (h *PredictedHit) compareHit(u Usage, capacity int64) *SuspicionChange {
	if len(h.prompt.Keys) == 0 || h.beingComputed { // no prediction, or (see ExpectHit) one that says nothing about the capacity
		return nil
	}
	b := h.blocks
	a, slot := &b.Accuracy, b.slots[h.prompt.unit()] // a prompt has blocks either of bytes or of token ids
	if capacity != a.capacity {                      // the sums so far judge a capacity that is no longer used
		*a = Accuracy{capacity: capacity, Suspect: a.Suspect}
	}
	a.add(float64(u.PromptTokens), float64(h.hit), float64(u.CachedTokens))
	// With a nearly full capacity (slot.blocks; 0: unknown), the index drops blocks that an engine of larger capacity would still hold.
	capacityBinds := slot.blocks > 0 && float64(b.cache.index.Held(slot.handle)) >= fullShare*float64(slot.blocks)
	suspicion := a.nextSuspicion(capacityBinds)
	if suspicion == a.Suspect {
		return nil
	}
	a.Suspect = suspicion
	return &SuspicionChange{Suspicion: suspicion, CapacityTokens: a.capacity,
		Over: a.tooHigh / max(1, a.predicted), Under: a.tooLow / max(1, a.found)}
}

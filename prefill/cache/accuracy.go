package cache

import "math"

// Accuracy is how far predictions of what is in a candidate's prefix cache are from what its engine found there. The
// last answers count most.
type Accuracy struct {
	answers, prompt                float64 // prompt: tokens
	predicted, actual, over, under float64 // tokens
	Suspect                        Suspicion
	capacity                       int64 // the capacity, in tokens, that was set or scraped while these answers came
}

// Suspicion is what wrong predictions say about a candidate's capacity.
type Suspicion string

// What a capacity is suspected of.
const (
	HoldsLess Suspicion = "less" // than the capacity says
	HoldsMore Suspicion = "more"
)

const (
	accuracyHalfLife = 128.0 // answers
	leastAnswers     = 32.0
	suspectShare     = 0.2 // of the predicted tokens that were not there, or of the tokens there that were not predicted
	trustShare       = 0.1
	bindingShare     = 0.95 // of its capacity in blocks: a candidate that claims so much of it has had blocks forgotten
)

var accuracyDecay = math.Exp2(-1 / accuracyHalfLife)

// add counts one answer, in tokens: how many the prompt has, how many of them were predicted to be in the cache, and how
// many were there.
func (a *Accuracy) add(prompt, predicted, actual float64) {
	for _, v := range []*float64{&a.answers, &a.prompt, &a.predicted, &a.actual, &a.over, &a.under} {
		*v *= accuracyDecay
	}
	a.answers++
	a.prompt += prompt
	a.predicted += predicted
	a.actual += actual
	a.over += max(0, predicted-actual)
	a.under += max(0, actual-predicted)
}

// verdict is what the answers so far say about the capacity. binding: the index forgets blocks of the candidate for
// want of capacity. Between trustShare and suspectShare a suspicion stays as it is.
func (a *Accuracy) verdict(binding bool) Suspicion {
	switch {
	case a.answers < leastAnswers:
		return a.Suspect
	case a.over > suspectShare*a.predicted:
		return HoldsLess
	case binding && a.under > suspectShare*a.actual:
		return HoldsMore
	case a.Suspect == HoldsLess && a.over > trustShare*a.predicted, a.Suspect == HoldsMore && binding && a.under > trustShare*a.actual:
		return a.Suspect
	}
	return ""
}

// Hits is the share of prompt tokens that were in the cache.
func (a *Accuracy) Hits() float64 {
	if a.prompt == 0 {
		return 0
	}
	return a.actual / a.prompt
}

// Off is the share of predicted tokens by which the predictions were wrong.
func (a *Accuracy) Off() float64 {
	if a.predicted == 0 {
		return 0
	}
	return (a.over + a.under) / a.predicted
}

// Sum adds the predictions of another candidate, so that Off is that of both.
func (a *Accuracy) Sum(other *Accuracy) {
	a.predicted += other.predicted
	a.over += other.over
	a.under += other.under
}

// Suspected is a change of the suspicion about a candidate's capacity.
type Suspected struct {
	Suspicion
	CapacityTokens int64   // as it was set or scraped
	Over, Under    float64 // shares of tokens: predicted but not there, and there but not predicted
}

// judge compares what was predicted for a probe with what its engine found. It returns the change of the suspicion
// about the capacity; nil: there is none.
func (e *Expectation) judge(u Usage, capacity int64) *Suspected {
	if len(e.prompt.Keys) == 0 || e.stillComputed {
		return nil
	}
	h := e.holdings
	a, slot := &h.Accuracy, h.slots[e.prompt.unit()]
	if capacity != a.capacity { // the answers so far were about another capacity
		*a = Accuracy{capacity: capacity, Suspect: a.Suspect}
	}
	a.add(float64(u.PromptTokens), float64(e.hit), float64(u.CachedTokens))
	suspicion := a.verdict(slot.blocks > 0 && float64(h.cache.index.Held(slot.at)) >= bindingShare*float64(slot.blocks))
	if suspicion == a.Suspect {
		return nil
	}
	a.Suspect = suspicion
	return &Suspected{Suspicion: suspicion, CapacityTokens: a.capacity,
		Over: a.over / max(1, a.predicted), Under: a.under / max(1, a.actual)}
}

package cache

import "math"

// Accuracy is how far what was predicted of a candidate's prefix cache is from
// what its engine found there, the last answers weighing most.
type Accuracy struct {
	answers, prompt                float64 // prompt: tokens
	predicted, actual, over, under float64 // tokens
	Suspect                        Suspicion
	told                           int64 // capacity in tokens while these answers came
}

// Suspicion is what predictions that go wrong say about a capacity.
type Suspicion string

// What a capacity is suspected of.
const (
	HoldsLess Suspicion = "less" // than was told
	HoldsMore Suspicion = "more"
)

const (
	accuracyHalfLife = 128.0 // answers
	leastAnswers     = 32.0
	suspectShare     = 0.2 // of predicted tokens that were not there, or of those there that were not predicted
	trustShare       = 0.1
	bindingShare     = 0.95 // of what it may claim a candidate claims, so that more was forgotten
)

var accuracyDecay = math.Exp2(-1 / accuracyHalfLife)

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

// verdict is what the answers say so far. binding: the index forgets blocks of
// the candidate for want of capacity. Between the two shares it stays.
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

// Sum adds what was predicted of another candidate, for Off.
func (a *Accuracy) Sum(o *Accuracy) {
	a.predicted += o.predicted
	a.over += o.over
	a.under += o.under
}

// Suspected is a change of what is thought of a candidate's capacity.
type Suspected struct {
	Suspicion
	CapacityTokens int64   // as told
	Over, Under    float64 // shares of tokens that were predicted and not there, and there and not predicted
}

// judge compares what was predicted for a probe with what its engine found.
func (e *Expectation) judge(u Usage, capacity int64) *Suspected {
	if len(e.prompt.Keys) == 0 || e.hung {
		return nil
	}
	h := e.holdings
	a, s := &h.Accuracy, h.slots[e.prompt.unit()]
	if capacity != a.told { // what was seen before speaks of another
		*a = Accuracy{told: capacity, Suspect: a.Suspect}
	}
	a.add(float64(u.PromptTokens), float64(e.hit), float64(u.CachedTokens))
	found := a.verdict(s.blocks > 0 && float64(h.cache.index.Held(s.at)) >= bindingShare*float64(s.blocks))
	if found == a.Suspect {
		return nil
	}
	a.Suspect = found
	return &Suspected{Suspicion: found, CapacityTokens: a.told, Over: a.over / max(1, a.predicted), Under: a.under / max(1, a.actual)}
}

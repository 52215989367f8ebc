package prefill

import (
	"math"

	"go.uber.org/zap"
)

// accuracy is how far what was predicted of a candidate's prefix cache is from
// what its engine found there, the last answers weighing most.
type accuracy struct {
	answers, prompt                float64 // prompt: tokens
	predicted, actual, over, under float64 // tokens
	suspect                        suspicion
	told                           int64 // capacity in tokens while these answers came
}

// suspicion is what predictions that go wrong say about a capacity.
type suspicion string

const (
	holdsLess suspicion = "less" // than was told
	holdsMore suspicion = "more"
)

const (
	accuracyHalfLife = 128.0 // answers
	leastAnswers     = 32.0
	suspectShare     = 0.2 // of predicted tokens that were not there, or of those there that were not predicted
	trustShare       = 0.1
	bindingShare     = 0.95 // of what it may claim a candidate claims, so that more was forgotten
)

var accuracyDecay = math.Exp2(-1 / accuracyHalfLife)

func (a *accuracy) add(prompt, predicted, actual float64) {
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
func (a *accuracy) verdict(binding bool) suspicion {
	switch {
	case a.answers < leastAnswers:
		return a.suspect
	case a.over > suspectShare*a.predicted:
		return holdsLess
	case binding && a.under > suspectShare*a.actual:
		return holdsMore
	case a.suspect == holdsLess && a.over > trustShare*a.predicted, a.suspect == holdsMore && binding && a.under > trustShare*a.actual:
		return a.suspect
	}
	return ""
}

// hits is the share of prompt tokens that were in the cache.
func (a *accuracy) hits() float64 {
	if a.prompt == 0 {
		return 0
	}
	return a.actual / a.prompt
}

// off is the share of predicted tokens by which the predictions were wrong.
func (a *accuracy) off() float64 {
	if a.predicted == 0 {
		return 0
	}
	return (a.over + a.under) / a.predicted
}

// hangs reports whether what is predicted of a prompt is not in the cache yet:
// an unanswered probe computes it. That says nothing about a capacity.
func (c *candidate) hangs(p *Prompt, blocks int) bool {
	if blocks == 0 {
		return false
	}
	last := p.Keys[blocks-1] // it covers those before
	for l := c.oldest; l != nil; l = l.after {
		if len(l.prompt.Keys) >= blocks && l.prompt.Keys[blocks-1] == last {
			return true
		}
	}
	return false
}

// judge compares what was predicted for a lease with what its engine found.
func (t *Tier) judge(l *Lease, u Usage) {
	if len(l.prompt.Keys) == 0 || l.hung {
		return
	}
	c := l.c
	s := c.slots[l.prompt.unit()]
	if told := c.capacityTokens(); told != c.accuracy.told { // what was seen before speaks of another
		c.accuracy = accuracy{told: told, suspect: c.accuracy.suspect}
	}
	c.accuracy.add(float64(u.PromptTokens), float64(l.HitTokens), float64(u.CachedTokens))
	found := c.accuracy.verdict(s.blocks > 0 && float64(t.index.Held(s.at)) >= bindingShare*float64(s.blocks))
	if found != c.accuracy.suspect {
		c.accuracy.suspect = found
		t.suspected = append(t.suspected, suspected{c.ID, found, c.accuracy})
	}
}

// suspected is a change of what is thought of a candidate's capacity.
type suspected struct {
	candidate string
	suspicion
	accuracy
}

// tell logs it, without the lock.
func (s suspected) tell(log *zap.Logger) {
	log = log.With(zap.String("candidate", s.candidate), zap.Int64("capacity_tokens", s.told),
		zap.Float64("over_predicted_share", s.over/max(1, s.predicted)), zap.Float64("under_predicted_share", s.under/max(1, s.actual)))
	switch s.suspicion {
	case holdsLess:
		log.Warn("a prefiller finds less of its prompts in its prefix cache than one of its capacity holds; set kv_tokens_per_rank in its profile to what it has, or see who else uses it")
	case holdsMore:
		log.Warn("a prefiller finds more of its prompts in its prefix cache than one of its capacity holds; set kv_tokens_per_rank in its profile to what it has")
	default:
		log.Info("a prefiller's prefix cache is as large as its capacity says")
	}
}

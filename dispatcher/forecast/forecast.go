// Package forecast keeps a prediction for each running request: how many more tokens the request will get within the horizon, a number of
// decode steps. The prediction is called r̂, and Rhat in a Snapshot.
package forecast

import (
	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// A policy that reads only the mean output needs no predictions. To score the predictor nevertheless, requests in one of scoreEvery slots
// get predictions that only serve this purpose. Their horizon is the one that `evenkeel fit` uses, so that the scores can be compared with
// those of the fit file.
const (
	scoreHorizon = 80   // decode steps that a scored prediction looks ahead
	scoreEvery   = 8    // of so many slots, one gets predictions that are only scored
	scoreRows    = 4096 // how many of the latest predictions with known outcomes are kept
)

// Running keeps the predictions r̂ of the running requests of one group. In each round of decisions, it updates r̂ by the tokens that were
// generated since the last round, and asks the predictor once for all requests that need a new prediction. Only the goroutine that decides
// may use it.
type Running struct {
	rules        predictor.Rules
	policyReads  bool       // the policy reads r̂; false: only a sample of the requests is predicted, to score the predictor
	rulesVersion uint32     // grows when rules or policyReads change; a request whose estimate has an older version is predicted anew
	estimates    []estimate // estimates of the running requests, by slot number

	scored        *predictor.Live // sample of predictions and their outcomes; nil: none, before KeepScores is called
	scoredHorizon int             // horizon of the scored predictions, in steps

	needPrediction []*policy.Request // requests that must be predicted anew in this round; reused
	queries        []predictor.Query
	answers        []predictor.Prediction
}

// estimate is the prediction r̂ for the request in one slot.
type estimate struct {
	predictor.State
	id           uint64
	updatedAtAge int32  // age of the request, in generated tokens, when r̂ was last updated
	rulesVersion uint32 // Running.rulesVersion when r̂ was last predicted anew
}

// SetNeeds sets which predictions the policy needs, and the rules by which requests are predicted. If the policy reads no predictions, a
// sample of the requests is predicted all the same, by fixed rules, so that the predictor can be scored. If the needs have changed, every
// request will be predicted anew in the next round.
func (f *Running) SetNeeds(n policy.Requirements) {
	reads := n.Predictor != "" // the policy reads predictions
	rules := predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
	if !reads {
		rules = predictor.DefaultRules(scoreHorizon)
	}
	if firstCall := f.rulesVersion == 0; firstCall || rules != f.rules || reads != f.policyReads {
		f.rules, f.policyReads = rules, reads
		f.rulesVersion++
	}
}

// KeepScores makes Running score its predictions from now on. If the horizon has changed by more than a tenth, the sample of predictions
// starts anew. Smaller changes are ignored: a horizon that follows the mean output often moves by a step, and the sample would never be
// complete.
func (f *Running) KeepScores() {
	horizon := f.rules.H
	changed := 10*max(horizon, f.scoredHorizon) > 11*min(horizon, f.scoredHorizon) // the larger horizon is more than 1.1 times the smaller
	if f.scored == nil || changed {
		f.scored, f.scoredHorizon = predictor.NewLive(horizon, scoreRows), horizon
	}
}

// Update updates r̂ of the running requests and writes it into their Rhat, where the policy reads it. r̂ is the predicted number of decode
// steps that a request has left, at most the horizon. The Age of the requests must be up to date. If the policy does not read predictions,
// Update sets Rhat to 0 and updates only the sample that is scored.
func (f *Running) Update(workers []policy.Worker, p predictor.Predictor) {
	f.needPrediction = f.needPrediction[:0] // advance adds the requests that must be predicted anew
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			request := &running[i]
			if f.policyReads || request.Slot%scoreEvery == 0 { // in the sample, the predictions are scored
				f.advance(request)
			} else {
				request.Rhat = 0
			}
		}
	}
	f.predictAll(p)
}

// advance updates r̂ of one request, the predicted number of decode steps that it has left, to the request's age. It also sets Rhat: r̂ as
// the policy sees it. A request that must be predicted anew is added to needPrediction, and gets its new r̂ in predictAll.
func (f *Running) advance(request *policy.Request) {
	if missing := int(request.Slot) + 1 - len(f.estimates); missing > 0 { // the slot number is larger than any before
		f.estimates = append(f.estimates, make([]estimate, missing)...)
	}
	e := &f.estimates[request.Slot]
	predictAnew := true
	if e.id == request.ID && e.rulesVersion == f.rulesVersion { // the prediction stays valid until Advance asks for a new one
		predictAnew = f.rules.Advance(&e.State, e.updatedAtAge, request.Age)
	} else { // the request is new in this slot, or the prediction rules have changed: it has no valid prediction
		*e = estimate{id: request.ID, rulesVersion: f.rulesVersion}
	}
	e.updatedAtAge = request.Age
	if predictAnew {
		f.needPrediction = append(f.needPrediction, request)
	}
	// Here, r̂ is the old value, counted down by the new tokens, or 0 for a new request. If the request must be predicted anew,
	// predictAll replaces Rhat before the policy reads it.
	request.Rhat = f.rhatForPolicy(e)
}

// rhatForPolicy returns r̂ of a request, the predicted number of decode steps that it has left, as the policy sees it. It returns 0, which
// means unknown, if the policy does not read predictions: then e.Rhat is only of use for scoring the predictor.
func (f *Running) rhatForPolicy(e *estimate) float32 {
	if !f.policyReads {
		return 0
	}
	return e.Rhat
}

// predictAll asks the predictor, in one call, about all requests in needPrediction. From each answer, it computes r̂, the predicted number
// of decode steps that the request has left, and stores it in the request's estimate. It sets request.Rhat to r̂ as the policy sees it. The
// answer is also recorded in the sample that is scored.
func (f *Running) predictAll(p predictor.Predictor) {
	if len(f.needPrediction) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, request := range f.needPrediction {
		generatedBefore := request.Age - request.Generated // tokens from earlier ranks are part of Prompt
		f.queries = append(f.queries, predictor.Query{Prompt: request.Prompt - generatedBefore, Age: request.Age, Key: request.Key})
	}
	if n := len(f.queries); n > cap(f.answers) { // grow once, and reuse the memory in later rounds
		f.answers = make([]predictor.Prediction, n, cap(f.queries))
	}
	answers := f.answers[:len(f.queries)]
	p.Predict(f.rules.H, f.queries, answers)
	for i, request := range f.needPrediction {
		e := &f.estimates[request.Slot]
		f.rules.Set(&e.State, answers[i]) // sets r̂
		request.Rhat = f.rhatForPolicy(e)
		if f.scored != nil {
			f.scored.Used(request.Slot, request.ID, request.Age, answers[i])
		}
	}
}

// RecordEnd records in the scored sample that a request has left its rank, and how many tokens its answer has (output). finished is false
// if the answer was cut off and would have become longer.
func (f *Running) RecordEnd(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.scored == nil: // KeepScores was not called, so there is no sample
	case finished:
		f.scored.Finished(slot, id, output)
	default:
		f.scored.Censored(slot, id, output)
	}
}

// Rows returns the scored predictions whose outcomes are known, with these outcomes; nil: nothing is scored.
func (f *Running) Rows() []predictor.Row {
	if f.scored == nil {
		return nil
	}
	return f.scored.Rows()
}

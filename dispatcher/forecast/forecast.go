// Package forecast keeps a prediction for each running request: how many more tokens it will get
// within the horizon, a number of decode steps. The prediction is called r̂, and Rhat in a
// Snapshot.
package forecast

import (
	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// For a policy that reads no predictions, requests in one of scoreEvery slots get predictions all
// the same, to score the predictor. Their horizon is the one that `evenkeel fit` uses, so that the
// scores can be compared with those of the fit file.
const (
	scoreHorizon = 80   // horizon of a scored prediction, in decode steps
	scoreEvery   = 8    // of so many slots, one gets predictions that are only scored
	scoreRows    = 4096 // how many of the latest predictions with known outcomes are kept
)

// Running keeps r̂ of the running requests of one group. Only the goroutine that decides may use
// it.
type Running struct {
	rules        predictor.Rules
	policyReads  bool       // false: only a sample of the requests is predicted
	rulesVersion uint32     // grows when rules or policyReads change; older estimates are predicted anew
	estimates    []estimate // by slot

	scored        *predictor.Live // predictions and outcomes; nil before KeepScores is called
	scoredHorizon int             // horizon of the scored predictions, in steps

	needPrediction []*policy.Request // requests to predict anew in this round; reused
	queries        []predictor.Query
	answers        []predictor.Prediction
}

// estimate is r̂ for the request in one slot.
type estimate struct {
	predictor.State
	id           uint64
	updatedAtAge int32  // age of the request when r̂ was last updated, in tokens
	rulesVersion uint32 // Running.rulesVersion when r̂ was last predicted anew
}

// SetNeeds sets which predictions the policy needs. If they have changed, every request will be
// predicted anew in the next round.
func (f *Running) SetNeeds(n policy.Requirements) {
	reads := n.Predictor != ""
	rules := predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
	if !reads {
		rules = predictor.DefaultRules(scoreHorizon)
	}
	if firstCall := f.rulesVersion == 0; firstCall || rules != f.rules || reads != f.policyReads {
		f.rules, f.policyReads = rules, reads
		f.rulesVersion++
	}
}

// KeepScores makes Running score its predictions from now on. Only a horizon that is more than 1.1
// times the other one starts the sample anew: a horizon that follows the mean output often moves by
// a step, and the sample would never be complete.
func (f *Running) KeepScores() {
	horizon := f.rules.H
	changed := 10*max(horizon, f.scoredHorizon) > 11*min(horizon, f.scoredHorizon)
	if f.scored == nil || changed {
		f.scored, f.scoredHorizon = predictor.NewLive(horizon, scoreRows), horizon
	}
}

// Update updates r̂ of the running requests, whose Age must be up to date, and writes it into their
// Rhat; 0 if the policy reads no predictions.
func (f *Running) Update(workers []policy.Worker, p predictor.Predictor) {
	f.needPrediction = f.needPrediction[:0]
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			request := &running[i]
			if f.policyReads || request.Slot%scoreEvery == 0 {
				f.advance(request)
			} else {
				request.Rhat = 0
			}
		}
	}
	f.predictAll(p)
}

func (f *Running) advance(request *policy.Request) {
	if missing := int(request.Slot) + 1 - len(f.estimates); missing > 0 {
		f.estimates = append(f.estimates, make([]estimate, missing)...)
	}
	e := &f.estimates[request.Slot]
	predictAnew := true
	if e.id == request.ID && e.rulesVersion == f.rulesVersion {
		predictAnew = f.rules.Advance(&e.State, e.updatedAtAge, request.Age)
	} else { // the request is new in this slot, or the rules have changed
		*e = estimate{id: request.ID, rulesVersion: f.rulesVersion}
	}
	e.updatedAtAge = request.Age
	if predictAnew {
		f.needPrediction = append(f.needPrediction, request)
	}
	// If the request must be predicted anew, predictAll replaces Rhat before the policy reads it.
	request.Rhat = f.rhatForPolicy(e)
}

// rhatForPolicy returns 0, which means unknown, if the policy reads no predictions.
func (f *Running) rhatForPolicy(e *estimate) float32 {
	if !f.policyReads {
		return 0
	}
	return e.Rhat
}

// predictAll asks the predictor about all requests in needPrediction in one call.
func (f *Running) predictAll(p predictor.Predictor) {
	if len(f.needPrediction) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, request := range f.needPrediction {
		generatedBefore := request.Age - request.Generated // tokens from earlier ranks are part of Prompt
		f.queries = append(f.queries, predictor.Query{Prompt: request.Prompt - generatedBefore, Age: request.Age, Key: request.Key})
	}
	if n := len(f.queries); n > cap(f.answers) { // grows once
		f.answers = make([]predictor.Prediction, n, cap(f.queries))
	}
	answers := f.answers[:len(f.queries)]
	p.Predict(f.rules.H, f.queries, answers)
	for i, request := range f.needPrediction {
		e := &f.estimates[request.Slot]
		f.rules.Set(&e.State, answers[i])
		request.Rhat = f.rhatForPolicy(e)
		if f.scored != nil {
			f.scored.Used(request.Slot, request.ID, request.Age, answers[i])
		}
	}
}

// RecordEnd records how many tokens the answer has (output); finished is false if it was cut off.
func (f *Running) RecordEnd(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.scored == nil:
	case finished:
		f.scored.Finished(slot, id, output)
	default:
		f.scored.Censored(slot, id, output)
	}
}

// Rows returns the scored predictions whose outcomes are known; nil: nothing is scored.
func (f *Running) Rows() []predictor.Row {
	if f.scored == nil {
		return nil
	}
	return f.scored.Rows()
}

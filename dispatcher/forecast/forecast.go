// Package forecast keeps a prediction for each running request: how many tokens the request will still get within the horizon. The
// prediction is called r̂, and Rhat in a Snapshot.
package forecast

import (
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// A policy that reads only the mean output needs no predictions. To score the predictor nevertheless, one of scoreEvery slots gets
// predictions that only serve this purpose. Their horizon is the one that `evenkeel fit` uses, so that the scores can be compared with
// those of the fit file.
const (
	scoreHorizon = 80   // steps
	scoreEvery   = 8    // slots
	scoreRows    = 4096 // predictions with outcomes that are kept
)

// Running keeps r̂ of the running requests of one group. In each round, it updates r̂ by the tokens that were generated since the last
// round, and asks the predictor once for all requests that need a new prediction. Only the goroutine that decides may use it.
type Running struct {
	rules        predictor.Rules
	policyReads  bool       // the policy reads r̂; false: a sample of the requests is predicted, only to be scored
	rulesVersion uint32     // it grows when rules or policyReads change; a request whose r̂ is of another version is predicted anew
	estimates    []estimate // by slot

	scored        *predictor.Live // sample of predictions and their outcomes; nil: none is kept, before KeepScores is called and in a clone
	scoredHorizon int             // horizon of these predictions, in steps

	needPrediction []*policy.Request // requests that must be predicted anew in this round
	queries        []predictor.Query
	answers        []predictor.Prediction
}

// estimate is r̂ of the request in a slot.
type estimate struct {
	predictor.State
	id           uint64
	updatedAtAge int32  // tokens that the request had when r̂ was last updated
	rulesVersion uint32 // Running.rulesVersion under which r̂ last began anew
}

// SetNeeds sets what the policy needs. If this has changed, every request will be predicted anew.
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

// KeepScores makes Running score its predictions from now on. If the horizon has changed by more than a tenth, the sample of predictions
// starts anew. Smaller changes do not count: a horizon that follows the mean output often moves by a step, so the sample would never be
// complete.
func (f *Running) KeepScores() {
	horizon := f.rules.H
	changed := 10*max(horizon, f.scoredHorizon) > 11*min(horizon, f.scoredHorizon) // by more than a tenth
	if f.scored == nil || changed {
		f.scored, f.scoredHorizon = predictor.NewLive(horizon, scoreRows), horizon
	}
}

// Update updates r̂ of the running requests, whose Age must be up to date, and sets their Rhat. If the policy does not read r̂, Update sets
// Rhat to 0 and updates only the sample that is scored.
func (f *Running) Update(workers []policy.Worker, p predictor.Predictor) {
	f.needPrediction = f.needPrediction[:0]
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			request := &running[i]
			if f.policyReads || request.Slot%scoreEvery == 0 { // or it is in the sample whose predictions are scored
				f.advance(request)
			} else {
				request.Rhat = 0
			}
		}
	}
	f.predictAll(p)
}

// advance updates r̂ of one request to its age and sets its Rhat. If the
// request must be predicted anew, advance adds it to needPrediction.
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
	request.Rhat = f.visibleRhat(e)
}

// visibleRhat returns r̂ of a request as the policy sees it: 0 (unknown) if the policy does not read predictions.
func (f *Running) visibleRhat(e *estimate) float32 {
	if !f.policyReads {
		return 0
	}
	return e.Rhat
}

// predictAll asks the predictor, in one call, about all requests in needPrediction. The answers start their r̂ anew and set their Rhat.
// They also go to the sample that is scored.
func (f *Running) predictAll(p predictor.Predictor) {
	if len(f.needPrediction) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, request := range f.needPrediction {
		generatedBefore := request.Age - request.Generated // on earlier ranks: these tokens are a part of Prompt
		f.queries = append(f.queries, predictor.Query{Prompt: request.Prompt - generatedBefore, Age: request.Age, Key: request.Key})
	}
	if n := len(f.queries); n > cap(f.answers) { // the memory is kept for later rounds
		f.answers = make([]predictor.Prediction, n, cap(f.queries))
	}
	answers := f.answers[:len(f.queries)]
	p.Predict(f.rules.H, f.queries, answers)
	for i, request := range f.needPrediction {
		e := &f.estimates[request.Slot]
		f.rules.Set(&e.State, answers[i])
		request.Rhat = f.visibleRhat(e)
		if f.scored != nil {
			f.scored.Used(request.Slot, request.ID, request.Age, answers[i])
		}
	}
}

// RecordEnd gives the outcome of a request that has left its rank to the sample that is scored: how many tokens its answer has (output).
// finished is false if the answer was cut off and would have become longer.
func (f *Running) RecordEnd(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.scored == nil: // no prediction waits for its outcome
	case finished:
		f.scored.Finished(slot, id, output)
	default:
		f.scored.Censored(slot, id, output)
	}
}

// Rows returns the predictions whose outcomes are known, with these outcomes.
func (f *Running) Rows() []predictor.Row {
	if f.scored == nil {
		return nil
	}
	return f.scored.Rows()
}

// Clone returns a copy without the scores, because the status reads only those of the original.
func (f *Running) Clone() Running {
	return Running{rules: f.rules, policyReads: f.policyReads, rulesVersion: f.rulesVersion, estimates: slices.Clone(f.estimates)}
}

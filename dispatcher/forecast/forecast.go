// Package forecast keeps a prediction r̂ for each running request: how many tokens the request will still get within the horizon.
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
	rules  predictor.Rules
	reads  bool   // the policy reads r̂; false: a sample of the requests is predicted, only to be scored
	era    uint32 // it grows when rules or reads change; a request whose r̂ is from another era is predicted anew
	bySlot []tracked

	scored        *predictor.Live // sample of predictions and their outcomes; nil: none is kept, before Score is called and in a clone
	scoredHorizon int             // horizon of these predictions, in steps

	due     []*policy.Request // requests that must be predicted anew in this round
	queries []predictor.Query
	answers []predictor.Prediction
}

// tracked is r̂ of the request in a slot.
type tracked struct {
	predictor.State
	id  uint64
	age int32  // tokens that the request had when r̂ was last updated
	era uint32 // Running.era in which r̂ last began anew
}

// Demand sets what the policy needs. If this has changed, every request will be predicted anew.
func (f *Running) Demand(n policy.Requirements) {
	reads := n.Predictor != ""
	rules := predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
	if !reads {
		rules = predictor.DefaultRules(scoreHorizon)
	}
	if first := f.era == 0; first || rules != f.rules || reads != f.reads {
		f.rules, f.reads = rules, reads
		f.era++
	}
}

// Score makes Running score its predictions from now on. If the horizon has changed by more than a tenth, the sample of predictions starts
// anew. Smaller changes do not count: a horizon that follows the mean output often moves by a step, so the sample would never be complete.
func (f *Running) Score() {
	if h := f.rules.H; f.scored == nil || 10*max(h, f.scoredHorizon) > 11*min(h, f.scoredHorizon) {
		f.scored, f.scoredHorizon = predictor.NewLive(h, scoreRows), h
	}
}

// Follow updates r̂ of the running requests, whose Age must be up to date, and sets their Rhat. If the policy does not read r̂, Follow sets
// Rhat to 0 and follows only the sample that is scored.
func (f *Running) Follow(workers []policy.Worker, p predictor.Predictor) {
	f.due = f.due[:0]
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			if request := &running[i]; f.reads || request.Slot%scoreEvery == 0 {
				f.advance(request)
			} else {
				request.Rhat = 0
			}
		}
	}
	f.predictDue(p)
}

// advance updates r̂ of one request to its age and sets its Rhat. It adds the request to f.due if it must be predicted anew.
func (f *Running) advance(request *policy.Request) {
	if missing := int(request.Slot) + 1 - len(f.bySlot); missing > 0 {
		f.bySlot = append(f.bySlot, make([]tracked, missing)...)
	}
	t := &f.bySlot[request.Slot]
	due := true
	if t.id == request.ID && t.era == f.era {
		due = f.rules.Advance(&t.State, t.age, request.Age)
	} else { // the request is new in this slot, or the rules have changed
		*t = tracked{id: request.ID, era: f.era}
	}
	t.age = request.Age
	if due {
		f.due = append(f.due, request)
	}
	request.Rhat = f.visibleRhat(t)
}

// visibleRhat returns r̂ of a request as the policy sees it: 0 (unknown) if the policy does not read predictions.
func (f *Running) visibleRhat(t *tracked) float32 {
	if !f.reads {
		return 0
	}
	return t.Rhat
}

// predictDue asks the predictor, in one call, about all requests in f.due. The answers start their r̂ anew and set their Rhat. They also go
// to f.scored.
func (f *Running) predictDue(p predictor.Predictor) {
	if len(f.due) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, request := range f.due {
		generatedBefore := request.Age - request.Generated // on earlier ranks: these tokens are a part of Prompt
		f.queries = append(f.queries, predictor.Query{Prompt: request.Prompt - generatedBefore, Age: request.Age, Key: request.Key})
	}
	if n := len(f.queries); n > cap(f.answers) {
		f.answers = make([]predictor.Prediction, n, cap(f.queries))
	}
	answers := f.answers[:len(f.queries)]
	p.Predict(f.rules.H, f.queries, answers)
	for i, request := range f.due {
		t := &f.bySlot[request.Slot]
		f.rules.Set(&t.State, answers[i])
		request.Rhat = f.visibleRhat(t)
		if f.scored != nil {
			f.scored.Used(request.Slot, request.ID, request.Age, answers[i])
		}
	}
}

// Ended tells f.scored that a request has left its rank with so many tokens of its answer (output). finished is false if the answer was
// cut off and would have become longer.
func (f *Running) Ended(slot int32, id uint64, finished bool, output int32) {
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
	return Running{rules: f.rules, reads: f.reads, era: f.era, bySlot: slices.Clone(f.bySlot)}
}

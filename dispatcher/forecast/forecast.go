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
	rules predictor.Rules
	reads bool   // the policy reads r̂; false: a sample of the requests is predicted, only to be scored
	era   uint32 // it grows when rules or reads change; a request whose life has another era is predicted anew
	lives []life // by slot

	live        *predictor.Live // scores of the predictions; nil: none is scored
	liveHorizon int             // horizon of these predictions, in steps

	due     []*policy.Request
	queries []predictor.Query
	answers []predictor.Prediction
}

// life is r̂ of one request, with the age of the request, in tokens, at the time of r̂.
type life struct {
	predictor.State
	id  uint64
	age int32
	era uint32
}

// Demand sets what the policy needs. If this has changed, every request will be predicted anew.
func (f *Running) Demand(n policy.Requirements) {
	reads := n.Predictor != ""
	rules := predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
	if !reads {
		rules = predictor.DefaultRules(scoreHorizon)
	}
	if f.era == 0 || rules != f.rules || reads != f.reads {
		f.rules, f.reads = rules, reads
		f.era++
	}
}

// Score makes Running score its predictions from now on. If the horizon has changed by more than a tenth, the sample of predictions starts
// anew. Smaller changes do not count: a horizon that follows the mean output often moves by a step, so the sample would never be complete.
func (f *Running) Score() {
	if h := f.rules.H; f.live == nil || 10*max(h, f.liveHorizon) > 11*min(h, f.liveHorizon) {
		f.live, f.liveHorizon = predictor.NewLive(h, scoreRows), h
	}
}

// Follow sets Rhat of the running requests. Their Age must be up to date.
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
	f.ask(p)
}

// advance updates r̂ of one request to its age, and adds the request to f.due if it must be predicted anew.
func (f *Running) advance(request *policy.Request) {
	if missing := int(request.Slot) + 1 - len(f.lives); missing > 0 {
		f.lives = append(f.lives, make([]life, missing)...)
	}
	l := &f.lives[request.Slot]
	due := true
	if l.id == request.ID && l.era == f.era {
		due = f.rules.Advance(&l.State, l.age, request.Age)
	} else { // the request is new in this slot, or the rules have changed
		*l = life{id: request.ID, era: f.era}
	}
	l.age = request.Age
	if due {
		f.due = append(f.due, request)
	}
	request.Rhat = f.visibleRhat(l)
}

// visibleRhat returns r̂ of a request as the policy sees it: 0 (unknown) if the policy does not read predictions.
func (f *Running) visibleRhat(l *life) float32 {
	if !f.reads {
		return 0
	}
	return l.Rhat
}

// ask predicts all requests in f.due in one batch.
func (f *Running) ask(p predictor.Predictor) {
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
		l := &f.lives[request.Slot]
		f.rules.Set(&l.State, answers[i])
		request.Rhat = f.visibleRhat(l)
		if f.live != nil {
			f.live.Used(request.Slot, request.ID, request.Age, answers[i])
		}
	}
}

// Ended scores the predictions about a request that has left its rank, by the number of tokens of its answer.
func (f *Running) Ended(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.live == nil:
	case finished:
		f.live.Finished(slot, id, output)
	default:
		f.live.Censored(slot, id, output)
	}
}

// Rows returns the predictions whose outcomes are known, with these outcomes.
func (f *Running) Rows() []predictor.Row {
	if f.live == nil {
		return nil
	}
	return f.live.Rows()
}

// Clone returns a copy without the scores, because the status reads only those of the original.
func (f *Running) Clone() Running {
	return Running{rules: f.rules, reads: f.reads, era: f.era, lives: slices.Clone(f.lives)}
}

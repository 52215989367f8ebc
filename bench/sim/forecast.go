package sim

import (
	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// outlookAfter outputs the survival table is shown to policies (algorithm 2).
const outlookAfter = 50

// rebuildEvery finished requests, tables are built anew (algorithm 5.4).
const rebuildEvery = 64

// forecast gives policies what they need to look ahead: r̂ of every running
// request, and the table of past outputs. It learns from the history before the
// run, then from what finishes.
type forecast struct {
	needs func(policy.Outlook) policy.Needs
	jobs  []job

	active bool // r̂ is predicted
	oracle bool // or known
	rules  predictor.Rules
	learn  *predictor.Online // nil: nothing is to be learned
	fresh  int               // finished since tables were built
	p      predictor.Predictor
	table  policy.Outlook // nil: none

	asked   []asked
	queries []predictor.Query
	answers []predictor.Prediction
}

// asked is a request whose r̂ is due.
type asked struct {
	w *worker
	i int
}

// newForecast prepares what a policy needs. It starts from a fit file, or learns
// from the history; jobs are those of the run.
func newForecast(p policy.Policy, fit *predictor.Fit, history []arrival, jobs []job) (*forecast, error) {
	f := &forecast{needs: func(o policy.Outlook) policy.Needs { return policy.NeedsOf(p, o) }, jobs: jobs, p: predictor.None{}}
	n := f.needs(nil)
	if n.Predictor == "" && n.Outlook == "" {
		return f, nil
	}
	kind := predictor.Kind(n.Predictor)
	f.oracle = kind == predictor.KindOracle
	f.active = kind != "" && !f.oracle
	switch {
	case !f.active && n.Outlook == string(predictor.KindExact):
		kind = predictor.KindExact
	case !f.active:
		kind = predictor.KindSurvival
	}
	cfg := predictor.OnlineConfig{Kind: kind, Horizon: n.Horizon, Fit: fit}
	if kind == predictor.KindLearned && fit == nil {
		var err error
		if cfg.Fit, err = predictor.Train(string(kind), samples(history), predictor.Options{Horizon: n.Horizon, Tau: n.Tau, Every: n.Every}); err != nil {
			return nil, err
		}
	}
	var err error
	if f.learn, err = predictor.NewOnline(cfg); err != nil {
		return nil, err
	}
	if fit == nil {
		for i := range history {
			a := &history[i]
			f.learn.Finished(a.prompt, a.output, a.key)
		}
	}
	f.rebuild(n)
	return f, nil
}

// samples are a history as a fit reads it.
func samples(history []arrival) []predictor.Sample {
	out := make([]predictor.Sample, len(history))
	for i, a := range history {
		out[i] = predictor.Sample{At: millis(a.at - history[0].at), Prompt: a.prompt, Output: a.output, Key: a.key}
	}
	return out
}

// rebuild takes new tables into force.
func (f *forecast) rebuild(n policy.Needs) {
	f.fresh = 0
	p, table := f.learn.Build()
	if f.active {
		f.p = p
	}
	if n.Outlook != "" && table.Len() >= outlookAfter {
		f.table = table
		switch predictor.Kind(n.Outlook) {
		case predictor.KindOracle:
			f.table = foresight{table, f.jobs}
		case predictor.KindExact:
			if keyed, ok := p.(policy.Keyed); ok {
				f.table = keyed
			}
		}
		n = f.needs(f.table)
	}
	f.rules = predictor.Rules{H: n.Horizon, Tau: n.Tau, Every: n.Every, DecrementAnchor: n.DecrementAnchor}
}

// outlook is the table in force.
func (f *forecast) outlook() policy.Outlook { return f.table }

// ask notes that r̂ of a worker's i-th request is due.
func (f *forecast) ask(w *worker, i int) {
	switch {
	case f.oracle:
		v := &w.view[i]
		v.Rhat = f.known(f.jobs[v.ID-1].output - v.Age)
	case f.active:
		f.asked = append(f.asked, asked{w, i})
	}
}

// known is r̂ of a request with so many tokens left.
func (f *forecast) known(left int32) float32 {
	return float32(min(max(left, 1), int32(f.rules.H)))
}

// flush predicts for all that are due, in one call.
func (f *forecast) flush() {
	if len(f.asked) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, a := range f.asked {
		v := &a.w.view[a.i]
		f.queries = append(f.queries, predictor.Query{Prompt: v.Prompt - (v.Age - v.Generated), Age: v.Age, Key: v.Key})
	}
	for len(f.answers) < len(f.queries) {
		f.answers = append(f.answers, predictor.Prediction{})
	}
	answers := f.answers[:len(f.queries)]
	f.p.Predict(f.rules.H, f.queries, answers)
	for k, a := range f.asked {
		f.rules.Set(&a.w.rhat[a.i], answers[k])
		a.w.view[a.i].Rhat = a.w.rhat[a.i].Rhat
	}
	f.asked = f.asked[:0]
}

// finished learns; it reports whether the horizon changed, when every r̂ is due.
func (f *forecast) finished(q *job) (anew bool) {
	if f.learn == nil {
		return false
	}
	f.learn.Finished(q.prompt-q.age, q.output, q.key)
	if f.fresh++; f.fresh < rebuildEvery {
		return false
	}
	before := f.rules.H
	f.rebuild(f.needs(f.table))
	return f.rules.H != before
}

// foresight is an outlook that knows every request's end.
type foresight struct {
	*predictor.Survival
	jobs []job
}

// Left is how many tokens a request has still to generate.
func (f foresight) Left(id uint64, age int) int {
	return max(1, int(f.jobs[id-1].output)-age)
}

// Package forecast keeps the predictions of the requests that run: r̂, how many tokens each
// will still get within the horizon.
package forecast

import (
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Live scores. A policy that only reads the mean output has no horizon. For it, one slot in scoreEvery gets
// predictions that serve only to be scored, over the horizon that `evenkeel fit` uses, so that the scores
// can be compared with those of the fit file.
const (
	scoreHorizon = 80   // steps
	scoreEvery   = 8    // slots
	scoreRows    = 4096 // outcomes kept
)

// Running keeps r̂ of the running requests of one group. In each tick it
// updates r̂ by the tokens that were generated since the last tick, and asks the
// predictor once for all requests that are due. Only the goroutine that decides uses it.
type Running struct {
	rules predictor.Rules
	reads bool   // the policy reads r̂; false: a sample is predicted only to be scored
	era   uint32 // changes with rules or reads; requests with a life of another era are predicted anew
	lives []life // by slot

	live        *predictor.Live // nil: no prediction is scored
	liveHorizon int             // horizon of live

	due     []*policy.Request
	queries []predictor.Query
	answers []predictor.Prediction
}

// life is r̂ of one request, with the age in tokens at which it was true.
type life struct {
	predictor.State
	id  uint64
	age int32
	era uint32
}

// Demand sets what the policy needs. If that has changed, every
// request is due.
func (f *Running) Demand(n policy.Needs) {
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

// Score makes Running score its predictions from now on. The sample starts anew if the horizon has changed by
// more than a tenth. Smaller changes are ignored, because a horizon that follows the mean output often moves by a step, and
// the sample would never fill.
func (f *Running) Score() {
	if h := f.rules.H; f.live == nil || 10*max(h, f.liveHorizon) > 11*min(h, f.liveHorizon) {
		f.live, f.liveHorizon = predictor.NewLive(h, scoreRows), h
	}
}

// Follow sets Rhat of the running requests. Their ages must be up to date.
func (f *Running) Follow(workers []policy.Worker, p predictor.Predictor) {
	f.due = f.due[:0]
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			if q := &running[i]; f.reads || q.Slot%scoreEvery == 0 {
				f.advance(q)
			} else {
				q.Rhat = 0
			}
		}
	}
	f.ask(p)
}

// advance updates r̂ of one request to its age, and adds the request to f.due if it must be predicted anew.
func (f *Running) advance(q *policy.Request) {
	if grow := int(q.Slot) + 1 - len(f.lives); grow > 0 {
		f.lives = append(f.lives, make([]life, grow)...)
	}
	l := &f.lives[q.Slot]
	due := true
	if l.id == q.ID && l.era == f.era {
		due = f.rules.Advance(&l.State, l.age, q.Age)
	} else {
		*l = life{id: q.ID, era: f.era}
	}
	l.age = q.Age
	if due {
		f.due = append(f.due, q)
	}
	q.Rhat = f.visibleRhat(l)
}

// visibleRhat returns r̂ of a request as the policy sees it: 0 (unknown) if the policy does not read predictions.
func (f *Running) visibleRhat(l *life) float32 {
	if !f.reads {
		return 0
	}
	return l.Rhat
}

// ask predicts all requests that are due in one batch.
func (f *Running) ask(p predictor.Predictor) {
	if len(f.due) == 0 {
		return
	}
	f.queries = f.queries[:0]
	for _, q := range f.due {
		f.queries = append(f.queries, predictor.Query{Prompt: q.Prompt - (q.Age - q.Generated), Age: q.Age, Key: q.Key})
	}
	if n := len(f.queries); n > cap(f.answers) {
		f.answers = make([]predictor.Prediction, n, cap(f.queries))
	}
	answers := f.answers[:len(f.queries)]
	p.Predict(f.rules.H, f.queries, answers)
	for i, q := range f.due {
		l := &f.lives[q.Slot]
		f.rules.Set(&l.State, answers[i])
		q.Rhat = f.visibleRhat(l)
		if f.live != nil {
			f.live.Used(q.Slot, q.ID, q.Age, answers[i])
		}
	}
}

// Ended scores the prediction about a request that has left its rank.
func (f *Running) Ended(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.live == nil:
	case finished:
		f.live.Finished(slot, id, output)
	default:
		f.live.Censored(slot, id, output)
	}
}

// Rows returns the predictions that can be scored, with their outcomes.
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

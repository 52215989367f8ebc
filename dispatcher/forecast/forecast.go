// Package forecast keeps what is predicted of the requests that run: r̂, how many tokens each
// will still get within the horizon.
package forecast

import (
	"slices"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Live scores. A policy that reads the mean output names no horizon:
// its predictions are scored over the one `fit` scores at, so that the figures
// compare with the hold-out's, and only one slot in so many is predicted for it.
const (
	scoreHorizon = 80   // steps
	scoreEvery   = 8    // slots
	scoreRows    = 4096 // outcomes kept
)

// Running keeps r̂ of the running requests of one group: it
// moves them on by what was generated since the last tick and asks the
// predictor once for all that are due. The goroutine that decides owns it.
type Running struct {
	rules predictor.Rules
	reads bool   // the policy reads r̂; else a sample is predicted only to be scored
	era   uint32 // a life of another era is asked about anew
	lives []life // by slot

	live  *predictor.Live // nil: nothing is scored
	liveH int

	due     []*policy.Request
	queries []predictor.Query
	answers []predictor.Prediction
}

// life is r̂ of one request, and the age it is of.
type life struct {
	predictor.State
	id  uint64
	age int32
	era uint32
}

// Demand settles what the policy wants. Another horizon or gate makes every
// request due.
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

// Score has the predictions scored from now on. The sample starts anew with
// another horizon; one that follows the mean output moves by a step now and
// then, and a tenth of it is let pass: a sample that never fills says nothing.
func (f *Running) Score() {
	if h := f.rules.H; f.live == nil || 10*max(h, f.liveH) > 11*min(h, f.liveH) {
		f.live, f.liveH = predictor.NewLive(h, scoreRows), h
	}
}

// Follow sets Rhat of the running requests, whose ages are up to date.
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

// advance moves one request on and notes whether it is due.
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
	q.Rhat = f.told(l)
}

// told is r̂ as the policy sees it.
func (f *Running) told(l *life) float32 {
	if !f.reads {
		return 0
	}
	return l.Rhat
}

// ask predicts all that are due in one batch.
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
		q.Rhat = f.told(l)
		if f.live != nil {
			f.live.Used(q.Slot, q.ID, q.Age, answers[i])
		}
	}
}

// Ended scores what was predicted about a request that left.
func (f *Running) Ended(slot int32, id uint64, finished bool, output int32) {
	switch {
	case f.live == nil:
	case finished:
		f.live.Finished(slot, id, output)
	default:
		f.live.Censored(slot, id, output)
	}
}

// Rows are the predictions that were scored, and what became of them.
func (f *Running) Rows() []predictor.Row {
	if f.live == nil {
		return nil
	}
	return f.live.Rows()
}

// Clone is a copy without the scores, which are for people who look at the original.
func (f *Running) Clone() Running {
	return Running{rules: f.rules, reads: f.reads, era: f.era, lives: slices.Clone(f.lives)}
}

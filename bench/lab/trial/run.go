package trial

import (
	"context"
	"errors"
)

// New is a trial of which nothing was played.
func New(e *Engine, loads []*Load, x *Expectation) *Report {
	r := &Report{Format: Format, Version: Version, Engine: e, Expects: x}
	for i, l := range loads {
		p := &Played{Load: l}
		if x != nil && i < len(x.Loads) {
			p.Expected = &x.Loads[i]
		}
		r.Loads = append(r.Loads, p)
	}
	return r
}

// Play plays all loads. Where it ends early, the report says why and has what was played until
// then.
func (r *Report) Play(ctx context.Context, p *Player) {
	var before *Played
	for _, l := range r.Loads {
		err := p.Play(ctx, l, before)
		l.Gain = l.Judge()
		if err != nil {
			r.end(err)
			return
		}
		if before = l; l.Gain == nil {
			r.end(&Early{Says: l.Name + ": too many requests failed in each pair of blocks; look into the engine's log"})
			return
		}
	}
	r.Complete = true
}

// Ended is why the trial is not complete.
func (r *Report) Ended() error { return &Early{r.Why, r.Detail} }

// end says why there is no more.
func (r *Report) end(err error) {
	var early *Early
	switch {
	case errors.As(err, &early):
		r.Why, r.Detail = early.Says, early.Detail
	case errors.Is(err, context.Canceled):
		r.Why = "it was ended by a signal"
	default:
		r.Why, r.Detail = "the load could not be sent", err.Error()
	}
}

// Learned is what evenkeel knew of the steps after the last load in which it knew something.
func (r *Report) Learned() (last *Learned) {
	for _, l := range r.Loads {
		if l.Learned != nil {
			last = l.Learned
		}
	}
	return last
}

// Any says whether a pair of blocks was played.
func (r *Report) Any() bool {
	for _, l := range r.Loads {
		if len(l.Pairs) > 0 {
			return true
		}
	}
	return false
}

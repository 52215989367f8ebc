package fleet

import (
	"time"

	"go.uber.org/zap"
)

// appraise decides for every engine whether it takes requests and how many.
// It is called with f.mu held.
//
// An engine that is out only because requests failed there stays where no other
// serves its model: a request that may fail beats one that must, and the canary
// will tell which it is. One that is halted is in service, and gets nothing until it goes on.
func (f *Fleet) appraise(now time.Time) {
	f.refuseOdd()
	others := map[string]int{} // engines in full service by role and model
	for _, in := range f.instances {
		if in.odd == "" && in.status.Up && in.status.Out == nil && in.status.Accused == nil && !in.status.Halted() && len(in.status.Models) > 0 {
			others[in.kind()]++
		}
	}
	slow := f.host.Settings().Health.SlowStart
	warming := false
	for _, k := range f.order {
		in := f.instances[k]
		s := &in.standing
		serving := in.odd == "" && in.status.Up && (in.status.Halted() || in.status.Out == nil || !in.status.Wedged && len(in.status.Models) > 0 && others[in.kind()] == 0)
		returned := serving && (!s.serving || s.start != 0 && in.status.StartTime != s.start)
		switch {
		case !serving || slow == 0:
			s.fresh = time.Time{}
		case returned && (s.served || now.Sub(f.host.Started) > slow) && f.relieved(in):
			s.fresh = now
			f.host.Log.Info("an engine is back or new; its share of the load grows step by step", zap.String("engine", k), zap.Duration("over", slow))
		}
		s.serving, s.share = serving, 1
		s.paused = in.status.Halted() || in.status.Accused != nil && others[in.kind()] > 0
		if serving {
			s.served, s.start = true, in.status.StartTime
		}
		if !s.fresh.IsZero() {
			if s.share = shareAt(now.Sub(s.fresh), slow); s.share == 1 {
				s.fresh = time.Time{}
			}
			warming = warming || s.share < 1
		}
	}
	if warming && f.host.Context.Err() == nil {
		f.again.Reset(slow / slowSteps)
	}
}

// relieved says whether another engine carries the load meanwhile: without one
// a slow start would only be slow.
func (f *Fleet) relieved(in *instance) bool {
	for _, o := range f.instances {
		if o != in && o.kind() == in.kind() && o.standing.serving && o.standing.fresh.IsZero() {
			return true
		}
	}
	return false
}

package fleet

import (
	"math"
	"time"

	"go.uber.org/zap"
)

// standing is an engine's place in the service, as last published. What runs on
// it and what is charged for that depends on none of it.
type standing struct {
	serving bool    // takes requests, drains aside
	paused  bool    // but nothing new for a moment: what failed there is not settled
	served  bool    // did once
	start   float64 // of the process that serves
	fresh   time.Time
	share   float64 // of its slots that may be used now; below 1 while it is fresh
	odd     string  // why it cannot serve beside the others of its model; empty: it can

	deserted bool // it is down, and another engine could have its probes
}

// appraise decides for every engine whether it takes requests and how many.
// It is called with f.mu held.
//
// An engine that is out only because requests failed there stays where no other
// serves its model: a request that may fail beats one that must, and the canary
// will tell which it is.
func (f *Fleet) appraise(now time.Time) {
	f.refuseOdd()
	others := map[string]int{} // engines in full service by role and model
	for _, in := range f.instances {
		if in.odd == "" && in.status.Up && in.status.Out == nil && in.status.Accused == nil && len(in.status.Models) > 0 {
			others[in.kind()]++
		}
	}
	slow := f.host.Settings().Health.SlowStart
	warming := false
	for _, k := range f.order {
		in := f.instances[k]
		s := &in.standing
		serving := in.odd == "" && in.status.Up && (in.status.Out == nil || !in.status.Wedged && len(in.status.Models) > 0 && others[in.kind()] == 0)
		returned := serving && (!s.serving || s.start != 0 && in.status.StartTime != s.start)
		switch {
		case !serving || slow == 0:
			s.fresh = time.Time{}
		case returned && (s.served || now.Sub(f.host.Started) > slow) && f.relieved(in):
			s.fresh = now
			f.host.Log.Info("engine is back or new: its share of the load grows step by step", zap.String("engine", k), zap.Duration("over", slow))
		}
		s.serving, s.share = serving, 1
		s.paused = in.status.Accused != nil && others[in.kind()] > 0
		if serving {
			s.served, s.start = true, in.status.StartTime
		}
		if !s.fresh.IsZero() {
			if s.share = shareAt(now.Sub(s.fresh), slow); s.share == 1 {
				s.fresh = time.Time{}
			}
			warming = warming || s.share < 1
		}
		f.slowStart.WithLabelValues(k, in.role).Set(s.share)
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

const (
	firstShare = 0.1 // of its slots an engine gets at once
	slowSteps  = 30  // of a slow start
	slowProbes = 8   // unanswered probes a prefill engine may have at the end of one
)

// shareAt is the share of an engine that is in service for so long.
func shareAt(age, slow time.Duration) float64 {
	return min(1, firstShare+(1-firstShare)*max(0, age.Seconds())/slow.Seconds())
}

// limit is how much of n the engine gets now; 0: all.
func (s standing) limit(n int) int {
	if s.share >= 1 {
		return 0
	}
	return max(1, int(math.Ceil(s.share*float64(n))))
}

// kind is what engines that can stand in for each other have in common.
func (i *instance) kind() string {
	if len(i.status.Models) == 0 {
		return i.role
	}
	return i.role + " " + boardOf(i.status.Models)
}

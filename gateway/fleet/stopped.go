package fleet

import (
	"fmt"
	"slices"
	"time"

	"evenkeel/gateway/owner"
)

// stopped is an engine, or one rank of it, that gets no new work.
type stopped struct {
	role, id string // host:port, of a rank with /rank behind it
	at       Place  // rank -1: all of the engine
	since    time.Time
	deadline time.Time // zero: what runs may take any time
	timer    *time.Timer
	passed   bool // the deadline has; what comes late goes on elsewhere at once
}

func (s *stopped) covers(at Place) bool {
	return s.at.Instance == at.Instance && (s.at.Rank < 0 || s.at.Rank == max(0, at.Rank))
}

func (s *stopped) key() string { return s.role + " " + s.id }

func (s *stopped) stopTimer() {
	if s.timer != nil {
		s.timer.Stop()
	}
}

// accepts says whether a rank gets new work, as far as drains, owners and discovery go; -1: any rank of
// the engine. It is called with f.mu held.
func (f *Fleet) accepts(in *instance, r int) bool {
	if in.away != "" || in.odd != "" || f.stops[in.key()] != nil || f.Admission.Has(owner.Regions) && !f.Admission.Admits(f.scopeOf(in)) {
		return false
	}
	if r >= 0 {
		return f.stops[fmt.Sprintf("%s/%d", in.key(), r)] == nil
	}
	return len(f.stops) == 0 || slices.ContainsFunc(ranksOf(in), func(r int) bool { return r < 0 || f.accepts(in, r) })
}

// overdue says whether the deadline of a drain has passed that covers a place.
func (f *Fleet) overdue(at Place) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, s := range f.stops {
		if s.passed && s.covers(at) {
			return true
		}
	}
	return false
}

// abandon forgets the drains of an engine that is gone, but for those whose
// deadline will end what still runs there. It is called with f.mu held.
func (f *Fleet) abandon(key string) {
	for k, s := range f.stops {
		if s.at.Instance == key && (s.timer == nil || s.passed) {
			delete(f.stops, k)
		}
	}
}

// resume forgets the drains that are meant.
func (f *Fleet) resume(meant func(*stopped) bool) (found bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, s := range f.stops {
		if meant(s) {
			s.stopTimer()
			delete(f.stops, key)
			found = true
		}
	}
	return found
}

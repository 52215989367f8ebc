package fleet

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
)

// DrainStatus is what is left on an engine or rank that drains.
type DrainStatus struct {
	ID       string     `json:"id"` // host:port, or host:port/rank
	Role     string     `json:"role"`
	Since    time.Time  `json:"since"`
	Deadline *time.Time `json:"deadline,omitempty"`
	State    string     `json:"state"`     // draining; done; deadline: past it, and something is left all the same
	Requests int        `json:"requests"`  // that it works on
	KVTokens int64      `json:"kv_tokens"` // that they hold
	Handoffs int        `json:"handoffs"`  // finished prefills that wait here for decode
}

// States of a drain.
const (
	drainRuns    = "draining"
	drainEnded   = "done"
	drainOverdue = "deadline"
)

// Drain stops new work for an engine, host:port, or for one of its ranks,
// host:port/rank. With a limit above 0 what still runs then goes on elsewhere
// where it can, and ends with an error event where it cannot; finished prefills
// are decoded all the same. A second call sets another limit. When it returns
// nothing is bound there any more; what was is among the requests of its status.
func (f *Fleet) Drain(role, id string, limit time.Duration) error {
	s, err := f.find(role, id)
	if err != nil {
		return err
	}
	f.mu.Lock()
	if old := f.stops[s.key()]; old != nil {
		old.stopTimer()
		s.since = old.since
	}
	if limit > 0 {
		s.deadline = time.Now().Add(limit)
		s.timer = time.AfterFunc(limit, func() { f.overtime(s) })
	}
	f.stops[s.key()] = s
	f.mu.Unlock()
	f.Publish()
	return nil
}

// Undrain has an engine or rank take work again.
func (f *Fleet) Undrain(role, id string) error {
	s, err := f.find(role, id)
	if err != nil {
		return err
	}
	if !f.resume(func(o *stopped) bool { return o.key() == s.key() }) {
		return fmt.Errorf("%w: %s %s does not drain", ErrNoSuchEngine, s.role, s.id)
	}
	f.Publish()
	return nil
}

// find reads an id as operators write it; role may be empty where only one side
// has the engine, and means decode where both do.
func (f *Fleet) find(role, id string) (*stopped, error) {
	engine, number, ofRank := strings.Cut(id, "/")
	f.mu.RLock()
	defer f.mu.RUnlock()
	if role == "" {
		role = Decode
		for _, other := range []string{Prefill, Aggregated} {
			if f.instances[role+" "+engine] == nil && f.instances[other+" "+engine] != nil {
				role = other
			}
		}
	}
	in := f.instances[role+" "+engine]
	if in == nil {
		return nil, fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, engine)
	}
	s := &stopped{role: role, id: engine, at: Place{in.key(), -1}, since: time.Now()}
	if !ofRank {
		return s, nil
	}
	ranks := ranksOf(in)
	at := slices.IndexFunc(ranks, func(r int) bool { return fmt.Sprint(max(0, r)) == number })
	if at < 0 {
		return nil, fmt.Errorf("%w: %s %s has ranks 0 to %d", ErrNoSuchEngine, role, engine, len(ranks)-1)
	}
	if len(ranks) > 1 { // else it is the engine
		s.id, s.at.Rank = id, at
	}
	return s, nil
}

// overtime ends what runs at the deadline of a drain.
func (f *Fleet) overtime(s *stopped) {
	f.mu.Lock()
	current := f.stops[s.key()] == s
	s.passed = current
	if f.instances[s.at.Instance] == nil {
		f.abandon(s.at.Instance)
	}
	f.mu.Unlock()
	if current {
		n := f.Move(s.covers)
		f.host.Log.Info("the drain's deadline has passed; answers that still run go on elsewhere, or end",
			zap.String("engine", s.id), zap.String("role", s.role), zap.Int("calls", n))
	}
}

// StopTimers ends the wait for deadlines, once the proxy itself ends.
func (f *Fleet) StopTimers() {
	f.resume(func(*stopped) bool { return true })
}

// Drains reports every engine and rank that drains, oldest first.
func (f *Fleet) Drains(decode board.Status, tier []prefill.CandidateStatus) []DrainStatus {
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]DrainStatus, 0, len(f.stops))
	for _, s := range f.stops {
		d := DrainStatus{ID: s.id, Role: s.role, Since: s.since, State: drainRuns}
		if !s.deadline.IsZero() {
			d.Deadline = new(s.deadline)
		}
		for _, c := range tier {
			if s.role == Prefill && (c.ID == s.id || s.at.Rank < 0 && c.Instance == s.at.Instance) {
				d.Requests += c.Inflight
				d.KVTokens += c.KVTokens
				d.Handoffs += c.Pooled + c.Dispatched
			}
		}
		for _, m := range decode.Models {
			for _, w := range m.Workers {
				if s.role != Prefill && (w.Name == s.id || s.at.Rank < 0 && strings.HasPrefix(w.Name, s.id+"/")) {
					d.Requests += w.Used
					d.KVTokens += w.KVTokens
				}
			}
		}
		switch {
		case d.Requests+d.Handoffs == 0:
			d.State = drainEnded
		case s.passed:
			d.State = drainOverdue
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b DrainStatus) int { return a.Since.Compare(b.Since) })
	return list
}

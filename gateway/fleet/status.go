package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"evenkeel/engine"
)

// mostWhy is how many engines are named that take no requests.
const mostWhy = 8

// EngineStatus is what is known of one engine.
type EngineStatus struct {
	ID       string        `json:"id"` // host:port
	Role     string        `json:"role"`
	URL      string        `json:"url"`
	Group    string        `json:"group,omitempty"`
	Profile  string        `json:"profile"`
	Up       bool          `json:"up"`    // answers its health check
	State    string        `json:"state"` // up, out (requests failed in a row), wedged (a request of one token failed, too), halted (its group re-forms or waits for its recovery, and requests wait for it), down, odd (another connector than its model's); error says why
	Share    float64       `json:"share"` // of its slots that may be used now; below 1 while it is fresh in service
	Draining bool          `json:"draining"`
	Source   string        `json:"source,omitempty"` // that discovered it
	Away     string        `json:"away,omitempty"`   // why it gets no new work by its source: not ready, leaving
	Since    time.Time     `json:"since"`
	Error    string        `json:"error,omitempty"`
	Hangs    bool          `json:"hangs,omitempty"` // its port takes connections, but its last health check got no answer
	Moved    *engine.Moved `json:"moved,omitempty"` // its name has other addresses than before
	Models   []string      `json:"models"`
	Version  string        `json:"version,omitempty"`
	Ranks    int           `json:"ranks"`
	Slots    int           `json:"slots,omitempty"` // per rank
}

// Statuses tells how every engine is.
func (f *Fleet) Statuses() []EngineStatus {
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]EngineStatus, 0, len(f.order))
	for _, k := range f.order {
		in := f.instances[k]
		s := EngineStatus{
			ID: in.id, Role: in.role, URL: in.engine.URL.String(), Group: in.conf.Group, Profile: in.conf.Profile,
			Up: in.status.Up, State: in.status.State(), Share: in.share, Draining: !f.accepts(in, -1), Source: in.source, Away: in.away, Since: in.status.Changed, Version: in.status.Version,
			Hangs: in.status.Hangs, Ranks: len(ranksOf(in)), Slots: in.conf.Slots, Models: []string{},
		}
		why := cmp.Or(in.status.Halt, in.status.Out, in.status.Accused, in.status.LostRanks(), in.status.Err)
		if !in.status.Up || in.status.Hangs { // that it cannot be reached says more than what failed because of it
			why = cmp.Or(in.status.Err, why)
		}
		if why != nil {
			s.Error = why.Error()
		}
		if moved := in.status.Moved; !moved.At.IsZero() {
			s.Moved = &moved
		}
		if in.odd != "" && in.status.Up {
			s.State, s.Error, s.Draining = "odd", in.odd, false
		}
		for _, m := range in.status.Models {
			s.Models = append(s.Models, m.ID)
		}
		list = append(list, s)
	}
	return list
}

// targets addresses every engine.
func (f *Fleet) targets() []*engine.Target {
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]*engine.Target, 0, len(f.order))
	for _, k := range f.order {
		list = append(list, f.instances[k].target(-1))
	}
	return list
}

// Missing are the engines that take no requests, each with its reason.
func (f *Fleet) Missing() []string {
	var all []string
	for _, s := range f.Statuses() {
		why := s.Error
		switch {
		case s.State != "up":
		case s.Away != "":
			why = "where it was discovered, it is said to be " + s.Away
		case s.Draining:
			why = "it drains, or another proxy owns it"
		case len(s.Models) == 0:
			why = cmp.Or(why, "it has not named its models yet")
		default:
			continue
		}
		all = append(all, fmt.Sprintf("%s %s is %s: %s", s.Role, s.ID, s.State, why))
	}
	if more := len(all) - mostWhy; more > 0 {
		all = append(slices.Clip(all[:mostWhy]), fmt.Sprintf("and %d more", more))
	}
	return all
}

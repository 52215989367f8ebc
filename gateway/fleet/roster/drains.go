package roster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/prefill"
)

// ErrNoSuchEngine is the error if an operator names an unknown engine or rank.
var ErrNoSuchEngine = errors.New("no such engine")

// NewDrain returns the drain that an id names: host:port, or host:port/rank. It changes nothing. An
// empty role means the first of decode, prefill and aggregated with that address.
func (p *Snapshot) NewDrain(role, id string, now time.Time) (Drain, error) {
	engine, rankNumber, ofRank := strings.Cut(id, "/")
	if role == "" {
		role = firstRoleAt(p.engines, engine)
	}
	e := p.engines[role+" "+engine]
	if e == nil {
		return Drain{}, fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, engine)
	}
	s := Drain{Role: role, ID: engine, At: Location{e.Key(), NoRank}, Since: now}
	if !ofRank {
		return s, nil
	}
	ranks := e.Ranks()
	// an only rank (-1) counts as rank 0
	isNamed := func(r int) bool { return fmt.Sprint(max(0, r)) == rankNumber }
	index := slices.IndexFunc(ranks, isNamed)
	if index < 0 {
		return Drain{}, fmt.Errorf("%w: %s %s has ranks 0 to %d", ErrNoSuchEngine, role, engine, len(ranks)-1)
	}
	if len(ranks) > 1 { // a drain of the only rank is one of the engine
		s.ID, s.At.Rank = id, ranks[index]
	}
	return s, nil
}

func firstRoleAt(engines map[string]*Engine, address string) string {
	for _, role := range []string{Decode, Prefill, Aggregated} {
		if engines[role+" "+address] != nil {
			return role
		}
	}
	return Decode
}

// HasDrain says whether there is a drain with that key (Drain.Key).
func (p *Snapshot) HasDrain(key string) bool { return p.drains[key] != nil }

// Overdue says whether the deadline of a drain that covers a location has passed.
func (p *Snapshot) Overdue(at Location) bool {
	for _, s := range p.drains {
		if s.Overdue && s.Covers(at) {
			return true
		}
	}
	return false
}

// Withheld says whether an operator or discovery keeps new requests from a location.
func (p *Snapshot) Withheld(at Location) bool {
	for _, s := range p.drains {
		if s.Covers(at) {
			return true
		}
	}
	e := p.engines[at.Instance]
	return e != nil && (e.pausedBy != nil || e.Away != "")
}

// DrainStatus says how much work is left on an engine or rank that drains.
type DrainStatus struct {
	ID       string     `json:"id"` // host:port, or host:port/rank
	Role     string     `json:"role"`
	Since    time.Time  `json:"since"`
	Deadline *time.Time `json:"deadline,omitempty"`
	State    string     `json:"state"`     // draining; done; deadline: the deadline has passed, but some requests are left
	Requests int        `json:"requests"`  // requests that the engine or rank still works on
	KVTokens int64      `json:"kv_tokens"` // KV tokens that these requests hold
	Handoffs int        `json:"handoffs"`  // finished prefills whose KV still waits on the engine or rank for a decode engine
}

const (
	drainRuns    = "draining"
	drainEnded   = "done"
	drainOverdue = "deadline"
)

// DrainStatuses returns the oldest first.
func (p *Snapshot) DrainStatuses(decode board.Status, tier []prefill.CandidateStatus) []DrainStatus {
	list := make([]DrainStatus, 0, len(p.drains))
	for _, s := range p.drains {
		d := DrainStatus{ID: s.ID, Role: s.Role, Since: s.Since, State: drainRuns}
		if !s.Deadline.IsZero() {
			d.Deadline = new(s.Deadline)
		}
		ofEngine := s.At.Rank < 0
		rankPrefix := s.ID + "/"
		for _, c := range tier {
			isCovered := c.ID == s.ID || ofEngine && c.Instance == s.At.Instance
			if s.Role == Prefill && isCovered {
				d.Requests += c.Inflight
				d.KVTokens += c.KVTokens
				d.Handoffs += c.Pooled + c.Dispatched
			}
		}
		for _, m := range decode.Models {
			for _, w := range m.Workers {
				isCovered := w.Name == s.ID || ofEngine && strings.HasPrefix(w.Name, rankPrefix)
				if s.Role != Prefill && isCovered {
					d.Requests += w.Used
					d.KVTokens += w.KVTokens
				}
			}
		}
		switch {
		case d.Requests+d.Handoffs == 0:
			d.State = drainEnded
		case s.Overdue:
			d.State = drainOverdue
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b DrainStatus) int { return a.Since.Compare(b.Since) })
	return list
}

package prefill

import (
	"fmt"
	"slices"

	"evenkeel/prefill/policy"
)

// replaceCandidates lets round-robin continue, for each model, after the candidate that it chose
// last.
func (s *state) replaceCandidates(candidates []Candidate) {
	passedBefore := s.passedByRoundRobin() // read first, because applyConfig changes the order
	for _, c := range s.candidates {
		c.configured = false // applyConfig sets it again for those that stay
	}
	for _, m := range s.models {
		m.candidates = nil
	}
	anyModels, liveWithoutModels := false, false
	for i, given := range candidates {
		c := s.candidates[given.ID]
		if c == nil {
			c = s.newCandidate(given.ID)
			s.candidates[given.ID] = c
		} else if c.configured { // the list names this ID twice
			continue
		}
		s.applyConfig(c, given, i)
		anyModels = anyModels || len(given.Models) > 0
		liveWithoutModels = liveWithoutModels || given.Live && len(given.Models) == 0
	}
	// A live candidate without models may yet name any model. Then a request for an unknown model may
	// succeed later (503, not 404).
	s.modelsUnknown = liveWithoutModels || !anyModels
	for name, m := range s.models {
		m.cursor = cursorAfter(passedBefore[name])
	}
	s.dropUnneeded()
}

func (s *state) dropUnneeded() {
	for _, m := range s.models {
		s.dropModelIfEmpty(m)
	}
	for _, c := range s.candidates {
		s.dropIfUnused(c)
	}
	s.dropGoneModels()
}

func (s *state) newCandidate(id string) *candidate {
	c := &candidate{load: s.ledger.NewLoad(id), cache: s.cache.CachedBlocks(id)}
	if s.cfg.Clock != nil { // the only policy that uses the ring exists in simulations only
		c.ring = policy.Vnodes(id)
	}
	return c
}

// applyConfig also forgets what a candidate that comes back up may have lost, because its engine
// may have restarted.
func (s *state) applyConfig(c *candidate, given Candidate, order int) {
	if given.Live && !c.Live {
		c.load.FailedInRow = 0 // from when the candidate was down
		c.cache.EngineRestarted(s.now)
	}
	c.Candidate, c.order, c.configured = given, order, true
	for _, name := range given.Models {
		m := s.modelOf(name)
		if !slices.Contains(m.candidates, c) { // a candidate may list a model twice
			m.candidates = append(m.candidates, c)
		}
	}
	c.load.SetCapacity(given.CapacityTokens, s.now)
}

func (m *model) needsRankFirst() bool {
	return slices.ContainsFunc(m.candidates, (*candidate).needsRankFirst)
}

// needsRankFirst reports whether a decode rank is chosen for the candidate's requests before their
// prefill.
func (c *candidate) needsRankFirst() bool { return c.Profile != nil && c.Profile.Early() }

func (s *state) queueLimits(m *model) *QueueConfig {
	if m.needsRankFirst() {
		return &s.cfg.Early
	}
	return &s.cfg.Queue
}

// passedByRoundRobin returns, for each model, the candidates that round-robin has passed, the last
// one first.
func (s *state) passedByRoundRobin() map[string][]*candidate {
	passed := map[string][]*candidate{}
	for name, m := range s.models {
		for _, c := range m.candidates {
			if c.order <= m.cursor { // never with cursor -1
				passed[name] = append(passed[name], c)
			}
		}
		slices.Reverse(passed[name])
	}
	return passed
}

// cursorAfter is the position of the candidate that was chosen last and is still configured; -1:
// none.
func cursorAfter(passed []*candidate) int {
	for _, c := range passed {
		if c.configured {
			return c.order
		}
	}
	return -1
}

func (s *state) dropGoneModels() {
	gone := func(name string) bool { return s.models[name] == nil }
	s.fit.DropModels(gone)
	s.cache.DropModels(gone)
}

// dropIfUnused drops a removed candidate without charges. A new candidate may have c's ID by now.
func (s *state) dropIfUnused(c *candidate) {
	unused := !c.configured && c.load.HeldPrompts() == 0
	if unused && s.candidates[c.ID] == c {
		delete(s.candidates, c.ID)
		c.cache.Close()
		s.metrics.dropCandidate(c.ID)
	}
}

// modelOf returns the entry of a model, and makes it if there is none. Another region may serve a
// model that no engine of this region serves.
func (s *state) modelOf(name string) *model {
	m := s.models[name]
	if m == nil {
		m = &model{name: name, cursor: -1, queue: s.queue.ModelQueue(name)}
		s.models[name] = m
	}
	return m
}

func (s *state) dropModelIfEmpty(m *model) {
	if len(m.candidates) == 0 && m.queue.Empty() {
		delete(s.models, m.name)
		s.queue.DropModel(m.name)
	}
}

// checkServable returns an error if no candidate could take a request, however long it waited.
func (s *state) checkServable(r *Request) error {
	name, m := r.Model, s.models[r.Model]
	switch {
	case m == nil || len(m.candidates) == 0:
		if s.modelsUnknown { // an engine may still name this model
			return fmt.Errorf("%w for model %q: its engines have not named their models yet; check engines.prefill and their /v1/models",
				ErrUnavailable, name)
		}
		return fmt.Errorf("%w %q; ask for one that /v1/models lists", ErrModelNotFound, name)
	case !slices.ContainsFunc(m.candidates, func(c *candidate) bool { return (c.Live || c.AnswersLate) && r.reachesRank(c) }):
		return fmt.Errorf("%w for model %q: all %d are down; check their /health", ErrUnavailable, name, len(m.candidates))
	}
	return nil
}

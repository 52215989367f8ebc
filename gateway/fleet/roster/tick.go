package roster

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/owner"
)

// Tick decides the state of each engine. It must be applied after all events of a moment, and when the time that Next returned has passed.
type Tick struct{}

// apply decides the engines' states from pauses, connectors, health and groups, in this order. It also reports drains whose deadline has
// passed.
func (Tick) apply(r *Roster, a *applying) {
	r.forgetUnresumed(a)
	for _, key := range r.order {
		r.place(r.engines[key])
		r.pause(r.engines[key])
	}
	r.refuseOdd(a)
	r.appraise(a)
	r.breakGroups(a)
	for _, s := range r.drains {
		if !s.Passed && !s.Deadline.IsZero() && !a.now.Before(s.Deadline) {
			overdue := *s
			overdue.Passed = true
			r.drains[s.Key()] = &overdue
			if r.engines[s.At.Instance] == nil { // the engine has left, and the drain was kept only for its deadline
				delete(r.drains, s.Key())
			}
			a.add(Effect{What: DrainOverdue, Stop: &overdue})
		}
	}
	maps.DeleteFunc(r.leftRanks, func(_ int32, l leftRank) bool { return a.now.Sub(l.at) > rankMemory })
}

// Next returns how long to wait for the next Tick if no event comes before: until the deadline of a drain or the next step of a slow start.
// It returns 0 if nothing drains until a deadline and nothing starts slowly. Then only an event makes a Tick.
func (r *Roster) Next(now time.Time) (wait time.Duration) {
	for _, e := range r.engines {
		if e.share < 1 && !e.fresh.IsZero() {
			wait = r.terms.SlowStart / slowSteps
		}
	}
	for _, s := range r.drains {
		if !s.Passed && !s.Deadline.IsZero() {
			if left := max(1, s.Deadline.Sub(now)); wait == 0 || left < wait {
				wait = left
			}
		}
	}
	return wait
}

// place updates the region, scope, board and listed models of an engine. Engines that list the same models share one value of lists.
func (r *Roster) place(e *Engine) {
	e.Scope = r.scopeOf(e, r.owners.Kind)
	e.otherRegion = e.Conf.Region
	if e.otherRegion == r.terms.Region {
		e.otherRegion = ""
	}
	e.fence = r.owners.Scopes[e.Scope].Fence
	if len(e.Status.Models) > 0 {
		e.board = BoardIn(e.homeBoard(), e.otherRegion)
	}
	if slices.Equal(e.listedModels, e.Status.Models) {
		return
	}
	e.listedModels, e.lists = e.Status.Models, nil
	if len(e.listedModels) == 0 {
		return
	}
	names := make([]string, len(e.listedModels))
	for i, m := range e.listedModels {
		names[i] = m.ID
	}
	e.lists = board.NewNames(names)
	for _, other := range r.engines {
		if other != e && other.lists != nil && other.lists.Same(e.lists) {
			e.lists = other.lists
			break
		}
	}
}

// refuseOdd marks engines whose connector differs from that of the other engines of their model, and reports each engine once. Engines with
// different connectors cannot hand KV over to each other, or need the decode rank at different times. The first engine that already serves
// decides the connector of its model, or else the first engine that is up.
func (r *Roster) refuseOdd(a *applying) {
	first := map[string]*Engine{} // the engine that decides the connector, by board
	chooseFirst := func(eligible func(*Engine) bool) {
		for _, k := range r.order {
			if e := r.engines[k]; e.Status.Up && len(e.Status.Models) > 0 && eligible(e) {
				first[e.board] = cmp.Or(first[e.board], e)
			}
		}
	}
	chooseFirst(func(e *Engine) bool { return e.healthy.serves() })
	chooseFirst(func(*Engine) bool { return true })
	for _, k := range r.order {
		e := r.engines[k]
		why, decider := "", first[e.board]
		if decider != nil && len(e.Status.Models) > 0 && config.PairingKey(e.Profile) != config.PairingKey(decider.Profile) {
			why = fmt.Sprintf("its connector is %s (profile %s), and %s engine %s, which has model %s too, has %s (profile %s); all engines of a "+
				"model share one connector",
				e.Profile.Connector, e.Conf.Profile, decider.Role, decider.ID, e.base(), decider.Profile.Connector, decider.Conf.Profile)
		}
		if why != "" && e.odd == "" {
			a.add(Effect{What: Refused, Engine: e, Text: why, Beside: decider.Key()})
		}
		e.odd = why
	}
}

// appraise decides the state of every engine, and the share of its slots that it may use.
func (r *Roster) appraise(a *applying) {
	inService := map[string]int{} // numbers of engines in full service, by kind (role and model)
	for _, e := range r.engines {
		s := &e.Status
		if e.odd == "" && s.Up && s.Out == nil && s.Accused == nil && !s.Halted() && len(s.Models) > 0 {
			inService[e.kind()]++
		}
	}
	slow := r.terms.SlowStart
	for _, k := range r.order {
		e := r.engines[k]
		standing := &e.standing
		healthy := e.health(inService[e.kind()])
		serving := healthy.serves()
		cameUp := !standing.healthy.serves()
		restarted := standing.start != 0 && e.Status.StartTime != standing.start
		newInService := serving && (cameUp || restarted)
		standing.healthy = healthy
		standing.kept = r.keptState(e)
		standing.share = 1
		standing.state = healthy
		if standing.kept != Up {
			standing.state = max(healthy, standing.kept) // of two reasons the one further down in the list of states counts
		}
		switch {
		case !serving || slow == 0:
			standing.fresh = time.Time{}
		// right after the start of the proxy all engines are new, so only an engine that served before starts slowly then
		case newInService && (standing.served || a.now.Sub(r.terms.Started) > slow) && r.hasStandIn(e):
			standing.fresh = a.now
			a.add(Effect{What: StartsSlowly, Engine: e})
		}
		if serving {
			standing.served, standing.start = true, e.Status.StartTime
		}
		if !standing.fresh.IsZero() {
			standing.share = shareAt(a.now.Sub(standing.fresh), slow)
			if standing.share == 1 {
				standing.fresh = time.Time{}
			}
		}
	}
}

// hasStandIn says whether another engine can carry the load while an engine starts slowly. Without one, a slow start would only make
// requests wait.
func (r *Roster) hasStandIn(e *Engine) bool {
	for _, other := range r.engines {
		if other != e && other.kind() == e.kind() && other.healthy.serves() && other.fresh.IsZero() {
			return true
		}
	}
	return false
}

// breakGroups finds the groups in which an engine has served and is down or wedged now. The other engines of such a group report that they
// are well, but their ranks wait in vain for the ranks of the failed engine.
func (r *Roster) breakGroups(a *applying) {
	broken := map[string]bool{}
	for _, k := range r.order {
		e := r.engines[k]
		if errors.Is(e.Status.Err, engine.ErrRetired) { // the engine was taken out of the group, so the other ranks do not wait for it
			e.served = false
		}
		group := e.barrierGroup()
		works := e.Status.Up && (e.Status.Halted() || !e.Status.Wedged) // a halted engine need not compute anything
		if group == "" || !e.served || works {
			continue
		}
		broken[group] = true
		if !r.broken[group] {
			a.add(Effect{What: GroupBroke, Engine: e})
		}
	}
	r.broken = broken
}

// health is the state of an engine as far as it follows from its answers. others is how many engines are in full service for its model and
// role.
//
// An engine at which requests failed stays in service if no other engine serves its model: requests that may fail are better than requests
// that must fail, and the canary request will show whether the engine works. A halted engine is in service, but gets no requests until it
// resumes.
func (e *Engine) health(others int) RankState {
	s := &e.Status
	mayWork := !s.Wedged && len(s.Models) > 0
	out := s.Out != nil && (!mayWork || others > 0)
	accused := s.Accused != nil && others > 0
	switch {
	case !s.Up && (!s.Late || accused):
		return Down
	case e.odd != "":
		return Odd
	case !s.Up:
		return Late
	case s.Halted():
		return Halted
	case out:
		return Out
	case accused:
		return Paused
	case len(s.Models) == 0:
		return Starting
	}
	return Up
}

// keptState is the reason, other than its health, that keeps new requests from an engine: Draining or Unowned; Up: there is none.
func (r *Roster) keptState(e *Engine) RankState {
	switch {
	case e.Away != "" || r.drains[e.Key()] != nil || r.allRanksDrain(e):
		return Draining
	case r.owners.Kind == owner.Regions && !r.owners.admits(e.Scope):
		return Unowned
	}
	return Up
}

// stateOfRank is the state of one rank of an engine; rank -1: the only rank, which has no number. It is the engine's state, unless the rank
// or its group has a reason of its own not to take requests.
func (r *Roster) stateOfRank(e *Engine, rank int) RankState {
	switch {
	case !e.state.serves() && e.state != Late:
		return e.state
	case r.drains[e.rankKey(rank)] != nil:
		return Draining
	case e.Status.Lost[max(0, rank)] != "":
		return Lost
	case !e.Decodes():
		return e.state
	case r.broken[e.barrierGroup()]:
		return Broken
	case !r.owners.admits(e.Scope):
		return Unowned
	}
	return e.state
}

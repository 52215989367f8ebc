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

// Tick must be applied after the events of a moment, and whenever the time of Next is over. It decides the state of
// each engine.
type Tick struct{}

// apply decides, in this order, what follows from pauses, connectors, health and groups, and reports the drains whose deadline has passed.
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
			if r.drains[s.Key()] = &overdue; r.engines[s.At.Instance] == nil {
				delete(r.drains, s.Key())
			}
			a.add(Effect{What: DrainOverdue, Stop: &overdue})
		}
	}
	maps.DeleteFunc(r.leftRanks, func(_ int32, l leftRank) bool { return a.now.Sub(l.at) > rankMemory })
}

// Next is the time until the next deadline of a drain or step of a slow start, when a Tick is due although nothing happens; 0: there is
// none.
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

// place stores the region, scope and board of an engine, and the models that it lists. Engines that list the same
// models share one value of lists.
func (r *Roster) place(e *Engine) {
	e.otherRegion, e.Scope = e.Conf.Region, r.scopeOf(e, r.owners.Kind)
	if e.otherRegion == r.terms.Region {
		e.otherRegion = ""
	}
	if e.fence = r.owners.Scopes[e.Scope].Fence; len(e.Status.Models) > 0 {
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

// refuseOdd marks engines whose connector differs from that of the other engines of their model, and reports each once: no KV could get
// from one to the other, or the decode rank would be chosen too late. The connector of a model is that of an engine that
// serves already, else that of the first engine that is up.
func (r *Roster) refuseOdd(a *applying) {
	first := map[string]*Engine{} // by board
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
		why, model := "", first[e.board]
		if model != nil && len(e.Status.Models) > 0 && config.Manner(e.Profile) != config.Manner(model.Profile) {
			why = fmt.Sprintf("its connector is %s (profile %s), and %s engine %s, which has model %s too, has %s (profile %s); all engines of a "+
				"model share one connector",
				e.Profile.Connector, e.Conf.Profile, model.Role, model.ID, e.base(), model.Profile.Connector, model.Conf.Profile)
		}
		if why != "" && e.odd == "" {
			a.add(Effect{What: Refused, Engine: e, Text: why, Beside: model.Key()})
		}
		e.odd = why
	}
}

// appraise decides the state of every engine, and the share of its slots that it may use.
func (r *Roster) appraise(a *applying) {
	others := map[string]int{} // engines in full service, by role and model
	for _, e := range r.engines {
		if e.odd == "" && e.Status.Up && e.Status.Out == nil && e.Status.Accused == nil && !e.Status.Halted() && len(e.Status.Models) > 0 {
			others[e.kind()]++
		}
	}
	slow := r.terms.SlowStart
	for _, k := range r.order {
		e := r.engines[k]
		standing := &e.standing
		healthy := e.health(others[e.kind()])
		serving := healthy.serves()
		newInService := serving && (!standing.healthy.serves() || standing.start != 0 && e.Status.StartTime != standing.start)
		standing.healthy, standing.kept, standing.share = healthy, r.keptState(e), 1
		if standing.state = healthy; standing.kept != Up {
			standing.state = max(healthy, standing.kept)
		}
		switch {
		case !serving || slow == 0:
			standing.fresh = time.Time{}
		case newInService && (standing.served || a.now.Sub(r.terms.Started) > slow) && r.hasStandIn(e):
			standing.fresh = a.now
			a.add(Effect{What: StartsSlowly, Engine: e})
		}
		if serving {
			standing.served, standing.start = true, e.Status.StartTime
		}
		if !standing.fresh.IsZero() {
			if standing.share = shareAt(a.now.Sub(standing.fresh), slow); standing.share == 1 {
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

// breakGroups finds the groups in which an engine has served and is down or wedged now. The other engines of such a
// group report that they are well, but their ranks wait in vain for the ranks of that engine. They do not wait for an
// engine that was taken out of the group.
func (r *Roster) breakGroups(a *applying) {
	broken := map[string]bool{}
	for _, k := range r.order {
		e := r.engines[k]
		if errors.Is(e.Status.Err, engine.ErrRetired) { // the other ranks do not wait for it, even once its process has ended
			e.served = false
		}
		group := e.barrierGroup()
		if group == "" || !e.served || e.Status.Up && (e.Status.Halted() || !e.Status.Wedged) {
			continue
		}
		if broken[group] = true; !r.broken[group] {
			a.add(Effect{What: GroupBroke, Engine: e})
		}
	}
	r.broken = broken
}

// health is the state of an engine as far as it follows from its answers. others is how many engines are in full
// service for its model and role.
//
// An engine that is out only because requests failed there stays in service if no other engine serves its model: a
// request that may fail is better than one that must, and the canary will show which it is. A halted engine is in
// service, and gets nothing until it goes on.
func (e *Engine) health(others int) RankState {
	s := &e.Status
	switch {
	case !s.Up && (!s.Late || s.Accused != nil && others > 0):
		return Down
	case e.odd != "":
		return Odd
	case !s.Up:
		return Late
	case s.Halted():
		return Halted
	case s.Out != nil && (s.Wedged || len(s.Models) == 0 || others > 0):
		return Out
	case s.Accused != nil && others > 0:
		return Paused
	case len(s.Models) == 0:
		return Starting
	}
	return Up
}

// keptState is what, other than its health, keeps new requests from an engine: Draining or Unowned; Up if nothing
// does.
func (r *Roster) keptState(e *Engine) RankState {
	switch {
	case e.Away != "" || r.drains[e.Key()] != nil || r.allRanksDrain(e):
		return Draining
	case r.owners.Kind == owner.Regions && !r.owners.admits(e.Scope):
		return Unowned
	}
	return Up
}

// stateOfRank is the state of one rank of an engine; rank is -1 for an only rank without a number. It is the engine's state, unless a
// reason of the rank or of its group keeps requests from it.
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

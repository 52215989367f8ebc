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

// Tick decides the state of each engine. It must be applied after all events that happen at the
// same time, and again when the wait of Next is over.
type Tick struct{}

// apply: connectors are compared per board, so boards come first; states follow from pauses and
// connectors, and broken groups from states.
func (Tick) apply(r *Roster, out *effects) {
	for _, key := range r.order {
		r.updateBoard(r.engines[key])
		r.applyPauses(r.engines[key], out)
	}
	r.refuseOddConnectors(out)
	r.updateStates(out)
	r.markBrokenGroups(out)
	r.reportOverdueDrains(out)
	maps.DeleteFunc(r.departedRanks, func(_ int32, l departedRank) bool { return out.now.Sub(l.at) > rankMemory })
}

// reportOverdueDrains makes the runner end the calls that still run.
func (r *Roster) reportOverdueDrains(out *effects) {
	for _, s := range r.drains {
		hasPassed := !s.Deadline.IsZero() && !out.now.Before(s.Deadline)
		if s.Overdue || !hasPassed {
			continue
		}
		overdue := *s // Snapshots have the old value
		overdue.Overdue = true
		r.drains[s.Key()] = &overdue
		if r.engines[s.At.Instance] == nil { // the drain was kept only for its deadline
			delete(r.drains, s.Key())
		}
		out.add(Effect{What: DrainOverdue, Drain: &overdue})
	}
}

// Next returns how long to wait for the next Tick if no event comes before; 0: only an event makes
// one.
func (r *Roster) Next(now time.Time) (wait time.Duration) {
	for _, e := range r.engines {
		if startsSlowly := e.share < 1 && !e.slowStartBegan.IsZero(); startsSlowly {
			wait = r.terms.SlowStart / slowSteps
		}
	}
	for _, s := range r.drains {
		if s.Overdue || s.Deadline.IsZero() {
			continue
		}
		untilDeadline := max(1, s.Deadline.Sub(now)) // 0 would mean no Tick
		if wait == 0 || untilDeadline < wait {
			wait = untilDeadline
		}
	}
	return wait
}

// updateBoard: an engine that names no models now keeps the board of those it named last.
func (r *Roster) updateBoard(e *Engine) {
	e.Scope = r.scopeOf(e, r.owners.Kind)
	e.otherRegion = e.Conf.Region
	if e.otherRegion == r.terms.Region {
		e.otherRegion = ""
	}
	e.ownerScope = r.owners.Scopes[e.Scope].Fence // requests ask it right before they are sent
	if len(e.Status.Models) > 0 {
		e.board = BoardIn(e.homeBoard(), e.otherRegion)
	}
	if !slices.Equal(e.listedModels, e.Status.Models) {
		gone := map[string]bool{}
		for _, m := range e.listedModels {
			gone[m.AdapterName()] = true
		}
		for _, m := range e.Status.Models {
			delete(gone, m.AdapterName())
		}
		e.listedModels = e.Status.Models
		e.lists = r.namesOf(e)
		r.numberWeights(gone)
	}
}

// numberWeights gives a number to the weights of each model that an engine lists, and another to
// those that an engine has just stopped to list: an adapter that comes back under its old name may
// have other weights, of which no prefix cache has KV.
func (r *Roster) numberWeights(gone map[string]bool) {
	numbers := make(map[string]uint32, len(r.weights))
	for _, e := range r.engines {
		for _, m := range e.listedModels {
			name := m.AdapterName()
			if numbers[name] != 0 {
				continue
			}
			numbers[name] = r.weights[name]
			if gone[name] || numbers[name] == 0 {
				r.lastWeights++
				numbers[name] = r.lastWeights
			}
		}
	}
	r.weights = numbers
}

// namesOf returns nil for an engine that has not named its models. Engines with the same models
// share one value.
func (r *Roster) namesOf(e *Engine) *board.Names {
	if len(e.listedModels) == 0 {
		return nil
	}
	names := make([]string, len(e.listedModels))
	for i, m := range e.listedModels {
		names[i] = m.ID
	}
	lists := board.NewNames(names)
	for _, other := range r.engines {
		if other != e && other.lists != nil && other.lists.Same(lists) {
			return other.lists
		}
	}
	return lists
}

// refuseOddConnectors: engines with different connectors cannot hand KV over to each other, or need
// the decode rank at different times. The first engine that already serves decides for its model,
// or else the first that is up.
func (r *Roster) refuseOddConnectors(out *effects) {
	first := map[string]*Engine{} // the engine that decides, by board
	chooseFirst := func(eligible func(*Engine) bool) {
		for _, k := range r.order {
			if e := r.engines[k]; e.Status.Up && len(e.Status.Models) > 0 && eligible(e) {
				first[e.board] = cmp.Or(first[e.board], e)
			}
		}
	}
	chooseFirst(func(e *Engine) bool { return e.byHealth.serves() })
	chooseFirst(func(*Engine) bool { return true })
	for _, k := range r.order {
		e := r.engines[k]
		why, decider := "", first[e.board] // nil if no engine of the board is up
		// without models, the board is not known
		isComparable := decider != nil && len(e.Status.Models) > 0
		if isComparable && config.PairingKey(e.Profile) != config.PairingKey(decider.Profile) {
			why = fmt.Sprintf("its connector is %s (profile %s), and %s engine %s, which has model %s too, has %s (profile %s); all engines of a "+
				"model share one connector",
				e.Profile.Connector, e.Conf.Profile, decider.Role, decider.ID, e.baseModel(), decider.Profile.Connector, decider.Conf.Profile)
		}
		if why != "" && e.connectorConflict == "" { // not reported yet
			out.add(Effect{What: Refused, Engine: e, Why: why, Beside: decider.Key()})
		}
		e.connectorConflict = why
	}
}

// updateStates: an engine at which requests failed may stay in service if no other can replace it,
// so the engines in full service are counted first.
func (r *Roster) updateStates(out *effects) {
	inFullService := map[string]int{} // by workKind
	for _, e := range r.engines {
		if e.isInFullService() {
			inFullService[e.workKind()]++
		}
	}
	for _, k := range r.order {
		e := r.engines[k]
		service := &e.serviceState
		didNotServe := !service.byHealth.serves() // at the last Tick
		lastStart := service.servedStart          // 0: no process served, or it is not known
		restarted := lastStart != 0 && e.Status.StartTime != lastStart
		service.byHealth = e.stateByHealth(inFullService[e.workKind()])
		service.withheld = r.withheldState(e)
		service.state = service.byHealth
		if service.withheld != Up { // the reason further down in the list of states counts
			service.state = max(service.byHealth, service.withheld)
		}
		r.updateSlowStart(e, didNotServe || restarted, out)
	}
}

func (e *Engine) isInFullService() bool {
	return e.Status.State() == engine.Up && len(e.Status.Models) > 0 && e.connectorConflict == ""
}

// updateSlowStart: isNew says that the engine, or its process, did not serve at the last Tick.
func (r *Roster) updateSlowStart(e *Engine, isNew bool, out *effects) {
	service, duration := &e.serviceState, r.terms.SlowStart
	serves := service.byHealth.serves()
	// Right after the proxy's start all engines are new, so only one that served before starts slowly.
	mayStartSlowly := service.hasServed || out.now.Sub(r.terms.Started) > duration
	service.share = 1
	switch {
	case !serves || duration == 0: // 0: the config has no slow start
		service.slowStartBegan = time.Time{}
	case isNew && mayStartSlowly && r.hasStandIn(e):
		service.slowStartBegan = out.now
		out.add(Effect{What: StartsSlowly, Engine: e})
	}
	if serves {
		service.hasServed = true
		service.servedStart = e.Status.StartTime // by which the next Tick sees whether the process is new
	}
	if !service.slowStartBegan.IsZero() {
		service.share = slowStartShare(out.now.Sub(service.slowStartBegan), duration)
		if service.share == 1 {
			service.slowStartBegan = time.Time{}
		}
	}
}

// hasStandIn: without one, a slow start would only make requests wait.
func (r *Roster) hasStandIn(e *Engine) bool {
	for _, other := range r.engines {
		if other != e && other.workKind() == e.workKind() && other.byHealth.serves() && other.slowStartBegan.IsZero() {
			return true
		}
	}
	return false
}

// markBrokenGroups: the other engines of a group in which one is down or wedged report that they
// are well, but their ranks wait in vain.
func (r *Roster) markBrokenGroups(out *effects) {
	broken := map[string]string{}
	for _, k := range r.order {
		e := r.engines[k]
		if errors.Is(e.Status.Err, engine.ErrRetired) { // the other ranks do not wait for it
			e.hasServed = false
		}
		group := e.barrierGroup()
		works := !e.Status.ComputesNothing()
		if group == "" || !e.hasServed || works {
			continue
		}
		broken[group] = cmp.Or(broken[group], e.ID)
		if r.broken[group] == "" { // not reported yet
			out.add(Effect{What: GroupBroke, Engine: e})
		}
	}
	r.broken = broken
	for _, e := range r.engines {
		e.waitsFor = ""
		if e.state.serves() && broken[e.barrierGroup()] != "" {
			e.state, e.waitsFor = Broken, broken[e.barrierGroup()]
		}
	}
}

// stateByHealth: an engine that is accused, or out but not wedged, stays in service if no other
// serves its model: requests that may fail are better than requests that must fail, and the canary,
// a request of one token, will show whether the engine computes. inFullService counts the engines
// that could replace it. The first case that applies counts, because it explains the others.
func (e *Engine) stateByHealth(inFullService int) RankState {
	state, canBeReplaced, namesModels := e.Status.State(), inFullService > 0, len(e.Status.Models) > 0
	// also of a late engine, for which requests wait otherwise
	accused := e.Status.Accused != nil && canBeReplaced
	switch {
	case state == engine.Down, state == engine.Late && accused:
		return Down
	case e.connectorConflict != "":
		return Odd
	case state == engine.Late:
		return Late
	case state == engine.Halted:
		return Halted
	case state == engine.Wedged, state == engine.Out && (!namesModels || canBeReplaced):
		return Out
	case accused:
		return Paused
	case !namesModels:
		return Starting
	}
	return Up
}

// withheldState: if decode groups have owners, ownership concerns only ranks that decode
// (stateOfRank).
func (r *Roster) withheldState(e *Engine) RankState {
	switch {
	case e.Away != "" || r.drains[e.Key()] != nil || r.allRanksDrain(e):
		return Draining
	case r.owners.Kind == owner.Regions && !r.owners.admits(e.Scope):
		return Unowned
	}
	return Up
}

// stateOfRank is the engine's state, unless the rank or its group has a reason of its own, which
// counts if the engine serves or requests wait for it.
func (r *Roster) stateOfRank(e *Engine, rank int) RankState {
	servesOrAwaited := e.state.serves() || e.state.in(Late, Broken)
	switch {
	case !servesOrAwaited:
		return e.state
	case r.drains[e.rankDrainKey(rank)] != nil:
		return Draining
	case e.Status.Lacks(rank):
		return Lost
	case !e.Decodes(): // groups and owners concern only ranks that decode
		return e.state
	case r.broken[e.barrierGroup()] != "":
		return Broken
	case !r.owners.admits(e.Scope):
		return Unowned
	}
	return e.state
}

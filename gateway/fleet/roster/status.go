package roster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"evenkeel/engine"
)

// mostMissing is how many engines Missing names. It only counts the others.
const mostMissing = 8

// EngineStatus says whether an engine answers, which state it is in and why, and which models it
// serves.
type EngineStatus struct {
	ID      string `json:"id"` // host:port
	Role    string `json:"role"`
	URL     string `json:"url"`
	Group   string `json:"group,omitempty"`
	Profile string `json:"profile"`
	Up      bool   `json:"up"` // the engine answers its health check
	// up, out (requests failed in a row), wedged (a request of one token failed, too), halted (the
	// engine is paused, or its group re-forms or waits for its recovery, and requests wait for the
	// engine), down, odd (another connector than its model's); error says why
	State    string        `json:"state"`
	Share    float64       `json:"share"` // share of the engine's slots that may be used now; below 1 during a slow start
	Draining bool          `json:"draining"`
	Source   string        `json:"source,omitempty"` // the source of discovery that found the engine
	Away     string        `json:"away,omitempty"`   // why the engine gets no new work, as its source says: not ready, leaving
	Since    time.Time     `json:"since"`
	Error    string        `json:"error,omitempty"`
	Paused   bool          `json:"paused,omitempty"` // paused by POST /admin/fleet/call; error says since when
	Hangs    bool          `json:"hangs,omitempty"`  // the port accepts connections, but the last health check got no answer
	Moved    *engine.Moved `json:"moved,omitempty"`  // last change of the addresses to which the engine's host name leads; nil: none
	Models   []string      `json:"models"`
	Version  string        `json:"version,omitempty"`
	Ranks    int           `json:"ranks"`
	Slots    int           `json:"slots,omitempty"` // number of slots of each rank
	// KV memory of each rank by its number, as the engine's metrics say it, and where they say so; the
	// config may set another capacity
	Memory engine.Memories `json:"kv_memory,omitempty"`

	OwnedByOther bool `json:"-"` // another proxy owns the engine's region, and only that proxy sends it requests
}

// Statuses returns the status of every engine, in the order of Engines.
func (p *Snapshot) Statuses() []EngineStatus {
	list := make([]EngineStatus, 0, len(p.order))
	for _, e := range p.order {
		s := EngineStatus{
			ID: e.ID, Role: e.Role, URL: e.Target.URL.String(), Group: e.Conf.Group, Profile: e.Conf.Profile,
			Up: e.Status.Up, State: e.Status.State().String(), Share: e.share, Draining: e.withheld == Draining,
			Error: e.details(), Source: e.Source, Away: e.Away, Since: e.Status.Changed, Version: e.Status.Version,
			Paused: e.pausedBy != nil, Hangs: e.Status.Hangs, Ranks: len(e.Ranks()), Slots: e.Conf.Slots, Models: []string{},
			Memory: e.Status.Memories, OwnedByOther: e.withheld == Unowned,
		}
		if moved := e.Status.Moved; !moved.At.IsZero() {
			s.Moved = &moved
		}
		if e.connectorConflict != "" && e.Status.Up { // Status knows nothing of other engines' connectors
			s.State = e.state.String()
		}
		for _, m := range e.Status.Models {
			s.Models = append(s.Models, m.ID)
		}
		list = append(list, s)
	}
	return list
}

// details says more than RankState.Why; empty: there is no more to say.
func (e *Engine) details() string {
	if e.connectorConflict != "" && e.Status.Up {
		return e.connectorConflict
	}
	why := cmp.Or(e.Status.Halt, e.Status.Out, e.Status.Accused, e.Status.LostRanks(), e.Status.Err)
	if !e.Status.Up || e.Status.Hangs { // this explains its other failures
		why = cmp.Or(e.Status.Err, why)
	}
	if why == nil {
		return ""
	}
	return why.Error()
}

// Missing lists the engines that take no requests, each in a sentence with the reason.
func (p *Snapshot) Missing() []string {
	var all []string
	for _, e := range p.order {
		if e.state == Up {
			continue
		}
		why := cmp.Or(e.details(), e.state.Why())
		isWithheld := e.state == e.withheld // then its own failures are not the reason
		if isWithheld {
			why = e.state.Why()
		}
		if e.state == Broken {
			why = fmt.Sprintf("its group %s waits for %s, and all ranks of the group step together", e.Conf.Group, e.waitsFor)
		}
		if e.state == Draining && e.Away != "" {
			why = "where it was discovered, it is said to be " + e.Away
		}
		all = append(all, fmt.Sprintf("%s %s is %s: %s", e.Role, e.ID, e.state, why))
	}
	if more := len(all) - mostMissing; more > 0 {
		all = append(slices.Clip(all[:mostMissing]), fmt.Sprintf("and %d more", more))
	}
	return all
}

// IncompleteGroup names a group whose engines wait for one that is down. An empty model stands for
// any.
func (p *Snapshot) IncompleteGroup(model string) string {
	for _, e := range p.order {
		if e.state == Broken && (model == "" || e.listsModel(model)) {
			return e.Conf.Group
		}
	}
	return ""
}

// EngineStates names the states of a side's engines that list a model, or else of all engines of
// the side.
func (p *Snapshot) EngineStates(model string, decodes bool) string {
	ofModel, ofSide := map[RankState]bool{}, map[RankState]bool{}
	for _, e := range p.order {
		isOfSide := e.Role != Decode
		if decodes {
			isOfSide = e.Decodes()
		}
		if isOfSide {
			ofSide[e.state] = true
			if e.listsModel(model) {
				ofModel[e.state] = true
			}
		}
	}
	if len(ofModel) == 0 {
		ofModel = ofSide
	}
	var names []string
	for _, s := range slices.Sorted(maps.Keys(ofModel)) {
		names = append(names, s.String())
	}
	return strings.Join(names, ", ")
}

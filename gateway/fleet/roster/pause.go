package roster

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"evenkeel/engine"
)

// Pause is an operator's call that has paused the engines of a group. They get no new requests, and
// their requests wait.
type Pause struct {
	Group string    `json:"group"` // decode group; empty: all engines
	Path  string    `json:"path"`  // path of the call that began the pause
	Since time.Time `json:"since"`
	// Left says that a call has resumed the group since, but not all of its engines. Without it,
	// the pause also covers engines that come in.
	Left bool `json:"-"`
}

// pausedEngine belongs to an address, not to the group that a config gives the engine: it lasts
// until a call resumes the engine, or another process has the address. It is replaced, never
// changed.
type pausedEngine struct {
	Pause
	// latest known start time of the process when the pause began, in Unix seconds; 0: not known
	start    float64
	cameInto bool // into a group that was paused already
}

// RestartedInPause says whether a paused engine's process began after the pause, as far as start
// times show.
func (e *Engine) RestartedInPause() bool {
	return e.pausedBy != nil && e.Status.Up && (e.pausedBy.cameInto || e.Status.StartTime > e.pausedBy.start)
}

func (p *Pause) covers(e *Engine) bool { return p.Group == "" || e.InGroup(p.Group) }

// InGroup says whether the engine's ranks decode in a group.
func (e *Engine) InGroup(group string) bool { return e.Decodes() && e.Conf.Group == group }

// OwnedByOther says whether another proxy owns the engine's region, so that a call to all engines
// leaves the engine out.
func (e *Engine) OwnedByOther() bool { return e.withheld == Unowned }

// Text is for people. Call and time are those with which the pause began.
func (p *Pause) Text() string {
	what := "paused"
	if p.Left {
		what = "still paused, because it did not resume with its group;"
	}
	return fmt.Sprintf("%s through POST /admin/fleet/call (%s) at %s", what, p.Path, p.Since.UTC().Format(time.RFC3339))
}

func (p *Pause) String() string {
	if p.Group == "" {
		return "all engines: " + p.Text()
	}
	return "group " + p.Group + ": " + p.Text()
}

// PauseBegun says that a group is paused. A pause that it or an engine has already goes on, with
// its call and its times.
type PauseBegun struct{ Group, Path string }

func (v PauseBegun) apply(r *Roster, out *effects) {
	p := Pause{Group: v.Group, Path: v.Path, Since: out.now}
	if old := r.pauses[v.Group]; old != nil {
		p = *old
	}
	r.pauses[v.Group] = &p
	for _, key := range r.order {
		if e := r.engines[key]; p.covers(e) {
			next := pausedEngine{Pause: p, start: r.latestStart(e.ID)}
			if old := r.paused[e.ID]; old != nil {
				next = *old
				next.Left = false
			}
			r.paused[e.ID] = &next
		}
	}
	out.add(Effect{What: WatchEngines})
}

// latestStart: engines of two roles may share an address.
func (r *Roster) latestStart(address string) (start float64) {
	for _, e := range r.engines {
		if e.ID == address {
			start = max(start, e.Status.StartTime)
		}
	}
	return start
}

// PauseEnded says that a call went to the engines of a group (empty: to all), and that it has
// resumed them, except for those in Unresumed.
type PauseEnded struct {
	Group     string
	Unresumed []string `json:"Left"` // keys of the engines that did not resume
}

// apply: engines of another group, and those paused as part of another group or of all engines,
// stay paused.
func (v PauseEnded) apply(r *Roster, out *effects) {
	resumed := map[string]bool{}
	called := Pause{Group: v.Group}
	maps.DeleteFunc(r.pauses, func(group string, _ *Pause) bool { return v.Group == "" || v.Group == group })
	for _, e := range r.engines {
		resumed[e.ID] = resumed[e.ID] || called.covers(e)
	}
	for key, e := range r.engines {
		if slices.Contains(v.Unresumed, key) || r.pauseOver(e) != nil {
			resumed[e.ID] = false
		}
	}
	for address, p := range r.paused {
		switch {
		case resumed[address]:
			delete(r.paused, address)
			r.endEmptyPause(p.Group)
		case r.pauses[p.Group] == nil && !p.Left:
			left := *p
			left.Left = true
			r.paused[address] = &left
		}
	}
	out.add(Effect{What: WatchEngines})
}

// endEmptyPause: a reload may have given the engines of a group another group, so that no call to
// this group reaches them.
func (r *Roster) endEmptyPause(group string) {
	p := r.pauses[group]
	if p == nil {
		return
	}
	for _, paused := range r.paused {
		if paused.Group == group {
			return
		}
	}
	for _, e := range r.engines {
		if p.covers(e) {
			return
		}
	}
	delete(r.pauses, group)
}

func (r *Roster) pauseOver(e *Engine) (oldest *Pause) {
	for _, p := range r.pauses {
		if p.covers(e) && (oldest == nil || p.Since.Before(oldest.Since)) {
			oldest = p
		}
	}
	return oldest
}

// applyPauses marks an engine as halted while it is paused. A halt for another reason stays, unless
// it is the engine's own report that it is paused: the pause says the same in more detail.
func (r *Roster) applyPauses(e *Engine, out *effects) {
	var byPause *engine.Held
	if errors.As(e.Status.Halt, &byPause) { // decided anew
		e.Status.Halt = nil
	}
	whole, p := r.pauseOver(e), r.paused[e.ID]
	switch {
	case whole != nil && p == nil:
		p = &pausedEngine{Pause: *whole, start: e.Status.StartTime, cameInto: true}
		r.paused[e.ID] = p
		out.add(Effect{What: WatchEngines})
	case whole == nil && p != nil && p.isOver(e):
		delete(r.paused, e.ID)
		p = nil
		out.add(Effect{What: WatchEngines})
	}
	e.pausedBy = p
	hasOtherHalt := e.Status.Halt != nil && !errors.Is(e.Status.Halt, engine.ErrPaused)
	if p != nil && !hasOtherHalt {
		e.Status.Halt = &engine.Held{Why: p.Text()}
	}
}

// isOver says whether the paused process is gone: the start time is later or, if none is known, the
// engine takes no connection.
func (p *pausedEngine) isOver(e *Engine) bool {
	return e.Status.Up && e.Status.StartTime > p.start || p.start == 0 && !e.Status.Up && e.Status.Err != nil
}

// HeldByPause says which pause keeps requests from the engine; nil: none does.
func (e *Engine) HeldByPause() *engine.Held {
	if e.pausedBy == nil {
		return nil
	}
	return &engine.Held{Why: e.pausedBy.Text()}
}

// Pauses returns the oldest first.
func (p *Snapshot) Pauses() []Pause {
	all := make([]Pause, 0, len(p.pauses))
	for _, one := range p.pauses {
		all = append(all, *one)
	}
	for _, e := range p.order {
		if e.pausedBy != nil && e.pausedBy.Left && !slices.Contains(all, e.pausedBy.Pause) {
			all = append(all, e.pausedBy.Pause)
		}
	}
	slices.SortFunc(all, func(a, b Pause) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Group, b.Group)) })
	return all
}

// Paused says whether an operator's call has paused an engine.
func (p *Snapshot) Paused(instance string) bool {
	e := p.engines[instance]
	return e != nil && e.pausedBy != nil
}

// Leaves says whether a call that has failed at an engine shows nothing about it: an operator's
// call has paused the engine, or it is halted while another engine can do its work.
func (p *Snapshot) Leaves(instance string) bool {
	e := p.engines[instance]
	return e != nil && (e.pausedBy != nil || e.Deserted && e.Status.Halted())
}

// Emptied says that engines have dropped their prefix caches or loaded other weights, so no earlier
// KV may be used.
type Emptied struct{ Keys []string }

func (v Emptied) apply(r *Roster, _ *effects) {
	for _, key := range v.Keys {
		if e := r.engines[key]; e != nil {
			r.beginGeneration(e, false)
		}
	}
}

// Caches returns the prefix caches of engines: candidates' IDs for prefill engines, worker ids for
// others.
func (p *Snapshot) Caches(keys []string) (candidates []string, workers []int32) {
	for _, key := range keys {
		e := p.engines[key]
		if e == nil {
			continue
		}
		for _, rank := range e.Ranks() {
			if e.Decodes() {
				name := e.At(rank).ID
				workers = append(workers, p.workers[name])
			} else {
				number := max(0, rank) // an only rank counts as rank 0
				candidates = append(candidates, e.ID+"/"+strconv.Itoa(number))
			}
		}
	}
	return candidates, workers
}

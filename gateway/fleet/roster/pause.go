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

// Pause stops new requests to the engines of a group after an operator's call has paused these engines. Requests wait until the pause ends.
// A Pause that is in force never changes: it is replaced.
type Pause struct {
	Group      string             `json:"group"` // decode group; empty: all engines
	Path       string             `json:"path"`  // path of the call that began the pause
	Since      time.Time          `json:"since"`
	StartTimes map[string]float64 `json:"-"` // start times of the processes when the pause began, by the engines' keys
	Unresumed  map[string]float64 `json:"-"` // by key: start times of engines that did not resume with their group; nil: no resume yet
}

// Restarted says whether a paused engine has a process that began after the pause, as far as start times show. It is false for a nil
// engine.
func (p *Pause) Restarted(e *Engine) bool {
	if e == nil || !p.Covers(e) {
		return false
	}
	pausedStart, wasThere := p.StartTimes[e.Key()] // an engine that was not there came after the pause began
	return e.Status.Up && (!wasThere || e.Status.StartTime != pausedStart)
}

// Covers says whether the pause applies to an engine. After the group has resumed, it applies only to the engines in Unresumed.
func (p *Pause) Covers(e *Engine) bool {
	if p.Unresumed != nil {
		_, isPaused := p.Unresumed[e.Key()]
		return isPaused
	}
	return p.Group == "" || e.InGroup(p.Group)
}

// InGroup says whether the engine's ranks decode in a group.
func (e *Engine) InGroup(group string) bool { return e.Decodes() && e.Conf.Group == group }

// OwnedByOther says whether another proxy owns the engine's region, so that a call to all engines leaves the engine out.
func (e *Engine) OwnedByOther() bool { return e.withheld == Unowned }

// Text says for people by which call the engines are paused, and since when. If the group has resumed since, but the engines that this
// pause covers have not, the text says so. The call and the time are always those with which the pause began.
func (p *Pause) Text() string {
	what := "paused"
	if p.Unresumed != nil {
		what = "still paused, because it did not resume with its group;"
	}
	return fmt.Sprintf("%s through POST /admin/fleet/call (%s) at %s", what, p.Path, p.Since.UTC().Format(time.RFC3339))
}

// String is Text, with the name of the group before it.
func (p *Pause) String() string {
	if p.Group == "" {
		return "all engines: " + p.Text()
	}
	return "group " + p.Group + ": " + p.Text()
}

// PauseBegun says that a group is paused. If the group is already paused, or some of its engines did not resume, the pause keeps the path
// and the time with which it began.
type PauseBegun struct{ Group, Path string }

// apply pauses the group, and makes the monitor watch its engines as paused ones. It records the start time of each engine's process. A
// process that starts later was not there when the pause began, and Pause.Restarted finds it by its start time. If only some engines of the
// group were still paused, because they had not resumed with it, the pause covers all engines again.
func (v PauseBegun) apply(r *Roster, out *effects) {
	next := &Pause{Group: v.Group, Path: v.Path, Since: out.now, StartTimes: map[string]float64{}}
	for key, e := range r.engines { // also of other groups: Restarted looks up only engines that the pause covers
		next.StartTimes[key] = e.Status.StartTime
	}
	// A pause that the group has already goes on, with its times: an engine that has restarted since then counts as restarted.
	if old := r.pauses[v.Group]; old != nil {
		next.Path, next.Since, next.StartTimes = old.Path, old.Since, old.StartTimes
	}
	r.pauses[v.Group] = next
	out.add(Effect{What: WatchEngines})
}

// PauseEnded ends the pause of a group (empty: of all groups), except for the engines in Unresumed. Engines that did not resume in a call
// to all engines can resume later in a call to their group.
type PauseEnded struct {
	Group     string
	Unresumed []string `json:"Left"` // keys of the engines that did not resume
}

// apply ends each pause to which the resuming call applies, or replaces it by a pause of those engines that stay paused. The call went to
// the engines of one group, or to all. It ends the pause of that group or, if it went to all, any pause, except for the engines that did
// not resume (v.Unresumed).
//
// Other pauses go on, so only a call to all engines ends a pause of all engines. But an earlier call may have left a list of engines of
// another pause that did not resume (Pause.Unresumed). If engines of this list are in the group, and have resumed now, they leave the list.
//
// In the end, the monitor learns which engines are still paused (WatchEngines).
func (v PauseEnded) apply(r *Roster, out *effects) {
	for group, p := range r.pauses {
		callEndsPause := v.Group == "" || v.Group == group
		isWhole := p.Unresumed == nil // the pause covers its whole group, and not only engines that did not resume
		if !callEndsPause && isWhole {
			continue
		}
		next := *p
		next.Unresumed = v.findUnresumed(r, p, callEndsPause)
		r.pauses[group] = &next
		if len(next.Unresumed) == 0 {
			delete(r.pauses, group)
		}
	}
	out.add(Effect{What: WatchEngines})
}

// findUnresumed returns which engines of a pause stay paused after the resuming call: engines that did not get the call, and engines that
// got it but did not resume. callEndsPause says that the call went to all engines of the pause. The result has the start times of the
// engines' processes, because the pause of an engine ends when it restarts.
func (v PauseEnded) findUnresumed(r *Roster, p *Pause, callEndsPause bool) map[string]float64 {
	unresumed := map[string]float64{}
	for key, e := range r.engines {
		gotCall := callEndsPause || e.InGroup(v.Group)
		staysPaused := !gotCall || slices.Contains(v.Unresumed, key)
		if staysPaused && p.Covers(e) {
			unresumed[key] = e.Status.StartTime
		}
	}
	return unresumed
}

// forgetUnresumed ends the pause of engines whose paused process is gone. When a group resumes, the engines that did not resume stay
// paused, and the pause lists them in Unresumed, with the start times of their processes. An engine leaves this list if it is gone, or if
// it has another start time. Without a start time, its process counts as gone while the engine is down. A pause whose list becomes empty
// ends. After a change, the monitor learns which engines are still paused.
func (r *Roster) forgetUnresumed(out *effects) {
	for group, p := range r.pauses { // before its group resumes, a pause has no list, and it goes on whatever its engines do
		next := *p
		next.Unresumed = maps.Clone(p.Unresumed)
		maps.DeleteFunc(next.Unresumed, func(key string, start float64) bool {
			e := r.engines[key]
			if e == nil {
				return true
			}
			unknownAndDown := start == 0 && !e.Status.Up
			return e.Status.StartTime != start || unknownAndDown
		})
		if len(next.Unresumed) == len(p.Unresumed) { // nothing was removed, or there is no list
			continue
		}
		r.pauses[group] = &next
		if len(next.Unresumed) == 0 {
			delete(r.pauses, group)
		}
		out.add(Effect{What: WatchEngines})
	}
}

// applyPauses marks an engine as halted while a pause covers it. Of several pauses the oldest counts. A halt for another reason
// (Status.Halt) stays, unless it is the engine's own report that it is paused: the pause says the same in more detail.
func (r *Roster) applyPauses(e *Engine) {
	var byPause *engine.Held
	if errors.As(e.Status.Halt, &byPause) { // the halt comes from a pause, so it is decided anew
		e.Status.Halt = nil
	}
	e.pausedBy = nil
	for _, p := range r.pauses {
		isOldest := e.pausedBy == nil || p.Since.Before(e.pausedBy.Since)
		if isOldest && p.Covers(e) {
			e.pausedBy = p
		}
	}
	if e.pausedBy == nil {
		return
	}
	hasOtherHalt := e.Status.Halt != nil && !errors.Is(e.Status.Halt, engine.ErrPaused)
	if !hasOtherHalt {
		e.Status.Halt = &engine.Held{Why: e.pausedBy.Text()}
	}
}

// HeldByPause says which pause keeps requests from the engine; nil: none does.
func (e *Engine) HeldByPause() *engine.Held {
	if e.pausedBy == nil {
		return nil
	}
	return &engine.Held{Why: e.pausedBy.Text()}
}

// Pauses returns the pauses in force, the oldest first.
func (p *Snapshot) Pauses() []Pause {
	all := make([]Pause, 0, len(p.pauses))
	for _, one := range p.pauses {
		all = append(all, *one)
	}
	slices.SortFunc(all, func(a, b Pause) int { return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Group, b.Group)) })
	return all
}

// Paused says whether an operator's call has paused an engine. It is false for an engine that is not in the fleet.
func (p *Snapshot) Paused(instance string) bool {
	e := p.engines[instance]
	return e != nil && e.pausedBy != nil
}

// Emptied says that engines have dropped their prefix caches or have loaded other weights, so that no KV from before may be used any more.
type Emptied struct{ Keys []string }

func (v Emptied) apply(r *Roster, _ *effects) {
	for _, key := range v.Keys {
		if e := r.engines[key]; e != nil {
			r.beginGeneration(e, false)
		}
	}
}

// Caches returns the prefix caches of engines, one per rank: a candidate's ID for a prefill engine, and a worker id for an engine that
// decodes.
func (p *Snapshot) Caches(keys []string) (candidates []string, workers []int32) {
	for _, key := range keys {
		e := p.engines[key]
		if e == nil { // the engine has left in the meantime
			continue
		}
		for _, rank := range e.Ranks() {
			if e.Decodes() {
				name := e.At(rank).ID
				workers = append(workers, p.workers[name])
			} else {
				number := max(0, rank) // an only rank without a number (NoRank) counts as rank 0
				candidates = append(candidates, e.ID+"/"+strconv.Itoa(number))
			}
		}
	}
	return candidates, workers
}

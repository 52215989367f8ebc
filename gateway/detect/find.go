package detect

import (
	"cmp"
	"fmt"
	"slices"
)

// detectors are all detectors, in the order in which they run.
var detectors = slices.Concat(proxyDetectors, loadDetectors, requestDetectors, engineDetectors, prefillDetectors, groupDetectors,
	rankDetectors, ownerDetectors)

// kinds maps each kind to the detector that finds it.
var kinds = func() map[Kind]*Detector {
	all := make(map[Kind]*Detector, len(detectors))
	for i := range detectors {
		all[detectors[i].Kind] = &detectors[i]
	}
	return all
}()

// Find runs all detectors and returns their findings, bad ones before warnings. last counts the requests that ended in the
// last minute.
func Find(f *Facts, last Ended) (all []Finding) {
	v := &view{Facts: f, lastMinute: last}
	oneModelHasSeveral := len(f.Models) == 1 && len(f.Models[0].Groups) > 1
	v.manyGroups = len(f.Models) > 1 || oneModelHasSeveral // each model has a group of its own
	for i := range f.Models {
		v.loads = append(v.loads, v.modelLoad(&f.Models[i]))
	}
	v.drained = drainedEngines(f)
	for _, g := range f.groups() {
		v.running += g.running()
	}
	for i := range detectors {
		d := &detectors[i]
		d.find(v, func(where place, reason, format string, args ...any) *Finding {
			all = append(all, Finding{
				Kind: d.Kind, Severity: d.severity(), Panel: where.panel, WhereKind: where.kind, Where: where.name, Reason: reason,
				What: fmt.Sprintf(format, args...),
			})
			return &all[len(all)-1] // the detector completes the finding before it reports the next one
		})
	}
	// A finding that makes many answers much slower harms as much as one that lets requests wait.
	for i := range all {
		f := &all[i]
		muchSlower := kinds[f.Kind].slowsTokens && f.slowdown >= badSlowdown
		if muchSlower && float64(f.slowedRequests) >= badSlowedShare*float64(max(1, v.running)) {
			f.Severity = Bad
		}
	}
	// lowerIfOthersServe depends on which findings are bad, so the severities above must be final.
	v.lowerIfOthersServe(all)
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // bad before warn
	return all
}

// Much slower answers harm as much as waiting requests, if many clients get them.
const (
	badSlowdown    = 2.0 // a token takes this many times as long as before, or as on the other ranks
	badSlowedShare = 0.1 // share of the running requests that get slower tokens
)

// lowerIfOthersServe makes warnings of the findings about engines that get no requests, while other engines do their work. It does so if no
// request fails or waits, and if at most half of the engines with the same role and model are away. An engine that hangs but does not count
// as down yet still has requests, so its finding stays bad.
func (v *view) lowerIfOthersServe(all []Finding) {
	sideOf, engines := v.sides()
	away := map[side]map[string]bool{} // by side: the engines and groups that get no requests
	for i := range all {
		switch f, d := &all[i], kinds[all[i].Kind]; {
		case d.othersMayServe:
			itsSide := sideOf[f.engineOrGroup()]
			if away[itsSide] == nil {
				away[itsSide] = map[string]bool{}
			}
			away[itsSide][engineOf(f.Where)] = true
		case d.effect && f.Severity == Bad: // a bad result of other findings, such as a full queue: requests fail or wait
			return // nothing is lowered
		}
	}
	for i := range all {
		f := &all[i]
		itsSide, hasSide := sideOf[f.engineOrGroup()]
		enoughServe := 2*len(away[itsSide]) <= engines[itsSide] // at most half of the side is away
		countsAsUp := f.Kind == EngineHangs && f.LastedFor == 0 // findEngineHangs sets LastedFor only if the engine is not up any more
		if hasSide && kinds[f.Kind].othersMayServe && enoughServe && !countsAsUp {
			f.Severity = Warn
		}
	}
}

// engineOrGroup names an engine, or a group of ranks, by what it is ("decode engine", see Finding.WhereKind) and its name.
type engineOrGroup struct{ kind, name string }

// engineOrGroup is the engine or group of the finding. A finding about one rank of an engine is about that engine.
func (f *Finding) engineOrGroup() engineOrGroup { return engineOrGroup{f.WhereKind, engineOf(f.Where)} }

// side identifies the engines that can take over each other's requests, by their role and model. All groups of ranks are one side.
type side struct{ kind, model string }

// sides returns the side of each engine and group, and how many engines or groups each side has. Of an engine's models, only the first one
// counts.
func (v *view) sides() (sideOf map[engineOrGroup]side, engines map[side]int) {
	sideOf, engines = map[engineOrGroup]side{}, map[side]int{}
	for i := range v.Engines {
		e := &v.Engines[i]
		itsSide := side{kind: e.Role + " engine"} // without a model, if the engine has not named its models
		if len(e.Models) > 0 {
			itsSide.model = e.Models[0]
		}
		sideOf[engineOrGroup{itsSide.kind, e.ID}] = itsSide
		engines[itsSide]++
	}
	for i := range v.Prefill.Groups {
		engines[side{kind: "group"}]++
		sideOf[engineOrGroup{"group", v.Prefill.Groups[i].ID}] = side{kind: "group"}
	}
	return sideOf, engines
}

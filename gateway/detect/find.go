package detect

import (
	"cmp"
	"fmt"
	"slices"
)

// in the order in which they run
var detectors = slices.Concat(busyDetectors, proxyDetectors, loadDetectors, requestDetectors, engineDetectors, prefillDetectors, handoffDetectors,
	groupDetectors, rankDetectors, ownerDetectors)

var kinds = func() map[Kind]*Detector {
	all := make(map[Kind]*Detector, len(detectors))
	for i := range detectors {
		all[detectors[i].Kind] = &detectors[i]
	}
	return all
}()

// Find runs all detectors and returns their findings, bad ones first.
func Find(f *Facts, last Ended) (all []Finding) {
	v := &view{Facts: f, lastMinute: last}
	// Each model has at least one group, so several models have several groups. Then findings name a
	// group with its model.
	oneModelHasSeveral := len(f.Models) == 1 && len(f.Models[0].Groups) > 1
	v.manyGroups = len(f.Models) > 1 || oneModelHasSeveral
	for i := range f.Models {
		v.loads = append(v.loads, v.modelLoad(&f.Models[i]))
	}
	v.drained, v.groupOf = drainedEngines(f), map[string]string{}
	for i := range f.Engines {
		v.groupOf[f.Engines[i].ID] = f.Engines[i].Group
	}
	for _, g := range f.groups() {
		v.running += g.running()
	}
	for i := range detectors {
		d := &detectors[i]
		d.find(v, func(where place, reason, format string, args ...any) *Finding {
			all = append(all, Finding{
				Kind: d.Kind, Severity: d.severity(), Panel: where.panel, WhereKind: where.kind, Where: where.name, Reason: reason,
				Group: v.groupOf[where.name],
				What:  fmt.Sprintf(format, args...),
			})
			return &all[len(all)-1] // the detector completes it before it reports the next one
		})
	}
	v.followsFromProxy(all)
	v.raiseIfMuchSlower(all)
	// After all other changes of severities, on which it depends.
	v.lowerIfOthersServe(all)
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) })
	return all
}

// Much slower answers harm as much as waiting requests, if many clients get them.
const (
	badSlowdown    = 2.0 // as long as before, or as on the other ranks
	badSlowedShare = 0.1 // of the running requests
)

func (v *view) raiseIfMuchSlower(all []Finding) {
	for i := range all {
		f := &all[i]
		muchSlower := kinds[f.Kind].slowsTokens && f.slowdown >= badSlowdown
		manyRequests := float64(f.slowedRequests) >= badSlowedShare*float64(max(1, v.running))
		if muchSlower && manyRequests {
			f.Severity = Bad
		}
	}
}

// lowerIfOthersServe makes warnings of findings about engines that get no requests, if no request
// fails or waits and at most half of the engine's side is away. An engine that hangs but does not
// count as down yet still has requests, so its finding stays bad.
func (v *view) lowerIfOthersServe(all []Finding) {
	requestsSuffer := slices.ContainsFunc(all, func(f Finding) bool {
		d := kinds[f.Kind]
		isResult := d.effect && !d.takesEngineAway // such as a full queue
		return isResult && f.Severity == Bad
	})
	if requestsSuffer {
		return
	}
	sideOf, sizeOf := v.sides()
	away := awayBySide(all, sideOf)
	for i := range all {
		f := &all[i]
		itsSide, hasSide := sideOf[f.engineOrGroup()]
		enoughServe := 2*len(away[itsSide]) <= sizeOf[itsSide]
		// findEngineHangs sets LastedFor only for an engine that does not count as up.
		countsAsUp := f.Kind == EngineHangs && f.LastedFor == 0
		if hasSide && kinds[f.Kind].takesEngineAway && enoughServe && !countsAsUp {
			f.Severity = Warn
		}
	}
}

func awayBySide(all []Finding, sideOf map[engineOrGroup]side) map[side]map[string]bool {
	away := map[side]map[string]bool{}
	for i := range all {
		f := &all[i]
		if !kinds[f.Kind].takesEngineAway {
			continue
		}
		itsSide := sideOf[f.engineOrGroup()]
		if away[itsSide] == nil {
			away[itsSide] = map[string]bool{}
		}
		away[itsSide][engineOf(f.Where)] = true
	}
	return away
}

type engineOrGroup struct{ kind, name string }

// engineOrGroup is the engine or group of the finding. A finding about one rank of an engine is
// about that engine.
func (f *Finding) engineOrGroup() engineOrGroup { return engineOrGroup{f.WhereKind, engineOf(f.Where)} }

// side identifies the engines that can take over each other's requests. All groups of ranks are one
// side.
type side struct{ kind, model string }

// sides: of an engine's models, only the first counts.
func (v *view) sides() (sideOf map[engineOrGroup]side, sizeOf map[side]int) {
	sideOf, sizeOf = map[engineOrGroup]side{}, map[side]int{}
	for i := range v.Engines {
		e := &v.Engines[i]
		itsSide := side{kind: e.Role + " engine"} // without a model, if it has named none
		if len(e.Models) > 0 {
			itsSide.model = e.Models[0]
		}
		sideOf[engineOrGroup{kind: itsSide.kind, name: e.ID}] = itsSide
		sizeOf[itsSide]++
	}
	groups := side{kind: "group"}
	for i := range v.Prefill.Groups {
		sideOf[engineOrGroup{kind: groups.kind, name: v.Prefill.Groups[i].ID}] = groups
		sizeOf[groups]++
	}
	return sideOf, sizeOf
}

package detect

import (
	"cmp"
	"fmt"
	"slices"
)

// detectors are all detectors, in the order in which they run.
var detectors = slices.Concat(busyDetectors, proxyDetectors, loadDetectors, requestDetectors, engineDetectors, prefillDetectors, handoffDetectors,
	groupDetectors, rankDetectors, ownerDetectors)

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
	// Each model has at least one group, so several models have several groups. Then findings name a group with its model.
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
			return &all[len(all)-1] // the detector completes the finding before it reports the next one
		})
	}
	v.followsFromProxy(all)
	v.raiseIfMuchSlower(all)
	// This depends on which findings are bad, so it comes after all other changes of severities.
	v.lowerIfOthersServe(all)
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // bad before warn
	return all
}

// Much slower answers harm as much as waiting requests, if many clients get them.
const (
	badSlowdown    = 2.0 // a token takes this many times as long as before, or as on the other ranks
	badSlowedShare = 0.1 // share of the running requests that get slower tokens
)

// raiseIfMuchSlower makes those findings bad that make the answers of many clients much slower.
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

// lowerIfOthersServe makes warnings of the findings about engines that get no requests, while other engines do their work. It does so if no
// request fails or waits, and if at most half of the engine's side get no requests: of the engines with its role and model, or of the
// groups of ranks. An engine that hangs but does not count as down yet still has requests, so its finding stays bad.
func (v *view) lowerIfOthersServe(all []Finding) {
	requestsSuffer := slices.ContainsFunc(all, func(f Finding) bool {
		d := kinds[f.Kind]
		isResult := d.effect && !d.takesEngineAway // what other findings lead to, such as a full queue
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
		enoughServe := 2*len(away[itsSide]) <= sizeOf[itsSide] // at most half of the side is away
		// findEngineHangs sets LastedFor, for how long the engine has not been up, only for an engine that does not count as up.
		countsAsUp := f.Kind == EngineHangs && f.LastedFor == 0
		if hasSide && kinds[f.Kind].takesEngineAway && enoughServe && !countsAsUp {
			f.Severity = Warn
		}
	}
}

// awayBySide returns the names of the engines and groups that get no requests, by their side.
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

// engineOrGroup names an engine, or a group of ranks, by what it is ("decode engine", see Finding.WhereKind) and its name.
type engineOrGroup struct{ kind, name string }

// engineOrGroup is the engine or group of the finding. A finding about one rank of an engine is about that engine.
func (f *Finding) engineOrGroup() engineOrGroup { return engineOrGroup{f.WhereKind, engineOf(f.Where)} }

// side identifies the engines that can take over each other's requests, by their role and model. All groups of ranks are one side.
type side struct{ kind, model string }

// sides returns the side of each engine and group of ranks, and how many of them each side has. Of an engine's models, only the first one
// counts.
func (v *view) sides() (sideOf map[engineOrGroup]side, sizeOf map[side]int) {
	sideOf, sizeOf = map[engineOrGroup]side{}, map[side]int{}
	for i := range v.Engines {
		e := &v.Engines[i]
		itsSide := side{kind: e.Role + " engine"} // without a model, if the engine has not named its models
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

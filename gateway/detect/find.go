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
	v.manyGroups = len(f.Models) > 1 || len(f.Models) == 1 && len(f.Models[0].Groups) > 1
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
			return &all[len(all)-1]
		})
	}
	// A finding that makes many answers much slower harms as much as one that lets requests wait.
	for i := range all {
		f := &all[i]
		if kinds[f.Kind].slowsTokens && f.slowdown >= badSlowdown && float64(f.slowedRequests) >= badSlowedShare*float64(max(1, v.running)) {
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
	away := map[side]map[string]bool{}
	for i := range all {
		switch f, d := &all[i], kinds[all[i].Kind]; {
		case d.othersMayServe:
			t := sideOf[[2]string{f.WhereKind, engineOf(f.Where)}]
			if away[t] == nil {
				away[t] = map[string]bool{}
			}
			away[t][engineOf(f.Where)] = true
		case d.effect && f.Severity == Bad:
			return // requests fail or wait, so nothing is lowered
		}
	}
	for i := range all {
		f := &all[i]
		t, known := sideOf[[2]string{f.WhereKind, engineOf(f.Where)}]
		enoughLeft := 2*len(away[t]) <= engines[t]
		hasRequests := f.Kind == EngineHangs && f.LastedFor == 0 // LastedFor is 0 only while the engine is still up
		if known && kinds[f.Kind].othersMayServe && enoughLeft && !hasRequests {
			f.Severity = Warn
		}
	}
}

// side identifies the engines that can take over each other's requests, by their role and model. All groups of ranks are one side.
type side struct{ kind, model string }

// sides returns the side of each engine and group, by Finding.WhereKind and name, and how many engines or groups each side has.
func (v *view) sides() (sideOf map[[2]string]side, engines map[side]int) {
	sideOf, engines = map[[2]string]side{}, map[side]int{}
	for i := range v.Engines {
		e := &v.Engines[i]
		t := side{kind: e.Role + " engine"}
		if len(e.Models) > 0 {
			t.model = e.Models[0]
		}
		sideOf[[2]string{t.kind, e.ID}] = t
		engines[t]++
	}
	for i := range v.Prefill.Groups {
		engines[side{kind: "group"}]++
		sideOf[[2]string{"group", v.Prefill.Groups[i].ID}] = side{kind: "group"}
	}
	return sideOf, engines
}

package detect

import (
	"cmp"
	"fmt"
	"slices"
)

// detectors are all of them, in the order in which they look.
var detectors = slices.Concat(proxyDetectors, loadDetectors, requestDetectors, engineDetectors, prefillDetectors, groupDetectors, rankDetectors, ownerDetectors)

// kinds are the detectors by what they find.
var kinds = func() map[Kind]*Detector {
	all := make(map[Kind]*Detector, len(detectors))
	for i := range detectors {
		all[detectors[i].Kind] = &detectors[i]
	}
	return all
}()

// Find says what is wrong, the bad before what is worth a look. last is what ended in the last minute.
func Find(f *Facts, last Ended) (all []Finding) {
	v := &view{Facts: f, last: last}
	v.several = len(f.Models) > 1 || len(f.Models) == 1 && len(f.Models[0].Groups) > 1
	for i := range f.Models {
		v.loads = append(v.loads, v.load(&f.Models[i]))
	}
	v.drained = drainedEngines(f)
	for i := range detectors {
		d := &detectors[i]
		d.find(v, func(where at, reason, format string, args ...any) *Finding {
			all = append(all, Finding{
				Kind: d.Kind, Severity: d.severity(), Panel: where.panel, Of: where.of, Where: where.where, Reason: reason, What: fmt.Sprintf(format, args...),
			})
			return &all[len(all)-1]
		})
	}
	v.spared(all)
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(a.Severity, b.Severity) }) // bad before warn
	return all
}

// spared lowers the severity of engines that are away where the others do their work.
func (v *view) spared(all []Finding) {
	away := map[string]map[string]bool{} // names by what they are
	for i := range all {
		switch f, d := &all[i], kinds[all[i].Kind]; {
		case d.spare:
			if away[f.Of] == nil {
				away[f.Of] = map[string]bool{}
			}
			away[f.Of][engineOf(f.Where)] = true
		case d.effect && f.Severity == Bad:
			return // requests fail or wait
		}
	}
	there := map[string]int{}
	for i := range v.Engines {
		there[v.Engines[i].Role+" engine"]++
	}
	for i := range all {
		if f := &all[i]; kinds[f.Kind].spare && 2*len(away[f.Of]) < there[f.Of] {
			f.Severity = Warn
		}
	}
}

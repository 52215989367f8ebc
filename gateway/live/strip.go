package live

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"evenkeel/gateway/detect"
	"evenkeel/internal/words"
)

// Strip has the last quarter of an hour in bins of five seconds, the oldest first. Every list of
// numbers is as long as AtMs.
type Strip struct {
	Form     int           `json:"form"`
	EveryMs  int64         `json:"every_ms"` // length of a bin; the last bin is not complete yet
	AtMs     []int64       `json:"at_ms"`    // Unix time at which each bin begins
	Requests []int64       `json:"requests"` // requests that ended in each bin
	Failures []FailureLine `json:"failures"` // one line per outcome that occurred
	Lines    []GroupLine   `json:"lines"`
	Events   []Event       `json:"events"` // what happened in this time, oldest first
}

// FailureLine counts the requests per bin that failed in one way.
type FailureLine struct {
	Outcome string  `json:"outcome"`
	Status  int     `json:"status"`
	Counts  []int64 `json:"counts"`
}

// GroupLine has the KV tokens of a group's fullest rank per bin; -1: not known.
type GroupLine struct {
	Model  string  `json:"model"`
	Group  string  `json:"group"`
	Tokens []int64 `json:"most_tokens"`
}

// Event is something that happened at one time, such as the start of the proxy.
type Event struct {
	AtMs int64  `json:"at_ms"`
	Kind string `json:"kind"` // start, down, up, drain, reload, policy or refused
	What string `json:"what"`
}

const (
	maxEvents     = 64 // most events in a strip; older events are left out
	maxGroupLines = 32 // most groups that have a line; further groups are left out

	burstLeast = 10  // fewer refusals with a 429 in a bin are no burst
	burstShare = 0.1 // a smaller share of the bin's requests is no burst
)

// stripForm is the version of the Strip's format. It rises as Form does.
const stripForm = 1

// stripOf makes the strip from the bins of the last quarter of an hour. For each bin it has the
// requests that ended and failed, the loads of the groups, and what happened to engines and the
// proxy. Counts are differences from the bin before.
func stripOf(bins []detect.Sample) Strip {
	s := Strip{Form: stripForm, EveryMs: detect.BinLength.Milliseconds(), AtMs: []int64{}, Requests: []int64{}, Failures: []FailureLine{},
		Lines: []GroupLine{}, Events: []Event{}}
	before, shown := binsToShow(bins)
	inBurst := false            // whether the bin before was part of a burst of refusals
	var examined *detect.Sample // the last bin at which the whole proxy was examined, and not only its counts; nil: none yet
	if before != nil && before.Examined {
		examined = before
	}
	for i := range shown {
		b := &shown[i]
		if before == nil { // the first bin counts from itself, so that its counts are 0
			before = b
		}
		s.AtMs = append(s.AtMs, beginOfBin(b))
		s.Requests = append(s.Requests, int64(b.Ended-min(b.Ended, before.Ended))) // a difference below 0 counts as 0
		refused := s.addFailures(i, len(shown), b, before)
		s.addLoads(i, len(shown), b)
		if b.Examined { // otherwise the states of engines are not known at this bin
			s.Events = append(s.Events, eventsBetween(examined, b)...)
			examined = b
		}
		manyRefused := refused >= burstLeast
		isBurst := manyRefused && float64(refused) >= burstShare*float64(s.Requests[i]) // many, also as a share of all requests
		if isBurst && !inBurst {
			s.Events = append(s.Events, Event{b.At.UnixMilli(), "refused", "A burst of requests was refused with a 429"})
		}
		inBurst = isBurst || inBurst && manyRefused // a burst ends only when refusals are few, so that it is one event
		before = b
	}
	s.sortLines()
	s.Events = s.Events[max(0, len(s.Events)-maxEvents):] // the newest ones
	return s
}

// binsToShow returns the bins that the strip shows. If the bins cover the whole time of the strip,
// the first of them is not shown. It is the bin before the first one that is shown, whose counts
// are differences from it. before is nil if no such bin is known.
func binsToShow(bins []detect.Sample) (before *detect.Sample, shown []detect.Sample) {
	n := len(bins)
	if n > 0 && beginOfBin(&bins[n-1])-beginOfBin(&bins[0]) >= detect.BinsKeptFor.Milliseconds() {
		return &bins[0], bins[1:]
	}
	return nil, bins
}

// beginOfBin returns the Unix time in ms at which the bin of a sample begins.
func beginOfBin(b *detect.Sample) int64 { return b.At.Truncate(detect.BinLength).UnixMilli() }

// sortLines sorts the lines of failures and groups by name, so that each has its place on the page.
func (s *Strip) sortLines() {
	slices.SortFunc(s.Failures, func(a, b FailureLine) int {
		return cmp.Or(cmp.Compare(a.Outcome, b.Outcome), cmp.Compare(a.Status, b.Status))
	})
	slices.SortFunc(s.Lines, func(a, b GroupLine) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
}

// addFailures fills in the failures of bin i, which are those since the bin before. n is the number
// of bins. It returns how many of them were a 429.
func (s *Strip) addFailures(i, n int, bin, before *detect.Sample) (refused int64) {
	for outcome, count := range bin.Failures {
		increase := int64(count - min(count, before.Failures[outcome])) // a difference below 0 counts as 0
		if increase == 0 {
			continue
		}
		if outcome.Status == http.StatusTooManyRequests {
			refused += increase
		}
		row := slices.IndexFunc(s.Failures, func(l FailureLine) bool { return l.Outcome == outcome.Name && l.Status == outcome.Status })
		if row < 0 { // the first failure of this kind begins a line
			row = len(s.Failures)
			s.Failures = append(s.Failures, FailureLine{outcome.Name, outcome.Status, make([]int64, n)})
		}
		s.Failures[row].Counts[i] = increase
	}
	return refused
}

// addLoads fills in the loads of the groups in bin i. n is the number of bins.
func (s *Strip) addLoads(i, n int, bin *detect.Sample) {
	for _, g := range bin.Groups[:min(maxGroupLines, len(bin.Groups))] {
		row := slices.IndexFunc(s.Lines, func(l GroupLine) bool { return l.Model == g.Model && l.Group == g.GroupName.Group })
		if row < 0 { // the first load of this group begins a line, whose other values are not known
			row = len(s.Lines)
			s.Lines = append(s.Lines, GroupLine{g.Model, g.GroupName.Group, slices.Repeat([]int64{-1}, n)})
		}
		s.Lines[row].Tokens[i] = g.MostTokens
	}
}

// eventsBetween returns what happened between two samples. before is nil for the first sample; then
// a recent start of the proxy is the only event.
func eventsBetween(before, after *detect.Sample) (list []Event) {
	add := func(kind, format string, args ...any) {
		list = append(list, Event{after.At.UnixMilli(), kind, fmt.Sprintf(format, args...)})
	}
	if before == nil {
		if !after.Started.IsZero() && after.At.Sub(after.Started) < 15*time.Minute { // an older start is before the time of the strip
			return []Event{{after.Started.UnixMilli(), "start", "The proxy started"}}
		}
		return nil
	}
	changed := enginesByChange(before, after)
	for _, k := range []struct{ kind, change string }{
		{"down", wentDown}, {"up", cameBack}, {"up", undrained}, {"drain", beganToDrain},
	} {
		switch engines := changed[k.change]; { // one event for all engines with the same change
		case len(engines) == 1:
			add(k.kind, "%s %s", roleAndName(engines[0]), k.change)
		case len(engines) > 1:
			add(k.kind, "%s and %d more %s", roleAndName(engines[0]), len(engines)-1, k.change)
		}
	}
	if after.Drains && !before.Drains {
		add("drain", "The proxy began to drain")
	}
	if after.Policy != before.Policy {
		add("policy", "Policy %s took over from %s", after.Policy, before.Policy)
	}
	if after.Reload.After(before.Reload) {
		list = append(list, Event{after.Reload.UnixMilli(), "reload", "Another config came into force"})
	}
	return list
}

// enginesByChange returns the engines that both samples have and whose state has changed, sorted by
// name. The key of the result is what they did: wentDown, cameBack, beganToDrain or undrained. For
// this only three kinds of states count: up, drain, and down for all others.
func enginesByChange(before, after *detect.Sample) map[string][]detect.EngineName {
	changed := map[string][]detect.EngineName{}
	for _, e := range slices.SortedFunc(maps.Keys(after.Engines), func(a, b detect.EngineName) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Role, b.Role))
	}) {
		earlier, wasKnown := before.Engines[e]
		from, to := stateKind(earlier), stateKind(after.Engines[e])
		if wasKnown && from != to {
			change := changeOf(from, to) // what the engine did
			changed[change] = append(changed[change], e)
		}
	}
	return changed
}

// What an engine did between two samples.
const (
	wentDown     = "went down"
	cameBack     = "came back"
	undrained    = "took requests again" // an operator ended the engine's drain
	beganToDrain = "began to drain"
)

// changeOf returns what an engine did when its state changed. from and to are different kinds of
// states: up, drain, or down, which stands for all other states, too (stateKind). So a change from
// one bad state to another does not come here.
func changeOf(from, to string) string {
	switch {
	case to == "down":
		return wentDown
	case to == "drain":
		return beganToDrain
	case from == "drain": // and to is up
		return undrained
	}
	return cameBack // from down to up
}

// stateKind returns the kind of a state of an engine: up, drain, or down for all other states.
func stateKind(state string) string {
	if state == "up" || state == "drain" {
		return state
	}
	return "down"
}

// roleAndName names an engine or a rank with its role, in words that can begin a sentence: "Decode
// engine 10.0.0.1:8000".
func roleAndName(e detect.EngineName) string {
	kind := e.Role + " engine "
	if strings.Contains(e.Name, "/") {
		kind = e.Role + " rank "
	}
	return words.Capital(kind) + e.Name
}

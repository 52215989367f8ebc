package detect

import (
	"strings"
	"time"
)

// Watch holds the samples and incidents of a proxy. The zero value is ready to use. It has no lock:
// its owner must call one method at a time.
type Watch struct {
	Ring
	book        Book
	updatedAt   time.Time
	ranksPace   map[int32]pace // at the last Update, by Rank.ID
	stepWatches map[GroupName]*stepWatch
	longBacklog faultTimer             // prompts come faster than prefill engines compute them
	crowded     map[string]*faultTimer // by model: about as many requests wait as run
}

// Update adds the facts and the sample of the same moment. It fills in the fields of f that are
// marked with (found), and updates the incidents.
func (w *Watch) Update(f *Facts, s Sample) {
	s.addFacts(f)
	w.Add(s)
	w.updatedAt = f.At
	w.ranksPace = w.measurePaces()
	w.compareStepsWithUsual(f)
	w.measureCrowding(f)
	w.longBacklog.observe(f.Prefill.Waiting > 0 && f.Prefill.IsBacklogLong(), f.At)
	w.fillInResults(f) // detectors look at these
	w.book.Observe(f.At, Find(f, w.lastMinute()))
	w.book.measureHarm(&w.Ring)
}

// compareStepsWithUsual: during a fault, usual steps are those of the hour before it.
func (w *Watch) compareStepsWithUsual(f *Facts) {
	watches := map[GroupName]*stepWatch{} // without groups that have left, or cannot be compared now
	for name, g := range f.groups() {
		g.fillInPaces(w.ranksPace)
		if !g.StepsAreComparable() {
			continue
		}
		u := w.stepWatches[name]
		if u == nil {
			u = &stepWatch{}
		}
		if u.hasNoFault() { // at usualFrom, a lasting change of the steps was accepted as usual
			u.usualMinutes = w.usualMinutes(name, u.usualFrom)
		}
		u.compareWithUsual(g, f.At)
		watches[name] = u
		if u.hasNoFault() && g.StepMs > 0 { // 0: there was no step
			w.recordUsualSteps(name, g)
		}
	}
	w.stepWatches = watches
}

func (w *Watch) recordUsualSteps(name GroupName, g *Group) {
	thisMinute := w.minutes.last().group(name) // points into the sample
	thisMinute.Usual, thisMinute.StepModel = true, g.presentStepModel()
	thisMinute.yield = stepYield{tokens: g.tokensPerStep(), tokenMs: g.TokenMs}
}

// crowdedLasts: a shorter burst is normal.
const crowdedLasts = 10 * time.Second

func (w *Watch) measureCrowding(f *Facts) {
	timers := map[string]*faultTimer{} // without models that have left
	for i := range f.Models {
		m := &f.Models[i]
		t := w.crowded[m.Name]
		if t == nil {
			t = &faultTimer{minDuration: crowdedLasts}
		}
		t.observe(f.modelLoad(m).crowded, f.At)
		timers[m.Name] = t
	}
	w.crowded = timers
}

// FillInFound fills in the fields marked with (found) as they were at the last Update.
func (w *Watch) FillInFound(f *Facts) {
	for _, g := range f.groups() {
		g.fillInPaces(w.ranksPace)
	}
	w.fillInResults(f)
}

// fillInResults comes after Group.fillInPaces. Groups whose steps cannot be compared keep zeros.
func (w *Watch) fillInResults(f *Facts) {
	if last := w.Last(); last != nil {
		f.Traffic.Rates = last.Rates
	}
	f.Failures = w.failures()
	f.Proxy.Own = w.own()
	f.Prefill.LongBacklogS = w.longBacklog.duration(w.updatedAt).Seconds()
	for i := range f.Models {
		if s := w.crowded[f.Models[i].Name]; s != nil {
			f.Models[i].CrowdedS = s.duration(w.updatedAt).Seconds()
		}
	}
	for name, g := range f.groups() {
		if u := w.stepWatches[name]; u != nil && g.StepsAreComparable() {
			u.fillInGroup(g, w.updatedAt)
		}
	}
}

// UpdatedAt is the time of the last Update; zero: there was none.
func (w *Watch) UpdatedAt() time.Time { return w.updatedAt }

// Incidents returns the open incidents, the most harmful first, and then those that were resolved
// in the last 15 minutes.
func (w *Watch) Incidents() []Incident { return w.book.Incidents() }

// addFacts adds what only an examination of the whole proxy provides. A rank has an entry beside
// its engine's if there are several and the engine does not drain as a whole.
func (s *Sample) addFacts(f *Facts) {
	s.Examined, s.Drains, s.Policy, s.open = true, f.Proxy.Draining, f.Proxy.Policy, f.Proxy.Open
	s.Reload = time.UnixMilli(f.Proxy.ReloadedMs)
	s.Started = f.At.Add(-seconds(f.Proxy.UptimeS))
	s.Engines = make(map[EngineName]string, len(f.Engines))
	s.groupIndex = map[GroupName]int{}
	for i := range f.Engines {
		e := &f.Engines[i]
		state := e.State
		if e.State == "up" && e.Draining {
			state = "drain"
		}
		s.Engines[EngineName{e.Role, e.ID}] = state
	}
	for i := range f.Models {
		m := &f.Models[i]
		for j := range m.Groups {
			g := &m.Groups[j]
			name := GroupName{m.Name, g.Name}
			s.groupIndex[name] = len(s.Groups)
			s.Groups = append(s.Groups, GroupAt{GroupName: name, MostTokens: g.MostTokens})
			s.addRankStates(m.role(), g)
		}
	}
}

// addRankStates comes after the states of the engines.
func (s *Sample) addRankStates(role string, g *Group) {
	for k := range g.Ranks {
		r := &g.Ranks[k]
		engine, _, several := strings.Cut(r.Name, "/")
		if several && s.Engines[EngineName{role, engine}] != "drain" {
			state := "up"
			if r.State == RankDraining {
				state = "drain"
			}
			s.Engines[EngineName{role, r.Name}] = state
		}
	}
}

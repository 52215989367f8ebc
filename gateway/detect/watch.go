package detect

import (
	"strings"
	"time"
)

// Watch holds the samples of a proxy and its incidents. The zero value is ready to use. It has no lock: its owner must call one method at a
// time.
type Watch struct {
	Ring
	book        Book
	updatedAt   time.Time      // time of the last Update
	ranksPace   map[int32]pace // the pace of each rank at the last Update, by Rank.ID
	stepWatches map[GroupName]*stepWatch
	longBacklog faultTimer             // lasts while prompts come faster than prefill engines compute them
	crowded     map[string]*faultTimer // by model; lasts while about as many requests wait as run
}

// Update adds the facts about the whole proxy and the sample of the same moment. It fills in the fields of f that are marked with (found),
// and updates the incidents.
func (w *Watch) Update(f *Facts, s Sample) {
	s.addFacts(f)
	w.Add(s)
	w.updatedAt = f.At
	w.ranksPace = w.measurePaces() // from the new sample and those before
	w.compareStepsWithUsual(f)
	w.measureCrowding(f)
	w.longBacklog.observe(f.Prefill.Waiting > 0 && f.Prefill.IsBacklogLong(), f.At)
	w.fillInResults(f) // before Find, whose detectors look at these results
	w.book.Observe(f.At, Find(f, w.lastMinute()))
	w.book.measureHarm(&w.Ring) // how much the incidents have harmed clients
}

// compareStepsWithUsual fills in the paces of all groups, and compares their steps with usual ones: those of the last hour or, during a
// fault, of the hour before it. It also records steps without a fault, for comparisons in the next hour.
func (w *Watch) compareStepsWithUsual(f *Facts) {
	watches := map[GroupName]*stepWatch{} // without groups that have left, or whose steps cannot be compared now
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

// recordUsualSteps marks the present steps of a group as usual, in the sample of this minute: how long they take, by load, and how many
// tokens they give. Later steps are compared with them.
func (w *Watch) recordUsualSteps(name GroupName, g *Group) {
	thisMinute := w.minutes.last().group(name) // points into the sample
	thisMinute.Usual, thisMinute.StepModel = true, g.presentStepModel()
	thisMinute.yield = stepYield{tokens: g.tokensPerStep(), tokenMs: g.TokenMs}
}

// crowdedLasts is how long many requests may wait before it is reported: a shorter burst is normal.
const crowdedLasts = 10 * time.Second

// measureCrowding measures for how long each model has been crowded: about as many requests wait as run.
func (w *Watch) measureCrowding(f *Facts) {
	timers := map[string]*faultTimer{} // models that have left the proxy are not in the new map
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

// FillInFound fills in the fields of f that are marked with (found), as they were at the last Update. It leaves the samples and the
// incidents as they are.
func (w *Watch) FillInFound(f *Facts) {
	for _, g := range f.groups() {
		g.fillInPaces(w.ranksPace)
	}
	w.fillInResults(f)
}

// fillInResults fills in what the last Update found: the rates of requests, the failures, how long the prefill backlog has been long and
// each model crowded, and which groups have slow steps or too few tokens per step. Group.fillInPaces must have filled in the times per
// token before. Groups whose steps cannot be compared keep zeros, because prompts make their steps longer or their ranks do not step
// together.
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

// Incidents returns the open incidents, the most harmful first, and then those that were resolved in the last 15 minutes.
func (w *Watch) Incidents() []Incident { return w.book.Incidents() }

// addFacts adds to a sample the values that only an examination of the whole proxy provides: the state of each engine, and the loads of
// groups. A rank has an entry beside its engine's if the engine has several ranks and does not drain as a whole.
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

// addRankStates adds the states of a group's ranks, because a rank can drain while its engine as a whole does not. It must be called after
// the engines have their states.
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

package detect

import (
	"strings"
	"time"
)

// Watch holds the samples of a proxy and its incidents. The zero value is ready to use.
type Watch struct {
	Ring
	book    Book
	at      time.Time      // time of the last Look
	paceOf  map[int32]pace // the pace of each rank
	groups  map[GroupName]*usual
	backlog spell             // lasts while prompts come faster than prefill engines compute them
	crowded map[string]*spell // by model; lasts while so many requests wait that each waits for about one answer
}

// Look receives the facts about the whole proxy and the sample of the same moment. It fills in the fields of f that are marked with
// (found), and updates the incidents.
func (w *Watch) Look(f *Facts, s Sample) {
	s.looked(f)
	w.Add(s)
	w.at = f.At
	w.paceOf = w.paces()
	w.compare(f)
	w.crowd(f)
	w.backlog.observe(f.Prefill.Waiting > 0 && f.Prefill.IsBacklogLong(), f.At)
	w.fillIn(f)
	w.book.Observe(f.At, Find(f, w.lastMinute()))
	w.book.measureHarm(&w.Ring)
}

// compare compares the steps of all groups with usual ones. It also records steps without a fault, for comparisons in the next hour.
func (w *Watch) compare(f *Facts) {
	groups := map[GroupName]*usual{}
	for name, g := range f.groups() {
		g.fillInPaces(w.paceOf)
		if !g.StepsAreComparable() {
			continue
		}
		u := w.groups[name]
		if u == nil {
			u = &usual{}
		}
		if u.isUsual() {
			u.list = w.usually(name, u.from)
		}
		u.compare(g, f.At)
		groups[name] = u
		if u.isUsual() && g.StepMs > 0 {
			at := w.minutes.last().group(name)
			at.Usual, at.Law, at.gives = true, g.lawNow(), gives{g.perStep(), g.TokenMs}
		}
	}
	w.groups = groups
}

// crowdedLasts is how long many requests may wait before it is reported: a shorter burst is normal.
const crowdedLasts = 10 * time.Second

// crowd measures for how long each model has been crowded (see load).
func (w *Watch) crowd(f *Facts) {
	all := map[string]*spell{}
	for i := range f.Models {
		m := &f.Models[i]
		s := w.crowded[m.Name]
		if s == nil {
			s = &spell{least: crowdedLasts}
		}
		l := f.load(m)
		s.observe(l.crowded, f.At)
		all[m.Name] = s
	}
	w.crowded = all
}

// Complete fills in the fields of f that are marked with (found), and leaves the samples and the incidents as they are.
func (w *Watch) Complete(f *Facts) {
	for _, g := range f.groups() {
		g.fillInPaces(w.paceOf)
	}
	w.fillIn(f)
}

// fillIn fills in the fields that are marked with (found), except those that fillInPaces has filled in before.
func (w *Watch) fillIn(f *Facts) {
	if last := w.Last(); last != nil {
		f.Traffic.Rates = last.Rates
	}
	f.Failures = w.failures()
	f.Prefill.BusyS = w.backlog.lasts(w.at).Seconds()
	for i := range f.Models {
		if s := w.crowded[f.Models[i].Name]; s != nil {
			f.Models[i].CrowdedS = s.lasts(w.at).Seconds()
		}
	}
	for name, g := range f.groups() {
		if u := w.groups[name]; u != nil && g.StepsAreComparable() {
			u.fillIn(g, w.at)
		}
	}
}

// LookedAt is the time of the last Look; zero: there was none.
func (w *Watch) LookedAt() time.Time { return w.at }

// Incidents returns the lasting incidents, the most harmful first, and then those that were resolved in the last 15 minutes.
func (w *Watch) Incidents() []Incident { return w.book.Incidents() }

// looked adds to a sample the values that only a look at the whole proxy provides.
func (s *Sample) looked(f *Facts) {
	s.Examined, s.Drains, s.Policy = true, f.Proxy.Draining, f.Proxy.Policy
	s.Reload = time.UnixMilli(f.Proxy.ReloadedMs)
	s.Started = f.At.Add(-seconds(f.Proxy.UptimeS))
	s.Engines = make(map[EngineName]string, len(f.Engines))
	s.at = map[GroupName]int{}
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
			s.at[name] = len(s.Groups)
			s.Groups = append(s.Groups, GroupAt{GroupName: name, MostTokens: g.MostTokens})
			for k := range g.Ranks {
				r := &g.Ranks[k]
				engine, _, several := strings.Cut(r.Name, "/") // a rank can drain while its engine as a whole does not
				if several && s.Engines[EngineName{m.role(), engine}] != "drain" {
					state := "up"
					if r.State == RankDraining {
						state = "drain"
					}
					s.Engines[EngineName{m.role(), r.Name}] = state
				}
			}
		}
	}
}

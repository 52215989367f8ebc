package detect

import (
	"cmp"
	"slices"
	"time"
)

const (
	moment     = 30 * time.Second // findings that begin within this time count as simultaneous
	follow     = 2 * time.Minute  // an effect may begin this long after its cause
	flap       = time.Minute      // a finding that is back within this time never ended
	keep       = 15 * time.Minute // resolved incidents are kept this long
	mostKept   = 64               // incidents, open and resolved
	mostFound  = 2000             // findings that one Observe takes
	mostListed = 48               // names in Incident.Where, or in Incident.Ranks
)

// Incident has all findings that seem to have one cause.
type Incident struct {
	ID       int      `json:"id"`      // unique while the process lives
	Kind     Kind     `json:"kind"`    // also a label of evenkeel_incident
	State    State    `json:"state"`   // new, lasting, paused or over
	Subject  string   `json:"subject"` // where it was found first, as in evenkeel_incident; empty: the proxy
	Severity string   `json:"severity"`
	Panel    string   `json:"panel"`           // the panel that shows more
	Headline string   `json:"headline"`        // the cause in a few words
	What     string   `json:"what"`            // the cause, as a sentence
	Harm     string   `json:"harm,omitempty"`  // what clients have had since it began, in numbers, a sentence; empty: they notice nothing, or it is not known yet
	Where    []string `json:"where"`           // names of engines, ranks, groups or models, the first ones; empty: the proxy
	Named    string   `json:"named"`           // the same names with what they are, as sentences; empty: What has them
	Ranks    []string `json:"ranks,omitempty"` // ranks that What names beside Where, the first ones
	Count    int      `json:"count"`           // how many names there are, with those that Where leaves out
	SinceMs  int64    `json:"since_ms"`
	UntilMs  int64    `json:"until_ms"`          // 0: it lasts
	LastMs   int64    `json:"last_ms"`           // if its findings come and go and are absent now, when one was last found; else 0
	Times    int      `json:"times"`             // how often it occurred: equal warnings that are over are counted here and not listed
	FirstMs  int64    `json:"first_ms"`          // since_ms of the first of them
	Clients  string   `json:"clients"`           // what clients notice of it
	Next     string   `json:"next"`              // what to do
	Command  string   `json:"command"`           // a command to copy; empty: there is none
	Runbook  string   `json:"runbook"`           // entry of the runbook; empty: there is none
	Crowded  bool     `json:"crowded,omitempty"` // many requests wait, as the cause or as an effect of it
}

// Book is the incidents of the last minutes. The zero value is an empty one.
type Book struct {
	last          int // the last id that was used
	now           time.Time
	enginesAway   bool // some engine is down or out, so it gets no requests now
	list          []*incident
	unplaced      []string  // sentences of the findings for which no incident had room, because all others harm more
	unplacedSince time.Time // zero: all findings have an incident
	unplacedBad   bool      // an unplaced finding has the severity Bad
}

// incident is an incident with its findings. An Incident is its description for people.
type incident struct {
	id           int
	since, until time.Time // until is zero while it lasts
	lastsSince   time.Time // when it began or, if it was over and came back, when it came back
	closed       time.Time // when it was over, before it came back; zero: it never was
	members      []member  // findings that last; if none does, the ones that lasted until the end
	subject      string    // where it was found first
	lastBad      time.Time // when one of its findings was last bad
	base         *baseline // the proxy's latencies and counts when it began
	baseAt       time.Time
	measured     string   // what clients have noticed since it began, in numbers; empty: nothing was measured
	everFound    []member // all findings it ever had, as last found: causes first, then in the order in which they were found
}

// State is the state of an incident.
type State string

// The states there are.
const (
	New     State = "new"     // it began less than a moment ago: findings that begin now may belong to it
	Lasting State = "lasting" // it began more than a moment ago, and is found now
	Paused  State = "paused"  // it is not found now, and goes on if it is found again soon
	Over    State = "over"
)

// state is the incident's state now.
func (o *incident) state(now time.Time) State {
	switch {
	case !o.lasts() && now.Sub(o.until) > flap:
		return Over
	case !o.lasts() || o.lastFound().Before(now):
		return Paused
	case now.Sub(o.lastsSince) <= moment:
		return New
	}
	return Lasting
}

// lasts says whether the incident is found now, or comes and goes and was found lately.
func (o *incident) lasts() bool { return o.until.IsZero() }

// member is a finding as a part of an incident.
type member struct {
	Finding
	host, commonReason string // the machine where it is; its reason without the parts that differ between engines
	effect             bool   // it is an effect of the incident's first member
	found              time.Time
}

// subject identifies a finding: its kind and its place. Findings with the same subject are one finding at different times.
type subject struct {
	kind  Kind
	where string
}

func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

// Observe takes all findings of now. Each one joins an incident that lasts or came back, or begins a new incident. Incidents without
// findings end.
func (b *Book) Observe(now time.Time, found []Finding) {
	found = slices.Clone(found[:min(mostFound, len(found))])
	slices.SortStableFunc(found, func(x, y Finding) int { // causes before their effects
		return cmp.Or(cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()), cmp.Compare(y.For, x.For))
	})
	found = merged(found)
	b.now = now
	incidentOf, ofEngine := map[subject]*incident{}, map[string]*incident{} // ofEngine: those of engines that get no requests
	away, foundNow := map[string]bool{}, map[subject]bool{}                 // away: engines that get no requests now
	for i := range found {
		foundNow[found[i].subject()] = true
		if kinds[found[i].Kind].gone {
			away[engineOf(found[i].Where)] = true
		}
	}
	b.enginesAway = len(away) > 0
	ends := map[*incident]bool{} // incidents of which no cause is found now or may come back: see goesOn
	for _, o := range b.list {
		ends[o] = !o.goesOn(now, foundNow)
		members := o.members
		if o.state(now) == Paused && !o.lasts() { // all findings that it had may come back
			members = o.everFound
		}
		for i := range members {
			s := members[i].subject()
			if other := incidentOf[s]; other == nil || o.takesFrom(other) {
				incidentOf[s] = o
			}
			if o.lasts() && kinds[s.kind].gone {
				ofEngine[engineOf(s.where)] = o
			}
		}
	}
	parted := b.parted(now, found, incidentOf)
	b.unplaced, b.unplacedBad = nil, false
	nextMembers := map[*incident][]member{}
	for i := range found {
		current := memberOf(&found[i], now)
		f := &current
		o := incidentOf[f.subject()]
		if earlier := ofEngine[engineOf(f.Where)]; earlier != nil && kinds[f.Kind].gone && (o == nil || !o.lasts()) {
			o = earlier
		}
		if o != nil && (o.state(now) == Over || parted[o]) {
			o = nil
		}
		if o == nil || !o.lasts() && kinds[f.Kind].effect { // the incident is over, so this effect has another cause
			o = b.place(f, o, now, incidentOf, nextMembers, ends)
		}
		if o == nil {
			b.unplaced, b.unplacedBad = append(b.unplaced, f.What), b.unplacedBad || f.Severity == Bad
			continue
		}
		if !o.lasts() {
			o.lastsSince, o.closed, o.until = now, o.until, time.Time{}
		}
		f.effect = len(nextMembers[o]) > 0 && kinds[f.Kind].effect && !kinds[nextMembers[o][0].Kind].effect
		nextMembers[o] = append(nextMembers[o], *f)
	}
	for _, o := range b.list {
		switch members := o.withResting(nextMembers[o], now, foundNow, away); {
		case len(members) > 0:
			o.members = members
			o.remember()
			if o.subject == "" {
				o.subject = members[0].Where
			}
			if slices.ContainsFunc(members, func(m member) bool { return m.Severity == Bad }) {
				o.lastBad = now
			}
		case o.lasts():
			o.until = now
			if at := o.lastFound(); len(o.members) > 0 && kinds[o.members[0].Kind].rests > 0 {
				o.until = at
			}
		}
	}
	b.forget(now)
}

// parted returns incidents that ended a moment ago and must not go on, although one of their findings is back. With it came a new finding
// of the same cause, which they never had. So it is another outage, and all was well in between.
func (b *Book) parted(now time.Time, found []Finding, incidentOf map[subject]*incident) map[*incident]bool {
	cameBack, isParted := map[*incident]bool{}, map[*incident]bool{}
	for i := range found {
		if o := incidentOf[found[i].subject()]; o != nil && !o.lasts() && o.state(now) == Paused {
			cameBack[o] = true
		}
	}
	if len(cameBack) == 0 {
		return isParted
	}
	for i := range found {
		f := memberOf(&found[i], now)
		if incidentOf[f.subject()] != nil || kinds[f.Kind].effect {
			continue
		}
		for o := range cameBack {
			isParted[o] = isParted[o] || sharesCause(o.everFound, &f)
		}
	}
	return isParted
}

// measureHarm stores how much each lasting incident has harmed clients, compared with the time before it began. Incidents that harm no
// client are left out.
func (b *Book) measureHarm(r *Ring) {
	for _, o := range b.list {
		if !o.lasts() || o.harm() < leastHarm {
			continue
		}
		if o.base == nil || o.since.Before(o.baseAt) {
			o.base, o.baseAt = r.baseline(o.since), o.since
		}
		o.measured = r.harm(o.base)
	}
}

// memberOf makes a member of a finding, with the values by which members are compared.
func memberOf(f *Finding, now time.Time) member {
	host := hostOf(f.Where)
	return member{Finding: *f, host: host, commonReason: commonReasonOf(f.Reason, host), found: now}
}

// goesOn says whether a cause of the incident is found now, or may come back because it comes and goes.
func (o *incident) goesOn(now time.Time, seen map[subject]bool) bool {
	return o.lasts() && slices.ContainsFunc(o.members, func(m member) bool {
		return !m.effect && (seen[m.subject()] || now.Sub(m.found) < kinds[m.Kind].rests)
	})
}

// remember adds the members to everFound. An incident that is over is described by everFound, for example by all engines that were
// restarted one after the other.
func (o *incident) remember() {
	indexOf := make(map[subject]int, len(o.everFound))
	for i := range o.everFound {
		indexOf[o.everFound[i].subject()] = i
	}
	for _, m := range o.members {
		i, known := indexOf[m.subject()]
		if !known {
			if len(o.everFound) < mostFound {
				o.everFound = append(o.everFound, m)
			}
			continue
		}
		if o.everFound[i].Severity == Bad { // the worst severity stays
			m.Severity = Bad
		}
		o.everFound[i] = m
	}
	slices.SortStableFunc(o.everFound, func(x, y member) int { return cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()) })
	markEffects(o.everFound)
}

// markEffects marks the members that are effects of the first one.
func markEffects(members []member) {
	for i := range members {
		members[i].effect = i > 0 && kinds[members[i].Kind].effect && !kinds[members[0].Kind].effect
	}
}

// withResting adds to members, which are found now, the incident's other members of kinds that come and go. Such a member stays until it
// has been absent for as long as its kind says (rests). It is not added if another incident has it now, or if its engine gets no requests.
func (o *incident) withResting(members []member, now time.Time, elsewhere map[subject]bool, away map[string]bool) []member {
	if !o.lasts() {
		return members
	}
	has, added := map[subject]bool{}, false
	for i := range members {
		has[members[i].subject()] = true
	}
	for i := range o.members {
		m := &o.members[i]
		s, keptFor := m.subject(), kinds[m.Kind].rests
		if now.Sub(m.found) < keptFor && !has[s] && !elsewhere[s] && !away[engineOf(m.Where)] && len(members) < mostFound {
			members, has[s], added = append(members, *m), true, true
		}
	}
	if added { // keep the first member the same, because the incident is named by it
		slices.SortStableFunc(members, func(x, y member) int {
			return cmp.Or(cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()), cmp.Compare(x.Where, y.Where))
		})
		markEffects(members)
	}
	return members
}

// lastFound is when one of the members was found last.
func (o *incident) lastFound() (last time.Time) {
	for i := range o.members {
		if at := o.members[i].found; at.After(last) {
			last = at
		}
	}
	return last
}

// merged keeps one finding of each subject, the first, and gives it the worst severity of all. It reuses found's array.
func merged(found []Finding) []Finding {
	index, once := map[subject]int{}, found[:0]
	for _, f := range found {
		i, ok := index[f.subject()]
		switch {
		case !ok:
			index[f.subject()] = len(once)
			once = append(once, f)
		case f.Severity == Bad:
			once[i].Severity = Bad
		}
	}
	return once
}

// takesFrom decides between two incidents that have had the same finding: this one gets it if it lasts and the other does not, or if it
// ended later.
func (o *incident) takesFrom(other *incident) bool {
	if o.lasts() || other.lasts() {
		return !other.lasts()
	}
	return o.until.After(other.until)
}

// place chooses the incident of a finding that no lasting incident has: one that the finding may join; else before, the incident that had
// it until now (nil: none); else a new one. It returns nil if the book is full of incidents that harm as much. An incident that has ended,
// or is about to end (ends), takes only its own effects and findings of the same engine; otherwise its description would move to another
// engine. nextMembers are the members that incidents have got so far.
func (b *Book) place(f *member, before *incident, now time.Time, incidentOf map[subject]*incident, nextMembers map[*incident][]member,
	ends map[*incident]bool) *incident {
	since := now.Add(-f.For)
	var best *incident
	most := 0
	for _, o := range b.list {
		hasNone := len(nextMembers[o]) == 0
		isOver := hasNone && (!o.lasts() || len(o.members) == 0)
		mayBeCause := !kinds[f.Kind].effect || kinds[f.Kind].load
		if isOver || hasNone && ends[o] && mayBeCause && !o.hasEngine(f) {
			continue
		}
		members := nextMembers[o]
		if len(members) == 0 {
			members = o.members
		}
		late := since.Sub(o.lastsSince)
		if !mayJoin(members, f, late) && !o.hadEffect(f) {
			continue
		}
		if h := members[0].harm(); best == nil || h > most || h == most && late.Abs() < since.Sub(best.lastsSince).Abs() {
			best, most = o, h
		}
	}
	if best != nil && best.isOtherOutage(f) {
		best = b.split(best, incidentOf, nextMembers)
	}
	if best == nil && before != nil {
		return before
	}
	if best == nil && b.full(f.harm(), nextMembers) {
		return nil
	}
	if best == nil {
		b.last++
		best = &incident{id: b.last, since: since, lastsSince: since}
		b.list = append(b.list, best)
		b.claim(best, f.Kind, incidentOf, nextMembers)
	}
	if since.Before(best.since) {
		best.since = since
	}
	return best
}

// isOtherOutage says whether an incident was over, came back, and now gets a cause that it never had. Then the part that came back is
// another outage.
func (o *incident) isOtherOutage(f *member) bool {
	return !o.closed.IsZero() && o.lasts() && !kinds[f.Kind].effect &&
		!slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// split makes a new incident of the part of o that came back, and ends o at the time when it was over.
func (b *Book) split(o *incident, incidentOf map[subject]*incident, nextMembers map[*incident][]member) *incident {
	b.last++
	other := &incident{id: b.last, since: o.lastsSince, lastsSince: o.lastsSince, members: o.members}
	b.list = append(b.list, other)
	for _, m := range nextMembers[o] {
		incidentOf[m.subject()] = other
	}
	nextMembers[other] = nextMembers[o]
	delete(nextMembers, o)
	o.until = o.closed
	return other
}

// hadEffect says whether the incident lasts and had this finding before as an effect. Findings of kinds with load do not count, because
// they may be a cause themselves.
func (o *incident) hadEffect(f *member) bool {
	return o.lasts() && kinds[f.Kind].effect && !kinds[f.Kind].load &&
		slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// hasEngine says whether a member of the incident is about the same engine as the finding.
func (o *incident) hasEngine(f *member) bool {
	return f.host != "" && slices.ContainsFunc(o.members, func(m member) bool { return engineOf(m.Where) == engineOf(f.Where) })
}

// claim moves effects that were noticed before their cause was found into the new incident o of that cause. Clients notice errors before an
// engine counts as down. An incident that had only these effects is dropped.
func (b *Book) claim(o *incident, cause Kind, incidentOf map[subject]*incident, nextMembers map[*incident][]member) {
	if k := kinds[cause]; k.effect && !k.load || k.alone || k.harm == nothing {
		return
	}
	b.list = slices.DeleteFunc(b.list, func(noticed *incident) bool {
		if noticed == o || !noticed.lasts() || len(nextMembers[noticed]) > 0 || len(noticed.members) == 0 ||
			!kinds[noticed.members[0].Kind].effect ||
			o.since.Sub(noticed.lastsSince).Abs() > moment {
			return false
		}
		if noticed.closed.IsZero() && !kinds[noticed.everFound[0].Kind].effect {
			return false // the incident had another cause
		}
		for i := range noticed.members {
			incidentOf[noticed.members[i].subject()] = o
		}
		if noticed.lastsSince.Before(o.since) {
			o.since = noticed.lastsSince
		}
		noticed.until = noticed.closed // its earlier part, before it came back, stays as a resolved incident
		return noticed.closed.IsZero()
	})
}

// mayJoin says whether a finding may join the members of an incident. late is the time from the begin of the incident to that of the
// finding.
func mayJoin(members []member, f *member, late time.Duration) bool {
	lead, kind := kinds[members[0].Kind], kinds[f.Kind]
	switch {
	case kind.load && lead.harm < waiting: // so many waiting requests are worse than this cause explains
		return false
	case lead.load && f.Kind == NotReady: // a proxy is not ready because engines are gone, and not because of load
		return false
	}
	return joinWhen[lead.class()][kind.class()].allows(late, sharesCause(members, f))
}

// sharesCause says whether a finding seems to have the same cause as a member that is not an effect.
func sharesCause(members []member, f *member) bool {
	for i := range members {
		if m := &members[i]; !m.effect && shareCause(m, f) {
			return true
		}
	}
	return false
}

// shareCause says whether two findings of one moment seem to have one cause: they are on one host or about one engine, their kinds are of
// one family, or their kind and reason are equal.
func shareCause(a, b *member) bool {
	if kinds[a.Kind].alone || kinds[b.Kind].alone {
		return false
	}
	if a.host != "" && a.host == b.host && (kinds[a.Kind].rests > 0) == (kinds[b.Kind].rests > 0) {
		return true
	}
	if a.host != "" && engineOf(a.Where) == engineOf(b.Where) {
		return true // a finding that comes and goes on one engine does not explain one on another engine of the host
	}
	if family := kinds[a.Kind].family; family != "" && family == kinds[b.Kind].family {
		return true
	}
	return a.Kind == b.Kind && a.commonReason == b.commonReason
}

// full says whether there is no room for a new incident with this harm: mostKept incidents last, and all of them harm as much or more.
func (b *Book) full(harm int, nextMembers map[*incident][]member) bool {
	if len(b.list) < mostKept {
		return false
	}
	lasting := 0
	for _, o := range b.list {
		m := nextMembers[o]
		if len(m) == 0 && o.lasts() {
			m = o.members
		}
		if len(m) > 0 && mostHarm(m) >= harm {
			lasting++
		}
	}
	return lasting >= mostKept
}

// forget drops incidents that were resolved long ago. If there are still too many, it drops resolved ones, the oldest first, and then
// lasting ones that harm least, the newest first.
func (b *Book) forget(now time.Time) {
	b.list = slices.DeleteFunc(b.list, func(o *incident) bool { return !o.lasts() && now.Sub(o.until) >= keep })
	for len(b.list) > mostKept {
		least := 0
		for i, o := range b.list {
			if o.dropsBefore(b.list[least]) {
				least = i
			}
		}
		if o := b.list[least]; o.lasts() {
			for i := range o.members {
				b.unplaced, b.unplacedBad = append(b.unplaced, o.members[i].What), b.unplacedBad || o.members[i].Severity == Bad
			}
		}
		b.list = slices.Delete(b.list, least, least+1)
	}
	if len(b.unplaced) == 0 {
		b.unplacedSince = time.Time{}
	} else if b.unplacedSince.IsZero() {
		b.unplacedSince = now
	}
}

// dropsBefore says whether forget drops this incident before another one: resolved incidents first, then those that harm less.
func (o *incident) dropsBefore(other *incident) bool {
	if over := !o.lasts(); over || !other.lasts() {
		return over && (other.lasts() || o.until.Before(other.until))
	}
	return cmp.Or(cmp.Compare(o.harm(), other.harm()), cmp.Compare(other.id, o.id)) < 0
}

// leastHarm is the least harm that clients notice.
const leastHarm = 2

// harm returns how much clients notice of the incident: the harm of its worst member (see Finding.harm).
func (o *incident) harm() int { return mostHarm(o.members) }

func mostHarm(members []member) (most int) {
	for i := range members {
		most = max(most, members[i].harm())
	}
	return most
}

// harm returns how much clients notice of a finding. The kind counts most; the severity decides between equal kinds.
func (f *Finding) harm() int {
	n := 2 * int(kinds[f.Kind].harm)
	if f.Severity == Bad {
		n++
	}
	return n
}

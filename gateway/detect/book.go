package detect

import (
	"cmp"
	"slices"
	"time"
)

const (
	togetherWithin  = 30 * time.Second // findings that begin within this time have begun together
	effectWithin    = 2 * time.Minute  // an effect that clients notice may begin this long after its cause
	resumedWithin   = time.Minute      // a finding that returns within this time continues its incident
	resolvedKeptFor = 15 * time.Minute // how long a resolved incident stays in the list
	maxIncidents    = 64               // incidents, open and resolved
	maxFindings     = 2000             // more findings of one round are ignored, to bound the work
	maxNames        = 48               // names in Incident.Where
)

// Incident is everything that one cause has made wrong.
type Incident struct {
	ID       int      `json:"id"`      // unique while the process lives
	Kind     Kind     `json:"kind"`    // also a label of evenkeel_incident
	State    State    `json:"state"`   // new, lasting, paused or over
	Subject  string   `json:"subject"` // where it was found first, as in evenkeel_incident; empty: the proxy
	Severity string   `json:"severity"`
	Panel    string   `json:"panel"`           // the panel that shows more
	Headline string   `json:"headline"`        // the cause in a few words
	What     string   `json:"what"`            // the cause, as a sentence
	Harm     string   `json:"harm,omitempty"`  // sentence with numbers on what clients noticed; empty: nothing, or not known yet
	Where    []string `json:"where"`           // names of engines, ranks, groups or models, the first ones; empty: the proxy
	Named    string   `json:"named"`           // the names and what each one is, as sentences; empty: What has them
	Ranks    []string `json:"ranks,omitempty"` // ranks that What names beside Where, the first ones
	Count    int      `json:"count"`           // number of names, including those that Where leaves out
	SinceMs  int64    `json:"since_ms"`
	UntilMs  int64    `json:"until_ms"`          // 0: it lasts
	LastMs   int64    `json:"last_ms"`           // when it was found last, if it comes and goes and is not found now; else 0
	Times    int      `json:"times"`             // occurrences: equal warnings that are over are counted here instead of listed
	FirstMs  int64    `json:"first_ms"`          // since_ms of the first of them
	Clients  string   `json:"clients"`           // what clients notice of it
	Next     string   `json:"next"`              // what to do
	Command  string   `json:"command"`           // a command to copy; empty: there is none
	Runbook  string   `json:"runbook"`           // entry of the runbook; empty: there is none
	Crowded  bool     `json:"crowded,omitempty"` // many requests wait, as the cause or as an effect of it
}

// Book holds the incidents of the last minutes. Its zero value is empty and ready to use.
type Book struct {
	lastID        int // the last id that was used
	now           time.Time
	enginesAway   bool // some engine gets no requests now
	list          []*incident
	unplaced      []string  // sentences of findings that are in no incident, because the list is full of more harmful ones
	unplacedSince time.Time // since when there are such findings; zero: there are none
	unplacedBad   bool      // one of these findings is bad
}

// incident is an incident with its findings. Incident is the form in which it is shown.
type incident struct {
	id            int
	since, until  time.Time // until is zero while it is open
	openSince     time.Time // when it last began or came back; since is when it began first
	previousEnd   time.Time // when it ended before it came back; zero: it never came back
	members       []member  // its present findings; once it has ended, those that it had until then
	subject       string    // where it was found first
	lastBad       time.Time // when one of its findings was last bad
	baseline      *baseline // counters and latencies of the proxy when it began
	baselineSince time.Time
	harmText      string   // what clients have noticed since it began, in numbers; empty: nothing was measured
	everFound     []member // all findings it ever had, each in its last form: causes first, then in order of arrival
}

// State says how far an incident has come.
type State string

// States of an incident.
const (
	New     State = "new"     // it began at most 30 s ago: findings that begin now may belong to it
	Lasting State = "lasting" // it is found now, and began more than 30 s ago
	Paused  State = "paused"  // it is not found now; if it is found again soon, it goes on
	Over    State = "over"
)

// state is the incident's state now.
func (o *incident) state(now time.Time) State {
	switch {
	case !o.isOpen() && now.Sub(o.until) > resumedWithin:
		return Over
	case !o.isOpen() || o.lastFound().Before(now):
		return Paused
	case now.Sub(o.openSince) <= togetherWithin:
		return New
	}
	return Lasting
}

// isOpen says whether the incident is found now, or is of a kind that comes and goes and was found a short time ago.
func (o *incident) isOpen() bool { return o.until.IsZero() }

// member is a finding as a part of an incident.
type member struct {
	Finding
	host, commonReason string // its machine, and its reason without words that differ between engines, to compare findings
	effect             bool   // the finding is an effect of the incident's cause
	found              time.Time
}

// subject identifies a finding: its kind and its place. Findings of one subject are the same finding at different times.
type subject struct {
	kind  Kind
	where string
}

// subject identifies the finding by its kind and its place.
func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

// Observe updates the incidents with all findings of this moment, and ignores those beyond maxFindings. Each finding goes to the incident
// that it continues or whose cause it shares, or begins a new incident. An incident without a finding ends, at once or, if its findings
// come and go, after a while (see withTolerated).
func (b *Book) Observe(now time.Time, found []Finding) {
	found = slices.Clone(found[:min(maxFindings, len(found))])
	slices.SortStableFunc(found, func(x, y Finding) int { // causes before their effects
		return cmp.Or(cmp.Compare(kinds[x.Kind].sortKey(), kinds[y.Kind].sortKey()), cmp.Compare(y.LastedFor, x.LastedFor))
	})
	found = mergeBySubject(found)
	b.now = now
	r := b.newRound(now, found)
	b.enginesAway = len(r.idleEngines) > 0
	b.unplaced, b.unplacedBad = nil, false
	for i := range found {
		f := memberOf(&found[i], now)
		b.add(&f, r)
	}
	for _, o := range b.list {
		o.update(o.withTolerated(r.nextMembers[o], r), now)
	}
	b.dropOld(now)
}

// round has what one call of Observe works with.
type round struct {
	now           time.Time
	foundNow      map[subject]bool       // the findings of this moment
	idleEngines   map[string]bool        // engines that get no requests now
	incidentOf    map[subject]*incident  // the incident of each known finding
	idleIncidents map[string]*incident   // by engine: the open incident that keeps requests away from it
	ending        map[*incident]bool     // incidents whose cause is not found now and is not expected back: see causeContinues
	separate      map[*incident]bool     // ended incidents that do not go on: see separateOutages
	nextMembers   map[*incident][]member // the members that incidents have got so far in this round
}

// newRound compares the findings of this moment with the incidents, and changes neither.
func (b *Book) newRound(now time.Time, found []Finding) *round {
	r := &round{now: now, foundNow: map[subject]bool{}, idleEngines: map[string]bool{}, ending: map[*incident]bool{},
		nextMembers: map[*incident][]member{}}
	for i := range found {
		r.foundNow[found[i].subject()] = true
		if kinds[found[i].Kind].getsNoRequests {
			r.idleEngines[engineOf(found[i].Where)] = true
		}
	}
	r.incidentOf, r.idleIncidents = b.indexIncidents(now)
	for _, o := range b.list {
		r.ending[o] = !o.causeContinues(r)
	}
	r.separate = separateOutages(found, r)
	return r
}

// add puts a finding into the incident that it continues, else into the one that assign chooses. An ended incident is open again then. If
// there is no room for another incident, the finding is unplaced.
func (b *Book) add(f *member, r *round) {
	k := kinds[f.Kind]
	o := r.continued(f)
	if causeIsOver := o != nil && !o.isOpen(); o == nil || causeIsOver && k.effect { // then this effect has another cause
		o = b.assign(f, o, r)
	}
	if o == nil {
		b.unplaced = append(b.unplaced, f.What)
		b.unplacedBad = b.unplacedBad || f.Severity == Bad
		return
	}
	if !o.isOpen() { // the incident comes back
		o.previousEnd = o.until
		o.until = time.Time{}
		o.openSince = r.now
	}
	members := r.nextMembers[o]
	f.effect = len(members) > 0 && k.effect && !kinds[members[0].Kind].effect
	r.nextMembers[o] = append(members, *f)
}

// continued returns the incident that a finding continues; nil: there is none.
func (r *round) continued(f *member) *incident {
	o := r.incidentOf[f.subject()]
	// If the engine got no requests before, for whatever reason, its incident goes on.
	if earlier := r.idleIncidents[engineOf(f.Where)]; earlier != nil && kinds[f.Kind].getsNoRequests && (o == nil || !o.isOpen()) {
		o = earlier
	}
	if o != nil && (o.state(r.now) == Over || r.separate[o]) {
		return nil
	}
	return o
}

// indexIncidents returns the incident of each known finding, and by engine the open incident that keeps requests away from it.
func (b *Book) indexIncidents(now time.Time) (incidentOf map[subject]*incident, idleIncidents map[string]*incident) {
	incidentOf, idleIncidents = map[subject]*incident{}, map[string]*incident{}
	for _, o := range b.list {
		members := o.members
		if o.state(now) == Paused && !o.isOpen() { // all findings that it had may come back
			members = o.everFound
		}
		for i := range members {
			s := members[i].subject()
			if other := incidentOf[s]; other == nil || o.isNewerThan(other) {
				incidentOf[s] = o
			}
			if o.isOpen() && kinds[s.kind].getsNoRequests {
				idleIncidents[engineOf(s.where)] = o
			}
		}
	}
	return incidentOf, idleIncidents
}

// update gives the incident its members of now. Without members, an open incident ends.
func (o *incident) update(members []member, now time.Time) {
	if len(members) > 0 {
		o.members = members
		o.rememberMembers()
		if o.subject == "" {
			o.subject = members[0].Where
		}
		if slices.ContainsFunc(members, func(m member) bool { return m.Severity == Bad }) {
			o.lastBad = now
		}
	} else if o.isOpen() {
		o.until = now
		if len(o.members) > 0 && kinds[o.members[0].Kind].toleratedAbsence > 0 { // it came and went, so it ended when it was found last
			o.until = o.lastFound()
		}
	}
}

// separateOutages returns the incidents that ended a moment ago and are not continued, although one of their findings is back. Together
// with that finding a new one was found that shares its cause and never belonged to the incident. So the two outages are different ones.
func separateOutages(found []Finding, r *round) map[*incident]bool {
	cameBack, separate := map[*incident]bool{}, map[*incident]bool{}
	for i := range found {
		if o := r.incidentOf[found[i].subject()]; o != nil && !o.isOpen() && o.state(r.now) == Paused {
			cameBack[o] = true
		}
	}
	if len(cameBack) == 0 {
		return separate
	}
	for i := range found {
		f := memberOf(&found[i], r.now)
		if r.incidentOf[f.subject()] != nil || kinds[f.Kind].effect { // it is known, or is no cause
			continue
		}
		for o := range cameBack {
			separate[o] = separate[o] || sharesCause(o.everFound, &f)
		}
	}
	return separate
}

// measureHarm stores how much each open incident has harmed clients, compared with the time before it began. It leaves out incidents that
// harm no client.
func (b *Book) measureHarm(r *Ring) {
	for _, o := range b.list {
		if !o.isOpen() || o.harm() < leastHarm {
			continue
		}
		if beganEarlier := o.since.Before(o.baselineSince); o.baseline == nil || beganEarlier { // an earlier finding has joined it since then
			o.baseline, o.baselineSince = r.baseline(o.since), o.since
		}
		o.harmText = r.describeHarm(o.baseline)
	}
}

// memberOf makes a member of a finding, with its host and reason in the form in which findings are compared.
func memberOf(f *Finding, now time.Time) member {
	host := hostOf(f.Where)
	return member{Finding: *f, host: host, commonReason: commonReasonOf(f.Reason, host), found: now}
}

// causeContinues says whether a cause of the incident is found now, or may come back because it comes and goes.
func (o *incident) causeContinues(r *round) bool {
	return o.isOpen() && slices.ContainsFunc(o.members, func(m member) bool {
		mayComeBack := r.now.Sub(m.found) < kinds[m.Kind].toleratedAbsence
		return !m.effect && (r.foundNow[m.subject()] || mayComeBack)
	})
}

// rememberMembers adds the members to everFound. The text of an ended incident is made from everFound, so that it names, for example, all
// engines that were restarted one after the other.
func (o *incident) rememberMembers() {
	indexOf := make(map[subject]int, len(o.everFound))
	for i := range o.everFound {
		indexOf[o.everFound[i].subject()] = i
	}
	for _, m := range o.members {
		i, known := indexOf[m.subject()]
		if known {
			if o.everFound[i].Severity == Bad { // once bad, a finding is remembered as bad
				m.Severity = Bad
			}
			o.everFound[i] = m
		} else if len(o.everFound) < maxFindings {
			o.everFound = append(o.everFound, m)
		}
	}
	slices.SortStableFunc(o.everFound, func(x, y member) int { return cmp.Compare(kinds[x.Kind].sortKey(), kinds[y.Kind].sortKey()) })
	markEffects(o.everFound)
}

// markEffects marks the members that are effects of the first one.
func markEffects(members []member) {
	for i := range members {
		members[i].effect = i > 0 && kinds[members[i].Kind].effect && !kinds[members[0].Kind].effect
	}
}

// withTolerated returns members, the findings of this moment, and adds earlier findings of kinds that come and go. Such a finding stays in
// the incident until it has been absent for the time that its kind tolerates. It is not added if it is in another incident now, or if its
// engine gets no requests, because then the engine has another fault.
func (o *incident) withTolerated(members []member, r *round) []member {
	if !o.isOpen() {
		return members
	}
	has, added := map[subject]bool{}, false
	for i := range members {
		has[members[i].subject()] = true
	}
	for i := range o.members {
		m := &o.members[i]
		s := m.subject()
		tolerated := r.now.Sub(m.found) < kinds[m.Kind].toleratedAbsence
		if tolerated && !has[s] && !r.foundNow[s] && !r.idleEngines[engineOf(m.Where)] && len(members) < maxFindings {
			members = append(members, *m)
			has[s] = true
			added = true
		}
	}
	if added { // the incident is named by its first member, so a fixed order keeps the name the same
		slices.SortStableFunc(members, func(x, y member) int {
			return cmp.Or(cmp.Compare(kinds[x.Kind].sortKey(), kinds[y.Kind].sortKey()), cmp.Compare(x.Where, y.Where))
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

// mergeBySubject returns one finding per subject: the first one, with the worst severity of all of them. It overwrites found.
func mergeBySubject(found []Finding) []Finding {
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

// isNewerThan decides which of two incidents gets a finding that both have had. It is this one if only this one is open, or if both have
// ended and this one ended later.
func (o *incident) isNewerThan(other *incident) bool {
	if o.isOpen() || other.isOpen() {
		return !other.isOpen()
	}
	return o.until.After(other.until)
}

// assign finds the incident for a finding that belongs to no open incident yet: an incident that it may join, else the ended incident that
// had it before (before, nil: none), else a new one, which takes over the effects that clients noticed earlier. It returns nil if the book
// is full of incidents that harm as much.
func (b *Book) assign(f *member, before *incident, r *round) *incident {
	since := r.now.Add(-f.LastedFor)
	best := b.mostHarmfulToJoin(f, since, r)
	if best != nil && best.isNewOutage(f) { // f joins only the part of the incident that came back
		best = b.splitReopened(best, r)
	}
	if best == nil && before != nil {
		return before
	}
	if best == nil && b.hasNoRoom(f.harm(), r) {
		return nil
	}
	if best == nil {
		b.lastID++
		best = &incident{id: b.lastID, since: since, openSince: since}
		b.list = append(b.list, best)
		b.takeOverEffects(best, f.Kind, r)
	}
	if since.Before(best.since) {
		best.since = since
	}
	return best
}

// mostHarmfulToJoin returns, of the incidents that a finding may join, the one that harms most; in a tie, the one that began closest to
// since, when the finding began. It returns nil if the finding may join none. An incident whose cause is over takes in only its effects and
// findings of its own engines, because another engine's finding would change its description.
func (b *Book) mostHarmfulToJoin(f *member, since time.Time, r *round) (best *incident) {
	most := 0
	onlyEffect := kinds[f.Kind].effect && !kinds[f.Kind].overload // an overload may itself be a cause
	for _, o := range b.list {
		members := r.nextMembers[o]
		if len(members) == 0 { // no finding of this round has gone to the incident yet
			if !o.isOpen() || len(o.members) == 0 {
				continue // it has ended
			}
			if r.ending[o] && !onlyEffect && !o.hasEngine(f) { // its cause is over, and f may be a cause at another engine
				continue
			}
			members = o.members
		}
		delay := since.Sub(o.openSince)
		if !mayJoin(members, f, delay) && !o.hadEffect(f) { // an effect that returns joins however late it is
			continue
		}
		if h := members[0].harm(); best == nil || h > most || h == most && delay.Abs() < since.Sub(best.openSince).Abs() {
			best, most = o, h
		}
	}
	return best
}

// isNewOutage says whether the incident ended and came back, and f is a cause that it never had before. Then the part that came back is a
// different outage.
func (o *incident) isNewOutage(f *member) bool {
	return !o.previousEnd.IsZero() && o.isOpen() && !kinds[f.Kind].effect &&
		!slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// splitReopened moves the part of an incident that came back into a new incident, and leaves the first one as it was when it ended.
func (b *Book) splitReopened(o *incident, r *round) *incident {
	b.lastID++
	other := &incident{id: b.lastID, since: o.openSince, openSince: o.openSince, members: o.members}
	b.list = append(b.list, other)
	for _, m := range r.nextMembers[o] {
		r.incidentOf[m.subject()] = other
	}
	r.nextMembers[other] = r.nextMembers[o]
	delete(r.nextMembers, o)
	o.until = o.previousEnd
	return other
}

// hadEffect says whether the incident is open and had this finding before as an effect. An overload does not count, because it may itself
// be the cause.
func (o *incident) hadEffect(f *member) bool {
	return o.isOpen() && kinds[f.Kind].effect && !kinds[f.Kind].overload &&
		slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// hasEngine says whether a member of the incident is of the same engine as the finding. A finding whose place has no host is not about an
// engine.
func (o *incident) hasEngine(f *member) bool {
	return f.host != "" && slices.ContainsFunc(o.members, func(m member) bool { return engineOf(m.Where) == engineOf(f.Where) })
}

// takeOverEffects moves effects that clients noticed before their cause was found into the cause's new incident o. Effects often come
// first, because an engine counts as down only after a while. An incident that had nothing but these effects is dropped.
func (b *Book) takeOverEffects(o *incident, cause Kind, r *round) {
	k := kinds[cause]
	onlyEffect := k.effect && !k.overload
	if onlyEffect || k.sharesNoCause || k.harm == nothing { // such a finding causes no effects
		return
	}
	b.list = slices.DeleteFunc(b.list, func(noticed *incident) bool {
		unchanged := noticed != o && noticed.isOpen() && len(r.nextMembers[noticed]) == 0 // no finding of this round has gone to it
		onlyEffects := len(noticed.members) > 0 && kinds[noticed.members[0].Kind].effect  // causes come first
		if !unchanged || !onlyEffects || o.since.Sub(noticed.openSince).Abs() > togetherWithin {
			return false
		}
		if noticed.previousEnd.IsZero() && !kinds[noticed.everFound[0].Kind].effect {
			return false // the incident had another cause
		}
		for i := range noticed.members {
			r.incidentOf[noticed.members[i].subject()] = o
		}
		if noticed.openSince.Before(o.since) {
			o.since = noticed.openSince
		}
		noticed.until = noticed.previousEnd // if it had ended and come back, its first part stays in the list
		return noticed.previousEnd.IsZero()
	})
}

// mayJoin says whether a finding may join the members of an incident. delay is the time from the begin of the incident to that of the
// finding.
func mayJoin(members []member, f *member, delay time.Duration) bool {
	first, kind := kinds[members[0].Kind], kinds[f.Kind]
	switch {
	case kind.overload && first.harm < waiting: // a cause that only slows clients does not explain that many requests wait
		return false
	case first.overload && f.Kind == NotReady: // missing engines make the proxy not ready, and load does not
		return false
	}
	return joinWhen[first.joinClass()][kind.joinClass()].allows(delay, sharesCause(members, f))
}

// sharesCause says whether a finding has the same cause as one of the members. Members that are effects do not count.
func sharesCause(members []member, f *member) bool {
	for i := range members {
		if m := &members[i]; !m.effect && shareCause(m, f) {
			return true
		}
	}
	return false
}

// shareCause guesses whether two findings of one moment have the same cause. They do if they are of one engine, if they are on one host
// and both or neither of them come and go, if their kinds are of one family, or if they have the same kind and the same reason. A finding
// whose kind is marked sharesNoCause shares its cause with none.
func shareCause(a, b *member) bool {
	if kinds[a.Kind].sharesNoCause || kinds[b.Kind].sharesNoCause {
		return false
	}
	aComesAndGoes, bComesAndGoes := kinds[a.Kind].toleratedAbsence > 0, kinds[b.Kind].toleratedAbsence > 0
	// What comes and goes at one engine, such as late answers, says nothing about an outage of another engine of the host.
	if a.host != "" && a.host == b.host && aComesAndGoes == bComesAndGoes {
		return true
	}
	if a.host != "" && engineOf(a.Where) == engineOf(b.Where) { // a place without a host is not about an engine
		return true
	}
	if family := kinds[a.Kind].family; family != "" && family == kinds[b.Kind].family {
		return true
	}
	return a.Kind == b.Kind && a.commonReason == b.commonReason
}

// hasNoRoom says whether there is no room for a new incident of this harm, because maxIncidents open incidents harm as much or more. An
// incident counts as open if findings of this round have gone to it, or if it was open before the round.
func (b *Book) hasNoRoom(harm int, r *round) bool {
	if len(b.list) < maxIncidents {
		return false
	}
	asHarmful := 0
	for _, o := range b.list {
		members := r.nextMembers[o]          // an ended incident that gets a finding is open again
		if len(members) == 0 && o.isOpen() { // members of an ended incident are only those that it had until then
			members = o.members
		}
		if len(members) > 0 && mostHarm(members) >= harm {
			asHarmful++
		}
	}
	return asHarmful >= maxIncidents
}

// dropOld drops incidents that were resolved long ago. If there are still too many, it drops those that were resolved first, then open
// incidents with the least harm, whose findings become unplaced. Of equally harmful ones it drops the newest. It also keeps the time since
// when findings are unplaced.
func (b *Book) dropOld(now time.Time) {
	b.list = slices.DeleteFunc(b.list, func(o *incident) bool { return !o.isOpen() && now.Sub(o.until) >= resolvedKeptFor })
	for len(b.list) > maxIncidents {
		next := 0
		for i, o := range b.list {
			if o.isDroppedBefore(b.list[next]) {
				next = i
			}
		}
		if o := b.list[next]; o.isOpen() {
			for i := range o.members {
				b.unplaced = append(b.unplaced, o.members[i].What)
				b.unplacedBad = b.unplacedBad || o.members[i].Severity == Bad
			}
		}
		b.list = slices.Delete(b.list, next, next+1)
	}
	if len(b.unplaced) == 0 {
		b.unplacedSince = time.Time{}
	} else if b.unplacedSince.IsZero() {
		b.unplacedSince = now
	}
}

// isDroppedBefore says whether dropOld drops this incident before the other: ended ones go first, the one that ended first before the rest,
// then those with less harm, and of equally harmful ones the newest.
func (o *incident) isDroppedBefore(other *incident) bool {
	switch ended, otherEnded := !o.isOpen(), !other.isOpen(); {
	case ended && otherEnded:
		return o.until.Before(other.until)
	case ended || otherEnded:
		return ended
	}
	return cmp.Or(cmp.Compare(o.harm(), other.harm()), cmp.Compare(other.id, o.id)) < 0
}

// leastHarm is the smallest value of Finding.harm for a finding that clients notice.
const leastHarm = 2

// harm is the harm of the incident's worst member (see Finding.harm).
func (o *incident) harm() int { return mostHarm(o.members) }

// mostHarm is the harm of the worst member (see Finding.harm); 0: there are no members.
func mostHarm(members []member) (most int) {
	for i := range members {
		most = max(most, members[i].harm())
	}
	return most
}

// harm ranks findings by how much clients notice: by the harm of the kind first, then by severity.
func (f *Finding) harm() int {
	n := 2 * int(kinds[f.Kind].harm)
	if f.Severity == Bad {
		n++
	}
	return n
}

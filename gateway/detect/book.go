package detect

import (
	"cmp"
	"slices"
	"time"
)

const (
	moment     = 30 * time.Second // findings that begin within this time have begun together
	follow     = 2 * time.Minute  // an effect that clients notice may begin this long after its cause
	flap       = time.Minute      // a finding that returns within this time continues its incident
	keep       = 15 * time.Minute // how long a resolved incident stays in the list
	mostKept   = 64               // incidents, open and resolved
	mostFound  = 2000             // more findings of one round are ignored, to bound the work
	mostListed = 48               // names in Incident.Where
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
	last          int // the last id that was used
	now           time.Time
	enginesAway   bool // some engine gets no requests now
	list          []*incident
	unplaced      []string  // sentences of findings that are in no incident, because the list is full of more harmful ones
	unplacedSince time.Time // since when there are such findings; zero: there are none
	unplacedBad   bool      // one of these findings is bad
}

// incident is an incident with its findings. Incident is the form in which it is shown.
type incident struct {
	id           int
	since, until time.Time // until is zero while it lasts
	lastsSince   time.Time // when it last began or came back; since is when it began first
	closed       time.Time // when it ended before it came back; zero: it never came back
	members      []member  // its present findings; once it has ended, those that it had until then
	subject      string    // where it was found first
	lastBad      time.Time // when one of its findings was last bad
	base         *baseline // counters and latencies of the proxy when it began
	baseAt       time.Time
	measured     string   // what clients have noticed since it began, in numbers; empty: nothing was measured
	everFound    []member // all findings it ever had, each in its last form: causes first, then in order of arrival
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
	host, commonReason string // its machine, and its reason without words that differ between engines, to compare findings
	effect             bool   // the finding is an effect of the incident's cause
	found              time.Time
}

// subject identifies a finding: its kind and its place. Findings of one subject are the same finding at different times.
type subject struct {
	kind  Kind
	where string
}

func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

// Observe updates the incidents with all findings of this moment, and ignores those beyond mostFound. Each finding goes to the incident
// that it continues or whose cause it shares, or begins a new incident. An incident without a finding ends, at once or, if its findings
// come and go, after a while (see withResting).
func (b *Book) Observe(now time.Time, found []Finding) {
	found = slices.Clone(found[:min(mostFound, len(found))])
	slices.SortStableFunc(found, func(x, y Finding) int { // causes before their effects
		return cmp.Or(cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()), cmp.Compare(y.For, x.For))
	})
	found = merged(found)
	b.now = now
	away, foundNow := map[string]bool{}, map[subject]bool{} // away: engines that get no requests now
	for i := range found {
		foundNow[found[i].subject()] = true
		if kinds[found[i].Kind].gone {
			away[engineOf(found[i].Where)] = true
		}
	}
	b.enginesAway = len(away) > 0
	incidentOf, ofEngine := b.owners(now)
	ends := map[*incident]bool{} // incidents whose cause is not found now and is not expected back: see goesOn
	for _, o := range b.list {
		ends[o] = !o.goesOn(now, foundNow)
	}
	parted := b.parted(now, found, incidentOf)
	b.unplaced, b.unplacedBad = nil, false
	nextMembers := map[*incident][]member{}
	for i := range found {
		current := memberOf(&found[i], now)
		f := &current
		o := incidentOf[f.subject()]
		// If the engine got no requests before, for whatever reason, its incident goes on.
		if earlier := ofEngine[engineOf(f.Where)]; earlier != nil && kinds[f.Kind].gone && (o == nil || !o.lasts()) {
			o = earlier
		}
		if o != nil && (o.state(now) == Over || parted[o]) { // the finding does not continue its former incident
			o = nil
		}
		if o == nil || !o.lasts() && kinds[f.Kind].effect { // the cause of the ended incident is gone, so this effect has another one
			o = b.place(f, o, now, incidentOf, nextMembers, ends)
		}
		if o == nil {
			b.unplaced = append(b.unplaced, f.What)
			b.unplacedBad = b.unplacedBad || f.Severity == Bad
			continue
		}
		if !o.lasts() { // the incident comes back
			o.closed = o.until
			o.until = time.Time{}
			o.lastsSince = now
		}
		f.effect = len(nextMembers[o]) > 0 && kinds[f.Kind].effect && !kinds[nextMembers[o][0].Kind].effect
		nextMembers[o] = append(nextMembers[o], *f)
	}
	for _, o := range b.list {
		o.update(o.withResting(nextMembers[o], now, foundNow, away), now)
	}
	b.forget(now)
}

// owners returns the incident that each known finding belongs to, and by engine the lasting incident that keeps requests away from it.
func (b *Book) owners(now time.Time) (incidentOf map[subject]*incident, ofEngine map[string]*incident) {
	incidentOf, ofEngine = map[subject]*incident{}, map[string]*incident{}
	for _, o := range b.list {
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
	return incidentOf, ofEngine
}

// update gives the incident its members of now. Without members, a lasting incident ends.
func (o *incident) update(members []member, now time.Time) {
	if len(members) > 0 {
		o.members = members
		o.remember()
		if o.subject == "" {
			o.subject = members[0].Where
		}
		if slices.ContainsFunc(members, func(m member) bool { return m.Severity == Bad }) {
			o.lastBad = now
		}
	} else if o.lasts() {
		o.until = now
		if len(o.members) > 0 && kinds[o.members[0].Kind].rests > 0 { // it came and went, so it ended when it was found last
			o.until = o.lastFound()
		}
	}
}

// parted returns the incidents that ended a moment ago and are not continued, although one of their findings is back. Together with
// that finding a new one was found that shares its cause and never belonged to the incident. So the two outages are different ones.
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

// measureHarm stores how much each incident that lasts has harmed clients, compared with the time before it began. It leaves out
// incidents that harm no client.
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

// memberOf makes a member of a finding, with its host and reason in the form in which findings are compared.
func memberOf(f *Finding, now time.Time) member {
	host := hostOf(f.Where)
	return member{Finding: *f, host: host, commonReason: commonReasonOf(f.Reason, host), found: now}
}

// goesOn says whether a cause of the incident is found now, or may come back because it comes and goes.
func (o *incident) goesOn(now time.Time, foundNow map[subject]bool) bool {
	return o.lasts() && slices.ContainsFunc(o.members, func(m member) bool {
		return !m.effect && (foundNow[m.subject()] || now.Sub(m.found) < kinds[m.Kind].rests)
	})
}

// remember adds the members to everFound. The text of an ended incident is made from everFound, so that it names, for example, all
// engines that were restarted one after the other.
func (o *incident) remember() {
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
		} else if len(o.everFound) < mostFound {
			o.everFound = append(o.everFound, m)
		}
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

// withResting returns members, the findings of this moment, and adds earlier findings of kinds that come and go. Such a finding stays
// in the incident until it has been missing for the time that its kind says (rests). It is not added if it is in another incident now, or
// if its engine gets no requests (away).
func (o *incident) withResting(members []member, now time.Time, foundNow map[subject]bool, away map[string]bool) []member {
	if !o.lasts() {
		return members
	}
	has, added := map[subject]bool{}, false
	for i := range members {
		has[members[i].subject()] = true
	}
	for i := range o.members {
		m := &o.members[i]
		s, mayRest := m.subject(), kinds[m.Kind].rests
		if now.Sub(m.found) < mayRest && !has[s] && !foundNow[s] && !away[engineOf(m.Where)] && len(members) < mostFound {
			members = append(members, *m)
			has[s] = true
			added = true
		}
	}
	if added { // the incident is named by its first member, so a fixed order keeps the name the same
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

// merged returns one finding per subject: the first one, with the worst severity of all of them. It overwrites found.
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

// takesFrom says whether a finding that both incidents have had goes to this one and not to the other. It does if only this one lasts,
// or if both have ended and this one ended later.
func (o *incident) takesFrom(other *incident) bool {
	if o.lasts() || other.lasts() {
		return !other.lasts()
	}
	return o.until.After(other.until)
}

// place finds the incident for a finding that belongs to no lasting incident yet: an incident that it may join, else the ended incident
// that had it before (before, nil: none), else a new one, which takes over the effects that clients noticed earlier. It returns nil if the
// book is full of incidents that harm as much. An ending incident takes in only its effects and findings of its own engines, because
// another engine's finding would change its description. nextMembers holds the members that incidents have got in this round, and ends the
// incidents whose cause is gone.
func (b *Book) place(f *member, before *incident, now time.Time, incidentOf map[subject]*incident, nextMembers map[*incident][]member,
	ends map[*incident]bool) *incident {
	since := now.Add(-f.For)
	best := b.mostHarmful(f, since, nextMembers, ends)
	if best != nil && best.isOtherOutage(f) { // f joins only the part of the incident that came back
		best = b.split(best, incidentOf, nextMembers)
	}
	if best == nil && before != nil {
		return before
	}
	if best == nil && b.hasNoRoom(f.harm(), nextMembers) {
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

// mostHarmful returns, of the incidents that a finding may join, the one that harms most; in a tie, the one that began closest to since,
// when the finding began. It returns nil if the finding may join none.
func (b *Book) mostHarmful(f *member, since time.Time, nextMembers map[*incident][]member, ends map[*incident]bool) (best *incident) {
	most := 0
	onlyEffect := kinds[f.Kind].effect && !kinds[f.Kind].load
	for _, o := range b.list {
		members := nextMembers[o]
		if len(members) == 0 { // no finding of this round has gone to the incident yet
			if !o.lasts() || len(o.members) == 0 {
				continue // it has ended
			}
			if ends[o] && !onlyEffect && !o.hasEngine(f) { // its cause is gone, and f may be a cause at another engine
				continue
			}
			members = o.members
		}
		late := since.Sub(o.lastsSince)
		if !mayJoin(members, f, late) && !o.hadEffect(f) { // an effect that returns joins however late it is
			continue
		}
		if h := members[0].harm(); best == nil || h > most || h == most && late.Abs() < since.Sub(best.lastsSince).Abs() {
			best, most = o, h
		}
	}
	return best
}

// isOtherOutage says whether the incident ended and came back, and f is a cause that it never had before. Then the part that came back is
// a different outage.
func (o *incident) isOtherOutage(f *member) bool {
	return !o.closed.IsZero() && o.lasts() && !kinds[f.Kind].effect &&
		!slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// split moves the part of an incident that came back into a new incident, and leaves the first one as it was when it ended.
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

// hadEffect says whether the incident lasts and had this finding before as an effect. A finding of a kind with load does not count,
// because it may itself be the cause.
func (o *incident) hadEffect(f *member) bool {
	return o.lasts() && kinds[f.Kind].effect && !kinds[f.Kind].load &&
		slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// hasEngine says whether a member of the incident is of the same engine as the finding.
func (o *incident) hasEngine(f *member) bool {
	return f.host != "" && slices.ContainsFunc(o.members, func(m member) bool { return engineOf(m.Where) == engineOf(f.Where) })
}

// claim moves effects that clients noticed before their cause was found into the cause's new incident o. Effects often come first, because
// an engine counts as down only after a while. An incident that had nothing but these effects is dropped.
func (b *Book) claim(o *incident, cause Kind, incidentOf map[subject]*incident, nextMembers map[*incident][]member) {
	k := kinds[cause]
	onlyEffect := k.effect && !k.load
	if onlyEffect || k.alone || k.harm == nothing { // such a finding causes no effects
		return
	}
	b.list = slices.DeleteFunc(b.list, func(noticed *incident) bool {
		free := noticed != o && noticed.lasts() && len(nextMembers[noticed]) == 0        // no finding of this round has gone to it
		onlyEffects := len(noticed.members) > 0 && kinds[noticed.members[0].Kind].effect // causes come first
		if !free || !onlyEffects || o.since.Sub(noticed.lastsSince).Abs() > moment {
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
		noticed.until = noticed.closed // if it had ended and come back, its first part stays in the list
		return noticed.closed.IsZero()
	})
}

// mayJoin says whether a finding may join the members of an incident. late is the time from the begin of the incident to that of the
// finding.
func mayJoin(members []member, f *member, late time.Duration) bool {
	lead, kind := kinds[members[0].Kind], kinds[f.Kind]
	switch {
	case kind.load && lead.harm < waiting: // a cause that only slows clients does not explain that many requests wait
		return false
	case lead.load && f.Kind == NotReady: // missing engines make the proxy not ready, and load does not
		return false
	}
	return joinWhen[lead.class()][kind.class()].allows(late, sharesCause(members, f))
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
// whose kind stands alone shares its cause with none.
func shareCause(a, b *member) bool {
	if kinds[a.Kind].alone || kinds[b.Kind].alone {
		return false
	}
	aComesAndGoes, bComesAndGoes := kinds[a.Kind].rests > 0, kinds[b.Kind].rests > 0
	// What comes and goes at one engine, such as late answers, says nothing about an outage of another engine of the host.
	if a.host != "" && a.host == b.host && aComesAndGoes == bComesAndGoes {
		return true
	}
	if a.host != "" && engineOf(a.Where) == engineOf(b.Where) {
		return true
	}
	if family := kinds[a.Kind].family; family != "" && family == kinds[b.Kind].family {
		return true
	}
	return a.Kind == b.Kind && a.commonReason == b.commonReason
}

// hasNoRoom says whether there is no room for a new incident of this harm, because mostKept lasting incidents harm as much or more. An
// incident counts as lasting if findings of this round have gone to it (nextMembers), or if it lasted before the round.
func (b *Book) hasNoRoom(harm int, nextMembers map[*incident][]member) bool {
	if len(b.list) < mostKept {
		return false
	}
	lasting := 0
	for _, o := range b.list {
		members := nextMembers[o]           // an ended incident that gets a finding lasts again
		if len(members) == 0 && o.lasts() { // members of an ended incident are only those that it had until then
			members = o.members
		}
		if len(members) > 0 && mostHarm(members) >= harm {
			lasting++
		}
	}
	return lasting >= mostKept
}

// forget drops incidents that were resolved long ago. If there are still too many, it drops those that were resolved first, then lasting
// incidents with the least harm, whose findings become unplaced. Of equally harmful ones it drops the newest. It also keeps the time since
// when findings are unplaced.
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
				b.unplaced = append(b.unplaced, o.members[i].What)
				b.unplacedBad = b.unplacedBad || o.members[i].Severity == Bad
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

// dropsBefore says whether forget drops this incident before the other: ended ones go first, the earliest of them before the others, then
// those with less harm, and of equally harmful ones the newest.
func (o *incident) dropsBefore(other *incident) bool {
	if over := !o.lasts(); over || !other.lasts() {
		return over && (other.lasts() || o.until.Before(other.until))
	}
	return cmp.Or(cmp.Compare(o.harm(), other.harm()), cmp.Compare(other.id, o.id)) < 0
}

// leastHarm is the smallest value of Finding.harm for a finding that clients notice.
const leastHarm = 2

// harm is the harm of the incident's worst member (see Finding.harm).
func (o *incident) harm() int { return mostHarm(o.members) }

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

package detect

import (
	"cmp"
	"slices"
	"time"
)

// round has the values with which one call of Book.Observe works.
type round struct {
	now           time.Time
	foundNow      map[subject]bool       // kinds and places of the findings of this moment
	idleEngines   map[string]bool        // engines that get no requests now
	incidentOf    map[subject]*incident  // by kind and place of a finding: the incident that has it
	idleIncidents map[string]*incident   // by engine: the open incident that keeps requests away from the engine
	ending        map[*incident]bool     // incidents whose cause is not found now and is not expected back: see causeContinues
	separate      map[*incident]bool     // ended incidents that do not go on, although one of their findings is back: see separateOutages
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

// indexIncidents returns the incident of each known finding, and by engine the open incident that keeps requests away from it.
func (b *Book) indexIncidents(now time.Time) (incidentOf map[subject]*incident, idleIncidents map[string]*incident) {
	incidentOf, idleIncidents = map[subject]*incident{}, map[string]*incident{}
	for _, o := range b.list {
		members := o.members
		endedRecently := !o.isOpen() && o.state(now) == Paused
		if endedRecently { // any finding that the incident ever had may come back
			members = o.everFound
		}
		for i := range members {
			s := members[i].subject()
			if other := incidentOf[s]; other == nil || o.isNewerThan(other) { // of several incidents with the finding, the newest has it
				incidentOf[s] = o
			}
			if o.isOpen() && kinds[s.kind].getsNoRequests {
				idleIncidents[engineOf(s.where)] = o
			}
		}
	}
	return incidentOf, idleIncidents
}

// separateOutages returns the incidents that ended at most resumedWithin ago and must not go on, although one of their findings is back.
// The reason is a new finding that shares the cause and never belonged to the incident: so the two outages are different ones.
func separateOutages(found []Finding, r *round) map[*incident]bool {
	cameBack, separate := map[*incident]bool{}, map[*incident]bool{} // cameBack: ended a short time ago, with a finding that is back
	for i := range found {
		if o := r.incidentOf[found[i].subject()]; o != nil && !o.isOpen() && o.state(r.now) == Paused {
			cameBack[o] = true
		}
	}
	if len(cameBack) == 0 { // nothing to separate
		return separate
	}
	for i := range found {
		f := memberOf(&found[i], r.now)
		if r.incidentOf[f.subject()] != nil || kinds[f.Kind].effect { // the finding belongs to an incident already, or is no cause
			continue
		}
		for o := range cameBack {
			separate[o] = separate[o] || sharesCause(o.everFound, &f)
		}
	}
	return separate
}

// add puts a finding into the incident that it continues, or else into the one that assign chooses. An ended incident that gets a finding
// is open again. If there is no room for another incident, the finding is unplaced.
func (b *Book) add(f *member, r *round) {
	k := kinds[f.Kind]
	o := r.continued(f)
	if o == nil || !o.isOpen() && k.effect { // the cause of an ended incident is over, so this effect has another cause
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
	f.effect = len(members) > 0 && k.effect && !kinds[members[0].Kind].effect // as markEffects decides: the first member is the cause
	r.nextMembers[o] = append(members, *f)
}

// continued returns the incident that a finding continues; nil: there is none.
func (r *round) continued(f *member) *incident {
	o := r.incidentOf[f.subject()]
	inOpenIncident := o != nil && o.isOpen()
	// If the engine got no requests before, for whatever reason, the incident of that time goes on.
	if earlier := r.idleIncidents[engineOf(f.Where)]; earlier != nil && kinds[f.Kind].getsNoRequests && !inOpenIncident {
		o = earlier
	}
	if o != nil && (o.state(r.now) == Over || r.separate[o]) {
		return nil
	}
	return o
}

// causeContinues says whether a cause of the incident is found now, or may come back because it comes and goes.
func (o *incident) causeContinues(r *round) bool {
	return o.isOpen() && slices.ContainsFunc(o.members, func(m member) bool {
		mayComeBack := r.now.Sub(m.found) < kinds[m.Kind].toleratedAbsence
		return !m.effect && (r.foundNow[m.subject()] || mayComeBack)
	})
}

// isNewerThan says whether o, and not the other incident, gets a finding that both have had. This is so if only o is open, or if both have
// ended and o ended later.
func (o *incident) isNewerThan(other *incident) bool {
	if o.isOpen() || other.isOpen() {
		return !other.isOpen()
	}
	return o.until.After(other.until)
}

// assign finds the incident for a finding that belongs to no open incident yet. The first choice is an incident that the finding may join,
// and the second is before, the ended incident that had the finding (nil: there is none). The last choice is a new incident, which takes
// over the effects that clients noticed earlier. assign returns nil if the list is full of incidents that harm as much.
func (b *Book) assign(f *member, before *incident, r *round) *incident {
	since := r.now.Add(-f.LastedFor)
	best := b.mostHarmfulToJoin(f, since, r)
	switch {
	case best != nil && best.isNewOutage(f): // f joins only the part of the incident that came back
		best = b.splitReopened(best, r)
	case best != nil: // f joins this incident
	case before != nil:
		return before
	case b.hasNoRoom(f.harm(), r):
		return nil
	default:
		b.lastID++
		best = &incident{id: b.lastID, since: since, openSince: since}
		b.list = append(b.list, best)
		b.takeOverEffects(best, f.Kind, r)
	}
	if since.Before(best.since) { // f has lasted for longer than the incident
		best.since = since
	}
	return best
}

// mostHarmfulToJoin returns, of the incidents that a finding may join, the one that harms most; in a tie, the one that began closest to
// since, when the finding began. It returns nil if the finding may join none. An incident whose cause is over takes in only its effects and
// findings of its own engines, because another engine's finding would change its description.
func (b *Book) mostHarmfulToJoin(f *member, since time.Time, r *round) (best *incident) {
	bestHarm := 0
	onlyEffect := kinds[f.Kind].effect && !kinds[f.Kind].overload // an overload may itself be a cause
	for _, o := range b.list {
		members := r.nextMembers[o]
		if len(members) == 0 { // no finding of this round has gone to the incident yet
			if !o.isOpen() || len(o.members) == 0 { // the incident has ended
				continue
			}
			if r.ending[o] && !onlyEffect && !o.hasEngine(f) { // the incident's cause is over, and f may be a cause at another engine
				continue
			}
			members = o.members
		}
		delay := since.Sub(o.openSince)
		if !mayJoin(members, f, delay) && !o.hadEffect(f) { // an effect that returns joins however late it is
			continue
		}
		harm := members[0].harm()
		beganCloser := best != nil && delay.Abs() < since.Sub(best.openSince).Abs()
		if best == nil || harm > bestHarm || harm == bestHarm && beganCloser {
			best, bestHarm = o, harm
		}
	}
	return best
}

// isNewOutage says whether the incident ended and came back, and f is a cause that it never had before. Then the part that came back is a
// different outage.
func (o *incident) isNewOutage(f *member) bool {
	cameBack := !o.previousEnd.IsZero() && o.isOpen()
	return cameBack && !kinds[f.Kind].effect && !o.everHad(f)
}

// everHad says whether the incident has, or once had, this finding: one with the same kind and place.
func (o *incident) everHad(f *member) bool {
	return slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// splitReopened moves the part of an incident that came back into a new incident, which it returns. It leaves the first one as it was when
// it ended.
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
	return o.isOpen() && kinds[f.Kind].effect && !kinds[f.Kind].overload && o.everHad(f)
}

// hasEngine says whether a member of the incident is about the same engine as the finding. A finding whose place has no host is not about
// an engine.
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
		unchanged := noticed != o && noticed.isOpen() && len(r.nextMembers[noticed]) == 0 // no finding of this round has gone to noticed
		onlyEffects := len(noticed.members) > 0 && kinds[noticed.members[0].Kind].effect  // causes come first
		beganTogether := o.since.Sub(noticed.openSince).Abs() <= togetherWithin
		if !unchanged || !onlyEffects || !beganTogether {
			return false
		}
		if noticed.previousEnd.IsZero() && !kinds[noticed.everFound[0].Kind].effect { // the incident had another cause
			return false
		}
		for i := range noticed.members {
			r.incidentOf[noticed.members[i].subject()] = o // this round's findings of the effects go to o
		}
		if noticed.openSince.Before(o.since) {
			o.since = noticed.openSince
		}
		noticed.until = noticed.previousEnd // if the incident had ended and come back, its first part stays in the list
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
		if len(members) == 0 && o.isOpen() { // the old members of an ended incident do not count
			members = o.members
		}
		if len(members) > 0 && mostHarm(members) >= harm {
			asHarmful++
		}
	}
	return asHarmful >= maxIncidents
}

// withTolerated returns members, the findings of this moment, and adds earlier findings of kinds that come and go. Such a finding stays in
// the incident until it has been absent for the time that its kind tolerates. It is not added if it is in another incident now, or if its
// engine gets no requests, because then the engine has another fault.
func (o *incident) withTolerated(members []member, r *round) []member {
	if !o.isOpen() {
		return members
	}
	isMember, added := map[subject]bool{}, false
	for i := range members {
		isMember[members[i].subject()] = true
	}
	for i := range o.members {
		m := &o.members[i]
		s := m.subject()
		tolerated := r.now.Sub(m.found) < kinds[m.Kind].toleratedAbsence
		isPresent := isMember[s] || r.foundNow[s] // here, or in another incident
		if tolerated && !isPresent && !r.idleEngines[engineOf(m.Where)] && len(members) < maxFindings {
			members = append(members, *m)
			isMember[s] = true
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

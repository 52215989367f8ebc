package detect

import (
	"cmp"
	"slices"
	"time"
)

// round has the values with which one call of Book.Observe works.
type round struct {
	now             time.Time
	foundNow        map[subject]bool       // kinds and places of the findings of this moment
	withoutRequests map[string]bool        // engines that get no requests now
	incidentOf      map[subject]*incident  // by kind and place of a finding: the incident that has it
	outageOf        map[string]*incident   // by engine: the open incident that keeps requests away from the engine
	causeIsOver     map[*incident]bool     // incidents whose cause is not found now and is not expected back: see causeContinues
	staysEnded      map[*incident]bool     // ended incidents that do not go on, although one of their findings is back: see separateOutages
	newMembers      map[*incident][]member // the findings of this round that incidents have got so far
}

// newRound compares the findings of this moment with the incidents, and changes neither. An incident has the findings of one cause: the
// cause comes first, and its effects follow. add then gives each finding to an incident. For this the result says which incident had a
// finding before (incidentOf), in which open incident an engine gets no requests (outageOf), of which incidents the cause is over, and
// which ended ones do not go on although a finding of theirs is back (staysEnded).
func (b *Book) newRound(now time.Time, found []Finding) *round {
	r := &round{now: now, foundNow: map[subject]bool{}, withoutRequests: map[string]bool{}, causeIsOver: map[*incident]bool{},
		newMembers: map[*incident][]member{}}
	for i := range found {
		r.foundNow[found[i].subject()] = true
		if kinds[found[i].Kind].getsNoRequests { // the finding means that its engine gets no requests
			r.withoutRequests[engineOf(found[i].Where)] = true
		}
	}
	r.incidentOf, r.outageOf = b.indexIncidents(now)
	for _, o := range b.list {
		r.causeIsOver[o] = !o.causeContinues(r) // uses foundNow
	}
	r.staysEnded = separateOutages(found, r) // tells an outage that comes back from another one; uses incidentOf
	return r
}

// membersOf returns the findings of this round that have gone to an incident. If there are none yet, it returns the members that the
// incident had before the round; nil: the incident has ended.
func (r *round) membersOf(o *incident) []member {
	if members := r.newMembers[o]; len(members) > 0 { // an ended incident that gets a finding is open again
		return members
	}
	if !o.isOpen() {
		return nil
	}
	return o.members
}

// indexIncidents returns the incident of each known finding, and by engine the open incident that keeps requests away from it.
func (b *Book) indexIncidents(now time.Time) (incidentOf map[subject]*incident, outageOf map[string]*incident) {
	incidentOf, outageOf = map[subject]*incident{}, map[string]*incident{}
	for _, o := range b.list {
		members := o.members
		if o.mayResume(now) { // any finding that the incident ever had may come back
			members = o.everFound
		}
		for i := range members {
			s := members[i].subject()
			if other := incidentOf[s]; other == nil || o.isNewerThan(other) { // of several incidents with the finding, the newest has it
				incidentOf[s] = o
			}
			if o.isOpen() && kinds[s.kind].getsNoRequests {
				outageOf[engineOf(s.where)] = o
			}
		}
	}
	return incidentOf, outageOf
}

// mayResume says whether the incident ended a short time ago (resumedWithin), so that it goes on if one of its findings comes back.
func (o *incident) mayResume(now time.Time) bool {
	return !o.isOpen() && now.Sub(o.until) <= resumedWithin
}

// separateOutages tells an outage that comes back from another one. For example, engine A of a host was down, and its incident ended a
// short time ago (mayResume). If only A is down again, this incident goes on. If B of the same host is down, too, and was not before, the
// cause is the same again, but the outage is another one: the incident of A stays ended, and A and B get a new one.
//
// In general, an ended incident stays ended although one of its findings is back if another finding of now shares its cause and belongs to
// no incident (incidentOf). separateOutages returns the incidents that stay ended.
func separateOutages(found []Finding, r *round) (staysEnded map[*incident]bool) {
	staysEnded = map[*incident]bool{}
	cameBack := map[*incident]bool{} // incidents that may resume, because one of their findings is back
	for i := range found {
		if o := r.incidentOf[found[i].subject()]; o != nil && o.mayResume(r.now) {
			cameBack[o] = true
		}
	}
	if len(cameBack) == 0 { // nothing to separate
		return staysEnded
	}
	for i := range found {
		f := memberOf(&found[i], r.now) // with host and reason in the form in which sharesCause compares them
		belongsToIncident := r.incidentOf[f.subject()] != nil
		if belongsToIncident || kinds[f.Kind].effect { // an effect is no cause, so it shows no other outage
			continue
		}
		for o := range cameBack {
			staysEnded[o] = staysEnded[o] || sharesCause(o.everFound, &f)
		}
	}
	return staysEnded
}

// add puts a finding into the incident that it continues, or else into the one that assign chooses. An ended incident that gets a finding
// is open again. If there is no room for another incident, the finding is only listed in unplaced. A placed finding is marked as an effect
// if its kind is a result of other findings and the first finding that its incident got in this round is a cause.
func (b *Book) add(f *member, r *round) {
	kindIsEffect := kinds[f.Kind].effect
	o := r.continued(f) // may have ended a short time ago; nil: the finding continues no incident
	// The cause of an ended incident is over, so an effect does not simply reopen it: assign first looks for an open incident.
	if o == nil || kindIsEffect && !o.isOpen() {
		o = b.assign(f, o, r)
	}
	if o == nil { // there is no room
		b.unplaced = append(b.unplaced, f.What)
		b.unplacedHaveBad = b.unplacedHaveBad || f.Severity == Bad
		return
	}
	if !o.isOpen() { // the incident comes back
		o.previousEnd = o.until
		o.until = time.Time{}
		o.openSince = r.now
	}
	members := r.newMembers[o]
	hasCause := len(members) > 0 && !kinds[members[0].Kind].effect // causes come first
	f.effect = kindIsEffect && hasCause
	r.newMembers[o] = append(members, *f)
}

// continued returns the incident that a finding continues; nil: there is none. This is the incident that had the finding before. If the
// finding means that an engine gets no requests, it may also be an open incident in which the engine got none for another reason.
func (r *round) continued(f *member) *incident {
	o := r.incidentOf[f.subject()]
	inOpenIncident := o != nil && o.isOpen()
	// For example, an engine first hangs and then counts as down: this is one outage.
	if outage := r.outageOf[engineOf(f.Where)]; outage != nil && kinds[f.Kind].getsNoRequests && !inOpenIncident {
		o = outage
	}
	// The incident does not go on if it ended too long ago, or if what is wrong now is another outage with the same cause (staysEnded).
	if o != nil && (o.state(r.now) == Over || r.staysEnded[o]) {
		return nil
	}
	return o
}

// causeContinues says whether a cause of the incident is found now, or may come back because it comes and goes.
func (o *incident) causeContinues(r *round) bool {
	return o.isOpen() && slices.ContainsFunc(o.members, func(m member) bool {
		mayComeBack := r.now.Sub(m.lastFoundAt) < kinds[m.Kind].toleratedAbsence
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

// assign finds the incident for a finding that belongs to no open incident yet. The first choice is an open incident that the finding may
// join. If this one had ended and came back, and the finding shows that what came back is another outage, this outage becomes an incident
// of its own, which the finding joins. The second choice is ended, the ended incident that had the finding (nil: there is none). The last
// choice is a new incident, which takes over the effects that clients noticed earlier. assign returns nil if the list is full of incidents
// that harm as much.
func (b *Book) assign(f *member, ended *incident, r *round) *incident {
	since := r.now.Add(-f.LastedFor) // when the finding began
	chosen := b.mostHarmfulToJoin(f, since, r)
	switch {
	case chosen != nil && chosen.isNewOutage(f):
		chosen = b.splitReopened(chosen, r)
	case chosen != nil: // f joins this incident
	case ended != nil: // it comes back, and keeps the time at which it first began, because f is one of its own findings
		return ended
	case b.hasNoRoom(f.harm(), r):
		return nil
	default:
		chosen = b.newIncident(since)
		b.takeOverEffects(chosen, f.Kind, r)
	}
	if since.Before(chosen.since) { // f has lasted for longer than the incident
		chosen.since = since
	}
	return chosen
}

// newIncident adds an incident that began at the time since. It has no findings yet.
func (b *Book) newIncident(since time.Time) *incident {
	b.lastID++
	o := &incident{id: b.lastID, since: since, openSince: since}
	b.list = append(b.list, o)
	return o
}

// mostHarmfulToJoin returns, of the incidents that a finding may join, the one whose first member, its cause, harms most; in a tie, the one
// that began closest to since, when the finding began. It returns nil if the finding may join none.
func (b *Book) mostHarmfulToJoin(f *member, since time.Time, r *round) (best *incident) {
	bestHarm := 0
	for _, o := range b.list {
		if !r.mayTakeIn(o, f, since) {
			continue
		}
		harm := r.membersOf(o)[0].harm()
		beganCloser := best != nil && since.Sub(o.openSince).Abs() < since.Sub(best.openSince).Abs()
		if best == nil || harm > bestHarm || harm == bestHarm && beganCloser {
			best, bestHarm = o, harm
		}
	}
	return best
}

// mayTakeIn says whether an incident may take in a finding that began at the time since. mayJoin decides by the kinds of the two, and by
// how long after the incident the finding began. An effect that the incident had before joins however late it is.
func (r *round) mayTakeIn(o *incident, f *member, since time.Time) bool {
	members := r.membersOf(o)
	if len(members) == 0 { // the incident has ended
		return false
	}
	// If the cause is over, and the incident got no finding in this round yet, at most effects of the cause go on. Then it takes in
	// only effects, and findings of engines that it is about already. A finding of another engine would change its description.
	atMostEffectsGoOn := r.causeIsOver[o] && len(r.newMembers[o]) == 0
	if atMostEffectsGoOn && !kinds[f.Kind].isOnlyEffect() && !o.hasEngine(f) {
		return false
	}
	delay := since.Sub(o.openSince)
	return mayJoin(members, f, delay) || o.hadEffect(f)
}

// isOnlyEffect says whether findings of this kind always result from others. An overload is an effect, too, but may itself be a cause.
func (d *Detector) isOnlyEffect() bool { return d.effect && !d.overload }

// isNewOutage says whether the incident ended and came back, and f is a cause that it never had before. Then the part that came back is a
// different outage.
func (o *incident) isNewOutage(f *member) bool {
	isBack := o.cameBack() && o.isOpen()
	return isBack && !kinds[f.Kind].effect && !o.everHad(f)
}

// everHad says whether the incident has, or once had, this finding: one with the same kind and place.
func (o *incident) everHad(f *member) bool {
	return slices.ContainsFunc(o.everFound, func(m member) bool { return m.subject() == f.subject() })
}

// splitReopened splits an incident that had ended (at previousEnd) and came back (at openSince), because what came back is another outage.
// It returns a new incident for this outage, which begins when the first one came back, and gets its present findings. The first one ends
// again, at the time at which it had ended before.
func (b *Book) splitReopened(o *incident, r *round) (cameBack *incident) {
	cameBack = b.newIncident(o.openSince)
	cameBack.members = o.members // o keeps them, too, but its text is now made from all findings that it ever had (everFound)
	for _, m := range r.newMembers[o] {
		r.incidentOf[m.subject()] = cameBack
	}
	r.newMembers[cameBack] = r.newMembers[o]
	delete(r.newMembers, o)
	o.until = o.previousEnd
	return cameBack
}

// hadEffect says whether the incident is open and had this finding before as an effect.
func (o *incident) hadEffect(f *member) bool {
	return o.isOpen() && kinds[f.Kind].isOnlyEffect() && o.everHad(f)
}

// hasEngine says whether a member of the incident is about the same engine as the finding. A finding whose place has no host is not about
// an engine.
func (o *incident) hasEngine(f *member) bool {
	return f.host != "" && slices.ContainsFunc(o.members, func(m member) bool { return engineOf(m.Where) == engineOf(f.Where) })
}

// takeOverEffects moves effects that clients noticed before their cause was found into the cause's new incident o. Effects often come
// first, because an engine counts as down only after a while. cause is the kind of the finding for which o was made. An incident that had
// nothing but these effects is dropped. But if it had ended before and came back with them, it ends again, as it was then.
func (b *Book) takeOverEffects(o *incident, cause Kind, r *round) {
	if !kinds[cause].causesEffects() {
		return
	}
	b.list = slices.DeleteFunc(b.list, func(noticed *incident) bool {
		if noticed == o || !r.mayBeEffects(noticed, o.since) {
			return false
		}
		for i := range noticed.members {
			r.incidentOf[noticed.members[i].subject()] = o // this round's findings of the effects go to o
		}
		if noticed.openSince.Before(o.since) {
			o.since = noticed.openSince
		}
		if noticed.cameBack() {
			noticed.until = noticed.previousEnd
			return false
		}
		return true
	})
}

// causesEffects says whether findings of this kind may have effects that are findings, too. An effect has none itself, except an overload:
// many requests wait, which leads to further effects. A finding that clients do not notice has none, and neither has one that shares its
// cause with no other finding: an operator caused it, or it is about a whole group or proxy.
func (d *Detector) causesEffects() bool {
	return !d.isOnlyEffect() && !d.sharesNoCause && d.harm != nothing
}

// mayBeEffects says whether an open incident may consist of effects of a cause that was found only now, and that began at the time
// causeSince. It has nothing but effects, got no finding in this round yet, and began at about the same time. If it had a cause, its
// effects are those of that cause, unless it had ended and came back with the effects alone.
func (r *round) mayBeEffects(noticed *incident, causeSince time.Time) bool {
	unchanged := noticed.isOpen() && len(r.newMembers[noticed]) == 0
	onlyEffects := len(noticed.members) > 0 && kinds[noticed.members[0].Kind].effect // causes come first
	beganTogether := causeSince.Sub(noticed.openSince).Abs() <= togetherWithin
	if !unchanged || !onlyEffects || !beganTogether {
		return false
	}
	everHadCause := !kinds[noticed.everFound[0].Kind].effect // causes come first
	return !everHadCause || noticed.cameBack()
}

// cameBack says whether the incident had ended, and came back.
func (o *incident) cameBack() bool { return !o.previousEnd.IsZero() }

// mayJoin says whether a finding may join the members of an incident, of which the first one is the cause. delay is the time from the begin
// of the incident to that of the finding. The table joinWhen decides, by the classes of the two kinds: some kinds join only near the begin
// of an incident, and some only if they share a cause with a member.
func mayJoin(members []member, f *member, delay time.Duration) bool {
	cause, kind := kinds[members[0].Kind], kinds[f.Kind]
	switch {
	case kind.overload && cause.harm < waiting: // an overload means that many requests wait, which this cause does not explain
		return false
	case cause.overload && f.Kind == NotReady: // missing engines make the proxy not ready, and load does not
		return false
	}
	return joinWhen[cause.joinClass()][kind.joinClass()].allows(delay, sharesCause(members, f))
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

// hasNoRoom says whether there is no room for a new incident of this harm (see Finding.harm: more is worse), because maxIncidents open
// incidents harm as much or more. Ended incidents do not count, because a new incident may replace them.
func (b *Book) hasNoRoom(harm int, r *round) bool {
	if len(b.list) < maxIncidents {
		return false
	}
	asHarmful := 0 // number of open incidents that harm at least as much
	for _, o := range b.list {
		members := r.membersOf(o) // empty: the incident has ended
		if len(members) > 0 && mostHarm(members) >= harm {
			asHarmful++
		}
	}
	return asHarmful >= maxIncidents
}

// withExpectedBack returns members, the findings of this moment, and adds earlier findings of kinds that come and go. Such a finding stays
// in the incident until it has been absent for the time that its kind tolerates. It is not added if it is in another incident now. Nor is
// it added if its engine gets no requests now: then a worse fault of the engine has taken its place, with a finding of its own. An incident
// that has ended gets none back.
func (o *incident) withExpectedBack(members []member, r *round) []member {
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
		isExpectedBack := r.now.Sub(m.lastFoundAt) < kinds[m.Kind].toleratedAbsence
		isPresent := isMember[s] || r.foundNow[s] // here, or in another incident
		hasRoom := len(members) < maxFindings
		if isExpectedBack && !isPresent && !r.withoutRequests[engineOf(m.Where)] && hasRoom {
			members = append(members, *m)
			isMember[s] = true
			added = true
		}
	}
	if added { // without an addition, the findings of this moment are in order already, and their effects are marked
		sortCausesFirst(members)
	}
	return members
}

// sortCausesFirst sorts the members, causes before effects, and marks those that are effects of the first one. The incident is named by its
// first member, so members of equal rank are sorted by place, which keeps the name the same from round to round.
func sortCausesFirst(members []member) {
	slices.SortStableFunc(members, func(x, y member) int {
		return cmp.Or(cmp.Compare(kinds[x.Kind].sortKey(), kinds[y.Kind].sortKey()), cmp.Compare(x.Where, y.Where))
	})
	markEffectsOfFirst(members)
}

package detect

import (
	"cmp"
	"slices"
	"time"
)

// round is one call of Book.Observe: the findings of this moment on their way to the incidents.
type round struct {
	now, previous time.Time             // times of this look and of the one before
	found         []*member             // causes before their effects, and what has lasted longer first
	owners        map[subject]*incident // by finding: the incident that has it or, within backWithin, had it
	away          map[string]bool       // engines that get no requests now
}

func (b *Book) newRound(now time.Time, found []Finding) *round {
	r := &round{now: now, previous: b.now, owners: map[subject]*incident{}, away: map[string]bool{}}
	for i := range found {
		r.found = append(r.found, memberOf(&found[i], now))
		if kinds[found[i].Kind].getsNoRequests {
			r.away[engineOf(found[i].Where)] = true
		}
	}
	latestLast := slices.Clone(b.list)
	slices.SortStableFunc(latestLast, func(x, y *incident) int {
		return cmp.Or(firstIf(!x.isOpen(), !y.isOpen()), x.until.Compare(y.until))
	})
	for _, o := range latestLast {
		for _, m := range o.members {
			if m.present || now.Sub(m.foundAt) <= backWithin || !o.isOpen() && now.Sub(o.until) <= backWithin {
				r.owners[m.subject()] = o
			}
		}
	}
	return r
}

// place puts a finding that no open incident has into the one whose cause it shares, or into the ended one that had it, or into a new one.
// If there is no room for another incident, the finding is only listed in unplaced.
func (b *Book) place(f *member, r *round) {
	o := b.continued(f, r)
	if f.follows && o != nil && o.isOpen() { // it was thought to be a fault of its own
		o.members = slices.DeleteFunc(o.members, f.isSame)
		o = nil
	}
	// The cause of an ended incident is over, so an effect does not simply reopen it: assign first looks for an open incident.
	if o == nil || f.isEffect() && !o.isOpen() {
		o = b.assign(f, o, r)
	}
	if o == nil {
		b.unplaced = append(b.unplaced, f.What)
		b.unplacedHaveBad = b.unplacedHaveBad || f.Severity == Bad
		return
	}
	if !o.isOpen() {
		o.previousEnd, o.until, o.openSince = o.until, time.Time{}, r.now
	}
	o.take(f, r)
	r.owners[f.subject()] = o
}

// take records a finding of this moment in the incident. A finding that was missing at the last look has
// come back, unless its kind comes and goes anyway. One that is found twice is told as it was found first.
func (o *incident) take(f *member, r *round) {
	if i := slices.IndexFunc(o.members, f.isSame); i >= 0 {
		had := o.members[i]
		if had.foundAt.Equal(r.now) {
			if f.Severity == Bad {
				had.Severity, had.badAt = Bad, r.now
			}
			return
		}
		f.times, f.led, f.present, f.effect = had.times, had.led, had.present, had.effect
		f.follows = f.follows || had.follows && o.members[0].Kind == ProxyBusy // it may rest for a moment
		switch {
		case r.now.Sub(had.foundAt) > backWithin:
			f.times = 1
		case had.foundAt.Before(r.previous) && kinds[f.Kind].toleratedAbsence == 0:
			f.times++
		}
		if f.comesAndGoes() && kinds[f.Kind].getsNoRequests { // each time, it takes requests with it
			f.Severity, f.badAt = Bad, r.now
		}
		if f.Severity != Bad {
			f.badAt = had.badAt
		}
		*had = *f
		return
	}
	if last := len(o.members) - 1; last >= maxFindings-1 { // what is not found any more stands last
		delete(r.owners, o.members[last].subject())
		o.members = o.members[:last]
	}
	f.effect = f.isEffect() && !leadOf(append(o.current(r.now), f)).isEffect()
	o.members = append(o.members, f)
}

// continued returns the incident that a finding continues; nil: there is none. This is the incident that had the finding before. If the
// finding means that an engine gets no requests, it may also be an open incident in which the engine got none for another reason: an
// engine first hangs and then counts as down.
func (b *Book) continued(f *member, r *round) *incident {
	keepsRequestsAway := func(m *member) bool {
		return kinds[m.Kind].getsNoRequests && engineOf(m.Where) == engineOf(f.Where)
	}
	if keepsRequestsAway(f) {
		for _, o := range b.list {
			if slices.ContainsFunc(o.present(), keepsRequestsAway) {
				return o
			}
		}
	}
	return r.owners[f.subject()]
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
	case chosen != nil && chosen.cameBack() && !f.isEffect() && !chosen.everHad(f):
		reopened := chosen
		chosen = b.newIncident(reopened.openSince)
		r.moveFound(reopened, chosen)
		reopened.until = reopened.previousEnd
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

// moveFound gives the findings that an incident has got in this round to another one. The first one keeps its own records of them.
func (r *round) moveFound(from, to *incident) {
	for _, m := range from.members {
		if m.foundAt.Equal(r.now) {
			moved := *m
			to.members = append(to.members, &moved)
			r.owners[m.subject()] = to
		}
	}
}

// mostHarmfulToJoin returns, of the incidents that a finding may join, the one whose cause harms most; in a tie, the one that began closest
// to since, when the finding began. It returns nil if the finding may join none.
func (b *Book) mostHarmfulToJoin(f *member, since time.Time, r *round) (best *incident) {
	bestHarm := 0
	for _, o := range b.list {
		members := o.current(r.now)
		if len(members) == 0 || !o.mayTakeIn(members, f, since, r.now) {
			continue
		}
		harm := leadOf(members).harm()
		beganCloser := best != nil && since.Sub(o.openSince).Abs() < since.Sub(best.openSince).Abs()
		if best == nil || harm > bestHarm || harm == bestHarm && beganCloser {
			best, bestHarm = o, harm
		}
	}
	return best
}

// mayTakeIn says whether an open incident with these members may take in a finding that began at the time since. If the cause is over, at
// most effects of it go on: then it takes in only effects, and findings of engines that it is about already. An effect that the incident
// had before joins however late it is.
func (o *incident) mayTakeIn(members []*member, f *member, since, now time.Time) bool {
	isOnlyEffect := f.follows || kinds[f.Kind].isOnlyEffect()
	if !o.causeContinues(now) && !isOnlyEffect && !hasPlace(members, f) {
		return false
	}
	return mayJoin(members, f, since.Sub(o.openSince)) || isOnlyEffect && o.everHad(f)
}

// isOnlyEffect says whether findings of this kind always result from others. An overload is an effect, too, but may itself be a cause.
func (d *Detector) isOnlyEffect() bool { return d.effect && !d.overload }

// takeOverEffects moves effects that clients noticed before their cause was found into the cause's new incident o. Effects often come
// first, because an engine counts as down only after a while. cause is the kind of the finding for which o was made. An incident that had
// nothing but these effects is dropped. But if it had ended before and came back with them, it ends again, as it was then.
func (b *Book) takeOverEffects(o *incident, cause Kind, r *round) {
	if !kinds[cause].causesEffects() {
		return
	}
	b.list = slices.DeleteFunc(b.list, func(noticed *incident) bool {
		if noticed == o || !noticed.mayBeEffects(o.since, r.now) {
			return false
		}
		r.moveFound(noticed, o)
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
	return d.Kind == ProxyBusy || !d.isOnlyEffect() && !d.sharesNoCause && d.harm != nothing
}

// mayBeEffects says whether an open incident may consist of effects of a cause that was found only now, and that began at the time
// causeSince. It has nothing but effects, and began at about the same time. If it had a cause, its effects are those of that cause, unless
// it had ended and came back with the effects alone.
func (o *incident) mayBeEffects(causeSince, now time.Time) bool {
	isCause := func(m *member) bool { return !m.isEffect() }
	if !o.isOpen() || causeSince.Sub(o.openSince).Abs() > togetherWithin || slices.ContainsFunc(o.current(now), isCause) {
		return false
	}
	return o.cameBack() || !slices.ContainsFunc(o.members, isCause)
}

// mayJoin says whether a finding may join the members of an incident, of which the first one is the cause. delay is the time from the begin
// of the incident to that of the finding. The table joinWhen decides, by the classes of the two kinds: some kinds join only near the begin
// of an incident, and some only if they share a cause with a member.
func mayJoin(members []*member, f *member, delay time.Duration) bool {
	cause, kind := kinds[leadOf(members).Kind], kinds[f.Kind]
	switch {
	case f.follows:
		return cause.Kind == ProxyBusy
	case kind.overload && cause.harm < waiting: // an overload means that many requests wait, which this cause does not explain
		return false
	case cause.overload && f.Kind == NotReady: // missing engines make the proxy not ready, and load does not
		return false
	}
	return joinWhen[cause.joinClass()][kind.joinClass()].allows(delay, sharesCause(members, f))
}

// sharesCause says whether a finding has the same cause as one of the members. Members that are effects do not count.
func sharesCause(members []*member, f *member) bool {
	return slices.ContainsFunc(members, func(m *member) bool { return !m.effect && shareCause(m, f) })
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
		members := o.current(r.now)
		if len(members) > 0 && mostHarm(members) >= harm {
			asHarmful++
		}
	}
	return asHarmful >= maxIncidents
}

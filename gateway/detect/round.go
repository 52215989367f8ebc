package detect

import (
	"cmp"
	"slices"
	"time"
)

// round is one call of Book.Observe: the findings of this moment on their way to the incidents.
type round struct {
	now, previous time.Time // this look and the one before
	found         []*member // causes before effects, and what has lasted longer first
	// by finding: the incident that has it or, within backWithin, had it
	owners map[subject]*incident
	away   map[string]bool // engines that get no requests now
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

// place puts a finding into an incident or, if there is no room, into unplaced.
func (b *Book) place(f *member, r *round) {
	o := b.continued(f, r)
	if f.follows && o != nil && o.isOpen() { // it was thought to be a fault of its own
		o.members = slices.DeleteFunc(o.members, f.isSame)
		o = nil
	}
	// The cause of an ended incident is over, so an effect looks for an open one first.
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

// take: a finding that was missing at the last look has come back, unless its kind comes and goes
// anyway. One that is found twice is told as it was found first.
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
	if last := len(o.members) - 1; last >= maxFindings-1 { // what is over stands last
		delete(r.owners, o.members[last].subject())
		o.members = o.members[:last]
	}
	f.effect = f.isEffect() && !leadOf(append(o.current(r.now), f)).isEffect()
	o.members = append(o.members, f)
}

// continued returns the incident that had the finding or, if its engine gets no requests, an open
// one in which it got none for another reason: an engine first hangs and then counts as down.
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

// assign finds the incident for a finding: an open one that it may join, else the ended one that
// had it, else a new one, which takes over the effects that clients noticed earlier. If an incident
// came back, and the finding shows another outage, this becomes an incident of its own. nil: no
// room.
func (b *Book) assign(f *member, ended *incident, r *round) *incident {
	since := r.now.Add(-f.LastedFor)
	chosen := b.mostHarmfulToJoin(f, since, r)
	switch {
	case chosen != nil && chosen.cameBack() && !f.isEffect() && !chosen.everHad(f):
		reopened := chosen
		chosen = b.newIncident(reopened.openSince)
		r.moveFound(reopened, chosen)
		reopened.until = reopened.previousEnd
	case chosen != nil:
	case ended != nil: // it comes back, and keeps the time at which it first began
		return ended
	case b.hasNoRoom(f.harm(), r):
		return nil
	default:
		chosen = b.newIncident(since)
		b.takeOverEffects(chosen, f.Kind, r)
	}
	if since.Before(chosen.since) { // f has lasted for longer
		chosen.since = since
	}
	return chosen
}

func (b *Book) newIncident(since time.Time) *incident {
	b.lastID++
	o := &incident{id: b.lastID, since: since, openSince: since}
	b.list = append(b.list, o)
	return o
}

// moveFound: from keeps its own records.
func (r *round) moveFound(from, to *incident) {
	for _, m := range from.members {
		if m.foundAt.Equal(r.now) {
			moved := *m
			to.members = append(to.members, &moved)
			r.owners[m.subject()] = to
		}
	}
}

// mostHarmfulToJoin returns the incident whose cause harms most; in a tie, the one that began
// closest to since; nil: the finding may join none.
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

// mayTakeIn: if the cause is over, the incident takes in only effects, and findings of engines that
// it is about already. An effect that it had before joins however late.
func (o *incident) mayTakeIn(members []*member, f *member, since, now time.Time) bool {
	isOnlyEffect := f.follows || kinds[f.Kind].isOnlyEffect()
	if !o.causeContinues(now) && !isOnlyEffect && !hasPlace(members, f) {
		return false
	}
	return mayJoin(members, f, since.Sub(o.openSince)) || isOnlyEffect && o.everHad(f)
}

// isOnlyEffect: an overload is an effect, too, but may itself be a cause.
func (d *Detector) isOnlyEffect() bool { return d.effect && !d.overload }

// takeOverEffects: effects often come before their cause, because an engine counts as down only
// after a while. An incident of nothing but these is dropped, or ends again if it had come back
// with them.
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

// causesEffects: an overload leads to further effects. A finding that clients do not notice, or
// that shares no cause, has none.
func (d *Detector) causesEffects() bool {
	return d.Kind == ProxyBusy || !d.isOnlyEffect() && !d.sharesNoCause && d.harm != nothing
}

// mayBeEffects: the incident may be effects of a cause that was found only now. If it had a cause,
// its effects are of that one, unless it came back with the effects alone.
func (o *incident) mayBeEffects(causeSince, now time.Time) bool {
	isCause := func(m *member) bool { return !m.isEffect() }
	if !o.isOpen() || causeSince.Sub(o.openSince).Abs() > togetherWithin || slices.ContainsFunc(o.current(now), isCause) {
		return false
	}
	return o.cameBack() || !slices.ContainsFunc(o.members, isCause)
}

// mayJoin decides by joinWhen. delay is the time from the begin of the incident to that of the
// finding.
func mayJoin(members []*member, f *member, delay time.Duration) bool {
	cause, kind := kinds[leadOf(members).Kind], kinds[f.Kind]
	switch {
	case f.follows:
		return cause.Kind == ProxyBusy
	case kind.overload && cause.harm < waiting: // this cause does not explain that many requests wait
		return false
	case cause.overload && f.Kind == NotReady: // load does not make the proxy not ready
		return false
	}
	return joinWhen[cause.joinClass()][kind.joinClass()].allows(delay, sharesCause(members, f))
}

// sharesCause: effects do not count.
func sharesCause(members []*member, f *member) bool {
	return slices.ContainsFunc(members, func(m *member) bool { return !m.effect && shareCause(m, f) })
}

// shareCause guesses whether two findings have the same cause: they are of one engine, of one host
// (if both or neither come and go), of one family, or of the same kind and reason.
func shareCause(a, b *member) bool {
	if kinds[a.Kind].sharesNoCause || kinds[b.Kind].sharesNoCause {
		return false
	}
	aComesAndGoes, bComesAndGoes := kinds[a.Kind].toleratedAbsence > 0, kinds[b.Kind].toleratedAbsence > 0
	// What comes and goes at one engine, such as late answers, says nothing about an outage of
	// another.
	if a.host != "" && a.host == b.host && aComesAndGoes == bComesAndGoes {
		return true
	}
	if a.host != "" && engineOf(a.Where) == engineOf(b.Where) { // it is about an engine
		return true
	}
	if family := kinds[a.Kind].family; family != "" && family == kinds[b.Kind].family {
		return true
	}
	return a.Kind == b.Kind && a.commonReason == b.commonReason
}

// hasNoRoom: maxIncidents open incidents harm as much or more. Ended ones may be replaced.
func (b *Book) hasNoRoom(harm int, r *round) bool {
	if len(b.list) < maxIncidents {
		return false
	}
	asHarmful := 0
	for _, o := range b.list {
		members := o.current(r.now)
		if len(members) > 0 && mostHarm(members) >= harm {
			asHarmful++
		}
	}
	return asHarmful >= maxIncidents
}

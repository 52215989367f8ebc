package detect

import (
	"cmp"
	"slices"
	"time"
)

const (
	moment     = 30 * time.Second // findings that begin within this time have begun together
	follow     = 2 * time.Minute  // what clients notice may follow its cause so late
	flap       = time.Minute      // what is back within this time counts as not gone
	keep       = 15 * time.Minute // resolved incidents are kept for so long
	mostKept   = 64               // incidents, open and resolved
	mostFound  = 2000             // findings that are looked at
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
	Harm     string   `json:"harm,omitempty"`  // what clients have had since it began, in numbers, a sentence; empty: they notice nothing, or it is not known yet
	Where    []string `json:"where"`           // names of engines, ranks, groups or models, the first ones; empty: the proxy
	Named    string   `json:"named"`           // the same names with what they are, as sentences; empty: What has them
	Ranks    []string `json:"ranks,omitempty"` // ranks that What names beside Where, the first ones
	Count    int      `json:"count"`           // how many names there are, with those that Where leaves out
	SinceMs  int64    `json:"since_ms"`
	UntilMs  int64    `json:"until_ms"`          // 0: it lasts
	LastMs   int64    `json:"last_ms"`           // when it was found last, if it comes and goes and is away; 0: it is found now, or is over
	Times    int      `json:"times"`             // how often it was: equal warnings that are over are shown as one, the last of them
	FirstMs  int64    `json:"first_ms"`          // since_ms of the first of them
	Clients  string   `json:"clients"`           // what clients notice of it
	Next     string   `json:"next"`              // what to do
	Command  string   `json:"command"`           // a command to copy; empty: there is none
	Runbook  string   `json:"runbook"`           // entry of the runbook; empty: there is none
	Crowded  bool     `json:"crowded,omitempty"` // many requests wait, as the cause or as an effect of it
}

// Book is the incidents of the last minutes. The zero value is an empty one.
type Book struct {
	last        int // the last id that was used
	now         time.Time
	away        bool // some engine gets no requests now
	list        []*open
	beyond      []string  // sentences of the findings that found no room beside those that harm more
	beyondSince time.Time // zero: all found room
	beyondBad   bool      // one of them is bad
}

// open is an incident with its findings.
type open struct {
	id           int
	since, until time.Time // until is zero while it lasts
	again        time.Time // since when it lasts, without times before it was last over
	closed       time.Time // when it was over last, before it came back; zero: it never was
	members      []member  // the findings that last; if none does, those that lasted last
	subject      string    // where it was found first
	bad          time.Time // when one of its findings was last bad
	base         *baseline // how the proxy was when it began
	baseAt       time.Time
	measured     string   // what clients have had of it, in numbers; empty: nothing was measured
	ever         []member // all findings that it ever had, as last found: causes first, then in the order in which they came
}

// State says how far an incident has come.
type State string

// The states there are.
const (
	New     State = "new"     // it began a moment ago: findings that begin now may belong to it
	Lasting State = "lasting" // it is found, and began more than a moment ago
	Paused  State = "paused"  // it is not found now; if it is found again soon, it goes on
	Over    State = "over"
)

// state is the incident's state now.
func (o *open) state(now time.Time) State {
	switch {
	case !o.lasts() && now.Sub(o.until) > flap:
		return Over
	case !o.lasts() || o.found().Before(now):
		return Paused
	case now.Sub(o.again) <= moment:
		return New
	}
	return Lasting
}

// lasts says that the incident is found, or that it comes and goes and was found lately.
func (o *open) lasts() bool { return o.until.IsZero() }

type member struct {
	Finding
	host, why string // the machine where it is, and its reason without what differs between engines
	effect    bool   // it is an effect of the cause, and not the cause
	found     time.Time
}

type subject struct {
	kind  Kind
	where string
}

func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

// Observe takes in all findings of now.
func (b *Book) Observe(now time.Time, found []Finding) {
	found = slices.Clone(found[:min(mostFound, len(found))])
	slices.SortStableFunc(found, func(x, y Finding) int { // causes before their effects
		return cmp.Or(cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()), cmp.Compare(y.For, x.For))
	})
	found = merged(found)
	b.now = now
	home, lost := map[subject]*open{}, map[string]*open{} // lost: incidents of engines that get no requests, by engine
	away, seen := map[string]bool{}, map[subject]bool{}   // away: engines that get no requests now; seen: all that is found now
	for i := range found {
		seen[found[i].subject()] = true
		if kinds[found[i].Kind].gone {
			away[engineOf(found[i].Where)] = true
		}
	}
	b.away = len(away) > 0
	ends := map[*open]bool{} // incidents of which no cause is found now or may come back: see goesOn
	for _, o := range b.list {
		ends[o] = !o.goesOn(now, seen)
		members := o.members
		if o.state(now) == Paused && !o.lasts() { // all findings that it had may come back
			members = o.ever
		}
		for i := range members {
			s := members[i].subject()
			if was := home[s]; was == nil || o.after(was) {
				home[s] = o
			}
			if o.lasts() && kinds[s.kind].gone {
				lost[engineOf(s.where)] = o
			}
		}
	}
	parted := b.parted(now, found, home)
	b.beyond, b.beyondBad = nil, false
	next := map[*open][]member{}
	for i := range found {
		it := memberOf(&found[i], now)
		f := &it
		o := home[f.subject()]
		if is := lost[engineOf(f.Where)]; is != nil && kinds[f.Kind].gone && (o == nil || !o.lasts()) {
			o = is
		}
		if o != nil && (o.state(now) == Over || parted[o]) {
			o = nil
		}
		if o == nil || !o.lasts() && kinds[f.Kind].effect { // what clients notice now comes from another cause
			o = b.place(f, o, now, home, next, ends)
		}
		if o == nil {
			b.beyond, b.beyondBad = append(b.beyond, f.What), b.beyondBad || f.Severity == Bad
			continue
		}
		if !o.lasts() {
			o.again, o.closed, o.until = now, o.until, time.Time{}
		}
		f.effect = len(next[o]) > 0 && kinds[f.Kind].effect && !kinds[next[o][0].Kind].effect
		next[o] = append(next[o], *f)
	}
	for _, o := range b.list {
		switch m := o.withResting(next[o], now, seen, away); {
		case len(m) > 0:
			o.members = m
			o.remember()
			if o.subject == "" {
				o.subject = m[0].Where
			}
			if slices.ContainsFunc(m, func(m member) bool { return m.Severity == Bad }) {
				o.bad = now
			}
		case o.lasts():
			o.until = now
			if at := o.found(); len(o.members) > 0 && kinds[o.members[0].Kind].rests > 0 {
				o.until = at
			}
		}
	}
	b.forget(now)
}

// parted returns the incidents that ended a moment ago and do not go on, although some finding of them is back: it is
// back together with a finding that was never theirs. So this is another outage of the same host, with a time between
// in which all was well.
func (b *Book) parted(now time.Time, found []Finding, home map[subject]*open) map[*open]bool {
	back, all := map[*open]bool{}, map[*open]bool{}
	for i := range found {
		if o := home[found[i].subject()]; o != nil && !o.lasts() && o.state(now) == Paused {
			back[o] = true
		}
	}
	if len(back) == 0 {
		return all
	}
	for i := range found {
		f := memberOf(&found[i], now)
		if home[f.subject()] != nil || kinds[f.Kind].effect {
			continue
		}
		for o := range back {
			all[o] = all[o] || sharesCause(o.ever, &f)
		}
	}
	return all
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

// memberOf makes a member of a finding, with what is needed to compare it with others.
func memberOf(f *Finding, now time.Time) member {
	host := hostOf(f.Where)
	return member{Finding: *f, host: host, why: reasonOf(f.Reason, host), found: now}
}

// goesOn says that a cause of the incident is found now, or may come back because it comes and goes.
func (o *open) goesOn(now time.Time, seen map[subject]bool) bool {
	return o.lasts() && slices.ContainsFunc(o.members, func(m member) bool {
		return !m.effect && (seen[m.subject()] || now.Sub(m.found) < kinds[m.Kind].rests)
	})
}

// remember adds the members to all findings that the incident ever had. An incident that is over is described by
// these, so that all engines are named that were restarted one after the other.
func (o *open) remember() {
	at := make(map[subject]int, len(o.ever))
	for i := range o.ever {
		at[o.ever[i].subject()] = i
	}
	for _, m := range o.members {
		i, known := at[m.subject()]
		switch {
		case known && o.ever[i].Severity == Bad:
			m.Severity = Bad
			fallthrough
		case known:
			o.ever[i] = m
		case len(o.ever) < mostFound:
			o.ever = append(o.ever, m)
		}
	}
	slices.SortStableFunc(o.ever, func(x, y member) int { return cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()) })
	markEffects(o.ever)
}

// markEffects marks the members that are effects of the first one.
func markEffects(members []member) {
	for i := range members {
		members[i].effect = i > 0 && kinds[members[i].Kind].effect && !kinds[members[0].Kind].effect
	}
}

// withResting adds members of kinds that come and go: such a member stays in the incident until it was not found for as long as its kind
// says. It leaves out those that another incident has now, and those of engines that are away.
func (o *open) withResting(members []member, now time.Time, elsewhere map[subject]bool, away map[string]bool) []member {
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
	if added { // the first member, which the incident is named by, stays the same
		slices.SortStableFunc(members, func(x, y member) int {
			return cmp.Or(cmp.Compare(kinds[x.Kind].order(), kinds[y.Kind].order()), cmp.Compare(x.Where, y.Where))
		})
		markEffects(members)
	}
	return members
}

// found is when a member was last found.
func (o *open) found() (last time.Time) {
	for i := range o.members {
		if at := o.members[i].found; at.After(last) {
			last = at
		}
	}
	return last
}

// merged keeps the first finding of each subject, with the worst severity of them. It reuses found's array.
func merged(found []Finding) []Finding {
	at, once := map[subject]int{}, found[:0]
	for _, f := range found {
		i, ok := at[f.subject()]
		switch {
		case !ok:
			at[f.subject()] = len(once)
			once = append(once, f)
		case f.Severity == Bad:
			once[i].Severity = Bad
		}
	}
	return once
}

// after says that of two incidents with the same member, this one should get it: it lasts and the other does not, or
// it ended later.
func (o *open) after(was *open) bool {
	if o.lasts() || was.lasts() {
		return !was.lasts()
	}
	return o.until.After(was.until)
}

// place finds the incident for a new finding. If no incident takes it, that is the incident that had it before, or a
// new one; nil: the book is full of incidents that harm as much. An incident that has ended, or ends now, takes in
// only what clients noticed of it and what the same engine does next: else its description would change to another
// engine.
func (b *Book) place(f *member, before *open, now time.Time, home map[subject]*open, next map[*open][]member, ends map[*open]bool) *open {
	since := now.Add(-f.For)
	var best *open
	most := 0
	for _, o := range b.list {
		free := len(next[o]) == 0 && (!o.lasts() || len(o.members) == 0)
		if free || len(next[o]) == 0 && ends[o] && (!kinds[f.Kind].effect || kinds[f.Kind].load) && !o.has(f) {
			continue
		}
		members := next[o]
		if len(members) == 0 {
			members = o.members
		}
		late := since.Sub(o.again)
		if !mayJoin(members, f, late) && !o.had(f) {
			continue
		}
		if h := members[0].harm(); best == nil || h > most || h == most && late.Abs() < since.Sub(best.again).Abs() {
			best, most = o, h
		}
	}
	if best != nil && best.came(f) {
		best = b.split(best, home, next)
	}
	if best == nil && before != nil {
		return before
	}
	if best == nil && b.full(f.harm(), next) {
		return nil
	}
	if best == nil {
		b.last++
		best = &open{id: b.last, since: since, again: since}
		b.list = append(b.list, best)
		b.claim(best, f.Kind, home, next)
	}
	if since.Before(best.since) {
		best.since = since
	}
	return best
}

// came says that an incident was over and came back a moment ago, and that this finding is a cause that it never had:
// so what came back is another outage.
func (o *open) came(f *member) bool {
	return !o.closed.IsZero() && o.lasts() && !kinds[f.Kind].effect &&
		!slices.ContainsFunc(o.ever, func(m member) bool { return m.subject() == f.subject() })
}

// split makes a new incident of what came back, and leaves the first one as it was when it was over.
func (b *Book) split(o *open, home map[subject]*open, next map[*open][]member) *open {
	b.last++
	other := &open{id: b.last, since: o.again, again: o.again, members: o.members}
	b.list = append(b.list, other)
	for _, m := range next[o] {
		home[m.subject()] = other
	}
	next[other] = next[o]
	delete(next, o)
	o.until = o.closed
	return other
}

// had says that the incident lasts, and had this effect before.
func (o *open) had(f *member) bool {
	return o.lasts() && kinds[f.Kind].effect && !kinds[f.Kind].load &&
		slices.ContainsFunc(o.ever, func(m member) bool { return m.subject() == f.subject() })
}

// has says that a member of the incident is of the same engine.
func (o *open) has(f *member) bool {
	return f.host != "" && slices.ContainsFunc(o.members, func(m member) bool { return engineOf(m.Where) == engineOf(f.Where) })
}

// claim moves what clients noticed of a cause before the cause was found into the incident of the cause: it takes a
// while until an engine counts as down.
func (b *Book) claim(o *open, cause Kind, home map[subject]*open, next map[*open][]member) {
	if k := kinds[cause]; k.effect && !k.load || k.alone || k.harm == nothing {
		return
	}
	b.list = slices.DeleteFunc(b.list, func(seen *open) bool {
		if seen == o || !seen.lasts() || len(next[seen]) > 0 || len(seen.members) == 0 || !kinds[seen.members[0].Kind].effect ||
			o.since.Sub(seen.again).Abs() > moment {
			return false
		}
		if seen.closed.IsZero() && !kinds[seen.ever[0].Kind].effect {
			return false // the incident had another cause
		}
		for i := range seen.members {
			home[seen.members[i].subject()] = o
		}
		if seen.again.Before(o.since) {
			o.since = seen.again
		}
		seen.until = seen.closed // the incident was over before, and that part of it stays
		return seen.closed.IsZero()
	})
}

// mayJoin says whether a finding may join the members of an incident. late is how long after the incident the finding
// began.
func mayJoin(members []member, f *member, late time.Duration) bool {
	lead, kind := kinds[members[0].Kind], kinds[f.Kind]
	switch {
	case kind.load && lead.harm < waiting: // that so many requests wait harms more than this cause does
		return false
	case lead.load && f.Kind == NotReady: // NotReady comes from engines that are gone
		return false
	}
	return joinWhen[lead.class()][kind.class()].allows(late, sharesCause(members, f))
}

// sharesCause says that a finding has the same cause as one of the members.
func sharesCause(members []member, f *member) bool {
	for i := range members {
		if m := &members[i]; !m.effect && together(m, f) {
			return true
		}
	}
	return false
}

// together says that two findings of one moment have the same cause.
func together(a, b *member) bool {
	if kinds[a.Kind].alone || kinds[b.Kind].alone {
		return false
	}
	if a.host != "" && a.host == b.host && (kinds[a.Kind].rests > 0) == (kinds[b.Kind].rests > 0) {
		return true
	}
	if a.host != "" && engineOf(a.Where) == engineOf(b.Where) {
		return true // what comes and goes at one engine says nothing about other engines
	}
	if family := kinds[a.Kind].family; family != "" && family == kinds[b.Kind].family {
		return true
	}
	return a.Kind == b.Kind && a.why == b.why
}

// full says that there is no room for a new incident: all that are kept last, and harm as much.
func (b *Book) full(harm int, next map[*open][]member) bool {
	if len(b.list) < mostKept {
		return false
	}
	lasting := 0
	for _, o := range b.list {
		m := next[o]
		if len(m) == 0 && o.lasts() {
			m = o.members
		}
		if len(m) > 0 && mostHarm(m) >= harm {
			lasting++
		}
	}
	return lasting >= mostKept
}

// forget drops incidents that were resolved long ago and, if there are too many, those that were resolved first. Of
// incidents that last it drops those that harm least, the newest first, so that the others stay as they are.
func (b *Book) forget(now time.Time) {
	b.list = slices.DeleteFunc(b.list, func(o *open) bool { return !o.lasts() && now.Sub(o.until) >= keep })
	for len(b.list) > mostKept {
		least := 0
		for i, o := range b.list {
			if o.before(b.list[least]) {
				least = i
			}
		}
		if o := b.list[least]; o.lasts() {
			for i := range o.members {
				b.beyond, b.beyondBad = append(b.beyond, o.members[i].What), b.beyondBad || o.members[i].Severity == Bad
			}
		}
		b.list = slices.Delete(b.list, least, least+1)
	}
	if len(b.beyond) == 0 {
		b.beyondSince = time.Time{}
	} else if b.beyondSince.IsZero() {
		b.beyondSince = now
	}
}

// before says that this incident is dropped before another one.
func (o *open) before(other *open) bool {
	if over := !o.lasts(); over || !other.lasts() {
		return over && (other.lasts() || o.until.Before(other.until))
	}
	return cmp.Or(cmp.Compare(o.harm(), other.harm()), cmp.Compare(other.id, o.id)) < 0
}

// leastHarm is the harm of a finding of which clients notice something.
const leastHarm = 2

// harm is how much clients notice of the incident.
func (o *open) harm() int { return mostHarm(o.members) }

func mostHarm(members []member) (most int) {
	for i := range members {
		most = max(most, members[i].harm())
	}
	return most
}

func (f *Finding) harm() int {
	n := 2 * int(kinds[f.Kind].harm)
	if f.Severity == Bad {
		n++
	}
	return n
}

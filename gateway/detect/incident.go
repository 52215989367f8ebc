package detect

import (
	"cmp"
	"slices"
	"time"
)

// incident is an incident with its findings. Incident is the form in which it is shown.
type incident struct {
	id            int
	since, until  time.Time // begin and end of the incident; until is zero while it is open
	openSince     time.Time // when the incident last came back; if it never did, when it began
	previousEnd   time.Time // when the incident ended before it came back; zero: it never came back
	members       []*member // all findings that it ever had: the one that leads, then the other present ones, then those that are over
	baseline      *baseline // counters and latencies of the proxy when the incident began
	baselineSince time.Time
	harmText      string // what clients have noticed since the incident began, in numbers; empty: nothing was measured
}

// present has the findings of which an open incident consists at the last look.
func (o *incident) present() []*member {
	n := 0
	for n < len(o.members) && o.members[n].present {
		n++
	}
	return o.members[:n:n]
}

// State says whether an incident is new, lasts, may come back, or is over.
type State string

// States of an incident.
const (
	New     State = "new"     // the incident began at most 30 s ago: findings that begin now may belong to it
	Lasting State = "lasting" // the incident is found now, and began more than 30 s ago
	Paused  State = "paused"  // the incident is not found now; if it is found again within 90 s, it goes on
	Over    State = "over"
)

// state is the state of the incident at the time now, which is the time of the last call of Observe.
func (o *incident) state(now time.Time) State {
	switch {
	case !o.isOpen() && now.Sub(o.until) > backWithin: // too long ago to come back
		return Over
	case !o.isOpen() || o.lastFound().Before(now): // ended a short time ago, or of a kind that comes and goes
		return Paused
	case now.Sub(o.openSince) <= togetherWithin: // findings that begin now may still join the incident
		return New
	}
	return Lasting
}

// isOpen says whether the incident is found now, or is of a kind that comes and goes and was found a short time ago.
func (o *incident) isOpen() bool { return o.until.IsZero() }

// cameBack says whether the incident had ended, and came back.
func (o *incident) cameBack() bool { return !o.previousEnd.IsZero() }

// member is a finding that belongs to an incident, with values that are derived from it.
type member struct {
	Finding                          // as it was found last
	host, commonReason string        // host of Where, and Reason without words that differ between engines, to compare findings
	effect             bool          // the finding is an effect of the incident's cause
	present            bool          // it was found at the last look, or was expected back
	times              int           // how often it was found after looks without it
	foundAt, badAt     time.Time     // when it was found last, and when it was bad last; badAt is zero if it never was
	led                time.Duration // for how long it was the finding that leads
}

// isExpected says whether a member is found now, or was and is expected back: its kind comes and goes, or it does.
func (m *member) isExpected(now time.Time) bool {
	return m.foundAt.Equal(now) || now.Sub(m.foundAt) < m.toleratedAbsence()
}

// comesAndGoes says whether the finding came so often that it is expected back. Twice, an operator may have
// restarted an engine, and restarted it again.
func (m *member) comesAndGoes() bool { return m.times >= 3 }

func (m *member) toleratedAbsence() time.Duration {
	if m.comesAndGoes() {
		return backWithin
	}
	return kinds[m.Kind].toleratedAbsence
}

// isBad says whether the member was bad a short time ago, so that the severity does not change with every look.
func (m *member) isBad(now time.Time) bool {
	held := togetherWithin
	if m.comesAndGoes() {
		held = backWithin
	}
	return !m.badAt.IsZero() && now.Sub(m.badAt) <= held
}

// subject identifies a finding: its kind and its place. Findings of one subject are the same finding at different times.
type subject struct {
	kind  Kind
	where string
}

func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

func (m *member) isSame(other *member) bool { return m.subject() == other.subject() }

// isEffect says whether the finding is the result of another one, if another one is present.
func (f *Finding) isEffect() bool { return f.follows || kinds[f.Kind].effect }

func (f *Finding) sortKey() int {
	if f.follows {
		return kinds[f.Kind].sortKey() + 1000
	}
	return kinds[f.Kind].sortKey()
}

// memberOf makes a member of a finding, with its host and reason in the form in which findings are compared.
func memberOf(f *Finding, now time.Time) *member {
	host := hostOf(f.Where)
	m := &member{Finding: *f, host: host, commonReason: commonReasonOf(f.Reason, host), times: 1, foundAt: now}
	if f.Severity == Bad {
		m.badAt = now
	}
	return m
}

// lastFound is the latest time at which one of the members was found.
func (o *incident) lastFound() (last time.Time) {
	for _, m := range o.members {
		if m.foundAt.After(last) {
			last = m.foundAt
		}
	}
	return last
}

// everHad says whether the incident has, or once had, this finding, or another one at its engine.
func (o *incident) everHad(f *member) bool { return hasPlace(o.members, f) }

// hasPlace says whether a member is about the finding's engine, or is the finding itself. A place without a host is not an engine.
func hasPlace(members []*member, f *member) bool {
	return slices.ContainsFunc(members, func(m *member) bool {
		return f.isSame(m) || f.host != "" && engineOf(m.Where) == engineOf(f.Where)
	})
}

// causeContinues says whether a cause of the incident is found now, or is expected back.
func (o *incident) causeContinues(now time.Time) bool {
	return o.isOpen() && slices.ContainsFunc(o.members, func(m *member) bool { return !m.effect && m.isExpected(now) })
}

// leadOf is the cause among members, the first one of several; of effects alone the first in their order.
func leadOf(members []*member) *member {
	return slices.MinFunc(members, func(x, y *member) int { return cmp.Compare(x.sortKey(), y.sortKey()) })
}

// settle says which of the incident's findings are present, and which of them leads. Without any, it ends.
// previous is the time of the look before, and away has the engines that get no requests now.
//
// A finding of a kind that comes and goes is not expected back while its engine gets no requests, because a worse fault of the engine has
// taken its place. One that leads goes on to lead as long as it is expected back, so that the labels of the metric stay.
func (o *incident) settle(now, previous time.Time, away map[string]bool) {
	led := o.members[0]
	if led.present {
		led.led += now.Sub(previous)
	}
	anyPresent := false
	for _, m := range o.members {
		m.present = o.isOpen() && m.isExpected(now)
		if !m.foundAt.Equal(now) && !m.comesAndGoes() && away[engineOf(m.Where)] {
			m.present = false
		}
		anyPresent = anyPresent || m.present
	}
	if !anyPresent && o.isOpen() {
		o.until = now
		if led.toleratedAbsence() > 0 {
			o.until = o.lastFound()
		}
	}
	main := led
	if !o.isOpen() {
		main = o.ledLongest()
	}
	slices.SortStableFunc(o.members, func(x, y *member) int {
		return cmp.Or(firstIf(x.present, y.present), firstIf(!o.isOpen() && x.Kind == main.Kind, !o.isOpen() && y.Kind == main.Kind),
			cmp.Compare(x.sortKey(), y.sortKey()), firstIf(x.isBad(now), y.isBad(now)),
			firstIf(x == main, y == main), firstIf(!o.isOpen() && x.Where < y.Where, !o.isOpen() && y.Where < x.Where))
	})
	for i, m := range o.members {
		m.effect = i > 0 && m.isEffect() && !o.members[0].isEffect()
	}
}

// ledLongest is the finding that led for the longest time: of the causes, if there was one, and of those that were ever bad.
func (o *incident) ledLongest() *member {
	return slices.MinFunc(o.members, func(x, y *member) int {
		return cmp.Or(firstIf(!x.isEffect(), !y.isEffect()),
			firstIf(!x.badAt.IsZero(), !y.badAt.IsZero()), cmp.Compare(y.led, x.led))
	})
}

// firstIf sorts what is so before what is not.
func firstIf(x, y bool) int {
	switch {
	case x == y:
		return 0
	case x:
		return -1
	}
	return 1
}

// harm is the harm of the incident's worst member (see Finding.harm).
func (o *incident) harm() int { return mostHarm(o.present()) }

// mostHarm is the harm of the worst member (see Finding.harm); 0: there are no members.
func mostHarm(members []*member) (most int) {
	for _, m := range members {
		most = max(most, m.harm())
	}
	return most
}

// harm ranks findings by how much clients notice: by the harm of the kind first, then by severity. Below leastHarm, clients notice nothing.
func (f *Finding) harm() int {
	rank := 2 * int(kinds[f.Kind].harm)
	if f.Severity == Bad {
		rank++
	}
	return rank
}

// current has the incident's findings of this round. As long as it has none, it has those of the last look; nil: the incident has ended.
func (o *incident) current(now time.Time) (list []*member) {
	if !o.isOpen() {
		return nil
	}
	for _, m := range o.members {
		if m.foundAt.Equal(now) {
			list = append(list, m)
		}
	}
	if len(list) > 0 {
		return list
	}
	return o.present()
}

// leastHarm is the smallest value of Finding.harm for a finding that clients notice.
const leastHarm = 2

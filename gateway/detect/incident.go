package detect

import (
	"cmp"
	"slices"
	"time"
)

// incident is an incident with its findings; Incident is how it is shown.
type incident struct {
	id           int
	since, until time.Time // until is zero while it is open
	openSince    time.Time // when it last came back or, if never, began
	previousEnd  time.Time // before it came back; zero: it never did
	// all that it ever had: the one that leads, the other present ones, those that are over
	members       []*member
	baseline      *baseline // of the proxy when the incident began
	baselineSince time.Time
	harmText      string // what clients have noticed, in numbers; empty: nothing was measured
}

// present has the findings at the last look.
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
	New     State = "new"     // began at most 30 s ago: findings that begin now may belong to it
	Lasting State = "lasting" // found now, and began more than 30 s ago
	Paused  State = "paused"  // not found now; within 90 s it goes on
	Over    State = "over"
)

// state is the state at the time of the last call of Observe.
func (o *incident) state(now time.Time) State {
	switch {
	case !o.isOpen() && now.Sub(o.until) > backWithin: // too long ago to come back
		return Over
	case !o.isOpen() || o.lastFound().Before(now): // ended a short time ago, or comes and goes
		return Paused
	case now.Sub(o.openSince) <= togetherWithin: // findings that begin now may still join
		return New
	}
	return Lasting
}

// isOpen: it is found now, or comes and goes and was found a short time ago.
func (o *incident) isOpen() bool { return o.until.IsZero() }

func (o *incident) cameBack() bool { return !o.previousEnd.IsZero() }

type member struct {
	Finding // as found last
	// host of Where, and Reason without words that differ between engines
	host, commonReason string
	effect             bool          // of the incident's cause
	present            bool          // found at the last look, or expected back
	times              int           // found after looks without it
	foundAt, badAt     time.Time     // last; badAt is zero if it never was
	led                time.Duration // for how long it led
}

// isExpected says whether a member is found now or expected back, because it or its kind comes and
// goes.
func (m *member) isExpected(now time.Time) bool {
	return m.foundAt.Equal(now) || now.Sub(m.foundAt) < m.toleratedAbsence()
}

// comesAndGoes: a finding that came three times is expected back. Twice, an operator may have
// restarted an engine, and restarted it again.
func (m *member) comesAndGoes() bool { return m.times >= 3 }

func (m *member) toleratedAbsence() time.Duration {
	if m.comesAndGoes() {
		return backWithin
	}
	return kinds[m.Kind].toleratedAbsence
}

// isBad: the member was bad a short time ago, so that the severity does not change with every look.
func (m *member) isBad(now time.Time) bool {
	held := togetherWithin
	if m.comesAndGoes() {
		held = backWithin
	}
	return !m.badAt.IsZero() && now.Sub(m.badAt) <= held
}

// Findings of one subject are the same finding at different times.
type subject struct {
	kind  Kind
	where string
}

func (f *Finding) subject() subject { return subject{f.Kind, f.Where} }

func (m *member) isSame(other *member) bool { return m.subject() == other.subject() }

func (f *Finding) isEffect() bool { return f.follows || kinds[f.Kind].effect }

func (f *Finding) sortKey() int {
	if f.follows {
		return kinds[f.Kind].sortKey() + 1000
	}
	return kinds[f.Kind].sortKey()
}

func memberOf(f *Finding, now time.Time) *member {
	host := hostOf(f.Where)
	m := &member{Finding: *f, host: host, commonReason: commonReasonOf(f.Reason, host), times: 1, foundAt: now}
	if f.Severity == Bad {
		m.badAt = now
	}
	return m
}

func (o *incident) lastFound() (last time.Time) {
	for _, m := range o.members {
		if m.foundAt.After(last) {
			last = m.foundAt
		}
	}
	return last
}

// everHad: this finding, or another one at its engine.
func (o *incident) everHad(f *member) bool { return hasPlace(o.members, f) }

func hasPlace(members []*member, f *member) bool {
	return slices.ContainsFunc(members, func(m *member) bool {
		return f.isSame(m) || f.host != "" && engineOf(m.Where) == engineOf(f.Where)
	})
}

// causeContinues: a cause of the incident is found now, or is expected back.
func (o *incident) causeContinues(now time.Time) bool {
	return o.isOpen() && slices.ContainsFunc(o.members, func(m *member) bool { return !m.effect && m.isExpected(now) })
}

// leadOf is the first cause among members or, of effects alone, the first effect.
func leadOf(members []*member) *member {
	return slices.MinFunc(members, func(x, y *member) int { return cmp.Compare(x.sortKey(), y.sortKey()) })
}

// settle says which findings are present, and which leads. Without any, the incident ends.
//
// A finding of a kind that comes and goes is not expected back while its engine gets no requests: a
// worse fault has taken its place. The one that leads goes on to lead while it is expected back, so
// that the labels of the metric stay.
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

// ledLongest prefers causes, then those that were ever bad.
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

func (o *incident) harm() int { return mostHarm(o.present()) }

// mostHarm is 0 without members.
func mostHarm(members []*member) (most int) {
	for _, m := range members {
		most = max(most, m.harm())
	}
	return most
}

// harm ranks by what clients notice, then by severity. Below leastHarm, they notice nothing.
func (f *Finding) harm() int {
	rank := 2 * int(kinds[f.Kind].harm)
	if f.Severity == Bad {
		rank++
	}
	return rank
}

// current has the findings of this round or, as long as it has none, of the last look; nil: the
// incident has ended.
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

const leastHarm = 2

// Package delivery says who is to blame for hand-offs of KV that were lost on their way from a
// prefill engine to a decode engine: the prefill engine, the decode engine, the connection between
// the two, or nobody that can be named.
//
// One lost hand-off does not show which of its two engines failed. What else both did lately shows
// it:
//
//   - One works with others, and the other does not: the other one is to blame.
//   - Both work with others: the connection between the two is.
//   - Neither works: nobody is. If all prefill engines are sick, that looks the same as if all
//     decode engines are.
//
// Who is to blame gets no hand-offs for a second. Then one hand-off is a trial. If it is lost, too,
// the time doubles, up to 30 s. Package delivery has no clock and no lock: its owner passes the
// time.
package delivery

import (
	"cmp"
	"slices"
	"time"

	"evenkeel/engine/circuit"
)

// Limit is how many hand-offs must have been lost in a row before somebody is blamed.
const Limit = 3

// inUse is how long before a loss an engine must have been used to count as one that could have
// shown who is to blame.
const inUse = 10 * time.Second

// memory is how long losses count without a new one, because one of the engines may have left the
// fleet. For who is out, the time begins with the trial that is due.
const memory = 5 * time.Minute

// Link is a prefill engine and a decode engine between which hand-offs go.
type Link struct{ Prefiller, Engine string }

type end uint8

const (
	prefill end = iota
	decode
)

func (l Link) on(s end) string {
	if s == prefill {
		return l.Prefiller
	}
	return l.Engine
}

// An empty name stands for any engine.
func (l Link) covers(handoff Link) bool {
	return (l.Prefiller == "" || l.Prefiller == handoff.Prefiller) && (l.Engine == "" || l.Engine == handoff.Engine)
}

func compare(x, y Link) int {
	return cmp.Or(cmp.Compare(x.Prefiller, y.Prefiller), cmp.Compare(x.Engine, y.Engine))
}

// record is what is known of a link. Results are ordered by the time at which their hand-offs were
// sent: a hand-off that hangs is known to be lost long after later ones have arrived.
type record struct {
	Link
	sent      time.Time // when the last hand-off was sent
	losses    int       // hand-offs lost since the last one that arrived
	firstLost time.Time // when the first loss was known
	lastLost  time.Time // when the last loss was known
	lostSent  time.Time // when the last one that was lost was sent
	worked    time.Time // when the last one that arrived was sent; zero: none since the table began to look

	worksElsewhere [2]bool // by end: this engine has served another one since firstLost; set by judge
}

// Outage says who gets no hand-offs.
type Outage struct {
	Subject  Link // only one name: this engine; both: the connection between the two
	Losses   int  // hand-offs that were lost in a row
	circuit  circuit.Circuit
	lostSent time.Time // when the last of them was sent: what arrives of later ones ends the outage
}

// TrialAt is when one hand-off is sent as a trial.
func (o *Outage) TrialAt() time.Time { return o.circuit.TrialAt() }

// Length is how long the outage lasts until its trial.
func (o *Outage) Length() time.Duration { return o.circuit.OutageLength() }

// Change is an outage that has begun, that goes on after its trial was lost, or that has ended.
type Change struct {
	Subject Link
	Losses  int
	Length  time.Duration // until the next trial; 0: the outage has ended
}

// Table has what is known of the hand-offs of late. The zero value is ready to use. While it
// suspects nobody, it needs no reports of hand-offs that arrive.
type Table struct {
	links   []record // by compare
	outages []Outage // by compare of their subjects
	changes []Change // a buffer
}

// Suspects counts links whose last hand-off was lost, and outages. While it is above 0, Arrived
// must be told of hand-offs.
func (t *Table) Suspects() (n int) {
	for i := range t.links {
		if t.links[i].losses > 0 {
			n++
		}
	}
	return n + len(t.outages)
}

// AnyOut says whether somebody gets no hand-offs.
func (t *Table) AnyOut() bool { return len(t.outages) > 0 }

// Lost records that a hand-off has not arrived. id is that of Sent. The changes are valid until the
// next call.
func (t *Table) Lost(l Link, id uint64, sent, now time.Time) []Change {
	t.changes = t.changes[:0]
	t.forget(now)
	r := t.record(l, sent)
	if sent.Before(r.worked) { // a later one has arrived, so that this one says nothing of the present
		t.Unknown(l, id)
		return t.changes
	}
	if r.losses++; r.losses == 1 {
		r.firstLost = now
	}
	r.lastLost = now
	if sent.After(r.lostSent) {
		r.lostSent = sent
	}
	for i := range t.outages {
		if o := &t.outages[i]; o.Subject.covers(l) {
			o.Losses++
			if sent.After(o.lostSent) {
				o.lostSent = sent
			}
			if wasTrial := o.circuit.Fail(id, now); wasTrial {
				t.changes = append(t.changes, Change{o.Subject, o.Losses, o.Length()})
			}
		}
	}
	t.judge(now)
	return t.changes
}

// Arrived records that a hand-off has arrived. The changes are valid until the next call.
func (t *Table) Arrived(l Link, sent, now time.Time) []Change {
	t.changes = t.changes[:0]
	if t.Suspects() == 0 {
		return t.changes
	}
	t.forget(now)
	r := t.record(l, sent)
	if sent.After(r.worked) {
		r.worked = sent
	}
	if !sent.Before(r.lostSent) {
		r.losses = 0
	}
	t.endOutages(func(o *Outage) bool {
		ends := o.Subject.covers(l) && sent.After(o.lostSent)
		if ends {
			t.pardon(o.Subject)
		}
		return ends
	})
	t.judge(now)
	return t.changes
}

// pardon lets the connections of a healed engine be used at once, and makes one more lost hand-off
// of a connection enough to blame it.
func (t *Table) pardon(subject Link) {
	for i := range t.links {
		if r := &t.links[i]; subject.covers(r.Link) {
			r.losses = min(r.losses, Limit-1)
		}
	}
}

func (t *Table) judge(now time.Time) {
	for i := range t.links {
		if r := &t.links[i]; r.losses > 0 {
			r.worksElsewhere = [2]bool{t.worksElsewhere(r, prefill), t.worksElsewhere(r, decode)}
		}
	}
	for i := range t.links {
		switch r := &t.links[i]; {
		case r.losses == 0:
		case r.worksElsewhere == [2]bool{true, true} && r.losses >= Limit:
			t.takeOut(r.Link, r.losses, r.lostSent, now)
		case r.worksElsewhere == [2]bool{prefill: false, decode: true}:
			t.judgeEngine(r, prefill, now)
		case r.worksElsewhere == [2]bool{prefill: true, decode: false}:
			t.judgeEngine(r, decode, now)
		}
	}
}

// worksElsewhere says whether the engine on one side has served another one since the link began to
// lose hand-offs.
func (t *Table) worksElsewhere(r *record, side end) bool {
	return slices.ContainsFunc(t.links, func(x record) bool {
		return x.on(side) == r.on(side) && x.on(1-side) != r.on(1-side) && x.losses == 0 && x.arrivedSince(r.firstLost)
	})
}

func (r *record) arrivedSince(sent time.Time) bool {
	return !r.worked.IsZero() && !r.worked.Before(sent)
}

// judgeEngine takes out the engine on one side of a link if it has lost Limit hand-offs at engines
// that work with others. If it has lost them at one engine only, although others are in use, the
// connection may be broken, and only this is avoided first.
func (t *Table) judgeEngine(of *record, side end, now time.Time) {
	l, first := of.Link, of.firstLost
	name, other := l.on(side), 1-side
	lost, at, anyOther := 0, 0, false
	var lostSent time.Time
	for i := range t.links {
		r := &t.links[i]
		anyOther = anyOther || r.on(other) != l.on(other) && !r.sent.Before(first.Add(-inUse))
		if r.on(side) != name || r.losses == 0 || r.worksElsewhere[side] {
			continue
		}
		at++
		if r.worksElsewhere[other] {
			lost += r.losses
		}
		if r.lostSent.After(lostSent) {
			lostSent = r.lostSent
		}
	}
	if lost < Limit {
		return
	}
	if at > 1 || !anyOther {
		l = Link{Prefiller: name}
		if side == decode {
			l = Link{Engine: name}
		}
	}
	t.takeOut(l, lost, lostSent, now)
}

// takeOut begins an outage, unless one explains the losses already. The outage of an engine takes
// the place of those of its connections.
func (t *Table) takeOut(subject Link, losses int, lostSent, now time.Time) {
	if t.isExplained(subject) {
		return
	}
	t.endOutages(func(o *Outage) bool { return subject.covers(o.Subject) })
	o := Outage{Subject: subject, Losses: losses, lostSent: lostSent}
	o.circuit.Trip(now)
	at, _ := slices.BinarySearchFunc(t.outages, subject, func(o Outage, l Link) int { return compare(o.Subject, l) })
	t.outages = slices.Insert(t.outages, at, o)
	t.changes = append(t.changes, Change{subject, losses, o.Length()})
}

func (t *Table) endOutages(ends func(*Outage) bool) {
	t.outages = slices.DeleteFunc(t.outages, func(o Outage) bool {
		if !ends(&o) {
			return false
		}
		t.changes = append(t.changes, Change{Subject: o.Subject})
		return true
	})
}

func (t *Table) find(l Link) (at int, known bool) {
	return slices.BinarySearchFunc(t.links, l, func(r record, l Link) int { return compare(r.Link, l) })
}

// The record is valid until the next call.
func (t *Table) record(l Link, sent time.Time) *record {
	at, known := t.find(l)
	if !known {
		t.forgetLinks(sent) // engines come and go, so without this the table would only grow
		at, _ = t.find(l)
		t.links = slices.Insert(t.links, at, record{Link: l})
	}
	r := &t.links[at]
	if sent.After(r.sent) {
		r.sent = sent
	}
	return r
}

func (t *Table) forget(now time.Time) {
	t.endOutages(func(o *Outage) bool { return now.Sub(o.TrialAt()) > memory })
	t.forgetLinks(now)
}

func (t *Table) forgetLinks(now time.Time) {
	t.links = slices.DeleteFunc(t.links, func(r record) bool {
		return !t.isExplained(r.Link) && now.Sub(r.sent) > memory && now.Sub(r.lastLost) > memory
	})
}

// Excuse takes a lost hand-off back, because its request made the engines fail. It does not end an
// outage.
func (t *Table) Excuse(l Link) {
	if at, known := t.find(l); known && t.links[at].losses > 0 {
		t.links[at].losses--
	}
}

// Sent records that a hand-off is sent. If a trial is due, this is the trial.
func (t *Table) Sent(l Link, id uint64, now time.Time) {
	t.record(l, now)
	for i := range t.outages {
		if o := &t.outages[i]; o.Subject.covers(l) {
			o.circuit.Send(id, now)
		}
	}
}

// Unknown records that nothing is known of a hand-off, for example because its client left. If it
// was a trial, the next one is the trial instead.
func (t *Table) Unknown(l Link, id uint64) {
	for i := range t.outages {
		if o := &t.outages[i]; o.Subject.covers(l) {
			o.circuit.Neutral(id)
		}
	}
}

// Allows says whether a prompt that the link's prefill engine has computed may be sent over it.
// That the prefill engine itself is out is no reason to wait, because the prompt is computed. The
// trial of an engine goes where it has lost the fewest hand-offs, if it can: else an engine that
// works with some others only would be tried again and again with those that it does not work with.
func (t *Table) Allows(l Link, now time.Time) bool {
	isTrial := [2]bool{}
	for i := range t.outages {
		o := &t.outages[i]
		if !o.Subject.covers(l) {
			continue
		}
		if o.Subject.Engine != "" && !o.circuit.Allows(now) {
			return false
		}
		isTrial[prefill] = isTrial[prefill] || o.Subject.Engine == ""
		isTrial[decode] = isTrial[decode] || o.Subject.Prefiller == ""
	}
	for _, side := range []end{prefill, decode} {
		if isTrial[side] && t.worksBetterElsewhere(l, side, now) {
			return false
		}
	}
	return true
}

// LosesAt says whether the decode engine of a link or its connection is out, with a trial due or
// not.
func (t *Table) LosesAt(l Link) bool {
	return slices.ContainsFunc(t.outages, func(o Outage) bool { return o.Subject.Engine != "" && o.Subject.covers(l) })
}

func (t *Table) losses(l Link) int {
	at, known := t.find(l)
	if !known {
		return 0
	}
	return t.links[at].losses
}

// worksBetterElsewhere says whether an engine is in use at which the one on the given side has lost
// fewer hand-offs. An engine that is out is the last choice: a hand-off between two that are out
// would be lost as long as one of them is sick, and would not show that the other one has
// recovered.
func (t *Table) worksBetterElsewhere(l Link, side end, now time.Time) bool {
	lost, isOut := t.losses(l), t.isOut(l.on(1-side), 1-side)
	if lost == 0 && !isOut {
		return false
	}
	for i := range t.links {
		r := &t.links[i]
		other := Link{l.Prefiller, r.Engine}
		if side == decode {
			other = Link{r.Prefiller, l.Engine}
		}
		otherIsOut := t.isOut(r.on(1-side), 1-side)
		better := isOut && !otherIsOut || isOut == otherIsOut && t.losses(other) < lost
		if better && now.Sub(r.sent) <= inUse {
			return true
		}
	}
	return false
}

func (t *Table) isOut(name string, side end) bool {
	subject := Link{Prefiller: name}
	if side == decode {
		subject = Link{Engine: name}
	}
	return slices.ContainsFunc(t.outages, func(o Outage) bool { return o.Subject == subject })
}

// AllowsEngine says whether a decode engine may get hand-offs at all. Beside outages, it gets none
// for a second if it has lost Limit in a row for which nobody is blamed yet: a decode engine that
// fails at once always has free slots, so it would otherwise get each hand-off, and no other engine
// could show who is to blame.
func (t *Table) AllowsEngine(engine string, now time.Time) bool {
	for i := range t.outages {
		if o := &t.outages[i]; o.Subject == (Link{Engine: engine}) {
			return o.circuit.Allows(now)
		}
	}
	lost := 0
	var last time.Time
	for i := range t.links {
		r := &t.links[i]
		if r.Engine == engine && r.losses > 0 && !r.worksElsewhere[decode] && !t.isExplained(r.Link) {
			lost += r.losses
			if r.lastLost.After(last) {
				last = r.lastLost
			}
		}
	}
	return lost < Limit || now.Sub(last) >= circuit.FirstOut
}

// NextTrial is when the next trial is due after now; zero: none is.
func (t *Table) NextTrial(now time.Time) (next time.Time) {
	for i := range t.outages {
		if at := t.outages[i].TrialAt(); at.After(now) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}

// Outages returns a list that the caller may not change, valid until the next call.
func (t *Table) Outages() []Outage { return t.outages }

// Suspected is a link whose last hand-offs were lost.
type Suspected struct {
	Link
	Losses int
}

// Suspected returns the links whose last hand-offs were lost, sorted.
func (t *Table) Suspected() (all []Suspected) {
	for i := range t.links {
		if r := &t.links[i]; r.losses > 0 {
			all = append(all, Suspected{r.Link, r.losses})
		}
	}
	return all
}

// NoneArrivesSince returns since when Limit hand-offs or more were lost for which nobody is blamed,
// while none has arrived anywhere; zero: this is not so.
func (t *Table) NoneArrivesSince() (since time.Time) {
	losses := 0
	for i := range t.links {
		if r := &t.links[i]; r.losses > 0 && !t.isExplained(r.Link) {
			losses += r.losses
			if since.IsZero() || r.firstLost.Before(since) {
				since = r.firstLost
			}
		}
	}
	if losses < Limit || slices.ContainsFunc(t.links, func(r record) bool { return r.arrivedSince(since) }) {
		return time.Time{}
	}
	return since
}

func (t *Table) isExplained(l Link) bool {
	return slices.ContainsFunc(t.outages, func(o Outage) bool { return o.Subject.covers(l) })
}

// BlamesRequest says whether two attempts of one request that failed show that the request is at
// fault: all engines of both have served others since the first failed, or the attempts share no
// engine and none of these has lost hand-offs of other requests. An attempt that had only one
// engine has one name.
func (t *Table) BlamesRequest(first, second Link, since time.Time) bool {
	serve, lose := true, false
	for _, side := range []end{prefill, decode} {
		for _, l := range []Link{first, second} {
			name := l.on(side)
			if name == "" {
				continue
			}
			served, losses := false, 0
			for i := range t.links {
				if r := &t.links[i]; r.on(side) == name {
					served = served || r.arrivedSince(since)
					losses += r.losses
				}
			}
			serve = serve && served
			lose = lose || losses > 1 // one may be this request's own
		}
	}
	sharePrefiller := first.Prefiller != "" && first.Prefiller == second.Prefiller
	shareEngine := first.Engine != "" && first.Engine == second.Engine
	return serve || !sharePrefiller && !shareEngine && !lose
}

package request

import (
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/upstream"
)

// enter begins a phase, and a call of this name with it unless it is empty.
func (j *job) enter(p journal.Phase, call string) {
	j.record.Report(journal.Event{What: journal.Entered, Phase: p, Left: j.client.Left(), Call: call})
}

// leaveAfter has a call end when its client has left, and from then on for so long, and a moment has come.
func (r reader) leaveAfter(call *engine.Call, grace time.Duration, moment time.Time) *leaving {
	l := &leaving{reader: r, call: call, grace: grace, moment: moment}
	r.OnGone(l.departed)
	return l
}

// A leaving ends a call some time after its client has left.
type leaving struct {
	reader reader
	call   *engine.Call
	grace  time.Duration
	moment time.Time
	later  *time.Timer // belongs to departed, which no longer runs once OnGone(nil) has returned
}

// departed runs once the client has left.
func (l *leaving) departed() {
	l.later = time.AfterFunc(max(l.grace, time.Until(l.moment)), func() { l.call.Leave(upstream.Notice) })
}

// stop has the call go on, whatever becomes of the client.
func (l *leaving) stop() {
	l.reader.OnGone(nil)
	if l.later != nil {
		l.later.Stop()
	}
}

// part leaves the decode engine and returns when it has noticed, so that the
// slot is never another's while the engine still has this request in it.
func (s *source) part() {
	if s.resp == nil || s.resp.Ended() {
		return
	}
	s.call.Leave(upstream.Notice)
	var rest [1 << 10]byte
	for {
		if _, err := s.resp.Read(rest[:]); err != nil {
			return
		}
	}
}

// freed observes that nothing of a request is held any more, if its client left.
func (j *job) freed() {
	if j.client.Left() {
		j.record.Report(journal.Event{What: journal.Freed, At: j.client.GoneAt()})
	}
}

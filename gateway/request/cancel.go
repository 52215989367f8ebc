package request

import (
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/leg"
)

// reader is who reads the answer: a client's connection, or a leg's share of it.
type reader struct{ client }

// left says whether nobody reads any more.
func (r reader) left() bool {
	select {
	case <-r.Gone():
		return true
	default:
		return false
	}
}

// reach begins a phase. A client that has left stays in the phase in which it left.
func (j *job) reach(p journal.Phase) {
	j.told.Enter(p)
	if j.told.Reached == "" || !j.client.left() {
		j.told.Reached = p
	}
}

// finishOrLeave says what becomes of a probe whose client leaves. An engine that
// finishes a prefill pins its KV before anyone hears of it, and closing the
// connection then loses the only name it has: the pin stays until the hold
// timeout (vllm#50425). So the probe may still finish for a moment,
// and its hand-off is discarded like any other; only one that takes longer is
// aborted, which frees it on the engine at once. What an engine
// finishes in the instant in which it notices that cannot be known to anyone. It
// is not left on the budget: charging every aborted probe for the whole hold
// timeout would close the gate on engines that are empty.
func (j *job) finishOrLeave(call *engine.Call) *leaving {
	return j.client.leaveAfter(call, j.srv.Settings().Limits.ProbeGrace, time.Time{})
}

// finishPull has a call whose answer comes in one piece end with its client, but
// not before its pull of KV is over: no first event tells that it is, so until
// the time by which one would have come.
func (r reader) finishPull(call *engine.Call, over time.Time) *leaving {
	return r.leaveAfter(call, 0, over)
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
	l.later = time.AfterFunc(max(l.grace, time.Until(l.moment)), func() { l.call.Leave(leg.Notice) })
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
func (s *stream) part() {
	if s.resp == nil || s.resp.Ended() {
		return
	}
	s.call.Leave(leg.Notice)
	var rest [1 << 10]byte
	for {
		if _, err := s.resp.Read(rest[:]); err != nil {
			return
		}
	}
}

// freed observes that nothing of a request is held any more, if its client left.
func (j *job) freed() {
	if j.client.left() {
		j.told.Freed(j.client.GoneAt())
	}
}

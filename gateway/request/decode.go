package request

import (
	"encoding/json"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/upstream"
)

// decode consumes the hand-off, if there is one, and returns with the first data event in hand:
// the engine has the KV then, and only then the client sees a status line.
func (s *stream) decode(h *handoff.Handoff) *failure.Fault {
	j, slot, next := s.job, s.slot, journal.Transfer
	if h == nil {
		next = journal.Prefill
	}
	j.enter(next, "decode")
	s.computes()
	if f := j.open(h, s); f != nil {
		if h == nil {
			j.client.OnGone(nil)
		}
		if f.Verdict().KV == lifecycle.DoubtOn {
			s.overdue(h)
		}
		return f
	}
	slot.Started()
	j.arrived(h, s)
	s.opened()
	return nil
}

// open sends the decode request and reads up to the first data event. The
// connection stays until then even if the client left, for a pull that is cut
// leaks blocks on both sides.
func (j *job) open(h *handoff.Handoff, s *stream) *failure.Fault {
	s.wait = h.Await(s.rank, s.began, s.whole)
	defer s.wait.End()
	var kv json.RawMessage
	if h == nil {
		j.client.OnGone(func() { s.call.Leave(upstream.Notice) }) // no pull of KV is under way
	} else {
		if gone, sure := j.srv.Engines().Outlived(h.Born); gone {
			why := lifecycle.MayOutlive
			if sure {
				why = lifecycle.Outlived
			}
			return failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Why: why}, failure.BadGateway("prefill", "it is gone, and the prefilled prompt with it"), handoff.ErrOutlived)
		}
		var err error
		if kv, err = h.Params(s.began); err != nil {
			return failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Why: lifecycle.Expired}, failure.BadGateway("decode", "its turn came after the hand-off's deadline"), err)
		}
		h.Lease.Dispatched()
	}
	profile, limits := s.rank.Profile, &j.srv.Settings().Limits
	silence := profile.FirstEventTimeout
	if profile.Aggregated() { // it computes the whole prompt first, after others
		silence = limits.ProbeTimeout
	}
	switch {
	case h != nil && profile.Renews():
		h.Lease.Renewed()
		h.Witness(j.srv.Monitor)
		if !s.whole { // no first event shows when its pull was over
			s.wait.Limit(s.call.Expire)
		}
	case h != nil:
		silence = min(silence, h.PulledBy().Sub(s.began))
	}
	pulled := s.began.Add(silence)
	if s.slot.Beyond && h != nil && !s.whole && profile.Renews() { // else its KV must be pulled in time, queue or not
		defer handoff.LimitFromSlot(s.slot, s.call, silence)()
		silence = handoff.Forever
	}
	if s.whole { // nothing comes before all of it has
		if h != nil { // no first event shows that its pull is over, so the call outlives its client until one would have come
			defer j.client.leaveAfter(s.call, 0, pulled).stop()
		}
		defer handoff.LimitWhole(s.rank, s.call, j.srv.Settings(), s.mayHave)()
		silence = handoff.Forever
	}
	if h == nil && profile.Aggregated() {
		defer watchCore(s)()
	}
	headers := h.Identify(engine.JSONHeaders(j.legID("d", j.record.Attempts)))
	if f := stuck(s, s.send(headers, profile.DecodeBody(&j.body, j.req.Endpoint, j.leg, kv, s.wait.Salt(), !s.whole, nil), silence)); f != nil {
		if f.Engine != "" {
			j.srv.Monitor.Report(f.Engine, f.Err)
		}
		if s.whole && f.Why == lifecycle.HungUp && f.Far != lifecycle.Unsent && !time.Now().Before(pulled) {
			f.Far = lifecycle.Through // its answer was not awaited any longer, its pull was over
		}
		return f
	}
	if err := s.first(s.began.Add(silence)); err != nil {
		return stuck(s, s.failure(err))
	}
	if !s.believed(h) {
		return disbelieved()
	}
	return ignored(lifecycle.Decode, j.verify(j.resume.atD, s.Mirror.Prompt()))
}

// send sends a decode request and returns once the head of its answer has come.
func (s *stream) send(headers []engine.Header, body [][]byte, silence time.Duration) (f *failure.Fault) {
	j := s.job
	if s.slot.Beyond {
		s.beyond = true
		s.rank.Traffic.Beyond(1) // so that the alarm about ranks with too many requests expects one more
	}
	if s.partner == nil && (s.whole || s.muffled) { // else the partner says it, when the prompt is there
		s.slot.Unheard(s.mayHave)
	}
	call := upstream.Call{
		Call: s.call, Leg: lifecycle.Decode, Engine: s.rank.Instance, Scope: s.rank.Scope, Path: j.req.Endpoint.Path(), Beyond: s.beyond, Alone: s.rank.Group != "",
		Limits: engine.Deadlines{Connect: j.srv.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: j.srv.Log,
	}
	if s.resp, f = call.Open(j.record.Carry(headers), body); f != nil && f.Status != 0 {
		f.Frees = j.srv.Engines().RejectionFrees(s.rank)
	}
	return f
}

// disbelieved is the end of a decode leg whose KV may have been another prompt's.
func disbelieved() *failure.Fault {
	return failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Far: lifecycle.Through, Why: lifecycle.Disbelieved}, failure.Late(), handoff.ErrLate)
}

// ignored is the end of a leg whose engine did not take up the answer so far; nil if fail is.
func ignored(leg lifecycle.Leg, fail *openai.Error) *failure.Fault {
	if fail == nil {
		return nil
	}
	return failure.Of(lifecycle.Ended{Leg: leg, Far: lifecycle.Through, Why: lifecycle.Ignored}, fail, nil)
}

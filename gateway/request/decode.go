package request

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
)

// decode consumes the hand-off, if there is one, and returns with the first data event in hand:
// the engine has the KV then, and only then the client sees a status line.
func (s *stream) decode(h *handoff.Handoff) *failure.Fault {
	j, slot, next := s.job, s.slot, journal.Transfer
	if h == nil {
		next = journal.Prefill
	}
	j.told.Calls("decode")
	j.reach(next)
	s.computes()
	if f := j.open(h, s); f != nil {
		if h == nil {
			j.client.OnGone(nil)
		}
		if f.Verdict().KV == life.DoubtOn {
			s.overdue(h)
		}
		return f
	}
	slot.Started()
	j.arrived(h, s)
	s.opened()
	s.run.Settle()
	j.reach(journal.Streaming)
	j.client.OnGone(func() { s.call.Leave(notice) }) // from here a close aborts cleanly on the engine
	return nil
}

// open sends the decode request and reads up to the first data event. The
// connection stays until then even if the client left, for a pull that is cut
// leaks blocks on both sides.
func (j *job) open(h *handoff.Handoff, s *stream) *failure.Fault {
	sent, ok := s.rank.Area.Enter()
	defer sent()
	if !ok {
		return notOurs()
	}
	s.call.OnWritten(sent)
	s.call.Guard(s.rank.Area.Ours)
	s.wait = h.Await(s.rank, s.began, s.whole)
	defer s.wait.End()
	var kv json.RawMessage
	if h == nil {
		j.client.OnGone(func() { s.call.Leave(notice) }) // no pull of KV is under way
	} else {
		if gone, sure := j.srv.Fleet.Outlived(h.Born); gone {
			why := life.MayOutlive
			if sure {
				why = life.Outlived
			}
			return failure.Of(life.Ended{Leg: life.Decode, Why: why}, failure.BadGateway("prefill", "it is gone, and the prefilled prompt with it"), handoff.ErrOutlived)
		}
		var err error
		if kv, err = h.Params(s.began); err != nil {
			return failure.Of(life.Ended{Leg: life.Decode, Why: life.Expired}, failure.BadGateway("decode", "its turn came after the hand-off's deadline"), err)
		}
		h.Lease.Dispatched()
	}
	profile, limits := s.rank.Profile, &j.srv.Settings().Limits
	silence := profile.FirstEventTimeout
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
	headers := engine.JSONHeaders(j.legID("d", j.told.Attempts))
	if s.slot.Beyond {
		headers = append(headers, engine.Header{Name: handoff.BeyondHeader, Value: "1"})
		s.beyond = true
		s.rank.Traffic.Beyond(1)                      // so that the alarm about ranks with too many requests expects one more
		if h != nil && !s.whole && profile.Renews() { // else its KV must be pulled in time, queue or not
			defer handoff.LimitFromSlot(s.slot, s.call, silence)()
			silence = handoff.Forever
		}
	}
	if s.whole { // nothing comes before all of it has
		if h != nil {
			defer j.client.finishPull(s.call, pulled).stop()
		}
		silence = limits.ProbeTimeout
		s.slot.Progress(min(j.req.Limit, wholeCharge)) // in advance: no event will tell
	}
	resp, err := s.call.Do(http.MethodPost, j.req.Endpoint.Path(), j.told.Carry(s.rank.Area.Mark(h.Identify(headers))), profile.DecodeBody(&j.body, j.req.Endpoint, j.leg, kv, s.wait.Salt(), !s.whole, nil),
		engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: silence, Idle: silence})
	switch {
	case errors.Is(err, owner.ErrNotOwner): // nothing was sent, and the engine is not to blame
		return notOurs()
	case err != nil:
		j.srv.Monitor.Report(s.rank.Instance, err)
		f := &failure.Fault{Ended: failure.Broke(life.Decode, err), Answer: failure.Transport("decode", err), Err: err, Engine: s.rank.Instance}
		if s.whole && f.Why == life.HungUp && f.Far != life.Unsent && !time.Now().Before(pulled) {
			f.Far = life.Through // its answer was not awaited any longer, its pull was over
		}
		return f
	}
	s.resp = resp
	if resp.StatusCode() != http.StatusOK {
		return j.decodeRefused(h, s)
	}
	if err := s.first(s.began.Add(silence)); err != nil {
		return s.failure(err)
	}
	if !s.believed(h) {
		return disbelieved()
	}
	return ignored(life.Decode, j.verify(j.resume.atD, s.Mirror.Prompt()))
}

// notOurs is the end of a decode leg that another proxy's engines were to run. Nothing was sent.
func notOurs() *failure.Fault {
	return failure.Of(life.Ended{Leg: life.Decode, Why: life.NotOurs}, failure.NotOurs(), owner.ErrNotOwner)
}

// disbelieved is the end of a decode leg whose KV may have been another prompt's.
func disbelieved() *failure.Fault {
	return failure.Of(life.Ended{Leg: life.Decode, Far: life.Through, Why: life.Disbelieved}, failure.Late(), handoff.ErrLate)
}

// ignored is the end of a leg whose engine did not take up the answer so far; nil if fail is.
func ignored(leg life.Leg, fail *openai.Error) *failure.Fault {
	if fail == nil {
		return nil
	}
	return failure.Of(life.Ended{Leg: leg, Far: life.Through, Why: life.Ignored}, fail, nil)
}

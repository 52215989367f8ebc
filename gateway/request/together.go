package request

import (
	"cmp"
	"errors"
	"time"

	"evenkeel/gateway/couple"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// script is how a request goes on whose turn has come. As long as
// nobody knows where decode engines reach a prefill engine, requests to it are bound after their prefill,
// whose answer says where.
func (srv *Server) script(c prefill.Candidate) lifecycle.Script {
	switch {
	case c.Mixed:
		return lifecycle.Mixed
	case c.Profile.Early() && (c.Profile.Connector != mooncake.NIXLPush || srv.Fleet.Coordinates(c) != nil):
		return lifecycle.Early
	}
	return lifecycle.Late
}

// bound is the stream of a request that is bound before its prefill, until its first event has come.
type bound struct{ *stream }

// decode sends both legs at once, and returns with the first event of the answer in hand. Nothing was sent for the lease yet. quit: the
// client has left, and the prefill leg has ended, or the engine keeps blocks for it.
func (b bound) decode(lease *prefill.Lease) (_ *failure.Fault, quit bool) {
	s, j, slot := b.stream, b.job, b.slot
	j.record.Report(journal.Event{What: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "decode", Early: true})
	s.computes()
	body, half, streamed, tokens := j.body, j.leg, !s.whole, j.estimate()
	id := couple.ID(j.id, j.record.Attempts)
	var err error
	s.partner, err = j.srv.couples.Start(couple.Plan{
		Request: j, ID: id, Lease: lease, Slot: slot, Rank: s.rank, Endpoint: j.req.Endpoint,
		Headers: j.record.Carry(upstream.Headers(id, j.req.Endpoint, lease.Candidate.Profile)), Prompt: tokens,
		Body: func(p *mooncake.Profile, m *mooncake.Meeting) [][]byte {
			return p.EarlyProbe(&body, half, m, streamed, nil)
		},
		EndDecode: func() { s.call.Leave(upstream.Notice) }, Whole: s.whole || s.muffled, Most: s.mayHave, Dials: j.life.Dials(),
	})
	if err != nil {
		f := failure.Of(lifecycle.Ended{Leg: lifecycle.Decode, Why: lifecycle.Leaving}, failure.Leaving(), err)
		switch {
		case errors.Is(err, couple.ErrUnheard):
			f.Why, f.Answer = lifecycle.Unready, failure.BadGateway("decode", err.Error())
		case errors.Is(err, couple.ErrUnknown):
			f.Why = lifecycle.Unlearned
		}
		return f, false
	}
	j.client.OnGone(s.partner.ClientLeft)
	f := b.open()
	j.client.OnGone(nil)
	if f != nil {
		b.hear()
		if quit = f.Why != lifecycle.NotOurs && j.client.Left(); quit { // its prefill leg may still write to the rank
			s.stranded = s.partner.Wait() || s.stranded
		}
		return f, quit
	}
	slot.Started()
	j.arrived(nil, s)
	b.hear()
	_, times, _ := s.partner.Told()
	j.record.Report(journal.Event{What: journal.Coupled, Took: times.Callback, Slot: slot})
	s.opened()
	if s.slot == nil { // all of it came at once
		s.partner.Close()
	}
	return nil, false
}

// open sends the decode leg and reads up to its first data event.
func (b bound) open() *failure.Fault {
	s, j := b.stream, b.job
	s.wait = (*handoff.Handoff)(nil).Await(s.rank, s.began, s.whole) // couple.Partner limits this wait
	defer s.wait.End()
	// The legs' partner ends the wait: how long it may take depends on the prefill.
	body := s.rank.Profile.EarlyDecode(&j.body, j.leg, s.partner.Meeting, s.wait.Salt(), !s.whole, nil)
	if f := s.send(upstream.Headers(s.partner.ID, j.req.Endpoint, s.rank.Profile), body, handoff.Forever); f != nil {
		how := lifecycle.Died
		switch {
		case f.Status != 0 && f.Verdict().Next == lifecycle.Over:
			how = lifecycle.Declined
		case f.Status != 0 || f.Why == lifecycle.NotOurs || f.Why == lifecycle.Unreachable:
			how = lifecycle.Refused
		}
		return b.lost(how, f)
	}
	if err := b.first(); err != nil {
		f := s.failure(err)
		how := lifecycle.Died
		if next := f.Verdict().Next; s.broken != nil && (next == lifecycle.Over || next == lifecycle.Room) {
			how = lifecycle.Declined
		}
		return b.lost(how, f)
	}
	if !s.believed(nil) {
		return b.lost(lifecycle.Died, disbelieved())
	}
	f := s.partner.Started(s.Mirror.Prompt())
	if s.stage == ended {
		f = s.partner.Believe(s.Mirror.Prompt(), j.client.Gone())
	}
	if f != nil {
		return b.lost(lifecycle.Died, f)
	}
	if f = ignored(lifecycle.Decode, j.verify(j.resume.atD, s.Mirror.Prompt())); f != nil {
		s.partner.Close()
	}
	return f
}

// first reads up to the first event; where an aborted transfer is known by how much of the prompt the prefill
// engine counts, up to the decode engine's count, which its first event may lack.
func (b bound) first() error {
	err := b.stream.first(time.Now().Add(handoff.Forever))
	for err == nil && b.rank.Profile.Connector == mooncake.SGLang && b.tokenFrom.IsZero() && b.Mirror.Prompt() == 0 && b.stage == flows {
		err = b.fill()
	}
	if err == nil && b.broken != nil {
		err = errRefusal
	}
	return err
}

// lost is the fault of a decode leg without a first event: its own, or that of the prefill leg that has
// ended it.
func (b bound) lost(how lifecycle.EndReason, f *failure.Fault) *failure.Fault {
	s, j := b.stream, b.job
	other, stranded := s.partner.Ended(how)
	s.stranded = stranded
	if other == nil {
		if f.Err != nil && (how == lifecycle.Died || f.Status != 0 && f.Engine != "") {
			j.srv.Monitor.Report(s.rank.Instance, f.Err)
		}
		return f
	}
	if errors.Is(other.Err, couple.ErrLate) {
		s.wait.Lose()
		j.srv.metrics.latePulls.Inc()
	}
	why := *other
	return &why
}

// hear copies what the prefill engine has said so far into the request.
func (b bound) hear() {
	s, j := b.stream, b.job
	got, times, answered := s.partner.Told()
	if !answered {
		return
	}
	j.record.Report(journal.Event{What: journal.Probed, Took: times.Probe})
	j.record.Prefill = s.partner.Prefiller().ID
	j.prompt = cmp.Or(got.PromptTokens, j.prompt)
	j.record.Report(journal.Event{What: journal.Prefilled, Tokens: got.PromptTokens, Cached: got.CachedTokens, Resumed: j.life.Resumed()})
	if j.life.Resumed() {
		return
	}
	j.resume.alone = j.prompt
	if s.rank.Profile.Connector != mooncake.SGLang { // there the decode engine tells it, too
		j.cached = got.CachedTokens
		s.Mirror.Found(j.cached)
	}
	if wantsIDs(j.req, s.rank.Profile) && got.PromptTokenIDs != nil {
		j.resume.ids = got.PromptTokenIDs
	}
}

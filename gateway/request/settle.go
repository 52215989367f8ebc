package request

import (
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
)

// settle gives back everything the stream holds.
func (s *stream) settle(kind board.Kind) {
	if s.stage == settled {
		return
	}
	s.stage = settled
	s.release(kind)
	s.detach()
}

// detach gives back the source's connection and buffers. If the end of the body has
// not come yet, another goroutine waits for it, so that the client does not.
func (s *stream) detach() {
	resp, b := s.resp, s.buffers
	s.buffers = nil
	if resp != nil && b.Reader.Done() && !resp.Ended() {
		finish := func() {
			finishBody(resp, b)
			b.putBack()
		}
		if s.job.srv.tails.Run(mostTails, finish) == nil {
			return
		}
	}
	if resp != nil {
		resp.Close()
	}
	b.putBack()
}

// release gives the slot back, once; of an answer that is not whole, when the
// engine has let go of it.
func (s *stream) release(kind board.Kind) {
	if s.slot == nil {
		return
	}
	if kind != board.Finished {
		s.part()
		if s.call.Heedless() {
			s.job.srv.metrics.heedless.Inc()
		}
	}
	if s.partner != nil && !s.firstAt.IsZero() {
		if kind == board.Cancelled {
			s.partner.Abandon()
		}
		s.partner.Close()
	}
	s.job.srv.Dispatcher.Release(s.slot, s.outcome(kind))
	s.slot = nil
	s.computed()
	if s.heard {
		s.heard = false
		s.rank.Traffic.End()
	}
	if s.beyond {
		s.beyond = false
		s.rank.Traffic.Beyond(-1)
	}
	s.job.srv.Fleet.Untrack(s.run)
	if kind == board.Cancelled {
		s.job.freed()
	}
}

// Account gives back what a finished request holds of its caller's limits, and has
// the journal write what became of it: its very end, once for each. fail is nil for
// an answer that was whole.
func (srv *Server) Account(in *Incoming, fail *openai.Error) {
	if !in.over.CompareAndSwap(false, true) {
		return // it was Broken, and then its answer was closed
	}
	defer srv.open.Add(-1)
	in.Limits.GiveBack(in.Told.PromptTokens + in.Told.OutputTokens)
	in.Body.Give()
	if in.From != nil {
		srv.Node.Received(in.Told.Origin, journal.Outcome(fail))
	}
	in.Told.End(fail)
}

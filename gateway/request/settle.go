package request

import (
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/life"
	"evenkeel/sse"
)

// close settles the request, however it ended. A late FIN of the client must not reach a connection that is somebody else's by then,
// so its callback goes first.
func (s *stream) close() {
	if s.stage == settled {
		return
	}
	s.job.client.OnGone(nil)
	s.fails(life.Left, failure.Gone(), nil) // where the client's side ended first
	s.account()
	s.job.forget()
	s.settle(board.Cancelled)
}

// account fills in the job's record and observes the whole answer.
func (s *stream) account() {
	now, j, tokens := time.Now(), s.job, s.tokens()
	j.told.Relayed(now.Sub(s.firstAt), tokens)
	if tokens > 1 && s.broken == nil && !s.whole {
		j.told.Paced(s.tokenAt.Sub(s.tokenFrom), tokens)
	}
	s.reconcile()
	s.reportLocal()
	j.told.EndAttempt(s.broken)
	if !j.client.isLeg() {
		j.srv.Account(j.in, s.broken)
	}
}

// reconcile learns from a whole answer how well its tokens were counted while they
// came: that count is the load of the ranks.
func (s *stream) reconcile() {
	if s.broken != nil || s.whole {
		return
	}
	s.rank.Traffic.Learn(s.Mirror.TokensPerChunk)
	u, _ := s.Mirror.Usage()
	if drift, ok := s.Mirror.Drift(); ok && max(drift, -drift)*100 > u.Completion {
		s.job.srv.metrics.miscounted.Inc()
	}
}

// tokens is how many the answer has, of all its sources.
func (s *stream) tokens() int {
	return s.earlier + s.Mirror.Tokens()
}

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

func (b *buffers) putBack() {
	b.Assembler = nil
	if cap(b.Trail.IDs) > 64<<10 {
		b.Trail = sse.Trail{}
	}
	if cap(b.out) <= 64<<10 { // one huge event must not stay in the pool
		buffersPool.Put(b)
	}
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

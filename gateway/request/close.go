package request

import (
	"bytes"
	"time"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
)

// close settles the request, however it ended. A late FIN of the client must not reach a connection that is somebody else's by then,
// so its callback goes first.
func (s *stream) close() {
	if s.stage == settled {
		return
	}
	s.job.client.OnGone(nil)
	s.fails(life.Left, failure.Gone(), nil) // where the client's side ended first
	s.finish(failure.Gone())                // and where the life is over, because something panicked
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

// collect reads an answer that is not streamed to its end, settles the request, and returns
// its JSON.
func (s *stream) collect() ([]byte, *openai.Error) {
	defer s.close()
	for s.stage < ended {
		if err := s.fill(); err != nil {
			return nil, failure.Stream("upstream_broken", err)
		}
	}
	switch {
	case s.broken != nil:
		return nil, s.broken
	case s.whole: // as readWhole framed it
		return bytes.TrimSpace(bytes.TrimPrefix(bytes.Clone(s.out), []byte("data:"))), nil
	}
	body, err := s.Assembler.JSON(nil)
	if err != nil {
		s.broken = failure.Stream("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}

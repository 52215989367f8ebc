package request

import (
	"errors"
	"net/http"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/life"
	"evenkeel/gateway/openai"
	"evenkeel/sse"
)

// condemn tells the monitor what a decode that gave nothing says about its
// engine: a refusal of the request, an engine that is full, a hand-off that was
// too old and a rank that was drained say nothing.
func (s *stream) condemn(whom life.Whom, f *failure.Fault) {
	monitor, id := s.job.srv.Monitor, s.rank.Instance
	switch whom {
	case life.Nobody:
	case life.Disputed:
		s.job.blame.Accuse(monitor, id, f.Err)
	case life.Wedged:
		monitor.Judge(id, engine.Silent, f.Err)
	case life.Engine:
		monitor.Judge(id, engine.Faulted, f.Err)
	}
}

// judge tells the monitor how the source's engine did after its first event,
// once; fail nil: well.
func (s *stream) judge(fail *openai.Error) {
	if s.slot == nil {
		return // judged before
	}
	if fail != nil && s.firstAt.IsZero() { // decode judges
		s.unheard = fail.Status/100 != 4 && !s.givenBack && !s.run.Moved()
		return
	}
	monitor, id := s.job.srv.Monitor, s.rank.Instance
	switch said := s.Mirror.Failure(); {
	case fail == nil:
		monitor.Judge(id, engine.Served, nil)
	case s.givenBack || s.run.Moved() || fail.Status/100 == 4:
	case said.Status == http.StatusInternalServerError:
		s.job.blame.Accuse(monitor, s.rank.Instance, errors.New("its event was an error of status 500"))
	case s.silent:
		monitor.Judge(id, engine.Silent, sse.ErrSilent)
	case s.why != nil:
		monitor.Judge(id, engine.Faulted, s.why)
	default:
		monitor.Judge(id, engine.Faulted, errors.New(fail.Code))
	}
}

// outcome of a request whose KV did or did not come.
func (s *stream) outcome(kind board.Kind) board.Outcome {
	return board.Outcome{Kind: kind, Generated: s.Mirror.Tokens(), Lost: s.unheard, Orphaned: s.stranded}
}

package request

import (
	"errors"
	"net/http"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// judge tells the monitor what a decode that gave nothing says about its
// engine: a refusal of the request, an engine that is full, a hand-off that was
// too old and a rank that was drained say nothing.
func (b *blame) judge(monitor *engine.Monitor, r *fleet.Rank, f *fault) {
	var ee *engine.Error
	switch {
	case f.final || f.givenBack || f.moved || f.status/100 == 4 || f.status == http.StatusNotImplemented || f.answer.Status == journal.StatusClientClosed:
	case errors.Is(f.err, mooncake.ErrExpired) || errors.Is(f.err, mooncake.ErrTaken):
	case errors.As(f.err, &ee) && ee.Aborted || errors.Is(f.err, engine.ErrClosed):
	case f.status == http.StatusInternalServerError:
		b.accuse(monitor, r, f.err)
	case engine.WasSilent(f.err):
		monitor.Judge(r.Instance, engine.Silent, f.err)
	default:
		monitor.Judge(r.Instance, engine.Faulted, f.err)
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
	switch said := s.mirror.Failure(); {
	case fail == nil:
		monitor.Judge(id, engine.Served, nil)
	case s.givenBack || s.run.Moved() || fail.Status/100 == 4:
	case said.Status == http.StatusInternalServerError:
		s.job.blame.accuse(monitor, s.rank, errors.New("its event was an error of status 500"))
	case s.silent:
		monitor.Judge(id, engine.Silent, sse.ErrSilent)
	case s.why != nil:
		monitor.Judge(id, engine.Faulted, s.why)
	default:
		monitor.Judge(id, engine.Faulted, errors.New(fail.Code))
	}
}

// blame is a 500 whose cause is open: old vLLM answers so to prompts that are
// too long, and every engine would.
type blame struct {
	instance string
	settle   func(finding) // nil: nobody is accused
	cleared  bool          // two engines said it: it is the request
}

// finding is whose a 500 was.
type finding uint8

const (
	unclear  finding = iota // no other engine had the request
	guilty                  // another engine answered it
	innocent                // another engine failed at it, too
)

// accuse holds a 500 against a decode engine, unless another gives it too.
func (b *blame) accuse(monitor *engine.Monitor, r *fleet.Rank, err error) {
	settle := monitor.Accuse(r.Instance)
	b.hold(r.Instance, func(f finding) {
		settle()
		switch f {
		case guilty:
			monitor.Judge(r.Instance, engine.Faulted, err)
		case unclear:
			monitor.Judge(r.Instance, engine.Unclear, err)
		case innocent:
		}
	})
}

// hold keeps the verdict on a 500 until it is known whose it is.
func (b *blame) hold(instance string, settle func(finding)) {
	switch {
	case b.cleared:
		settle(innocent)
	case b.settle == nil:
		b.instance, b.settle = instance, settle
	case b.instance != instance:
		b.settle(innocent)
		settle(innocent)
		b.settle, b.cleared = nil, true
	default: // it said so before
		first := b.settle
		b.settle = func(f finding) { first(f); settle(f) }
	}
}

// find settles a 500 that no other engine confirmed.
func (b *blame) find(f finding) {
	if settle := b.settle; settle != nil {
		b.settle = nil
		settle(f)
	}
}

// outcome of a request whose KV did or did not come.
func (s *stream) outcome(kind board.Kind) board.Outcome {
	return board.Outcome{Kind: kind, Generated: s.mirror.Tokens(), Lost: s.unheard}
}

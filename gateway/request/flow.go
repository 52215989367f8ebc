package request

import (
	"runtime/debug"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/gateway/pump"
	"evenkeel/sse"
)

// flow is a stream as a pump needs it.
type flow struct{ *stream }

// shortAnswer is how many tokens an answer may have at most that fasthttp writes as it writes any other body.
// To pass the sockets to a loop and back costs as much as a few arrivals.
const shortAnswer = 8

var _ pump.Stream = flow{} // else no loop would carry an answer, and nothing would say so

func (s flow) Next() ([]byte, error) { return s.next() }

func (s flow) Close() { s.close() }

func (s flow) Wait(now time.Time) time.Duration { return s.answer.Reader.Wait(now) }

func (s flow) Err() error { return s.answer.Err() }

func (s flow) Flow() *engine.Response {
	if s.stage != flows || s.slot == nil || s.answer.Assembler != nil || s.resp.Arrived() {
		return nil
	}
	s.answer.out = nil
	return s.resp
}

func (s flow) Arrive(dst, data []byte, now time.Time) ([]byte, sse.End) {
	s.now = now
	dst, fx := s.answer.Feed(dst, data, now)
	s.rank.Vouch(&s.came, s.job.req.Endpoint, len(data), false, fx.Events > 0, now)
	if fx.Events > 0 {
		s.progress(fx.Tokens, fx.Events)
	}
	return dst, fx.End
}

func (s flow) GoBack(events []byte, end sse.End) {
	s.answer.out = events
	switch err := s.answer.Err(); {
	case end != sse.Runs:
		s.effect(sse.Effects{End: end})
	case err != nil:
		s.broke(err)
	}
}

func (s flow) Panicked(v any) { s.job.panicked(v, s.close) }

// panicked settles a request whose stream has panicked.
func (j *job) panicked(v any, settle func()) {
	log := func(doing string, v any) {
		j.srv.Log.Error("panic while "+doing, zap.Inline(j), zap.Any("panic", v), zap.ByteString("stack", debug.Stack()))
	}
	log("an answer was streamed", v)
	defer func() {
		if v := recover(); v != nil {
			log("a stream was ended", v)
		}
	}()
	settle()
}

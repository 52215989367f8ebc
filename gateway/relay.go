package gateway

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/openai"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A stream is an answer under way: it reads the decode engine's events, counts
// their tokens into the slot, edits what the client did not ask for and hands
// the bytes on. It is an io.ReadCloser for the connection's own goroutine: one
// Read is one arrival, so backpressure is the client's own.
type stream struct {
	job   *job
	slot  *dispatcher.Slot
	rank  *rank
	lease *prefill.Lease
	call  *engine.Call
	resp  *engine.Response
	began time.Time

	*buffers
	assembler *sse.Assembler // set for an answer that is not streamed
	unread    []byte         // events the client has not taken yet
	ended     bool           // nothing more comes from the engine
	broken    *openai.Error  // why it ended before it was whole
	lastEvent time.Time
	outcome   dispatcher.Outcome
	settled   bool
}

// buffers are what a stream needs while it runs, reused by the next one.
type buffers struct {
	read   [4 << 10]byte
	out    []byte
	framer *sse.Framer
	mirror *sse.Mirror
}

var buffersPool = sync.Pool{New: func() any {
	return &buffers{framer: sse.NewFramer(0), mirror: sse.NewMirror(sse.Ask{Choice: -1})}
}}

// errNotWhole ends a stream that stopped without saying why it finished.
var errNotWhole = errors.New("the engine's stream ended without a finish_reason")

// first reads up to the first data event. Comments may keep the connection
// alive for ever, so the deadline is for all of it.
func (s *stream) first(deadline time.Time) error {
	s.buffers = buffersPool.Get().(*buffers)
	s.framer.Reset()
	ask := s.job.ask
	ask.Cached = s.job.cached
	s.mirror.Reset(ask)
	s.out = s.out[:0]
	if s.job.req.Passthrough {
		return s.passthrough(deadline)
	}
	if ct := s.resp.ContentType(); !bytes.HasPrefix(ct, []byte("text/event-stream")) {
		body, _ := s.resp.ReadAll(maxErrorBody)
		return &notAStream{contentType: string(ct), body: body}
	}
	if !s.job.req.Stream {
		s.assembler = sse.NewAssembler(s.job.chat())
	}
	for !s.mirror.Started() && !s.ended {
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("decode %s sent no event within %v of the request", s.rank.Target.ID, s.rank.Profile.FirstEventTimeout)
		}
		s.resp.SetIdle(left)
		if err := s.fill(); err != nil {
			return err
		}
	}
	if s.broken != nil {
		return errBroken
	}
	s.lastEvent = time.Now()
	return nil
}

var errBroken = errors.New("the first event was a failure")

// notAStream is a 200 whose body is something else (contract 4.5).
type notAStream struct {
	contentType string
	body        []byte
}

func (e *notAStream) Error() string {
	return fmt.Sprintf("the engine answered 200 with content type %q instead of an event stream", e.contentType)
}

// fill reads one arrival and turns its complete events into bytes for the
// client. An error is returned only while nothing was forwarded; afterwards it
// becomes the stream's last event.
func (s *stream) fill() error {
	n, err := s.resp.Read(s.read[:])
	s.framer.Feed(s.read[:n])
	for !s.ended {
		e, ok := s.framer.Next()
		if !ok {
			break
		}
		s.event(e)
	}
	if err == nil || s.ended {
		return nil
	}
	started := s.mirror.Started()
	switch {
	case errors.Is(err, io.EOF) && s.mirror.Finished() && s.framer.Buffered() == 0:
		s.end(nil) // whole, but without [DONE], as some engines leave it
	case errors.Is(err, io.EOF):
		s.end(streamError("upstream_incomplete", errNotWhole))
		err = errNotWhole
	default:
		s.end(streamError("upstream_broken", err))
	}
	if started {
		return nil
	}
	return err
}

// event handles one event of the engine.
func (s *stream) event(e sse.Event) {
	started, before, mark := s.mirror.Started(), s.mirror.Tokens(), len(s.out)
	edited, verdict := s.mirror.Event(e, s.out)
	// The mirror appends what it edited to s.out and returns the whole of it;
	// an event it left alone is returned as it came.
	if len(edited) > 0 && &edited[0] != &e.Raw[0] {
		s.out = edited
		edited = s.out[mark:]
	} else {
		s.out = append(s.out, edited...)
	}
	if s.assembler != nil {
		s.out = s.out[:mark]
	}
	if now := s.mirror.Tokens(); now > before {
		s.progress(now, started)
	}
	switch verdict {
	case sse.Forward:
		switch {
		case s.assembler != nil:
			if err := s.assembler.Add(edited); err != nil {
				s.end(streamError("upstream_broken", err))
			}
		case e.Kind != sse.KindData && !started:
			s.out = s.out[:mark] // a comment before the first event would commit us to a 200
		}
	case sse.Failed:
		s.out = s.out[:mark] // end says it in our own words, whatever the engine's dialect
		f := s.mirror.Failure()
		s.end(&openai.Error{Status: f.Status, Type: f.Type, Code: f.Code, Message: f.Message})
	case sse.Recomputed:
		s.end(openai.NewError(http.StatusBadGateway, "recompute_unresumable",
			"the decode engine ran out of KV memory and gave the request back; it cannot be resumed"))
	case sse.Ended:
		s.out = s.out[:mark]
		if s.mirror.Finished() {
			s.end(nil)
		} else {
			s.end(streamError("upstream_incomplete", errNotWhole))
		}
	}
}

// progress tells the board how far the request is; the tick reads it.
func (s *stream) progress(tokens int, started bool) {
	s.slot.Progress(tokens)
	now := time.Now()
	if started {
		s.job.gw.metrics.itl.Observe(now.Sub(s.lastEvent).Seconds())
	}
	s.lastEvent = now
}

// end closes the stream's contents: whole when fail is nil, else with an error
// event, never as if whole (contract 0.9). The slot is free from here on.
func (s *stream) end(fail *openai.Error) {
	if s.ended {
		return
	}
	s.ended = true
	s.broken = fail
	s.outcome = dispatcher.Outcome{Kind: dispatcher.Finished, Generated: s.mirror.Tokens()}
	if fail != nil {
		s.outcome.Kind = dispatcher.Failed
		if s.job.left() {
			s.outcome.Kind = dispatcher.Cancelled
		}
		s.call.Abort()
	}
	s.release()
	if s.assembler != nil || s.job.req.Passthrough || s.job.isLeg() {
		return // whoever puts the answer together says how it ended
	}
	if fail != nil {
		s.out = sse.ErrorEvent(s.out, fail.Message, orElse(fail.Type, "server_error"), fail.Code)
	}
	s.out = append(s.out, sse.Done...)
}

// Read hands out what has arrived, waiting for the first bytes only.
func (s *stream) Read(p []byte) (int, error) {
	if len(s.unread) == 0 {
		events, err := s.next()
		if err != nil {
			return 0, err
		}
		s.unread = events
	}
	n := copy(p, s.unread)
	s.unread = s.unread[n:]
	return n, nil
}

// next returns the whole events that have arrived, waiting for the first; they
// are valid until the next call. io.EOF ends the answer, whole or not.
func (s *stream) next() ([]byte, error) {
	for len(s.out) == 0 {
		if s.ended {
			s.tail()
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	events := s.out
	s.out = s.out[:0]
	return events, nil
}

// tail reads the end of the body behind [DONE], so that the connection can be
// used again. The client has everything already.
func (s *stream) tail() {
	if s.broken != nil {
		return
	}
	s.resp.SetIdle(tailTimeout)
	for {
		if _, err := s.resp.Read(s.read[:]); err != nil {
			return
		}
	}
}

const tailTimeout = 250 * time.Millisecond

// release gives the slot back, once.
func (s *stream) release() {
	if s.slot != nil {
		s.job.gw.dispatcher.Release(s.slot, s.outcome)
		s.slot = nil
	}
}

// close settles the request, however it ended; err is why nobody read it to its
// end, and the stream knows as much by itself. A late FIN of the client must not
// reach a connection that is somebody else's by then, so its callback goes
// first.
func (s *stream) close(error) {
	if s.settled {
		return
	}
	s.job.client.OnGone(nil)
	if !s.ended { // the client's side ended first
		s.outcome = dispatcher.Outcome{Kind: dispatcher.Cancelled, Generated: s.mirror.Tokens()}
		s.broken = errGone()
		s.call.Abort()
	}
	tokens := s.mirror.Tokens()
	s.job.finished(s, tokens)
	s.settle()
}

// settle gives back everything the stream holds.
func (s *stream) settle() {
	if s.settled {
		return
	}
	s.settled = true
	s.release()
	if s.resp != nil {
		s.resp.Close()
	}
	if s.buffers != nil {
		if cap(s.out) <= 64<<10 { // one huge event must not stay in the pool
			buffersPool.Put(s.buffers)
		}
		s.buffers = nil
	}
}

// collect reads an answer that is not streamed to its end and returns its JSON.
func (s *stream) collect() ([]byte, *openai.Error) {
	for !s.ended {
		if err := s.fill(); err != nil {
			return nil, streamError("upstream_broken", err)
		}
	}
	if s.broken != nil {
		return nil, s.broken
	}
	if s.job.req.Passthrough {
		return bytes.Clone(s.out), nil
	}
	s.tail()
	body, err := s.assembler.JSON(nil)
	if err != nil {
		s.broken = streamError("upstream_broken", err)
		return nil, s.broken
	}
	return body, nil
}

// passthrough takes the engine's own non-streamed answer (contract 6): nothing
// is known of its progress until it is there.
func (s *stream) passthrough(deadline time.Time) error {
	s.resp.SetIdle(time.Until(deadline))
	body, err := s.resp.ReadAll(s.job.gw.cfg.Limits.EventBytes)
	if err != nil {
		return err
	}
	s.out = append(s.out, body...)
	s.end(nil)
	return nil
}

// failure is what the client sees when nothing was forwarded yet: a refusal
// that came late as itself, all else as the engine's failure.
func (s *stream) failure(err error) *openai.Error {
	var odd *notAStream
	if errors.As(err, &odd) {
		if _, v := s.mirror.Event(sse.Event{Raw: odd.body, Data: odd.body}, nil); v == sse.Failed {
			f := s.mirror.Failure()
			s.broken = &openai.Error{Status: f.Status, Type: f.Type, Code: f.Code, Message: f.Message}
		}
	}
	switch {
	case s.broken == nil:
		return transportError("decode", s.rank.Target.ID, err)
	case s.broken.Status/100 == 4:
		return s.broken
	}
	return openai.NewError(http.StatusBadGateway, "decode_failed", fmt.Sprintf("decode engine %s failed: %s", s.rank.Target.ID, s.broken.Message))
}

func streamError(code string, err error) *openai.Error {
	return openai.NewError(http.StatusBadGateway, code, err.Error())
}

// orElse is a, or b where there is no a.
func orElse[T comparable](a, b T) T {
	var none T
	if a != none {
		return a
	}
	return b
}

package request

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

func (j *job) newStream(slot *dispatcher.Slot) *stream {
	rank := j.srv.Engines().Rank(slot.Worker)
	call := upstream.New(j.srv.Client, rank.Profile, rank.Target)
	if j.life.Dials() {
		call.Fresh()
	}
	s := &stream{source: source{job: j,
		slot: slot, rank: rank, call: call, began: time.Now(), local: slot.NewTokens > 0, mayHave: j.mayHave(rank.Context),
		answer: buffersPool.Get().(*buffers),
	}}
	resumed := j.life.Resumed()
	s.whole = !resumed && !j.req.Stream && (j.req.Passthrough || rank.Profile.NonStream == mooncake.NonStreamPassthrough)
	s.muffled = j.muffled(rank.Profile)
	ask := j.ask
	ask.TokensPerChunk = rank.Traffic.TokensPerChunk()
	if ask.MaxTokens, ask.Context = s.mayHave, prompt.Longest(rank.Context); j.req.Beams > 0 {
		ask.Context = 0 // all beams together may have more
	}
	if ask.Cached = j.cached; s.local || rank.Profile.Connector == mooncake.SGLang {
		ask.Cached = sse.OwnCached
	}
	var assembler *sse.Assembler
	if s.whole { // its one piece has choices and usage
		ask.ContinuousUsage, ask.Whole = true, true
	} else if j.keep(rank); !resumed && !j.req.Stream { // a resumed source's events go to the assembler of the answer
		assembler = newAssembler(j)
	}
	// the first event of a whole answer is its last
	at, safe := fleet.Place{Instance: rank.Instance, Rank: rank.Target.Rank}, s.whole || s.local
	s.run = j.srv.Fleet.Track(at, call, safe)
	if s.answer.Trail.Reset(mooncake.ByText(j.resume.how)); !s.whole && j.resume.keeping != lifecycle.KeepNothing {
		s.answer.Trail.KeepPrompt = s.local || rank.Profile.Early()
		ask.Trail = &s.answer.Trail
	}
	s.answer.Answer.Reset(ask)
	s.answer.Assembler = assembler
	s.answer.out = s.answer.out[:0]
	return s
}

// muffled says whether an engine may hold a text back until it has all of it. SGLang does so with a response while a call of a tool
// may follow, because its events say which of both the text is (0.5.23, responses_stream_generator_non_harmony in
// entrypoints/openai/serving_responses.py).
func (j *job) muffled(p *mooncake.Profile) bool {
	if p.Connector != mooncake.SGLang || j.req.Endpoint != mooncake.Responses {
		return false
	}
	tools, _ := j.body.Get("tools")
	return len(tools) > 0 && tools[0] == '[' && len(bytes.TrimSpace(tools[1:len(tools)-1])) > 0
}

// opened notes that the first data event is here.
func (s *stream) opened() {
	s.firstAt = time.Now()
	s.computed(false)
	if s.slot != nil { // else all of it came at once
		s.heard = true
		s.rank.Traffic.Begin()
	}
	j := s.job
	if !j.life.Resumed() && !s.whole { // else the client has had its first event, or the time of the first token is not known
		j.record.Report(journal.Event{What: journal.First, At: s.firstAt, Sent: s.began})
		if j.srv.Node != nil {
			j.srv.Node.Served(s.firstAt.Sub(j.record.Arrival))
		}
	}
	s.run.Settle()
	j.enter(journal.Streaming, "")
}

// fill reads one arrival and turns its complete events into bytes for the
// client. An error is returned only before the first data event; afterwards it
// becomes the stream's last event.
func (s *stream) fill() error {
	if s.stage == lost {
		s.goOn()
		return nil
	}
	if wait := s.answer.Reader.Wait(time.Now()); wait != s.idle {
		s.idle = max(wait, 1)
		s.resp.SetIdle(s.idle)
	}
	read := readPool.Get().(*[4 << 10]byte)
	n, err := s.resp.Read(read[:])
	s.arrived(read[:n], time.Now())
	readPool.Put(read)
	if err == nil {
		err = s.answer.Err()
	}
	if err == nil || s.stage != flows {
		return nil //nolint:nilerr // the end of the stream is not part of the answer
	}
	if s.broke(err); s.fault == nil || s.fault.Why == lifecycle.Unusable || s.answer.Mirror.Started() {
		return nil
	}
	return err
}

func (s *stream) arrived(p []byte, now time.Time) {
	var fx sse.Effects
	s.now = now
	s.answer.out, fx = s.answer.Feed(s.answer.out, p, now)
	s.rank.Vouch(&s.came, s.job.req.Endpoint, len(p), s.resp.Arrived(), fx.Events > 0, now)
	s.effect(fx)
}

// broke ends the source, whose body ended with err or is not read any further.
func (s *stream) broke(err error) {
	s.answer.out = s.answer.Mend(s.answer.out) // the error or the end must be an event of its own
	whole := errors.Is(err, io.EOF) && s.answer.Closed() == sse.Whole
	switch wrong := s.partner.lost(); {
	case s.job.passed != nil:
		cutPassed(s, err)
	case s.answer.TooMuch():
		s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", err), err)
	case whole:
		if s.answer.Mirror.LacksUsage() && s.answer.Trail.Head.ID != nil && max(s.answer.Mirror.Prompt(), s.job.prompt) > 0 {
			s.conclude(s.answer.Trail.Head, "")
		}
		s.ends()
	case wrong != nil:
		s.fails(lifecycle.Unusable, wrong.Answer, errors.New(wrong.Answer.Code))
	case s.run.Moved():
		s.fails(lifecycle.Moved, s.job.srv.movedOut(), failure.ErrMoved)
	case errors.Is(err, io.EOF):
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	default:
		s.job.srv.Monitor.Report(s.rank.Instance, err)
		why := (&upstream.Call{Leg: lifecycle.Decode}).Broke(err).Why
		if why == lifecycle.HungUp { // the cause is not a drain; fails looks whether the client has left
			why = lifecycle.Broke
		}
		s.fails(why, failure.Stream("upstream_broken", err), err)
	}
}

// cutPassed ends an answer that is passed on, whose body ended with err or is not read any further. beginsPassed says what that means
// before the first event.
func cutPassed(s *stream, err error) {
	err = cmp.Or(s.answer.Err(), err) // whatever else came, not all of it was read
	begun, over := s.answer.Mirror.Started(), errors.Is(err, io.EOF)
	switch {
	case over && s.answer.Closed() == sse.Whole: // engines differ in whether they send [DONE]
		s.ends()
		return
	case over && s.answer.Reader.Buffered() > 0:
		err = errCut
	case over:
		err = errNoData
	}
	answer := openai.NewError(http.StatusBadGateway, "upstream_broken", failure.Transport(failure.Engine, err).Message)
	switch {
	case begun && s.run.Moved():
		answer = s.job.srv.drained(notAnswered)
	case begun && !s.job.client.Left():
		s.job.srv.Monitor.Report(s.rank.Instance, err)
	}
	s.fails(lifecycle.Broke, answer, err)
}

// Why an answer that is passed on is not whole.
var (
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errNoData = errors.New("the engine's stream ended without an event")
)

// notAnswered is what a client reads if the engine of its request was taken out of service before the end of the answer.
const notAnswered = "its engine was taken out of service; send the request again"

// event takes in one event that comes from no socket.
func (s *stream) event(e sse.Event) {
	var fx sse.Effects
	s.answer.out, fx = s.answer.Event(s.answer.out, e)
	s.effect(fx)
}

func (s *stream) effect(fx sse.Effects) {
	if fx.Events > 0 {
		s.progress(fx.Tokens, fx.Events)
	}
	switch fx.End {
	case sse.Runs:
	case sse.Whole:
		s.ends()
	case sse.Short:
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	case sse.Garbled:
		s.fails(lifecycle.Garbled, failure.Stream("upstream_broken", s.answer.Err()), s.answer.Err())
	case sse.Broken:
		s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", s.answer.Err()), s.answer.Err())
	case sse.Refused:
		said := s.answer.Mirror.Failure()
		if s.firstAt.IsZero() && engine.SaysPaused(said.Status, said.Message) { // vLLM has begun the stream before its core refuses the request
			s.job.srv.Monitor.Report(s.rank.Instance, engine.ErrPaused)
			s.fails(lifecycle.Withheld, failure.Withheld(s.side(), engine.ErrPaused), engine.ErrPaused)
			return
		}
		s.fails(lifecycle.ByStatus(said.Status), failure.FromStream(said), fmt.Errorf("its event was an error of status %d", said.Status))
	case sse.GivenBack:
		if s.firstAt.IsZero() { // serve begins the answer anew
			s.job.srv.metrics.recomputes.WithLabelValues(lifecycle.Repeated).Inc()
		}
		s.job.srv.Dispatcher.Preempted(s.slot.Worker)
		s.job.srv.Fleet.GaveBack(s.rank.Instance)
		answer := openai.NewError(http.StatusBadGateway, "recompute_unresumable",
			"the engine ran out of KV memory and gave the request back; it cannot be resumed")
		s.fails(lifecycle.GivenBack, answer, errRefusal)
	}
}

// progress notes in the slot how far the request is after so many more events with
// tokens; the next round reads it.
func (s *stream) progress(tokens, events int) {
	if s.slot != nil { // else a prefill engine answers
		if s.whole { // the partner says so when the prefill engine has answered, which may come later than this answer
			s.slot.Unheard(s.mayHave)
		}
		s.slot.Progress(tokens)
	}
	if s.heard {
		s.rank.Traffic.OnEvent()
	}
	s.shed()
	if s.tokenFrom.IsZero() {
		s.tokenFrom, s.tokenAt = s.now, s.now
		events--
	}
	for gap := s.now.Sub(s.tokenAt).Seconds(); events > 0; events-- {
		s.job.srv.metrics.itl.Observe(gap)
		gap = 0 // the other events came at the same time
	}
	s.tokenAt = s.now
}

// Read hands out what has arrived, waiting for the first bytes only.
func (s *stream) Read(p []byte) (int, error) {
	if len(s.unread) == 0 {
		events, err := s.Next()
		if err != nil {
			return 0, err
		}
		s.unread = events
	}
	n := copy(p, s.unread)
	s.unread = s.unread[n:]
	return n, nil
}

// Pending is how much more Read has without waiting.
func (s *stream) Pending() int { return len(s.unread) + len(s.answer.out) }

// Ended says that nothing comes after what Read has.
func (s *stream) Ended() bool { return s.stage >= ended }

// Next returns the whole events that have arrived, waiting for the first; they
// are valid until the next call. io.EOF ends the answer, whole or not.
func (s *stream) Next() ([]byte, error) {
	for len(s.answer.out) == 0 || s.more() {
		if s.stage >= ended {
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	events := s.answer.out
	s.answer.out = s.answer.out[:0]
	return events, nil
}

// more says that more bytes have arrived, which the client must get at once, too.
func (s *stream) more() bool {
	return s.stage == flows && len(s.answer.out) < mostAtOnce && s.resp.Arrived()
}

const mostAtOnce = 64 << 10

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
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// newStream prepares the call to the rank of the slot, and the stream of its answer. It sends nothing yet.
func (j *job) newStream(slot *dispatcher.Slot) *stream {
	rank := j.srv.Engines().Rank(slot.Worker)
	call := upstream.New(j.srv.Client, rank.Profile, rank.Target)
	if j.life.Dials() {
		call.Fresh()
	}
	s := &stream{job: j, from: upstreamCall{job: j,
		slot: slot, rank: rank, call: call, began: time.Now(), local: slot.NewTokens > 0, maxTokens: j.maxAnswerTokens(rank.Context),
		answer: buffersPool.Get().(*buffers),
	}}
	resumed := j.life.Resumed()
	s.from.unstreamed = !resumed && !j.req.Stream && (j.req.Passthrough || rank.Profile.NonStream == mooncake.NonStreamPassthrough)
	s.from.buffered = j.muffled(rank.Profile)
	ask := j.ask
	ask.TokensPerChunk = rank.Traffic.TokensPerChunk()
	// a beam search answers with several texts, each of which may be as long as the context
	ask.MaxTokens, ask.Context = s.from.maxTokens, prompt.Longest(rank.Context)*max(1, j.req.Beams)
	if ask.Cached = j.cachedTokens; s.from.local || rank.Profile.Connector == mooncake.SGLang {
		ask.Cached = sse.OwnCached
	}
	var assembler *sse.Assembler
	if s.from.unstreamed { // the answer comes as if it were one event that has the choices and the usage
		ask.ContinuousUsage, ask.Unstreamed = true, true
	} else if j.keep(rank); !resumed && !j.req.Stream { // a resumed answer keeps its first assembler (see adopt)
		assembler = newAssembler(j)
	}
	// A drain aborts a call only when the rank pulls no KV for it. A local call never pulls any. With an answer in one piece, nothing shows
	// before its end that the pull is over, so a drain does not wait for it.
	abortable := s.from.unstreamed || s.from.local
	s.from.tracked = j.srv.Fleet.Track(roster.Location{Instance: rank.Instance, Rank: rank.Target.Rank}, call, abortable)
	s.from.answer.Transcript.Reset(mooncake.ByText(j.resume.how))
	if !s.from.unstreamed && j.resume.retention != lifecycle.KeepNothing {
		s.from.answer.Transcript.KeepPrompt = s.from.local || rank.Profile.Early()
		ask.Transcript = &s.from.answer.Transcript
	}
	s.from.answer.Answer.Reset(ask)
	s.from.answer.Assembler = assembler
	s.from.answer.out = s.from.answer.out[:0]
	return s
}

// muffled says whether an engine may send no text before the whole answer is computed. SGLang does that for the Responses API if the
// request has tools: until the end, the text may turn out to be a tool call (0.5.23, responses_stream_generator_non_harmony in
// entrypoints/openai/serving_responses.py).
func (j *job) muffled(profile *mooncake.Profile) bool {
	if profile.Connector != mooncake.SGLang || j.req.Endpoint != mooncake.Responses {
		return false
	}
	tools, _ := j.body.Get("tools")
	return len(tools) > 0 && tools[0] == '[' && len(bytes.TrimSpace(tools[1:len(tools)-1])) > 0 // a list that is not empty
}

// opened notes that the first data event has come. From now on the client may have a part of the answer.
func (s *stream) opened() {
	s.firstAt = time.Now()
	s.from.settleCompute(false)
	if s.from.slot != nil { // nil: the whole answer came at once, and its slot is free
		s.from.heard = true
		s.from.rank.Traffic.Begin()
	}
	j := s.job
	if !j.life.Resumed() && !s.from.unstreamed { // if whole, the time of the first token is not known
		j.record.Report(journal.Event{Kind: journal.First, At: s.firstAt, Sent: s.from.began})
		if j.srv.Peers != nil {
			j.srv.Peers.Served(s.firstAt.Sub(j.record.Arrival))
		}
	}
	s.from.tracked.Settle()
	j.enter(journal.Streaming, "")
}

// fill waits for the engine's next bytes, and turns the events that these bytes complete into bytes for the client. It returns an error
// only before the first data event. A later error becomes the last event that the client gets.
func (s *stream) fill() error {
	if s.stage == lost {
		s.goOn()
		return nil
	}
	if wait := s.from.answer.Reader.Wait(time.Now()); wait != s.from.idle {
		s.from.idle = max(wait, 1)
		s.from.resp.SetIdle(s.from.idle)
	}
	readBuffer := readPool.Get().(*[4 << 10]byte)
	n, err := s.from.resp.Read(readBuffer[:])
	s.feed(readBuffer[:n], time.Now())
	readPool.Put(readBuffer)
	if err == nil {
		err = s.from.answer.Err()
	}
	if err == nil || s.stage != flows {
		return nil //nolint:nilerr // the end of the stream is not part of the answer
	}
	s.broke(err)
	fault := s.from.fault // nil: the answer was whole
	if fault == nil || fault.Reason == lifecycle.Unusable || s.from.answer.Filter.Started() {
		return nil
	}
	return err
}

// feed processes bytes of the engine that arrived at the time now.
func (s *stream) feed(p []byte, now time.Time) {
	var effects sse.Effects
	s.now = now
	s.from.answer.out, effects = s.from.answer.Feed(s.from.answer.out, p, now)
	s.from.rank.ObserveRead(&s.from.lastArrival, s.job.req.Endpoint, len(p), s.from.resp.Arrived(), effects.Events > 0, now)
	s.effect(effects)
}

// broke ends the source after its body ended with err, or when no more of the body is read. It decides whether the answer is complete. If
// it is not, broke decides who caused that.
func (s *stream) broke(err error) {
	s.from.answer.out = s.from.answer.CloseEvent(s.from.answer.out) // ends a cut event, so that another event can follow
	whole := errors.Is(err, io.EOF) && s.from.answer.Closed() == sse.Complete
	switch disbelief := s.from.partner.lost(); {
	case s.job.passthrough != nil:
		cutPassed(s, err)
	case s.from.answer.TooMuch():
		s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", err), err)
	case whole:
		if s.from.answer.Filter.LacksUsage() && s.from.answer.Transcript.Head.ID != nil &&
			max(s.from.answer.Filter.Prompt(), s.job.promptTokens) > 0 {
			s.writeEnding(s.from.answer.Transcript.Head, "")
		}
		s.ends()
	case disbelief != nil:
		s.fails(lifecycle.Unusable, disbelief.Answer, errors.New(disbelief.Answer.Code))
	case s.from.tracked.Moved():
		s.fails(lifecycle.Moved, s.job.srv.movedOut(), failure.ErrMoved)
	case errors.Is(err, io.EOF):
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	default:
		s.job.srv.Monitor.Report(s.from.rank.Instance, err)
		why := (&upstream.Call{Kind: lifecycle.Decode}).Broke(err).Reason
		if why == lifecycle.HungUp { // no drain ended the call, and fails checks whether the client did
			why = lifecycle.Broke
		}
		s.fails(why, failure.Stream("upstream_broken", err), err)
	}
}

// cutPassed is broke for a request that is passed through. If no event has come yet, beginsPassed decides what the client gets.
func cutPassed(s *stream, err error) {
	err = cmp.Or(s.from.answer.Err(), err) // the reader's own error comes first: after it, the rest of the body was not read
	begun, over := s.from.answer.Filter.Started(), errors.Is(err, io.EOF)
	switch {
	case over && s.from.answer.Closed() == sse.Complete: // Whole: a [DONE] is not required, because some engines send none
		s.ends()
		return
	case over && s.from.answer.Reader.Buffered() > 0:
		err = errCut
	case over:
		err = errNoData
	}
	answer := openai.NewError(http.StatusBadGateway, "upstream_broken", failure.Transport(failure.Engine, err).Message)
	switch {
	case begun && s.from.tracked.Moved():
		answer = s.job.srv.drained(notAnswered)
	case begun && !s.job.client.Left():
		s.job.srv.Monitor.Report(s.from.rank.Instance, err)
	}
	s.fails(lifecycle.Broke, answer, err)
}

// Why an answer that is passed through is not complete.
var (
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errNoData = errors.New("the engine's stream ended without an event")
)

// notAnswered is the message to a client whose engine was taken out of service before the end of the answer.
const notAnswered = "its engine was taken out of service; send the request again"

// event processes an event that no engine streamed: an answer in one piece in the form of an event, or the end that evenkeel writes itself.
func (s *stream) event(e sse.Event) {
	var effects sse.Effects
	s.from.answer.out, effects = s.from.answer.Event(s.from.answer.out, e)
	s.effect(effects)
}

// effect counts the events that were processed, and ends the source if the last event ended the answer.
func (s *stream) effect(effects sse.Effects) {
	if effects.Events > 0 {
		s.progress(effects.Tokens, effects.Events)
	}
	switch effects.End {
	case sse.Runs:
	case sse.Complete:
		s.ends()
	case sse.Short:
		s.fails(lifecycle.Garbled, failure.Stream("upstream_incomplete", errNotWhole), errNotWhole)
	case sse.Garbled:
		s.fails(lifecycle.Garbled, failure.Stream("upstream_broken", s.from.answer.Err()), s.from.answer.Err())
	case sse.Broken:
		s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", s.from.answer.Err()), s.from.answer.Err())
	case sse.Refused:
		said := s.from.answer.Filter.Failure()
		if s.firstAt.IsZero() && engine.SaysPaused(said.Status, said.Message) { // vLLM begins its stream before its core refuses
			s.job.srv.Monitor.Report(s.from.rank.Instance, engine.ErrPaused)
			s.fails(lifecycle.Paused, failure.Paused(s.from.side(), engine.ErrPaused), engine.ErrPaused)
			return
		}
		s.fails(lifecycle.ByStatus(said.Status), failure.FromStream(said), fmt.Errorf("its event was an error of status %d", said.Status))
	case sse.Preempted:
		if s.firstAt.IsZero() { // the client has nothing yet, so serve begins the answer anew
			s.job.srv.metrics.recomputes.WithLabelValues(lifecycle.Repeated).Inc()
		}
		if s.from.slot != nil { // nil: a prefill engine answers
			s.job.srv.Dispatcher.Preempted(s.from.slot.Worker)
		}
		s.job.srv.Fleet.GaveBack(s.from.rank.Instance)
		answer := openai.NewError(http.StatusBadGateway, "recompute_unresumable",
			"the engine ran out of KV memory and gave the request back; it cannot be resumed")
		s.fails(lifecycle.Preempted, answer, errRefusal)
	}
}

// progress adds tokens that came in a number of events to the slot, to the engine's traffic and to the metrics. The dispatcher's next round
// reads the slot.
func (s *stream) progress(tokens, events int) {
	if s.from.slot != nil { // nil: a prefill engine answers
		if s.from.unstreamed { // a partner also reports this, but perhaps later, when the prefill engine has answered
			s.from.slot.Unheard(s.from.maxTokens)
		}
		s.from.slot.Progress(tokens)
	}
	if s.from.heard {
		s.from.rank.Traffic.OnEvent()
	}
	s.shed()
	if s.firstTokenAt.IsZero() {
		s.firstTokenAt, s.lastTokenAt = s.now, s.now
		events--
	}
	for gap := s.now.Sub(s.lastTokenAt).Seconds(); events > 0; events-- {
		s.job.srv.metrics.itl.Observe(gap)
		gap = 0 // the other events came in the same read
	}
	s.lastTokenAt = s.now
}

// Read returns bytes for the client that have arrived. It waits only if none have.
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

// Pending is how many bytes Read can return without waiting.
func (s *stream) Pending() int { return len(s.unread) + len(s.from.answer.out) }

// Ended says that no engine sends anything more: only the Pending bytes are left.
func (s *stream) Ended() bool { return s.stage >= ended }

// Torn says that the client has only a part of the last event.
func (s *stream) Torn() bool { return s.from.answer.Reader.Torn() }

// Next returns all complete events that have arrived, and waits if there are none. They are valid until the next call. io.EOF means the end
// of the answer, even if the answer is not complete.
func (s *stream) Next() ([]byte, error) {
	// While more bytes have arrived that can go out in the same write, Next goes on.
	for len(s.from.answer.out) == 0 || s.stage == flows && len(s.from.answer.out) < mostAtOnce && s.from.resp.Arrived() {
		if s.stage >= ended {
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	events := s.from.answer.out
	s.from.answer.out = s.from.answer.out[:0]
	return events, nil
}

const mostAtOnce = 64 << 10 // bytes; once this many wait for the client, Next collects no more

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
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

// newStream prepares the call to the rank of the slot, and the stream of its answer. It sends
// nothing yet.
func (j *job) newStream(slot *dispatcher.Slot) *stream {
	s := &stream{job: j, upstream: newDecodeCall(j, slot)}
	filterOptions := s.upstream.filterOptions()
	if !s.upstream.unstreamed {
		j.keepForResume(s.upstream.rank)
	}
	assembler := assemblerForClient(s)
	ends := fleet.FirstEvent
	switch {
	case s.upstream.computesPrompt:
		ends = fleet.Elsewhere
	case s.upstream.unstreamed: // nothing shows before its end that the pull is over
		ends = fleet.Always
	}
	at := roster.Location{Instance: s.upstream.rank.Instance, Rank: s.upstream.rank.Target.Rank}
	s.upstream.tracked = j.srv.Fleet.Track(at, s.upstream.call, ends)
	if recordsAnswer := prepareTranscript(s); recordsAnswer { // as keepForResume has decided
		filterOptions.Transcript = &s.upstream.answer.Transcript
	}
	s.upstream.answer.reset(filterOptions)
	s.upstream.answer.Assembler = assembler // after reset, so that the new answer keeps it
	return s
}

func newDecodeCall(j *job, slot *dispatcher.Slot) upstreamCall {
	rank := j.srv.Engines().Rank(slot.Worker)
	call := upstream.NewCall(j.srv.Client, rank.Profile, rank.Target)
	if j.life.NeedsNewConnections() {
		call.Fresh()
	}
	u := upstreamCall{job: j,
		slot: slot, rank: rank, call: call, began: time.Now(), computesPrompt: slot.NewTokens > 0, maxTokens: j.maxAnswerTokens(rank.Context),
		answer: buffersPool.Get().(*buffers),
	}
	// A lost answer always goes on as a stream.
	passesOnNonStream := j.req.Passthrough || rank.Profile.NonStream == mooncake.NonStreamPassthrough
	u.unstreamed = !j.life.Resumed() && !j.req.Stream && passesOnNonStream
	u.mayHoldTextBack = j.buffersText(rank.Profile)
	return u
}

// assemblerForClient is nil if there is nothing to join, and for an answer that goes on: takeOver
// keeps the assembler of its first part.
func assemblerForClient(s *stream) *sse.Assembler {
	if s.upstream.unstreamed || s.job.req.Stream || s.job.life.Resumed() {
		return nil
	}
	return newAssembler(s.job)
}

// prepareTranscript empties the transcript of the call's answer, and says whether the answer must
// be recorded because another engine may have to continue it.
func prepareTranscript(s *stream) (recordsAnswer bool) {
	j, transcript := s.job, &s.upstream.answer.Transcript
	keepText := mooncake.ByText(j.resume.method)
	transcript.Reset(keepText)
	// An answer in one piece that is lost has given the client nothing.
	if s.upstream.unstreamed || j.resume.retention == lifecycle.KeepNothing {
		return false
	}
	// Early: usually no prefill engine has reported anything before the decode call.
	transcript.KeepPrompt = s.upstream.computesPrompt || s.upstream.rank.Profile.Early()
	return true
}

func (u *upstreamCall) filterOptions() sse.Options {
	options := u.job.filterOptions
	options.TokensPerChunk = u.rank.Traffic.TokensPerChunk()
	// A beam search answers with several texts, each of which may be as long as the context.
	options.MaxTokens, options.Context = u.maxTokens, prompt.ContextLimit(u.rank.Context)*max(1, u.job.req.Beams)
	// Only the engine that computed the prompt knows how many tokens of it were cached: a decode
	// engine takes the KV that it pulled for cached. An SGLang decode engine reports the right count
	// by itself.
	options.Cached = u.job.cachedTokens
	if u.computesPrompt || u.rank.Profile.Connector == mooncake.SGLang {
		options.Cached = sse.OwnCached
	}
	// The engine repeats the name by which evenkeel asks it.
	if u.rank.Profile.Connector == mooncake.SGLang && u.job.model.Adapter != "" {
		options.Model = u.job.model.Name
	}
	if u.unstreamed { // one event, which may have both choices and usage
		options.ContinuousUsage, options.Unstreamed = true, true
	}
	return options
}

// buffersText says whether an engine may send no text before the whole answer is computed. SGLang
// does that for the Responses API if the request has tools: until the end, the text may turn out to
// be a tool call (0.5.23, responses_stream_generator_non_harmony in
// entrypoints/openai/serving_responses.py).
func (j *job) buffersText(profile *mooncake.Profile) bool {
	if profile.Connector != mooncake.SGLang || j.req.Endpoint != mooncake.Responses {
		return false
	}
	tools, _ := j.body.Get("tools")
	// The tools are a list that is not empty.
	return len(tools) > 0 && tools[0] == '[' && len(bytes.TrimSpace(tools[1:len(tools)-1])) > 0
}

func (s *stream) noteFirstEvent() {
	s.firstAt = time.Now()
	// Traffic had counted an estimate of the prompt tokens to compute.
	const computedNothing = false
	s.upstream.correctTokensToCompute(computedNothing)
	if s.upstream.slot != nil { // nil: the whole answer came with this event
		s.upstream.countedRunning = true
		s.upstream.rank.Traffic.Begin()
	}
	j := s.job
	// An answer in one piece does not show when its first token came.
	if !j.life.Resumed() && !s.upstream.unstreamed {
		j.record.Report(journal.Event{Kind: journal.First, At: s.firstAt, Sent: s.upstream.began})
		if j.srv.Peers != nil {
			j.srv.Peers.ObserveLocalTTFT(s.firstAt.Sub(j.record.Arrival))
		}
	}
	s.upstream.tracked.AllowAbort() // for a drain: no KV is pulled any more
	j.enterPhase(journal.Streaming, "")
}

// fill waits for the engine's next bytes, and turns the events into bytes for the client, or lets
// another engine continue a lost answer. It returns an error only before the first data event. A
// later failure becomes the last event for the client.
func (s *stream) fill() error {
	if s.state == lost {
		s.continueAnswer()
		return nil
	}
	// Another limit than at the last read holds.
	if wait := s.upstream.answer.Reader.Wait(time.Now()); wait != s.upstream.idle {
		s.upstream.idle = max(wait, 1) // the time may be over already, and 0 would mean no limit
		s.upstream.resp.SetIdle(s.upstream.idle)
	}
	readBuffer := readPool.Get().(*[4 << 10]byte)
	n, err := s.upstream.resp.Read(readBuffer[:])
	s.feed(readBuffer[:n], time.Now())
	readPool.Put(readBuffer)
	if err == nil {
		err = s.upstream.answer.Err()
	}
	if err == nil || s.state != flowing { // the events before err may have ended the answer, or its call
		return nil //nolint:nilerr // the end of the stream is not part of the answer
	}
	s.bodyEnded(err)
	return errorBeforeFirstEvent(s, err)
}

// errorBeforeFirstEvent returns err unless bodyEnded has handled it.
func errorBeforeFirstEvent(s *stream, err error) error {
	switch fault := s.upstream.fault; {
	case fault == nil: // the answer was whole
		return nil
	case fault.Reason == lifecycle.Unusable: // endError says why
		return nil
	case s.upstream.answer.Filter.Started(): // the client gets the error as an event
		return nil
	}
	return err
}

func (s *stream) feed(p []byte, now time.Time) {
	var effects sse.Effects
	s.readAt = now
	s.upstream.answer.out, effects = s.upstream.answer.Feed(s.upstream.answer.out, p, now)
	s.upstream.rank.ObserveRead(&s.upstream.lastRead, s.job.req.Endpoint, len(p), s.upstream.resp.Arrived(), effects.Events > 0, now)
	s.applyEffects(effects)
}

// bodyEnded decides whether the answer is complete, and if not, who caused that.
func (s *stream) bodyEnded(err error) {
	// This ends a cut event, so that another can follow.
	s.upstream.answer.out = s.upstream.answer.CloseEvent(s.upstream.answer.out)
	whole := errors.Is(err, io.EOF) && s.upstream.answer.Closed() == sse.Complete
	// In this order: an answer that is too large, or whole, is so whatever else has happened. Then
	// come the reasons for which this proxy has ended the call. In the last two cases, the engine is
	// at fault, unless the client has left.
	switch kvFault := s.upstream.prefillCall.pairFault(); {
	case s.job.passthrough != nil:
		passthroughBodyEnded(s, err)
	case s.upstream.answer.TooMuch(): // a limit of its size
		s.endFailed(lifecycle.Unusable, failure.StreamBroke("upstream_broken", err), err)
	case whole:
		writeLackingUsage(s)
		s.endWhole()
	case kvFault != nil: // the prefill call has ended this call
		s.endFailed(lifecycle.Unusable, kvFault.ClientError, errors.New(kvFault.ClientError.Code))
	case s.upstream.endedByDrain():
		s.endFailed(lifecycle.Moved, s.job.srv.movedOutError(), failure.ErrMoved)
	// Only a break (below) also goes to the monitor, which then checks whether the engine can be
	// reached.
	case errors.Is(err, io.EOF):
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_incomplete", errNotWhole), errNotWhole)
	default: // broken, or silent for too long
		s.job.srv.Monitor.ReportFailure(s.upstream.rank.Instance, err)
		s.endFailed(reasonOfBreak(err), failure.StreamBroke("upstream_broken", err), err)
	}
}

// reasonOfBreak: neither a drain nor the prefill call has ended the call.
func reasonOfBreak(err error) lifecycle.Reason {
	why := (&upstream.Call{Kind: lifecycle.Decode}).FaultOf(err).Reason
	if why == lifecycle.HungUp { // it would say that the engine is not at fault
		return lifecycle.Broke
	}
	return why
}

// writeLackingUsage writes the usage at the end of a whole answer, if the engine left it out
// although the client asked for it.
func writeLackingUsage(s *stream) {
	head := s.upstream.answer.Transcript.Head
	promptCounted := max(s.upstream.answer.Filter.Prompt(), s.job.promptTokens) > 0
	if s.upstream.answer.Filter.LacksUsage() && head.ID != nil && promptCounted {
		const finishSent = ""
		s.writeEnding(head, finishSent)
	}
}

// passthroughBodyEnded: from its first event on, such an answer is complete wherever its body ends,
// except within an event. A failure before is reported by callPassthrough.
func passthroughBodyEnded(s *stream, err error) {
	// After the reader's own error, the rest of the body was not read.
	err = cmp.Or(s.upstream.answer.Err(), err)
	bodyComplete := errors.Is(err, io.EOF)
	switch {
	case bodyComplete && s.upstream.answer.Closed() == sse.Complete:
		s.endWhole()
		return
	case bodyComplete && s.upstream.answer.Reader.Buffered() > 0: // a part of an event
		err = errCut
	case bodyComplete:
		err = errNoData
	}
	begun := s.upstream.answer.Filter.Started()
	answer := openai.NewError(http.StatusBadGateway, "upstream_broken", failure.NoAnswer(failure.Engine, err).Message)
	switch {
	case begun && s.upstream.endedByDrain():
		answer = s.job.srv.drainedError(drainedMessage)
	case begun && !s.job.client.Left(): // if the client has left, this may be why the body ended
		s.job.srv.Monitor.ReportFailure(s.upstream.rank.Instance, err)
	}
	s.endFailed(lifecycle.Broke, answer, err)
}

// Why an answer that is passed through is not complete.
var (
	errCut    = errors.New("the engine's stream ended in the middle of an event")
	errNoData = errors.New("the engine's stream ended without an event")
)

const drainedMessage = "its engine was taken out of service or paused; send the request again"

// processEvent processes an event that no engine streamed: an answer in one piece, or the end that
// evenkeel writes.
func (s *stream) processEvent(e sse.Event) {
	var effects sse.Effects
	s.upstream.answer.out, effects = s.upstream.answer.Event(s.upstream.answer.out, e)
	s.applyEffects(effects)
}

// applyEffects counts events, and ends the call with the last one. Garbled: another engine may give
// a good answer. Unusable: every engine would give such an answer.
func (s *stream) applyEffects(effects sse.Effects) {
	if effects.Events > 0 {
		s.countProgress(effects.Tokens, effects.Events)
	}
	switch effects.End {
	case sse.NotEnded:
	case sse.Complete:
		s.endWhole()
	case sse.Short: // the [DONE] came too early
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_incomplete", errNotWhole), errNotWhole)
	case sse.Garbled: // an event cannot be read
		s.endFailed(lifecycle.Garbled, failure.StreamBroke("upstream_broken", s.upstream.answer.Err()), s.upstream.answer.Err())
	case sse.Broken: // a limit, or events that cannot be joined
		s.endFailed(lifecycle.Unusable, failure.StreamBroke("upstream_broken", s.upstream.answer.Err()), s.upstream.answer.Err())
	case sse.Refused:
		endRefused(s)
	case sse.Aborted: // the engine was told to end the answer, or ends itself
		endAborted(s)
	case sse.Preempted:
		endPreempted(s)
	}
}

// endAborted: the engine has ended the answer with finish_reason abort. If another program asked
// for that, the answer is whole. Otherwise the engine has failed, or evenkeel asked because the
// prefill beside it failed.
func endAborted(s *stream) {
	u := &s.upstream
	mayBeWhole := u.tracked != nil && u.prefillCall.pairFault() == nil // tracked is nil for a prefill engine
	at := roster.Location{Instance: u.rank.Instance, Rank: u.rank.Target.Rank}
	// The client may have ended the request meanwhile.
	if named := s.job.namedAbort; mayBeWhole && (named.endedAtEngine(s.job.srv, at) || named.endedByClient()) {
		var effects sse.Effects
		s.readAt = time.Now()
		u.answer.out, effects = u.answer.AcceptAbort(u.answer.out)
		s.applyEffects(effects)
		return
	}
	endRefused(s)
}

func endRefused(s *stream) {
	reported := s.upstream.answer.Filter.Failure()
	// vLLM begins its stream before its core refuses.
	if s.firstAt.IsZero() && engine.SaysPaused(reported.Status, reported.Message) {
		s.job.srv.Monitor.ReportFailure(s.upstream.rank.Instance, engine.ErrPaused)
		s.endFailed(lifecycle.Paused, failure.PausedError(s.upstream.sideName(), engine.ErrPaused), engine.ErrPaused)
		return
	}
	err := fmt.Errorf("its event was an error of status %d", reported.Status)
	s.endFailed(lifecycle.ReasonOfStatus(reported.Status), failure.FromStream(reported), err)
}

// endPreempted: the fleet learns that the engine gives requests back, which its profile may deny.
func endPreempted(s *stream) {
	if s.firstAt.IsZero() { // serve begins the answer anew; a later loss is counted by continueAnswer
		s.job.srv.metrics.recomputes.WithLabelValues(lifecycle.Repeated).Inc()
	}
	if s.upstream.slot != nil { // nil: a prefill engine answers
		s.job.srv.Dispatcher.Preempted(s.upstream.slot.Worker)
	}
	s.job.srv.Fleet.GaveBack(s.upstream.rank.Instance)
	answer := openai.NewError(http.StatusBadGateway, "recompute_unresumable",
		"the engine ran out of KV memory and gave the request back; it cannot be resumed")
	s.endFailed(lifecycle.Preempted, answer, errRefusal)
}

// countProgress: tokens is how many tokens the engine has generated so far. The dispatcher's next
// round reads them from the slot.
func (s *stream) countProgress(tokens, events int) {
	if s.upstream.slot != nil { // nil: a prefill engine answers, or it is passed through
		// All tokens of an answer in one piece come at once, which must not be taken for a decode step.
		// The slot may not be marked yet beside a prefill.
		if s.upstream.unstreamed {
			s.upstream.slot.MarkNonStreaming(s.upstream.maxTokens)
		}
		s.upstream.slot.Progress(tokens)
	}
	if s.upstream.countedRunning { // only from noteFirstEvent on
		s.upstream.rank.Traffic.OnEvent()
	}
	s.dropRequestBody() // some bodies are needed only until the first token
	observeGaps(s, events)
}

func observeGaps(s *stream, events int) {
	if s.firstTokenAt.IsZero() {
		s.firstTokenAt, s.lastTokenAt = s.readAt, s.readAt
		events-- // no gap comes before the first event
	}
	for gap := s.readAt.Sub(s.lastTokenAt).Seconds(); events > 0; events-- {
		s.job.srv.metrics.itl.Observe(gap)
		gap = 0 // the other events came in the same read
	}
	s.lastTokenAt = s.readAt
}

// Read waits only if no bytes have arrived.
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
func (s *stream) Pending() int { return len(s.unread) + len(s.upstream.answer.out) }

// Ended says that only the Pending bytes are left.
func (s *stream) Ended() bool { return s.state >= ended }

// Torn says that the client has only a part of the last event.
func (s *stream) Torn() bool { return s.upstream.answer.Reader.Torn() }

// Next returns all complete events that have arrived, and waits if there are none. They are valid
// until the next call. io.EOF means the end, even if the answer is not complete.
func (s *stream) Next() ([]byte, error) {
	// It goes on while more bytes can go out in the same write.
	for len(s.upstream.answer.out) == 0 || s.state == flowing && len(s.upstream.answer.out) < maxBatchBytes && s.upstream.resp.Arrived() {
		if s.state >= ended {
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	events := s.upstream.answer.out
	s.upstream.answer.out = s.upstream.answer.out[:0]
	return events, nil
}

const maxBatchBytes = 64 << 10 // bytes

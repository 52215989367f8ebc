package request

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// decode sends the request to the rank: with the hand-off h, or without one (nil), in which case the rank also computes the prompt. It
// returns when the first data event has arrived, because then the engine has the KV and the client can get a status line. until limits the
// wait for this event. quit says that the client's departure has ended the call, so that no engine uses the slot any more.
func (s *stream) decode(h *handoff.Handoff, until lifecycle.Timeout) (_ *failure.Fault, quit bool) {
	j, slot, phase := s.job, s.upstream.slot, journal.Transfer
	if h == nil { // the rank computes the prompt itself
		phase = journal.Prefill
	}
	j.enterPhase(phase, "decode")
	s.upstream.announceCompute()
	if fault := s.open(h, until); fault != nil {
		mayHaveRequest := fault.Verdict().KV == lifecycle.MaybeRunning
		if mayHaveRequest && s.noteIfOverdue(h) { // the prefill engine may have freed the KV, for which the decode engine may still wait
			s.upstream.blocksLeaked = handoff.LeaksBlocks(s.upstream.rank, fault)
		}
		// A client that leaves ends only calls without a hand-off and calls for an answer in one piece. Any other call stays open
		// until its first event (see open).
		endsWithClient := h == nil || s.upstream.unstreamed
		return fault, endsWithClient && j.client.Left()
	}
	slot.ReportStarted()
	j.noteKVArrived(h, s)
	s.noteFirstEvent()
	return nil, false
}

// decodeDuringPrefill does what decode does, for a request whose prefill runs at the same time. No engine was sent the prompt of the lease
// yet. The prefill call and the decode call are a pair, and the end of one ends the other. pair is their number in the request's lifecycle.
// until limits the wait for the decode engine's callback, if the engine calls back. quit says that the client has left. In this case
// decodeDuringPrefill has waited a limited time for the end of the prefill call, and has noted whether the rank may keep KV blocks for ever
// (blocksLeaked).
func (s *stream) decodeDuringPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) (fault *failure.Fault, quit bool) {
	j, slot := s.job, s.upstream.slot
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "decode", Early: true})
	s.upstream.announceCompute()
	if fault = s.upstream.beginPrefill(lease, pair, until); fault != nil {
		return fault, false
	}
	j.client.OnGone(s.upstream.prefillCall.clientLeft)
	if fault = s.openDuringPrefill(); fault != nil {
		s.upstream.takePrefillAnswer()
		// After NotOurs, nothing was sent to the rank, so it has no KV blocks for the request. Otherwise the prefill call may still write to
		// the rank's blocks although the client has left, so awaitEndOrLeak waits for its end, for a limited time.
		rankMayHaveBlocks := fault.Reason != lifecycle.NotOurs
		if quit = rankMayHaveBlocks && j.client.Left(); quit {
			s.upstream.blocksLeaked = s.upstream.prefillCall.awaitEndOrLeak() || s.upstream.blocksLeaked
		}
		return fault, quit
	}
	slot.ReportStarted()
	j.noteKVArrived(nil, s)
	j.record.Report(journal.Event{Kind: journal.Coupled, Took: s.upstream.takePrefillAnswer(), Slot: slot})
	s.noteFirstEvent()
	if s.upstream.slot == nil { // the whole answer came with its first event, so the slot is released already
		const abandoned = false
		s.upstream.prefillCall.answerEnded(abandoned)
	}
	return nil, false
}

// open sends the decode request and reads up to the first data event. h is the hand-off; nil: the rank computes the prompt itself. until
// limits the wait for the event. With a hand-off, the connection stays open until the first event even if the client leaves: if it were cut
// while the decode engine pulls the KV, both engines would leak KV blocks.
func (s *stream) open(h *handoff.Handoff, until lifecycle.Timeout) *failure.Fault {
	j := s.job
	s.upstream.pull = h.AwaitFirstEvent(s.upstream.rank, s.upstream.began, s.upstream.unstreamed)
	defer s.upstream.pull.End()
	var kv json.RawMessage
	if h == nil {
		j.client.OnGone(func() { s.upstream.call.Disconnect(upstream.NoticeTimeout) }) // without a hand-off, no pull of KV can be cut
	} else {
		var fault *failure.Fault
		if kv, fault = s.upstream.takeHandoff(h); fault != nil {
			return fault
		}
	}
	profile := s.upstream.rank.Profile
	if profile.HandBack == mooncake.HandBackFetched { // keepTurn needs it: only this process of the engine will have the KV of the answer
		j.decodeProcess = j.srv.Engines().ProcessAt(s.upstream.rank.Instance).Process
	}
	silence, pullOver, stop := limitWait(s, h, until)
	defer stop()
	id := j.callID("d", j.record.Attempts)
	changes := j.changes
	if profile.Connector == mooncake.SGLang && j.req.Endpoint == mooncake.Generate { // aborts find the request by the id in its body
		withRID := *j.changes
		withRID.RID = id
		changes = &withRID
	}
	salt := s.upstream.pull.Salt() // keeps the engine from using wrong KV of its prefix cache; empty: no KV there is known to be wrong
	body := profile.DecodeBody(&j.body, j.req.Endpoint, changes, kv, salt, !s.upstream.unstreamed, nil)
	if fault := correctIfStuck(s, s.upstream.sendDecode(h.SetRequestID(engine.JSONHeaders(id)), body, silence)); fault != nil {
		if fault.BlamedEngine != "" {
			j.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
		}
		leftWhileComputing := s.upstream.unstreamed && fault.Reason == lifecycle.HungUp && fault.Progress != lifecycle.Unsent
		if leftWhileComputing && !time.Now().Before(pullOver) { // the pull of KV was over, so only the answer is lost
			fault.Progress = lifecycle.Through
		}
		return fault
	}
	if err := s.readFirst(s.upstream.began.Add(silence)); err != nil {
		return correctIfStuck(s, s.decodeFault(err))
	}
	if s.noteIfLate(h) {
		return lateKVFault()
	}
	// The engine has begun. If it was to continue an answer, its count of prompt tokens shows whether it ignored the answer so far.
	return ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, s.upstream.answer.Filter.Prompt()))
}

// limitWait limits how long the rank may take for the first event, or for an answer in one piece. h is the hand-off (nil: the rank computes
// the prompt itself), and until names the limit. The caller must end the call if the engine sends nothing for as long as silence. silence
// is handoff.Forever if a watch that limitWait has started limits the wait instead. The caller calls stop to end this watch. pullOver is
// when the pull of the hand-off's KV is certainly over.
func limitWait(s *stream, h *handoff.Handoff, until lifecycle.Timeout) (silence time.Duration, pullOver time.Time, stop func()) {
	j, profile, unstreamed := s.job, s.upstream.rank.Profile, s.upstream.unstreamed
	if unstreamed { // the pull of KV is over when a stream's first event would come; from then on, LimitOnePiece bounds the call
		until = lifecycle.ByFirstEvent
	}
	silence = timeoutOf(until, j.srv.Settings(), profile)
	switch { // how long the prefill engine keeps the KV
	case h != nil && profile.Renews(): // as long as heartbeats of the decode engine renew its hold
		h.Lease.Renewed()
		h.NoteExpiries(j.srv.Monitor)
		if !unstreamed { // an answer in one piece has no first event, so it does not show when its pull of KV was over
			s.upstream.pull.OnExpiry(s.upstream.call.Expire) // ends the wait when the KV may be gone
		}
	case h != nil: // the prefill engine frees the KV at a fixed time, and a later first event would prove nothing
		silence = min(silence, h.FirstEventBy().Sub(s.upstream.began))
	}
	pullOver = s.upstream.began.Add(silence)
	switch { // what limits the wait
	case unstreamed: // nothing arrives before all of the answer is computed
		ignoreClient := func() {}
		if h != nil { // the pull of KV must not be cut, so the call outlives its client until the pull is over for certain
			ignoreClient = endAfterClientLeft(j.client, s.upstream.call, 0, pullOver)
		}
		stopLimit := handoff.LimitOnePiece(s.upstream.rank, s.upstream.call, j.srv.Settings(), s.upstream.maxTokens)
		return handoff.Forever, pullOver, func() { stopLimit(); ignoreClient() }
	// A request beyond the rank's slots waits in the engine's own queue, so its time limit starts only once it has a slot. This is safe
	// only if the hold on the KV is renewed meanwhile. Otherwise the KV must be pulled in time, even if the request waits in that queue.
	case s.upstream.slot.InEngineQueue && h != nil && profile.Renews():
		return handoff.Forever, pullOver, handoff.LimitFromSlot(s.upstream.slot, s.upstream.call, silence)
	case h == nil && profile.Aggregated(): // a core that stands still may be found before silence is over
		return silence, pullOver, watchCore(s)
	}
	return silence, pullOver, func() {}
}

// takeHandoff returns the kv_transfer_params of a hand-off, by which the decode engine fetches the KV. It fails if the engine process that
// made the KV is gone (Outlived) or may be gone (MayOutlive), and after the hand-off's deadline. Another attempt then prefills the prompt
// again.
func (u *upstreamCall) takeHandoff(h *handoff.Handoff) (json.RawMessage, *failure.Fault) {
	if gone, sure := u.job.srv.Engines().ProcessGone(h.Maker); gone {
		why := lifecycle.MayOutlive
		if sure { // the KV is certainly gone, so it does not count as held by the engine any longer
			why = lifecycle.Outlived
		}
		return nil, failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: why},
			failure.BadGateway("prefill", "it is gone, and the prefilled prompt with it"), handoff.ErrOutlived)
	}
	kv, err := h.TakeParams(u.began)
	if err != nil {
		return nil, failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Expired},
			failure.BadGateway("decode", "its turn came after the hand-off's deadline"), err)
	}
	h.Lease.Dispatched()
	return kv, nil
}

// sendDecode sends the decode request. silence is how long the engine may send nothing. It is handoff.Forever if other code limits the
// wait.
func (u *upstreamCall) sendDecode(headers []engine.Header, body [][]byte, silence time.Duration) (fault *failure.Fault) {
	j := u.job
	if u.slot.InEngineQueue {
		u.countedWithoutSlot = true
		u.rank.Traffic.AddSentWithoutSlot(1) // so that the alarm about ranks with too many requests expects one more
	}
	// If a prefill runs beside the decode call, MarkNonStreaming is called when that prefill has ended.
	if noEarlyEvents := u.unstreamed || u.noEarlyText; noEarlyEvents && u.prefillCall == nil {
		u.slot.MarkNonStreaming(u.maxTokens)
	}
	call := upstream.Call{
		Call: u.call, Kind: lifecycle.Decode, Engine: u.rank.Instance, Scope: u.rank.Scope, Path: j.req.Endpoint.Path(),
		InEngineQueue: u.slot.InEngineQueue, Aggregated: u.alsoPrefills(),
		Limits: engine.Deadlines{Connect: j.srv.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: j.srv.Log,
	}
	j.byName.noteSent(u.rank, headers)
	if u.resp, fault = call.Open(j.record.WithTraceHeaders(headers), body); fault != nil && fault.Status != 0 {
		fault.Frees = j.srv.Engines().RejectionFrees(u.rank) // whether such a refusal also makes the prefill engine free the KV
	}
	return fault
}

// lateKVFault returns the fault of a decode call that began too late: by then, the KV that it read may have been another prompt's.
func lateKVFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Through, Reason: lifecycle.MaybeWrongKV}
	return failure.NewFault(end, failure.LateKV, handoff.ErrLate)
}

// openDuringPrefill sends the decode call of a request whose prefill call runs at the same time, and reads up to the first data event. The
// prefill call limits the wait for this event, because its length depends on the prefill.
func (s *stream) openDuringPrefill() *failure.Fault {
	j, profile, prefillCall := s.job, s.upstream.rank.Profile, s.upstream.prefillCall
	var none *handoff.Handoff // a nil hand-off sets no limit for the time until the KV is read
	s.upstream.pull = none.AwaitFirstEvent(s.upstream.rank, s.upstream.began, s.upstream.unstreamed)
	defer s.upstream.pull.End()
	salt := s.upstream.pull.Salt() // keeps the engine from using wrong KV of its prefix cache; empty: no KV there is known to be wrong
	body := profile.EarlyDecode(&j.body, j.changes, prefillCall.rendezvous, salt, !s.upstream.unstreamed, nil)
	if fault := s.upstream.sendDecode(upstream.PairHeaders(prefillCall.id, j.req.Endpoint, profile), body, handoff.Forever); fault != nil {
		reason := lifecycle.Died // the engine may have the request
		switch {
		case fault.Status != 0 && fault.Verdict().Next == lifecycle.Over: // the request is at fault, so every engine would refuse it
			reason = lifecycle.Declined
		case fault.Status != 0 || fault.Reason == lifecycle.NotOurs || fault.Reason == lifecycle.Unreachable:
			reason = lifecycle.Refused
		}
		return s.upstream.failDuringPrefill(reason, fault)
	}
	if err := s.readFirstDuringPrefill(); err != nil {
		fault := s.decodeFault(err)
		reason := lifecycle.Died
		next := fault.Verdict().Next
		handedBack := next == lifecycle.Over || next == lifecycle.NoRoom // refused for good, or given back for want of KV memory
		if s.endError != nil && handedBack {                             // an event reported this, and the engine itself has ended the call
			reason = lifecycle.Declined
		}
		return s.upstream.failDuringPrefill(reason, fault)
	}
	if s.noteIfLate(none) {
		return s.upstream.failDuringPrefill(lifecycle.Died, lateKVFault())
	}
	counted := s.upstream.answer.Filter.Prompt()
	fault := prefillCall.firstEventCame(counted)
	if s.state == ended { // the whole answer came at once, so its KV is also checked as at the end of an answer
		fault = prefillCall.confirmKV(counted, j.client.Gone())
	}
	if fault != nil {
		return s.upstream.failDuringPrefill(lifecycle.Died, fault)
	}
	if fault = ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, counted)); fault != nil {
		// The engine began an answer anew that it should have continued. It has the KV and has not failed, so the prefill call only
		// learns that the decode call is over.
		const abandoned = false
		prefillCall.answerEnded(abandoned)
	}
	return fault
}

// readFirstDuringPrefill reads up to the first event of a decode call. With SGLang it reads on until the engine has reported how many
// tokens the prompt has, because the first event may lack this count. A difference from the prefill engine's count shows that the transfer
// of KV was aborted. It stops at the first event with tokens, which must not wait for the count.
func (s *stream) readFirstDuringPrefill() error {
	err := s.readFirst(time.Now().Add(handoff.Forever))
	isSGLang := s.upstream.rank.Profile.Connector == mooncake.SGLang
	for err == nil && isSGLang && s.state == flowing {
		countCame, tokensCame := s.upstream.answer.Filter.Prompt() != 0, !s.firstTokenAt.IsZero()
		if countCame || tokensCame {
			break
		}
		err = s.fill()
	}
	if err == nil && s.endError != nil { // a later event than the first one reported a failure
		err = errRefusal
	}
	return err
}

// failDuringPrefill tells the prefill call that the decode call has ended before its first event, in the way that reason names. It returns
// why the decode call ended: its own fault, or the fault of the prefill call that ended it. It reports the decode engine to the monitor if
// that engine is at fault, and notes whether the engine may keep KV blocks for ever (blocksLeaked), because KV for which it waits never
// comes.
func (u *upstreamCall) failDuringPrefill(reason lifecycle.DecodeFailure, fault *failure.Fault) *failure.Fault {
	j := u.job
	cause, blocksLeaked := u.prefillCall.decodeFailed(reason)
	u.blocksLeaked = blocksLeaked
	if cause == nil { // the decode call ended by itself
		// Open blames an engine for its status only if this says that the engine is paused, or that it does not have the model.
		saysState := fault.Status != 0 && fault.BlamedEngine != ""
		if fault.Err != nil && (reason == lifecycle.Died || saysState || fault.Reason == lifecycle.Unreachable) {
			j.srv.Monitor.ReportFailure(u.rank.Instance, fault.Err)
		}
		return fault
	}
	if errors.Is(cause.Err, errLateFirstEvent) { // the decode engine may have read another prompt's KV
		u.pull.MarkLost()
		j.srv.metrics.latePulls.Inc()
	}
	copied := *cause // the caller changes its fault, and the prefill call keeps cause
	return &copied
}

// takePrefillAnswer copies the prefill engine's answer, if it has come, into the request and its record. It returns how long the decode
// engine took to call back; 0: it has not called back.
func (u *upstreamCall) takePrefillAnswer() (calledBackAfter time.Duration) {
	j, p := u.job, u.prefillCall
	j.mu.Lock()
	answered, probed, took, prefiller := p.pairState().PrefillAnswered(), p.probed, p.prefillTook, p.lastLease.Candidate.ID
	calledBackAfter = p.calledBackAfter
	j.mu.Unlock()
	if !answered {
		return calledBackAfter
	}
	j.record.Report(journal.Event{Kind: journal.Probed, Took: took})
	j.record.Prefill = prefiller
	notePrefilled(j, &probed, u.rank.Profile)
	// An SGLang decode engine reports its cached tokens itself. For a resumed request, the filter has the count of the first prefill
	// already; the count of this one also includes the answer so far.
	if !j.life.Resumed() && u.rank.Profile.Connector != mooncake.SGLang {
		u.answer.Filter.SetCached(j.cachedTokens)
	}
	return calledBackAfter
}

// beginPrefill starts the prefill call of an attempt on a goroutine of its own. The call is sent at once, or after the decode engine's
// callback. pair is the number of the attempt's two calls in the request's lifecycle, and until limits the wait for the callback. If a
// fault is returned, nothing was sent.
func (u *upstreamCall) beginPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) *failure.Fault {
	j, candidate := u.job, lease.Candidate
	p := &concurrentPrefill{
		job: j, pairNumber: pair, waitLimit: until, id: pairRequestID(j.id, j.record.Attempts),
		traits: lifecycle.Traits[candidate.Profile.Connector], decodeCall: u.call, rank: u.rank, slot: u.slot, body: j.body, changes: j.changes,
		promptEstimate: j.estimatedTokens(), maxTokens: u.maxTokens, noEarlyEvents: u.unstreamed || u.noEarlyText, streamed: !u.unstreamed,
		lease: lease, lastLease: lease, decodeOver: make(chan struct{}), prefillOver: make(chan struct{}), tried: []string{candidate.ID},
	}
	p.headers = j.record.WithTraceHeaders(upstream.PairHeaders(p.id, j.req.Endpoint, candidate.Profile))
	u.prefillCall = p
	begun := false // p.run has been started, and reports the end of the prefill itself
	defer onPanic(func() {
		if !begun {
			p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil)
		}
	})
	fault := p.prepareRendezvous()
	if fault == nil {
		lease.DetachOwner() // the prefill may outlive the request, so p gives the lease back, and not the request
		err := j.srv.prefillCalls.Run(anyNumber, p.run)
		if begun = err == nil; !begun {
			fault = failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Leaving}, failure.Leaving, err)
		}
	}
	if fault != nil {
		p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil)
		u.prefillCall = nil
	}
	return fault
}

// anyNumber is the limit for Background.Run if any number of functions may run at once.
const anyNumber = math.MaxInt

// pairRequestID is the X-Request-Id of both calls of an attempt. No id may be the beginning of another id, because SGLang ends every
// request whose id begins with the one that it is told to abort. The letter at the end ensures this for the attempts 1 and 10.
func pairRequestID(request string, attempt int) string {
	return "ek-" + request + "-" + strconv.Itoa(attempt) + "b"
}

// prepareRendezvous decides how the two engines find each other: by a callback of the decode engine (CallsBack), or by the address that the
// prefill engine has reported (Keeps). For SGLang, NewRendezvous has set all that the engines need. prepareRendezvous fails if the proxy
// does not listen for callbacks yet, or if the address is not known yet.
func (p *concurrentPrefill) prepareRendezvous() *failure.Fault {
	srv, candidate, rank, longest := p.job.srv, p.lease.Candidate, p.rank, p.rank.Context
	engines := srv.Engines()
	p.rendezvous = upstream.NewRendezvous(p.id, p.job.req.Endpoint, candidate.Profile, candidate.Target, engines.Ranks(candidate.Instance),
		rank.Profile, rank.Target)
	switch {
	case p.traits.CallsBack && srv.Callbacks == nil:
		return failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Unready},
			failure.BadGateway("decode", errNoListener.Error()), errNoListener)
	case p.traits.CallsBack:
		known := engines.HostsOf(rank.Instance)
		p.callback = srv.Callbacks.Expect(metaserver.Wanted{Rank: rank.Target.ID, Limit: mooncake.MaxCallback(longest, minBlockTokens),
			Read: func(body []byte) (mooncake.Callback, error) {
				return rank.Profile.ReadCallback(body, p.rendezvous.RequestID, longest, minBlockTokens, known)
			}})
		p.rendezvous.Metaserver = p.callback.URL
	case p.traits.Keeps:
		if p.rendezvous.Coordinates = srv.Fleet.Coordinates(candidate); p.rendezvous.Coordinates == nil {
			// The address was known when the attempt began (bindOrder). Another attempt follows, so the client hardly ever gets
			// this error.
			return failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Unlearned}, failure.Leaving, errAddressUnknown)
		}
	}
	return nil
}

// minBlockTokens is the smallest number of tokens that a KV block of any engine can hold. It bounds how many blocks a prompt can have.
const minBlockTokens = 1

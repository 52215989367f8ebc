package request

import (
	"encoding/json"
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
// wait for this event. A nil fault means that the event has come. clientQuit says that the call ended because the client left, so that no
// engine uses the slot any more.
func (s *stream) decode(h *handoff.Handoff, until lifecycle.Timeout) (_ *failure.Fault, clientQuit bool) {
	j, slot, phase := s.job, s.upstream.slot, journal.Transfer
	if h == nil { // the rank computes the prompt itself
		phase = journal.Prefill
	} else {
		s.upstream.prefiller = h.Lease.Candidate.Instance
	}
	j.enterPhase(phase, "decode")
	s.upstream.announceTokensToCompute()
	if fault := s.open(h, until); fault != nil {
		noteIfBlocksLeak(s, h, fault)
		// A client that leaves ends only a call without a hand-off, and a call for an answer in one piece once its pull of KV is
		// over (limitOnePiece). Any other call stays open until its first event (see open).
		mayEndWithClient := h == nil || s.upstream.unstreamed
		return fault, mayEndWithClient && j.client.Left()
	}
	slot.ReportStarted()
	j.noteKVArrived(h, s)
	s.noteFirstEvent()
	return nil, false
}

// noteIfBlocksLeak notes whether the decode engine of a call that failed may keep KV blocks for ever: the prefill engine may have freed the
// KV by now, while the decode engine still waits for it. When the slot is released, the dispatcher counts such blocks as taken.
func noteIfBlocksLeak(s *stream, h *handoff.Handoff, fault *failure.Fault) {
	engineMayWait := fault.Verdict().KV == lifecycle.MaybeRunning
	if !engineMayWait || h == nil || time.Now().Before(h.FirstEventBy()) {
		return
	}
	s.upstream.blocksMayLeak = handoff.LeaksBlocks(s.upstream.rank, fault)
	if !s.upstream.unstreamed { // an answer in one piece may take longer than the hold
		s.upstream.countLateAnswer()
	}
}

// decodeDuringPrefill does what decode does, for a request whose prefill runs at the same time. No engine was sent the prompt of the lease
// yet. The prefill call and the decode call are a pair, and the end of one ends the other. pair is their number in the request's lifecycle.
// until limits the wait for the decode engine's callback, if the engine calls back. clientQuit says that the client has left, and that no
// engine uses the slot any more: the rank's blocks for the request are not written to, or the dispatcher counts them as lost
// (awaitPrefillIfClientLeft).
func (s *stream) decodeDuringPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) (fault *failure.Fault, clientQuit bool) {
	j, slot := s.job, s.upstream.slot
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "decode", Early: true})
	s.upstream.announceTokensToCompute()
	if fault = s.upstream.beginPrefill(lease, pair, until); fault != nil {
		return fault, false
	}
	j.client.OnGone(s.upstream.prefillCall.clientLeft) // from now on, the lifecycle learns at once if the client leaves
	fault = s.openDuringPrefill()
	s.upstream.prefiller = s.upstream.prefillCall.prefillEngine().Instance // it may have changed during the call
	if fault != nil {
		s.upstream.copyPrefillAnswer() // also after a failure, the request and its record get what the prefill engine has reported
		return fault, s.upstream.awaitPrefillIfClientLeft(fault)
	}
	slot.ReportStarted()
	var noHandoff *handoff.Handoff
	j.noteKVArrived(noHandoff, s)
	calledBackAfter := s.upstream.copyPrefillAnswer()
	j.record.Report(journal.Event{Kind: journal.Coupled, Took: calledBackAfter, Slot: slot})
	s.noteFirstEvent()
	if s.upstream.slot == nil { // the whole answer came with its first event, so the slot is released already
		s.upstream.prefillCall.answerEnded(abortedEmpty(s))
	}
	return nil, false
}

// awaitPrefillIfClientLeft is called when a decode call has failed beside its prefill call. If the client has left, the prefill call may
// still write to the rank's KV blocks. So it waits a limited time for the end of that call, and otherwise notes that the blocks may leak.
// It returns whether the client has left. After NotOurs it does nothing and returns false, because nothing was sent to the rank.
func (u *upstreamCall) awaitPrefillIfClientLeft(fault *failure.Fault) (clientQuit bool) {
	rankMayHaveBlocks := fault.Reason != lifecycle.NotOurs
	if clientQuit = rankMayHaveBlocks && u.job.client.Left(); clientQuit {
		u.blocksMayLeak = u.prefillCall.awaitEndOrLeak() || u.blocksMayLeak
	}
	return clientQuit
}

// open sends the decode request and reads up to the first data event. h is the hand-off; nil: the rank computes the prompt itself. until
// limits the wait for the event. With a hand-off, the connection stays open until the first event even if the client leaves: if it were cut
// while the decode engine pulls the KV, both engines would leak KV blocks.
func (s *stream) open(h *handoff.Handoff, until lifecycle.Timeout) *failure.Fault {
	j := s.job
	s.upstream.pull = h.AwaitFirstEvent(s.upstream.rank, j.req.Endpoint, s.upstream.began, s.upstream.unstreamed)
	pullIsOver := false
	defer func() { s.upstream.pull.End(time.Now(), pullIsOver) }()
	kv, fault := s.upstream.takeKV(h)
	if fault != nil {
		pullIsOver = true
		return fault
	}
	maxSilence, pullEndsBy, stop := limitWait(s, h, until)
	defer stop()
	id := j.callID(idOfDecode, j.record.Attempts)
	body := s.upstream.decodeBody(kv, id)
	fault = s.upstream.sendDecode(h.SetRequestID(engine.JSONHeaders(id)), body, maxSilence)
	if fault = correctIfStuck(s, fault); fault != nil { // Stuck, if limitWait has let watchCore end the call
		pullIsOver = !handoff.MayPullLater(fault)
		s.upstream.noteSendFailed(fault, pullEndsBy)
		return fault
	}
	firstEventBy := s.upstream.began.Add(maxSilence)
	if err := s.readFirst(firstEventBy); err != nil {
		fault = correctIfStuck(s, s.decodeFault(err))
		pullIsOver = !handoff.MayPullLater(fault)
		return fault
	}
	pullIsOver = true
	if s.withholdIfAnothers(h) { // the client must not get an answer that may be made of wrong KV
		return lateKVFault()
	}
	// The engine has begun. If it was to continue an answer, its count of prompt tokens shows whether it ignored the answer so far.
	return ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, s.upstream.answer.Filter.Prompt()))
}

// takeKV takes what the decode engine needs to fetch the KV of the hand-off h. Without a hand-off (nil) it returns nil, and the call ends
// from now on if the client leaves, because no pull of KV can be cut.
func (u *upstreamCall) takeKV(h *handoff.Handoff) (kv json.RawMessage, _ *failure.Fault) {
	if h == nil {
		u.job.client.OnGone(func() { u.call.Disconnect(upstream.NoticeTimeout) })
		return nil, nil
	}
	return u.takeHandoff(h)
}

// decodeBody returns the body of the decode request. kv has the kv_transfer_params of the hand-off; nil: the rank computes the prompt. id
// is the id of the call.
func (u *upstreamCall) decodeBody(kv json.RawMessage, id string) [][]byte {
	j, profile, changes := u.job, u.rank.Profile, u.job.changes
	if profile.Connector == mooncake.SGLang && j.req.Endpoint == mooncake.Generate { // aborts find the request by the id in its body
		withRID := *j.changes
		withRID.RID = id
		changes = &withRID
	}
	salt := u.pull.Salt() // keeps the engine from using wrong KV of its prefix cache; empty: no KV there is known to be wrong
	return profile.DecodeBody(&j.body, j.req.Endpoint, changes, kv, salt, !u.unstreamed, nil)
}

// noteSendFailed is called after a decode call that got no answer with status 200. It reports the call to the monitor, if the engine is to
// blame. If the proxy ended the call because its client left, and the pull of the KV is over by now (pullEndsBy), the fault then says that
// the engine has read the KV (Through), so that the prefill engine counts as rid of it. This is only for an answer in one piece. The call
// for a stream does not end because its client leaves, and its first event shows that the pull is over.
func (u *upstreamCall) noteSendFailed(fault *failure.Fault, pullEndsBy time.Time) {
	if fault.BlamedEngine != "" {
		u.job.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	leftWhileComputing := u.unstreamed && fault.Reason == lifecycle.HungUp && fault.Progress != lifecycle.Unsent
	if leftWhileComputing && !time.Now().Before(pullEndsBy) {
		fault.Progress = lifecycle.Through
	}
}

// limitWait limits how long the rank may take for the first event, or for an answer in one piece. h is the hand-off (nil: the rank computes
// the prompt itself), and until names the limit. The caller must end the call if the engine sends nothing for as long as maxSilence. It is
// handoff.Forever if a watch that limitWait has started limits the wait instead. The caller calls stop to end this watch. pullEndsBy is
// when the pull of the hand-off's KV is certainly over.
func limitWait(s *stream, h *handoff.Handoff, until lifecycle.Timeout) (maxSilence time.Duration, pullEndsBy time.Time, stop func()) {
	profile := s.upstream.rank.Profile
	if s.upstream.unstreamed { // the pull of KV is over when a stream's first event would come; limitOnePiece limits the call
		until = lifecycle.ByFirstEvent
	}
	maxSilence = timeoutOf(until, s.job.srv.Settings(), profile)
	if h != nil {
		maxSilence = min(maxSilence, h.FirstEventBy().Sub(s.upstream.began)) // after that, a first event would prove nothing
	}
	if h != nil && s.upstream.unstreamed {
		h.NoteExpiries(s.job.srv.Monitor)
	}
	pullEndsBy = s.upstream.began.Add(maxSilence)
	switch {
	case s.upstream.unstreamed:
		return handoff.Forever, pullEndsBy, limitOnePiece(s, h, pullEndsBy)
	case h == nil && profile.Aggregated: // watchCore may find a core that stands still before maxSilence is over
		return maxSilence, pullEndsBy, watchCore(s)
	}
	return maxSilence, pullEndsBy, func() {}
}

// limitOnePiece limits the wait for an answer in one piece, from which nothing arrives before all of it is computed. It ends the call when
// the rank should have computed the answer and shows no sign of life (see handoff.RemainingWait). If the client leaves, it also ends the
// call of a hand-off, but not before pullEndsBy, because a pull of KV must not be cut. After stop was called, it does not end the call.
func limitOnePiece(s *stream, h *handoff.Handoff, pullEndsBy time.Time) (stop func()) {
	ignoreClient := func() {} // without a hand-off, takeKV has set what happens when the client leaves
	if h != nil {
		const noGrace = 0
		ignoreClient = endAfterClientLeft(s.job.client, s.upstream.call, noGrace, pullEndsBy)
	}
	stopLimit := handoff.LimitOnePiece(s.upstream.rank, s.upstream.call, s.job.srv.Settings(), s.upstream.maxTokens)
	return func() { stopLimit(); ignoreClient() }
}

// takeHandoff returns the kv_transfer_params of a hand-off, by which the decode engine fetches the KV. It fails if the engine process that
// made the KV is gone (Outlived) or may be gone (MayOutlive), and after the hand-off's deadline. Another attempt then prefills the prompt
// again.
func (u *upstreamCall) takeHandoff(h *handoff.Handoff) (json.RawMessage, *failure.Fault) {
	if inDoubt, gone := u.job.srv.Engines().KVInDoubt(h.Made); inDoubt {
		why := lifecycle.MayOutlive
		if gone { // so it does not count as held by the engine any longer
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

// sendDecode sends the decode request, and returns when the head of the answer has come. maxSilence is how long the engine may send
// nothing; it is handoff.Forever if other code limits the wait.
func (u *upstreamCall) sendDecode(headers []engine.Header, body [][]byte, maxSilence time.Duration) (fault *failure.Fault) {
	j := u.job
	if u.slot.InEngineQueue {
		u.countedWithoutSlot = true
		u.rank.Traffic.AddSentWithoutSlot(1) // so that the alarm about ranks with too many requests expects one more
	}
	// If all text may come only at the end of the answer, no tokens can be counted before. MarkNonStreaming makes the board estimate
	// them by the pace of other streams. If a prefill runs beside the decode call, the rank computes no tokens before that prefill has
	// ended, so concurrentPrefill.acceptAnswer calls MarkNonStreaming then.
	if textMayComeLast := u.unstreamed || u.mayHoldTextBack; textMayComeLast && u.prefillCall == nil {
		u.slot.MarkNonStreaming(u.maxTokens)
	}
	call := upstream.Call{
		Call: u.call, Kind: lifecycle.Decode, Engine: u.rank.Instance, Scope: u.rank.Scope, Path: j.req.Endpoint.Path(),
		InEngineQueue: u.slot.InEngineQueue, Aggregated: u.alsoPrefills(),
		Limits: engine.Deadlines{Connect: j.srv.Settings().Limits.ConnectTimeout, FirstByte: maxSilence, Idle: maxSilence},
		Log:    j.srv.Log,
	}
	j.namedAbort.noteSent(u.rank, headers) // from now on, an abort by the client goes to this rank
	u.resp, fault = call.Open(j.record.WithTraceHeaders(headers), body)
	if fault != nil && fault.Status != 0 { // some decode engines that refuse a request also make the prefill engine free the KV
		fault.Frees = j.srv.Engines().RejectionFrees(u.rank)
	}
	return fault
}

// lateKVFault returns the fault of a decode call that began too late: by then, the KV that it read may have been another prompt's.
func lateKVFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Through, Reason: lifecycle.MaybeWrongKV}
	return failure.NewFault(end, failure.LateKV, handoff.ErrLate)
}

// openDuringPrefill sends the decode call of a request whose prefill call runs at the same time, and reads up to the first data event. The
// prefill call limits the wait for this event, because its length depends on the prefill, so the decode call itself has no limit
// (handoff.Forever). If the call fails, the prefill call is told, and openDuringPrefill returns why.
func (s *stream) openDuringPrefill() *failure.Fault {
	j, profile, prefillCall := s.job, s.upstream.rank.Profile, s.upstream.prefillCall
	// The KV comes without a hand-off, so no time is set by which it must be read. The request still counts as one that pulls KV: if
	// the rank meanwhile reads wrong KV for another request, this one may get it from the prefix cache. countIfLate finds this out.
	var noHandoff *handoff.Handoff
	s.upstream.pull = noHandoff.AwaitFirstEvent(s.upstream.rank, j.req.Endpoint, s.upstream.began, s.upstream.unstreamed)
	defer func() { s.upstream.pull.End(time.Now(), true) }()
	salt := s.upstream.pull.Salt() // keeps the engine from using wrong KV of its prefix cache; empty: no KV there is known to be wrong
	body := profile.EarlyDecode(&j.body, j.changes, prefillCall.rendezvous, salt, !s.upstream.unstreamed, nil)
	if fault := s.upstream.sendDecode(upstream.PairHeaders(prefillCall.id, j.req.Endpoint, profile), body, handoff.Forever); fault != nil {
		return s.upstream.failDuringPrefill(howSendFailed(fault), fault)
	}
	if err := s.readFirstDuringPrefill(); err != nil {
		fault := s.decodeFault(err)
		return s.upstream.failDuringPrefill(howReadFailed(s, fault), fault)
	}
	if s.withholdIfAnothers(noHandoff) { // the client must not get an answer that may be made of wrong KV
		return s.upstream.failDuringPrefill(lifecycle.Died, lateKVFault())
	}
	return checkBegunPair(s)
}

// checkBegunPair is called after the first event of a decode call whose prefill call runs beside it. It returns a fault if the prefill call
// shows that the KV is not complete, or if the engine should have continued an answer and began it anew.
func checkBegunPair(s *stream) *failure.Fault {
	if abortedEmpty(s) {
		return nil
	}
	j, prefillCall := s.job, s.upstream.prefillCall
	counted := s.upstream.answer.Filter.Prompt() // prompt tokens as the decode engine counted them
	kvFault := prefillCall.firstEventCame(counted)
	if s.state == ended { // the whole answer came at once, so its KV is also checked as at the end of an answer
		kvFault = prefillCall.confirmKV(counted, j.client.Gone()) // it also returns a fault that firstEventCame has found
	}
	if kvFault != nil {
		return s.upstream.failDuringPrefill(lifecycle.Died, kvFault)
	}
	fault := ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, counted))
	if fault != nil {
		// The engine began an answer anew that it should have continued. It has the KV and has not failed, so the prefill call only
		// learns that the decode call is over.
		const abandoned = false
		prefillCall.answerEnded(abandoned)
	}
	return fault
}

// abortedEmpty says that the engine was told to end the answer before its first token, so that it does not matter whether the KV of the
// prompt came.
func abortedEmpty(s *stream) bool {
	return s.upstream.answer.Filter.FinishReason() == "abort" && s.tokens() == 0
}

// howSendFailed says, for the prefill call, how a decode call failed that has got no answer with status 200: whether the decode engine may
// still have the request (Died).
func howSendFailed(fault *failure.Fault) lifecycle.DecodeFailure {
	engineRefused := fault.Status != 0
	notSent := fault.Reason == lifecycle.NotOurs || fault.Reason == lifecycle.Unreachable
	switch {
	case engineRefused && fault.Verdict().Next == lifecycle.Over: // the request is at fault, so every engine would refuse it
		return lifecycle.Declined
	case engineRefused || notSent:
		return lifecycle.Refused
	}
	return lifecycle.Died
}

// howReadFailed says, for the prefill call, how a decode call failed whose engine answered with status 200.
func howReadFailed(s *stream, fault *failure.Fault) lifecycle.DecodeFailure {
	next := fault.Verdict().Next
	refusedOrGivenBack := next == lifecycle.Over || next == lifecycle.NoRoom // for good, or for want of KV memory
	reportedByEvent := s.endError != nil                                     // so the engine itself has ended the call
	if reportedByEvent && refusedOrGivenBack {
		return lifecycle.Declined
	}
	return lifecycle.Died // the engine may still have the request
}

// readFirstDuringPrefill reads up to the first event of a decode call. With SGLang it reads on until the engine has reported how many
// tokens the prompt has, because the first event may lack this count. A difference from the prefill engine's count shows that the transfer
// of KV was aborted. It stops at the first event with tokens, which must not wait for the count.
func (s *stream) readFirstDuringPrefill() error {
	err := s.readFirst(time.Now().Add(handoff.Forever)) // the prefill call limits the wait
	isSGLang := s.upstream.rank.Profile.Connector == mooncake.SGLang
	for err == nil && isSGLang && s.state == flowing { // flowing: no event has ended the answer
		countCame, tokensCame := s.upstream.answer.Filter.Prompt() != 0, !s.firstTokenAt.IsZero()
		if countCame || tokensCame {
			break
		}
		err = s.fill()
	}
	if err == nil && s.endError != nil { // a later event than the first one reported a failure, so the stream has ended with it
		err = errRefusal // decodeFault then takes the fault of the stream, which has the error for the client
	}
	return err
}

// failDuringPrefill tells the prefill call that the decode call has ended before its first event, in the way that reason names. It returns
// why the decode call ended: its own fault, or the fault of the prefill call that ended it. It reports the decode engine to the monitor if
// that engine is at fault, and notes whether the engine may keep KV blocks for ever (blocksMayLeak), because KV for which it waits never
// comes.
func (u *upstreamCall) failDuringPrefill(reason lifecycle.DecodeFailure, fault *failure.Fault) *failure.Fault {
	var endedBy *failure.Fault // why the prefill call ended this call; nil: this call ended by itself
	endedBy, u.blocksMayLeak = u.prefillCall.decodeFailed(reason)
	if endedBy == nil {
		u.blameForFailure(reason, fault)
		return fault
	}
	copied := *endedBy // the caller changes its fault, and the prefill call keeps endedBy
	return &copied
}

// blameForFailure reports a decode call that has ended by itself to the monitor, if its engine is at fault: it may have died, could not be
// reached, or its answer tells something about the engine itself.
func (u *upstreamCall) blameForFailure(reason lifecycle.DecodeFailure, fault *failure.Fault) {
	// The fault of a call with an error status blames the engine only if the engine is paused, or does not have the model.
	tellsOfEngine := fault.Status != 0 && fault.BlamedEngine != ""
	engineAtFault := reason == lifecycle.Died || tellsOfEngine || fault.Reason == lifecycle.Unreachable
	if fault.Err != nil && engineAtFault {
		u.job.srv.Monitor.ReportFailure(u.rank.Instance, fault.Err)
	}
}

// copyPrefillAnswer copies the prefill engine's answer, if it has come, into the request and its record. It returns how long the decode
// engine took to call back the proxy, to say where the KV goes; 0: it has not called back, as with most connectors.
func (u *upstreamCall) copyPrefillAnswer() (calledBackAfter time.Duration) {
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
	notePrefilled(j, &probed, u.rank.Profile) // sets j.cachedTokens, which the filter needs
	// An SGLang decode engine reports its cached tokens itself. For a resumed request, the filter has the count of the first prefill
	// already; the count of this one also includes the answer so far.
	if !j.life.Resumed() && u.rank.Profile.Connector != mooncake.SGLang {
		u.answer.Filter.SetCached(j.cachedTokens)
	}
	return calledBackAfter
}

// beginPrefill starts the prefill call of an attempt on a goroutine of its own. The call is sent at once, or after the decode engine's
// callback. pair is the number of the attempt's two calls in the request's lifecycle, and until limits the wait for the callback. If a
// fault is returned, nothing was sent, and the lease is given back.
func (u *upstreamCall) beginPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) *failure.Fault {
	p := newConcurrentPrefill(u, lease, pair)
	p.waitLimit = until // how long the first wait, for the callback, may last
	u.prefillCall = p
	begun := false // p.run has been started, and reports the end of the prefill itself
	defer onPanic(func() {
		if !begun {
			p.reportNotSent()
		}
	})
	fault := p.prepareRendezvous()
	if fault == nil {
		lease.DetachOwner() // the prefill may outlive the request, so p gives the lease back, and not the request
		err := u.job.srv.prefillCalls.Run(anyNumberAtOnce, p.run)
		if begun = err == nil; !begun { // the proxy shuts down; without a prefill, the decode call cannot be made either
			fault = failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Leaving}, failure.Leaving, err)
		}
	}
	if fault != nil {
		p.reportNotSent()
		u.prefillCall = nil
	}
	return fault
}

// newConcurrentPrefill makes the prefill call that is to run beside the decode call of u. It takes over the lease, but sends nothing yet.
func newConcurrentPrefill(u *upstreamCall, lease *prefill.Lease, pair int) *concurrentPrefill {
	j, candidate := u.job, lease.Candidate
	p := &concurrentPrefill{
		// The request, as the prefill engine gets it.
		job: j, pairNumber: pair, id: pairRequestID(j.id, j.record.Attempts), body: j.body, changes: j.changes,
		promptEstimate: j.estimatedTokens(), maxTokens: u.maxTokens,
		noEarlyEvents: u.unstreamed || u.mayHoldTextBack, streamed: !u.unstreamed,
		// The decode side.
		decodeCall: u.call, rank: u.rank, slot: u.slot,
		// The prefill side. heldLease becomes nil when the lease is given back, and lastLease still names the engine then.
		traits: lifecycle.Traits[candidate.Profile.Connector], heldLease: lease, lastLease: lease, tried: []string{candidate.ID},
		// The ends of the two calls.
		decodeOver: make(chan struct{}), prefillOver: make(chan struct{}),
	}
	p.headers = j.record.WithTraceHeaders(upstream.PairHeaders(p.id, j.req.Endpoint, candidate.Profile))
	return p
}

// reportNotSent reports to the lifecycle that neither call of the pair was sent. The lifecycle then gives the lease back.
func (p *concurrentPrefill) reportNotSent() { p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil) }

// anyNumberAtOnce is the limit for Background.Run if any number of functions may run at once.
const anyNumberAtOnce = math.MaxInt

// pairRequestID is the X-Request-Id of both calls of an attempt. No id may be the beginning of another id, because SGLang ends every
// request whose id begins with the one that it is told to abort. The letter at the end ensures this for the attempts 1 and 10.
func pairRequestID(request string, attempt int) string {
	return "ek-" + request + "-" + strconv.Itoa(attempt) + "b"
}

// prepareRendezvous decides how the two engines find each other. That depends on the connector: the
// decode engine calls the proxy back (CallsBack), or, with SGLang, NewRendezvous has set all that
// the engines need. prepareRendezvous fails if the proxy does not listen for callbacks yet.
func (p *concurrentPrefill) prepareRendezvous() *failure.Fault {
	srv, candidate, rank := p.job.srv, p.heldLease.Candidate, p.rank
	longestPrompt := rank.Context // in tokens; 0: not known
	engines := srv.Engines()
	p.rendezvous = upstream.NewRendezvous(p.id, p.job.req.Endpoint, candidate.Profile, candidate.Target, engines.Ranks(candidate.Instance),
		rank.Profile, rank.Target)
	switch {
	case p.traits.CallsBack && srv.Callbacks == nil:
		return failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Unready},
			failure.BadGateway("decode", errNoListener.Error()), errNoListener)
	case p.traits.CallsBack:
		known := engines.HostsOf(rank.Instance)
		p.callback = srv.Callbacks.Expect(metaserver.Wanted{
			Rank: rank.Target.ID, Limit: mooncake.MaxCallback(longestPrompt, minBlockTokens),
			Read: func(body []byte) (mooncake.Callback, error) {
				return rank.Profile.ReadCallback(body, p.rendezvous.RequestID, longestPrompt, minBlockTokens, known)
			}})
		p.rendezvous.Metaserver = p.callback.URL
	}
	return nil
}

// minBlockTokens is the smallest number of tokens that a KV block of any engine can hold. It bounds how many blocks a prompt can have.
const minBlockTokens = 1

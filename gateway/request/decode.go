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

// decode sends the request to the rank; without h, the rank also computes the prompt. It returns
// when the first data event has arrived, because then the engine has the KV and the client can get
// a status line. clientQuit: the call ended because the client left, so no engine uses the slot any
// more.
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
		// A client that leaves ends only a call without a hand-off, and one for an answer in one piece
		// once its pull of KV is over. Any other stays open until its first event (see open).
		mayEndWithClient := h == nil || s.upstream.unstreamed
		return fault, mayEndWithClient && j.client.Left()
	}
	slot.ReportStarted()
	j.noteKVArrived(h, s)
	s.noteFirstEvent()
	return nil, false
}

// noteIfBlocksLeak: the prefill engine may have freed the KV, while the decode engine still waits
// for it and may keep blocks for ever. The dispatcher counts these as taken.
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

// decodeDuringPrefill does what decode does, beside a prefill call that begins now. pair is the
// number of both calls in the lifecycle, and until limits the wait for the decode engine's
// callback. clientQuit: the client has left, and the rank's blocks are not written to, or counted
// as lost.
func (s *stream) decodeDuringPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) (fault *failure.Fault, clientQuit bool) {
	j, slot := s.job, s.upstream.slot
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "decode", Early: true})
	s.upstream.announceTokensToCompute()
	if fault = s.upstream.beginPrefill(lease, pair, until); fault != nil {
		return fault, false
	}
	j.client.OnGone(s.upstream.prefillCall.clientLeft) // the lifecycle learns at once if the client leaves
	fault = s.openDuringPrefill()
	// It may have changed during the call.
	s.upstream.prefiller = s.upstream.prefillCall.prefillEngine().Instance
	if fault != nil {
		s.upstream.copyPrefillAnswer() // even after a failure
		return fault, s.upstream.awaitPrefillIfClientLeft(fault)
	}
	slot.ReportStarted()
	var noHandoff *handoff.Handoff
	j.noteKVArrived(noHandoff, s)
	calledBackAfter := s.upstream.copyPrefillAnswer()
	j.record.Report(journal.Event{Kind: journal.Coupled, Took: calledBackAfter, Slot: slot})
	s.noteFirstEvent()
	if s.upstream.slot == nil { // the whole answer came with its first event
		s.upstream.prefillCall.answerEnded(abortedEmpty(s))
	}
	return nil, false
}

// awaitPrefillIfClientLeft: after the client has left, the prefill call may still write to the
// rank's blocks. So it waits a limited time for the end of that call, and then notes that the
// blocks may leak. After NotOurs nothing was sent.
func (u *upstreamCall) awaitPrefillIfClientLeft(fault *failure.Fault) (clientQuit bool) {
	rankMayHaveBlocks := fault.Reason != lifecycle.NotOurs
	if clientQuit = rankMayHaveBlocks && u.job.client.Left(); clientQuit {
		u.blocksMayLeak = u.prefillCall.awaitEndOrLeak() || u.blocksMayLeak
	}
	return clientQuit
}

// open sends the decode request and reads up to the first data event. With a hand-off, the
// connection stays open until then even if the client leaves: if it were cut while the decode
// engine pulls the KV, both engines would leak KV blocks.
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
	if fault = correctIfStuck(s, fault); fault != nil { // Stuck, if watchCore has ended the call
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
	// An engine that was to continue an answer may have ignored the answer so far.
	return ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, s.upstream.answer.Filter.Prompt()))
}

// takeKV: without a hand-off, the call ends from now on if the client leaves, because no pull of KV
// can be cut.
func (u *upstreamCall) takeKV(h *handoff.Handoff) (kv json.RawMessage, _ *failure.Fault) {
	if h == nil {
		u.job.client.OnGone(func() { u.call.Disconnect(upstream.NoticeTimeout) })
		return nil, nil
	}
	return u.takeHandoff(h)
}

func (u *upstreamCall) decodeBody(kv json.RawMessage, id string) [][]byte {
	j, profile, changes := u.job, u.rank.Profile, u.job.changes
	// Aborts find the request by the id in its body.
	if profile.Connector == mooncake.SGLang && j.req.Endpoint == mooncake.Generate {
		withRID := *j.changes
		withRID.RID = id
		changes = &withRID
	}
	salt := u.pull.Salt() // keeps the engine from using wrong KV of its prefix cache
	return profile.DecodeBody(&j.body, j.req.Endpoint, changes, kv, salt, !u.unstreamed, nil)
}

// noteSendFailed is called after a decode call without a status 200. If the client left an answer
// in one piece, and the pull of the KV is over by now, the engine has read the KV (Through), so the
// prefill engine is rid of it. The call for a stream does not end because its client leaves,
// and its first event shows that the pull is over.
func (u *upstreamCall) noteSendFailed(fault *failure.Fault, pullEndsBy time.Time) {
	if fault.BlamedEngine != "" {
		u.job.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	leftWhileComputing := u.unstreamed && fault.Reason == lifecycle.HungUp && fault.Progress != lifecycle.Unsent
	if leftWhileComputing && !time.Now().Before(pullEndsBy) {
		fault.Progress = lifecycle.Through
	}
}

// limitWait limits how long the rank may take. The caller ends the call after maxSilence
// (handoff.Forever: a watch limits the wait instead, until stop is called). pullEndsBy is when the
// pull of the KV is certainly over.
func limitWait(s *stream, h *handoff.Handoff, until lifecycle.Timeout) (maxSilence time.Duration, pullEndsBy time.Time, stop func()) {
	profile := s.upstream.rank.Profile
	// The pull ends when a stream's first event would come; limitOnePiece limits the call.
	if s.upstream.unstreamed {
		until = lifecycle.ByFirstEvent
	}
	maxSilence = timeoutOf(until, s.job.srv.Settings(), profile)
	if h != nil {
		// After FirstEventBy, a first event would prove nothing.
		maxSilence = min(maxSilence, h.FirstEventBy().Sub(s.upstream.began))
	}
	if h != nil && s.upstream.unstreamed {
		h.NoteExpiries(s.job.srv.Monitor)
	}
	pullEndsBy = s.upstream.began.Add(maxSilence)
	switch {
	case s.upstream.unstreamed:
		return handoff.Forever, pullEndsBy, limitOnePiece(s, h, pullEndsBy)
	case h == nil && profile.Aggregated: // watchCore may find a core that stands still earlier
		return maxSilence, pullEndsBy, watchCore(s)
	}
	return maxSilence, pullEndsBy, func() {}
}

// limitOnePiece limits the wait for an answer in one piece, which shows nothing before its end: the
// call ends when the rank should be done and shows no sign of life (handoff.RemainingWait). If the
// client leaves, it also ends, but not before pullEndsBy: a pull of KV must not be cut.
func limitOnePiece(s *stream, h *handoff.Handoff, pullEndsBy time.Time) (stop func()) {
	ignoreClient := func() {} // without a hand-off, takeKV has set what happens when the client leaves
	if h != nil {
		const noGrace = 0
		ignoreClient = endAfterClientLeft(s.job.client, s.upstream.call, noGrace, pullEndsBy)
	}
	stopLimit := handoff.LimitOnePiece(s.upstream.rank, s.upstream.call, s.job.srv.Settings(), s.upstream.maxTokens)
	return func() { stopLimit(); ignoreClient() }
}

// takeHandoff returns the kv_transfer_params. It fails if the engine process that made the KV is or
// may be gone, and after the hand-off's deadline. The prompt is then prefilled again.
func (u *upstreamCall) takeHandoff(h *handoff.Handoff) (json.RawMessage, *failure.Fault) {
	if inDoubt, gone := u.job.srv.Engines().KVInDoubt(h.Made); inDoubt {
		why := lifecycle.MayOutlive
		if gone { // so it no longer counts as held by the engine
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

// sendDecode returns when the head of the answer has come. The engine may send nothing for as long
// as maxSilence.
func (u *upstreamCall) sendDecode(headers []engine.Header, body [][]byte, maxSilence time.Duration) (fault *failure.Fault) {
	j := u.job
	if u.slot.InEngineQueue {
		u.countedWithoutSlot = true
		// The alarm about ranks with too many requests then expects one more.
		u.rank.Traffic.AddSentWithoutSlot(1)
	}
	// If all text may come at the end, the board estimates the tokens by the pace of other streams.
	// Beside a prefill, the rank computes nothing before the prefill has ended (see
	// concurrentPrefill.acceptAnswer).
	if textMayComeLast := u.unstreamed || u.mayHoldTextBack; textMayComeLast && u.prefillCall == nil {
		u.slot.MarkNonStreaming(u.maxTokens)
	}
	call := upstream.Call{
		Call: u.call, Kind: lifecycle.Decode, Engine: u.rank.Instance, Scope: u.rank.Scope, Path: j.req.Endpoint.Path(),
		InEngineQueue: u.slot.InEngineQueue, Aggregated: u.alsoPrefills(),
		Limits: engine.Deadlines{Connect: j.srv.Settings().Limits.ConnectTimeout, FirstByte: maxSilence, Idle: maxSilence},
		Log:    j.srv.Log,
	}
	j.namedAbort.noteSent(u.rank, headers) // an abort by the client now goes to this rank
	u.resp, fault = call.Open(j.record.WithTraceHeaders(headers), body)
	// By refusing, some decode engines also make the prefill engine free the KV.
	if fault != nil && fault.Status != 0 {
		fault.Frees = j.srv.Engines().RejectionFrees(u.rank)
	}
	return fault
}

// lateKVFault: the KV that the decode call read may have been another prompt's.
func lateKVFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Through, Reason: lifecycle.MaybeWrongKV}
	return failure.NewFault(end, failure.LateKV, handoff.ErrLate)
}

// openDuringPrefill reads up to the first data event of a decode call beside a prefill call. The
// prefill call limits this wait, because its length depends on the prefill.
func (s *stream) openDuringPrefill() *failure.Fault {
	j, profile, prefillCall := s.job, s.upstream.rank.Profile, s.upstream.prefillCall
	// Without a hand-off, no time is set by which the KV must be read. The request still counts as one
	// that pulls KV: if the rank reads wrong KV for another request, this one may get it from the
	// prefix cache (see withholdIfAnothers).
	var noHandoff *handoff.Handoff
	s.upstream.pull = noHandoff.AwaitFirstEvent(s.upstream.rank, j.req.Endpoint, s.upstream.began, s.upstream.unstreamed)
	defer func() { s.upstream.pull.End(time.Now(), true) }()
	salt := s.upstream.pull.Salt() // keeps the engine from using wrong KV of its prefix cache
	body := profile.EarlyDecode(&j.body, j.changes, prefillCall.rendezvous, salt, !s.upstream.unstreamed, nil)
	if fault := s.upstream.sendDecode(upstream.PairHeaders(prefillCall.id, j.req.Endpoint, profile), body, handoff.Forever); fault != nil {
		return s.upstream.failDuringPrefill(howSendFailed(fault), fault)
	}
	if err := s.readFirstDuringPrefill(); err != nil {
		fault := s.decodeFault(err)
		return s.upstream.failDuringPrefill(howReadFailed(s, fault), fault)
	}
	if s.withholdIfAnothers(noHandoff) { // it may be made of wrong KV
		return s.upstream.failDuringPrefill(lifecycle.Died, lateKVFault())
	}
	return checkBegunPair(s)
}

// checkBegunPair is called after the first event. The KV may be incomplete, or an answer that
// should go on may have begun anew.
func checkBegunPair(s *stream) *failure.Fault {
	if abortedEmpty(s) {
		return nil
	}
	j, prefillCall := s.job, s.upstream.prefillCall
	counted := s.upstream.answer.Filter.Prompt() // as the decode engine counted them
	kvFault := prefillCall.firstEventCame(counted)
	if s.state == ended { // the whole answer came at once, so it is checked as at its end
		// It also returns a fault that firstEventCame has found.
		kvFault = prefillCall.confirmKV(counted, j.client.Gone())
	}
	if kvFault != nil {
		return s.upstream.failDuringPrefill(lifecycle.Died, kvFault)
	}
	fault := ignoredAnswerFault(lifecycle.Decode, j.checkPromptCount(j.resume.decodeMustCount, counted))
	if fault != nil {
		// The engine has the KV and has not failed, so the prefill call only learns that the decode call
		// is over.
		const abandoned = false
		prefillCall.answerEnded(abandoned)
	}
	return fault
}

// abortedEmpty: the engine was told to end the answer before its first token, so it does not matter
// whether the KV came.
func abortedEmpty(s *stream) bool {
	return s.upstream.answer.Filter.FinishReason() == "abort" && s.tokens() == 0
}

// howSendFailed: the call has got no answer with status 200.
func howSendFailed(fault *failure.Fault) lifecycle.DecodeFailure {
	engineRefused := fault.Status != 0
	notSent := fault.Reason == lifecycle.NotOurs || fault.Reason == lifecycle.Unreachable
	switch {
	case engineRefused && fault.Verdict().Next == lifecycle.Over: // every engine would refuse the request
		return lifecycle.Declined
	case engineRefused || notSent:
		return lifecycle.Refused
	}
	return lifecycle.Died
}

// howReadFailed: the engine answered with status 200.
func howReadFailed(s *stream, fault *failure.Fault) lifecycle.DecodeFailure {
	next := fault.Verdict().Next
	// The engine refused for good, or for want of KV memory.
	refusedOrGivenBack := next == lifecycle.Over || next == lifecycle.NoRoom
	reportedByEvent := s.endError != nil // the engine itself has ended the call
	if reportedByEvent && refusedOrGivenBack {
		return lifecycle.Declined
	}
	return lifecycle.Died // it may still have the request
}

// readFirstDuringPrefill reads up to the first event. With SGLang it reads on until the engine has
// counted the prompt tokens, which the first event may lack: a difference from the prefill engine's
// count shows that the transfer of KV was aborted. But an event with tokens must not wait for the
// count.
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
	if err == nil && s.endError != nil { // a later event reported a failure
		err = errRefusal // decodeFault then takes the fault of the stream
	}
	return err
}

// failDuringPrefill tells the prefill call that the decode call has ended before its first event.
// It returns the decode call's own fault, or that of the prefill call that ended it.
func (u *upstreamCall) failDuringPrefill(reason lifecycle.DecodeFailure, fault *failure.Fault) *failure.Fault {
	var endedBy *failure.Fault // nil: this call ended by itself
	endedBy, u.blocksMayLeak = u.prefillCall.decodeFailed(reason)
	if endedBy == nil {
		u.blameForFailure(reason, fault)
		return fault
	}
	copied := *endedBy // the caller changes its fault, and the prefill call keeps endedBy
	return &copied
}

// blameForFailure reports the decode engine to the monitor, if it is at fault.
func (u *upstreamCall) blameForFailure(reason lifecycle.DecodeFailure, fault *failure.Fault) {
	// An error status blames the engine only if it is paused, or does not have the model.
	tellsOfEngine := fault.Status != 0 && fault.BlamedEngine != ""
	engineAtFault := reason == lifecycle.Died || tellsOfEngine || fault.Reason == lifecycle.Unreachable
	if fault.Err != nil && engineAtFault {
		u.job.srv.Monitor.ReportFailure(u.rank.Instance, fault.Err)
	}
}

// copyPrefillAnswer copies the prefill engine's answer, if it has come, into the request and its
// record. calledBackAfter is 0 if the decode engine has not called back.
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
	// An SGLang decode engine reports its cached tokens itself. Of a resumed request, this count would
	// include the answer so far.
	if !j.life.Resumed() && u.rank.Profile.Connector != mooncake.SGLang {
		u.answer.Filter.SetCached(j.cachedTokens)
	}
	return calledBackAfter
}

// beginPrefill starts the prefill call on a goroutine of its own, at once or after the callback
// (limited by until). After a fault, nothing was sent, and the lease is given back.
func (u *upstreamCall) beginPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) *failure.Fault {
	p := newConcurrentPrefill(u, lease, pair)
	p.waitLimit = until // for the callback
	u.prefillCall = p
	begun := false // p.run then reports the end of the prefill itself
	defer onPanic(func() {
		if !begun {
			p.reportNotSent()
		}
	})
	fault := p.prepareRendezvous()
	if fault == nil {
		lease.DetachOwner() // the prefill may outlive the request
		err := u.job.srv.prefillCalls.Run(anyNumberAtOnce, p.run)
		if begun = err == nil; !begun { // the proxy shuts down
			fault = failure.NewFault(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Leaving}, failure.Leaving, err)
		}
	}
	if fault != nil {
		p.reportNotSent()
		u.prefillCall = nil
	}
	return fault
}

// newConcurrentPrefill takes over the lease, but sends nothing yet.
func newConcurrentPrefill(u *upstreamCall, lease *prefill.Lease, pair int) *concurrentPrefill {
	j, candidate := u.job, lease.Candidate
	p := &concurrentPrefill{
		job: j, pairNumber: pair, id: pairRequestID(j.id, j.record.Attempts), body: j.body, changes: j.changes,
		promptEstimate: j.estimatedTokens(), maxTokens: u.maxTokens,
		noEarlyEvents: u.unstreamed || u.mayHoldTextBack, streamed: !u.unstreamed,
		decodeCall: u.call, rank: u.rank, slot: u.slot,
		// lastLease still names the engine when heldLease is given back.
		traits: lifecycle.Traits[candidate.Profile.Connector], heldLease: lease, lastLease: lease, tried: []string{candidate.ID},
		decodeOver: make(chan struct{}), prefillOver: make(chan struct{}),
	}
	p.headers = j.record.WithTraceHeaders(upstream.PairHeaders(p.id, j.req.Endpoint, candidate.Profile))
	return p
}

// The lifecycle then gives the lease back.
func (p *concurrentPrefill) reportNotSent() { p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil) }

const anyNumberAtOnce = math.MaxInt

// pairRequestID is the X-Request-Id of both calls. No id may be the beginning of another, because
// SGLang ends every request whose id begins with the one that it is told to abort. The letter at
// the end ensures this for the attempts 1 and 10.
func pairRequestID(request string, attempt int) string {
	return "ek-" + request + "-" + strconv.Itoa(attempt) + "b"
}

// prepareRendezvous decides how the two engines find each other: by a callback to this proxy
// (CallsBack), or, with SGLang, as NewRendezvous has set.
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

// minBlockTokens is the smallest number of tokens in a KV block of any engine. It bounds how many
// blocks a prompt can have.
const minBlockTokens = 1

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
// returns when the first data event has arrived, because then the engine has the KV and the client can get a status line. quit says that
// the client has left, that this has ended the call, and that no engine uses the slot any more.
func (s *stream) decode(h *handoff.Handoff, until lifecycle.Timeout) (_ *failure.Fault, quit bool) {
	j, slot, phase := s.job, s.upstream.slot, journal.Transfer
	if h == nil {
		phase = journal.Prefill
	}
	j.enter(phase, "decode")
	s.upstream.reportCompute()
	if fault := s.open(h, until); fault != nil {
		if fault.Verdict().KV == lifecycle.MaybeRunning && s.overdue(h) { // the engine may wait for KV that is gone
			s.upstream.stranded = handoff.LeaksBlocks(s.upstream.rank, fault)
		}
		endsWithClient := h == nil || s.upstream.unstreamed // any other call stays open until its first event (see open)
		return fault, endsWithClient && j.client.Left()
	}
	slot.ReportStarted()
	j.kvArrived(h, s)
	s.opened()
	return nil, false
}

// decodeBeside is decode for a request whose prefill runs at the same time. Nothing was sent under the lease yet. The prefill call and the
// decode call are the two calls of the request, and the end of one ends the other. pair is their number in the request's lifecycle. quit
// says that the client has left, and that either the prefill call has ended, or the decode engine keeps KV blocks for it.
func (s *stream) decodeBeside(lease *prefill.Lease, pair int, until lifecycle.Timeout) (fault *failure.Fault, quit bool) {
	j, slot := s.job, s.upstream.slot
	j.record.Report(journal.Event{Kind: journal.Entered, Phase: journal.Transfer, Left: j.client.Left(), Call: "decode", Early: true})
	s.upstream.reportCompute()
	if fault = s.upstream.beginPrefill(lease, pair, until); fault != nil {
		return fault, false
	}
	j.client.OnGone(s.upstream.partner.clientLeft)
	if fault = s.openBeside(); fault != nil {
		s.upstream.takePrefillAnswer()
		// After NotOurs, nothing was sent to the rank, so it has no KV blocks for the request. Otherwise the prefill call may still write to
		// the rank's blocks although the client has left, so outlived waits for its end.
		if quit = fault.Reason != lifecycle.NotOurs && j.client.Left(); quit {
			s.upstream.stranded = s.upstream.partner.outlived() || s.upstream.stranded
		}
		return fault, quit
	}
	slot.ReportStarted()
	j.kvArrived(nil, s)
	j.record.Report(journal.Event{Kind: journal.Coupled, Took: s.upstream.takePrefillAnswer(), Slot: slot})
	s.opened()
	if s.upstream.slot == nil { // the whole answer came with its first event, so the slot is released already
		s.upstream.partner.close(false)
	}
	return nil, false
}

// open sends the decode request and reads up to the first data event. h is the hand-off; nil: the rank computes the prompt itself. With
// a hand-off, the connection stays open until the first event even if the client leaves: if it were cut while the decode engine pulls the
// KV, both engines would leak KV blocks.
func (s *stream) open(h *handoff.Handoff, until lifecycle.Timeout) *failure.Fault {
	j := s.job
	s.upstream.pull = h.Await(s.upstream.rank, s.upstream.began, s.upstream.unstreamed)
	defer s.upstream.pull.End()
	var kv json.RawMessage
	if h == nil {
		j.client.OnGone(func() { s.upstream.call.Disconnect(upstream.NoticeTimeout) }) // no pull of KV is under way
	} else {
		var fault *failure.Fault
		if kv, fault = s.upstream.takeHandoff(h); fault != nil {
			return fault
		}
	}
	profile := s.upstream.rank.Profile
	if profile.HandBack == mooncake.HandBackFetched { // keepTurn compares: only this process will have the KV of the answer
		j.decodeProcess = j.srv.Engines().ProcessAt(s.upstream.rank.Instance).Process
	}
	silence, pullOver, stop := limitWait(s, h, until)
	defer stop()
	headers := h.Identify(engine.JSONHeaders(j.legID("d", j.record.Attempts)))
	changes := j.changes
	if profile.Connector == mooncake.SGLang && j.req.Endpoint == mooncake.Generate { // aborts find the request by the id in its body
		withRID := *j.changes
		withRID.RID = j.legID("d", j.record.Attempts)
		changes = &withRID
	}
	body := profile.DecodeBody(&j.body, j.req.Endpoint, changes, kv, s.upstream.pull.Salt(), !s.upstream.unstreamed, nil)
	if fault := stuck(s, s.upstream.send(headers, body, silence)); fault != nil {
		if fault.Engine != "" {
			j.srv.Monitor.ReportFailure(fault.Engine, fault.Err)
		}
		leftWhileComputing := s.upstream.unstreamed && fault.Reason == lifecycle.HungUp && fault.Progress != lifecycle.Unsent
		if leftWhileComputing && !time.Now().Before(pullOver) { // the pull of KV was over, so only the answer is lost
			fault.Progress = lifecycle.Through
		}
		return fault
	}
	if err := s.readFirst(s.upstream.began.Add(silence)); err != nil {
		return stuck(s, s.decodeFault(err))
	}
	if !s.believed(h) {
		return disbelieved()
	}
	return ignored(lifecycle.Decode, j.verify(j.resume.decodeCounts, s.upstream.answer.Filter.Prompt()))
}

// limitWait limits how long the rank may take for the first event, or for an answer in one piece. silence is how long the engine may send
// nothing. It is handoff.Forever if other code limits the wait, until stop is called. pullOver is when the pull of the hand-off's KV is
// certainly over. h and until are those of open.
func limitWait(s *stream, h *handoff.Handoff, until lifecycle.Timeout) (silence time.Duration, pullOver time.Time, stop func()) {
	j, profile, unstreamed := s.job, s.upstream.rank.Profile, s.upstream.unstreamed
	if unstreamed { // the pull of KV is over when a stream's first event would come; from then on, LimitWhole bounds the call
		until = lifecycle.ByFirstEvent
	}
	silence = waitAtMost(until, j.srv.Settings(), profile)
	switch {
	case h != nil && profile.Renews():
		h.Lease.Renewed()
		h.NoteExpiries(j.srv.Monitor)
		if !unstreamed { // an answer in one piece has no first event, so it does not show when its pull of KV was over
			s.upstream.pull.OnExpiry(s.upstream.call.Expire)
		}
	case h != nil:
		silence = min(silence, h.FirstEventBy().Sub(s.upstream.began))
	}
	pullOver = s.upstream.began.Add(silence)
	switch {
	case unstreamed: // nothing arrives before all of the answer is computed
		stay := func() {}
		if h != nil { // the pull of KV must not be cut, so the call outlives its client until the pull is over for certain
			stay = leaveAfter(j.client, s.upstream.call, 0, pullOver)
		}
		limited := handoff.LimitWhole(s.upstream.rank, s.upstream.call, j.srv.Settings(), s.upstream.maxTokens)
		return handoff.Forever, pullOver, func() { limited(); stay() }
	// A request beyond the rank's slots waits in the engine's own queue, so its time limit starts only once it has a slot. This is safe
	// only if the hold on the KV is renewed meanwhile. Otherwise the KV must be pulled in time, even if the request waits in that queue.
	case s.upstream.slot.InEngineQueue && h != nil && profile.Renews():
		return handoff.Forever, pullOver, handoff.LimitFromSlot(s.upstream.slot, s.upstream.call, silence)
	case h == nil && profile.Aggregated():
		return silence, pullOver, watchCore(s)
	}
	return silence, pullOver, func() {}
}

// takeHandoff returns the kv_transfer_params of a hand-off. It fails if the prefill engine has restarted, or after the hand-off's deadline.
func (u *upstreamCall) takeHandoff(h *handoff.Handoff) (json.RawMessage, *failure.Fault) {
	if gone, sure := u.job.srv.Engines().ProcessGone(h.Maker); gone {
		why := lifecycle.MayOutlive
		if sure {
			why = lifecycle.Outlived
		}
		return nil, failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: why},
			failure.BadGateway("prefill", "it is gone, and the prefilled prompt with it"), handoff.ErrOutlived)
	}
	kv, err := h.Params(u.began)
	if err != nil {
		return nil, failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Expired},
			failure.BadGateway("decode", "its turn came after the hand-off's deadline"), err)
	}
	h.Lease.Dispatched()
	return kv, nil
}

// send sends the decode request. silence is how long the engine may send nothing. It is handoff.Forever if other code limits the wait.
func (u *upstreamCall) send(headers []engine.Header, body [][]byte, silence time.Duration) (fault *failure.Fault) {
	j := u.job
	if u.slot.InEngineQueue {
		u.beyond = true
		u.rank.Traffic.AddSentWithoutSlot(1) // so that the alarm about ranks with too many requests expects one more
	}
	if u.partner == nil && (u.unstreamed || u.buffered) { // a partner does this itself, once the prompt is prefilled
		u.slot.MarkNonStreaming(u.maxTokens)
	}
	call := upstream.Call{
		Call: u.call, Kind: lifecycle.Decode, Engine: u.rank.Instance, Scope: u.rank.Scope, Path: j.req.Endpoint.Path(), Beyond: u.beyond,
		Mixed:  u.rank.Group != "",
		Limits: engine.Deadlines{Connect: j.srv.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: j.srv.Log,
	}
	j.abort.sentTo(u.rank, headers)
	if u.resp, fault = call.Open(j.record.WithTraceHeaders(headers), body); fault != nil && fault.Status != 0 {
		fault.Frees = j.srv.Engines().RejectionFrees(u.rank)
	}
	return fault
}

// disbelieved returns the fault of a decode call that began too late: by then, the KV that it read may have been another prompt's.
func disbelieved() *failure.Fault {
	return failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Progress: lifecycle.Through, Reason: lifecycle.MaybeWrongKV}, failure.Late,
		handoff.ErrLate)
}

// openBeside sends the decode call of a request whose prefill call runs at the same time, and reads up to the first data event. The partner
// limits the wait for this event, because its length depends on the prefill.
func (s *stream) openBeside() *failure.Fault {
	j, profile, partner := s.job, s.upstream.rank.Profile, s.upstream.partner
	s.upstream.pull = (*handoff.Handoff)(nil).Await(s.upstream.rank, s.upstream.began, s.upstream.unstreamed) // the partner limits this wait
	defer s.upstream.pull.End()
	body := profile.EarlyDecode(&j.body, j.changes, partner.rendezvous, s.upstream.pull.Salt(), !s.upstream.unstreamed, nil)
	if fault := s.upstream.send(upstream.Headers(partner.id, j.req.Endpoint, profile), body, handoff.Forever); fault != nil {
		reason := lifecycle.Died
		switch {
		case fault.Status != 0 && fault.Verdict().Next == lifecycle.Over: // no other engine would answer otherwise
			reason = lifecycle.Declined
		case fault.Status != 0 || fault.Reason == lifecycle.NotOurs || fault.Reason == lifecycle.Unreachable:
			reason = lifecycle.Refused
		}
		return s.upstream.lostBeside(reason, fault)
	}
	if err := s.firstBeside(); err != nil {
		fault := s.decodeFault(err)
		reason := lifecycle.Died
		next := fault.Verdict().Next
		handedBack := next == lifecycle.Over || next == lifecycle.NoRoom // refused for good, or given back for want of KV memory
		if s.broken != nil && handedBack {                               // an event said so, and the engine itself has ended the call
			reason = lifecycle.Declined
		}
		return s.upstream.lostBeside(reason, fault)
	}
	if !s.believed(nil) {
		return s.upstream.lostBeside(lifecycle.Died, disbelieved())
	}
	fault := s.upstream.partner.started(s.upstream.answer.Filter.Prompt())
	if s.state == ended { // the whole answer came at once, so it is also checked now as at its end
		fault = s.upstream.partner.believe(s.upstream.answer.Filter.Prompt(), j.client.Gone())
	}
	if fault != nil {
		return s.upstream.lostBeside(lifecycle.Died, fault)
	}
	if fault = ignored(lifecycle.Decode, j.verify(j.resume.decodeCounts, s.upstream.answer.Filter.Prompt())); fault != nil {
		s.upstream.partner.close(false)
	}
	return fault
}

// firstBeside reads up to the first event of a decode call. With SGLang it reads on until the engine has reported how many tokens the
// prompt has, because the first event may lack this count. A difference from the prefill engine's count shows that the transfer of KV was
// aborted. It stops at the first event with tokens, which must not wait for the count.
func (s *stream) firstBeside() error {
	err := s.readFirst(time.Now().Add(handoff.Forever))
	isSGLang := s.upstream.rank.Profile.Connector == mooncake.SGLang
	for err == nil && isSGLang && s.state == flows && s.upstream.answer.Filter.Prompt() == 0 && s.firstTokenAt.IsZero() {
		err = s.fill()
	}
	if err == nil && s.broken != nil { // a later event than the first one reported a failure
		err = errRefusal
	}
	return err
}

// lostBeside returns why the decode call ended before its first event: its own fault, or the fault of the prefill call that ended it. The
// partner is told reason, which is the way in which the decode call ended.
func (u *upstreamCall) lostBeside(reason lifecycle.DecodeFailure, fault *failure.Fault) *failure.Fault {
	j := u.job
	cause, stranded := u.partner.decodeEnded(reason)
	u.stranded = stranded
	if cause == nil {
		saysState := fault.Status != 0 && fault.Engine != "" // the status tells that the engine is paused, or lacks a model
		if fault.Err != nil && (reason == lifecycle.Died || saysState || fault.Reason == lifecycle.Unreachable) {
			j.srv.Monitor.ReportFailure(u.rank.Instance, fault.Err)
		}
		return fault
	}
	if errors.Is(cause.Err, errLate) {
		u.pull.MarkLost()
		j.srv.metrics.latePulls.Inc()
	}
	copied := *cause // the caller changes its fault, and the partner keeps cause
	return &copied
}

// takePrefillAnswer copies the prefill engine's answer, if it has come, into the request and its record. It returns how long the decode
// engine took to call back; 0: it has not called back.
func (u *upstreamCall) takePrefillAnswer() (called time.Duration) {
	j, p := u.job, u.partner
	j.mu.Lock()
	answered, probed, took, prefiller := p.calls().Answered(), p.probed, p.prefillTook, p.lastLease.Candidate.ID
	called = p.calledBackAfter
	j.mu.Unlock()
	if !answered {
		return called
	}
	j.record.Report(journal.Event{Kind: journal.Probed, Took: took})
	j.record.Prefill = prefiller
	prefilled(j, &probed, u.rank.Profile)
	if !j.life.Resumed() && u.rank.Profile.Connector != mooncake.SGLang { // an SGLang decode engine reports its cached tokens itself
		u.answer.Filter.SetCached(j.cachedTokens)
	}
	return called
}

// beginPrefill starts the prefill call of an attempt on a goroutine of its own. The call is sent at once, or after the decode engine's
// callback. pair is the number of the attempt's two calls in the request's lifecycle, and until limits the first wait. If a fault is
// returned, nothing was sent.
func (u *upstreamCall) beginPrefill(lease *prefill.Lease, pair int, until lifecycle.Timeout) *failure.Fault {
	j, candidate := u.job, lease.Candidate
	p := &partner{
		job: j, pair: pair, waitLimit: until, id: pairID(j.id, j.record.Attempts), traits: lifecycle.Traits[candidate.Profile.Connector],
		decode: u.call, rank: u.rank, slot: u.slot, body: j.body, changes: j.changes, prompt: j.estimate(), maxTokens: u.maxTokens,
		silent: u.unstreamed || u.buffered, streamed: !u.unstreamed,
		lease: lease, lastLease: lease, decodeOver: make(chan struct{}), prefillOver: make(chan struct{}), tried: []string{candidate.ID},
	}
	p.headers = j.record.WithTraceHeaders(upstream.Headers(p.id, j.req.Endpoint, candidate.Profile))
	u.partner = p
	begun := false
	defer onPanic(func() {
		if !begun {
			p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil)
		}
	})
	fault := p.prepareMeeting()
	if fault == nil {
		lease.DetachOwner()
		err := j.srv.legs.Run(math.MaxInt, p.serve)
		if begun = err == nil; !begun {
			fault = failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Leaving}, failure.Leaving, err)
		}
	}
	if fault != nil {
		p.report(lifecycle.Event{Kind: lifecycle.NotSent}, nil)
		u.partner = nil
	}
	return fault
}

// pairID is the X-Request-Id of both calls of an attempt. No id may be the beginning of another id, because SGLang ends every request whose
// id begins with the one that it is told to abort. The letter at the end ensures this for the attempts 1 and 10.
func pairID(request string, attempt int) string {
	return "ek-" + request + "-" + strconv.Itoa(attempt) + "b"
}

// prepareMeeting decides how the two engines find each other: by a callback of the decode engine, or by the prefill engine's address. It
// fails if the proxy does not listen for callbacks yet, or if the address is not known yet.
func (p *partner) prepareMeeting() *failure.Fault {
	srv, candidate, rank, longest := p.job.srv, p.lease.Candidate, p.rank, p.rank.Context
	engines := srv.Engines()
	p.rendezvous = upstream.Meet(p.id, p.job.req.Endpoint, candidate.Profile, candidate.Target, engines.Ranks(candidate.Instance),
		rank.Profile, rank.Target)
	switch {
	case p.traits.CallsBack && srv.Callbacks == nil:
		return failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Unready},
			failure.BadGateway("decode", errUnheard.Error()), errUnheard)
	case p.traits.CallsBack:
		known := engines.HostsOf(rank.Instance)
		p.callback = srv.Callbacks.Expect(metaserver.Wanted{Rank: rank.Target.ID, Limit: mooncake.MaxCallback(longest, leastBlock),
			Read: func(body []byte) (mooncake.Callback, error) {
				return rank.Profile.ReadCallback(body, p.rendezvous.RequestID, longest, leastBlock, known)
			}})
		p.rendezvous.Metaserver = p.callback.URL
	case p.traits.Keeps:
		if p.rendezvous.Coordinates = srv.Fleet.Coordinates(candidate); p.rendezvous.Coordinates == nil {
			return failure.Of(lifecycle.CallEnd{Call: lifecycle.Decode, Reason: lifecycle.Unlearned}, failure.Leaving, errUnknown)
		}
	}
	return nil
}

// leastBlock is the smallest number of tokens that a KV block of any engine can hold. It bounds how many blocks a prompt can have.
const leastBlock = 1

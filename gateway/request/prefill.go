package request

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handback"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/sse"
)

// A probeCall is a call (a probe) by which a prefill engine computes a prompt.
type probeCall struct {
	upstream.Call
	srv     *Server
	tracked *fleet.TrackedCall // the entry of this call in the list of calls that a drain may end
	process roster.ProcessID   // which process and weights the engine had when the call was made
	began   time.Time
}

// newProbeCall prepares the call to the prefill engine of a lease. until limits the wait for the answer. A drain may end the call at any
// time before untrack is called.
func newProbeCall(j *job, lease *prefill.Lease, until lifecycle.Timeout) *probeCall {
	srv, candidate := j.srv, lease.Candidate
	limits := &srv.Settings().Limits
	c := &probeCall{srv: srv, process: srv.Engines().ProcessAt(candidate.Instance), began: time.Now(), Call: upstream.Call{
		Call: upstream.NewCall(srv.Client, candidate.Profile, candidate.Target), Engine: candidate.Instance, Path: j.req.Endpoint.Path(),
		Log: srv.Log,
		Limits: engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: timeoutOf(until, srv.Settings(), candidate.Profile),
			Idle: limits.EventTimeout},
	}}
	if j.life.NeedsNewConnections() {
		c.Fresh()
	}
	c.tracked = srv.Fleet.TrackProbe(&lease.Candidate, c.Call.Call)
	c.Tracked = c.tracked // by it, the call finds out whether it was ended because its engine is down
	return c
}

func (c *probeCall) untrack() { c.srv.Fleet.Untrack(c.tracked) }

// answerBy returns the time by which the engine must have answered.
func (c *probeCall) answerBy() time.Time { return c.began.Add(c.Limits.FirstByte) }

// reportEnd tells the engine's monitor how the call has ended, and returns the fault with its reason set. A nil fault means that the engine
// has answered. stopped says that the proxy ended the call, or never sent it. clientLeft says that the client had left. If the proxy closes
// the connection before the answer begins, the engine aborts the request.
func (c *probeCall) reportEnd(fault *failure.Fault, stopped, clientLeft bool) *failure.Fault {
	if engineAnswered := fault == nil || fault.Status != 0; engineAnswered {
		c.srv.Monitor.Answered(c.Engine)
		if fault != nil && fault.BlamedEngine != "" { // the answer says something about the engine, for example that it is paused
			c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
		}
		return fault
	}
	switch {
	case stopped && clientLeft:
		fault.Reason, fault.ClientError, fault.Err = lifecycle.Left, failure.ClientGone, nil
	case stopped && c.tracked.MustMove(): // the engine is taken out of service or paused, so the request moves to another one
		fault.Reason = lifecycle.Moved
	case fault.Reason == lifecycle.HungUp: // the proxy ended the call for another reason, which says nothing about the engine
	default: // the engine could not be reached, was silent, or broke the call off
		c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	if fault.Reason == lifecycle.Moved || fault.Reason == lifecycle.HungUp { // the proxy ended the call: the engine has not failed
		fault.ClientError, fault.Err, fault.BlamedEngine = c.srv.movedOutError(), failure.ErrMoved, ""
	}
	return fault
}

// reportUnpairedEnd does what reportEnd does, for a prefill call that is not under way beside a decode call. It also writes into the
// record how long the engine took.
func (c *probeCall) reportUnpairedEnd(j *job, fault *failure.Fault) *failure.Fault {
	if engineAnswered := fault == nil || fault.Status != 0; engineAnswered {
		j.record.Report(journal.Event{Kind: journal.Probed, Took: time.Since(c.began)})
	}
	stopped := fault != nil && (fault.Reason == lifecycle.HungUp || fault.Progress == lifecycle.Unsent) // Unsent: the engine got nothing
	return c.reportEnd(fault, stopped, j.client.Left())
}

// answerPool has the buffers into which the answers of prefill engines are read. What is needed of an answer later is copied out of the
// buffer.
var answerPool = sync.Pool{New: func() any { return new([]byte) }}

// runProbe asks the engine of the lease to compute the prompt, and returns the hand-off from the engine's answer. An engine that has
// answered holds the prompt's KV blocks. So the hand-off is read even if the client has left: it is needed to free the blocks. A hand-off
// that is returned together with a fault must only be discarded.
func (j *job) runProbe(lease *prefill.Lease, until lifecycle.Timeout) (*handoff.Handoff, *failure.Fault) {
	began := time.Now()
	info, fault := transferNames(j, lease.Candidate)
	if fault != nil {
		return nil, fault
	}
	call := newProbeCall(j, lease, until)
	call.began = began
	defer call.untrack()
	resp, turn, fault := openProbe(j, call, lease, info)
	answered := time.Now() // the hold timeout runs from the response headers on
	if resp != nil {
		defer resp.Close()
	}
	var answer []byte
	if fault == nil {
		buffer := answerPool.Get().(*[]byte)
		defer func() {
			if *buffer = answer; cap(answer) <= 64<<10 { // one huge answer must not stay in the pool
				answerPool.Put(buffer)
			}
		}()
		answer, fault = call.Read(resp, *buffer, mooncake.MaxProbeAnswer, call.answerBy())
	}
	fault = call.reportUnpairedEnd(j, fault)
	j.recordFetch(turn, fault)
	if fault != nil {
		return nil, fault
	}
	return j.acceptAnswer(lease, call.process, info, answer, answered)
}

// transferNames returns the names that a prefill request must give the engine for the transfer of the KV; nil: the engine needs none. It
// fails if the engine's bootstrap server, which has one of the names, does not answer.
func transferNames(j *job, candidate prefill.Candidate) (*mooncake.BootstrapInfo, *failure.Fault) {
	info, err := j.srv.Fleet.BootstrapInfo(candidate)
	if err != nil {
		fault := failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Unnamed},
			failure.BadGateway("prefill", "its bootstrap server does not answer"), err)
		if prefill.Unsent(err) {
			fault.Reason = lifecycle.Unreachable
		}
		return nil, fault
	}
	if info != nil {
		info.TransferID = j.callID("t", j.record.Attempts)
	}
	return info, nil
}

// openProbe sends the prefill request of runProbe, and returns the engine's response once its head has come. turn is the earlier turn of
// the conversation whose KV the engine fetches for the request; nil: it fetches none.
//
// An engine that finishes a prefill pins the KV before it sends its answer. The answer has the only name of that KV: if the connection is
// closed before, the KV stays pinned until the hold timeout (vllm#50425). So when a client leaves, its probe may run for
// limits.probe_grace, and the hand-off is then discarded. A probe that takes longer is aborted, which frees the KV at once. If the prefill
// ends in the same instant, the KV may stay pinned without evenkeel knowing. The engine's KV budget is not charged for this rare case: to
// charge for every aborted probe would keep requests away from engines that are empty.
func openProbe(j *job, call *probeCall, lease *prefill.Lease, info *mooncake.BootstrapInfo) (resp *engine.Response, turn *handback.Turn,
	fault *failure.Fault) {
	profile := lease.Candidate.Profile
	// With an Early profile, requests usually get their decode rank before their prefill, so a lease is marked as sent only with the
	// prefill call. Other leases were marked before. An Early request gets here only while decode engines lack the engine's address
	// (bindOrder).
	if profile.Early() {
		lease.MarkSent()
	}
	var atAnyTime time.Time // the call may end as soon as the grace is over
	ignoreClient := endAfterClientLeft(j.client, call.Call.Call, j.srv.Settings().Limits.ProbeGrace, atAnyTime)
	patch, turn := j.fetchTurn(lease)
	resp, fault = call.Open(j.record.WithTraceHeaders(engine.JSONHeaders(j.callID("p", j.record.Attempts))),
		profile.ProbeBody(&j.body, j.req.Endpoint, patch, info, nil))
	ignoreClient()
	return resp, turn, fault
}

// acceptAnswer turns a prefill engine's answer into a hand-off, or returns why it cannot. It also stores in the job, the record and the
// lease what the engine has reported. answered is when the head of the answer came. The engine's hold timeout runs from then on. info has
// the names that the prefill request gave the engine for the transfer; nil: this engine needs no names. A hand-off that comes with a fault
// must only be discarded.
func (j *job) acceptAnswer(lease *prefill.Lease, process roster.ProcessID, info *mooncake.BootstrapInfo, answer []byte,
	answered time.Time) (*handoff.Handoff, *failure.Fault) {
	candidate, estimate := lease.Candidate, j.estimatedTokens()
	probed, err := j.srv.readProbe(candidate, info, answer, estimate)
	probed.PromptTokens = cmp.Or(probed.PromptTokens, estimate)
	budget, budgetErr := candidate.Profile.HoldBudget() // how long the hand-off may wait for a rank
	if err = errors.Join(err, budgetErr); err != nil {
		return nil, noHandoffFault(j, candidate, &probed, err)
	}
	notePrefilled(j, &probed, candidate.Profile)
	expires := answered.Add(candidate.Profile.KVHoldTimeout)
	lease.Answered(prefill.Usage{PromptTokens: probed.PromptTokens, CachedTokens: probed.CachedTokens}, expires)
	h := &handoff.Handoff{
		Handoff: mooncake.NewHandoff(probed.KV, answered.Add(budget), expires), Lease: lease,
		Maker:   j.srv.Fleet.MakerOf(process, candidate, probed.EngineID),
		Request: j, ID: j.id, Arrival: j.record.Arrival, Model: j.model, Endpoint: j.req.Endpoint, Body: j.body, Changes: j.changes,
		Prompt: j.promptTokens, Attempt: j.record.Attempts,
	}
	if probed.Coordinates != nil { // the address at which decode engines reach this prefill engine
		j.srv.Fleet.StoreCoordinates(candidate, process, probed.Coordinates)
	}
	if probed.ReusesRequestID {
		h.ReusedRequestID = j.callID("p", j.record.Attempts)
	}
	if fail := prompt.CheckContext(j.model, j.req, j.promptTokens, j.resume.answerTokens); fail != nil { // longer than the model takes
		return h, failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Through, Reason: lifecycle.TooLong}, fail, nil)
	}
	return h, ignoredAnswerFault(lifecycle.Prefill, j.checkPromptCount(j.resume.prefillMustCount, probed.PromptTokens))
}

// readProbe reads a prefill engine's answer, and checks its counts and its hand-off. estimate is the prompt's length in tokens if the
// engine reports none. What could be read is returned even with an error.
func (srv *Server) readProbe(candidate prefill.Candidate, info *mooncake.BootstrapInfo, answer []byte, estimate int) (
	mooncake.ProbeAnswer, error) {
	probed, err := candidate.Profile.ReadProbe(answer, info, srv.Fleet.KnownHost)
	if err == nil {
		err = srv.checkCounts(candidate, &probed, estimate)
	}
	if err == nil && probed.ReusesRequestID && srv.Engines().HandoffsNameRequests(candidate) {
		err = fmt.Errorf("%w: remote_request_id is missing, which decode engines of its version wait for", mooncake.ErrBadHandoff)
	}
	return probed, err
}

// noHandoffFault returns the fault of a prefill call whose answer has no usable hand-off. err says why. If the engine handed nothing off
// because its first token ended the answer, the job remembers this for the next attempt (see noteEmptyAnswer).
func noHandoffFault(j *job, candidate prefill.Candidate, probed *mooncake.ProbeAnswer, err error) *failure.Fault {
	why := lifecycle.Garbled
	switch {
	case errors.Is(err, mooncake.ErrNoHandoff) && probed.FinishReason == "stop": // the first token ended the answer
		why = lifecycle.Empty
		j.noteEmptyAnswer(probed.PromptTokens)
	case errors.Is(err, mooncake.ErrNoHandoff):
		why = lifecycle.Bare
	}
	err = fmt.Errorf("prefill %s answered without a usable hand-off: %w", candidate.ID, err)
	if fault := failure.RefusedInAnswer(lifecycle.Prefill, err); fault != nil { // the answer is a refusal of the request
		return fault
	}
	if why == lifecycle.Garbled { // the profile has the wrong connector, or the hand-off names an unknown host
		j.srv.Log.Error("a prefill engine's answer has no usable hand-off, and is refused", zap.Inline(j), zap.Error(err))
	}
	return failure.UnusableAnswer(lifecycle.Prefill, why, failure.BadGateway("prefill", "it gave no usable hand-off"), err)
}

// checkCounts returns an error if a prefill engine counts more tokens in a prompt than the context of its model has. It drops a wrong count
// of cached tokens. estimate is the length of the prompt if the engine does not report one.
func (srv *Server) checkCounts(c prefill.Candidate, probed *mooncake.ProbeAnswer, estimate int) error {
	if !prompt.PlausibleCounts(probed.PromptTokens, 0, srv.Engines().LongestContext(c.Instance)) {
		return fmt.Errorf("it counts %d tokens in the prompt, more than the context of its model has", probed.PromptTokens)
	}
	if probed.CachedTokens > cmp.Or(probed.PromptTokens, estimate) {
		probed.CachedTokens = -1 // unknown: no more than the prompt can be cached, so the count is wrong
	}
	return nil
}

// notePrefilled stores what the prefill engine reported about the prompt that it computed: its length, its cached tokens and, if profile
// says that a lost answer could go on from them, its token ids. profile is the profile of an engine of the attempt.
func notePrefilled(j *job, probed *mooncake.ProbeAnswer, profile *mooncake.Profile) {
	j.promptTokens = cmp.Or(probed.PromptTokens, j.promptTokens) // after a lost answer, the count includes the answer so far
	j.record.Report(journal.Event{Kind: journal.Prefilled, Tokens: probed.PromptTokens, Cached: probed.CachedTokens,
		Resumed: j.life.Resumed()})
	if j.life.Resumed() { // the fields below are about the client's own prompt, without the answer so far
		return
	}
	j.resume.promptTokens = j.promptTokens
	if profile.Connector != mooncake.SGLang { // an SGLang decode engine reports its cached tokens itself
		j.cachedTokens = probed.CachedTokens
	}
	if needsPromptIDs(j.req, profile) && probed.PromptTokenIDs != nil {
		j.resume.promptIDs = bytes.Clone(probed.PromptTokenIDs)
	}
}

// ignoredAnswerFault returns the fault of an engine that did not continue the answer so far. fail is what checkPromptCount returned; nil:
// the engine did continue it, so there is no fault.
func ignoredAnswerFault(kind lifecycle.CallKind, fail *openai.Error) *failure.Fault {
	if fail == nil {
		return nil
	}
	return failure.NewFault(lifecycle.CallEnd{Call: kind, Progress: lifecycle.Through, Reason: lifecycle.Ignored}, fail, nil)
}

// noteEmptyAnswer notes that the first token which the engine computed ended the answer, so that the engine handed nothing off. Later
// prefill calls ask the engine to ignore the end-of-sequence token. If this call asked for that already, a decode rank may compute the
// prompt without a hand-off. tokens is the length of the prompt; 0: the engine did not report it, and an estimate is used.
func (j *job) noteEmptyAnswer(tokens int) {
	if j.changes.IgnoreEOS {
		j.local.emptyAnswerTokens = cmp.Or(tokens, j.estimatedTokens())
		return
	}
	changes := *j.changes
	changes.IgnoreEOS = true
	j.changes = &changes
}

// run makes the prefill call, also called the probe. It is the body of the goroutine that beginPrefill starts. If the decode engine calls
// back, run waits for the callback. Then it asks one prefill engine after the other, until one takes the prompt.
func (p *concurrentPrefill) run() {
	defer close(p.prefillOver)
	if p.traits.CallsBack {
		if !p.awaitCallback() { // no prefill is needed
			return
		}
		p.moveToSooner() // during the wait for the callback, another prefill engine may have become the one that ends the prefill sooner
	}
	for {
		if tryAnother := p.runProbe(); !tryAnother || !p.moveToAnother() {
			return
		}
	}
}

// runProbe asks a prefill engine for the prefill that runs beside the decode call, and reads its answer. It returns whether another engine
// should be tried.
func (p *concurrentPrefill) runProbe() (tryAnother bool) {
	j, lease := p.job, p.lastLease // not p.lease: the goroutine of the decode call may have given it back
	candidate := lease.Candidate
	var call *probeCall
	p.withLock(func() {
		if p.step(lifecycle.Event{Kind: lifecycle.ProbeDue}, nil) {
			call = newProbeCall(j, lease, p.waitLimit)
			p.prefillCall = call.Call.Call
		}
	})
	if call == nil { // the prefill is not needed any more
		return false
	}
	defer call.untrack()
	p.process = call.process
	lease.MarkSent()
	answer, fault := call.SendAndRead(p.headers, candidate.Profile.EarlyProbe(&p.body, p.changes, p.rendezvous, p.streamed, nil),
		mooncake.MaxProbeAnswer, call.answerBy())
	answered := time.Now()
	hungUp := fault != nil && fault.Reason == lifecycle.HungUp
	// The engine may still write KV into blocks of the decode engine. The end of this call also ends the decode call, which frees the blocks.
	if hungUp && mayIgnoreAbort(p.noEarlyEvents, p.rank.Profile, j.req.Endpoint) {
		select {
		case <-time.After(p.timeout(lifecycle.ByGrace)):
		case <-j.srv.Serving().Done():
		}
	}
	const clientLeft = false // does not matter here: the lifecycle learns it from the event ClientGone
	fault = call.reportEnd(fault, hungUp, clientLeft)
	j.mu.Lock()
	defer j.mu.Unlock()
	p.prefillCall = nil
	p.prefillTook = answered.Sub(call.began)
	switch {
	case fault == nil:
		fault = p.acceptAnswer(answer, answered)
	case fault.Status != 0 && p.pairState().PrefillAborting(): // evenkeel asked the engine to abort, so the engine has not failed
		fault = p.abortedFault()
	}
	if fault == nil {
		return false
	}
	fault.Kept = p.traits.Keeps
	p.lastRefusal = fault // reported if no other engine takes the prompt
	return p.step(lifecycle.Event{Kind: lifecycle.PrefillFailed, Again: len(p.tried) < p.job.srv.Settings().Prefill.Retry.Attempts}, fault)
}

// abortedFault returns the fault of a prefill that its engine has ended because evenkeel told it to.
func (p *concurrentPrefill) abortedFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Prefill, Progress: lifecycle.Sent, Reason: lifecycle.HungUp}
	return failure.NewFault(end, p.job.srv.movedOutError(), failure.ErrMoved)
}

// acceptAnswer reads the prefill engine's answer, which has status 200; at is when it came. If the answer is usable, acceptAnswer reports
// to the lifecycle that the prefill is done. Otherwise it returns the fault. It is called with the job's mutex held.
func (p *concurrentPrefill) acceptAnswer(answer []byte, at time.Time) *failure.Fault {
	srv, lease, candidate := p.job.srv, p.lease, p.lastLease.Candidate
	probed, err := candidate.Profile.ReadEarlyProbe(answer, srv.Fleet.KnownHost)
	// evenkeel asked the engine to abort, so the engine has not failed.
	if errors.Is(err, mooncake.ErrPrefillFailed) && p.pairState().PrefillAborting() {
		return p.abortedFault()
	}
	if err == nil {
		err = srv.checkCounts(candidate, &probed, p.promptEstimate)
	}
	if err != nil {
		err = fmt.Errorf("prefill %s: %w", candidate.ID, err)
		if fault := failure.RefusedInAnswer(lifecycle.Prefill, err); fault != nil {
			return fault
		}
		srv.Log.Warn("a prefill failed after its request had got its decode rank", zap.Inline(p.job), zap.Error(err))
		return failure.UnusableAnswer(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "it did not hand the prompt over"), err)
	}
	if coordinates := probed.Coordinates; coordinates != nil {
		srv.Fleet.StoreCoordinates(candidate, p.process, coordinates)
		// The decode call names the earlier process of the prefill engine, which is gone.
		if coordinates.EngineID != p.rendezvous.Coordinates.EngineID {
			return failure.UnusableAnswer(lifecycle.Prefill, lifecycle.Restarted, failure.BadGateway("prefill", errRestarted.Error()), errRestarted)
		}
	}
	p.probed, p.answeredAt = probed, at
	// The decode engine's answer shows its tokens only at its end, so the board must estimate them until then. It begins with this only
	// now, because the rank computes no tokens before it has the KV.
	if p.noEarlyEvents {
		p.slot.MarkNonStreaming(p.maxTokens)
	}
	lease.Answered(prefill.Usage{PromptTokens: cmp.Or(probed.PromptTokens, p.promptEstimate), CachedTokens: probed.CachedTokens},
		at.Add(candidate.Profile.KVHoldTimeout))
	// If the client has left, PrefillDone may end the decode call, which has gone on only until the end of the prefill.
	var whyDecodeEnds *failure.Fault // nil: PrefillDone does not end the decode call, or finds the reason itself
	if p.pairState().ClientLeft {
		whyDecodeEnds = clientLeftFault()
	}
	p.step(lifecycle.Event{Kind: lifecycle.PrefillDone, Prompt: probed.PromptTokens}, whyDecodeEnds)
	return nil
}

// prefillOnly lets a prefill engine answer a request for the logprobs of its prompt and for at most one token. Only the engine that
// computes the prompt knows these logprobs, and nothing is left to decode. So the request needs no hand-off and no slot.
func (j *job) prefillOnly(lease *prefill.Lease, until lifecycle.Timeout) (*stream, *failure.Fault) {
	candidate, call := lease.Candidate, newProbeCall(j, lease, until)
	defer call.untrack()
	if candidate.Profile.Early() { // a lease of a profile with Early is marked as sent only now
		lease.MarkSent()
	}
	j.client.OnGone(func() { call.Disconnect(upstream.NoticeTimeout) })
	var noKV json.RawMessage // the engine computes the prompt itself
	const noSalt = ""        // its prefix cache has no blocks that must not be used
	body := candidate.Profile.DecodeBody(&j.body, j.req.Endpoint, j.changes, noKV, noSalt, j.req.Stream, nil)
	const isAnswer = true
	answer, fault := call.SendAndRead(j.record.WithTraceHeaders(engine.JSONHeaders(j.callID("p", j.record.Attempts))), body,
		maxBodyBytes(j.srv.Settings(), isAnswer), call.answerBy())
	if fault = call.reportUnpairedEnd(j, fault); fault != nil { // no decode call runs beside this call
		return nil, fault
	}
	filterOptions := j.filterOptions
	filterOptions.Cached, filterOptions.MaxTokens = sse.OwnCached, j.maxAnswerTokens(j.model.MaxLen)
	filterOptions.Context = prompt.ContextLimit(j.srv.Engines().LongestContext(candidate.Instance))
	if !j.req.Stream { // the answer in one piece is handled like a single event that also has the usage
		filterOptions.ContinuousUsage, filterOptions.Unstreamed = true, true
	}
	// The stream needs a rank, which a prefill engine is not. Nothing else reads the traffic and the signs of life of this one.
	insteadOfRank := &roster.Rank{Instance: candidate.Instance, Target: candidate.Target, Profile: candidate.Profile,
		Traffic: &engine.Traffic{}, Signs: engine.NewLiveness()}
	s := newSlotlessStream(j, insteadOfRank, filterOptions)
	if err := processAll(s, answer); err != nil {
		reported := s.upstream.answer.Filter.Failure()
		s.giveBackAll(board.Failed)
		if fault := failure.FaultOfRefusal(reported, lifecycle.Prefill, err); fault != nil { // the engine refused the request
			return nil, fault
		}
		return nil, failure.UnusableAnswer(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "its answer cannot be used"),
			fmt.Errorf("prefill %s: %w", candidate.ID, err))
	}
	usage, _ := s.upstream.answer.Filter.Usage()
	j.promptTokens = usage.Prompt
	j.record.Report(journal.Event{Kind: journal.Prefilled, Tokens: usage.Prompt, Cached: usage.Cached})
	var noHold time.Time // the engine keeps no KV for a hand-off
	lease.Answered(prefill.Usage{PromptTokens: usage.Prompt, CachedTokens: usage.Cached}, noHold)
	s.firstAt = time.Now()
	j.record.Report(journal.Event{Kind: journal.First, At: s.firstAt})
	j.enterPhase(journal.Streaming, "")
	return s, nil
}

// processAll processes an answer that was read to its end: a stream of events, or an answer in one piece.
func processAll(s *stream, answer []byte) error {
	if s.upstream.unstreamed {
		return processWhole(s, answer)
	}
	if !bytes.HasPrefix(bytes.TrimLeft(answer, "\r\n"), []byte("data:")) { // a stream was asked for, and the answer is none
		return errNotJSON
	}
	s.upstream.answer.Reader.Reset(s.upstream.streamLimits(time.Hour)) // the answer is in memory, so the time limit does not matter
	var effects sse.Effects
	s.readAt = time.Now()
	s.upstream.answer.out, effects = s.upstream.answer.Feed(s.upstream.answer.out, answer, s.readAt)
	s.applyEffects(effects)
	return requireComplete(s)
}

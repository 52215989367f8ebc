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

// A probeCall is a call by which a prefill engine computes a prompt.
type probeCall struct {
	upstream.Call
	srv    *Server
	entry  *fleet.TrackedCall // in the list of calls that a drain may end
	made   roster.Generation  // of the call's KV, as it was before the call was written
	salted string             // the salt with which the call was written; empty: none
	began  time.Time
}

// newProbeCall prepares the call, and puts it on the list of calls that a drain or a failure of the
// engine may end until untrack is called.
func newProbeCall(j *job, lease *prefill.Lease, until lifecycle.Timeout) *probeCall {
	srv, candidate := j.srv, lease.Candidate
	limits := &srv.Settings().Limits
	deadlines := engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: timeoutOf(until, srv.Settings(), candidate.Profile),
		Idle: limits.EventTimeout}
	c := &probeCall{srv: srv, made: srv.Engines().GenerationAt(candidate.Instance), began: time.Now()}
	engineCall := upstream.NewCall(srv.Client, candidate.Profile, candidate.Target)
	c.Call = upstream.Call{Call: engineCall, Engine: candidate.Instance, Path: j.req.Endpoint.Path(), Log: srv.Log, Limits: deadlines}
	if j.life.NeedsNewConnections() {
		engineCall.Fresh()
	}
	c.entry = srv.Fleet.TrackProbe(&lease.Candidate, engineCall)
	c.Tracked = c.entry // says whether the call was ended because its engine is down
	return c
}

func (c *probeCall) engineCall() *engine.Call { return c.Call.Call }

// salt: an engine may also decode, or have done so under an earlier config. So it may have pulled
// KV too late, and its prefix cache may have another prompt's KV, which must not be handed over.
func (c *probeCall) salt() string {
	return c.srv.Monitor.Salt(c.Engine)
}

func (c *probeCall) withSalt(changes *mooncake.Patch) *mooncake.Patch {
	c.salted = c.salt()
	if c.salted == "" {
		return changes
	}
	salted := *changes
	salted.ProbeSalt = c.salted
	return &salted
}

// generation: if the engine has got another salt meanwhile, the prompt's prefix may be another
// prompt's. The hand-off then gets a generation that no engine has.
func (c *probeCall) generation() roster.Generation {
	if c.salt() != c.salted {
		return roster.Generation{Key: c.made.Key}
	}
	return c.made
}

func (c *probeCall) untrack() { c.srv.Fleet.Untrack(c.entry) }

func (c *probeCall) answerBy() time.Time { return c.began.Add(c.Limits.FirstByte) }

// reportEnd tells the engine's monitor how the call has ended, and corrects the fault's reason.
// stopped: the proxy ended the call (HungUp), or never sent it.
func (c *probeCall) reportEnd(fault *failure.Fault, stopped, clientLeft bool) *failure.Fault {
	if engineAnswered := fault == nil || fault.Status != 0; engineAnswered {
		c.srv.Monitor.Answered(c.Engine)
		if fault != nil && fault.BlamedEngine != "" { // e.g. that it is paused
			c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
		}
		return fault
	}
	switch {
	case stopped && clientLeft:
		fault.Reason, fault.ClientError, fault.Err = lifecycle.Left, failure.ClientGone, nil
	case stopped && c.entry.MustMove(): // out of service or paused, so the request moves to another engine
		fault.Reason = lifecycle.Moved
		clearBlame(fault, c.srv)
	case fault.Reason == lifecycle.HungUp: // which says nothing about the engine
		clearBlame(fault, c.srv)
	default: // not reached, silent, or broken off
		c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	return fault
}

// clearBlame is for a call that the proxy has ended, or has not sent. The client may send the
// request again.
func clearBlame(fault *failure.Fault, srv *Server) {
	fault.ClientError, fault.Err, fault.BlamedEngine = srv.movedOutError(), failure.ErrMoved, ""
}

// reportUnpairedEnd does what reportEnd does, without a decode call beside it, and records how long
// the engine took.
func (c *probeCall) reportUnpairedEnd(j *job, fault *failure.Fault) *failure.Fault {
	if engineAnswered := fault == nil || fault.Status != 0; engineAnswered {
		j.record.Report(journal.Event{Kind: journal.Probed, Took: time.Since(c.began)})
	}
	// The engine of an Unsent call got nothing.
	stopped := fault != nil && (fault.Reason == lifecycle.HungUp || fault.Progress == lifecycle.Unsent)
	return c.reportEnd(fault, stopped, j.client.Left())
}

// answerPool has buffers for the answers of prefill engines. What is needed later is copied out.
var answerPool = sync.Pool{New: func() any { return new([]byte) }}

// putAnswerBack does not keep the memory of a huge answer.
func putAnswerBack(buffer *[]byte, answer []byte) {
	if *buffer = answer; cap(answer) <= 64<<10 {
		answerPool.Put(buffer)
	}
}

// runProbe asks the engine of the lease to compute the prompt. An engine that has answered holds
// the prompt's KV blocks, so the hand-off is read even if the client has left: it is needed to free
// them. A hand-off that comes with a fault must only be discarded.
func (j *job) runProbe(lease *prefill.Lease, until lifecycle.Timeout) (*handoff.Handoff, *failure.Fault) {
	began := time.Now()
	transfer, fault := transferNames(j, lease.Candidate) // nil: the engine needs none
	if fault != nil {
		return nil, fault
	}
	call := newProbeCall(j, lease, until)
	call.began = began // the time for the names of the transfer counts, too
	defer call.untrack()
	resp, fault := openProbe(j, call, lease, transfer)
	answered := time.Now() // the hold timeout runs from the response headers on
	if resp != nil {
		defer resp.Close()
	}
	var answer []byte
	if fault == nil {
		buffer := answerPool.Get().(*[]byte)
		defer func() { putAnswerBack(buffer, answer) }()
		answer, fault = call.Read(resp, *buffer, mooncake.MaxProbeAnswer, call.answerBy())
	}
	fault = call.reportUnpairedEnd(j, fault)
	if fault != nil {
		return nil, fault
	}
	return j.acceptAnswer(lease, call.generation(), transfer, answer, answered)
}

// transferNames returns an id for the transfer of the KV, and how the decode engine finds the
// prefill engine; nil: the engine needs none. It fails if the engine's bootstrap server does not
// answer.
func transferNames(j *job, candidate prefill.Candidate) (*mooncake.BootstrapInfo, *failure.Fault) {
	info, err := j.srv.Fleet.BootstrapInfo(candidate)
	if err != nil {
		fault := failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Unnamed},
			failure.BadGateway("prefill", "its bootstrap server does not answer"), err)
		if prefill.Unsent(err) {
			fault.Reason = lifecycle.Unreachable // such attempts have a retry budget of their own
		}
		return nil, fault
	}
	if info != nil {
		info.TransferID = j.callID(idOfTransfer, j.record.Attempts)
	}
	return info, nil
}

// openProbe sends the prefill request, and returns once the head of the response has come.
//
// If the client leaves, the call may go on for limits.probe_grace. An engine that finishes a
// prefill pins the KV before it sends its answer, and only the answer names that KV. If the
// connection is closed before, the KV stays pinned until the hold timeout (vllm#50425). The
// hand-off of an answer within the grace is discarded. A call that takes longer is aborted, which
// frees the KV at once, unless the prefill ends in the same instant. The KV budget is not charged
// for this rare case: to charge every aborted probe would keep requests away from engines that are
// empty.
func openProbe(j *job, call *probeCall, lease *prefill.Lease, transfer *mooncake.BootstrapInfo) (resp *engine.Response,
	fault *failure.Fault) {
	var noEarliest time.Time // the call may end as soon as the grace is over
	ignoreClient := endAfterClientLeft(j.client, call.engineCall(), j.srv.Settings().Limits.ProbeGrace, noEarliest)
	headers := j.record.WithTraceHeaders(engine.JSONHeaders(j.callID(idOfPrefill, j.record.Attempts)))
	var newParts [][]byte
	body := lease.Candidate.Profile.ProbeBody(&j.body, j.req.Endpoint, call.withSalt(j.changes), transfer, newParts)
	resp, fault = call.Open(headers, body)
	ignoreClient() // from now on the answer is read even if the client leaves: only it names the KV
	return resp, fault
}

// acceptAnswer turns a prefill engine's answer into a hand-off. answered is when its head came: the
// hold timeout runs from then on. A hand-off that comes with a fault must only be discarded.
func (j *job) acceptAnswer(lease *prefill.Lease, made roster.Generation, transfer *mooncake.BootstrapInfo, answer []byte,
	answered time.Time) (*handoff.Handoff, *failure.Fault) {
	candidate, estimate := lease.Candidate, j.estimatedTokens()
	probed, err := j.srv.readProbe(candidate, transfer, answer, estimate)
	probed.PromptTokens = cmp.Or(probed.PromptTokens, estimate)
	budget, budgetErr := candidate.Profile.HoldBudget() // how long the hand-off may wait for a rank
	if err = errors.Join(err, budgetErr); err != nil {
		return nil, noHandoffFault(j, candidate, &probed, err)
	}
	notePrefilled(j, &probed, candidate.Profile)
	expires := answered.Add(candidate.Profile.KVHoldTimeout)
	lease.Answered(prefill.Usage{PromptTokens: probed.PromptTokens, CachedTokens: probed.CachedTokens}, expires)
	h := &handoff.Handoff{Handoff: mooncake.NewHandoff(probed.KV, answered.Add(budget), expires), Lease: lease,
		Made: made}
	j.srv.Fleet.NoteHandoff(made, probed.EngineID)
	describeRequest(h, j, &probed)
	return h, checkPrefilled(j, probed.PromptTokens)
}

// checkPrefilled: the prompt may be longer than the model takes, or lack the answer so far. The
// engine holds the KV (Through), so the hand-off must then be discarded.
func checkPrefilled(j *job, counted int) *failure.Fault {
	if tooLong := prompt.CheckContext(j.model, j.req, j.promptTokens, j.resume.answerTokens); tooLong != nil {
		return failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Through, Reason: lifecycle.TooLong}, tooLong, nil)
	}
	return ignoredAnswerFault(lifecycle.Prefill, j.checkPromptCount(j.resume.prefillMustCount, counted))
}

// describeRequest writes into a hand-off what is to be known of its request when it is used or
// discarded, maybe in a later attempt.
func describeRequest(h *handoff.Handoff, j *job, probed *mooncake.ProbeAnswer) {
	h.Request, h.ID, h.Arrival, h.Attempt = j, j.id, j.record.Arrival, j.record.Attempts
	h.Model, h.Endpoint, h.Body, h.Changes, h.Prompt = j.model, j.req.Endpoint, j.body, j.changes, j.promptTokens
	if probed.ReusesRequestID { // the decode request must have the id of the prefill request
		h.ReusedRequestID = j.callID(idOfPrefill, j.record.Attempts)
	}
}

// readProbe returns what could be read even with an error. estimate is the prompt's length if the
// engine reports none.
func (srv *Server) readProbe(candidate prefill.Candidate, transfer *mooncake.BootstrapInfo, answer []byte, estimate int) (
	mooncake.ProbeAnswer, error) {
	probed, err := candidate.Profile.ReadProbe(answer, transfer, srv.Fleet.KnownHost)
	if err == nil {
		err = srv.checkCounts(candidate, &probed, estimate)
	}
	// ReusesRequestID: the hand-off does not name the prefill request. In some versions of an engine,
	// it must.
	if err == nil && probed.ReusesRequestID && srv.Engines().HandoffsNameRequests(candidate) {
		err = fmt.Errorf("%w: remote_request_id is missing, which decode engines of its version wait for", mooncake.ErrBadHandoff)
	}
	return probed, err
}

// noHandoffFault returns the fault of a prefill call whose answer has no usable hand-off.
func noHandoffFault(j *job, candidate prefill.Candidate, probed *mooncake.ProbeAnswer, err error) *failure.Fault {
	hasNone := errors.Is(err, mooncake.ErrNoHandoff)
	endedAtFirstToken := probed.FinishReason == "stop"
	why := lifecycle.Garbled // it cannot be read or used
	switch {
	case hasNone && endedAtFirstToken:
		why = lifecycle.Empty
		j.noteEmptyAnswer(probed.PromptTokens)
	case hasNone && endedBeforeAnswer(j, candidate, probed, j.life.Resumed()):
		why = lifecycle.Empty // the engine keeps nothing, and has not failed
	case hasNone:
		why = lifecycle.Bare
	}
	err = fmt.Errorf("prefill %s answered without a usable hand-off: %w", candidate.ID, err)
	if fault := failure.RefusedInAnswer(lifecycle.Prefill, err); fault != nil {
		return fault
	}
	// The profile has the wrong connector, or the hand-off names an unknown host.
	if why == lifecycle.Garbled {
		j.srv.Log.Error("a prefill engine's answer has no usable hand-off, and is refused", zap.Inline(j), zap.Error(err))
	}
	return failure.UnusableAnswer(lifecycle.Prefill, why, failure.BadGateway("prefill", "it gave no usable hand-off"), err)
}

// endedBeforeAnswer says whether another program has had the prefill engine end the request. The
// job then ends as if its client had left, and the client gets an answer without tokens. An answer
// that has begun (resumed) goes on instead.
func endedBeforeAnswer(j *job, candidate prefill.Candidate, probed *mooncake.ProbeAnswer, resumed bool) bool {
	at := roster.Location{Instance: candidate.Instance, Rank: candidate.Target.Rank}
	if !probed.Aborted || resumed || !j.namedAbort.endedAtEngine(j.srv, at) {
		return false
	}
	j.namedAbort.endAsIfClientLeft()
	return true
}

// checkCounts also drops a wrong count of cached tokens.
func (srv *Server) checkCounts(c prefill.Candidate, probed *mooncake.ProbeAnswer, estimate int) error {
	const noAnswerTokens = 0
	if !prompt.PlausibleCounts(probed.PromptTokens, noAnswerTokens, srv.Engines().LongestContext(c.Instance)) {
		return fmt.Errorf("it counts %d tokens in the prompt, more than the context of its model has", probed.PromptTokens)
	}
	if probed.CachedTokens > cmp.Or(probed.PromptTokens, estimate) {
		probed.CachedTokens = -1 // no more than the prompt can be cached
	}
	return nil
}

// notePrefilled stores what the prefill engine reported: the prompt's length, its cached tokens
// and, if a lost answer could go on from them, its token ids.
func notePrefilled(j *job, probed *mooncake.ProbeAnswer, profile *mooncake.Profile) {
	j.promptTokens = cmp.Or(probed.PromptTokens, j.promptTokens) // with the answer so far of a lost one
	j.record.Report(journal.Event{Kind: journal.Prefilled, Tokens: probed.PromptTokens, Cached: probed.CachedTokens,
		Resumed: j.life.Resumed()})
	if j.life.Resumed() { // the fields below are about the client's own prompt
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

func ignoredAnswerFault(kind lifecycle.CallKind, fail *openai.Error) *failure.Fault {
	if fail == nil {
		return nil
	}
	return failure.NewFault(lifecycle.CallEnd{Call: kind, Progress: lifecycle.Through, Reason: lifecycle.Ignored}, fail, nil)
}

// noteEmptyAnswer: the first token ended the answer, so the engine handed nothing off. Later
// prefill calls ask to ignore the end-of-sequence token. If this call did so already, no prefill
// engine will hand the prompt off, so a decode rank may compute it (see whyLocal).
func (j *job) noteEmptyAnswer(tokens int) {
	if j.changes.IgnoreEOS {
		j.local.tokensNotHandedOff = cmp.Or(tokens, j.estimatedTokens()) // above 0: whyLocal may permit it
		return
	}
	changes := *j.changes // hand-offs and prefill calls of earlier attempts may still use the old changes
	changes.IgnoreEOS = true
	j.changes = &changes
}

// run asks one prefill engine after the other, until one takes the prompt. beginPrefill starts its
// goroutine.
func (p *concurrentPrefill) run() {
	defer close(p.prefillOver)
	if p.traits.CallsBack {
		if !p.awaitCallback() { // no prefill is needed
			return
		}
		// During the wait, another engine may have become the one that ends the prefill sooner.
		p.moveToSooner()
	}
	for {
		if tryAnother := p.runProbe(); !tryAnother || !p.moveToAnother() {
			return
		}
	}
}

// runProbe asks one engine, and returns whether another should be tried.
func (p *concurrentPrefill) runProbe() (tryAnother bool) {
	// Not heldLease: the goroutine of the decode call may have given it back.
	j, lease := p.job, p.lastLease
	call := p.newCallIfDue(lease)
	if call == nil {
		return false
	}
	defer call.untrack()
	lease.MarkSent()
	var newParts [][]byte
	body := lease.Candidate.Profile.EarlyProbe(&p.body, call.withSalt(p.changes), p.rendezvous, p.streamed, newParts)
	answer, fault := call.SendAndRead(p.headers, body, mooncake.MaxProbeAnswer, call.answerBy())
	answered := time.Now()
	hungUp := fault != nil && fault.Reason == lifecycle.HungUp
	if hungUp {
		p.awaitEndOfWrites() // the prefill engine may still write KV to the decode engine
	}
	const clientLeft = false // the lifecycle learns it from ClientGone
	fault = call.reportEnd(fault, hungUp, clientLeft)
	if fault == nil { // before the lock: the end of the job takes it, too
		p.endIfAborted(lease.Candidate, answer)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	p.prefillCall = nil
	p.prefillTook = answered.Sub(call.began)
	return p.probeEnded(answer, answered, fault)
}

// endIfAborted ends the job if another program has had the prefill engine end the request.
func (p *concurrentPrefill) endIfAborted(candidate prefill.Candidate, answer []byte) {
	if !bytes.Contains(answer, []byte(`"abort"`)) {
		return
	}
	probed, err := candidate.Profile.ReadEarlyProbe(answer)
	var byEvenkeel, resumed bool
	p.withLock(func() { byEvenkeel, resumed = p.pairState().PrefillAborting(), p.job.life.Resumed() })
	if err != nil && !byEvenkeel {
		p.endedByOther = endedBeforeAnswer(p.job, candidate, &probed, resumed)
	}
}

// probeEnded takes the answer, or reports the fault. The job's mutex is held.
func (p *concurrentPrefill) probeEnded(answer []byte, answered time.Time, fault *failure.Fault) (tryAnother bool) {
	switch {
	case fault == nil:
		fault = p.acceptAnswer(answer, answered)
	// An error status is the engine's answer to evenkeel's abort. A broken connection is no answer, so
	// it stays a failure.
	case fault.Status != 0 && p.pairState().PrefillAborting():
		fault = p.abortedFault()
	}
	if fault == nil {
		return false
	}
	p.lastRefusal = fault // reported if no other engine takes the prompt
	attemptsLeft := len(p.tried) < p.job.srv.Settings().Prefill.Retry.Attempts
	return p.step(lifecycle.Event{Kind: lifecycle.PrefillFailed, Again: attemptsLeft}, fault)
}

func (p *concurrentPrefill) newCallIfDue(lease *prefill.Lease) (call *probeCall) {
	p.withLock(func() {
		if p.step(lifecycle.Event{Kind: lifecycle.ProbeDue}, nil) {
			call = newProbeCall(p.job, lease, p.waitLimit)
			p.prefillCall = call.engineCall()
		}
	})
	return call
}

// awaitEndOfWrites: an engine that may ignore the abort may go on writing KV into the decode
// engine's blocks. The caller's report frees these for other requests, so the engine first gets
// time to notice the end.
func (p *concurrentPrefill) awaitEndOfWrites() {
	if !mayIgnoreAbort(p.noEarlyEvents, p.rank.Profile, p.job.req.Endpoint) {
		return
	}
	select {
	case <-time.After(p.timeout(lifecycle.ByGrace)):
	case <-p.job.srv.Serving().Done():
	}
}

// abortedFault: evenkeel told the engine to end the prefill.
func (p *concurrentPrefill) abortedFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Prefill, Progress: lifecycle.Sent, Reason: lifecycle.HungUp}
	return failure.NewFault(end, p.job.srv.movedOutError(), failure.ErrMoved)
}

// acceptAnswer reads an answer with status 200, which came at the time at. The job's mutex is held.
func (p *concurrentPrefill) acceptAnswer(answer []byte, at time.Time) *failure.Fault {
	candidate := p.lastLease.Candidate
	probed, fault := p.readAnswer(candidate, answer)
	if fault != nil {
		return fault
	}
	p.probed, p.answeredAt = probed, at
	// The decode engine's answer shows its tokens only at its end, so the board estimates them. It
	// begins only now, because the rank computes nothing before it has the KV.
	if p.noEarlyEvents {
		p.slot.MarkNonStreaming(p.maxTokens)
	}
	usage := prefill.Usage{PromptTokens: cmp.Or(probed.PromptTokens, p.promptEstimate), CachedTokens: probed.CachedTokens}
	p.heldLease.Answered(usage, at.Add(candidate.Profile.KVHoldTimeout))
	var whyDecodeEnds *failure.Fault // nil: it goes on, or KV is missing, for which step makes the fault
	if p.pairState().ClientLeft {    // it has gone on only until the end of the prefill
		whyDecodeEnds = clientLeftFault()
	}
	p.step(lifecycle.Event{Kind: lifecycle.PrefillDone, Prompt: probed.PromptTokens}, whyDecodeEnds)
	return nil
}

// readAnswer is called with the job's mutex held.
func (p *concurrentPrefill) readAnswer(candidate prefill.Candidate, answer []byte) (mooncake.ProbeAnswer, *failure.Fault) {
	srv := p.job.srv
	probed, err := candidate.Profile.ReadEarlyProbe(answer)
	// The engine was asked to abort, so it has not failed.
	if errors.Is(err, mooncake.ErrPrefillFailed) && p.pairState().PrefillAborting() || p.endedByOther {
		return probed, p.abortedFault()
	}
	if err == nil {
		err = srv.checkCounts(candidate, &probed, p.promptEstimate)
	}
	if err == nil {
		return probed, nil
	}
	err = fmt.Errorf("prefill %s: %w", candidate.ID, err)
	if fault := failure.RefusedInAnswer(lifecycle.Prefill, err); fault != nil {
		return probed, fault
	}
	if said, ok := errors.AsType[*mooncake.SaidError](err); ok {
		err = failure.MarkUndelivered(err, string(said.Answer))
	}
	srv.Log.Warn("a prefill failed after its request had got its decode rank", zap.Inline(p.job), zap.Error(err))
	noHandover := failure.BadGateway("prefill", "it did not hand the prompt over")
	return probed, failure.UnusableAnswer(lifecycle.Prefill, lifecycle.Garbled, noHandover, err)
}

// prefillOnly lets a prefill engine answer a request for the logprobs of its prompt and for at most
// one token. Only the engine that computes the prompt knows these logprobs, and nothing is left to
// decode.
func (j *job) prefillOnly(lease *prefill.Lease, until lifecycle.Timeout) (*stream, *failure.Fault) {
	call := newProbeCall(j, lease, until)
	defer call.untrack()
	answer, fault := askPrefillOnly(j, lease, call)
	if fault != nil {
		return nil, fault
	}
	s := newPrefillOnlyStream(j, lease.Candidate)
	if err := processAll(s, answer); err != nil {
		reported := s.upstream.answer.Filter.Failure()
		// Failed has no effect: there is no slot to report it with.
		s.giveBackAll(board.Failed)
		if fault := failure.FaultOfRefusal(reported, lifecycle.Prefill, err); fault != nil {
			return nil, fault
		}
		return nil, failure.UnusableAnswer(lifecycle.Prefill, lifecycle.Garbled, failure.BadGateway("prefill", "its answer cannot be used"),
			fmt.Errorf("prefill %s: %w", lease.Candidate.ID, err))
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

func askPrefillOnly(j *job, lease *prefill.Lease, call *probeCall) ([]byte, *failure.Fault) {
	if lease.Candidate.Profile.Early() { // unlike others, it does not count as sent when it is granted
		lease.MarkSent()
	}
	j.client.OnGone(func() { call.Disconnect(upstream.NoticeTimeout) })
	var noKV json.RawMessage // the engine computes the prompt itself
	body := lease.Candidate.Profile.DecodeBody(&j.body, j.req.Endpoint, j.changes, noKV, call.salt(), j.req.Stream, nil)
	const isAnswer = true
	answer, fault := call.SendAndRead(j.record.WithTraceHeaders(engine.JSONHeaders(j.callID(idOfPrefill, j.record.Attempts))), body,
		maxBodyBytes(j.srv.Settings(), isAnswer), call.answerBy())
	return answer, call.reportUnpairedEnd(j, fault)
}

func newPrefillOnlyStream(j *job, candidate prefill.Candidate) *stream {
	options := j.filterOptions
	options.Cached, options.MaxTokens = sse.OwnCached, j.maxAnswerTokens(j.model.MaxLen)
	options.Context = prompt.ContextLimit(j.srv.Engines().LongestContext(candidate.Instance))
	if !j.req.Stream { // the answer in one piece is handled like a single event that also has the usage
		options.ContinuousUsage, options.Unstreamed = true, true
	}
	// The stream needs a rank, which a prefill engine is not. Nothing else reads the traffic and the
	// signs of life of this one.
	insteadOfRank := &roster.Rank{Instance: candidate.Instance, Target: candidate.Target, Profile: candidate.Profile,
		Traffic: &engine.Traffic{}, Signs: engine.NewLiveness()}
	return newSlotlessStream(j, insteadOfRank, options)
}

// processAll processes a stream or an answer in one piece that was read to its end.
func processAll(s *stream, answer []byte) error {
	if s.upstream.unstreamed {
		return processWhole(s, answer)
	}
	// The answer is in memory, so no time limit matters.
	s.upstream.answer.Reader.Reset(s.upstream.streamLimits(time.Hour))
	var effects sse.Effects
	s.readAt = time.Now()
	s.upstream.answer.out, effects = s.upstream.answer.Feed(s.upstream.answer.out, answer, s.readAt)
	s.applyEffects(effects)
	// The engine may have left [DONE] out.
	if s.upstream.answer.Err() == nil && s.upstream.answer.Closed() == sse.Complete {
		s.endWhole()
	}
	return requireComplete(s)
}

package request

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
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

// A probeCall is a call (a probe) by which a prefill engine computes a prompt.
type probeCall struct {
	upstream.Call
	srv    *Server
	entry  *fleet.TrackedCall // the entry of this call in the list of calls that a drain may end
	made   roster.Generation  // of the KV that the call makes, as it was before the call was written
	asRank string             // the engine at this address in the role in which it decodes; its salt is that of the call
	salted string             // the salt with which the call was written; empty: it needed none
	began  time.Time
}

// newProbeCall prepares the call to the prefill engine of a lease. until limits the wait for the answer. It also puts the call on the list
// of calls that the fleet may end: at any time before untrack is called, a drain or a failure of the engine may end this call.
func newProbeCall(j *job, lease *prefill.Lease, until lifecycle.Timeout) *probeCall {
	srv, candidate := j.srv, lease.Candidate
	limits := &srv.Settings().Limits
	deadlines := engine.Deadlines{Connect: limits.ConnectTimeout, FirstByte: timeoutOf(until, srv.Settings(), candidate.Profile),
		Idle: limits.EventTimeout}
	c := &probeCall{srv: srv, made: srv.Engines().GenerationAt(candidate.Instance), began: time.Now()}
	engineCall := upstream.NewCall(srv.Client, candidate.Profile, candidate.Target)
	c.Call = upstream.Call{Call: engineCall, Engine: candidate.Instance, Path: j.req.Endpoint.Path(), Log: srv.Log, Limits: deadlines}
	if j.life.NeedsNewConnections() {
		engineCall.Fresh() // the call opens a new connection
	}
	c.entry = srv.Fleet.TrackProbe(&lease.Candidate, engineCall)
	c.Tracked = c.entry // by its entry, the call finds out whether it was ended because its engine is down
	return c
}

// engineCall returns the call as package engine knows it, by which any goroutine can end it.
func (c *probeCall) engineCall() *engine.Call { return c.Call.Call }

// salt returns the salt of the call's engine; empty: it needs none. An engine may also decode, or have done so under an earlier config. So
// it may have pulled KV too late, and its prefix cache may have another prompt's KV, which must not be handed over.
func (c *probeCall) salt() string {
	if c.asRank == "" {
		c.asRank = roster.Decode + strings.TrimPrefix(c.Engine, roster.Prefill)
	}
	return c.srv.Monitor.Salt(c.asRank)
}

// withSalt returns the changes with the salt of the call's engine.
func (c *probeCall) withSalt(changes *mooncake.Patch) *mooncake.Patch {
	c.salted = c.salt()
	if c.salted == "" {
		return changes
	}
	salted := *changes
	salted.ProbeSalt = c.salted
	return &salted
}

// generation returns that of the call's KV. If the engine has got another salt meanwhile, the prompt's prefix may be another prompt's, so
// the hand-off gets a generation that no engine has.
func (c *probeCall) generation() roster.Generation {
	if c.salt() != c.salted {
		return roster.Generation{Key: c.made.Key}
	}
	return c.made
}

// untrack takes the call off the list of calls that the fleet may end.
func (c *probeCall) untrack() { c.srv.Fleet.Untrack(c.entry) }

// answerBy returns the time by which the engine must have answered.
func (c *probeCall) answerBy() time.Time { return c.began.Add(c.Limits.FirstByte) }

// reportEnd tells the engine's monitor how the call has ended, and returns the fault with its reason set. A nil fault means that the engine
// has answered. stopped says that the proxy ended the call (then the fault came with the reason HungUp), or never sent it. clientLeft says
// that the client had left. The reason of such a call becomes Left if the client had left, and else Moved if its engine went out of service
// or is paused.
func (c *probeCall) reportEnd(fault *failure.Fault, stopped, clientLeft bool) *failure.Fault {
	if engineAnswered := fault == nil || fault.Status != 0; engineAnswered {
		c.srv.Monitor.Answered(c.Engine)
		if fault != nil && fault.BlamedEngine != "" { // the answer says something about the engine, for example that it is paused
			c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
		}
		return fault
	}
	switch {
	case stopped && clientLeft: // the lifecycle blames no engine for the reason Left
		fault.Reason, fault.ClientError, fault.Err = lifecycle.Left, failure.ClientGone, nil
	case stopped && c.entry.MustMove(): // the engine is taken out of service or paused, so the request moves to another one
		fault.Reason = lifecycle.Moved
		clearBlame(fault, c.srv)
	case fault.Reason == lifecycle.HungUp: // the proxy ended the call for another reason, which says nothing about the engine
		clearBlame(fault, c.srv)
	default: // the engine could not be reached, was silent, or broke the call off
		c.srv.Monitor.ReportFailure(fault.BlamedEngine, fault.Err)
	}
	return fault
}

// clearBlame changes the fault of a call that the proxy itself has ended, or has not sent: no engine is to blame. The error for the client
// says that the request may be sent again.
func clearBlame(fault *failure.Fault, srv *Server) {
	fault.ClientError, fault.Err, fault.BlamedEngine = srv.movedOutError(), failure.ErrMoved, ""
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

// putAnswerBack puts the memory of an answer, which was read into the buffer, back into answerPool, unless one huge answer has made it
// large.
func putAnswerBack(buffer *[]byte, answer []byte) {
	if *buffer = answer; cap(answer) <= 64<<10 {
		answerPool.Put(buffer)
	}
}

// runProbe asks the engine of the lease to compute the prompt, and returns the hand-off from the engine's answer. An engine that has
// answered holds the prompt's KV blocks. So the hand-off is read even if the client has left: it is needed to free the blocks. A hand-off
// that is returned together with a fault must only be discarded.
func (j *job) runProbe(lease *prefill.Lease, until lifecycle.Timeout) (*handoff.Handoff, *failure.Fault) {
	began := time.Now()
	transfer, fault := transferNames(j, lease.Candidate) // for the transfer of the KV; nil: the engine needs none
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
	fault = call.reportUnpairedEnd(j, fault) // to the monitor and the record; unpaired: no decode call runs beside this call
	if fault != nil {
		return nil, fault
	}
	return j.acceptAnswer(lease, call.generation(), transfer, answer, answered)
}

// transferNames returns the names that a prefill request must give the engine for the transfer of the KV: an id of the transfer, and how
// the decode engine finds the prefill engine. nil: the engine needs none. It fails if the engine's bootstrap server, which knows the name
// of the engine, does not answer (Unnamed), or cannot even be connected to (Unreachable).
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

// openProbe sends the prefill request of runProbe, and returns the engine's response once its head has come. transfer has the names that
// the request gives the engine for the transfer of the KV; nil: none.
//
// If the client leaves, the call may go on for limits.probe_grace. An engine that finishes a prefill pins the KV before it sends its
// answer, and only the answer names that KV. If the connection is closed before, the KV stays pinned until the hold timeout (vllm#50425).
// If the answer comes within the grace, the hand-off is discarded. A call that takes longer is aborted, which frees the KV at once, unless
// the prefill ends in the same instant. The engine's KV budget is not charged for this rare case: to charge for every aborted probe would
// keep requests away from engines that are empty.
func openProbe(j *job, call *probeCall, lease *prefill.Lease, transfer *mooncake.BootstrapInfo) (resp *engine.Response,
	fault *failure.Fault) {
	var noEarliest time.Time // the call may end as soon as the grace is over
	ignoreClient := endAfterClientLeft(j.client, call.engineCall(), j.srv.Settings().Limits.ProbeGrace, noEarliest)
	headers := j.record.WithTraceHeaders(engine.JSONHeaders(j.callID(idOfPrefill, j.record.Attempts)))
	var newParts [][]byte // ProbeBody appends the parts of the body to it
	body := lease.Candidate.Profile.ProbeBody(&j.body, j.req.Endpoint, call.withSalt(j.changes), transfer, newParts)
	resp, fault = call.Open(headers, body)
	ignoreClient() // from now on the answer is read even if the client leaves, because only the answer names the KV
	return resp, fault
}

// acceptAnswer turns a prefill engine's answer into a hand-off, or returns why it cannot. It also stores in the job, the record and the
// lease what the engine has reported. answered is when the head of the answer came. The engine's hold timeout runs from then on. transfer
// has the names that the prefill request gave the engine for the transfer; nil: this engine needs no names. A hand-off that comes with a
// fault must only be discarded.
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

// checkPrefilled returns the fault of a prefill whose engine has handed the KV over, but whose prompt is longer than the model takes, or
// lacks the answer so far of a resumed request. counted is the number of prompt tokens that the engine has counted. The engine holds the KV
// (Through), so the hand-off must be discarded after a fault.
func checkPrefilled(j *job, counted int) *failure.Fault {
	if tooLong := prompt.CheckContext(j.model, j.req, j.promptTokens, j.resume.answerTokens); tooLong != nil {
		return failure.NewFault(lifecycle.CallEnd{Progress: lifecycle.Through, Reason: lifecycle.TooLong}, tooLong, nil)
	}
	return ignoredAnswerFault(lifecycle.Prefill, j.checkPromptCount(j.resume.prefillMustCount, counted))
}

// describeRequest writes into a hand-off what is to be known of its request when the hand-off is used or discarded, maybe in a later
// attempt: its ids, its body with changes, its model, and the length of its prompt.
func describeRequest(h *handoff.Handoff, j *job, probed *mooncake.ProbeAnswer) {
	h.Request, h.ID, h.Arrival, h.Attempt = j, j.id, j.record.Arrival, j.record.Attempts
	h.Model, h.Endpoint, h.Body, h.Changes, h.Prompt = j.model, j.req.Endpoint, j.body, j.changes, j.promptTokens
	if probed.ReusesRequestID { // the decode request must have the id of the prefill request
		h.ReusedRequestID = j.callID(idOfPrefill, j.record.Attempts)
	}
}

// readProbe reads a prefill engine's answer, and checks its counts and its hand-off. estimate is the prompt's length in tokens if the
// engine reports none. What could be read is returned even with an error.
func (srv *Server) readProbe(candidate prefill.Candidate, transfer *mooncake.BootstrapInfo, answer []byte, estimate int) (
	mooncake.ProbeAnswer, error) {
	probed, err := candidate.Profile.ReadProbe(answer, transfer, srv.Fleet.KnownHost)
	if err == nil {
		err = srv.checkCounts(candidate, &probed, estimate)
	}
	// ReusesRequestID: the hand-off does not name the prefill request, so the decode request must have its id. In some versions of an
	// engine, the hand-off must name it.
	if err == nil && probed.ReusesRequestID && srv.Engines().HandoffsNameRequests(candidate) {
		err = fmt.Errorf("%w: remote_request_id is missing, which decode engines of its version wait for", mooncake.ErrBadHandoff)
	}
	return probed, err
}

// noHandoffFault returns the fault of a prefill call whose answer has no usable hand-off. err says why. If the engine handed nothing off
// because its first token ended the answer, the job remembers this for the next attempt (see noteEmptyAnswer).
func noHandoffFault(j *job, candidate prefill.Candidate, probed *mooncake.ProbeAnswer, err error) *failure.Fault {
	hasNone := errors.Is(err, mooncake.ErrNoHandoff)
	endedAtFirstToken := probed.FinishReason == "stop"
	why := lifecycle.Garbled // the answer or its hand-off cannot be read or used
	switch {
	case hasNone && endedAtFirstToken:
		why = lifecycle.Empty
		j.noteEmptyAnswer(probed.PromptTokens)
	case hasNone && endedBeforeAnswer(j, candidate, probed, j.life.Resumed()):
		why = lifecycle.Empty // the engine keeps nothing, and has not failed
	case hasNone: // the engine should have handed the KV off
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

// endedBeforeAnswer says whether another program has had the prefill engine end the request (endedAtEngine). If so, the job ends as if its
// client had left, and the client gets an answer without tokens. An answer that has begun (resumed) goes on instead.
func endedBeforeAnswer(j *job, candidate prefill.Candidate, probed *mooncake.ProbeAnswer, resumed bool) bool {
	at := roster.Location{Instance: candidate.Instance, Rank: candidate.Target.Rank}
	if !probed.Aborted || resumed || !j.namedAbort.endedAtEngine(j.srv, at) {
		return false
	}
	j.namedAbort.endAsIfClientLeft()
	return true
}

// checkCounts returns an error if a prefill engine counts more tokens in a prompt than the context of its model has. It drops a wrong count
// of cached tokens. estimate is the length of the prompt if the engine does not report one.
func (srv *Server) checkCounts(c prefill.Candidate, probed *mooncake.ProbeAnswer, estimate int) error {
	const noAnswerTokens = 0
	if !prompt.PlausibleCounts(probed.PromptTokens, noAnswerTokens, srv.Engines().LongestContext(c.Instance)) {
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
// prefill calls ask the engine to ignore the end-of-sequence token. If this call asked for that already, no prefill engine will hand the
// prompt off, so a decode rank may compute it (see whyLocal). tokens is the length of the prompt; 0: the engine did not report it, and an
// estimate is used.
func (j *job) noteEmptyAnswer(tokens int) {
	if j.changes.IgnoreEOS {
		j.local.tokensNotHandedOff = cmp.Or(tokens, j.estimatedTokens()) // above 0: whyLocal permits local computing
		return
	}
	changes := *j.changes // a copy, because hand-offs and prefill calls of earlier attempts may still use the old changes
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
	j, lease := p.job, p.lastLease // not heldLease: the goroutine of the decode call may have given it back
	call := p.newCallIfDue(lease)
	if call == nil { // the prefill is not needed any more
		return false
	}
	defer call.untrack()
	lease.MarkSent()
	var newParts [][]byte // EarlyProbe appends the parts of the body to it
	body := lease.Candidate.Profile.EarlyProbe(&p.body, call.withSalt(p.changes), p.rendezvous, p.streamed, newParts)
	answer, fault := call.SendAndRead(p.headers, body, mooncake.MaxProbeAnswer, call.answerBy())
	answered := time.Now()
	hungUp := fault != nil && fault.Reason == lifecycle.HungUp // the proxy has ended the call
	if hungUp {
		p.awaitEndOfWrites() // the prefill engine may still write KV to the decode engine
	}
	const clientLeft = false // does not matter here: the lifecycle learns it from the event ClientGone
	fault = call.reportEnd(fault, hungUp, clientLeft)
	if fault == nil { // before the lock is taken, because the end of the job takes it, too
		p.endIfAborted(lease.Candidate, answer)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	p.prefillCall = nil
	p.prefillTook = answered.Sub(call.began)
	return p.probeEnded(answer, answered, fault)
}

// endIfAborted ends the job if another program has had the prefill engine end the request. The engine may also have ended it because
// evenkeel told it to.
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

// probeEnded handles the end of a prefill call: it takes the answer, which has come at the time answered, or reports the fault. It returns
// whether another engine should be tried. It is called with the job's mutex held.
func (p *concurrentPrefill) probeEnded(answer []byte, answered time.Time, fault *failure.Fault) (tryAnother bool) {
	switch {
	case fault == nil:
		fault = p.acceptAnswer(answer, answered)
	// evenkeel asked the engine to abort the prefill. An error status is its answer to that, so the engine has not failed. A broken
	// connection is no answer, so it stays a failure.
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

// newCallIfDue prepares the prefill call to the engine of the lease. From then on, the lifecycle can end the call. newCallIfDue returns nil
// if the prefill is not needed any more.
func (p *concurrentPrefill) newCallIfDue(lease *prefill.Lease) (call *probeCall) {
	p.withLock(func() {
		if p.step(lifecycle.Event{Kind: lifecycle.ProbeDue}, nil) { // the prefill is still needed
			call = newProbeCall(p.job, lease, p.waitLimit)
			p.prefillCall = call.engineCall()
		}
	})
	return call
}

// awaitEndOfWrites is called after the proxy has ended the prefill call. An engine that may ignore the abort may go on writing KV into
// blocks of the decode engine. The caller reports the end of this call, which also ends the decode call, and so frees the blocks for other
// requests. So awaitEndOfWrites gives such an engine the time to notice the end.
func (p *concurrentPrefill) awaitEndOfWrites() {
	if !mayIgnoreAbort(p.noEarlyEvents, p.rank.Profile, p.job.req.Endpoint) {
		return
	}
	select {
	case <-time.After(p.timeout(lifecycle.ByGrace)):
	case <-p.job.srv.Serving().Done():
	}
}

// abortedFault returns the fault of a prefill that its engine has ended because evenkeel told it to.
func (p *concurrentPrefill) abortedFault() *failure.Fault {
	end := lifecycle.CallEnd{Call: lifecycle.Prefill, Progress: lifecycle.Sent, Reason: lifecycle.HungUp}
	return failure.NewFault(end, p.job.srv.movedOutError(), failure.ErrMoved)
}

// acceptAnswer reads the prefill engine's answer, which has status 200; at is when it came. If the answer is usable, acceptAnswer reports
// to the lifecycle that the prefill is done. Otherwise it returns the fault. It is called with the job's mutex held.
func (p *concurrentPrefill) acceptAnswer(answer []byte, at time.Time) *failure.Fault {
	candidate := p.lastLease.Candidate
	probed, fault := p.readAnswer(candidate, answer)
	if fault != nil {
		return fault
	}
	p.probed, p.answeredAt = probed, at
	// The decode engine's answer shows its tokens only at its end, so the board must estimate them until then. It begins with this only
	// now, because the rank computes no tokens before it has the KV.
	if p.noEarlyEvents {
		p.slot.MarkNonStreaming(p.maxTokens)
	}
	usage := prefill.Usage{PromptTokens: cmp.Or(probed.PromptTokens, p.promptEstimate), CachedTokens: probed.CachedTokens}
	p.heldLease.Answered(usage, at.Add(candidate.Profile.KVHoldTimeout))
	var whyDecodeEnds *failure.Fault // nil: PrefillDone does not end the decode call, or KV is missing, for which step makes the fault
	if p.pairState().ClientLeft {    // the decode call has gone on only until the end of the prefill
		whyDecodeEnds = clientLeftFault()
	}
	p.step(lifecycle.Event{Kind: lifecycle.PrefillDone, Prompt: probed.PromptTokens}, whyDecodeEnds)
	return nil
}

// readAnswer reads the answer of the candidate's engine, and returns a fault if the answer is a refusal, or is not usable. It is called
// with the job's mutex held.
func (p *concurrentPrefill) readAnswer(candidate prefill.Candidate, answer []byte) (mooncake.ProbeAnswer, *failure.Fault) {
	srv := p.job.srv
	probed, err := candidate.Profile.ReadEarlyProbe(answer)
	// evenkeel, or another program, asked the engine to abort, so the engine has not failed.
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

// prefillOnly lets a prefill engine answer a request for the logprobs of its prompt and for at most one token. Only the engine that
// computes the prompt knows these logprobs, and nothing is left to decode. So the request needs no hand-off and no slot. until limits the
// wait for the answer. The returned stream has the whole answer.
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
		// This gives back the buffers. Failed has no effect, because it would be reported with a slot, and there is none.
		s.giveBackAll(board.Failed)
		if fault := failure.FaultOfRefusal(reported, lifecycle.Prefill, err); fault != nil { // the engine refused the request
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

// askPrefillOnly sends the request of prefillOnly to the engine of the lease, by this call, and returns the whole answer. If the client
// leaves meanwhile, the call ends.
func askPrefillOnly(j *job, lease *prefill.Lease, call *probeCall) ([]byte, *failure.Fault) {
	if lease.Candidate.Profile.Early() { // such a lease does not count as sent when it is granted, as all others do
		lease.MarkSent()
	}
	j.client.OnGone(func() { call.Disconnect(upstream.NoticeTimeout) })
	var noKV json.RawMessage // the engine computes the prompt itself
	body := lease.Candidate.Profile.DecodeBody(&j.body, j.req.Endpoint, j.changes, noKV, call.salt(), j.req.Stream, nil)
	const isAnswer = true
	answer, fault := call.SendAndRead(j.record.WithTraceHeaders(engine.JSONHeaders(j.callID(idOfPrefill, j.record.Attempts))), body,
		maxBodyBytes(j.srv.Settings(), isAnswer), call.answerBy())
	return answer, call.reportUnpairedEnd(j, fault) // unpaired: no decode call runs beside this call
}

// newPrefillOnlyStream prepares the stream of an answer that a prefill engine gives.
func newPrefillOnlyStream(j *job, candidate prefill.Candidate) *stream {
	options := j.filterOptions
	options.Cached, options.MaxTokens = sse.OwnCached, j.maxAnswerTokens(j.model.MaxLen)
	options.Context = prompt.ContextLimit(j.srv.Engines().LongestContext(candidate.Instance))
	if !j.req.Stream { // the answer in one piece is handled like a single event that also has the usage
		options.ContinuousUsage, options.Unstreamed = true, true
	}
	// The stream needs a rank, which a prefill engine is not. Nothing else reads the traffic and the signs of life of this one.
	insteadOfRank := &roster.Rank{Instance: candidate.Instance, Target: candidate.Target, Profile: candidate.Profile,
		Traffic: &engine.Traffic{}, Signs: engine.NewLiveness()}
	return newSlotlessStream(j, insteadOfRank, options)
}

// processAll processes an answer that was read to its end: a stream of events, or an answer in one piece.
func processAll(s *stream, answer []byte) error {
	if s.upstream.unstreamed {
		return processWhole(s, answer)
	}
	s.upstream.answer.Reader.Reset(s.upstream.streamLimits(time.Hour)) // the answer is in memory, so the time limit does not matter
	var effects sse.Effects
	s.readAt = time.Now()
	s.upstream.answer.out, effects = s.upstream.answer.Feed(s.upstream.answer.out, answer, s.readAt)
	s.applyEffects(effects)
	if s.upstream.answer.Err() == nil && s.upstream.answer.Closed() == sse.Complete { // the engine has left [DONE] out
		s.endWhole()
	}
	return requireComplete(s)
}

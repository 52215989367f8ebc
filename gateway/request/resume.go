package request

import (
	"cmp"
	"errors"
	"net/http"

	"go.uber.org/zap"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

var errIgnoredResume = errors.New("the engine did not go on with the answer so far; set the chat_resume that check --probe names in its " +
	"profile, or upgrade the engine")

// continueAnswer continues an answer that its engine has lost. The request is served again: the part of the answer that the client has is
// appended to the prompt, and the client gets the new part as if one engine had sent the whole answer. If only the end of the answer is
// missing, evenkeel writes it. If the answer cannot go on, it is broken off with an error (GivenUp).
func (s *stream) continueAnswer() {
	j, fault, moved := s.job, s.upstream.fault, s.upstream.endedByDrain() // fault: why the answer was lost
	// A fault of the KV says that the answer so far was computed from broken KV, so that it must not be continued.
	var kvFault *failure.Fault
	if !j.client.Left() {
		kvFault = s.upstream.prefillCall.confirmKV(s.upstream.answer.Filter.Prompt(), j.client.Gone())
	}
	if kvFault != nil {
		s.upstream.fault = kvFault // the client gets its error
	}
	if kvFault != nil || j.client.Left() { // the lifecycle breaks the answer off
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
		return
	}
	cause := "lost in the middle: " + fault.ClientError.Code
	j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: cause, On: s.upstream.failedEngine(), Answer: fault.ClientError})
	tier := s.planContinuation()   // how the answer goes on; it is a label of the metrics
	var attemptError *openai.Error // how the next attempt failed; nil: it did not fail, or there is none
	switch tier {
	case lifecycle.Broken: // the answer cannot go on, so the lifecycle breaks it off
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
	case lifecycle.Concluding: // planContinuation has written the end into the stream, so the answer is whole
	default: // another engine continues the answer
		j.record.Report(journal.Event{Kind: journal.Retried})
		var next *stream
		if next, attemptError = j.serve(nil); attemptError == nil { // nil: no other proxy may continue the answer
			s.takeOver(next)
		} else { // serve has brought the lifecycle to its end, so endLoss only has to write the end of the answer
			tier = lifecycle.Broken
		}
	}
	j.srv.metrics.countLoss(fault, moved, tier)
	endLoss(s, fault, tier, attemptError)
}

// countLoss counts a lost answer by its tier, which says how it went on (lifecycle.Broken: not at all). The counter depends on why the
// engine lost it: it ran out of KV memory, a drain ended the call (moved), or it failed.
func (m *metrics) countLoss(fault *failure.Fault, moved bool, tier lifecycle.Tier) {
	counter := m.losses
	switch {
	case fault.Reason == lifecycle.Preempted:
		counter = m.recomputes
	case moved:
		counter = m.movedAnswers
	}
	counter.WithLabelValues(tier).Inc()
}

// endLoss logs whether a lost answer goes on. If the attempt to continue it has failed, it also ends the answer that the client reads, with
// an error. fault is why the answer was lost. tier says how it goes on; lifecycle.Broken: not at all. attemptError is how the attempt to
// continue it failed; nil: it did not fail, or no attempt was made.
func endLoss(s *stream, fault *failure.Fault, tier lifecycle.Tier, attemptError *openai.Error) {
	j := s.job
	switch {
	case tier != lifecycle.Broken: // the answer goes on, or evenkeel has written its end
		j.srv.Log.Info("an answer goes on after its decode engine lost it", zap.Inline(j), zap.String("lost", fault.ClientError.Code),
			zap.String("tier", tier),
			zap.Bool("token_exact", tier != lifecycle.ByText), zap.Int("tokens", s.tokens()), zap.String("engine", s.upstream.rank.Target.ID))
	case attemptError == nil: // no attempt was made, and the lifecycle has ended the stream
	case attemptError.Status == journal.StatusClientClosed:
		s.finishAnswer(failure.ClientGone)
	default: // the client gets the error by which the answer was lost, as if no attempt to continue it had been made
		j.srv.Log.Warn("an answer could not go on after its decode engine lost it", zap.Inline(j), zap.String("cause", attemptError.Message))
		s.finishAnswer(fault.ClientError)
	}
}

// planContinuation decides how the lost answer goes on, and returns this as a tier. For lifecycle.Broken, the answer cannot go on. For
// lifecycle.Concluding, no token is left to compute, and planContinuation has written the end of the answer into the stream. For all other
// tiers, it has prepared the job for the attempt that continues the answer.
func (s *stream) planContinuation() lifecycle.Tier {
	joinTranscript(s) // earlierTranscript then has all of the answer so far, which lostAnswer reads
	loss := lostAnswer(s)
	plan := loss.Plan()
	switch plan.Tier {
	case lifecycle.Broken: // nothing is to be prepared
	case lifecycle.Concluding:
		writeConclusion(s, &plan, loss.Finished)
	default:
		applyPlan(s, &plan)
	}
	return plan.Tier
}

// writeConclusion writes the end of a lost answer that needs no more tokens. engineHasFinished says that the engine has sent a
// finish_reason, so that only the end and maybe the usage are missing. Otherwise the answer has all tokens that it may have, so its
// finish_reason is length.
func writeConclusion(s *stream, plan *lifecycle.Plan, engineHasFinished bool) {
	switch {
	case s.upstream.answer.FinalUsageCame(): // the usage that evenkeel would write knows less, and would be the client's second one
		s.endWhole()
		return
	case engineHasFinished:
		const finishSent = ""
		s.writeEnding(plan.AnswerSoFar.Head, finishSent)
		return
	}
	applyPlan(s, plan) // sets the number of tokens, and what the filter must know of earlier parts
	s.resetForEnd(s.job.resume.answerTokens)
	s.writeEnding(plan.AnswerSoFar.Head, "length")
}

// joinTranscript appends the part of the answer that the lost call has sent to the parts of earlier calls.
func joinTranscript(s *stream) {
	if s.earlierTranscript == nil {
		s.earlierTranscript = &sse.Transcript{}
	}
	if s.earlierTranscript.Head.ID == nil { // all parts of the answer have the head of the first part
		s.earlierTranscript.Head, s.earlierTranscript.Prompt = s.upstream.answer.Transcript.Head, s.upstream.answer.Transcript.Prompt
	}
	s.earlierTranscript.Join(&s.upstream.answer.Transcript)
}

// applyPlan makes the job's next attempt continue the answer as the plan says. Engines get the answer so far as a part of the prompt. By
// the number of prompt tokens that they report, evenkeel checks that they have not ignored it.
func applyPlan(s *stream, plan *lifecycle.Plan) {
	j, resume := s.job, &s.job.resume
	if plan.ClientHasNothing { // the answer is assembled from its start
		s.upstream.answer.Assembler = newAssembler(j)
	}
	// The part of the answer that the client has. The filter makes the new events go on after it, with the same id, and adds its
	// counts.
	s.earlierTranscript = plan.AnswerSoFar
	j.filterOptions.Continuation = plan.Continuation
	resume.answerTokens = plan.AnswerSoFar.Completed // its number of tokens
	// How many tokens the new prompt has. Each engine must count as many prompt tokens as the plan says; 0: it may count any number.
	j.promptTokens = resume.promptTokens + resume.answerTokens
	resume.prefillMustCount = plan.PrefillCount
	resume.decodeMustCount = plan.DecodeCount
	if plan.Tier == lifecycle.ByText { // a text may be split into other tokens than those that were generated
		j.record.Inexact = true
	}
	// What engines get instead of parts of the body, now with the part of the answer that goes into the prompt.
	changes := *j.changes // a copy, because prefill calls of earlier attempts may still read the old changes
	changes.Resume = plan.Resume
	j.changes = &changes
}

// lostAnswer returns the facts about a lost answer that decide how it goes on (see Loss.Plan). Facts that only the body of the request
// shows are left out if the body is not in memory any more. resume.retention says how long it is kept: until the end of the answer
// (KeepAll), until the first token (KeepStart), or only until the answer begins (KeepNothing). When the body is dropped, retention becomes
// KeepNothing.
func lostAnswer(s *stream) lifecycle.Loss {
	j, resume := s.job, &s.job.resume
	mayBeServedAgain := j.life.Losses() < maxRecomputes(s.upstream.rank.Profile) && j.req.Endpoint.CanResume()
	loss := lifecycle.Loss{
		// What has come of the answer, and whether another attempt is allowed and possible.
		AnswerSoFar: s.earlierTranscript, Finished: s.upstream.answer.Filter.Finished(), Retention: resume.retention, Streamed: j.req.Stream,
		MayResume: mayBeServedAgain,
		// What the prompt of such an attempt is made of, and how many tokens may follow.
		Method: resume.method, PromptIDs: resume.promptIDs, PromptTokens: resume.promptTokens, MaxAnswerTokens: j.maxWholeAnswer(),
		TokenLimit: j.req.Limit, TokenLimitKey: cmp.Or(j.req.MaxTokensKey, "max_tokens"),
	}
	if resume.retention == lifecycle.KeepAll { // the answer may go on after the part that the client has, if the request allows it
		loss.MayExtendPrompt = !openai.CannotResume(&j.body, j.req.Endpoint)
		loss.HasTools = openai.HasTools(&j.body)
		if resume.method == mooncake.ResumeText { // the next prompt is the text of this prompt and of the answer
			loss.PromptText = textBeforeAnswer(j)
		}
	}
	if resume.retention != lifecycle.KeepNothing { // the answer may at least begin anew
		loss.TokensVisible = j.tokensVisible()
	}
	return loss
}

// textBeforeAnswer returns the text, as a JSON string, to which the text of the answer so far is appended to make the prompt of the next
// attempt. With echo, it is empty, because the answer itself begins with the text of the prompt.
func textBeforeAnswer(j *job) []byte {
	text := j.parts().Text()
	if openai.Echoes(&j.body) {
		return []byte(`""`)
	}
	return text
}

// maxWholeAnswer returns how many tokens the answer may have, with the part that the client has already.
func (j *job) maxWholeAnswer() int {
	maxTokens := prompt.ContextLimit(j.model.MaxLen)
	if j.model.MaxLen > 0 { // the context length is known, and the prompt takes a part of it
		maxTokens -= j.resume.promptTokens
	}
	if j.req.Limit > 0 { // the client's own limit
		maxTokens = min(maxTokens, j.req.Limit)
	}
	return maxTokens
}

// takeOver lets this stream go on with the call of next. next is the stream of the attempt that continues the answer, and has read its
// first events already. This stream keeps what belongs to the client's whole answer: its assembler, and the times of its first event and
// token. It takes over the call, with slot and buffers, and how far the call has come. From now on s gives these back, and next must not.
func (s *stream) takeOver(next *stream) {
	assembler := s.upstream.answer.Assembler // saved, because detach empties the buffers; nil: the client gets the events
	s.detach()                               // gives back the connection and the buffers of the lost call; its slot is free already
	s.upstream = next.upstream
	s.upstream.answer.Assembler = assembler
	s.state, s.endError = next.state, next.endError
	next.state = givenBack                      // so that next gives nothing back
	s.earlierTokens = s.job.resume.answerTokens // the filter of next counts only the tokens of its own call
	if !next.lastTokenAt.IsZero() {             // zero: next has no token yet
		s.lastTokenAt = next.lastTokenAt
	}
	if assembler != nil { // the client gets the answer in one piece; otherwise it gets the events as they are
		assembleFirstEvents(s)
	}
}

// assembleFirstEvents adds the first events of the continuing call to the answer in one piece. They were read without an assembler, and so
// stand among the bytes for the client. If they cannot be added, the answer ends with an error.
func assembleFirstEvents(s *stream) {
	for e := range sse.Events(s.upstream.answer.out) {
		if e.Kind == sse.KindComment {
			continue
		}
		if err := s.upstream.answer.Assembler.Add(e.Raw); err != nil {
			cannotJoin := failure.StreamBroke("upstream_broken", err)
			if s.state == ended { // the rest of the answer came at once; endFailed below then does nothing, so the error is set here
				s.endError = cmp.Or(s.endError, cannotJoin)
			}
			s.endFailed(lifecycle.Unusable, cannotJoin, err)
			break
		}
	}
	s.upstream.answer.out = s.upstream.answer.out[:0]
}

// resetForEnd prepares the filter for an end that evenkeel writes itself. tokens is how many tokens the answer has. They all count as
// tokens of earlier calls, because the filter, which counts those of the present call, begins again at 0.
func (s *stream) resetForEnd(tokens int) {
	filterOptions := s.job.filterOptions
	filterOptions.Cached = s.job.cachedTokens
	s.earlierTokens = tokens
	s.upstream.answer.Filter.Reset(filterOptions)
	const keepText = false // nothing continues the answer any more
	s.upstream.answer.Transcript.Reset(keepText)
}

// writeEnding ends an answer that its engine did not end. It writes the finish_reason in finish (empty: the engine has sent one) and then
// the usage, as events that are processed like those of an engine.
func (s *stream) writeEnding(head sse.Head, finish string) {
	usage := ownUsage(s)
	_, reported := s.upstream.answer.Filter.Usage()
	s.upstream.noUsage = !reported // noted before the events below, whose usage is not the engine's; the dispatcher counts such answers
	for e := range sse.Events(ending(s.job.req.Endpoint, head, finish, usage)) {
		if s.state < ended { // otherwise an event before this one has ended the answer
			s.processEvent(e)
		}
	}
}

// ownUsage returns the usage of the answer as evenkeel has counted it. The counts may be estimates, so the tokens of the answer are cut to
// those that it may have and that fit into the context.
func ownUsage(s *stream) sse.Usage {
	j, filter := s.job, &s.upstream.answer.Filter
	usage := sse.Usage{Prompt: cmp.Or(filter.Prompt(), j.promptTokens), Completion: min(filter.Tokens(), s.upstream.maxTokens),
		Cached: j.cachedTokens}
	if s.upstream.rank.Context > 0 { // the length of the context is known
		usage.Completion = min(usage.Completion, max(0, s.upstream.rank.Context-usage.Prompt))
	}
	// In two cases only the decode engine knows how many tokens of the prompt were cached: it has computed the prompt itself, or it is
	// an SGLang engine, which always reports them itself.
	onlyDecodeEngineKnows := s.upstream.computesPrompt || s.upstream.rank.Profile.Connector == mooncake.SGLang
	if onlyDecodeEngineKnows {
		const unknown = -1
		usage.Cached = unknown
	}
	usage.Total = usage.Prompt + usage.Completion
	return usage
}

// checkPromptCount checks the prompt length that the engine of a resumed request has counted. It returns nil if the length is right, or if
// there is nothing to check. An engine that ignored the answer so far counts too few tokens, and would begin the answer again. want is the
// right count; 0: it is not known, and only has to exceed the length of the client's prompt. counted is 0 if the engine reported no count.
func (j *job) checkPromptCount(want, counted int) *openai.Error {
	if !j.life.Resumed() || counted == 0 {
		return nil
	}
	resume := &j.resume
	ignored := counted != want // the engine ignored the answer so far
	if want == 0 {             // the count must at least exceed that of the client's prompt, if a part of the answer was added to it
		ignored = resume.answerTokens > 0 && counted <= resume.promptTokens
	}
	if !ignored {
		return nil
	}
	j.srv.Log.Warn("an engine ignored the answer so far and began it anew, so the answer ends here with an error", zap.Inline(j),
		zap.Int("prompt_tokens", counted), zap.Int("want", max(want, resume.promptTokens+1)), zap.Error(errIgnoredResume))
	return openai.NewError(http.StatusBadGateway, "recompute_unresumable", errIgnoredResume.Error())
}

// keepForResume decides which parts of a request stay in memory in case this rank loses its answer. With KeepAll, the body stays until the
// end of the answer, so that the answer can go on, or begin anew, at any time; its size is charged to Server.resumeBytes. If neither would
// be possible, or if too little memory is left, the body stays only until the first token (KeepStart): until then, the same request can be
// sent again. If the profile of the rank's engine allows no further attempt once the answer has begun, nothing stays from then on
// (KeepNothing).
func (j *job) keepForResume(rank *roster.Rank) {
	if j.life.Resumed() { // what was kept for the first part of the answer is used for its later parts, too
		return
	}
	j.releaseResumeBytes()
	resume := &j.resume
	resume.retention, resume.method = lifecycle.KeepStart, j.resumeMethod(rank.Profile)
	neverServedAgain := maxRecomputes(rank.Profile) == 0 // not even an answer that could begin anew
	canGoOn := resume.method != ""
	canBeginAnew := !j.req.Stream // the client has nothing before the end, so the answer may begin anew at any time
	switch {
	case neverServedAgain:
		resume.retention = lifecycle.KeepNothing
	case canGoOn || canBeginAnew:
		size := int64(len(j.body.Raw()) + len(resume.promptIDs))
		if j.srv.resumeBytes.Add(size) > int64(j.srv.Settings().Limits.ResumeBytes) {
			j.srv.resumeBytes.Add(-size)
			break // too little memory: KeepStart stays
		}
		resume.retention, resume.chargedBytes = lifecycle.KeepAll, size
	}
}

// releaseResumeBytes subtracts the bytes that keepForResume charged to Server.resumeBytes.
func (j *job) releaseResumeBytes() {
	j.srv.resumeBytes.Add(-j.resume.chargedBytes)
	j.resume.chargedBytes = 0
}

// dropRequestBody drops the body of the request, and what was kept for a resume, as soon as the answer needs neither any more. Before that
// it does nothing. So a long prompt does not stay in memory during a long answer.
func (s *stream) dropRequestBody() {
	j, retention := s.job, s.job.resume.retention
	if s.firstAt.IsZero() || retention == lifecycle.KeepAll { // another attempt may still need the body
		return
	}
	if retention == lifecycle.KeepStart && s.upstream.answer.Filter.Tokens() == 0 { // the answer could still begin anew
		return
	}
	s.upstream.answer.Filter.Untrack() // the filter stops collecting the answer so far, because no other engine will continue it
	j.body, j.changes, j.resume.promptIDs, j.resume.retention = mooncake.Body{}, nil, nil, lifecycle.KeepNothing
}

// resumeMethod returns how a lost answer of this request can be continued: a value of chat_resume, mooncake.ResumePrompt or
// mooncake.ResumeText. Empty means that it cannot. The answer goes on either from the token ids of prompt and answer, or from their text.
// Text is second best: it is used if the profile names such a method, or if the token ids of the prompt are not known. At an endpoint of
// token ids (Tokens, Generate), resumeMethod also stores the ids of the prompt in j.resume.
func (j *job) resumeMethod(profile *mooncake.Profile) string {
	storePromptIDs(j)
	method, methodWithoutIDs := methodsOf(j.req.Endpoint, profile)
	// With echo, the answer repeats the prompt. The decode engine is then not asked for token ids, so those of the answer are not
	// known.
	idsUnknown := j.resume.promptIDs == nil || openai.Echoes(&j.body)
	switch {
	case method == mooncake.ChatResumeNone, !j.req.Endpoint.CanResume(): // ChatResumeNone: the profile allows no chat to go on
		return ""
	case mooncake.ByText(method): // such a method needs no token ids
	case idsUnknown:
		method = methodWithoutIDs
	}
	if method == mooncake.ResumeText && j.parts().Text() == nil { // the prompt is no text
		return ""
	}
	return method
}

// methodsOf returns how a lost answer of an endpoint is best continued, and how if the token ids are not known; empty: not at all then. For
// chats the profile decides, and its method may need no token ids.
func methodsOf(endpoint mooncake.Endpoint, profile *mooncake.Profile) (best, withoutIDs string) {
	switch endpoint {
	case mooncake.Completions:
		return mooncake.ResumePrompt, mooncake.ResumeText
	case mooncake.Tokens, mooncake.Generate: // the answers of these endpoints go on only from token ids
		return mooncake.ResumePrompt, ""
	}
	return profile.ChatResume, mooncake.ChatResumeContinue
}

// storePromptIDs stores the token ids of the prompt in j.resume, if the endpoint is one whose requests have them. At other endpoints, an
// engine may report them later.
func storePromptIDs(j *job) {
	switch j.req.Endpoint {
	case mooncake.Tokens:
		j.resume.promptIDs, _ = j.body.Get(openai.PromptKey(mooncake.Tokens))
	case mooncake.Generate:
		_, j.resume.promptIDs = j.parts().IDs()
	}
}

// maxRecomputes returns how often the profile allows one answer to go on after a loss; 0: never.
func maxRecomputes(profile *mooncake.Profile) int {
	if profile.RecomputeMax == nil {
		return 0
	}
	return *profile.RecomputeMax
}

// needsPromptIDs says whether a lost answer could only continue exactly with the token ids of its prompt.
func needsPromptIDs(req *openai.Request, profile *mooncake.Profile) bool {
	return req.Endpoint == mooncake.Completions || profile.ChatResume == mooncake.ChatResumeVLLM ||
		profile.ChatResume == mooncake.ChatResumeAscend
}

// tokensVisible says whether the client gets more of each token than its text, for example its id. Then no token that the client has may be
// computed a second time: the new tokens could differ although their text is the same.
func (j *job) tokensVisible() bool {
	return j.filterOptions.TokenIDs || j.req.Endpoint == mooncake.Generate || j.filterOptions.ContinuousUsage || openai.HasLogprobs(&j.body)
}

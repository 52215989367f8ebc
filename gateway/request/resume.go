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

// continueAnswer continues an answer that its engine has lost: the part that the client has is
// appended to the prompt, and the client gets the new part as if one engine had sent the whole
// answer.
func (s *stream) continueAnswer() {
	j, fault, moved := s.job, s.upstream.fault, s.upstream.endedByDrain() // fault: of the loss
	// An answer that was computed from broken KV must not go on.
	var kvFault *failure.Fault
	if !j.client.Left() {
		kvFault = s.upstream.prefillCall.confirmKV(s.upstream.answer.Filter.Prompt(), j.client.Gone())
	}
	if kvFault != nil {
		s.upstream.fault = kvFault
	}
	if kvFault != nil || j.client.Left() {
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
		return
	}
	cause := "lost in the middle: " + fault.ClientError.Code
	j.record.Report(journal.Event{Kind: journal.AttemptEnded, Cause: cause, On: s.upstream.failedEngine(), Answer: fault.ClientError})
	tier := s.planContinuation()   // a label of the metrics
	var attemptError *openai.Error // of the next attempt; nil: it did not fail, or there is none
	switch tier {
	case lifecycle.Broken:
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
	case lifecycle.Concluding: // planContinuation has written the end
	default:
		j.record.Report(journal.Event{Kind: journal.Retried})
		var next *stream
		if next, attemptError = j.serve(nil); attemptError == nil { // no other proxy may continue the answer
			s.takeOver(next)
		} else { // serve has brought the lifecycle to its end
			tier = lifecycle.Broken
		}
	}
	j.srv.metrics.countLoss(fault, moved, tier)
	endLoss(s, fault, tier, attemptError)
}

// countLoss: moved says that a drain ended the call.
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

// endLoss logs whether a lost answer goes on, and ends it if the attempt to continue it has failed
// (attemptError).
func endLoss(s *stream, fault *failure.Fault, tier lifecycle.Tier, attemptError *openai.Error) {
	j := s.job
	switch {
	case tier != lifecycle.Broken:
		j.srv.Log.Info("an answer goes on after its decode engine lost it", zap.Inline(j), zap.String("lost", fault.ClientError.Code),
			zap.String("tier", tier),
			zap.Bool("token_exact", tier != lifecycle.ByText), zap.Int("tokens", s.tokens()), zap.String("engine", s.upstream.rank.Target.ID))
	case attemptError == nil: // the lifecycle has ended the stream
	case attemptError.Status == journal.StatusClientClosed:
		s.finishAnswer(failure.ClientGone)
	default: // the client gets the error by which the answer was lost
		j.srv.Log.Warn("an answer could not go on after its decode engine lost it", zap.Inline(j), zap.String("cause", attemptError.Message))
		s.finishAnswer(fault.ClientError)
	}
}

// planContinuation decides how the lost answer goes on, and prepares the job for it, or writes the
// end (Concluding).
func (s *stream) planContinuation() lifecycle.Tier {
	joinTranscript(s) // earlierTranscript then has all of the answer so far
	loss := lostAnswer(s)
	plan := loss.Plan()
	switch plan.Tier {
	case lifecycle.Broken:
	case lifecycle.Concluding:
		writeConclusion(s, &plan, loss.Finished)
	default:
		applyPlan(s, &plan)
	}
	return plan.Tier
}

// writeConclusion: if the engine has not sent a finish_reason, the answer has all tokens that it
// may have, so its finish_reason is length.
func writeConclusion(s *stream, plan *lifecycle.Plan, engineHasFinished bool) {
	switch {
	case s.upstream.answer.FinalUsageCame(): // evenkeel's usage would be the second one
		s.endWhole()
		return
	case engineHasFinished:
		const finishSent = ""
		s.writeEnding(plan.AnswerSoFar.Head, finishSent)
		return
	}
	applyPlan(s, plan) // for the number of tokens, and what the filter must know of earlier parts
	s.resetForEnd(s.job.resume.answerTokens)
	s.writeEnding(plan.AnswerSoFar.Head, "length")
}

func joinTranscript(s *stream) {
	if s.earlierTranscript == nil {
		s.earlierTranscript = &sse.Transcript{}
	}
	if s.earlierTranscript.Head.ID == nil { // all parts have the head of the first
		s.earlierTranscript.Head, s.earlierTranscript.Prompt = s.upstream.answer.Transcript.Head, s.upstream.answer.Transcript.Prompt
	}
	s.earlierTranscript.Join(&s.upstream.answer.Transcript)
}

// applyPlan makes the next attempt continue the answer.
func applyPlan(s *stream, plan *lifecycle.Plan) {
	j, resume := s.job, &s.job.resume
	if plan.ClientHasNothing { // it is assembled from its start
		s.upstream.answer.Assembler = newAssembler(j)
	}
	// The filter makes the new events go on after the part that the client has.
	s.earlierTranscript = plan.AnswerSoFar
	j.filterOptions.Continuation = plan.Continuation
	resume.answerTokens = plan.AnswerSoFar.Completed
	// By the count of prompt tokens, evenkeel checks that an engine has not ignored the answer so far;
	// 0: any number.
	j.promptTokens = resume.promptTokens + resume.answerTokens
	resume.prefillMustCount = plan.PrefillCount
	resume.decodeMustCount = plan.DecodeCount
	// A text may be split into other tokens than those that were generated.
	if plan.Tier == lifecycle.ByText {
		j.record.Inexact = true
	}
	changes := *j.changes // prefill calls of earlier attempts may still read the old changes
	changes.Resume = plan.Resume
	j.changes = &changes
}

// lostAnswer returns the facts for Loss.Plan. Those that only the body shows are left out if it is
// not in memory any more.
func lostAnswer(s *stream) lifecycle.Loss {
	j, resume := s.job, &s.job.resume
	mayBeServedAgain := j.life.Losses() < maxRecomputes(s.upstream.rank.Profile) && j.req.Endpoint.CanResume()
	loss := lifecycle.Loss{
		AnswerSoFar: s.earlierTranscript, Finished: s.upstream.answer.Filter.Finished(), Retention: resume.retention, Streamed: j.req.Stream,
		MayResume: mayBeServedAgain,
		Method:    resume.method, PromptIDs: resume.promptIDs, PromptTokens: resume.promptTokens, MaxAnswerTokens: j.maxWholeAnswer(),
		TokenLimit: j.req.Limit, TokenLimitKey: cmp.Or(j.req.MaxTokensKey, "max_tokens"),
	}
	if resume.retention == lifecycle.KeepAll {
		loss.MayExtendPrompt = !openai.CannotResume(&j.body, j.req.Endpoint)
		loss.HasTools = openai.HasTools(&j.body)
		if resume.method == mooncake.ResumeText { // the next prompt has the text of both
			loss.PromptText = textBeforeAnswer(j)
		}
	}
	if resume.retention != lifecycle.KeepNothing { // the answer may at least begin anew
		loss.TokensVisible = j.tokensVisible()
	}
	return loss
}

// textBeforeAnswer is a JSON string. With echo, it is empty, because the answer itself begins with
// the text of the prompt.
func textBeforeAnswer(j *job) []byte {
	text := j.parts().Text()
	if openai.Echoes(&j.body) {
		return []byte(`""`)
	}
	return text
}

// maxWholeAnswer counts the part that the client has already, too.
func (j *job) maxWholeAnswer() int {
	maxTokens := prompt.ContextLimit(j.model.MaxLen)
	if j.model.MaxLen > 0 {
		maxTokens -= j.resume.promptTokens
	}
	if j.req.Limit > 0 {
		maxTokens = min(maxTokens, j.req.Limit)
	}
	return maxTokens
}

// takeOver lets this stream go on with the call of next, which has read its first events already. s
// keeps its assembler, and the times of its first event and token. From now on s gives slot and
// buffers back, and next must not.
func (s *stream) takeOver(next *stream) {
	assembler := s.upstream.answer.Assembler // detach empties the buffers; nil: the client gets the events
	s.detach()                               // of the lost call, whose slot is free already
	s.upstream = next.upstream
	s.upstream.answer.Assembler = assembler
	s.state, s.endError = next.state, next.endError
	next.state = givenBack                      // so that next gives nothing back
	s.earlierTokens = s.job.resume.answerTokens // the filter of next counts only its own call
	if !next.lastTokenAt.IsZero() {
		s.lastTokenAt = next.lastTokenAt
	}
	if assembler != nil { // the client gets the answer in one piece
		assembleFirstEvents(s)
	}
}

// assembleFirstEvents adds the first events of the continuing call, which were read without an
// assembler, to the answer in one piece.
func assembleFirstEvents(s *stream) {
	for e := range sse.Events(s.upstream.answer.out) {
		if e.Kind == sse.KindComment {
			continue
		}
		if err := s.upstream.answer.Assembler.Add(e.Raw); err != nil {
			cannotJoin := failure.StreamBroke("upstream_broken", err)
			if s.state == ended { // endFailed below then does nothing
				s.endError = cmp.Or(s.endError, cannotJoin)
			}
			s.endFailed(lifecycle.Unusable, cannotJoin, err)
			break
		}
	}
	s.upstream.answer.out = s.upstream.answer.out[:0]
}

// resetForEnd prepares the filter for an end that evenkeel writes. The filter begins again at 0, so
// all tokens count as those of earlier calls.
func (s *stream) resetForEnd(tokens int) {
	filterOptions := s.job.filterOptions
	filterOptions.Cached = s.job.cachedTokens
	s.earlierTokens = tokens
	s.upstream.answer.Filter.Reset(filterOptions)
	const keepText = false // nothing continues the answer any more
	s.upstream.answer.Transcript.Reset(keepText)
}

// writeEnding ends an answer that its engine did not end, with events that are processed like those
// of an engine. finish is empty if the engine has sent a finish_reason.
func (s *stream) writeEnding(head sse.Head, finish string) {
	usage := ownUsage(s)
	_, reported := s.upstream.answer.Filter.Usage()
	s.upstream.noUsage = !reported // before the events below, whose usage is not the engine's
	for e := range sse.Events(ending(s.job.req.Endpoint, head, finish, usage)) {
		if s.state < ended { // else an earlier event has ended the answer
			s.processEvent(e)
		}
	}
}

// ownUsage: the counts may be estimates, so they are cut to what the answer may have and the
// context takes.
func ownUsage(s *stream) sse.Usage {
	j, filter := s.job, &s.upstream.answer.Filter
	usage := sse.Usage{Prompt: cmp.Or(filter.Prompt(), j.promptTokens), Completion: min(filter.Tokens(), s.upstream.maxTokens),
		Cached: j.cachedTokens}
	if s.upstream.rank.Context > 0 {
		usage.Completion = min(usage.Completion, max(0, s.upstream.rank.Context-usage.Prompt))
	}
	// Only the decode engine knows how many tokens were cached, if it has computed the prompt itself,
	// or is an SGLang engine.
	onlyDecodeEngineKnows := s.upstream.computesPrompt || s.upstream.rank.Profile.Connector == mooncake.SGLang
	if onlyDecodeEngineKnows {
		const unknown = -1
		usage.Cached = unknown
	}
	usage.Total = usage.Prompt + usage.Completion
	return usage
}

// checkPromptCount: an engine of a resumed request that ignored the answer so far counts too few
// prompt tokens, and would begin the answer again. want is 0 if the right count is not known;
// counted is 0 if the engine reported none.
func (j *job) checkPromptCount(want, counted int) *openai.Error {
	if !j.life.Resumed() || counted == 0 {
		return nil
	}
	resume := &j.resume
	ignored := counted != want
	if want == 0 { // it must at least exceed that of the client's prompt
		ignored = resume.answerTokens > 0 && counted <= resume.promptTokens
	}
	if !ignored {
		return nil
	}
	j.srv.Log.Warn("an engine ignored the answer so far and began it anew, so the answer ends here with an error", zap.Inline(j),
		zap.Int("prompt_tokens", counted), zap.Int("want", max(want, resume.promptTokens+1)), zap.Error(errIgnoredResume))
	return openai.NewError(http.StatusBadGateway, "recompute_unresumable", errIgnoredResume.Error())
}

// keepForResume decides which parts of a request stay in memory in case this rank loses its answer.
// Server.resumeBytes limits KeepAll. Otherwise the body stays until the first token (KeepStart).
func (j *job) keepForResume(rank *roster.Rank) {
	if j.life.Resumed() { // what was kept for the first part of the answer is used for later ones, too
		return
	}
	j.releaseResumeBytes()
	resume := &j.resume
	resume.retention, resume.method = lifecycle.KeepStart, j.resumeMethod(rank.Profile)
	neverServedAgain := maxRecomputes(rank.Profile) == 0
	canGoOn := resume.method != ""
	canBeginAnew := !j.req.Stream // the client has nothing before the end
	switch {
	case neverServedAgain:
		resume.retention = lifecycle.KeepNothing
	case canGoOn || canBeginAnew:
		size := int64(len(j.body.Raw()) + len(resume.promptIDs))
		if j.srv.resumeBytes.Add(size) > int64(j.srv.Settings().Limits.ResumeBytes) {
			j.srv.resumeBytes.Add(-size)
			break // KeepStart stays
		}
		resume.retention, resume.chargedBytes = lifecycle.KeepAll, size
	}
}

func (j *job) releaseResumeBytes() {
	j.srv.resumeBytes.Add(-j.resume.chargedBytes)
	j.resume.chargedBytes = 0
}

// dropRequestBody drops the body as soon as the answer does not need it any more, so that a long
// prompt does not stay in memory during a long answer.
func (s *stream) dropRequestBody() {
	j, retention := s.job, s.job.resume.retention
	if s.firstAt.IsZero() || retention == lifecycle.KeepAll { // another attempt may still need the body
		return
	}
	if retention == lifecycle.KeepStart && s.upstream.answer.Filter.Tokens() == 0 { // the answer could still begin anew
		return
	}
	s.upstream.answer.Filter.Untrack() // no other engine will continue the answer
	j.body, j.changes, j.resume.promptIDs, j.resume.retention = mooncake.Body{}, nil, nil, lifecycle.KeepNothing
}

// resumeMethod returns a value of chat_resume, mooncake.ResumePrompt or mooncake.ResumeText; empty:
// a lost answer cannot go on. Text is second best: it is used if the profile says so, or if the
// token ids of the prompt are not known. At an endpoint of token ids, the ids of the prompt are
// stored, too.
func (j *job) resumeMethod(profile *mooncake.Profile) string {
	storePromptIDs(j)
	method, methodWithoutIDs := methodsOf(j.req.Endpoint, profile)
	// With echo, the answer repeats the prompt. The decode engine is then not asked for token ids.
	idsUnknown := j.resume.promptIDs == nil || openai.Echoes(&j.body)
	switch {
	case method == mooncake.ChatResumeNone, !j.req.Endpoint.CanResume(): // None: no chat goes on
		return ""
	case mooncake.ByText(method):
	case idsUnknown:
		method = methodWithoutIDs
	}
	if method == mooncake.ResumeText && j.parts().Text() == nil {
		return ""
	}
	return method
}

// methodsOf returns how a lost answer is best continued, and how without token ids; empty: not at
// all.
func methodsOf(endpoint mooncake.Endpoint, profile *mooncake.Profile) (best, withoutIDs string) {
	switch endpoint {
	case mooncake.Completions:
		return mooncake.ResumePrompt, mooncake.ResumeText
	case mooncake.Tokens, mooncake.Generate: // only from token ids
		return mooncake.ResumePrompt, ""
	}
	return profile.ChatResume, mooncake.ChatResumeContinue
}

// At other endpoints, an engine may report the ids later.
func storePromptIDs(j *job) {
	switch j.req.Endpoint {
	case mooncake.Tokens:
		j.resume.promptIDs, _ = j.body.Get(openai.PromptKey(mooncake.Tokens))
	case mooncake.Generate:
		_, j.resume.promptIDs = j.parts().IDs()
	}
}

// maxRecomputes is how often an answer may go on after a loss.
func maxRecomputes(profile *mooncake.Profile) int {
	if profile.RecomputeMax == nil {
		return 0
	}
	return *profile.RecomputeMax
}

// needsPromptIDs: a lost answer could only go on exactly with the token ids of its prompt.
func needsPromptIDs(req *openai.Request, profile *mooncake.Profile) bool {
	return req.Endpoint == mooncake.Completions || profile.ChatResume == mooncake.ChatResumeVLLM ||
		profile.ChatResume == mooncake.ChatResumeAscend
}

// tokensVisible: the client gets more of each token than its text, for example its id. Then no
// token may be computed a second time: it could differ although its text is the same.
func (j *job) tokensVisible() bool {
	return j.filterOptions.TokenIDs || j.req.Endpoint == mooncake.Generate || j.filterOptions.ContinuousUsage || openai.HasLogprobs(&j.body)
}

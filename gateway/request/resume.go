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

// goOn continues an answer that its engine has lost. The request is served again: the part of the answer that the client has is appended
// to the prompt, and the client gets the new part as if one engine had sent the whole answer.
func (s *stream) goOn() {
	j, fault, moved := s.job, s.upstream.fault, s.upstream.tracked.MustMove()
	if !j.client.Left() {
		// text that was computed from broken KV must not be continued
		if wrong := s.upstream.partner.believe(s.upstream.answer.Filter.Prompt(), j.client.Gone()); wrong != nil {
			s.upstream.fault, fault = wrong, nil
		}
	}
	if fault == nil || j.client.Left() {
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
		return
	}
	lost := "lost in the middle: " + fault.Answer.Code
	j.record.Report(journal.Event{Kind: journal.Failed, Cause: lost, On: s.upstream.failedOn(), Answer: fault.Answer})
	tier := s.plan()
	var cause *openai.Error // why the next attempt failed
	switch tier {
	case lifecycle.Broken:
		s.step(lifecycle.Event{Kind: lifecycle.GivenUp})
	case lifecycle.Concluding: // plan has written the end
	default:
		j.record.Report(journal.Event{Kind: journal.Retried})
		var next *stream
		if next, cause = j.serve(nil); cause == nil {
			s.adopt(next)
		} else {
			tier = lifecycle.Broken
		}
	}
	reportLoss(s, fault, moved, tier, cause)
}

// reportLoss counts and logs a lost answer, and ends the stream if the answer does not go on. cause is why the next attempt failed; nil:
// it did not fail, or there was none.
func reportLoss(s *stream, fault *failure.Fault, moved bool, tier lifecycle.Tier, cause *openai.Error) {
	j := s.job
	counter := j.srv.metrics.losses
	switch {
	case fault.Reason == lifecycle.Preempted:
		counter = j.srv.metrics.recomputes
	case moved:
		counter = j.srv.metrics.moves
	}
	counter.WithLabelValues(tier).Inc()
	switch {
	case tier != lifecycle.Broken:
		j.srv.Log.Info("an answer goes on after its decode engine lost it", zap.Inline(j), zap.String("lost", fault.Answer.Code),
			zap.String("tier", tier),
			zap.Bool("token_exact", tier != lifecycle.ByText), zap.Int("tokens", s.tokens()), zap.String("engine", s.upstream.rank.Target.ID))
	case cause == nil: // goOn has ended the stream already
	case cause.Status == journal.StatusClientClosed:
		s.finish(failure.Gone)
	default:
		j.srv.Log.Warn("an answer could not go on after its decode engine lost it", zap.Inline(j), zap.String("cause", cause.Message))
		s.finish(fault.Answer)
	}
}

// plan decides how the lost answer goes on, and prepares the job for its next attempt. It returns lifecycle.Concluding if no token is left
// to compute: then it has written the end of the answer into the stream. It returns lifecycle.Broken if the answer cannot go on.
func (s *stream) plan() lifecycle.Tier {
	j, resume := s.job, &s.job.resume
	if s.earlierTranscript == nil {
		s.earlierTranscript = &sse.Transcript{}
	}
	if s.earlierTranscript.Head.ID == nil { // all parts of the answer have the head of the first part
		s.earlierTranscript.Head, s.earlierTranscript.Prompt = s.upstream.answer.Transcript.Head, s.upstream.answer.Transcript.Prompt
	}
	s.earlierTranscript.Join(&s.upstream.answer.Transcript)
	loss := lostAnswer(s)
	p := loss.Plan()
	if p.Tier == lifecycle.Broken {
		return p.Tier
	}
	if p.Tier == lifecycle.Concluding && loss.Finished { // the engine has sent a finish_reason
		s.writeEnding(p.Said.Head, "")
		return p.Tier
	}
	if p.Unseen { // the answer is assembled from its start
		s.upstream.answer.Assembler = newAssembler(j)
	}
	s.earlierTranscript, j.filterOptions.Continuation = p.Said, p.Continuation
	resume.answerTokens, resume.prefillCounts, resume.decodeCounts = p.Said.Completed, p.AtP, p.AtD
	j.promptTokens = resume.promptTokens + resume.answerTokens
	j.record.Inexact = j.record.Inexact || p.Tier == lifecycle.ByText
	changes := *j.changes
	changes.Resume, j.changes = p.Resume, &changes
	if p.Tier == lifecycle.Concluding {
		s.resetForEnd(resume.answerTokens)
		s.writeEnding(p.Said.Head, "length")
	}
	return p.Tier
}

// lostAnswer returns the facts about a lost answer that decide how it goes on. What only the body of the request can tell is left out if
// the body is not in memory any more.
func lostAnswer(s *stream) lifecycle.Loss {
	j, resume := s.job, &s.job.resume
	loss := lifecycle.Loss{
		Said: s.earlierTranscript, Finished: s.upstream.answer.Filter.Finished(), Retention: resume.retention, Streamed: j.req.Stream,
		May: j.life.Losses() < recomputeMax(s.upstream.rank.Profile) && j.req.Endpoint.CanResume(),
		How: resume.how, IDs: resume.promptIDs, Alone: resume.promptTokens, Most: j.maxWholeAnswer(), Limit: j.req.Limit,
		LimitKey: cmp.Or(j.req.MaxTokensKey, "max_tokens"),
	}
	if resume.retention == lifecycle.KeepAll {
		loss.Plain, loss.Tools = !openai.CannotResume(&j.body, j.req.Endpoint), openai.HasTools(&j.body)
		if resume.how == mooncake.ResumeText {
			if loss.Text = j.parts().Text(); openai.Echoes(&j.body) { // with echo, the answer itself begins with the prompt's text
				loss.Text = []byte(`""`)
			}
		}
	}
	if resume.retention != lifecycle.KeepNothing {
		loss.Seen = j.seesTokens()
	}
	return loss
}

// maxWholeAnswer returns how many tokens the answer may have, with the part that the client has already.
func (j *job) maxWholeAnswer() int {
	most := prompt.ContextLimit(j.model.MaxLen)
	if j.model.MaxLen > 0 {
		most -= j.resume.promptTokens
	}
	if j.req.Limit > 0 {
		most = min(most, j.req.Limit)
	}
	return most
}

// adopt lets this stream go on with the call of next. next is the stream of the attempt that continues the answer, and has read its first
// events already.
func (s *stream) adopt(next *stream) {
	assembler := s.upstream.answer.Assembler
	s.detach()
	s.upstream = next.upstream
	s.upstream.answer.Assembler = assembler
	s.state, s.broken, next.state = next.state, next.broken, settled // now s must give back what next held
	s.earlierTokens = s.job.resume.answerTokens
	if !next.lastTokenAt.IsZero() {
		s.lastTokenAt = next.lastTokenAt
	}
	if s.upstream.answer.Assembler == nil {
		return
	}
	for e := range sse.Events(s.upstream.answer.out) {
		if e.Kind == sse.KindComment {
			continue
		}
		if err := s.upstream.answer.Assembler.Add(e.Raw); err != nil {
			if s.state == ended { // the rest of the answer came at once, so fails does not set the error
				s.broken = cmp.Or(s.broken, failure.Stream("upstream_broken", err))
			}
			s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", err), err)
			break
		}
	}
	s.upstream.answer.out = s.upstream.answer.out[:0]
}

// resetForEnd prepares the filter for an end that evenkeel writes itself. tokens is how many tokens the answer has.
func (s *stream) resetForEnd(tokens int) {
	filterOptions := s.job.filterOptions
	filterOptions.Cached = s.job.cachedTokens
	s.earlierTokens = tokens
	s.upstream.answer.Filter.Reset(filterOptions)
	s.upstream.answer.Transcript.Reset(false)
}

// writeEnding ends an answer that its engine did not end. It writes the finish_reason in finish (empty: the engine has sent one) and then
// the usage. The token counts may be estimates, so the usage is cut to what the answer may have.
func (s *stream) writeEnding(head sse.Head, finish string) {
	j := s.job
	filter := &s.upstream.answer.Filter
	usage := sse.Usage{Prompt: cmp.Or(filter.Prompt(), j.promptTokens), Completion: min(filter.Tokens(), s.upstream.maxTokens),
		Cached: j.cachedTokens}
	if s.upstream.rank.Context > 0 {
		usage.Completion = min(usage.Completion, max(0, s.upstream.rank.Context-usage.Prompt))
	}
	if s.upstream.local || s.upstream.rank.Profile.Connector == mooncake.SGLang { // only the decode engine knew it
		usage.Cached = -1
	}
	usage.Total = usage.Prompt + usage.Completion
	_, reported := s.upstream.answer.Filter.Usage()
	s.upstream.noUsage = !reported
	for e := range sse.Events(ending(j.req.Endpoint, head, finish, usage)) {
		if s.state < ended {
			s.event(e)
		}
	}
}

// verify checks the prompt length that the engine of a resumed request has counted. An engine that ignored the answer so far counts too
// few tokens, and would begin the answer again. want is the right count; 0: it is not known, and only has to exceed the length of the
// client's prompt. counted is 0 if the engine reported no count.
func (j *job) verify(want, counted int) *openai.Error {
	if !j.life.Resumed() || counted == 0 {
		return nil
	}
	resume := &j.resume
	ignored := counted != want
	if want == 0 {
		ignored = resume.answerTokens > 0 && counted <= resume.promptTokens
	}
	if !ignored {
		return nil
	}
	j.srv.Log.Warn("an engine ignored the answer so far and began it anew, so the answer ends here with an error", zap.Inline(j),
		zap.Int("prompt_tokens", counted), zap.Int("want", max(want, resume.promptTokens+1)), zap.Error(errIgnoredResume))
	return openai.NewError(http.StatusBadGateway, "recompute_unresumable", errIgnoredResume.Error())
}

// keep decides which parts of a request stay in memory in case this rank loses its answer. It charges their size to Server.resumeBytes.
func (j *job) keep(rank *roster.Rank) {
	if j.life.Resumed() { // what was kept for the first part of the answer still serves
		return
	}
	j.forget()
	resume := &j.resume
	resume.retention, resume.how = lifecycle.KeepStart, j.howToResume(rank.Profile)
	switch {
	case recomputeMax(rank.Profile) == 0:
		resume.retention = lifecycle.KeepNothing
	case resume.how != "" || !j.req.Stream:
		size := int64(len(j.body.Raw()) + len(resume.promptIDs))
		if j.srv.resumeBytes.Add(size) > int64(j.srv.Settings().Limits.ResumeBytes) {
			j.srv.resumeBytes.Add(-size)
			break // too little memory: KeepStart stays
		}
		resume.retention, resume.chargedBytes = lifecycle.KeepAll, size
	}
}

// forget subtracts the bytes that keep charged to Server.resumeBytes.
func (j *job) forget() {
	j.srv.resumeBytes.Add(-j.resume.chargedBytes)
	j.resume.chargedBytes = 0
}

// shed drops the body of the request, and what was kept for a resume, once the answer needs them no more. So a long prompt does not stay in
// memory during a long answer.
func (s *stream) shed() {
	j, retention := s.job, s.job.resume.retention
	if s.firstAt.IsZero() || retention == lifecycle.KeepAll {
		return
	}
	if retention == lifecycle.KeepStart && s.upstream.answer.Filter.Tokens() == 0 { // the answer could still begin anew
		return
	}
	s.upstream.answer.Filter.Untrack()
	j.body, j.changes, j.resume.promptIDs, j.resume.retention = mooncake.Body{}, nil, nil, lifecycle.KeepNothing
}

// howToResume returns how a lost answer of this request can be continued: a value of chat_resume, mooncake.ResumePrompt or
// mooncake.ResumeText. Empty means that it cannot. If the endpoint is one of token ids (Tokens, Generate), it also stores the ids of the
// prompt in j.resume.
func (j *job) howToResume(profile *mooncake.Profile) string {
	how := profile.ChatResume
	byText := mooncake.ChatResumeContinue
	switch j.req.Endpoint {
	case mooncake.Completions:
		how, byText = mooncake.ResumePrompt, mooncake.ResumeText
	case mooncake.Tokens:
		how, byText = mooncake.ResumePrompt, ""
		j.resume.promptIDs, _ = j.body.Get(openai.PromptKey(mooncake.Tokens))
	case mooncake.Generate:
		how, byText = mooncake.ResumePrompt, ""
		_, j.resume.promptIDs = j.parts().IDs()
	}
	switch {
	case how == mooncake.ChatResumeNone, !j.req.Endpoint.CanResume():
		return ""
	case mooncake.ByText(how): // needs no token ids
	case j.resume.promptIDs == nil, openai.Echoes(&j.body): // with echo, the decode engine is not asked for token ids
		how = byText
	}
	if how == mooncake.ResumeText && j.parts().Text() == nil {
		return ""
	}
	return how
}

// recomputeMax returns how often the profile allows one answer to go on after a loss; 0: never.
func recomputeMax(profile *mooncake.Profile) int {
	if profile.RecomputeMax == nil {
		return 0
	}
	return *profile.RecomputeMax
}

// wantsIDs says whether a lost answer could only continue exactly with the token ids of its prompt.
func wantsIDs(req *openai.Request, profile *mooncake.Profile) bool {
	return req.Endpoint == mooncake.Completions || profile.ChatResume == mooncake.ChatResumeVLLM ||
		profile.ChatResume == mooncake.ChatResumeAscend
}

// seesTokens says whether the client gets more of each token than its text, for example its id. Then no token that the client has may be
// computed a second time: the new tokens could differ although their text is the same.
func (j *job) seesTokens() bool {
	return j.filterOptions.TokenIDs || j.req.Endpoint == mooncake.Generate || j.filterOptions.ContinuousUsage || openai.HasLogprobs(&j.body)
}

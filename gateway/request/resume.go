package request

import (
	"cmp"
	"errors"
	"net/http"

	"go.uber.org/zap"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/mooncake"
	"evenkeel/sse"
)

var errIgnoredResume = errors.New("the engine did not go on with the answer so far; set the chat_resume that check --probe names in its " +
	"profile, or upgrade the engine")

// goOn continues an answer that its engine has lost. The request is served again, with what the client has of the answer as a part of
// the prompt, and the parts are joined to one answer.
func (s *stream) goOn() {
	j, fault, moved := s.job, s.from.fault, s.from.run.Moved()
	if !j.client.Left() {
		// an answer must not go on from wrong text
		if wrong := s.from.partner.believe(s.from.answer.Mirror.Prompt(), j.client.Gone()); wrong != nil {
			s.from.fault, fault = wrong, nil
		}
	}
	if fault == nil || j.client.Left() {
		s.step(lifecycle.Event{What: lifecycle.GivenUp})
		return
	}
	lost := "lost in the middle: " + fault.Answer.Code
	j.record.Report(journal.Event{What: journal.Failed, Cause: lost, On: s.from.failedOn(), Answer: fault.Answer})
	tier := s.plan()
	var cause *openai.Error
	switch tier {
	case lifecycle.Broken:
		s.step(lifecycle.Event{What: lifecycle.GivenUp})
	case lifecycle.Concluding:
	default:
		j.record.Report(journal.Event{What: journal.Retried})
		var next *stream
		if next, cause = j.serve(nil); cause == nil {
			s.adopt(next)
		} else {
			tier = lifecycle.Broken
		}
	}
	counter := j.srv.metrics.losses
	switch {
	case fault.Why == lifecycle.GivenBack:
		counter = j.srv.metrics.recomputes
	case moved:
		counter = j.srv.metrics.moves
	}
	counter.WithLabelValues(tier).Inc()
	switch {
	case tier != lifecycle.Broken:
		j.srv.Log.Info("an answer goes on after its decode engine lost it", zap.Inline(j), zap.String("lost", fault.Answer.Code),
			zap.String("tier", tier),
			zap.Bool("token_exact", tier != lifecycle.ByText), zap.Int("tokens", s.tokens()), zap.String("engine", s.from.rank.Target.ID))
	case cause != nil && cause.Status == journal.StatusClientClosed:
		s.finish(failure.Gone)
	case cause != nil:
		j.srv.Log.Warn("an answer could not go on after its decode engine lost it", zap.Inline(j), zap.String("cause", cause.Message))
		s.finish(fault.Answer)
	}
}

// plan decides how the lost answer goes on, and prepares the job for its next attempt. With lifecycle.Concluding no token is left to
// compute, and plan has put the end of the answer into the stream. With lifecycle.Broken the answer cannot go on.
func (s *stream) plan() lifecycle.Tier {
	j, resume := s.job, &s.job.resume
	if s.earlierTrail == nil {
		s.earlierTrail = &sse.Trail{}
	}
	if s.earlierTrail.Head.ID == nil { // of the first source that is part of the answer
		s.earlierTrail.Head, s.earlierTrail.Prompt = s.from.answer.Trail.Head, s.from.answer.Trail.Prompt
	}
	s.earlierTrail.Join(&s.from.answer.Trail)
	loss := lifecycle.Loss{
		Said: s.earlierTrail, Finished: s.from.answer.Mirror.Finished(), Keeping: resume.keeping, Streamed: j.req.Stream,
		May: j.life.Losses() < recomputeMax(s.from.rank.Profile) && j.req.Endpoint.GoesOn(),
		How: resume.how, IDs: resume.promptIDs, Alone: resume.promptTokens, Most: j.maxWholeAnswer(), Limit: j.req.Limit,
		LimitKey: cmp.Or(j.req.MaxTokensKey, "max_tokens"),
	}
	if resume.keeping == lifecycle.KeepAll {
		loss.Plain, loss.Tools = !openai.Unresumable(&j.body, j.req.Endpoint), openai.HasTools(&j.body)
		if resume.how == mooncake.ResumeText {
			if loss.Text = j.parts().Text(); openai.Echoes(&j.body) { // the answer begins with the prompt's text
				loss.Text = []byte(`""`)
			}
		}
	}
	if resume.keeping != lifecycle.KeepNothing {
		loss.Seen = j.seesTokens()
	}
	p := loss.Plan()
	switch {
	case p.Tier == lifecycle.Broken:
		return p.Tier
	case p.Tier == lifecycle.Concluding && loss.Finished:
		s.writeEnding(p.Said.Head, "")
		return p.Tier
	case p.Unseen:
		s.from.answer.Assembler = newAssembler(j)
	}
	s.earlierTrail, j.ask.Seam = p.Said, p.Seam
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

// maxWholeAnswer is how many tokens the whole answer may have, together with what the client has of it already.
func (j *job) maxWholeAnswer() int {
	most := prompt.Longest(j.model.MaxLen)
	if j.model.MaxLen > 0 {
		most -= j.resume.promptTokens
	}
	if j.req.Limit > 0 {
		most = min(most, j.req.Limit)
	}
	return most
}

// adopt makes the source of next that of this stream. next is the stream of the attempt that goes on with the answer; its first events
// are here.
func (s *stream) adopt(next *stream) {
	assembler := s.from.answer.Assembler
	s.detach()
	s.from = next.from
	s.from.answer.Assembler = assembler
	s.stage, s.broken, next.stage = next.stage, next.broken, settled // s holds now what next held
	s.earlierTokens = s.job.resume.answerTokens
	if !next.lastTokenAt.IsZero() {
		s.lastTokenAt = next.lastTokenAt
	}
	if s.from.answer.Assembler == nil {
		return
	}
	for e := range sse.Events(s.from.answer.out) {
		if err := s.from.answer.Assembler.Add(e.Raw); err != nil {
			if s.stage == ended { // all that was missing came at once, so that the life is over
				s.broken = cmp.Or(s.broken, failure.Stream("upstream_broken", err))
			}
			s.fails(lifecycle.Unusable, failure.Stream("upstream_broken", err), err)
			break
		}
	}
	s.from.answer.out = s.from.answer.out[:0]
}

// resetForEnd makes the mirror ready for an end that evenkeel writes itself, of an answer that has so many tokens already.
func (s *stream) resetForEnd(tokens int) {
	ask := s.job.ask
	ask.Cached = s.job.cachedTokens
	s.earlierTokens = tokens
	s.from.answer.Mirror.Reset(ask)
	s.from.answer.Trail.Reset(false)
}

// writeEnding ends an answer in the engine's place: with its usage, and before that with the finish_reason in finish; empty: the engine
// has sent one. The count of tokens may be an estimate, so the usage never has more than the answer may have.
func (s *stream) writeEnding(head sse.Head, finish string) {
	j := s.job
	mirror := &s.from.answer.Mirror
	usage := sse.Usage{Prompt: cmp.Or(mirror.Prompt(), j.promptTokens), Completion: min(mirror.Tokens(), s.from.maxTokens),
		Cached: j.cachedTokens}
	if s.from.rank.Context > 0 {
		usage.Completion = min(usage.Completion, max(0, s.from.rank.Context-usage.Prompt))
	}
	if s.from.local || s.from.rank.Profile.Connector == mooncake.SGLang { // only the decode engine knows how many tokens were cached
		usage.Cached = -1
	}
	usage.Total = usage.Prompt + usage.Completion
	_, told := s.from.answer.Mirror.Usage()
	s.from.noUsage = !told
	for e := range sse.Events(ending(j.req.Endpoint, head, finish, usage)) {
		if s.stage < ended {
			s.event(e)
		}
	}
}

// verify checks that the engine of a resumed request has counted as many prompt tokens as prompt and answer have together. An engine
// that overlooked the answer so far would begin it again. want is how many tokens there must be; 0: more than the client's prompt alone
// has. counted is 0 if the engine did not say.
func (j *job) verify(want, counted int) *openai.Error {
	resume := &j.resume
	switch {
	case !j.life.Resumed() || counted == 0:
		return nil
	case want > 0 && counted != want, want == 0 && resume.answerTokens > 0 && counted <= resume.promptTokens:
		j.srv.Log.Warn("an engine ignored the answer so far and began it anew, so the answer ends here with an error", zap.Inline(j),
			zap.Int("prompt_tokens", counted), zap.Int("want", max(want, resume.promptTokens+1)), zap.Error(errIgnoredResume))
		return openai.NewError(http.StatusBadGateway, "recompute_unresumable", errIgnoredResume.Error())
	}
	return nil
}

// keep decides what of a request stays in memory, in case this rank loses its answer, and charges the gateway's account for it.
func (j *job) keep(rank *fleet.Rank) {
	if j.life.Resumed() {
		return
	}
	j.forget()
	resume := &j.resume
	resume.keeping, resume.how = lifecycle.KeepStart, j.howToResume(rank.Profile)
	switch {
	case recomputeMax(rank.Profile) == 0:
		resume.keeping = lifecycle.KeepNothing
	case resume.how != "" || !j.req.Stream:
		size := int64(len(j.body.Raw()) + len(resume.promptIDs))
		if j.srv.resumeBytes.Add(size) > int64(j.srv.Settings().Limits.ResumeBytes) {
			j.srv.resumeBytes.Add(-size)
			break
		}
		resume.keeping, resume.chargedBytes = lifecycle.KeepAll, size
	}
}

// forget gives back what keep took from the gateway's account.
func (j *job) forget() {
	j.srv.resumeBytes.Add(-j.resume.chargedBytes)
	j.resume.chargedBytes = 0
}

// shed drops the parts of the request that its answer will not need any more, so that a long prompt does not stay in memory during a
// long answer.
func (s *stream) shed() {
	j := s.job
	if s.firstAt.IsZero() || j.resume.keeping == lifecycle.KeepAll || j.resume.keeping == lifecycle.KeepStart &&
		s.from.answer.Mirror.Tokens() == 0 {
		return
	}
	s.from.answer.Mirror.Untrack()
	j.body, j.changes, j.resume.promptIDs, j.resume.keeping = mooncake.Body{}, nil, nil, lifecycle.KeepNothing
}

// howToResume returns the way in which a lost answer of this request could go on: a value of chat_resume, or how a prompt of completions
// is continued; empty: it could not.
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
	case mooncake.Chat, mooncake.Responses, mooncake.Messages:
	}
	switch {
	case how == mooncake.ChatResumeNone, !j.req.Endpoint.GoesOn():
		return ""
	case mooncake.ByText(how):
	case j.resume.promptIDs == nil, openai.Echoes(&j.body): // beside an echo the decode engine is not asked for ids
		how = byText
	}
	if how == mooncake.ResumeText && j.parts().Text() == nil {
		return ""
	}
	return how
}

// recomputeMax is how often the profile allows a lost answer to go on; 0: never.
func recomputeMax(profile *mooncake.Profile) int {
	if profile.RecomputeMax == nil {
		return 0
	}
	return *profile.RecomputeMax
}

// wantsIDs tells whether the prompt's token ids may be needed later.
func wantsIDs(req *openai.Request, profile *mooncake.Profile) bool {
	return req.Endpoint == mooncake.Completions || profile.ChatResume == mooncake.ChatResumeVLLM ||
		profile.ChatResume == mooncake.ChatResumeAscend
}

// seesTokens says whether the client sees more of each token than its text, such as its id. Then no token that the client has may be
// computed again.
func (j *job) seesTokens() bool {
	return j.ask.TokenIDs || j.req.Endpoint == mooncake.Generate || j.ask.ContinuousUsage || openai.HasLogprobs(&j.body)
}

package request

import (
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
)

// keep decides what stays of a request for the case that this rank loses it.
func (j *job) keep(rank *fleet.Rank) {
	if j.life.Resumed() {
		return
	}
	j.forget()
	r := &j.resume
	r.keeping, r.how = lifecycle.KeepStart, j.howToResume(rank.Profile)
	switch {
	case recomputeMax(rank.Profile) == 0:
		r.keeping = lifecycle.KeepNothing
	case r.how != "" || !j.req.Stream:
		size := int64(len(j.body.Raw()) + len(r.ids))
		if j.srv.resumeBytes.Add(size) > int64(j.srv.Settings().Limits.ResumeBytes) {
			j.srv.resumeBytes.Add(-size)
			break
		}
		r.keeping, r.charged = lifecycle.KeepAll, size
	}
}

// forget gives back what keep took from the gateway's account.
func (j *job) forget() {
	j.srv.resumeBytes.Add(-j.resume.charged)
	j.resume.charged = 0
}

// shed drops what the answer will not need any more: a long prompt must not
// stay for a long answer.
func (s *stream) shed() {
	j := s.job
	if s.firstAt.IsZero() || j.resume.keeping == lifecycle.KeepAll || j.resume.keeping == lifecycle.KeepStart && s.answer.Mirror.Tokens() == 0 {
		return
	}
	s.answer.Mirror.Untrack()
	j.body, j.leg, j.resume.ids, j.resume.keeping = mooncake.Body{}, nil, nil, lifecycle.KeepNothing
}

// howToResume is the way this request could go on, as far as it is known
// beforehand.
func (j *job) howToResume(p *mooncake.Profile) string {
	how := p.ChatResume
	byText := mooncake.ChatResumeContinue
	if j.req.Endpoint == mooncake.Completions {
		how, byText = mooncake.ResumePrompt, mooncake.ResumeText
	}
	switch {
	case how == mooncake.ChatResumeNone, !j.req.Endpoint.Common():
		return ""
	case mooncake.ByText(how):
	case j.resume.ids == nil, openai.Echoes(&j.body): // beside an echo the decode engine is not asked for ids
		how = byText
	}
	if how == mooncake.ResumeText && j.parts().Text() == nil {
		return ""
	}
	return how
}

func recomputeMax(p *mooncake.Profile) int {
	if p.RecomputeMax == nil {
		return 0
	}
	return *p.RecomputeMax
}

// wantsIDs tells whether the prompt's token ids may be needed later.
func wantsIDs(req *openai.Request, p *mooncake.Profile) bool {
	return req.Endpoint == mooncake.Completions || p.ChatResume == mooncake.ChatResumeVLLM || p.ChatResume == mooncake.ChatResumeAscend
}

// seesTokens tells whether the client is told of tokens beyond their text, so
// that none of them may be made anew.
func (j *job) seesTokens() bool {
	return j.ask.TokenIDs || j.ask.ContinuousUsage || openai.HasLogprobs(&j.body)
}

package request

import (
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/prompt"
)

// anyPrompt is more tokens than a prompt has.
const anyPrompt = 1 << 40

// computes tells the engine's monitor, right before the request is sent, how much of
// the prompt the engine may compute itself. Tokens that it computes beyond that were
// handed over and not pulled.
func (s *source) computes() {
	if s.may = handoff.BlockTokens; s.local {
		s.may = anyPrompt // the answer tells how long the prompt is
	}
	s.rank.Traffic.Sends(s.may)
}

// computed settles what computes told, once: the engine has counted the prompt by
// its first event, or the request is over.
func (s *source) computed() {
	if s.may == 0 {
		return
	}
	computed := s.may
	if s.local {
		computed = int64(prompt.Bytes(s.job.req, s.job.leg)) + handoff.BlockTokens
		if u, ok := s.answer.Mirror.Usage(); ok {
			computed = int64(u.Prompt)
		}
	}
	s.rank.Traffic.Settles(s.may, computed)
	s.may = 0
}

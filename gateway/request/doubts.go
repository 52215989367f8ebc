package request

import (
	"time"

	"evenkeel/gateway/handoff"
	"evenkeel/gateway/prompt"
)

func (j *job) discard(h *handoff.Handoff) {
	if j.client.Left() {
		j.srv.discards.Discard(h, j.freed)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}

// overdue counts an answer that was given up because what came then would not
// have been believed.
func (s *stream) overdue(h *handoff.Handoff) {
	if h != nil && !s.whole && s.wait.Over(time.Now()) {
		s.late()
	}
}

// late counts an answer whose KV may have been another prompt's.
func (s *source) late() {
	s.job.srv.metrics.latePulls.Inc()
	s.rank.Lost(s.job.req.Endpoint)
}

// believed says whether the KV of an answer whose first event has come was certainly kept until it was read.
func (s *stream) believed(h *handoff.Handoff) bool {
	if s.wait.Arrived(s.now) && !h.Refuted(s.job.srv.Serving(), s.job.srv.Monitor, s.wait, s.now) {
		return true
	}
	s.late()
	return false
}

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

package request

import (
	"time"

	"evenkeel/gateway/handoff"
)

// discard throws away a hand-off from which no answer is made.
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

package request

import (
	"slices"
	"time"

	"evenkeel/gateway/handoff"
)

// discard throws away a hand-off from which no answer is made.
func (j *job) discard(h *handoff.Handoff) {
	if j.client.left() {
		j.srv.discards.Discard(h, j.freed)
	} else {
		j.srv.discards.Discard(h, nil)
	}
}

// doubts are hand-offs that an engine may have read, and no answer was made of them.
type doubts []*handoff.Handoff

// add keeps a hand-off from which no answer may be made any more, because an
// engine may have read it: the request was sent to that engine, and it is not known
// what the engine did with it. Its prompt is prefilled anew. The hand-off is discarded
// once it is clear that the request is not what breaks engines. live: the engine
// has not said that it is done with the request.
func (d *doubts) add(h *handoff.Handoff, live bool) {
	if h != nil {
		h.Live = h.Live || live
		*d = append(*d, h)
	}
}

// settle discards what is kept as doubtful, or leaves it to the hold timeout
// where another engine must not see the request.
func (d *doubts) settle(j *job) {
	for _, h := range *d {
		if j.tries.Poisons() || h.Live && h.ProbeID != "" { // two requests of one id may be the end of an engine
			h.Orphan()
			continue
		}
		h.Avoid = slices.Clone(j.tries.Decode)
		j.discard(h)
	}
	*d = nil
}

// overdue counts an answer that was given up because what came then would not
// have been believed.
func (s *stream) overdue(h *handoff.Handoff) {
	if h != nil && !s.whole && s.wait.Over(time.Now()) {
		s.late()
	}
}

// late counts an answer whose KV may have been another prompt's.
func (s *stream) late() {
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

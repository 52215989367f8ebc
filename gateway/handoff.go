package gateway

import (
	"encoding/json"
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// handoff is a prefilled prompt with everything that must be settled with it.
type handoff struct {
	*mooncake.Handoff
	lease *prefill.Lease
	born  string // incarnation of the prefiller that made it
	job   *job
	id    string          // X-Request-Id that a decode request must have; empty: any new one
	kv    json.RawMessage // the taken params, while no engine has accepted them
}

// take returns the params for a decode request. The hand-off is taken once;
// until an engine accepts it the params may go to another rank, before the same
// deadline.
func (h *handoff) take(now time.Time) (json.RawMessage, error) {
	if h.kv != nil {
		if !now.Before(h.Deadline()) {
			return nil, mooncake.ErrExpired
		}
		return h.kv, nil
	}
	var err error
	h.kv, err = h.Take(now)
	return h.kv, err
}

// identify gives a decode request the probe's id where the prefill engine knows
// the blocks by nothing else. Neither engine has another request of that id then:
// the probe is over, and a hand-off is with one decode engine at a time.
func (h *handoff) identify(headers []engine.Header) []engine.Header {
	if h == nil || h.id == "" {
		return headers
	}
	for i := range headers {
		if headers[i].Name == requestID {
			headers[i].Value = h.id
		}
	}
	return headers
}

// release and orphan end the lease of a hand-off that a decode request consumed;
// nil is none.
func (h *handoff) release() {
	if h != nil {
		h.lease.Release()
	}
}

func (h *handoff) orphan() {
	if h != nil {
		h.lease.Orphan()
	}
}

// pulledBy is until when a first event is believed: the KV it was made of was
// read while the prefiller still had the blocks. What comes later may be made of
// blocks that are somebody else's by then (contract 2.4). A quarter of the margin
// is for what the two clocks disagree on: the engine counts from the end of the
// prefill, we from its answer. An answer in one piece does not tell when its pull
// was, and is not held to it.
func (h *handoff) pulledBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// overdue counts an answer that was given up because what came then would not
// have been believed.
func (j *job) overdue(h *handoff, s *stream) {
	if h != nil && !s.whole && !time.Now().Before(h.pulledBy()) {
		j.gw.metrics.latePulls.Inc()
	}
}

// drainBy is until when a decode of it may begin that nobody reads.
func (h *handoff) drainBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 2) // the pull takes its time
}

package request

import (
	"encoding/json"
	"errors"
	"slices"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/fleet"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// handoff is a prefilled prompt with everything that must be settled with it.
type handoff struct {
	*mooncake.Handoff
	lease *prefill.Lease
	born  fleet.Birth
	job   *job
	id    string          // X-Request-Id that a decode request must have; empty: any new one
	kv    json.RawMessage // the taken params, while no engine can have read them

	// Its discard sends these: the job may be at another attempt by then.
	body    mooncake.Body
	leg     *mooncake.Leg
	prompt  int     // tokens
	attempt int     // that prefilled it
	avoid   []int32 // workers that failed at it
	live    bool    // one of them may work on it still
}

// take returns the params for a decode request. The hand-off is taken once; as
// long as no byte of a request with it was written, the params may go to another
// rank, before the same deadline.
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

// identify gives a decode request the probe's id if the prefill engine knows the
// blocks only by that id. No engine then has another request of this id: the probe
// is over, and such a hand-off is not discarded while an engine may still have it.
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
// blocks that are somebody else's by then. A quarter of the margin
// is for what the two clocks disagree on: the engine counts from the end of the
// prefill, we from its answer. An answer in one piece does not tell when its pull
// was, and is not held to it.
func (h *handoff) pulledBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// bindBy is until when it may wait for a rank. It is a little before the deadline,
// because the hand-off must also be sent before the deadline.
func (h *handoff) bindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// overdue counts an answer that was given up because what came then would not
// have been believed.
func (j *job) overdue(h *handoff, s *stream) {
	if h != nil && !s.whole && !s.rank.Profile.Renews() && !time.Now().Before(h.pulledBy()) {
		j.srv.metrics.latePulls.Inc()
	}
}

// discardBy is until when its discard may begin: the pull needs some time before the
// prefiller frees the blocks by itself.
func (h *handoff) discardBy() time.Time { return h.pulledBy() }

// doubt keeps a hand-off from which no answer may be made any more, because an
// engine may have read it: the request was sent to that engine, and it is not known
// what the engine did with it. Its prompt is prefilled anew. The hand-off is discarded
// once it is clear that the request is not what breaks engines. live: the engine
// has not said that it is done with the request.
func (j *job) doubt(h *handoff, live bool) {
	if h != nil {
		h.live = h.live || live
		j.doubtful = append(j.doubtful, h)
	}
}

// settleDoubts discards what is kept by doubt, or leaves it to the hold timeout
// where another engine must not see the request.
func (j *job) settleDoubts() {
	for _, h := range j.doubtful {
		if j.tries.suspect >= poison || h.live && h.id != "" { // two requests of one id may be the end of an engine
			h.orphan()
			continue
		}
		h.avoid = slices.Clone(j.tries.decode)
		j.srv.discard(h, j.model)
	}
	j.doubtful = nil
}

var errOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")

// Package handoff has the hand-offs of prefilled prompts: until when a decode engine may use one, and how one that no request will use is
// discarded.
package handoff

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// A Handoff is a prefilled prompt: its KV on the prefill engine, the lease that counts this KV, and the attempt that made it.
type Handoff struct {
	mooncake.Handoff
	Origin
	Lease     *prefill.Lease
	Born      fleet.Birth
	Avoid     []int32         // decode workers that failed with this hand-off
	kv        json.RawMessage // the kv_transfer_params; nil: they were not taken yet
	witnessed witness         // what the prefill engine had said when the hand-off was sent
}

// Origin is the attempt that made the hand-off. When the hand-off is discarded, the request may be at a later attempt.
type Origin struct {
	Request  zapcore.ObjectMarshaler // names it in the log
	ID       string                  // of the request
	ProbeID  string                  // X-Request-Id that a decode request must have; empty: it gets a new one
	Arrival  time.Time
	Model    fleet.Route
	Endpoint mooncake.Endpoint
	Body     mooncake.Body
	Changes  *mooncake.Changes
	Prompt   int // tokens
	Attempt  int
}

// Params returns the kv_transfer_params for a decode request. A later call returns the same params until the hand-off's deadline. The
// caller makes it only if no byte of the earlier request was written to an engine, because a hand-off must be used once.
func (h *Handoff) Params(now time.Time) (json.RawMessage, error) {
	if h.kv != nil {
		if !now.Before(h.Deadline()) {
			return nil, mooncake.ErrExpired
		}
		return h.kv, nil
	}
	var err error
	h.kv, err = h.Acquire(now)
	return h.kv, err
}

// Identify gives a decode request the probe's id if the prefill engine knows the blocks only by that id. Without a hand-off (h is nil) the
// headers stay as they are. Two requests with this id never run at once: the probe is over, and the hand-off is not discarded while an
// engine may still decode it.
func (h *Handoff) Identify(headers []engine.Header) []engine.Header {
	if h == nil || h.ProbeID == "" {
		return headers
	}
	for i := range headers {
		if headers[i].Name == engine.RequestID {
			headers[i].Value = h.ProbeID
		}
	}
	return headers
}

// PulledBy is the latest time of a first event that proves that the KV was pulled while the prefill engine still held the blocks. A later
// event may be made from blocks that another request has by then, unless the engine has renewed the hold. PulledBy lies before Expires by a
// quarter of the margin between Deadline and Expires, because the engine counts from the end of the prefill, and the proxy from the
// engine's answer. It does not bound an answer in one piece, which does not show when its KV was pulled.
func (h *Handoff) PulledBy() time.Time {
	return h.Expires().Add(-h.Expires().Sub(h.Deadline()) / 4)
}

// BindBy is until when the hand-off may wait for a rank: a little before its deadline, so that it can still be sent in time.
func (h *Handoff) BindBy() time.Time {
	return h.Deadline().Add(-min(h.Expires().Sub(h.Deadline())/16, 250*time.Millisecond))
}

// ErrOutlived is the error of a hand-off whose prefill engine was started anew, so that the KV is gone.
var ErrOutlived = errors.New("the prefill engine's process that made the hand-off is gone, and its KV with it")

// ErrLate is the error of an answer that began so late that the decode engine may have pulled another prompt's KV.
var ErrLate = errors.New("the decode engine gave no sign of life for longer than the prefill engine certainly keeps the KV, and began " +
	"its answer after that: it may be made of another prompt's KV")

// BlockTokens is the number of tokens in the largest KV block that engines use. An engine may pull whole blocks only, and then computes the
// rest of the prompt itself, which is less than one block.
const BlockTokens = 128

// Settle gives the lease of a prompt back, in the way that how names. fault is why the request to the engine failed; nil: it did not fail.
func Settle(l *prefill.Lease, how lifecycle.How, fault *failure.Fault) {
	if (how == lifecycle.Refuse || how == lifecycle.Lose) && fault != nil && fault.Err != nil {
		l.Blame(fault.Err.Error())
	}
	switch how {
	case lifecycle.Free:
		l.Release()
	case lifecycle.Refuse:
		l.Failed(false, 0)
	case lifecycle.Lose:
		l.Failed(true, l.Candidate.Profile.KVHoldTimeout)
	default: // the prefill engine keeps the KV until its hold timeout, because no engine will pull it
		l.Orphan()
	}
}

// LimitFromSlot ends a call once its request has had a slot for as long as limit, unless stop is called before. The caller calls stop at
// the first event. A hand-off may be sent to a rank that has no slot or no KV room for it yet: shortly before a slot comes free, or at the
// hand-off's deadline. The time before it has a slot does not count, because it then waits in the engine's own queue.
func LimitFromSlot(slot *dispatcher.Slot, call *engine.Call, limit time.Duration) (stop func()) {
	every := max(limit/16, time.Millisecond) // the time between two looks at the slot
	var slotSince time.Time                  // zero: the request has had no slot yet
	return Watch(every, func() time.Duration {
		switch now := time.Now(); {
		case slot.Waits():
		case slotSince.IsZero():
			slotSince = now
		case now.Sub(slotSince) >= limit:
			call.Expire()
		}
		return every
	})
}

// Watch calls look after the time `after`, and then again and again, each time after the duration that look has returned. It ends when look
// returns 0 or less, or when stop is called. Once stop has returned, look does not run any more.
func Watch(after time.Duration, look func() (again time.Duration)) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer // nil: it was stopped
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(after, func() {
		mu.Lock()
		defer mu.Unlock()
		if timer == nil {
			return
		}
		if again := look(); again > 0 {
			timer.Reset(again)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		timer.Stop()
		timer = nil
	}
}

// Patience is how much longer evenkeel waits for an answer in one piece; 0 or less: the wait is over. asked is when the request was sent,
// and tokens is how many tokens the answer may have. Nothing arrives before the whole answer is computed. So after limits.probe_timeout
// evenkeel goes on waiting while the rank gives signs of life, in events of other streams or in its gauges, but for no longer than so many
// tokens can take.
func Patience(r *fleet.Rank, settings *fleet.Settings, asked time.Time, tokens int, now time.Time) time.Duration {
	until := asked.Add(settings.Limits.ProbeTimeout)
	latest := until.Add(time.Duration(min(tokens, mostTokens)) * slowestToken)
	if alive := r.Signs.Last().Add(settings.Limits.EventTimeout); alive.After(until) {
		until = alive
	}
	if until.After(latest) {
		until = latest
	}
	return until.Sub(now)
}

// slowestToken is more time than any engine takes for one token. It ends the wait for an engine that has lost this request, but still gives
// signs of life because it serves others.
const slowestToken = time.Second

// mostTokens keeps the time for so many tokens within a time.Duration. The limits of an answer may allow more: several hundred choices, of
// a model whose context is not known.
const mostTokens = 1 << 32

// LimitWhole ends the call for an answer in one piece when Patience is over, unless stop is called before. tokens is how many tokens the
// answer may have.
func LimitWhole(r *fleet.Rank, call *engine.Call, settings *fleet.Settings, tokens int) (stop func()) {
	asked := time.Now()
	return Watch(Patience(r, settings, asked, tokens, asked), func() time.Duration {
		left := Patience(r, settings, asked, tokens, time.Now())
		if left <= 0 {
			call.Expire()
		}
		return left
	})
}

// Await begins the wait for the first event of a request that is sent to a rank, with a hand-off or, if h is nil, without one. The wait
// knows until when the prefill engine certainly keeps the KV. If whole is set, the answer comes in one piece, so that until then only the
// rank's gauges can show that the engine works.
func (h *Handoff) Await(r *fleet.Rank, now time.Time, whole bool) *engine.Wait {
	switch {
	case h == nil || whole && !(r.Profile.Renews() && r.Signs.Gauged() && r.Heeds(h.Endpoint)):
		return r.Signs.Await(now, mooncake.HeldUntil(now.Add(Forever)))
	case !r.Heeds(h.Endpoint): // the engine may run the request on another rank, so this rank's signs of life prove nothing about it
		return r.Signs.Await(now, mooncake.HeldUntil(h.PulledBy()))
	}
	return r.Signs.Await(now, r.Profile.Hold(now, h.PulledBy()))
}

// Strands says whether a decode engine may keep KV blocks for ever for a hand-off that has expired. This happens if the engine stood still
// and reads the request only now: it then waits for KV that is gone. An engine that has answered has read the request earlier.
func Strands(r *fleet.Rank, fault *failure.Fault) bool {
	return fault.Verdict().KV == lifecycle.DoubtOn && fault.Why < lifecycle.Garbled && lifecycle.Dialects[r.Profile.Connector].Strands
}

// Forever is the limit of a wait that has no limit of its own.
const Forever = 1000 * time.Hour

// witness is what was known of a prefill engine's expired hand-offs when one of its hand-offs was sent to a decode engine.
type witness struct {
	expired     float64 // hand-offs whose KV the engine had freed before a decode engine pulled it, as the engine counts them
	known       bool    // the engine reports this count
	oursExpired int     // the same for hand-offs of this proxy, which had left them to the engine's hold timeout
}

// Witness notes how many hand-offs of the prefill engine have expired when this one is sent. Refuted compares with these numbers.
func (h *Handoff) Witness(m Monitor) {
	h.witnessed.expired, h.witnessed.known = m.Expired(h.Lease.Candidate.Instance)
	held, ever := h.Lease.Unfetched()
	h.witnessed.oursExpired = ever - held
}

// Refuted says whether the prefill engine may have freed the KV before the first event of the answer came. It is false if the event came so
// early that the KV needed no renewal, or if the engine does not count its expired hand-offs. Else Refuted compares two numbers since this
// hand-off was sent: how many hand-offs expired on the engine, and how many this proxy let expire. If more expired, this one may be among
// them. Hand-offs that another proxy let expire count too, and then a prompt is prefilled again in vain.
func (h *Handoff) Refuted(ctx context.Context, m Monitor, wait *engine.Wait, now time.Time) bool {
	if h == nil || !h.witnessed.known || !wait.Renewed(now) {
		return false
	}
	expired, known := m.ExpiredNow(ctx, h.Lease.Candidate.Instance)
	_, ever := h.Lease.Unfetched()
	if !known || expired-h.witnessed.expired <= float64(ever-h.witnessed.oursExpired) {
		return false
	}
	wait.Resalt() // the decode engine may have cached the wrong KV
	return true
}

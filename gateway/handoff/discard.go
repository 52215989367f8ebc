package handoff

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/engine"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/service"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// The outcomes of a discard, as evenkeel_drains_total labels them. After all but the first, the prefill engine keeps the KV until its hold
// timeout.
const (
	discardDone     = "drained"
	discardUnplaced = "unplaced" // no rank had room in time
	discardCrowded  = "crowded"  // as many discards ran already as the pool has places
	discardExpired  = "expired"
	discardFailed   = "failed"  // the call to the decode engine failed
	discardRefused  = "refused" // the decode engine refused the call, and its refusals are not known to make the prefill engine free the KV
)

// Config is what a Discarder needs of the proxy.
type Config struct {
	Context    context.Context // ends when the last stream has ended
	Settings   func() *fleet.Settings
	Client     *engine.Client
	Monitor    Monitor
	Engines    func() Engines // as they are now
	Places     *pool.Places
	Dispatcher Dispatcher
	NextID     func() uint64 // returns a new ID for an entry of the pool
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// Monitor takes reports about engines, and says how many hand-offs of a prefill engine have expired.
type Monitor interface {
	Judge(instance string, v engine.Verdict, why error)
	Report(instance string, err error)
	Expired(instance string) (n float64, known bool)
	ExpiredNow(ctx context.Context, instance string) (n float64, known bool)
}

// Engines says where hand-offs can be decoded.
type Engines interface {
	Rank(worker int32) *fleet.Rank
	Beside(worker int32, host bool, list []int32) []int32
	RegionFor(prefiller string) string
	BoardFor(c prefill.Candidate, model, region string) string
	Outlived(b fleet.Birth) (gone, sure bool)
	RejectionFrees(r *fleet.Rank) bool
}

// Dispatcher gives slots.
type Dispatcher interface {
	Enqueue(e *pool.Entry, hits ...board.Hit) <-chan dispatcher.Result
	Release(s *dispatcher.Slot, o board.Outcome)
}

// A Discarder discards hand-offs that no request will use, so that their prefill engines free the KV.
type Discarder struct {
	Config
	service.Leftovers // the discards under way
	outcomes          *prometheus.CounterVec
}

// NewDiscarder makes the Discarder of a proxy.
func NewDiscarder(c Config) *Discarder {
	d := &Discarder{Config: c, outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "evenkeel_drains_total", Help: "Hand-offs that no client waits for any more, by what became of them. drained: a decode engine " +
			"pulled the KV and the answer was thrown away, so that the prefill engine frees the KV. The others wait for the engine's hold " +
			"timeout: unplaced found no rank in time, crowded had too many others before them, expired came too late, failed and refused " +
			"ended so on a decode engine.",
	}, []string{"outcome"})}
	for _, outcome := range []string{discardDone, discardUnplaced, discardCrowded, discardExpired, discardFailed, discardRefused} {
		d.outcomes.WithLabelValues(outcome)
	}
	c.Registerer.MustRegister(d.outcomes)
	return d
}

// Discard makes the prefill engine free the KV of a hand-off that no request will use. A prefill engine frees the blocks only when a decode
// engine pulls them. So a rank that the dispatcher picks decodes one token, charged like any request, and the token is thrown away. Until
// the pull, or until the engine's hold timeout, the hand-off counts on the KV budget of the prefill engine. If a decode engine has pulled
// the hand-off before, the blocks that this decode pulls may hold another prompt's KV. So the decode has a cache_salt of its own, under
// which no other request finds the blocks. Discard returns at once. freed, which may be nil, is called from another goroutine once the
// prefill engine has freed the KV.
func (d *Discarder) Discard(h *Handoff, freed func()) {
	h.Lease.PassOn()
	finish := func(outcome string, err error) {
		d.outcomes.WithLabelValues(outcome).Inc()
		if err != nil {
			h.Lease.Orphan()
			d.Log.Warn("no decode engine fetches a hand-off, so its prefill engine keeps the KV until the hold timeout", zap.Inline(h.Request),
				zap.String("prefill", h.Lease.Candidate.ID), zap.Error(err))
		}
	}
	// The number of concurrent discards is bounded, because each discard keeps the body of its request in memory.
	switch err := d.Run(d.Places.Size(), func() {
		outcome, err := d.discardNow(h)
		if err == nil && freed != nil {
			freed()
		}
		finish(outcome, err)
	}); {
	case errors.Is(err, service.ErrCrowded):
		finish(discardCrowded, errCrowded)
	case err != nil:
		finish(discardUnplaced, err)
	}
}

// discardTries is how many times at most a discard asks a decode rank.
const discardTries = 3

// discardNow discards a hand-off, and returns the outcome, as evenkeel_drains_total labels it. After an error, the prefill engine keeps the
// KV until its hold timeout.
func (d *Discarder) discardNow(h *Handoff) (outcome string, err error) {
	for try := 1; ; try++ {
		engines := d.Engines()
		if gone, _ := engines.Outlived(h.Born); gone {
			return discardExpired, errors.Join(ErrOutlived, err)
		}
		c := h.Lease.Candidate
		placed := <-d.Dispatcher.Enqueue(&pool.Entry{
			ID: d.NextID(), Model: engines.BoardFor(c, h.Model.Name, engines.RegionFor(c.Instance)), Name: h.Model.Name, Prompt: h.Prompt,
			Arrival: h.Arrival, Entered: time.Now(),
			Deadline:  h.PulledBy(),
			Prefiller: c.Instance,
			Avoid:     h.Avoid,
			Discard:   true,
			Response:  h.Endpoint == mooncake.Responses,
		})
		if placed.Err != nil {
			return discardUnplaced, errors.Join(placed.Err, err)
		}
		var again bool
		outcome, again, err = d.discardOn(placed.Slot, h, try)
		// A discard that must use the id of its probe is not tried again after a call that failed: the engine may still run the request
		// with this id.
		idInUse := h.ProbeID != "" && outcome == discardFailed
		if err == nil || !again || try == discardTries || idInUse {
			return outcome, err
		}
		select { // the pause lets the monitor learn of the failure, so that the next rank is another one
		case <-time.After(d.Settings().Prefill.Retry.Base << try):
		case <-d.Context.Done():
			return outcome, err
		}
	}
}

// discardOn has the rank of a slot decode one token from a hand-off, and gives the slot back. again says that another rank may still
// succeed. If the rank was silent until the time limit, no other rank is tried: the hand-off may be the cause, and then the next decode
// would hold its slot as long. try counts from 1, and is part of the request's id.
func (d *Discarder) discardOn(slot *dispatcher.Slot, h *Handoff, try int) (outcome string, again bool, err error) {
	slotOutcome := board.Outcome{Kind: board.Failed}
	defer func() { d.Dispatcher.Release(slot, slotOutcome) }()
	now := time.Now()
	// After PulledBy too little time is left for a pull before the prefill engine frees the blocks by itself. The check is here, because
	// the hand-off may have spent time on another rank.
	if !now.Before(h.PulledBy()) {
		return discardExpired, false, mooncake.ErrExpired
	}
	rank := d.Engines().Rank(slot.Worker)
	if h.kv == nil { // not nil: the params were taken for another rank, which then failed
		if h.kv, err = h.Discard(now); err != nil {
			return discardExpired, false, err
		}
	}
	h.Lease.Dispatched()
	rank.Traffic.Sends(BlockTokens)
	defer rank.Traffic.Settles(BlockTokens, BlockTokens)
	silence := rank.Profile.FirstEventTimeout
	call := upstream.Call{
		Call: upstream.New(d.Client, rank.Profile, rank.Target).Fresh(), Leg: lifecycle.Decode, Engine: rank.Instance, Scope: rank.Scope,
		Path: h.Endpoint.Path(), Beyond: slot.Beyond,
		Limits: engine.Deadlines{Connect: d.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: d.Log,
	}
	defer context.AfterFunc(d.Context, call.Abort)() // a shutdown does not wait for the discard
	if slot.Beyond {
		rank.Traffic.Beyond(1)
		defer rank.Traffic.Beyond(-1)
	}
	headers := h.Identify(engine.JSONHeaders(fmt.Sprintf("ek-%s-x%d-%d", h.ID, h.Attempt, try)))
	_, f := call.Whole(headers, rank.Profile.DiscardBody(&h.Body, h.Endpoint, h.Changes, h.kv, rand.Text(), nil), nil,
		d.Settings().Limits.EventBytes, now.Add(silence))
	if f != nil {
		h.Avoid = d.Engines().Beside(slot.Worker, f.Why == lifecycle.Failed, h.Avoid)
	}
	if f != nil {
		unanswered := f.Status == 0 && f.Why != lifecycle.NotOurs
		outOfService := f.Why == lifecycle.Withheld || f.Why == lifecycle.Unlisted // the engine itself says so
		if unanswered || outOfService {
			d.Monitor.Report(f.Engine, f.Err)
		}
	}
	switch {
	case f == nil:
		slot.Started() // the KV came
		d.Monitor.Judge(rank.Instance, engine.Served, nil)
	case f.Why == lifecycle.NotOurs:
		slotOutcome.Kind = board.Cancelled
		return discardUnplaced, true, f.Err
	case f.Status == 0:
		slotOutcome.Lost = d.discardLost(f)
		slotOutcome.Orphaned = !time.Now().Before(h.PulledBy()) && Strands(rank, f)
		return discardFailed, f.Why != lifecycle.Silent, f.Err
	case f.Why == lifecycle.Withheld:
		return discardRefused, true, f.Err
	case !d.Engines().RejectionFrees(rank): // the refusal leaves the KV on the prefill engine
		return discardRefused, true, f.Err
	}
	h.Lease.Release()                                              // the KV was pulled, or the refusal made the prefill engine free it
	slotOutcome.Kind, slotOutcome.Kept = board.Cancelled, f == nil // after an answer of one token, too, the engine keeps its KV
	return discardDone, false, nil
}

// discardLost tells the monitor that a decode engine failed in the decode of a discarded hand-off, or was silent. It returns whether the
// request may have reached the engine. If the proxy itself ended the call (HungUp), the engine is not to blame.
func (d *Discarder) discardLost(f *failure.Fault) bool {
	switch f.Why {
	case lifecycle.HungUp:
		return false
	case lifecycle.Silent:
		d.Monitor.Judge(f.Engine, engine.Silent, f.Err)
	default:
		d.Monitor.Judge(f.Engine, engine.Faulted, f.Err)
	}
	return f.Far != lifecycle.Unsent
}

var errCrowded = errors.New("as many hand-offs as the pool has places are being discarded already; raise pool.size or add decode capacity")

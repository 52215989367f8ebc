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
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/service"
	"evenkeel/gateway/upstream"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// Labels of evenkeel_drains_total. Only with discardDone does the prefill engine free the KV before
// its hold timeout.
const (
	discardDone     = "drained"
	discardUnplaced = "unplaced" // no decode rank had room in time
	discardCrowded  = "crowded"  // too many other discards run already
	discardExpired  = "expired"  // the hand-off was too old, or its prefill engine has restarted
	discardFailed   = "failed"   // the decode engine broke the call
	discardRefused  = "refused"  // and the KV may stay where it is
)

// Config is what a Discarder needs of the proxy.
type Config struct {
	Context    context.Context // ends when the last answer stream has ended
	Settings   func() *fleet.Settings
	Client     *engine.Client
	Monitor    Monitor
	Engines    func() Engines
	Places     *pool.Semaphore
	Dispatcher Dispatcher
	NextID     func() uint64 // makes the id of a new pool entry
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// Monitor learns how engines serve. Expiries says how many hand-offs a prefill engine has freed
// because no decode engine fetched them.
type Monitor interface {
	RecordOutcome(instance string, v engine.Verdict, why error)
	ReportFailure(instance string, err error)
	Expiries(instance string) engine.Expiries
	ExpiriesNow(ctx context.Context, instance string) engine.Expiries
}

// Engines says where hand-offs can be decoded.
type Engines interface {
	Rank(worker int32) *roster.Rank
	FailingWith(worker int32, host bool, list []int32) []int32
	RegionFor(prefiller string) string
	BoardFor(c prefill.Candidate, model, region string) string
	KVInDoubt(made roster.Generation) (inDoubt, gone bool)
	RejectionFrees(r *roster.Rank) bool
}

// Dispatcher assigns slots on decode ranks, and takes them back.
type Dispatcher interface {
	Enqueue(e *pool.Entry) <-chan dispatcher.Result
	Release(s *dispatcher.Slot, o board.Outcome)
}

// A Discarder frees the KV of hand-offs that no request uses any more.
type Discarder struct {
	Config
	service.Background // runs the discards, and limits how many run at once
	outcomes           *prometheus.CounterVec
}

// NewDiscarder also registers evenkeel_drains_total.
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

// Discard frees the KV of a hand-off that no request uses any more. A prefill engine frees KV
// blocks only when a decode engine pulls them, so one token is decoded on a rank that the
// dispatcher picks, charged like any request. Until then, or the hold timeout, the hand-off counts
// against the budget of its prefill engine.
//
// The blocks may belong to another prompt by now, so the decode has a random cache_salt, and no
// other request can reuse its KV. Discard returns at once. freed, which may be nil, is called on
// another goroutine once the KV is free.
func (d *Discarder) Discard(h *Handoff, freed func()) {
	h.Lease.DetachOwner() // the discard may outlive the request, the owner for the audit of leases
	finish := func(outcome string, err error) {
		d.outcomes.WithLabelValues(outcome).Inc()
		if err != nil {
			h.Lease.Orphan()
			d.Log.Warn("no decode engine fetches a hand-off, so its prefill engine keeps the KV until the hold timeout", zap.Inline(h.Request),
				zap.String("prefill", h.Lease.Candidate.ID), zap.Error(err))
		}
	}
	// Each discard keeps its request's body.
	err := d.Run(d.Places.Size(), func() {
		outcome, err := d.discardNow(h)
		if err == nil && freed != nil {
			freed()
		}
		finish(outcome, err)
	})
	switch {
	case errors.Is(err, service.ErrCrowded):
		finish(discardCrowded, errCrowded)
	case err != nil:
		finish(discardUnplaced, err)
	}
}

const discardTries = 3

// After an error, the KV stays on the prefill engine until the hold timeout.
func (d *Discarder) discardNow(h *Handoff) (outcome string, err error) {
	for try := 1; ; try++ {
		engines := d.Engines()
		if inDoubt, _ := engines.KVInDoubt(h.Made); inDoubt { // err is that of the try before
			return discardExpired, errors.Join(ErrOutlived, err)
		}
		c := h.Lease.Candidate
		placed := <-d.Dispatcher.Enqueue(&pool.Entry{
			ID: d.NextID(), Model: engines.BoardFor(c, h.Model.Name, engines.RegionFor(c.Instance)), Name: h.Model.Name, Prompt: h.Prompt,
			Arrival: h.Arrival, Entered: time.Now(),
			Deadline:  h.FirstEventBy(),
			Prefiller: c.Instance,
			Avoid:     h.Avoid,
			Discard:   true,
			Response:  h.Endpoint == mooncake.Responses,
		})
		if placed.Err != nil {
			return discardUnplaced, errors.Join(placed.Err, err)
		}
		var tryOther bool
		outcome, tryOther, err = d.discardOn(placed.Slot, h, try)
		// After a call that broke, an engine may still run the request of this id.
		idInUse := h.ReusedRequestID != "" && outcome == discardFailed
		mayTryAgain := tryOther && !idInUse && try < discardTries
		if err == nil || !mayTryAgain {
			return outcome, err
		}
		select { // so that the monitor knows of the failure by the next try
		case <-time.After(d.Settings().Prefill.Retry.Base << try):
		case <-d.Context.Done():
			return outcome, err
		}
	}
}

// tryOther says that another rank may succeed.
func (d *Discarder) discardOn(slot *dispatcher.Slot, h *Handoff, try int) (outcome string, tryOther bool, err error) {
	slotOutcome := board.Outcome{Kind: board.Failed}
	defer func() { d.Dispatcher.Release(slot, slotOutcome) }()
	now := time.Now()
	// Too little time is left to pull the KV before the hold timeout, for example after a try on
	// another rank.
	if !now.Before(h.FirstEventBy()) {
		return discardExpired, false, mooncake.ErrExpired
	}
	rank := d.Engines().Rank(slot.Worker)
	if h.params == nil { // an earlier try may have taken them
		if h.params, err = h.Discard(now); err != nil {
			return discardExpired, false, err
		}
	}
	h.Lease.Dispatched()
	// The engine pulls whole blocks, and computes the rest of the prompt, less than one block. The
	// answer does not say how many tokens that were, so this upper bound stays.
	most := MostComputed(rank)
	rank.Traffic.ExpectComputed(most)
	defer rank.Traffic.SettleComputed(most, most)
	call := d.newCall(rank, slot, h)
	defer context.AfterFunc(d.Context, call.Abort)() // a shutdown does not wait for the discard
	if slot.InEngineQueue {
		rank.Traffic.AddSentWithoutSlot(1)
		defer rank.Traffic.AddSentWithoutSlot(-1)
	}
	headers := h.SetRequestID(engine.JSONHeaders(fmt.Sprintf("ek-%s-x%d-%d", h.ID, h.Attempt, try)))
	salt := rand.Text() // the KV may be another prompt's by now
	var newSegments [][]byte
	body := rank.Profile.DiscardBody(&h.Body, h.Endpoint, h.Changes, h.params, salt, newSegments)
	_, fault := call.SendAndRead(headers, body, d.Settings().Limits.EventBytes, now.Add(rank.Profile.FirstEventTimeout))
	if fault != nil {
		// A 500 may come from a broken driver or disk; a crash concerns one engine.
		wholeHost := fault.Reason == lifecycle.Failed
		h.Avoid = d.Engines().FailingWith(slot.Worker, wholeHost, h.Avoid)
	}
	d.reportToMonitor(rank.Instance, fault)
	if fault == nil {
		slot.ReportStarted() // the decode engine has the KV
	} else if outcome, tryOther = d.judgeFault(fault, rank, h, &slotOutcome); outcome != discardDone {
		return outcome, tryOther, fault.Err
	}
	h.Lease.Release() // pulled, or freed by the refusal
	slotOutcome.Kind = board.Cancelled
	slotOutcome.Kept = fault == nil // the engine may keep it in its prefix cache, as after any answer
	return discardDone, false, nil
}

func (d *Discarder) newCall(rank *roster.Rank, slot *dispatcher.Slot, h *Handoff) upstream.Call {
	silence := rank.Profile.FirstEventTimeout
	// A new connection, because the engine may have closed an idle one already.
	call := upstream.NewCall(d.Client, rank.Profile, rank.Target).Fresh()
	return upstream.Call{
		Call: call, Kind: lifecycle.Decode, Engine: rank.Instance, Scope: rank.Scope,
		Path: h.Endpoint.Path(), InEngineQueue: slot.InEngineQueue,
		Limits: engine.Deadlines{Connect: d.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: d.Log,
	}
}

// outcome is discardDone if the engine's refusal has freed the KV.
func (d *Discarder) judgeFault(
	fault *failure.Fault, rank *roster.Rank, h *Handoff, slotOutcome *board.Outcome,
) (outcome string, tryOther bool) {
	slotOutcome.Lost = fault.LosesHandoff()
	switch {
	case fault.Reason == lifecycle.NotOurs: // another proxy sends to the rank now; nothing was sent
		slotOutcome.Kind = board.Cancelled
		return discardUnplaced, true
	case fault.Status == 0: // no answer
		// Orphaned: the rank may hold KV blocks for ever. Before FirstEventBy the prefill engine
		// certainly has the KV for which the rank waits.
		slotOutcome.Orphaned = !time.Now().Before(h.FirstEventBy()) && LeaksBlocks(rank, fault)
		// If the hand-off is the cause of the silence, the next rank's slot would be held for as long.
		return discardFailed, fault.Reason != lifecycle.Silent
	case fault.Reason == lifecycle.Paused: // the part that would free the KV never saw the request
		return discardRefused, true
	case !d.Engines().RejectionFrees(rank):
		return discardRefused, true
	}
	return discardDone, false
}

// ReportFailure may make the monitor check the engine or take it for down. RecordOutcome counts:
// after several failures in a row, the engine gets no new requests.
func (d *Discarder) reportToMonitor(instance string, fault *failure.Fault) {
	switch {
	case fault == nil:
		d.Monitor.RecordOutcome(instance, engine.Served, nil)
		return
	case fault.Reason == lifecycle.NotOurs: // nothing was sent
		return
	// The refusal of this hand-off says nothing about the engine's health.
	case fault.Status != 0 && fault.Reason != lifecycle.Paused && fault.Reason != lifecycle.Unlisted:
		return
	}
	d.Monitor.ReportFailure(instance, fault.Err)
	switch {
	case fault.Status != 0: // it takes no requests now, or does not have the model
	case fault.Reason == lifecycle.HungUp: // the proxy has ended the call
	case fault.LosesHandoff():
		// The dispatcher finds out who is to blame; a canary shows whether the engine computes at all.
		d.Monitor.RecordOutcome(instance, engine.Unclear, fault.Err)
	default:
		d.Monitor.RecordOutcome(instance, engine.Faulted, fault.Err)
	}
}

var errCrowded = errors.New("as many hand-offs as the pool has places are being discarded already; raise pool.size or add decode capacity")

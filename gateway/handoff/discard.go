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

// The outcomes of a discarded hand-off, as labels of evenkeel_drains_total. Only with discardDone does the prefill engine free the KV
// before its hold timeout.
const (
	discardDone     = "drained"
	discardUnplaced = "unplaced" // no decode rank had room in time
	discardCrowded  = "crowded"  // too many other discards run already
	discardExpired  = "expired"  // the hand-off was too old, or its prefill engine has restarted
	discardFailed   = "failed"   // the decode engine broke the call
	discardRefused  = "refused"  // the decode engine refused the call, and its refusal may leave the KV where it is
)

// Config is what a Discarder needs of the proxy.
type Config struct {
	Context    context.Context // ends when the last answer stream has ended
	Settings   func() *fleet.Settings
	Client     *engine.Client
	Monitor    Monitor
	Engines    func() Engines // returns the engines as they are at the call
	Places     *pool.Semaphore
	Dispatcher Dispatcher
	NextID     func() uint64 // makes the id of a new pool entry
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// Monitor takes reports on whether engines served their requests well. Expiries and ExpiriesNow also say how many hand-offs a prefill engine
// has freed after its hold timeout, because no decode engine fetched them.
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

// NewDiscarder makes the Discarder of a proxy, and registers its metric evenkeel_drains_total.
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

// Discard frees the KV of a hand-off that no request uses any more. A prefill engine frees KV blocks only when a decode engine pulls them.
// So Discard has one token decoded on a rank that the dispatcher picks, charged like any request, and drops the token. The hand-off counts
// against the budget of its prefill engine until then, or until the engine's hold timeout is over.
//
// Another decode engine may have pulled the blocks before, and they may belong to another prompt now. So the decode has a random
// cache_salt, and no other request can reuse the KV that it caches. Discard returns at once. freed, which may be nil, is called on another
// goroutine once the prefill engine has freed the KV.
func (d *Discarder) Discard(h *Handoff, freed func()) {
	h.Lease.DetachOwner() // the discard may outlive the request, which the audit of leases takes for the owner
	finish := func(outcome string, err error) {
		d.outcomes.WithLabelValues(outcome).Inc()
		if err != nil {
			h.Lease.Orphan()
			d.Log.Warn("no decode engine fetches a hand-off, so its prefill engine keeps the KV until the hold timeout", zap.Inline(h.Request),
				zap.String("prefill", h.Lease.Candidate.ID), zap.Error(err))
		}
	}
	// Each discard keeps its request's body, so no more discards run at once than the pool has places.
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
	case err != nil: // the proxy shuts down
		finish(discardUnplaced, err)
	}
}

// discardTries is how often a hand-off is offered to decode ranks.
const discardTries = 3

// discardNow discards a hand-off: a decode engine pulls its KV for a request of one token, so that the prefill engine can free the KV. The
// decode engine needs a slot for it. outcome is the label for evenkeel_drains_total. After an error, the KV stays on the prefill engine
// until the hold timeout.
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
		// A decode request that must have the id of the prefill request is not sent again after a call that broke: an engine may
		// still run the first request of this id.
		idInUse := h.ReusedRequestID != "" && outcome == discardFailed
		mayTryAgain := tryOther && !idInUse && try < discardTries
		if err == nil || !mayTryAgain {
			return outcome, err
		}
		select { // a pause, so that the monitor has taken the failure into account by the next try
		case <-time.After(d.Settings().Prefill.Retry.Base << try):
		case <-d.Context.Done():
			return outcome, err
		}
	}
}

// discardOn has the rank of a slot decode one token of a hand-off, and gives the slot back. The rank's engine pulls the KV for the token,
// so that the prefill engine can free it. tryOther says that this rank failed, but that another one may succeed (judgeFault). try counts
// from 1 and is part of the request's id.
func (d *Discarder) discardOn(slot *dispatcher.Slot, h *Handoff, try int) (outcome string, tryOther bool, err error) {
	slotOutcome := board.Outcome{Kind: board.Failed}
	defer func() { d.Dispatcher.Release(slot, slotOutcome) }()
	now := time.Now()
	// After FirstEventBy, too little time is left to pull the KV before the prefill engine's hold timeout. A hand-off can be that late
	// if a try on another rank has failed before.
	if !now.Before(h.FirstEventBy()) {
		return discardExpired, false, mooncake.ErrExpired
	}
	rank := d.Engines().Rank(slot.Worker)
	if h.params == nil { // an earlier try on another rank may have taken the params
		if h.params, err = h.Discard(now); err != nil {
			return discardExpired, false, err
		}
	}
	h.Lease.Dispatched()
	// The engine pulls the KV of whole blocks, and computes the rest of the prompt itself: less than one block. How many tokens it has
	// really computed is not read from the answer, so this upper bound stays when the call has ended.
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
	salt := rand.Text()      // so that no other request finds the KV in the prefix cache: it may be another prompt's by now
	var newSegments [][]byte // nil: DiscardBody allocates the segments of the body
	body := rank.Profile.DiscardBody(&h.Body, h.Endpoint, h.Changes, h.params, salt, newSegments)
	_, fault := call.SendAndRead(headers, body, d.Settings().Limits.EventBytes, now.Add(rank.Profile.FirstEventTimeout))
	if fault != nil {
		wholeHost := fault.Reason == lifecycle.Failed // a 500 may come from a broken driver or disk; a crash concerns one engine
		h.Avoid = d.Engines().FailingWith(slot.Worker, wholeHost, h.Avoid)
	}
	d.reportToMonitor(rank.Instance, fault)
	if fault == nil {
		slot.ReportStarted() // the first event came, so the decode engine has the KV
	} else if outcome, tryOther = d.judgeFault(fault, rank, h, &slotOutcome); outcome != discardDone {
		return outcome, tryOther, fault.Err
	}
	h.Lease.Release() // the KV is free: it was pulled, or the refusal has freed it
	slotOutcome.Kind = board.Cancelled
	slotOutcome.Kept = fault == nil // the engine has decoded one token, and may keep the KV in its prefix cache as after any answer
	return discardDone, false, nil
}

// newCall makes the call of a discard to the rank of a slot. It does not send it yet.
func (d *Discarder) newCall(rank *roster.Rank, slot *dispatcher.Slot, h *Handoff) upstream.Call {
	silence := rank.Profile.FirstEventTimeout // how long the engine may be silent, before its answer or within it
	// Fresh: the call opens a connection, because the engine may have closed an idle one already.
	call := upstream.NewCall(d.Client, rank.Profile, rank.Target).Fresh()
	return upstream.Call{
		Call: call, Kind: lifecycle.Decode, Engine: rank.Instance, Scope: rank.Scope,
		Path: h.Endpoint.Path(), InEngineQueue: slot.InEngineQueue,
		Limits: engine.Deadlines{Connect: d.Settings().Limits.ConnectTimeout, FirstByte: silence, Idle: silence}, Log: d.Log,
	}
}

// judgeFault says what the fault of a discard's call means for the hand-off. outcome is discardDone if the engine's refusal has freed the
// KV, else the label for evenkeel_drains_total. tryOther says that another rank may succeed. slotOutcome gets what the fault shows about
// the rank.
func (d *Discarder) judgeFault(
	fault *failure.Fault, rank *roster.Rank, h *Handoff, slotOutcome *board.Outcome,
) (outcome string, tryOther bool) {
	slotOutcome.Lost = fault.LosesHandoff()
	switch {
	case fault.Reason == lifecycle.NotOurs: // another proxy sends to the rank now, so nothing was sent
		slotOutcome.Kind = board.Cancelled
		return discardUnplaced, true
	case fault.Status == 0: // the engine gave no answer
		// Orphaned tells the board that the rank may hold KV blocks for ever. Before FirstEventBy the prefill engine certainly has
		// the KV for which the rank waits. After that it may have freed the KV.
		slotOutcome.Orphaned = !time.Now().Before(h.FirstEventBy()) && LeaksBlocks(rank, fault)
		// Silent: the rank sent nothing until the timeout. If the hand-off is the cause, the next rank's slot would be held for as
		// long.
		return discardFailed, fault.Reason != lifecycle.Silent
	case fault.Reason == lifecycle.Paused: // the part of the engine that would free the KV never saw the request
		return discardRefused, true
	case !d.Engines().RejectionFrees(rank): // the refusal of this engine does not free the KV
		return discardRefused, true
	}
	return discardDone, false // the engine has refused the request, and has made the prefill engine free the KV
}

// reportToMonitor tells the monitor how the call of a discard to an engine has ended. fault is why it failed; nil: the engine has decoded
// the hand-off. The monitor gets two kinds of reports. ReportFailure gives it the error of a call, because of which it may check the engine
// or take it for down. RecordOutcome counts how the call went: after several failures in a row, the engine gets no new requests.
func (d *Discarder) reportToMonitor(instance string, fault *failure.Fault) {
	switch {
	case fault == nil:
		d.Monitor.RecordOutcome(instance, engine.Served, nil)
		return
	case fault.Reason == lifecycle.NotOurs: // the engine was sent nothing
		return
	// The engine refused this hand-off, which says nothing about its health.
	case fault.Status != 0 && fault.Reason != lifecycle.Paused && fault.Reason != lifecycle.Unlisted:
		return
	}
	d.Monitor.ReportFailure(instance, fault.Err)
	switch {
	case fault.Status != 0: // the engine works, but takes no requests now, or does not have the model
	case fault.Reason == lifecycle.HungUp: // the proxy itself has ended the call
	case fault.LosesHandoff(): // the dispatcher finds out who is to blame; a canary shows whether the engine computes at all
		d.Monitor.RecordOutcome(instance, engine.Unclear, fault.Err)
	default:
		d.Monitor.RecordOutcome(instance, engine.Faulted, fault.Err)
	}
}

var errCrowded = errors.New("as many hand-offs as the pool has places are being discarded already; raise pool.size or add decode capacity")

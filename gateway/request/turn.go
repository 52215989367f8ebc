package request

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"evenkeel/gateway/failure"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/prompt"
	"evenkeel/geo"
	"evenkeel/prefill"
)

// awaitLease waits in the arrival queue for a place in the pool and a prefill engine, or for the
// way to another proxy. j.query is answered then, and becomes nil.
func (j *job) awaitLease() (*prefill.Lease, *geo.Forward, error) {
	began := time.Now()
	j.enterPhase(journal.Queued, "")
	lease, err := j.awaitTurn()
	j.record.Report(journal.Event{Kind: journal.Waited, Took: time.Since(began)})
	query := j.query
	j.query = nil
	if err != nil {
		forward, noLease := forwardInstead(query, err)
		return nil, forward, noLease
	}
	defer onPanic(func() { // The lifecycle does not know of the lease and the place yet.
		lease.Orphan()
		if !j.life.HasPoolPlace() {
			j.srv.Places.Release()
		}
	})
	lease = moveOffBlockedEngine(j, lease)
	j.record.Report(journal.Event{Kind: journal.Chose, Lease: lease})
	// With the lease the request begins anew at this proxy, whose engines may all be tried again.
	if j.life.MayAsk() {
		j.avoid.prefill = nil
	}
	if query != nil { // the request stays here
		query.CountLocal()
	}
	return lease, nil, nil
}

// forwardInstead returns the way to the other proxy that should serve a request which left the
// queue with err.
func forwardInstead(query *geo.RoutingQuery, err error) (*geo.Forward, error) {
	switch {
	case query == nil || query.Forward() == nil:
		return nil, err
	case errors.Is(err, prefill.ErrElsewhere):
		return query.Forward(), nil
	}
	query.Forward().DropUnsent() // by then, the request had left the queue for another reason
	return nil, err
}

// moveOffBlockedEngine exchanges the lease if a decode engine of the board lately got no KV from
// the chosen engine, and if another ends the prefill at most Bind.Lead later. Only a request that
// is bound before its prefill needs this: it is not known yet which rank it will get, and the best
// one may belong to the decode engine that got no KV.
func moveOffBlockedEngine(j *job, lease *prefill.Lease) *prefill.Lease {
	candidate := lease.Candidate
	if !candidate.Profile.Early() {
		return lease
	}
	blockedEngines := j.srv.Dispatcher.Blocked(candidate.Board)
	if !slices.Contains(blockedEngines, candidate.Instance) {
		return lease
	}
	// Negative: the prefill may end later by as much.
	leastGain := -j.srv.Settings().Bind.Lead
	return cmp.Or(lease.MoveIfSooner(leastGain, blockedEngines), lease) // nil: no other is good enough
}

// leaseError is for a request that left the arrival queue without a lease.
func (j *job) leaseError(err error) *openai.Error {
	if j.client.Left() {
		j.noteEnginesFreeIfLeft()
		return failure.ClientGone
	}
	// In the words of the engine that did not have the model.
	if j.unlistedAnswer != nil && errors.Is(err, prefill.ErrModelNotFound) {
		return j.unlistedAnswer
	}
	return failure.UnplacedError("prefill", err, j.promptTokens, j.model.Name, j.model.AllAggregated)
}

// awaitTurn waits for a lease. Most requests get it at once, so only the others have a context that
// can end the wait.
func (j *job) awaitTurn() (*prefill.Lease, error) {
	ticket := j.ticket
	j.ticket = nil
	if ticket == nil { // a leg may have entered with the others
		if err := j.srv.Serving().Err(); err != nil {
			return nil, err
		}
		if j.client.Left() {
			return nil, context.Canceled
		}
		arrival := j.arrivalRequest()
		// Another leg may have given the client its first token by now.
		if j.isLeg {
			arrival.Deadline = time.Time{}
		}
		entered, err := j.srv.Prefill.Enter(arrival)
		if err != nil {
			return nil, err
		}
		ticket = &entered
	}
	if lease := ticket.ImmediateLease(); lease != nil {
		return lease, nil
	}
	ctx, cancel := context.WithCancel(j.srv.Serving()) // ends with requests that have no answer yet
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)
	return ticket.Wait(ctx)
}

// arrivalRequest: a retry keeps the time of arrival and the owner of its leases.
func (j *job) arrivalRequest() prefill.Request {
	arrival := prefill.Request{
		ID: j.id, Model: j.model.Name, Arrival: j.record.Arrival,
		PromptTokens: j.estimatedTokens(), Counted: promptIsCounted(j), PromptBytes: prompt.Bytes(j.req, j.changes),
		Session: j.incoming.Session, EndsSession: j.incoming.EndsSession, Policy: j.incoming.PrefillPolicy, Target: j.incoming.ToPrefill,
		// A request that has waited before (Returned) gets its old place.
		Key: cmp.Or(j.incoming.Flow, j.record.Key), Priority: j.incoming.Priority, Batch: j.incoming.Batch, Returned: j.life.HasWaited(),
		// Earlier attempts: a place that is still held, and the engines that were tried.
		HasPlace: j.life.HasPoolPlace(), Exclude: j.avoid.prefill,
	}
	if !j.life.Resumed() { // the client of a resumed request has its first token already
		arrival.Deadline = j.incoming.Deadline
	}
	if j.leaseOwner == nil { // by the owner, the audit finds leases that are not given back
		j.leaseOwner = &prefill.LeaseOwner{}
	}
	arrival.LeaseOwner = j.leaseOwner
	addRoutingQuery(j, &arrival)
	return arrival
}

// promptIsCounted: otherwise the length is an estimate from the text.
func promptIsCounted(j *job) bool {
	// req.PromptTokens counts all legs together.
	isPromptOfLeg := j.changes != nil && j.changes.Prompt != nil
	return j.promptTokens > 0 || !isPromptOfLeg && j.req.PromptTokens > 0
}

// addRoutingQuery adds the query about the proxy, the hashes by which engines are found that have
// the prompt in their caches, and the regions that may prefill.
func addRoutingQuery(j *job, arrival *prefill.Request) {
	// newRoutingQuery has hashed the prompt, unless the request stays here.
	if j.query != nil && !j.life.HasPoolPlace() && !j.incoming.namesEngines() {
		arrival.Remote, arrival.Prompt = j.query, j.query.Prompt()
	}
	if arrival.Prompt.Keys == nil { // not hashed yet
		arrival.Prompt = j.prefixKeys()
	}
	if peers := j.srv.Peers; peers != nil {
		arrival.MayGoTo = peers.RegionFilter(j.record.Key, j.model.Name)
	}
}

// bindOrder follows from the connector.
func bindOrder(candidate prefill.Candidate) lifecycle.Bind {
	switch {
	case candidate.Aggregated:
		return lifecycle.Aggregated
	case candidate.Profile.Early():
		return lifecycle.Early
	}
	return lifecycle.Late
}

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

// awaitLease waits in the arrival queue for a place in the pool and a prefill engine. It returns a lease on that engine, or the way to
// another proxy that should serve the request, or why the request got neither. In each case it sets j.query to nil: the query, which asks
// which proxy should serve the request, is answered.
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
	defer onPanic(func() { // the lifecycle does not know of the lease and the place yet, so they are given back here
		lease.Orphan()
		if !j.life.HasPoolPlace() {
			j.srv.Places.Release()
		}
	})
	lease = moveOffBlockedEngine(j, lease) // exchanges the lease if KV of its engine lately did not arrive
	j.record.Report(journal.Event{Kind: journal.Chose, Lease: lease})
	// MayAsk: until now, another proxy might have got the request. With the lease it begins anew at this proxy, whose engines may all
	// be tried again.
	if j.life.MayAsk() {
		j.avoid.prefill = nil
	}
	if query != nil { // the answer to the query was that the request stays here
		query.CountLocal()
	}
	return lease, nil, nil
}

// forwardInstead returns the way to the other proxy that should serve a request which left the arrival queue with the error err. If there
// is no such proxy, it returns err. query is the routing query of the request; nil: it had none.
func forwardInstead(query *geo.RoutingQuery, err error) (*geo.Forward, error) {
	switch {
	case query == nil || query.Forward() == nil: // no other proxy was chosen
		return nil, err
	case errors.Is(err, prefill.ErrElsewhere):
		return query.Forward(), nil
	}
	query.Forward().DropUnsent() // another proxy was chosen, but by then the request had left the queue for another reason
	return nil, err
}

// moveOffBlockedEngine exchanges a lease for one on another prefill engine if a decode engine of
// the board lately got no KV from the chosen one (which is then blocked), and if the other engine
// ends the prefill at most Bind.Lead later. Otherwise it returns the lease as it is. Only a request
// that is bound to a decode rank before its prefill needs this: it is not known yet which rank it
// will get, and the best one may belong to the decode engine that got no KV.
func moveOffBlockedEngine(j *job, lease *prefill.Lease) *prefill.Lease {
	candidate := lease.Candidate
	if !candidate.Profile.Early() {
		return lease
	}
	blockedEngines := j.srv.Dispatcher.Blocked(candidate.Board)
	if !slices.Contains(blockedEngines, candidate.Instance) {
		return lease
	}
	// MoveIfSooner asks by how much sooner the prefill must end at the other engine. Negative: it may end later by as much.
	leastGain := -j.srv.Settings().Bind.Lead
	return cmp.Or(lease.MoveIfSooner(leastGain, blockedEngines), lease) // it returns nil if no other engine is good enough
}

// leaseError returns the error for the client of a request that left the arrival queue without a lease. If the client has left, it also
// notes the time at which nothing is held for it any more (see noteEnginesFreeIfLeft).
func (j *job) leaseError(err error) *openai.Error {
	if j.client.Left() {
		j.noteEnginesFreeIfLeft()
		return failure.ClientGone
	}
	// The client gets the error in the words of the engine that did not have the model.
	if j.unlistedAnswer != nil && errors.Is(err, prefill.ErrModelNotFound) {
		return j.unlistedAnswer
	}
	return failure.UnplacedError("prefill", err, j.promptTokens, j.model.Name, j.model.AllAggregated)
}

// awaitTurn waits until the arrival queue grants the request a lease. The wait ends with an error if the client leaves, or if the proxy
// shuts down and ends requests that have no answer yet. Most requests get the lease at once, so the context that can end the wait is made
// only for the others.
func (j *job) awaitTurn() (*prefill.Lease, error) {
	ticket := j.ticket
	j.ticket = nil
	if ticket == nil { // the request has not entered the queue yet; a leg of a fan-out may have entered with the others
		if err := j.srv.Serving().Err(); err != nil {
			return nil, err
		}
		if j.client.Left() {
			return nil, context.Canceled
		}
		arrival := j.arrivalRequest()
		// A leg that enters alone makes a further attempt. The client may have the first token of another leg by now, so no
		// deadline holds.
		if j.isLeg {
			arrival.Deadline = time.Time{}
		}
		entered, err := j.srv.Prefill.Enter(arrival)
		if err != nil {
			return nil, err
		}
		ticket = &entered
	}
	if lease := ticket.ImmediateLease(); lease != nil { // the queue has granted the lease without a wait
		return lease, nil
	}
	ctx, cancel := context.WithCancel(j.srv.Serving()) // ends when the proxy ends requests that have no answer yet
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)
	return ticket.Wait(ctx)
}

// arrivalRequest describes the request for the arrival queue. A retry keeps the time at which the request first arrived, and the owner of
// its leases (j.leaseOwner), which the first attempt makes.
func (j *job) arrivalRequest() prefill.Request {
	arrival := prefill.Request{
		ID: j.id, Model: j.model.Name, Arrival: j.record.Arrival,
		// The length of the prompt.
		PromptTokens: j.estimatedTokens(), Counted: promptIsCounted(j), PromptBytes: prompt.Bytes(j.req, j.changes),
		// What the client has asked for.
		Session: j.incoming.Session, EndsSession: j.incoming.EndsSession, Policy: j.incoming.PrefillPolicy, Target: j.incoming.ToPrefill,
		// The order in the queue. A request that has waited there before (Returned) gets its old place.
		Key: cmp.Or(j.incoming.Flow, j.record.Key), Priority: j.incoming.Priority, Batch: j.incoming.Batch, Returned: j.life.HasWaited(),
		// The earlier attempts: a place in the pool that is still held, and the engines that were tried.
		HasPlace: j.life.HasPoolPlace(), Exclude: j.avoid.prefill,
	}
	if !j.life.Resumed() { // the deadline is for the first token, which the client of a resumed request has already
		arrival.Deadline = j.incoming.Deadline
	}
	if j.leaseOwner == nil { // the first attempt; by the owner, the audit finds leases that are not given back
		j.leaseOwner = &prefill.LeaseOwner{}
	}
	arrival.LeaseOwner = j.leaseOwner
	addRoutingQuery(j, &arrival) // whether another proxy should serve the request
	return arrival
}

// promptIsCounted says whether the length of the prompt was counted in tokens. Otherwise it is an estimate from the text.
func promptIsCounted(j *job) bool {
	isPromptOfLeg := j.changes != nil && j.changes.Prompt != nil // req.PromptTokens counts the prompts of all legs together
	return j.promptTokens > 0 || !isPromptOfLeg && j.req.PromptTokens > 0
}

// addRoutingQuery adds the query by which the arrival queue decides which proxy should serve the request, if the request may go to another
// one. It also adds the hashes of the prompt, by which the engines that have it in their caches are found, and the regions in which the
// request may be prefilled.
func addRoutingQuery(j *job, arrival *prefill.Request) {
	// A request that has a place in the pool, or that names its engines, does not go to another proxy. newRoutingQuery has hashed the
	// prompt, unless the request stays here.
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

// bindOrder returns the order of the next steps for a request that has a lease on the candidate. By
// its connector, the request is bound to a decode rank before its prefill (Early) or after it
// (Late).
func bindOrder(candidate prefill.Candidate) lifecycle.Bind {
	switch {
	case candidate.Aggregated:
		return lifecycle.Aggregated
	case candidate.Profile.Early():
		return lifecycle.Early
	}
	return lifecycle.Late
}

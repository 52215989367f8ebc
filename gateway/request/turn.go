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
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// choose waits in the arrival queue for a place in the pool and for an engine that can prefill the prompt. It returns the lease on this
// engine, or the way to another dispatcher that should serve the request.
func (j *job) choose() (*prefill.Lease, *geo.Forward, error) {
	began := time.Now()
	j.enter(journal.Queued, "")
	lease, err := j.awaitTurn()
	j.record.Report(journal.Event{What: journal.Waited, Took: time.Since(began)})
	question := j.question
	j.question = nil
	switch {
	case err == nil:
	case question == nil || question.Forward() == nil:
		return nil, nil, err
	case errors.Is(err, prefill.ErrElsewhere):
		return nil, question.Forward(), nil
	default:
		question.Forward().Drop()
		return nil, nil, err
	}
	defer onPanic(func() { // the request's lifecycle does not know of the lease and the place in the pool yet
		lease.Orphan()
		if !j.life.Reserved() {
			j.srv.Places.Release()
		}
	})
	// The best rank may be on a decode engine at which KV from the chosen prefill engine lately did not arrive.
	if candidate := lease.Candidate; candidate.Profile.Early() {
		blocked := j.srv.Dispatcher.Blocked(candidate.Board)
		if slices.Contains(blocked, candidate.Instance) {
			// another engine is taken only if it ends the prefill at most bind.lead later
			lease = cmp.Or(lease.Sooner(-j.srv.Settings().Bind.Lead, blocked), lease)
		}
	}
	j.record.Report(journal.Event{What: journal.Chose, Lease: lease})
	if j.life.Open() {
		j.avoid.prefill = nil // engines that failed before the request could go elsewhere may be tried again
	}
	if question != nil {
		question.Stayed()
	}
	return lease, nil, nil
}

// notChosen returns the client's error for a request that left the arrival queue without a lease.
func (j *job) notChosen(err error) *openai.Error {
	if j.client.Left() {
		j.freed()
		return failure.Gone
	}
	if j.unlistedAnswer != nil && errors.Is(err, prefill.ErrModelNotFound) {
		return j.unlistedAnswer
	}
	return failure.Unplaced("prefill", err, j.promptTokens, j.model.Name, j.model.Mixed)
}

// awaitTurn waits for the request's turn in the arrival queue. Most requests have their turn at once, so the context that can end the wait
// is only made for the others.
func (j *job) awaitTurn() (*prefill.Lease, error) {
	ticket := j.ticket
	if j.ticket = nil; ticket == nil { // not nil: the legs of a fan-out have entered the queue together
		if err := j.srv.Serving().Err(); err != nil {
			return nil, err
		}
		if j.client.Left() {
			return nil, context.Canceled
		}
		arrival := j.arrival()
		// A leg enters the queue alone only after a failure. Another leg may have begun its answer, so the deadline does not count any
		// more.
		if j.client.isLeg() {
			arrival.Deadline = time.Time{}
		}
		entered, err := j.srv.Tier.Enter(arrival)
		if err != nil {
			return nil, err
		}
		ticket = &entered
	}
	if lease := ticket.Served(); lease != nil {
		return lease, nil
	}
	ctx, cancel := context.WithCancel(j.srv.Serving())
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)
	return ticket.Wait(ctx)
}

// arrival describes the request for the arrival queue. A retry keeps the time of its first arrival.
func (j *job) arrival() prefill.Request {
	arrival := prefill.Request{
		ID: j.id, Model: j.model.Name, PromptTokens: j.estimate(),
		Counted: j.promptTokens > 0 || (j.changes == nil || j.changes.Prompt == nil) &&
			j.req.PromptTokens > 0, PromptBytes: prompt.Bytes(j.req, j.changes), Arrival: j.record.Arrival,
		Session: j.incoming.Session, Ends: j.incoming.Ends, Policy: j.incoming.PrefillPolicy, Target: j.incoming.ToPrefill,
		Key: cmp.Or(j.incoming.Flow, j.record.Key), Priority: j.incoming.Priority, Batch: j.incoming.Batch, Reserved: j.life.Reserved(),
		Exclude: j.avoid.prefill, Returned: j.life.Waited(),
	}
	if !j.life.Resumed() {
		arrival.Deadline = j.incoming.Deadline
	}
	if j.holder == nil {
		j.holder = &prefill.Holder{}
	}
	arrival.Holder = j.holder
	// a request that has a place in the pool, or that names engines, is not forwarded
	if j.question != nil && !j.life.Reserved() && !j.incoming.aimed() {
		arrival.Elsewhere, arrival.Prompt = j.question, j.question.Prompt()
	}
	if arrival.Prompt.Keys == nil {
		arrival.Prompt = j.recognize()
	}
	if node := j.srv.Node; node != nil {
		arrival.May = node.May(j.record.Key, j.model.Name)
	}
	return arrival
}

// script says in which order the next steps of a request are made. If the connector allows it, the request is bound to a decode rank before
// its prefill (Early). With NIXLPush, this needs the address at which decode engines reach the prefill engine. As long as the address is
// unknown, requests are bound after their prefill (Late), and the prefill engine's answer has the address.
func (srv *Server) script(candidate prefill.Candidate) lifecycle.Script {
	switch {
	case candidate.Mixed:
		return lifecycle.Mixed
	case candidate.Profile.Early() && (candidate.Profile.Connector != mooncake.NIXLPush || srv.Fleet.Coordinates(candidate) != nil):
		return lifecycle.Early
	}
	return lifecycle.Late
}

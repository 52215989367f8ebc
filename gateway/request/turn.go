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

// choose waits in the arrival queue for a place in the pool and an engine that may
// take the prompt. If another dispatcher should have the request, it returns the way there.
func (j *job) choose() (*prefill.Lease, *geo.Forward, error) {
	began := time.Now()
	j.enter(journal.Queued, "")
	lease, err := j.awaitTurn()
	j.record.Report(journal.Event{What: journal.Waited, Took: time.Since(began)})
	q := j.question
	j.question = nil
	switch {
	case err == nil:
	case q == nil || q.Forward() == nil:
		return nil, nil, err
	case errors.Is(err, prefill.ErrElsewhere):
		return nil, q.Forward(), nil
	default:
		q.Forward().Drop()
		return nil, nil, err
	}
	defer onPanic(func() { // a panic here comes before the request's life knows of the lease and the place
		lease.Orphan()
		if !j.life.Reserved() {
			j.srv.Places.Release()
		}
	})
	if p := lease.Candidate; p.Profile.Early() { // the best rank may be of a decode engine that KV of this engine lately did not reach
		blocked := j.srv.Dispatcher.Blocked(p.Board)
		if slices.Contains(blocked, p.Instance) {
			lease = cmp.Or(lease.Sooner(-j.srv.Settings().Bind.Lead, blocked), lease) // the other engine ends the prefill at most bind.lead later
		}
	}
	j.record.Report(journal.Event{What: journal.Chose, Lease: lease})
	if j.life.Open() {
		j.avoid.prefill = nil // forget the engines of attempts before the question
	}
	if q != nil {
		q.Stayed()
	}
	return lease, nil, nil
}

func (j *job) notChosen(err error) *openai.Error {
	if j.client.Left() {
		j.freed()
		return failure.Gone
	}
	if j.unlisted != nil && errors.Is(err, prefill.ErrModelNotFound) {
		return j.unlisted
	}
	return failure.Unplaced("prefill", err, j.prompt, j.model.Name, j.model.Mixed)
}

// awaitTurn waits for the request's turn. Most requests have it at once, so what can end a wait is only set up after that.
func (j *job) awaitTurn() (*prefill.Lease, error) {
	k := j.ticket
	if j.ticket = nil; k == nil {
		if err := j.srv.Serving().Err(); err != nil {
			return nil, err
		}
		if j.client.Left() {
			return nil, context.Canceled
		}
		r := j.arrival()
		// this leg was served before, or a decode rank failed at it: another leg may have answered, so the deadline is void
		if j.client.isLeg() {
			r.Deadline = time.Time{}
		}
		entered, err := j.srv.Tier.Enter(r)
		if err != nil {
			return nil, err
		}
		k = &entered
	}
	if lease := k.Served(); lease != nil {
		return lease, nil
	}
	ctx, cancel := context.WithCancel(j.srv.Serving())
	defer cancel()
	j.client.OnGone(cancel)
	defer j.client.OnGone(nil)
	return k.Wait(ctx)
}

// arrival is what the arrival queue knows of a request. A retry keeps the time of its
// first arrival.
func (j *job) arrival() prefill.Request {
	r := prefill.Request{
		ID: j.id, Model: j.model.Name, PromptTokens: j.estimate(), Counted: j.prompt > 0 || (j.changes == nil || j.changes.Prompt == nil) &&
			j.req.PromptTokens > 0, PromptBytes: prompt.Bytes(j.req, j.changes), Arrival: j.record.Arrival,
		Session: j.in.Session, Ends: j.in.Ends, Policy: j.in.PrefillPolicy, Target: j.in.ToPrefill,
		Key: cmp.Or(j.in.Flow, j.record.Key), Priority: j.in.Priority, Batch: j.in.Batch, Reserved: j.life.Reserved(), Exclude: j.avoid.prefill,
		Returned: j.life.Waited(),
	}
	if !j.life.Resumed() {
		r.Deadline = j.in.Deadline
	}
	if j.holder == nil {
		j.holder = &prefill.Holder{}
	}
	r.Holder = j.holder
	if j.question != nil && !j.life.Reserved() && !j.in.aimed() { // a request stays if it has a place in the pool, or names engines
		r.Elsewhere, r.Prompt = j.question, j.question.Prompt()
	}
	if r.Prompt.Keys == nil {
		r.Prompt = j.recognize()
	}
	if node := j.srv.Node; node != nil {
		r.May = node.May(j.record.Key, j.model.Name)
	}
	return r
}

// script is how a request goes on whose turn has come. As long as it is
// not known where decode engines reach a prefill engine, its requests are bound after their prefill: the
// answer of the prefill says where.
func (srv *Server) script(c prefill.Candidate) lifecycle.Script {
	switch {
	case c.Mixed:
		return lifecycle.Mixed
	case c.Profile.Early() && (c.Profile.Connector != mooncake.NIXLPush || srv.Fleet.Coordinates(c) != nil):
		return lifecycle.Early
	}
	return lifecycle.Late
}

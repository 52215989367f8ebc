package request

import (
	"cmp"
	"errors"
	"strings"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// wait keeps the hand-off in the pool until the dispatcher binds it to a rank. If no rank is found, the fault says that the prefill engine
// still keeps the KV.
func (j *job) wait(h *handoff.Handoff) (*dispatcher.Slot, *failure.Fault) {
	slot, fault := j.place(h.Lease.Candidate, j.promptTokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = h.BindBy()
		return j.srv.Dispatcher.Enqueue(entry, j.nearRanks(entry.Model, j.promptTokens)...)
	})
	if fault != nil {
		fault.Far, fault.Kept = lifecycle.Through, true
	}
	return slot, fault
}

// place waits in the pool until the dispatcher binds the request to a decode rank, and returns the slot. tokens is the length of the
// prompt. enqueue completes the pool's entry, and gives it to the dispatcher. If the wait ends without a slot, the request ends, with two
// exceptions. If the region has lost its ranks, the prompt is prefilled again in another region. If another proxy owns the decode group
// now, the request goes to that proxy.
func (j *job) place(candidate prefill.Candidate, tokens int, enqueue func(*pool.Entry) <-chan dispatcher.Result) (*dispatcher.Slot,
	*failure.Fault) {
	queued := false
	defer onPanic(func() {
		if !queued {
			j.srv.Places.Release()
		}
	})
	j.enter(journal.Pooled, "")
	engines := j.srv.Engines()
	region, prefiller := engines.RegionFor(candidate.Instance), candidate.Instance
	if candidate.Mixed { // the candidate is the ranks themselves
		region, prefiller = candidate.Region, ""
	}
	boardName := engines.BoardFor(candidate, j.model.Name, region)
	// the owner of the decode group is looked up under the board's name without its region
	scope := strings.TrimSuffix(boardName, roster.BoardIn("", region))
	if candidate.Mixed {
		scope = boardName
	}
	entry := &pool.Entry{
		ID: j.srv.nextID(), Model: boardName, Name: j.model.Name, Prompt: tokens, Age: j.resume.answerTokens, Key: j.promptHash(),
		Arrival: j.record.Arrival, Entered: time.Now(),
		Only: j.incoming.ToDecode, Avoid: j.avoid.ranks(), Last: j.avoid.lastChoice, Prefiller: prefiller,
		Response: j.req.Endpoint == mooncake.Responses,
	}
	// a batch request was held back before; this time must not put it before others, nor shorten its time in the pool
	if j.incoming.Batch && !j.life.Resumed() {
		entry.Arrival = entry.Entered
	}
	bound, losses := enqueue(entry), j.srv.Owner.Losses() // the entry has the place in the pool now
	queued = true
	var result dispatcher.Result
	waiting, unowned := true, false
	withdraw := func(why lifecycle.Why, answer *openai.Error) (*dispatcher.Slot, *failure.Fault) {
		if waiting {
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false
		}
		if result.Err == nil { // the dispatcher gave the slot before it saw the withdrawal
			j.srv.Dispatcher.Release(result.Slot, board.Outcome{Kind: board.Cancelled})
		}
		return nil, failure.Of(lifecycle.Ended{Why: why}, answer, nil)
	}
	defer onPanic(func() { withdraw(lifecycle.Leaving, nil) })
	for waiting {
		if unowned = !j.srv.Engines().Owned(scope, j.model.Name); unowned || region != "" && !j.srv.Owner.Admits(region) {
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false // it has a slot if the dispatcher gave one before it saw the withdrawal
			continue
		}
		select {
		case result = <-bound:
			waiting = false
		case <-losses:
			losses = j.srv.Owner.Losses()
		case <-j.client.Gone():
			return withdraw(lifecycle.Left, failure.Gone)
		case <-j.srv.Serving().Done():
			return withdraw(lifecycle.Leaving, failure.Leaving)
		}
	}
	// with nothing prefilled yet, a request whose deadline is over ends as one that missed its deadline
	if entry.Early && errors.Is(result.Err, pool.ErrUnbound) || candidate.Mixed && errors.Is(result.Err, pool.ErrTimeout) {
		if deadline := j.wanted(); !deadline.IsZero() && !time.Now().Before(deadline) {
			return nil, failure.Of(lifecycle.Ended{Why: lifecycle.NoRank}, failure.Deadline, prefill.ErrDeadline)
		}
	}
	if result.Err != nil {
		return nil, j.unplaced(result.Err, tokens, region, unowned)
	}
	j.record.Report(journal.Event{What: journal.Placed, Slot: result.Slot, Took: time.Since(entry.Entered)})
	return result.Slot, nil
}

// wanted is the deadline for the first token of the answer; zero: there is none, or it does not count, because the client has a part of the
// answer already, or because the job is a leg of a fan-out.
func (j *job) wanted() time.Time {
	if j.life.Resumed() || j.client.isLeg() {
		return time.Time{}
	}
	return j.incoming.Deadline
}

// unplaced returns the fault of a request that got no decode rank. unowned says that another proxy owns its decode group now. KV does not
// cross regions. So if the ranks of a region are gone, a hand-off in this region is useless, and the prompt is prefilled again elsewhere,
// once.
func (j *job) unplaced(err error, tokens int, region string, unowned bool) *failure.Fault {
	if unowned && !errors.Is(err, board.ErrNotListed) {
		return failure.Of(lifecycle.Ended{Why: lifecycle.Unowned}, failure.NotOurs, owner.ErrNotOwner)
	}
	answer := failure.Unplaced("decode", err, tokens, j.model.Name, j.model.Mixed)
	if errors.Is(err, board.ErrNotListed) {
		answer = cmp.Or(j.unlistedAnswer, answer)
	}
	why := lifecycle.NoRank
	if region != "" && (errors.Is(err, board.ErrNoWorkers) || errors.Is(err, board.ErrWithdrawn)) {
		why = lifecycle.RanksLost
	}
	return failure.Of(lifecycle.Ended{Why: why}, answer, err)
}

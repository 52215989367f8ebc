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

// wait leaves the hand-off in the pool until the dispatcher binds it to a decode rank. If no rank is found, the fault says that the
// prefill engine still keeps the KV.
func (j *job) wait(h *handoff.Handoff) (*dispatcher.Slot, *failure.Fault) {
	slot, fault := j.place(h.Lease.Candidate, j.promptTokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = h.BindBy()
		return j.srv.Dispatcher.Enqueue(entry, j.nearRanks(entry.Model, j.promptTokens)...)
	})
	if fault != nil {
		fault.Progress, fault.Kept = lifecycle.Through, true
	}
	return slot, fault
}

// place waits in the pool until the dispatcher binds the request to a decode rank, and returns the slot on that rank. tokens is the length
// of the prompt. enqueue completes the pool's entry and gives it to the dispatcher. If the wait ends otherwise, place returns a fault. Two
// faults do not end the request: if the region lost its ranks, the prompt is prefilled again in another region, and if another proxy now
// owns the decode group, that proxy is asked.
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
	if candidate.Mixed { // the candidate is the decode ranks themselves, not a prefill engine
		region, prefiller = candidate.Region, ""
	}
	boardName := engines.BoardFor(candidate, j.model.Name, region)
	// Owned takes the name of the board without its region
	scope := strings.TrimSuffix(boardName, roster.BoardIn("", region))
	if candidate.Mixed {
		scope = boardName
	}
	entry := &pool.Entry{
		ID: j.srv.nextID(), Model: boardName, Name: j.model.Name, Prompt: tokens, Age: j.resume.answerTokens, Key: j.promptHash(),
		Arrival: j.record.Arrival, Entered: time.Now(),
		Only: j.incoming.ToDecode, Avoid: j.avoid.ranks(), Last: j.avoid.lastChoice, Prefiller: prefiller,
		Response: j.req.Endpoint == mooncake.Responses, Express: j.incoming.Priority > 0 && !j.incoming.Batch,
	}
	// A batch request may have been held back long before it got here. That time gives it no precedence, and does not count as waiting.
	if j.incoming.Batch && !j.life.Resumed() {
		entry.Arrival = entry.Entered
	}
	bound, losses := enqueue(entry), j.srv.Owner.Losses()
	queued = true // from now on the entry holds the place in the pool
	var result dispatcher.Result
	waiting, unowned := true, false // unowned: another proxy owns the decode group now
	withdraw := func(why lifecycle.Reason, answer *openai.Error) (*dispatcher.Slot, *failure.Fault) {
		if waiting {
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false
		}
		if result.Err == nil { // the dispatcher had bound the entry before the withdrawal
			j.srv.Dispatcher.Release(result.Slot, board.Outcome{Kind: board.Cancelled})
		}
		return nil, failure.Of(lifecycle.CallEnd{Reason: why}, answer, nil)
	}
	defer onPanic(func() { withdraw(lifecycle.Leaving, nil) })
	for waiting {
		unowned = !j.srv.Engines().Owned(scope, j.model.Name)
		if unowned || region != "" && !j.srv.Owner.Admits(region) {
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false // may hold a slot; the decode call checks the ownership again before it is sent
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
	// Nothing was prefilled in these two cases, so if the deadline has passed, the error names the deadline.
	if entry.Early && errors.Is(result.Err, pool.ErrUnbound) || candidate.Mixed && errors.Is(result.Err, pool.ErrTimeout) {
		if deadline := j.wanted(); !deadline.IsZero() && !time.Now().Before(deadline) {
			return nil, failure.Of(lifecycle.CallEnd{Reason: lifecycle.NoRank}, failure.Deadline, prefill.ErrDeadline)
		}
	}
	if result.Err != nil {
		return nil, j.unplaced(result.Err, tokens, region, unowned)
	}
	j.record.Report(journal.Event{Kind: journal.Placed, Slot: result.Slot, Took: time.Since(entry.Entered)})
	return result.Slot, nil
}

// wanted returns the deadline for the first token of the answer. It is zero if the client gave no deadline, if the client has a part of the
// answer already, or if the job is a leg of a fan-out.
func (j *job) wanted() time.Time {
	if j.life.Resumed() || j.isLeg {
		return time.Time{}
	}
	return j.incoming.Deadline
}

// unplaced returns the fault of a request that got no decode rank. unowned says that another proxy owns the decode group now. The KV of a
// hand-off cannot be sent to another region. So if a region has lost its ranks, the prompt is prefilled again in another one, once.
func (j *job) unplaced(err error, tokens int, region string, unowned bool) *failure.Fault {
	if unowned && !errors.Is(err, board.ErrNotListed) {
		return failure.Of(lifecycle.CallEnd{Reason: lifecycle.Unowned}, failure.NotOurs, owner.ErrNotOwner)
	}
	answer := failure.Unplaced("decode", err, tokens, j.model.Name, j.model.Mixed)
	if errors.Is(err, board.ErrNotListed) {
		answer = cmp.Or(j.unlistedAnswer, answer)
	}
	why := lifecycle.NoRank
	if region != "" && (errors.Is(err, board.ErrNoWorkers) || errors.Is(err, board.ErrWithdrawn)) {
		why = lifecycle.RanksLost
	}
	return failure.Of(lifecycle.CallEnd{Reason: why}, answer, err)
}

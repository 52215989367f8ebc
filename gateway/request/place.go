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

// placeHandoff leaves the hand-off in the pool until the dispatcher binds it to a decode rank. If no rank is found, the fault says that the
// prefill engine still keeps the KV.
func (j *job) placeHandoff(h *handoff.Handoff) (*dispatcher.Slot, *failure.Fault) {
	slot, fault := j.place(h.Lease.Candidate, j.promptTokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = h.BindBy()
		return j.srv.Dispatcher.Enqueue(entry, j.ranksWithPrefix(entry.Model, j.promptTokens)...)
	})
	if fault != nil { // the prefill call itself has succeeded
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
		if !queued { // no entry holds the place in the pool yet
			j.srv.Places.Release()
		}
	})
	j.enterPhase(journal.Pooled, "")
	entry, region := poolEntry(j, candidate, tokens)
	// entry.Model names the board, i.e. the decode ranks that may take the request. OwnsGroupFor takes this name without its region.
	ownedBoard := entry.Model
	if !candidate.Aggregated {
		markOfRegion := roster.BoardIn("", region) // what the name of a board in the region ends with; empty for the own region
		ownedBoard = strings.TrimSuffix(entry.Model, markOfRegion)
	}
	bound, losses := enqueue(entry), j.srv.Owner.Losses()
	queued = true // from now on the entry holds the place in the pool
	var result dispatcher.Result
	waiting, ownerChanged := true, false // ownerChanged says that another proxy owns the decode group now
	// withdraw ends the wait if it is not over, gives back a slot that has come by then, and returns the fault.
	withdraw := func(why lifecycle.Reason, answer *openai.Error) (*dispatcher.Slot, *failure.Fault) {
		if waiting {
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false
		}
		if result.Err == nil { // the dispatcher had bound the entry before the withdrawal
			j.srv.Dispatcher.Release(result.Slot, board.Outcome{Kind: board.Cancelled})
		}
		return nil, failure.NewFault(lifecycle.CallEnd{Reason: why}, answer, nil)
	}
	defer onPanic(func() { withdraw(lifecycle.Leaving, nil) })
	for waiting {
		ownerChanged = !j.srv.Engines().OwnsGroupFor(ownedBoard, j.model.Name)
		regionLost := region != "" && !j.srv.Owner.Admits(region)
		if ownerChanged || regionLost { // this proxy may not bind the request any more
			j.srv.Dispatcher.Withdraw(entry)
			result, waiting = <-bound, false // result may have a slot; before the decode call is sent, the ownership is checked again
			continue
		}
		select {
		case result = <-bound:
			waiting = false
		case <-losses: // this proxy has lost a group or region, so look again whether it is the request's
			losses = j.srv.Owner.Losses()
		case <-j.client.Gone():
			return withdraw(lifecycle.Left, failure.ClientGone)
		case <-j.srv.Serving().Done():
			return withdraw(lifecycle.Leaving, failure.Leaving)
		}
	}
	earlyTimedOut := entry.Early && errors.Is(result.Err, pool.ErrUnbound)
	aggregatedTimedOut := candidate.Aggregated && errors.Is(result.Err, pool.ErrTimeout)
	notPrefilled := earlyTimedOut || aggregatedTimedOut // the wait took too long, and no engine has computed the prompt
	deadline := j.firstTokenDeadline()
	if notPrefilled && !deadline.IsZero() && !time.Now().Before(deadline) { // the error names the client's deadline
		return nil, failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.NoRank}, failure.Deadline, prefill.ErrDeadline)
	}
	if result.Err != nil {
		return nil, j.unplacedFault(result.Err, tokens, region, ownerChanged)
	}
	j.record.Report(journal.Event{Kind: journal.Placed, Slot: result.Slot, Took: time.Since(entry.Entered)})
	return result.Slot, nil
}

// poolEntry describes the request for the pool. tokens is the length of the prompt. region is where the request must be decoded; empty: in
// the proxy's own region.
func poolEntry(j *job, candidate prefill.Candidate, tokens int) (entry *pool.Entry, region string) {
	engines := j.srv.Engines()
	region, prefiller := engines.RegionFor(candidate.Instance), candidate.Instance
	if candidate.Aggregated { // the candidate is the decode ranks themselves, not a prefill engine
		region, prefiller = candidate.Region, ""
	}
	entry = &pool.Entry{
		ID: j.srv.nextID(), Model: engines.BoardFor(candidate, j.model.Name, region), Name: j.model.Name, Prompt: tokens,
		Age: j.resume.answerTokens, Key: j.promptHash(), Arrival: j.record.Arrival, Entered: time.Now(),
		Only: j.incoming.ToDecode, Avoid: j.avoid.ranks(), Last: j.avoid.lastChoice, Prefiller: prefiller,
		Response: j.req.Endpoint == mooncake.Responses, Express: j.incoming.Priority > 0 && !j.incoming.Batch,
	}
	// A batch request may have been held back long before it got here. That time gives it no precedence, and does not count as waiting.
	if j.incoming.Batch && !j.life.Resumed() {
		entry.Arrival = entry.Entered
	}
	return entry, region
}

// firstTokenDeadline returns the deadline for the first token of the answer. It is zero if the client gave no deadline, or has a part of
// the answer already. It is also zero for a leg of a fan-out, because another leg may have given the client its first token.
func (j *job) firstTokenDeadline() time.Time {
	if j.life.Resumed() || j.isLeg {
		return time.Time{}
	}
	return j.incoming.Deadline
}

// unplacedFault returns the fault of a request that got no decode rank. ownerChanged says that another proxy owns the decode group now.
// region is where the request must be decoded; empty: in the proxy's own region. The KV of a hand-off cannot be sent to another region. So
// if a region other than the own one has lost its ranks, the prompt is prefilled again in another region, once.
func (j *job) unplacedFault(err error, tokens int, region string, ownerChanged bool) *failure.Fault {
	unlisted := errors.Is(err, board.ErrNotListed) // no engine lists the model any more
	if ownerChanged && !unlisted {                 // ownerChanged is also true for a model that no engine lists
		return failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Unowned}, failure.NotOurs, owner.ErrNotOwner)
	}
	answer := failure.UnplacedError("decode", err, tokens, j.model.Name, j.model.AllAggregated)
	if unlisted { // the client gets the words of an engine that said it does not have the model
		answer = cmp.Or(j.unlistedAnswer, answer)
	}
	why := lifecycle.NoRank
	otherOwner := errors.Is(err, board.ErrWithdrawn) // place withdrew the entry, because another proxy owns the region now
	ranksGone := otherOwner || errors.Is(err, board.ErrNoWorkers)
	if region != "" && ranksGone {
		why = lifecycle.RanksLost
	}
	return failure.NewFault(lifecycle.CallEnd{Reason: why}, answer, err)
}

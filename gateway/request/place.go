package request

import (
	"cmp"
	"errors"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/journal"
	"evenkeel/gateway/lifecycle"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/owner"
	"evenkeel/mooncake"
	"evenkeel/pool"
	"evenkeel/prefill"
)

// placeHandoff: without a rank, the fault says that the prefill is done (Through), and that the
// prefill engine still keeps the KV (Kept).
func (j *job) placeHandoff(h *handoff.Handoff) (*dispatcher.Slot, *failure.Fault) {
	prefilledBy := h.Lease.Candidate // decides which region and board may decode the hand-off
	slot, fault := j.place(prefilledBy, j.promptTokens, func(entry *pool.Entry) <-chan dispatcher.Result {
		entry.Deadline = h.BindBy()
		return j.srv.Dispatcher.Enqueue(entry)
	})
	if fault != nil {
		fault.Progress, fault.Kept = lifecycle.Through, true
	}
	return slot, fault
}

// place waits in the pool for a decode rank. candidate is the prefill engine, or the ranks that
// also prefill. enqueue completes the entry. Two faults do not end the request: if the region lost
// its ranks, the prompt is prefilled in another one, and a new owner of the decode group is asked.
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
	wait := poolWait{job: j, entry: entry, region: region, waiting: true}
	wait.bound = enqueue(entry)
	queued = true // the entry holds the place now
	defer onPanic(func() { wait.end(lifecycle.Leaving, nil) })
	if fault := wait.await(); fault != nil {
		return nil, fault
	}
	if wait.result.Err != nil {
		return nil, wait.unplacedFault(candidate, tokens)
	}
	j.record.Report(journal.Event{Kind: journal.Placed, Slot: wait.result.Slot, Took: time.Since(entry.Entered)})
	return wait.result.Slot, nil
}

// A poolWait is the wait of a request in the pool for a decode rank.
type poolWait struct {
	job          *job
	entry        *pool.Entry
	region       string                   // where to decode; empty: in the proxy's own region
	bound        <-chan dispatcher.Result // brings the result, once
	result       dispatcher.Result        // from bound
	waiting      bool                     // bound has not brought the result yet
	ownerChanged bool                     // another proxy owns the decode group now
}

// await returns a fault if the client leaves or the proxy shuts down. If this proxy may not bind
// the request any more, result says ErrWithdrawn, unless the dispatcher has just bound the entry.
func (w *poolWait) await() *failure.Fault {
	j := w.job
	losses := j.srv.Owner.Losses()
	for w.waiting {
		// Decode groups have owners only if all engines are of this region. Then no name of a board has
		// the mark of another region.
		w.ownerChanged = !j.srv.Engines().OwnsGroupFor(w.entry.Model, j.model.Name)
		regionLost := w.region != "" && !j.srv.Owner.Admits(w.region)
		if w.ownerChanged || regionLost {
			w.withdraw() // result may have a slot; before the decode call, the ownership is checked again
			return nil
		}
		select {
		case w.result = <-w.bound:
			w.waiting = false
		case <-losses: // of some group or region
			losses = j.srv.Owner.Losses()
		case <-j.client.Gone():
			return w.end(lifecycle.Left, failure.ClientGone)
		case <-j.srv.Serving().Done():
			return w.end(lifecycle.Leaving, failure.Leaving)
		}
	}
	return nil
}

func (w *poolWait) withdraw() {
	w.job.srv.Dispatcher.Withdraw(w.entry)
	w.result, w.waiting = <-w.bound, false
}

// end gives back a slot that has come by then.
func (w *poolWait) end(why lifecycle.Reason, answer *openai.Error) *failure.Fault {
	if w.waiting {
		w.withdraw()
	}
	if w.result.Err == nil { // bound before the withdrawal
		w.job.srv.Dispatcher.Release(w.result.Slot, board.Outcome{Kind: board.Cancelled})
	}
	return failure.NewFault(lifecycle.CallEnd{Reason: why}, answer, nil)
}

// unplacedFault: the KV of a hand-off cannot be sent to ranks elsewhere. So if another region has
// lost its ranks (RanksLost), the lifecycle has the prompt prefilled again elsewhere, once.
func (w *poolWait) unplacedFault(candidate prefill.Candidate, tokens int) *failure.Fault {
	j, err := w.job, w.result.Err
	if w.missedDeadline(candidate) {
		return failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.NoRank}, failure.Deadline, prefill.ErrDeadline)
	}
	unlisted := errors.Is(err, board.ErrNotListed) // no engine lists the model any more
	// A model that no engine lists has no owner, which also looks like a change.
	if w.ownerChanged && !unlisted {
		return failure.NewFault(lifecycle.CallEnd{Reason: lifecycle.Unowned}, failure.NotOurs, owner.ErrNotOwner)
	}
	answer := failure.UnplacedError("decode", err, tokens, j.model.Name, j.model.AllAggregated)
	if unlisted { // in the words of an engine
		answer = cmp.Or(j.unlistedAnswer, answer)
	}
	why := lifecycle.NoRank
	// await withdraws an entry if another proxy took over its decode group (above), or its region.
	regionTakenOver := errors.Is(err, board.ErrWithdrawn)
	ranksGone := regionTakenOver || errors.Is(err, board.ErrNoWorkers)
	if w.region != "" && ranksGone {
		why = lifecycle.RanksLost
	}
	return failure.NewFault(lifecycle.CallEnd{Reason: why}, answer, err)
}

// missedDeadline: no engine has computed the prompt by the client's deadline for the first token.
func (w *poolWait) missedDeadline(candidate prefill.Candidate) bool {
	earlyTimedOut := w.entry.Early && errors.Is(w.result.Err, pool.ErrUnbound)
	aggregatedTimedOut := candidate.Aggregated && errors.Is(w.result.Err, pool.ErrTimeout)
	deadline := w.job.firstTokenDeadline()
	return (earlyTimedOut || aggregatedTimedOut) && !deadline.IsZero() && !time.Now().Before(deadline)
}

// poolEntry also returns where the request must be decoded; empty: in the proxy's own region.
func poolEntry(j *job, candidate prefill.Candidate, tokens int) (entry *pool.Entry, region string) {
	engines := j.srv.Engines()
	region, prefiller := engines.RegionFor(candidate.Instance), candidate.Instance
	if candidate.Aggregated { // the candidate is the decode ranks themselves
		region, prefiller = candidate.Region, ""
	}
	// No policy may hold an urgent request back (Express).
	isUrgent := j.incoming.Priority > 0 && !j.incoming.Batch
	boardName := engines.BoardFor(candidate, j.model.Name, region)
	entry = &pool.Entry{
		// For the pool, a board (decode ranks of one base model) is a model. Name is what the client
		// asked for.
		ID: j.srv.nextID(), Model: boardName, Name: j.model.Name, Prompt: tokens,
		Age: j.resume.answerTokens, Key: j.promptHash(), Arrival: j.record.Arrival, Entered: time.Now(),
		// Last: only if no other rank can at once.
		Only: j.incoming.ToDecode, Avoid: j.avoid.ranks(), Last: j.avoid.lastChoice, Prefiller: prefiller,
		// Some engines run a request of the Responses API on a rank of their own choice.
		Response: j.req.Endpoint == mooncake.Responses, Express: isUrgent,
	}
	// Time for which a batch request was held back gives it no precedence, and does not count as
	// waiting. Once its client has a part of the answer, it is like any other.
	if j.incoming.Batch && !j.life.Resumed() {
		entry.Arrival = entry.Entered
	}
	return entry, region
}

// firstTokenDeadline is zero for a client that may have its first token already, also from another
// leg.
func (j *job) firstTokenDeadline() time.Time {
	if j.life.Resumed() || j.isLeg {
		return time.Time{}
	}
	return j.incoming.Deadline
}

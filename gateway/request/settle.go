package request

import (
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/gateway/failure"
	"evenkeel/gateway/handoff"
	"evenkeel/gateway/lifecycle"
)

// settle gives back one resource that the request holds, or leaves it to a new owner. disposition says which: Pass means that a new owner
// gives it back, and every other disposition is a way to give it back now. Of a lease or a hand-off, the disposition says what becomes of
// the KV on the prefill engine, for example Free: the engine has no KV of the request, or has freed it.
func (r *executor) settle(resource lifecycle.Resource, disposition lifecycle.Disposition) {
	j := r.job
	switch resource {
	case lifecycle.Permit: // the place in the pool
		if disposition == lifecycle.Back { // otherwise (Pass) the request's entry in the pool gives the place back
			j.srv.Places.Release()
		}
	case lifecycle.Lease:
		r.settleLease(disposition)
	case lifecycle.KV: // the hand-off
		r.settleKV(disposition)
	case lifecycle.MaybeReadKV: // a hand-off of an earlier attempt
		r.settleMaybeRead(disposition)
	case lifecycle.Slot:
		r.settleSlot(disposition)
	case lifecycle.Call:
		r.settleCall(disposition)
	case lifecycle.LeaseOwner:
		if j.leaseOwner != nil { // the job makes no more calls, so the audit reports leases that were not given back
			j.srv.Prefill.Ended(j.leaseOwner)
			j.leaseOwner = nil
		}
	case lifecycle.Copy: // the body, which was kept so that a lost answer can go on
		j.releaseResumeBytes()
	case lifecycle.Seat, lifecycle.Body, lifecycle.Memory: // held only by a request that is passed through
		r.givePassthroughBack(resource, disposition)
	}
}

// settleLease gives back the lease of a prefill that has ended, or leaves it to a new owner (Pass): the hand-off, or the prefill call that
// runs beside a decode call. With Discard, a decode engine is made to fetch the KV, so that the prefill engine frees it.
func (r *executor) settleLease(disposition lifecycle.Disposition) {
	switch disposition {
	case lifecycle.Pass: // the new owner gives the lease back
	case lifecycle.Discard: // the prefill call failed although it returned a hand-off, which has the lease
		r.job.discard(r.handoff)
	default:
		handoff.SettleLease(r.lease, disposition, r.fault)
		endedByClient := r.fault != nil && r.fault.Reason == lifecycle.Left
		if endedByClient && disposition == lifecycle.Free { // the engine has aborted the prefill, and keeps nothing
			r.job.noteFreedAfterLeaving()
		}
	}
}

// settleKV gives the hand-off back, or has it discarded: a decode engine then gets the request once more, only to fetch the KV, so that the
// prefill engine frees it. A hand-off that a decode engine may have read waits in maybeRead for the end of the attempts (settleMaybeRead).
// Until then it is not known whether the request makes engines fail, and a discard would send it to one more engine.
func (r *executor) settleKV(disposition lifecycle.Disposition) {
	j := r.job
	switch disposition {
	case lifecycle.Discard:
		j.discard(r.handoff)
	case lifecycle.MaybeRead, lifecycle.MaybeRunning:
		j.maybeRead = append(j.maybeRead, r.handoff)
	default:
		var noFault *failure.Fault // the prefill engine has not failed
		handoff.SettleLease(r.handoff.Lease, disposition, noFault)
	}
	r.handoff = nil
}

// settleMaybeRead discards or gives back the oldest hand-off of which it was not known whether an engine has read it. The lifecycle settles
// these hand-offs in the order in which settleKV has put them into maybeRead.
func (r *executor) settleMaybeRead(disposition lifecycle.Disposition) {
	j := r.job
	if len(j.maybeRead) == 0 { // a panic came before the hand-off was added to maybeRead
		return
	}
	oldest := j.maybeRead[0]
	j.maybeRead = j.maybeRead[1:]
	if disposition == lifecycle.Discard {
		oldest.Avoid = j.avoid.ranks() // the rank that fetches the KV must be none that has failed at this request
		j.discard(oldest)
		return
	}
	var noFault *failure.Fault // the prefill engine has not failed
	handoff.SettleLease(oldest.Lease, disposition, noFault)
}

// settleCall takes a call that is over out of the counts of its engine. If the client has left, the record notes that the engine holds
// nothing for it any more. Before the answer has begun, settleCall also gives back what the stream of the call holds. Later the client may
// still have to read the end of the answer from the stream, so Close does that.
func (r *executor) settleCall(disposition lifecycle.Disposition) {
	j := r.job
	if j.passthrough != nil {
		r.endPassthroughCall(disposition)
	}
	if r.stream != nil { // nil: a panic came before the stream was made
		r.stream.upstream.endAccounting(disposition)
	}
	if disposition == lifecycle.Cancelled || j.passthrough != nil { // only these calls may have ended because the client left
		j.noteFreedAfterLeaving()
	}
	if r.stream != nil && !r.answerBegun {
		r.stream.giveBackAll(boardKinds[disposition])
	}
}

// settleSlot gives the slot back. It also counts and logs the failure of a decode rank at a prompt that it had to compute itself.
func (r *executor) settleSlot(disposition lifecycle.Disposition) {
	j, s := r.job, r.stream
	if s == nil { // a panic came before the stream was made
		j.srv.Dispatcher.Release(r.slot, board.Outcome{Kind: boardKinds[disposition]})
		return
	}
	failedAtPrompt := disposition == lifecycle.Failing && r.fault != nil && !r.answerBegun
	computedPromptAlone := s.upstream.computesPrompt && !r.isAggregated() // an aggregated rank computes every prompt itself
	if failedAtPrompt && computedPromptAlone {
		j.srv.metrics.localFailures.Inc()
		j.record.Route = "" // only for the log and the answer's headers: the route Local has failed, and the next attempt sets its own
		j.srv.Log.Warn("a decode rank failed at a prompt that it got without a hand-off", zap.Inline(j),
			zap.String("engine", s.upstream.rank.Target.ID), zap.Error(r.fault.Err))
	}
	s.releaseSlot(boardKinds[disposition])
}

package board

import (
	"time"

	"evenkeel/dispatcher/policy"
)

// bind does not trust the policy: if the assignment breaks a hard limit, it changes nothing and
// returns a Fault constant; empty: the entry is bound.
func (b *board) bind(g *group, p *policyInUse, a policy.Assignment, now time.Time) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	switch {
	case !ok:
		return FaultEntry
	case r == nil:
		return FaultWorker
	case !r.Up: // a spared rank may get requests if no other takes any
		return FaultDown
	case p.Immediate(): // the engine queues entries for which it has no room
	case r.maxNewRequests(p) <= 0:
		return FaultSlot
	case !r.hasKVRoom(int64(w.prompt())):
		return FaultRoom
	}
	b.pool.Remove(w.Entry)
	// Only entries that were sent ahead (ahead.go) are counted as queued one by one. Under a policy
	// that sends all entries at once, every request beyond the slots is.
	sentAhead := !p.Immediate() && r.freeSlots() <= 0
	if sentAhead {
		r.engineQueued++
	}
	bound := Binding{Policy: p.name, Stage: a.Stage, Score: a.Score, InEngineQueue: sentAhead}
	// Only the ranks with leastLocalTokens may take such an entry.
	if w.Local != nil {
		bound.NewTokens = int32(b.leastLocalTokens)
	}
	b.admit(r, w, bound, now)
	return ""
}

// admit charges an entry that has left the pool to a rank. If a trial of the rank (spare.go) or the
// pair of engines (pairs.go) is due, this request is the trial.
func (b *board) admit(r *rank, w waitingEntry, bound Binding, now time.Time) {
	e := w.Entry
	// The caller may still move the prefill to an engine on which it ends at least one step sooner.
	if e.Early {
		bound.StepMs = r.group.stepMs()
	}
	if r.Mixed {
		b.chargeMixed(r, w, &bound, now) // also sets bound.Slot
	} else {
		bound.Slot = b.charge(r, newSlotRecord(r, w, &bound, now))
	}
	if e.Prefiller != "" {
		b.pairs.Sent(b.slots.records[bound.Slot].link(), e.ID, now)
		if b.pairs.AnyOut() {
			b.retrySparedAt = now // after a trial, the other ranks of the decode engine must be spared again
		}
	}
	b.beginTrialIfDue(r, e.ID, now)
	bound.Worker, bound.WorkerName, bound.Group, bound.Wait = r.ID, r.Name, r.Worker.Group, e.Wait(now)
	if len(r.group.allRanks) > 0 { // none if the group has left the fleet
		b.lastGroup = r.group.allRanks[0].ID
	}
	b.waitTimes.add(bound.Wait)
	b.forgetWaiting(e)
	b.emit(Effect{Kind: EffectBind, Group: b.key(r.group), Entry: e, Bound: bound})
}

func (b *board) chargeMixed(r *rank, w waitingEntry, bound *Binding, now time.Time) {
	bound.NewTokens = w.uncached(r.ID)
	if wasHeld := !w.sendableSince.IsZero(); wasHeld {
		bound.Held = max(0, now.Sub(w.sendableSince))
	}
	bound.Slot = b.charge(r, newSlotRecord(r, w, bound, now))
	// It comes last: the rank computes prompts in order.
	b.addPrompt(r, bound.Slot, bound.NewTokens, len(r.promptsToCompute))
	r.promptsSent++
	bound.ComputeMs = r.computeMs()
}

// newSlotRecord leaves the rank, the place in its lists, and the step to charge.
func newSlotRecord(r *rank, w waitingEntry, bound *Binding, now time.Time) slotRecord {
	e := w.Entry
	return slotRecord{
		id: e.ID, key: e.Key, prefiller: e.Prefiller, prompt: w.prompt(),
		newTokens: bound.NewTokens, discard: e.Discard, inEngineQueue: bound.InEngineQueue,
		boundAt: now, process: r.Process, boundBeforePrefill: e.Early,
		tokensFromEarlierRanks: clampTokens(e.Age),
		// The prompt is computed after the binding.
		notDecoding: e.Early || r.Mixed,
		// The KV of an early entry goes to rank r, and so does the request.
		engineChoosesRank: e.Response && r.Unpinned && !e.Early,
	}
}

package board

import (
	"time"

	"evenkeel/dispatcher/policy"
)

// bind charges an entry to the rank that the policy assigned, and emits the effect that gives the caller of Enqueue the slot. It does not
// trust the policy: if the assignment breaks a hard limit, bind changes nothing and returns a Fault constant; empty: the entry is bound.
func (b *board) bind(g *group, p *policyInUse, a policy.Assignment, now time.Time) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	switch {
	case !ok:
		return FaultEntry
	case r == nil:
		return FaultWorker
	case !r.Up: // a rank that is up but spared may get requests if no other rank takes any
		return FaultDown
	case p.Immediate(): // this policy sends entries at once, and the engine queues those for which it has no slot or KV room
	case r.maxNewRequests(p) <= 0:
		return FaultSlot
	case !r.hasKVRoom(int64(w.prompt())):
		return FaultRoom
	}
	b.pool.Remove(w.Entry)
	// If a policy sends an entry ahead of a free slot (ahead.go), the entry waits in the queue of the engine, and is counted there.
	// Entries of a policy that sends all entries at once are not counted one by one: every request beyond the slots counts as queued.
	sentAhead := !p.Immediate() && r.freeSlots() <= 0
	if sentAhead {
		r.engineQueued++
	}
	bound := Binding{Policy: p.name, Stage: a.Stage, Score: a.Score, InEngineQueue: sentAhead}
	// An entry with Local has no hand-off: the rank computes the part of the prompt that is not in its prefix cache. Of all ranks, only
	// those that have to compute the fewest tokens (leastLocalTokens) may take the entry, so rank r is one of these.
	if w.Local != nil {
		bound.NewTokens = int32(b.leastLocalTokens)
	}
	b.admit(r, w, bound, now)
	return ""
}

// admit charges an entry that has left the pool to a rank, completes the Binding, and emits EffectBind for the caller of Enqueue. It also
// counts the time that the entry waited, and takes the entry out of the counts of waiting entries. A rank whose engine refused requests
// (spare.go), or a pair of engines whose hand-offs failed (pairs.go), gets one request as a trial after a while. If such a trial is due,
// this request is the trial.
func (b *board) admit(r *rank, w waitingEntry, bound Binding, now time.Time) {
	e := w.Entry
	if e.Early { // the caller may still move the prefill to an engine on which it ends at least one step sooner
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
			b.retrySparedAt = now // after a trial, the other ranks of a decode engine that is out must be spared again
		}
	}
	b.beginTrialIfDue(r, e.ID, now)
	bound.Worker, bound.WorkerName, bound.Group, bound.Wait = r.ID, r.Name, r.Worker.Group, e.Wait(now)
	if len(r.group.allRanks) > 0 { // none is left if the group has left the fleet
		b.lastGroup = r.group.allRanks[0].ID
	}
	b.waitTimes.add(bound.Wait)
	b.forgetWaiting(e)
	b.emit(Effect{Kind: EffectBind, Group: b.key(r.group), Entry: e, Bound: bound})
}

// chargeMixed charges an entry to a mixed rank, which computes the prompt itself, and fills in what the Binding has only for such ranks.
func (b *board) chargeMixed(r *rank, w waitingEntry, bound *Binding, now time.Time) {
	bound.NewTokens = w.uncached(r.ID) // the part of the prompt that is not in the prefix cache of the rank
	// Since sendableSince, a rank had room for the entry, but the policy held the entry back to send it together with others.
	if wasHeld := !w.sendableSince.IsZero(); wasHeld {
		bound.Held = max(0, now.Sub(w.sendableSince))
	}
	bound.Slot = b.charge(r, newSlotRecord(r, w, bound, now))
	b.addPrompt(r, bound.Slot, bound.NewTokens, len(r.promptsToCompute)) // it comes last: the rank computes prompts in order
	r.promptsSent++
	bound.ComputeMs = r.computeMs()
}

// newSlotRecord returns the record of an entry that rank r is about to get. charge fills in the rank, the place in its lists, and the step.
func newSlotRecord(r *rank, w waitingEntry, bound *Binding, now time.Time) slotRecord {
	e := w.Entry
	return slotRecord{
		id: e.ID, key: e.Key, prefiller: e.Prefiller, prompt: w.prompt(),
		newTokens: bound.NewTokens, discard: e.Discard, inEngineQueue: bound.InEngineQueue,
		boundAt: now, process: r.Process, boundBeforePrefill: e.Early,
		// Age is how many tokens the answer of a resumed request has from earlier ranks; 0: the request is new.
		tokensFromEarlierRanks: clampTokens(e.Age),
		// The prompt is not computed yet: a prefill engine (Early) or the rank itself (Mixed) computes it after the binding.
		notDecoding: e.Early || r.Mixed,
		// Some engines (Unpinned) run a request of the Responses API (Response) on a rank of their own choice. But if the entry is
		// early (it is bound before its prefill), its KV goes to rank r, and so does the request.
		engineChoosesRank: e.Response && r.Unpinned && !e.Early,
	}
}

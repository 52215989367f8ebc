package board

import (
	"time"

	"evenkeel/dispatcher/policy"
)

// bind charges the entry to the rank and emits the effect that gives its caller the slot. It does not trust the policy: if the assignment
// breaks a hard limit, bind changes nothing and returns a Fault constant; empty: the entry is bound.
func (b *board) bind(g *group, p *policyInUse, a policy.Assignment, now time.Time) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rankWithID(a.Worker)
	switch {
	case !ok:
		return FaultEntry
	case r == nil:
		return FaultWorker
	case !r.Up: // a spared rank may get requests nevertheless, if no other rank takes any
		return FaultDown
	case p.Immediate(): // an immediate policy may exceed slots and KV room: the engine queues the requests
	case r.maxNewRequests(p) <= 0:
		return FaultSlot
	case !r.hasKVRoom(int64(w.prompt())):
		return FaultRoom
	}
	b.pool.Remove(w.Entry)
	bound := Binding{Policy: p.name, Stage: a.Stage, Score: a.Score, InEngineQueue: !p.Immediate() && r.freeSlots() <= 0}
	if bound.InEngineQueue { // no slot is free yet: the policy sends the entry ahead (ahead.go), and it waits in the engine's queue
		r.engineQueued++
	}
	if w.Local != nil { // the rank computes the prompt itself; runLocalRound only chooses ranks that have to compute leastLocalTokens of it
		bound.NewTokens = int32(b.leastLocalTokens)
	}
	b.admit(r, w, bound, now)
	return ""
}

// admit charges an entry that has left the pool to a rank, completes its Binding, and emits EffectBind for its caller. It also counts the
// entry's wait. If the rank or the entry's pair of engines is on trial, this request is the trial.
func (b *board) admit(r *rank, w waitingEntry, bound Binding, now time.Time) {
	e := w.Entry
	if r.Mixed {
		bound.NewTokens = w.uncached(r.ID)
	}
	if wasHeld := !w.sendableSince.IsZero(); wasHeld && r.Mixed {
		bound.Held = max(0, now.Sub(w.sendableSince))
	}
	if e.Early {
		bound.StepMs = r.group.stepMs()
	}
	bound.Full = bound.InEngineQueue || !r.hasKVRoom(int64(w.prompt())) || r.freeSlots() <= 0
	bound.Slot = b.charge(r, newSlotRecord(r, w, &bound, now))
	if r.Mixed {
		b.addPrompt(r, bound.Slot, bound.NewTokens, len(r.promptsToCompute))
		r.promptsSent++
		bound.ComputeMs = r.computeMs()
	}
	bound.Step = b.slots.records[bound.Slot].boundAtStep
	if b.pairs.quarantinedCount > 0 {
		b.pairs.recordSend(&b.slots.records[bound.Slot], now)
	}
	b.recordSend(r, e.ID, now)
	bound.Worker, bound.WorkerName, bound.Group, bound.Wait = r.ID, r.Name, r.Worker.Group, e.Wait(now)
	b.waitTimes.add(bound.Wait)
	b.forgetWaiting(e)
	b.emit(Effect{Kind: EffectBind, Group: b.key(r.group), Entry: e, Bound: bound})
}

// newSlotRecord returns the record of an entry that gets a slot of rank r, as bound says.
func newSlotRecord(r *rank, w waitingEntry, bound *Binding, now time.Time) slotRecord {
	e := w.Entry
	return slotRecord{
		id: e.ID, key: e.Key, prefiller: e.Prefiller, prompt: w.prompt(), age: clampTokens(e.Age), newTokens: bound.NewTokens,
		discard: e.Discard, inEngineQueue: bound.InEngineQueue, boundAt: now,
		// an early entry is pinned (unpinned.go): its prefill engine sends the KV to the rank that was chosen
		early: e.Early, notDecoding: e.Early || r.Mixed, unpinned: e.Response && r.Unpinned && !e.Early,
	}
}

package board

import (
	"time"

	"evenkeel/dispatcher/policy"
)

// bind charges the entry to the rank and emits the effect that gives its caller the slot. It does not trust the policy: if the assignment
// breaks a hard limit, bind changes nothing and returns a Fault constant; empty: the entry is bound.
func (b *board) bind(g *group, p *policyInUse, a policy.Assignment, now time.Time) (fault string) {
	w, ok := b.waiting[a.Entry]
	r := g.rank(a.Worker)
	switch {
	case !ok:
		return FaultEntry
	case r == nil:
		return FaultWorker
	case !r.Up:
		return FaultDown
	case p.Immediate(): // an immediate policy may exceed slots and KV room: the engine queues the requests
	case r.admits(p) <= 0:
		return FaultSlot
	case r.Capacity > 0 && r.kv+int64(w.prompt()) > r.room():
		return FaultRoom
	}
	b.pool.Remove(w.Entry)
	bound := Binding{Policy: p.name, Stage: a.Stage, Score: a.Score, InEngineQueue: !p.Immediate() && r.free() <= 0}
	if bound.InEngineQueue { // no slot is free yet: the policy sends the entry ahead (ahead.go), and it waits in the engine's queue
		r.queued++
	}
	if w.Local != nil { // the rank computes the prompt itself; roundLocal only chooses ranks that have to compute leastTokens of it
		bound.NewTokens = int32(b.leastTokens)
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
	if wasHeld := !w.since.IsZero(); wasHeld && r.Mixed {
		bound.Held = max(0, now.Sub(w.since))
	}
	s := slotRecord{
		id: e.ID, key: e.Key, prefiller: e.Prefiller, prompt: w.prompt(), age: tokens(e.Age), newTokens: bound.NewTokens,
		discard: e.Discard, waits: bound.InEngineQueue, since: now,
		// an early entry does not stray (strays.go): its prefill engine sends the KV to the rank that was chosen
		early: e.Early, unread: e.Early || r.Mixed, strays: e.Response && r.Unpinned && !e.Early,
	}
	if e.Early {
		bound.StepMs = r.group.stepMs()
	}
	lacksRoom := r.Capacity > 0 && r.kv+int64(w.prompt()) > r.room()
	bound.Full = bound.InEngineQueue || lacksRoom || r.free() <= 0
	bound.Slot = b.charge(r, s)
	if r.Mixed {
		b.addPrompt(r, bound.Slot, bound.NewTokens, len(r.toCompute))
		r.prompts++
		bound.ComputeMs = r.computeMs()
	}
	bound.Step = b.slots.records[bound.Slot].bound
	if b.pairs.quarantined > 0 {
		b.pairs.send(&b.slots.records[bound.Slot], now)
	}
	b.send(r, s.id, now)
	bound.Worker, bound.WorkerName, bound.Group, bound.Wait = r.ID, r.Name, r.Worker.Group, e.Wait(now)
	b.waits.add(bound.Wait)
	b.forget(e)
	b.emit(Effect{Kind: EffectBind, Group: b.key(r.group), Entry: e, Bound: bound})
}

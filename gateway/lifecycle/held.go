package lifecycle

// maybeReadHandOff is a hand-off that an engine may have read, so no other engine may get it.
type maybeReadHandOff struct {
	engineMayRun    bool // the engine may still be working on the request
	reusesRequestID bool // a second request with the hand-off would have the same request id as the first
}

// held is what a request holds and must give back or pass on ("settle"). An effect does so exactly once for each resource.
type held struct {
	has               [resources]bool // true while the request holds the resource; hand-offs that may have been read are in maybeReadHandOffs
	reusesRequestID   bool            // the decode request must carry the request id of the prefill call
	maybeReadHandOffs []maybeReadHandOff
}

func (o *held) take(r Resource) { o.has[r] = true }

// takeSlotAndCall takes the slot of a decode rank, and the call to its engine.
func (o *held) takeSlotAndCall() { o.take(Slot); o.take(Call) }

// settleSlotAndCall gives back what takeSlotAndCall has taken, if the request still holds it. A slot and its call are always held together,
// so the slot tells about both. Only a passed-through request has a call without a slot, which settlePassthrough gives back.
func (o *held) settleSlotAndCall(dst []Effect, disposition Disposition) []Effect {
	if !o.has[Slot] {
		return dst
	}
	return o.settle(o.settle(dst, Slot, disposition), Call, disposition)
}

// settle gives a resource back or passes it on, as disposition says. It does nothing if the request does not hold the resource. A hand-off
// that an engine may have read (MaybeRead, MaybeRunning) is also noted in o.maybeReadHandOffs. When the attempts are over,
// settleAfterAttempts has it discarded: an engine gets one more request with the hand-off. The note has two facts: whether an engine may
// still work on the first request, and whether the discard would have the same request id. If both are true, there is no discard.
func (o *held) settle(dst []Effect, r Resource, disposition Disposition) []Effect {
	if !o.has[r] {
		return dst
	}
	o.has[r] = false
	if disposition == MaybeRead || disposition == MaybeRunning {
		o.maybeReadHandOffs = append(o.maybeReadHandOffs,
			maybeReadHandOff{engineMayRun: disposition == MaybeRunning, reusesRequestID: o.reusesRequestID})
	}
	return append(dst, Effect{Kind: Settle, Resource: r, Disposition: disposition})
}

// settleAfterAttempts gives back what is left when the attempts are over: hand-offs that an engine may have read, the place in the pool
// (Permit), and the LeaseOwner, by which an audit finds leases of the request that are not given back by then.
//
// Each hand-off is discarded, so that its prefill engine frees the memory: a decode engine gets the request once more, only to fetch the KV
// and throw it away. In two cases the KV is left to the prefill engine's hold timeout instead (Orphan):
//   - The request may be what breaks engines (mayBreakEngines), so no further engine may get it.
//   - The discard would have the id of a request that an engine may still run.
func (o *held) settleAfterAttempts(dst []Effect, mayBreakEngines bool) []Effect {
	for _, handOff := range o.maybeReadHandOffs {
		disposition := Discard
		idInUse := handOff.engineMayRun && handOff.reusesRequestID
		if mayBreakEngines || idInUse {
			disposition = Orphan
		}
		dst = append(dst, Effect{Kind: Settle, Resource: MaybeReadKV, Disposition: disposition})
	}
	o.maybeReadHandOffs = nil
	return o.settle(o.settle(dst, Permit, Back), LeaseOwner, Back)
}

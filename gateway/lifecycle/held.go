package lifecycle

type maybeReadHandOff struct {
	engineMayRun    bool // the engine may still be working on the request
	reusesRequestID bool // a second request with the hand-off would have the same id as the first
}

// held is what a request holds and must give back or pass on ("settle"), exactly once.
type held struct {
	has               [resources]bool // but hand-offs that may have been read are in maybeReadHandOffs
	reusesRequestID   bool            // the decode request must carry the id of the prefill call
	maybeReadHandOffs []maybeReadHandOff
}

func (o *held) take(r Resource) { o.has[r] = true }

func (o *held) takeSlotAndCall() { o.take(Slot); o.take(Call) }

// settleSlotAndCall: a slot and its call are always held together. Only a passed-through request
// has a call without a slot (settlePassthrough).
func (o *held) settleSlotAndCall(dst []Effect, disposition Disposition) []Effect {
	if !o.has[Slot] {
		return dst
	}
	return o.settle(o.settle(dst, Slot, disposition), Call, disposition)
}

// settle does nothing if the request does not hold the resource. It notes a hand-off that an engine
// may have read, for settleAfterAttempts.
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

// settleAfterAttempts gives back what is left when the attempts are over. Each noted hand-off is
// discarded, so that its prefill engine frees the memory: a decode engine gets the request once
// more, fetches the KV and throws it away. But the KV is left to the prefill engine's hold timeout
// (Orphan) if no further engine may get the request, or if the discard would have the id of a
// request that an engine may still run.
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

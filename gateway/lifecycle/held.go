package lifecycle

// maybeRead is a hand-off that an engine may have read, so no other engine may get it.
type maybeRead struct {
	mayRun          bool // the engine may still be working on the request
	reusesRequestID bool // a second request with the hand-off would have the same request id as the first
}

// held is what a request holds and must give back or pass on (settle). Each thing is settled exactly once, by an effect.
type held struct {
	has             [resources]bool // true while the request holds the thing; hand-offs in doubt are in doubts
	reusesRequestID bool            // the decode request must carry the probe's request id
	doubts          []maybeRead
}

func (o *held) take(t Resource) { o.has[t] = true }

// bind takes the slot of a decode rank, and the call to its engine.
func (o *held) bind() { o.take(Slot); o.take(Call) }

// unbind gives back what bind has taken, if the request still holds it.
func (o *held) unbind(dst []Effect, how Disposition) []Effect {
	if !o.has[Slot] {
		return dst
	}
	return o.settle(o.settle(dst, Slot, how), Call, how)
}

// settle gives a thing back or passes it on, as how says. It does nothing if the request does not hold the thing.
func (o *held) settle(dst []Effect, t Resource, how Disposition) []Effect {
	if !o.has[t] {
		return dst
	}
	o.has[t] = false
	if how == MaybeRead || how == MaybeRunning {
		o.doubts = append(o.doubts, maybeRead{mayRun: how == MaybeRunning, reusesRequestID: o.reusesRequestID})
	}
	return append(dst, Effect{Kind: Settle, Resource: t, Disposition: how})
}

// conclude settles what is left when the attempts are over. It discards each hand-off in doubt, so that the prefill engine can free the
// memory. It leaves the hand-off to the engine's hold timeout (Orphan) if the request may be what breaks engines, or if the discard would
// have the id of a request that an engine may still run.
func (o *held) conclude(dst []Effect, breaksEngines bool) []Effect {
	for _, doubt := range o.doubts {
		how := Discard
		if breaksEngines || doubt.mayRun && doubt.reusesRequestID {
			how = Orphan
		}
		dst = append(dst, Effect{Kind: Settle, Resource: MaybeReadKV, Disposition: how})
	}
	o.doubts = nil
	return o.settle(o.settle(dst, Permit, Back), LeaseOwner, Back)
}

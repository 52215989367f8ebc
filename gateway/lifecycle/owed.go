package lifecycle

// doubt is a hand-off that an engine may have read.
type doubt struct {
	mayRun     bool // the engine has not said that it is done with the request
	hasProbeID bool // a second request for it would have the id of the first
}

// owed is what a request holds. Each thing is settled once: by an effect, in a way that is its own.
type owed struct {
	has          [things]bool // Doubted is in doubts
	kvHasProbeID bool         // of the KV: a decode request must have the probe's id
	doubts       []doubt
}

func (o *owed) take(t Thing) { o.has[t] = true }

// bind takes the slot of a decode rank, and the call to its engine.
func (o *owed) bind() { o.take(Slot); o.take(Call) }

// unbind gives back what bind has taken, if the request still holds it.
func (o *owed) unbind(dst []Effect, how How) []Effect {
	if !o.has[Slot] {
		return dst
	}
	return o.settle(o.settle(dst, Slot, how), Call, how)
}

// settle ends the hold of a thing. It does nothing if the request does not hold that thing.
func (o *owed) settle(dst []Effect, t Thing, how How) []Effect {
	if !o.has[t] {
		return dst
	}
	o.has[t] = false
	if how == Doubt || how == DoubtOn {
		o.doubts = append(o.doubts, doubt{mayRun: how == DoubtOn, hasProbeID: o.kvHasProbeID})
	}
	return append(dst, Effect{Do: Settle, Thing: t, How: how})
}

// conclude settles what is left when the attempts are over. A hand-off that was doubted is discarded, so that its engine has
// the memory back. It is left to the engine's hold timeout if the request may be what breaks engines, or if the discard would have the id
// of a request that an engine may still run.
func (o *owed) conclude(dst []Effect, breaksEngines bool) []Effect {
	for _, doubt := range o.doubts {
		how := Discard
		if breaksEngines || doubt.mayRun && doubt.hasProbeID {
			how = Orphan
		}
		dst = append(dst, Effect{Do: Settle, Thing: Doubted, How: how})
	}
	o.doubts = nil
	return o.settle(o.settle(dst, Place, Back), Holder, Back)
}

package lifecycle

import "evenkeel/mooncake"

// Dialects are those of the connectors that may bind a decode rank before the prefill.
var Dialects = map[string]Dialect{
	mooncake.AscendLayerwise: {CallsBack: true, Strands: true, Retries: true},
	mooncake.SGLang:          {Aborts: true},
	mooncake.NIXLPush:        {Keeps: true, Strands: true},
}

// prefilling is how far the prefill leg of a pair has come.
type prefilling uint8

const (
	uncalled prefilling = iota // it waits until the decode engine says where the KV goes
	due                        // it may be sent
	running                    // a prefill engine may have it
	aborting                   // the prefill engine may still have it, and was told to abort it
	seeking                    // its engine took nothing, and another engine is looked for, or found
	answered                   // the prefill engine has answered well
	gone                       // it has ended without an answer, or there is nothing to prefill
)

// decoding is how far the decode leg of a pair has come.
type decoding uint8

const (
	unbegun decoding = iota // its first event has not come
	begun                   // its first event has come
	fell                    // it ended without a first event
	over                    // it ended after its first event
)

// blocks are what the decode engine has for the request.
type blocks uint8

const (
	unknown  blocks = iota // the decode engine has not said yet what it has
	waiting                // blocks that wait for KV
	needless               // all of the prompt: nothing is to be prefilled
)

// A Pair is the two legs of an attempt whose decode rank was bound before its prefill. Both are under way at once, and each needs
// the other: an engine whose counterpart is gone may wait for minutes or for ever. So the end of one leg ends the other one. A prefill
// leg may outlive its attempt, and then runs beside the next one.
type Pair struct {
	dialect        Dialect
	prefill        prefilling
	decode         decoding
	blocks         blocks
	whole          bool  // the answer comes in one piece, or may say nothing before its end
	deaf           bool  // the decode engine may not heed an abort
	leased         bool  // the prefill's lease is not settled
	Left           bool  // the client left before the first event
	decodeCounted  int   // tokens of the prompt, as the decode engine counted them; 0: it did not say so
	prefillCounted int   // the same, as the prefill engine counted them
	Failed         bool  // one leg has ended the other, or the answer may not be believed
	cause          Ended // the end of a leg for which Failed was set
}

// newPair returns the pair of an attempt that begins. The pair has the lease of the prompt.
func newPair(d Dialect, whole, deaf bool) Pair {
	p := Pair{dialect: d, prefill: due, whole: whole, deaf: deaf, leased: true}
	if d.CallsBack {
		p.prefill = uncalled
	}
	if d.Keeps { // the decode engine takes its blocks without a callback
		p.blocks = waiting
	}
	return p
}

// Answered says whether the prefill engine has answered well.
func (p *Pair) Answered() bool { return p.prefill == answered }

// Aborting says whether the prefill engine was told to abort the request. If its answer then says that it did, that is no failure.
func (p *Pair) Aborting() bool { return p.prefill == aborting }

// Begun says whether the first event has come.
func (p *Pair) Begun() bool { return p.decode == begun || p.decode == over }

// Stranded says whether the decode engine may keep blocks for a prefill that may not come.
func (p *Pair) Stranded() bool { return p.dialect.Strands && p.blocks == waiting }

// Due says whether the prefill leg may be sent.
func (p *Pair) Due() bool { return p.prefill == due }

// Closed says whether the decode leg has ended.
func (p *Pair) Closed() bool { return p.decode == fell || p.decode == over }

// step takes an event of the pair and appends to dst what is to be done. The two legs report in any order, so each case also holds if the
// other leg has ended already.
func (p *Pair) step(e Event, dst []Effect) []Effect {
	switch e.What {
	case CalledBack, NeedsNothing, Miscalled:
		return p.calledBack(e, dst)
	case Overdue:
		return p.fail(e.End, dst)
	case CalledLate: // the request is over, but the decode engine has taken blocks for it, which only a prefill frees
		if !p.leased {
			p.prefill = gone
			return dst
		}
		p.blocks, p.prefill = waiting, due
		return append(dst, Effect{Do: DrainBeside, Until: ByProbe})
	case Uncallable:
		p.prefill = gone
		return p.settleLease(Free, dst)
	case ProbeDue:
		// the decode leg has ended before anything was sent, or its client has left: then nothing is prefilled
		if p.prefill == gone || p.dialect.Aborts && (p.Closed() || p.Left) || p.dialect.Keeps && p.Closed() {
			p.prefill = gone
			return p.settleLease(Free, dst)
		}
		p.prefill = running
		return append(dst, Effect{Do: SendBeside, Until: ByProbe})
	case PrefillFell:
		dst = p.settleLease(e.End.Verdict().KV, dst)
		if e.Again && p.dialect.Retries && e.End.Untaken() {
			p.prefill = seeking
			return append(dst, Effect{Do: Seek, Until: ByProbe})
		}
		p.prefill = gone
		return p.fail(e.End, dst)
	case Found:
		p.leased = true // on the engine that takes the other one's place
	case NotFound:
		p.prefill = gone
		return p.fail(e.End, dst)
	case PrefillDone:
		return p.prefillDone(e, dst)
	case Began:
		return p.decodeBegan(e, dst)
	case Confirmed:
		p.decodeCounted = max(p.decodeCounted, e.Prompt)
		if dst = p.compare(dst); !p.Failed && p.prefill == answered {
			dst = p.settleLease(Free, dst)
		}
	case Quiet:
		if p.decode == unbegun {
			return p.fail(e.End, dst)
		}
	case DecodeFell:
		return p.decodeFell(e.Reason, dst)
	case DecodeOver:
		if !p.Closed() {
			p.decode = over
			if p.blocks != unknown { // else the decode engine may still say that it needed nothing
				dst = append(dst, Effect{Do: Forget})
			}
		}
	case NotSent:
		p.prefill, p.decode = gone, fell
		return p.settleLease(Free, append(dst, Effect{Do: Forget}))
	case ClientGone:
		return p.clientLeft(e, dst)
	case ClientWaited:
		return p.fail(e.End, dst)
	case Unwanted: // an answer that the prefill engine did not confirm is not believed
		was := p.prefill
		if (was == running || was == aborting) && !p.Failed {
			p.Failed, p.cause = true, e.End
		}
		if was == running {
			return p.abort(dst)
		}
	}
	return dst
}

// abort ends the prefill leg. It is for connectors whose engines can be told to abort a request (Dialect.Aborts).
func (p *Pair) abort(dst []Effect) []Effect {
	if p.prefill == running {
		p.prefill = aborting
	}
	return append(dst, Effect{Do: AbortPrefill}, Effect{Do: HangUp})
}

// settleLease settles the lease of the prompt, once.
func (p *Pair) settleLease(how How, dst []Effect) []Effect {
	if !p.leased {
		return dst
	}
	p.leased = false
	return append(dst, Effect{Do: Settle, Thing: Lease, How: how})
}

// fail ends the decode leg, once. It does nothing if that leg has ended by itself, or if its answer has begun and the connector
// is one where this means that the KV is complete. Where it does not mean that, an answer that has ended is then not believed. end is the
// end of the leg that is at fault.
func (p *Pair) fail(end Ended, dst []Effect) []Effect {
	switch {
	case p.Failed, p.decode == fell, p.Begun() && !p.dialect.Aborts:
		return dst
	}
	if p.Failed, p.cause = true, end; p.decode == over {
		return dst
	}
	if p.dialect.Aborts {
		dst = append(dst, Effect{Do: AbortDecode})
	}
	return append(dst, Effect{Do: EndDecode})
}

// calledBack handles the callback of the decode engine, which says where the KV goes, that no KV is needed, or nothing that can be used.
func (p *Pair) calledBack(e Event, dst []Effect) []Effect {
	if p.blocks = waiting; e.What == NeedsNothing {
		p.blocks = needless
	}
	if p.Closed() { // the decode leg ended at the same moment
		dst = append(dst, Effect{Do: Forget})
	}
	switch {
	case e.What == Miscalled:
		p.prefill = gone
		return p.settleLease(Free, p.fail(e.End, dst))
	case !p.leased: // the answer has begun without a prefill
		p.prefill = gone
	case e.What == NeedsNothing:
		p.prefill = answered
		return p.awaitFirst(p.settleLease(Free, dst))
	default:
		p.prefill = due
	}
	return dst
}

// awaitFirst begins the time for the first event, unless that event has come or the decode leg has ended.
func (p *Pair) awaitFirst(dst []Effect) []Effect {
	if p.decode != unbegun {
		return dst
	}
	wait := Effect{Do: AwaitFirst, Until: ByFirstEvent}
	switch {
	case p.whole: // the answer has no event before its end
		wait.Until = ByWhole
	case p.dialect.Keeps:
		wait.Until = ByHold
	}
	return append(dst, wait)
}

// Confirms is how long the proxy waits for the prefill engine to confirm that the KV of an answer was complete. With most connectors
// the answer itself shows that, and there is no wait (NotHere).
func (p *Pair) Confirms() Limit {
	if p.dialect.Aborts {
		return ByGrace
	}
	return NotHere
}

// abortLimit is how long the decode leg is kept after an abort of the prefill leg, so that the prefill engine has stopped writing to the
// blocks of the decode engine when these are given away. A deaf decode engine gets more time.
func (p *Pair) abortLimit() Limit {
	if p.deaf {
		return ByGrace
	}
	return ByAbort
}

// prefillDone handles the good answer of the prefill engine. Then the time for the first event begins.
func (p *Pair) prefillDone(e Event, dst []Effect) []Effect {
	p.prefill, p.prefillCounted = answered, e.Prompt
	switch {
	case !p.dialect.Keeps && !p.dialect.Aborts, p.Begun(), p.dialect.Aborts && p.Closed(): // the KV has been written, or is where it belongs
		dst = p.settleLease(Free, dst)
	case p.Closed(): // no decode engine will fetch the KV
		dst = p.settleLease(Orphan, dst)
	}
	return p.awaitFirst(p.compare(dst))
}

// decodeBegan handles the first event of the answer. If the connector lets an answer begin although KV is missing (Dialect.Aborts), the
// event is held back until the prefill engine has answered.
func (p *Pair) decodeBegan(e Event, dst []Effect) []Effect {
	// The prefill engine may have reused the memory of the KV before the decode engine read it. Then the answer may be made of another
	// prompt's KV.
	if p.prefill == answered && e.Expired {
		dst = p.fail(e.End, dst)
	}
	p.decode, p.decodeCounted = begun, e.Prompt
	if p.dialect.CallsBack && p.blocks == unknown { // the decode engine needed no prefill, and has not called back to say so
		dst = p.settleLease(Free, dst)
	}
	dst = append(dst, Effect{Do: StopWaiting})
	if !p.Failed && p.dialect.Aborts && p.prefill != answered {
		dst = append(dst, Effect{Do: AwaitPrefill, Until: ByConfirm})
	}
	return dst
}

// compare ends the decode leg if the decode engine counted more prompt tokens than the prefill engine: then KV is missing.
func (p *Pair) compare(dst []Effect) []Effect {
	if p.dialect.Aborts && p.Begun() && p.prefill == answered && p.prefillCounted > 0 && p.prefillCounted < p.decodeCounted {
		return p.fail(Ended{Far: Through, Why: Incomplete}, dst)
	}
	return dst
}

// decodeFell handles the end of a decode leg without a first event, or with one that was not believed. It ends the prefill leg where that
// is of use, and reports blocks that the decode engine may keep for ever.
func (p *Pair) decodeFell(reason EndReason, dst []Effect) []Effect {
	if p.decode == begun { // its first event came, but was not believed
		p.decode = over
	} else {
		p.decode = fell
	}
	dst = append(dst, Effect{Do: StopWaiting})
	stranded := false
	if p.Failed { // the prefill leg, or the wait for the first event, has ended the decode leg
		stranded = p.Stranded() && (p.prefill != answered || p.cause.Why == Unbegun)
	} else {
		dst, stranded = p.endPrefill(reason, dst)
	}
	if stranded {
		dst = append(dst, Effect{Do: Strand})
	}
	if p.dialect.CallsBack && p.blocks != unknown {
		dst = append(dst, Effect{Do: Forget})
	}
	if reason != Declined && !p.Left {
		dst = append(dst, Effect{Do: CountLoss})
	}
	// After this wait the decode leg is closed. Its engine must not give pages away that the prefill engine still writes.
	if !p.Failed && reason == Died && p.dialect.Aborts {
		dst = append(dst, Effect{Do: AwaitPrefill, Until: p.abortLimit()})
	}
	if p.prefill == answered {
		dst = p.settleLease(Orphan, dst)
	}
	return dst
}

// endPrefill ends the prefill leg after the decode leg has ended by itself, in the way that the connector needs. stranded says whether the
// decode engine may keep blocks for ever.
func (p *Pair) endPrefill(reason EndReason, dst []Effect) (_ []Effect, stranded bool) {
	d := &p.dialect
	// a prefill engine may have the request, or another one is about to get it
	sent := p.prefill == running || p.prefill == seeking || p.prefill == answered && p.blocks != needless
	switch {
	case d.Aborts:
		return p.abort(dst), false
	case d.CallsBack && sent && !p.Left: // the prefill engine would write to a decode engine that has dropped the request
		return append(dst, Effect{Do: HangUp}), reason == Died && p.prefill != answered
	case d.CallsBack && p.blocks == unknown && reason != Died: // the engine took nothing, so it will not call back
		return append(dst, Effect{Do: Forget}), false
	case d.Keeps && reason != Died: // the decode engine took nothing, so nobody will fetch the KV
		return append(dst, Effect{Do: HangUp}), false
	case d.Keeps: // the decode engine keeps the blocks if the KV never comes; if its process ended, they are free when it restarts
		return dst, p.prefill != answered
	}
	return dst, false
}

// clientLeft handles that the client has left before the first event. The legs are ended at once only if no engine has blocks yet, or if
// engines can be told to abort the request. Else the first event is waited for.
func (p *Pair) clientLeft(e Event, dst []Effect) []Effect {
	if p.Left || p.decode != unbegun {
		return dst
	}
	p.Left = true
	switch {
	case p.dialect.CallsBack && p.blocks == unknown: // no engine has blocks yet, as far as is known
		dst = p.fail(e.End, dst)
	case p.dialect.Aborts: // the prefill engine first: the decode engine must not give away blocks that are still written
		return append(p.abort(dst), Effect{Do: WaitGone, Until: p.abortLimit()})
	}
	// Only the first event says that both engines' blocks can be freed; the reader of the decode leg ends it then. If no
	// event comes for too long, because a prefill engine stands still, the blocks are left to the engines.
	if !p.Failed {
		dst = append(dst, Effect{Do: WaitGone, Until: ByGrace})
	}
	return dst
}

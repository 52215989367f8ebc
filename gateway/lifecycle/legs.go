package lifecycle

import "evenkeel/mooncake"

// Dialects are those of the connectors that may bind a decode rank before the prefill.
var Dialects = map[string]Dialect{
	mooncake.AscendLayerwise: {CallsBack: true, Strands: true, Retries: true},
	mooncake.SGLang:          {Aborts: true},
	mooncake.NIXLPush:        {Keeps: true, Strands: true},
}

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

type decoding uint8

const (
	opens decoding = iota // its first event has not come
	begun                 // its first event has come
	fell                  // it ended without a first event
	over                  // it ended after its first event
)

// blocks are what the decode engine has for the request.
type blocks uint8

const (
	unknown  blocks = iota // the decode engine has not said so yet
	waiting                // blocks that wait for KV
	needless               // all of the prompt: nothing is to be prefilled
)

// A Pair is the two legs of an attempt whose decode rank was bound before its prefill. Both are under way at once, and each needs
// the other: an engine whose counterpart is gone may wait for minutes or for ever. So the end of one leg ends the other one. A prefill
// leg may outlive its attempt, and then runs beside the next one.
type Pair struct {
	dialect Dialect
	prefill prefilling
	decode  decoding
	blocks  blocks
	whole   bool  // the answer comes in one piece, or may say nothing before its end
	deaf    bool  // the decode engine may not heed an abort
	leased  bool  // the prefill's lease is not settled
	Left    bool  // the client left before the first event
	counted int   // tokens of the prompt, as the decode engine counted them; 0: it did not say so
	prompt  int   // the same, as the prefill engine counted them
	Failed  bool  // one leg has ended the other, or the answer may not be believed
	why     Ended // why Failed is set
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

func (p *Pair) step(e Event, dst []Effect) []Effect {
	switch e.What {
	case CalledBack, NeedsNothing, Miscalled:
		return p.called(e, dst)
	case Overdue:
		return p.fail(e.End, dst)
	case CalledLate:
		if !p.leased {
			p.prefill = gone
			return dst
		}
		p.blocks, p.prefill = waiting, due
		return append(dst, Effect{Do: DrainBeside, Until: ByProbe})
	case Uncallable:
		p.prefill = gone
		return p.settle(Free, dst)
	case ProbeDue:
		// the decode leg has ended before anything was sent
		if p.prefill == gone || p.dialect.Aborts && (p.Closed() || p.Left) || p.dialect.Keeps && p.Closed() {
			p.prefill = gone
			return p.settle(Free, dst)
		}
		p.prefill = running
		return append(dst, Effect{Do: SendBeside, Until: ByProbe})
	case PrefillFell:
		dst = p.settle(e.End.Verdict().KV, dst)
		if e.Again && p.dialect.Retries && e.End.Untaken() {
			p.prefill = seeking
			return append(dst, Effect{Do: Seek, Until: ByProbe})
		}
		p.prefill = gone
		return p.fail(e.End, dst)
	case Found:
		p.leased = true
	case NotFound:
		p.prefill = gone
		return p.fail(e.End, dst)
	case PrefillDone:
		return p.done(e, dst)
	case Began:
		return p.began(e, dst)
	case Confirmed:
		p.counted = max(p.counted, e.Prompt)
		if dst = p.compare(dst); !p.Failed && p.prefill == answered {
			dst = p.settle(Free, dst)
		}
	case Quiet:
		if p.decode == opens {
			return p.fail(e.End, dst)
		}
	case DecodeFell:
		return p.fell(e.Reason, dst)
	case DecodeOver:
		if !p.Closed() {
			p.decode = over
			if p.blocks != unknown { // else the decode engine may still say that it needed nothing
				dst = append(dst, Effect{Do: Forget})
			}
		}
	case NotSent:
		p.prefill, p.decode = gone, fell
		return p.settle(Free, append(dst, Effect{Do: Forget}))
	case ClientGone:
		return p.clientLeft(e, dst)
	case ClientWaited:
		return p.fail(e.End, dst)
	case Unwanted:
		was := p.prefill
		if (was == running || was == aborting) && !p.Failed {
			p.Failed, p.why = true, e.End
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

func (p *Pair) settle(how How, dst []Effect) []Effect {
	if !p.leased {
		return dst
	}
	p.leased = false
	return append(dst, Effect{Do: Settle, Thing: Lease, How: how})
}

// fail ends the decode leg, once. It does nothing if that leg has ended by itself, or if its answer has begun and the connector
// is one where this means that the KV is complete. Where it does not mean that, an answer that has ended is then not believed.
func (p *Pair) fail(why Ended, dst []Effect) []Effect {
	switch {
	case p.Failed, p.decode == fell, p.Begun() && !p.dialect.Aborts:
		return dst
	}
	if p.Failed, p.why = true, why; p.decode == over {
		return dst
	}
	if p.dialect.Aborts {
		dst = append(dst, Effect{Do: AbortDecode})
	}
	return append(dst, Effect{Do: EndDecode})
}

func (p *Pair) called(e Event, dst []Effect) []Effect {
	if p.blocks = waiting; e.What == NeedsNothing {
		p.blocks = needless
	}
	if p.Closed() { // the decode leg ended at the same moment
		dst = append(dst, Effect{Do: Forget})
	}
	switch {
	case e.What == Miscalled:
		p.prefill = gone
		return p.settle(Free, p.fail(e.End, dst))
	case !p.leased: // the answer has begun without a prefill
		p.prefill = gone
	case e.What == NeedsNothing:
		p.prefill = answered
		return p.await(p.settle(Free, dst))
	default:
		p.prefill = due
	}
	return dst
}

func (p *Pair) await(dst []Effect) []Effect {
	if p.decode != opens {
		return dst
	}
	x := Effect{Do: AwaitFirst, Until: ByFirstEvent}
	switch {
	case p.whole: // the answer has no event before its end
		x.Until = ByWhole
	case p.dialect.Keeps:
		x.Until = ByHold
	}
	return append(dst, x)
}

// Confirms is how long the proxy waits for the prefill engine to confirm that the KV of an answer was complete. With most connectors
// the answer itself shows that, and there is no wait (NotHere).
func (p *Pair) Confirms() Limit {
	if p.dialect.Aborts {
		return ByGrace
	}
	return NotHere
}

// aborted is how long the decode leg outlives an abort of the prefill leg.
func (p *Pair) aborted() Limit {
	if p.deaf {
		return ByGrace
	}
	return ByAbort
}

func (p *Pair) done(e Event, dst []Effect) []Effect {
	p.prefill, p.prompt = answered, e.Prompt
	switch {
	case !p.dialect.Keeps && !p.dialect.Aborts, p.Begun(), p.dialect.Aborts && p.Closed(): // the KV has been written, or is where it belongs
		dst = p.settle(Free, dst)
	case p.Closed(): // no decode engine will fetch the KV
		dst = p.settle(Orphan, dst)
	}
	return p.await(p.compare(dst))
}

func (p *Pair) began(e Event, dst []Effect) []Effect {
	if p.prefill == answered && e.Expired {
		dst = p.fail(e.End, dst)
	}
	p.decode, p.counted = begun, e.Prompt
	if p.dialect.CallsBack && p.blocks == unknown { // the decode engine needed no prefill, and has not called back to say so
		dst = p.settle(Free, dst)
	}
	dst = append(dst, Effect{Do: StopWaiting})
	if !p.Failed && p.dialect.Aborts && p.prefill != answered {
		dst = append(dst, Effect{Do: AwaitPrefill, Until: ByConfirm})
	}
	return dst
}

// compare ends the decode leg if the decode engine counted more prompt tokens than the prefill engine: then KV is missing.
func (p *Pair) compare(dst []Effect) []Effect {
	if p.dialect.Aborts && p.Begun() && p.prefill == answered && p.prompt > 0 && p.prompt < p.counted {
		return p.fail(Ended{Far: Through, Why: Incomplete}, dst)
	}
	return dst
}

// fell ends the prefill leg after the decode leg has ended without a first event, where that is of use.
func (p *Pair) fell(how EndReason, dst []Effect) []Effect {
	if p.decode == begun { // its first event came, but was not believed
		p.decode = over
	} else {
		p.decode = fell
	}
	dst = append(dst, Effect{Do: StopWaiting})
	stranded := false
	if p.Failed {
		stranded = p.Stranded() && (p.prefill != answered || p.why.Why == Unbegun)
	} else {
		dst, stranded = p.part(how, dst)
	}
	if stranded {
		dst = append(dst, Effect{Do: Strand})
	}
	if p.dialect.CallsBack && p.blocks != unknown {
		dst = append(dst, Effect{Do: Forget})
	}
	if how != Declined && !p.Left {
		dst = append(dst, Effect{Do: CountLoss})
	}
	// After this wait the decode leg is closed. Its engine must not give pages away that the prefill engine still writes.
	if !p.Failed && how == Died && p.dialect.Aborts {
		dst = append(dst, Effect{Do: AwaitPrefill, Until: p.aborted()})
	}
	if p.prefill == answered {
		dst = p.settle(Orphan, dst)
	}
	return dst
}

// part ends the prefill leg after the decode leg has ended by itself, and says whether blocks may be stranded on the decode engine.
func (p *Pair) part(how EndReason, dst []Effect) (_ []Effect, stranded bool) {
	d, sent := &p.dialect, p.prefill == running || p.prefill == seeking || p.prefill == answered && p.blocks != needless
	switch {
	case d.Aborts:
		return p.abort(dst), false
	case d.CallsBack && sent && !p.Left: // the prefill engine would write to a decode engine that has dropped the request
		return append(dst, Effect{Do: HangUp}), how == Died && p.prefill != answered
	case d.CallsBack && p.blocks == unknown && how != Died:
		return append(dst, Effect{Do: Forget}), false
	case d.Keeps && how != Died:
		return append(dst, Effect{Do: HangUp}), false
	case d.Keeps:
		return dst, p.prefill != answered // if the engine died, it frees them when it restarts
	}
	return dst, false
}

// clientLeft ends the legs of a client that has left before the first event.
func (p *Pair) clientLeft(e Event, dst []Effect) []Effect {
	if p.Left || p.decode != opens {
		return dst
	}
	p.Left = true
	switch {
	case p.dialect.CallsBack && p.blocks == unknown: // no engine has blocks yet, as far as is known
		dst = p.fail(e.End, dst)
	case p.dialect.Aborts: // the prefill engine first: the decode engine must not give away blocks that are still written
		return append(p.abort(dst), Effect{Do: WaitGone, Until: p.aborted()})
	}
	// Only the first event says that both engines' blocks can be freed; the reader of the decode leg ends it then. If no
	// event comes for too long, because a prefill engine stands still, the blocks are left to the engines.
	if !p.Failed {
		dst = append(dst, Effect{Do: WaitGone, Until: ByGrace})
	}
	return dst
}

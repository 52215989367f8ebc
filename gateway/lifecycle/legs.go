package lifecycle

// Dialect is what the connectors differ in that bind a decode rank before the prefill.
type Dialect struct {
	CallsBack bool // the decode engine says where the KV goes, and before that there is nothing to prefill
	Aborts    bool // engines are told to abort a request by its id, and give its blocks away at once. And KV may be incomplete although both legs answer well
	Keeps     bool // the prefill engine keeps the KV until the decode engine has it, or until the lease on it ends
	// Strands: the decode engine keeps blocks for a prefill that never comes, and nobody can free them. vLLM's watchdog for
	// registrations only writes a log line (nixl/push_scheduler.py, vLLM issue 46283). A request of vllm-ascend that was aborted
	// while it waited keeps its blocks until a prefill ends (vllm-ascend issue 16662). That a decode engine which is told of a
	// failed prefill waits for ever is inferred from mooncake_layerwise_connector.py and vLLM pull request 50984.
	Strands bool
	// Retries: a prefill engine that has not taken the request may be replaced by another. If it has taken the request, a
	// layerwise decode engine would count the ends of both prefills together, and begin too early (vllm-ascend 182b75ea,
	// mooncake_layerwise_connector.py).
	Retries bool
}

// prefilling is where the prefill leg stands.
type prefilling uint8

const (
	uncalled prefilling = iota // it waits until the decode engine says where the KV goes
	due                        // it may be sent
	running                    // a prefill engine may have it
	aborting                   // it may have it still, and was told to abort it
	seeking                    // its engine took nothing, and another one is looked for, or found
	answered                   // the prefill engine has answered well
	gone                       // it has ended without an answer, or there is nothing to prefill
)

// decoding is where the decode leg stands.
type decoding uint8

const (
	opens decoding = iota // its first event has not come
	begun                 // it has
	fell                  // it ended without one
	over                  // it ended after it
)

// blocks are what the decode engine has for the request.
type blocks uint8

const (
	unknown  blocks = iota // it has not said so yet
	waiting                // blocks that wait for KV
	needless               // all of the prompt: nothing is to be prefilled
)

// Legs are the two legs of an attempt whose decode rank was bound before its prefill. Both are under way at once, and each needs
// the other: an engine whose counterpart is gone may wait for minutes or for ever. So the end of one leg ends the other one.
type Legs struct {
	dialect Dialect
	prefill prefilling
	decode  decoding
	blocks  blocks
	leased  bool  // the prefill's lease is not settled
	left    bool  // the client left before the first event
	counted int   // tokens of the prompt, by the decode engine
	prompt  int   // and by the prefill engine; 0: it did not say so
	failed  bool  // one leg has ended the other, or the answer may not be believed
	why     Ended // of failed
}

// NewLegs are the legs of an attempt that begins. The lease is not settled.
func NewLegs(d Dialect) Legs {
	l := Legs{dialect: d, prefill: due, leased: true}
	if d.CallsBack {
		l.prefill = uncalled
	}
	if d.Keeps { // the decode engine makes room by itself
		l.blocks = waiting
	}
	return l
}

// LegWhat is what may happen to the legs of an attempt.
type LegWhat uint8

// What may happen.
const (
	CalledBack   LegWhat = iota // the decode engine says where the KV goes
	NeedsNothing                // the decode engine has the whole prompt already
	Miscalled                   // what the decode engine says names no place for KV
	Overdue                     // it did not say anything in time
	CalledLate                  // it says where the KV goes, of a request that is over
	Uncallable                  // nor does it say anything then that is of use
	ProbeDue                    // the prefill leg is about to be sent
	PrefillFell                 // the prefill leg ended without an answer
	Found                       // another prefill engine takes the place of one that took nothing
	NotFound                    // none does
	PrefillDone                 // the prefill engine has answered well
	Began                       // the first event of the answer came
	Confirmed                   // the wait for the prefill engine's answer is over, after the first event or after the last
	Quiet                       // the time for the first event is over
	DecodeFell                  // the decode leg ended without a first event
	DecodeOver                  // it ended after it
	ClientGone                  // the client left
	ClientWaited                // and what it left may be ended now
	Unwanted                    // the prefill engine's answer is not waited for any longer, though the decode leg has ended
)

// EndReason is how a decode leg ends without a first event.
type EndReason uint8

// The ways.
const (
	Refused  EndReason = iota // its engine took nothing
	Declined                  // it is the request's fault
	Died                      // it is not known what its engine does
)

// A LegEvent is what has happened to one of the legs.
type LegEvent struct {
	What   LegWhat
	End    Ended     // of what ends a leg
	Prompt int       // tokens of it, as an engine has counted them; 0: it did not say so
	Late   bool      // of Began: the KV may have been given away by then
	Again  bool      // of PrefillFell: one more prefill engine may be asked
	Reason EndReason // of DecodeFell
}

// LegDo is what is to be done.
type LegDo uint8

// What is to be done.
const (
	EndDecode    LegDo = iota // the call of the decode leg is ended
	AbortDecode               // the decode engine is told to abort the request
	AbortPrefill              // the prefill engine is
	HangUp                    // the call of the prefill leg is ended, if there is one
	GiveBack                  // the lease is settled
	Send                      // the prefill leg is sent
	Seek                      // another prefill engine is looked for
	AwaitFirst                // the time for the first event begins
	StopWaiting               // and ends
	Forget                    // no callback is expected any more
	Drain                     // a prefill is run only because its end frees blocks
	CountLoss                 // the rank was lost before the first event
	Strand                    // the decode engine may keep blocks for ever
	WaitGone                  // ClientWaited comes a moment after the abort, or after the grace
)

// A LegEffect is something to do.
type LegEffect struct {
	Do  LegDo
	How How // of GiveBack
}

// Failed says whether one leg has ended the other, or the answer may not be believed.
func (l *Legs) Failed() bool { return l.failed }

// Answered says whether the prefill engine has answered well.
func (l *Legs) Answered() bool { return l.prefill == answered }

// Aborting says whether the prefill engine was told to abort the request, so that an answer which says so is no failure of its own.
func (l *Legs) Aborting() bool { return l.prefill == aborting }

// Begun says whether the first event has come.
func (l *Legs) Begun() bool { return l.decode == begun || l.decode == over }

// Left says whether the client left before the first event.
func (l *Legs) Left() bool { return l.left }

// Stranded says whether the decode engine may keep blocks for a prefill that may not come.
func (l *Legs) Stranded() bool { return l.dialect.Strands && l.blocks == waiting }

// Due says whether the prefill leg may be sent.
func (l *Legs) Due() bool { return l.prefill == due }

// Closed says whether the decode leg has ended.
func (l *Legs) Closed() bool { return l.decode == fell || l.decode == over }

// Step takes an event in and appends what is to be done.
func (l *Legs) Step(e LegEvent, dst []LegEffect) []LegEffect {
	switch e.What {
	case CalledBack, NeedsNothing, Miscalled:
		return l.called(e, dst)
	case Overdue:
		return l.fail(e.End, dst)
	case CalledLate:
		if !l.leased {
			l.prefill = gone
			return dst
		}
		l.blocks, l.prefill = waiting, due
		return append(dst, LegEffect{Do: Drain})
	case Uncallable:
		l.prefill = gone
		return l.settle(Free, dst)
	case ProbeDue:
		if l.dialect.Aborts && (l.Closed() || l.left) || l.dialect.Keeps && l.Closed() { // the decode leg has ended before anything was sent
			l.prefill = gone
			return l.settle(Free, dst)
		}
		l.prefill = running
		return append(dst, LegEffect{Do: Send})
	case PrefillFell:
		dst = l.settle(e.End.Verdict().KV, dst)
		if e.Again && l.dialect.Retries && e.End.Untaken() {
			l.prefill = seeking
			return append(dst, LegEffect{Do: Seek})
		}
		l.prefill = gone
		return l.fail(e.End, dst)
	case Found:
		l.leased = true
	case NotFound:
		l.prefill = gone
		return l.fail(e.End, dst)
	case PrefillDone:
		return l.done(e, dst)
	case Began:
		return l.began(e, dst)
	case Confirmed:
		l.counted = max(l.counted, e.Prompt)
		if dst = l.compare(dst); !l.failed && l.prefill == answered {
			dst = l.settle(Free, dst)
		}
	case Quiet:
		if l.decode == opens {
			return l.fail(e.End, dst)
		}
	case DecodeFell:
		return l.fell(e.Reason, dst)
	case DecodeOver:
		if !l.Closed() {
			l.decode = over
			if l.blocks != unknown { // else the decode engine may still say that it needed nothing
				dst = append(dst, LegEffect{Do: Forget})
			}
		}
	case ClientGone:
		return l.gone(e, dst)
	case ClientWaited:
		return l.fail(e.End, dst)
	case Unwanted:
		was := l.prefill
		if (was == running || was == aborting) && !l.failed {
			l.failed, l.why = true, e.End
		}
		if was == running {
			return l.abort(dst)
		}
	}
	return dst
}

// abort ends the prefill leg with a connector whose engines are told to.
func (l *Legs) abort(dst []LegEffect) []LegEffect {
	if l.prefill == running {
		l.prefill = aborting
	}
	return append(dst, LegEffect{Do: AbortPrefill}, LegEffect{Do: HangUp})
}

// settle gives the lease back, once.
func (l *Legs) settle(how How, dst []LegEffect) []LegEffect {
	if !l.leased {
		return dst
	}
	l.leased = false
	return append(dst, LegEffect{Do: GiveBack, How: how})
}

// fail ends the decode leg, once. It does nothing if that leg has ended by itself, or if its answer has begun and the connector
// is one where this means that the KV is complete. Where it does not mean that, an answer that has ended is then not believed.
func (l *Legs) fail(why Ended, dst []LegEffect) []LegEffect {
	switch {
	case l.failed, l.decode == fell, l.Begun() && !l.dialect.Aborts:
		return dst
	}
	if l.failed, l.why = true, why; l.decode == over {
		return dst
	}
	if l.dialect.Aborts {
		dst = append(dst, LegEffect{Do: AbortDecode})
	}
	return append(dst, LegEffect{Do: EndDecode})
}

// called takes in what the decode engine says of the place for the KV, in time.
func (l *Legs) called(e LegEvent, dst []LegEffect) []LegEffect {
	if l.blocks = waiting; e.What == NeedsNothing {
		l.blocks = needless
	}
	if l.Closed() { // at the same moment
		dst = append(dst, LegEffect{Do: Forget})
	}
	switch {
	case e.What == Miscalled:
		l.prefill = gone
		return l.settle(Free, l.fail(e.End, dst))
	case !l.leased: // the answer has begun without it
		l.prefill = gone
	case e.What == NeedsNothing:
		l.prefill = answered
		return l.await(l.settle(Free, dst))
	default:
		l.prefill = due
	}
	return dst
}

func (l *Legs) await(dst []LegEffect) []LegEffect {
	if l.decode == opens {
		return append(dst, LegEffect{Do: AwaitFirst})
	}
	return dst
}

// done takes in the prefill engine's answer.
func (l *Legs) done(e LegEvent, dst []LegEffect) []LegEffect {
	l.prefill, l.prompt = answered, e.Prompt
	switch {
	case !l.dialect.Keeps && !l.dialect.Aborts, l.Begun(), l.dialect.Aborts && l.Closed(): // the KV has been written, or is where it belongs
		dst = l.settle(Free, dst)
	case l.Closed(): // nobody fetches it
		dst = l.settle(Orphan, dst)
	}
	return l.await(l.compare(dst))
}

// began takes in the first event of the answer.
func (l *Legs) began(e LegEvent, dst []LegEffect) []LegEffect {
	if l.prefill == answered && e.Late {
		dst = l.fail(e.End, dst)
	}
	l.decode, l.counted = begun, e.Prompt
	if l.dialect.CallsBack && l.blocks == unknown { // it needed nothing, and has not said so
		dst = l.settle(Free, dst)
	}
	return append(dst, LegEffect{Do: StopWaiting})
}

// compare ends a decode leg that has more of the prompt than was prefilled.
func (l *Legs) compare(dst []LegEffect) []LegEffect {
	if l.dialect.Aborts && l.Begun() && l.prefill == answered && l.prompt > 0 && l.prompt < l.counted {
		return l.fail(Ended{Far: Through, Why: Incomplete}, dst)
	}
	return dst
}

// fell ends the prefill leg after the decode leg has ended without a first event, where that is of use.
func (l *Legs) fell(how EndReason, dst []LegEffect) []LegEffect {
	if l.decode == begun { // and its first event is not believed
		l.decode = over
	} else {
		l.decode = fell
	}
	dst = append(dst, LegEffect{Do: StopWaiting})
	stranded := false
	if l.failed {
		stranded = l.Stranded() && (l.prefill != answered || l.why.Why == Unbegun)
	} else {
		dst, stranded = l.part(how, dst)
	}
	if stranded {
		dst = append(dst, LegEffect{Do: Strand})
	}
	if l.dialect.CallsBack && l.blocks != unknown {
		dst = append(dst, LegEffect{Do: Forget})
	}
	if how != Declined && !l.left {
		dst = append(dst, LegEffect{Do: CountLoss})
	}
	if l.prefill == answered {
		dst = l.settle(Orphan, dst)
	}
	return dst
}

// part ends the prefill leg after the decode leg has ended by itself, and says whether blocks may be stranded on the decode engine.
func (l *Legs) part(how EndReason, dst []LegEffect) (_ []LegEffect, stranded bool) {
	d, sent := &l.dialect, l.prefill == running || l.prefill == seeking || l.prefill == answered && l.blocks != needless
	switch {
	case d.Aborts:
		return l.abort(dst), false
	case d.CallsBack && sent && !l.left: // it would write to nobody
		return append(dst, LegEffect{Do: HangUp}), how == Died && l.prefill != answered
	case d.CallsBack && l.blocks == unknown && how != Died:
		return append(dst, LegEffect{Do: Forget}), false
	case d.Keeps && how != Died:
		return append(dst, LegEffect{Do: HangUp}), false
	case d.Keeps:
		return dst, l.prefill != answered // an engine that died frees them as it restarts
	}
	return dst, false
}

// gone ends what the client has left before the first event.
func (l *Legs) gone(e LegEvent, dst []LegEffect) []LegEffect {
	if l.left || l.decode != opens {
		return dst
	}
	l.left = true
	switch {
	case l.dialect.CallsBack && l.blocks == unknown: // no engine has blocks yet, as far as is known
		dst = l.fail(e.End, dst)
	case l.dialect.Aborts: // the prefill engine first: the decode engine must not give blocks away that are written
		return append(l.abort(dst), LegEffect{Do: WaitGone})
	}
	// Only the first event says that both engines' blocks can be freed; the reader of the decode leg ends it then. If no
	// event comes for too long, because a prefill engine stands still, the blocks are left to the engines.
	if !l.failed {
		dst = append(dst, LegEffect{Do: WaitGone})
	}
	return dst
}

// Package lifecycle decides what happens to a request: how far it has come, what it holds, whether another attempt follows a failed one,
// and whose fault the failure was. It knows no clock, socket or engine: gateway/request reports events to it and carries out the effects
// that it returns. lifecycle.go is the place to start reading.
package lifecycle

// A CallKind is the kind of a call to an engine: it serves the prefill, the decode, or all of a request.
type CallKind uint8

// The kinds of calls. A request has either calls of the kinds Prefill and Decode, or one of the kind Sole.
const (
	Prefill CallKind = iota // computes the prompt and returns the hand-off of its KV
	Decode                  // generates the answer on a decode rank; it is the only call if the rank also prefills the prompt
	Sole                    // serves all of a passed-through request on one engine, without a slot on a decode rank
)

// Progress says how far a call had come when it ended.
type Progress uint8

// A call goes through these stages in this order.
const (
	Unsent  Progress = iota // no byte of the request was written to the engine
	Sent                    // bytes of the request may have reached the engine, but no byte of an answer came
	Headed                  // the first bytes of the engine's answer have come
	Through                 // a prefill engine has returned the hand-off, or a decode engine has read the KV
)

// Reason says why a call ended without its result.
type Reason uint8

// The reasons. The ones before Stale do not count as a failure of the call's engine (see EngineFailed).
const (
	Left         Reason = iota // the client left
	Leaving                    // the proxy shuts down, and ends requests that have no answer yet
	Unready                    // the proxy does not listen for callbacks of decode engines
	Moved                      // the call's engine was taken out of service
	HungUp                     // the proxy ended the call, but neither because the client left nor because of a drain
	NotOurs                    // another proxy owns the engine now, so the request was not sent
	Unowned                    // another proxy owns the whole decode group now
	NoRank                     // the pool had no rank for the request in time, or will have none
	RanksLost                  // the region that has to decode the hand-off has no rank any more
	Outlived                   // the prefill engine has restarted, so the KV is gone
	MayOutlive                 // the prefill engine may have restarted, so the KV may be gone
	Expired                    // the hand-off was too old when a slot came
	MaybeWrongKV               // the decode engine may have read another prompt's KV, because it read too late
	Ignored                    // the engine did not continue the answer so far, but began it anew
	TooLong                    // the engine counted more tokens than its model takes

	// The following reasons blame the engine of the call: its connection, its answer or its silence ended the call.
	Stale       // a kept-alive connection ended before it brought one byte of the answer
	Unreachable // no connection to the engine could be made
	Broke       // the connection broke, or the engine was declared down while it computed a prompt
	Silent      // the engine sent nothing for longer than allowed
	Garbled     // the engine's answer cannot be parsed or used
	TooLarge    // the engine's answer is larger than allowed
	Unnamed     // the engine's bootstrap server does not name the engine id under which the KV is held
	Bare        // the prefill engine's answer has no hand-off
	Empty       // the answer of the prefill engine has no hand-off, because its first token already ends the answer
	Uncalled    // the decode engine did not call back in time to say where the KV goes
	Misplaced   // the decode engine named an address to which KV may not be sent
	Unbegun     // the prompt was prefilled, but the decode engine did not begin its answer
	Stuck       // a rank that also prefills gave no sign of life for many times as long as the prefill was predicted to take
	Unusable    // the answer of the engine cannot be turned into an answer for the client, or is too large
	Unconfirmed // the prefill engine did not confirm in time that the KV is complete
	Incomplete  // the prefill engine broke off while it handed the KV over

	// The following reasons stand for HTTP statuses: of the answer of the engine, or of an event in which the engine reports a failure.
	Lacks     // 404 or 405 of the engine's router: the engine does not have the endpoint
	Rejected  // any other 4xx: the engine refuses the request
	Throttled // 429: too many requests
	Busy      // 503: the engine is overloaded or not ready
	Failed    // 500: the engine or the request is at fault
	Erred     // 502 or 504, or an event that reports a failure without a status
	Unable    // 501: the engine cannot do what the request asks for
	Odd       // any status that has no reason of its own
	Preempted // the engine ran out of KV memory and gave the request back
	Paused    // the engine takes no requests while its group of ranks re-forms, or none for this rank; its core saw nothing
	// Unlisted is the answer of an engine that does not serve the model of the request, although its list of models had it
	// (engine.Unlisted). The engine has looked at nothing else of the request.
	Unlisted

	reasons // number of reasons
)

// ReasonOfStatus returns the reason for the status of an engine's answer. Status 0 stands for an event that reports a failure without a
// status. The reasons differ in what follows (see the tables prefills and decodes): whether the engine is blamed, and whether another
// engine is tried.
func ReasonOfStatus(status int) Reason {
	switch {
	case status == 429:
		return Throttled
	case status/100 == 4:
		return Rejected
	}
	switch status {
	case 500: // the engine or the request is at fault: old engines also answer 500 to a request that they cannot serve
		return Failed
	case 501: // the engine cannot do what the request asks for
		return Unable
	case 503: // the engine is overloaded or not ready
		return Busy
	case 0, 502, 504: // the request is not at fault: the engine, or a proxy in front of it, has failed
		return Erred
	}
	return Odd
}

// Disposition says what becomes of the KV that a prefill engine has, or may have, for a request.
type Disposition uint8

// The dispositions of KV. Refuse and Lose also say that the prefill engine has failed.
const (
	unsaid       Disposition = iota // the table has no entry, because the case cannot happen
	Keep                            // the next decode engine may get the hand-off: no byte that names the KV was written to an engine
	Free                            // the prefill engine has no KV, or has freed it
	Refuse                          // the prefill engine has failed, and has no KV
	Lose                            // the prefill engine has failed, and may hold the KV until its hold timeout
	Orphan                          // no engine will fetch the KV: the prefill engine frees it at its hold timeout
	Discard                         // a decode engine is made to fetch the KV and throw it away
	MaybeRead                       // a decode engine may have read the KV; it is discarded later, unless the request seems to break engines
	MaybeRunning                    // a decode engine may have read the KV, and may still be working on the request
	Spent                           // only of a Sole call, which hands no KV over: the engine may have computed tokens of the request
)

// NextStep says what a request does after a call that ended without its result.
type NextStep uint8

// The next steps. A request has a limit for each kind of failed attempt (see tries.nextAttempt).
const (
	Over      NextStep = iota // no other attempt: no engine would answer otherwise
	Elsewhere                 // no other attempt here, but an engine of another region may answer otherwise
	Again                     // another attempt; the failed one counts against the general limit
	Unreached                 // another attempt; the failed one reached no engine
	Untaken                   // another attempt; in the failed one an engine refused the request
	NoRoom                    // another attempt; in the failed one an engine had no room in its KV memory
	Held                      // another attempt; in the failed one an engine took no requests for a short time (Paused)
	Granted                   // another attempt, which the retry budget has granted already
	NoModel                   // another attempt; in the failed one an engine did not have the model
	Anew                      // another attempt; nothing failed, so none is counted
	Redial                    // another attempt, over new connections; the old one was closed already, so nothing is counted
	Ask                       // the proxy that owns the decode group now is asked to serve the request
	Same                      // the same engine gets the request once more, over a new connection
)

// Blame says against which component a failure is counted.
type Blame uint8

// The components, and Disputed for a failure whose cause is not known yet.
const (
	Nobody   Blame = iota // the request, the client or the proxy is at fault, or the failure is already counted elsewhere
	Engine                // the engine is at fault
	Wedged                // the engine is at fault, and may have stopped working without closing its connections
	Disputed              // the engine or the request is at fault: the next engine's answer shows which
)

// row is a row of the tables prefills and decodes. kv is indexed by Progress.
type row struct {
	kv    [Through + 1]Disposition
	next  NextStep
	blame Blame
}

// prefills says what follows the end of a prefill call without its result, by the reason and the progress of the call. A prefill engine's
// failures are counted when the lease of the prompt is given back, so blame only matters for a 500.
var prefills = [reasons]row{
	// kv:          Unsent  Sent    Headed  Through
	// A prefill engine stops a prefill whose connection ends, and keeps the KV of a prefill that it has answered.
	Left:      {[...]Disposition{Free, Free, Orphan, Discard}, Over, Nobody},
	Leaving:   {[...]Disposition{Free, Free, Orphan, Discard}, Over, Nobody},
	Moved:     {[...]Disposition{Free, Free, Orphan, Discard}, Anew, Nobody},
	HungUp:    {[...]Disposition{Free, Free, Orphan, Discard}, Elsewhere, Nobody},
	Unowned:   {[...]Disposition{Free, unsaid, unsaid, Orphan}, Ask, Nobody}, // an Early attempt fails before its prefill, others after
	NoRank:    {[...]Disposition{Free, unsaid, unsaid, Discard}, Over, Nobody},
	RanksLost: {[...]Disposition{Free, unsaid, unsaid, Orphan}, Anew, Nobody}, // no rank is left that could fetch the KV
	Ignored:   {[...]Disposition{unsaid, unsaid, unsaid, Discard}, Over, Nobody},
	TooLong:   {[...]Disposition{unsaid, unsaid, unsaid, Discard}, Over, Nobody}, // a decode engine would read the KV, then refuse

	Stale:       {[...]Disposition{Free, Orphan, unsaid, unsaid}, Redial, Nobody}, // the engine may still have read the prompt
	Unreachable: {[...]Disposition{Refuse, unsaid, unsaid, unsaid}, Unreached, Nobody},
	Broke:       {[...]Disposition{Refuse, Lose, Lose, unsaid}, Again, Nobody},
	Silent:      {[...]Disposition{Refuse, Lose, Lose, unsaid}, Again, Nobody}, // silence may hide a finished prefill and its KV
	Garbled:     {[...]Disposition{unsaid, Lose, Lose, unsaid}, Again, Nobody}, // the engine may hold KV that the proxy cannot name
	TooLarge:    {[...]Disposition{unsaid, Lose, Lose, unsaid}, Again, Nobody},
	Unnamed:     {[...]Disposition{Refuse, unsaid, unsaid, unsaid}, Again, Nobody},
	Bare:        {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Again, Nobody}, // without a hand-off the engine keeps nothing
	Empty:       {[...]Disposition{unsaid, unsaid, Free, unsaid}, Again, Nobody},
	Unconfirmed: {[...]Disposition{unsaid, Free, Free, Free}, Again, Nobody},
	Incomplete:  {[...]Disposition{unsaid, Free, Free, Free}, Again, Nobody},

	Rejected:  {[...]Disposition{unsaid, unsaid, Free, unsaid}, Over, Nobody},
	Throttled: {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Untaken, Nobody},
	Busy:      {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Untaken, Nobody},
	Failed:    {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Again, Disputed},
	Erred:     {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Again, Nobody},
	Unable:    {[...]Disposition{unsaid, unsaid, Free, unsaid}, Elsewhere, Nobody},
	Odd:       {[...]Disposition{unsaid, unsaid, Refuse, unsaid}, Elsewhere, Nobody},
	Paused:    {[...]Disposition{unsaid, unsaid, Free, unsaid}, Held, Nobody},
	Unlisted:  {[...]Disposition{unsaid, unsaid, Free, unsaid}, NoModel, Nobody},
}

// decodes says what follows the end of a decode call without its result, by the reason and the progress of the call.
var decodes = [reasons]row{
	// kv:          Unsent  Sent     Headed   Through
	Left:         {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Over, Nobody},
	Leaving:      {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Elsewhere, Nobody},
	Moved:        {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Anew, Nobody},
	HungUp:       {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Elsewhere, Nobody},
	NotOurs:      {[...]Disposition{Keep, unsaid, unsaid, unsaid}, Anew, Nobody},
	Unready:      {[...]Disposition{Free, unsaid, unsaid, unsaid}, Over, Nobody},
	Outlived:     {[...]Disposition{Free, unsaid, unsaid, unsaid}, Anew, Nobody},
	MayOutlive:   {[...]Disposition{Orphan, unsaid, unsaid, unsaid}, Anew, Nobody},
	Expired:      {[...]Disposition{Orphan, unsaid, unsaid, unsaid}, Again, Nobody},
	MaybeWrongKV: {[...]Disposition{unsaid, unsaid, unsaid, Free}, Again, Nobody},
	Ignored:      {[...]Disposition{unsaid, unsaid, unsaid, Free}, Over, Nobody},

	Stale:       {[...]Disposition{Keep, MaybeRunning, unsaid, unsaid}, Redial, Nobody}, // the engine may still have read the KV
	Unreachable: {[...]Disposition{Keep, unsaid, unsaid, unsaid}, Unreached, Engine},
	Broke:       {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Again, Engine}, // the KV may have been read before that
	Silent:      {[...]Disposition{Keep, MaybeRunning, MaybeRunning, Free}, Again, Wedged},
	Garbled:     {[...]Disposition{unsaid, MaybeRunning, MaybeRunning, Free}, Again, Engine},
	TooLarge:    {[...]Disposition{unsaid, MaybeRunning, MaybeRunning, Free}, Over, Nobody},
	Uncalled:    {[...]Disposition{unsaid, Free, unsaid, unsaid}, Again, Engine}, // no KV: the prefill begins after the callback
	Misplaced:   {[...]Disposition{unsaid, Free, unsaid, unsaid}, Over, Nobody},
	Unbegun:     {[...]Disposition{unsaid, Orphan, Orphan, unsaid}, Again, Engine},
	Stuck:       {[...]Disposition{unsaid, MaybeRunning, MaybeRunning, unsaid}, Granted, Wedged},
	Unusable:    {[...]Disposition{unsaid, unsaid, MaybeRunning, Free}, Over, Engine},

	// An error status does not prove that the KV is unread: it may come from a proxy in front of the engine, or after the KV was read.
	Rejected:  {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Over, Nobody},
	Throttled: {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Again, Nobody},
	Busy:      {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Again, Engine},
	Failed:    {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Again, Disputed},
	Erred:     {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Again, Engine},
	Unable:    {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Elsewhere, Nobody},
	Odd:       {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Elsewhere, Engine},
	Preempted: {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, NoRoom, Nobody},
	Paused:    {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, Held, Nobody}, // no second engine may get a hand-off that was sent
	Unlisted:  {[...]Disposition{unsaid, unsaid, MaybeRead, Free}, NoModel, Nobody},
}

// CallEnd describes a call that has ended without its result.
type CallEnd struct {
	Call     CallKind
	Progress Progress
	Reason   Reason
	Kept     bool // the prefill engine keeps the KV until a decode engine fetches it, and its answer names the KV
	Frees    bool // a decode engine that refuses a request also makes the prefill engine free the KV
	Moved    bool // the engine was taken out of service while the call ran
	Open     bool // the engine's answer began with status 200, so the engine may be working on the request or have finished it
}

// Consequences says what follows for a request from the end of one of its calls.
type Consequences struct {
	KV    Disposition
	Next  NextStep
	Blame Blame
}

// Verdict looks up what becomes of the KV, what the request does next, and which component is to blame. The tables prefills and decodes
// have the usual case. The flags of e (Open, Frees, Kept, Moved) change it.
func (e CallEnd) Verdict() Consequences {
	usual := &prefills[e.Reason]
	switch e.Call {
	case Prefill:
	case Decode:
		usual = &decodes[e.Reason]
	case Sole:
		return e.soleVerdict()
	}
	v := Consequences{KV: e.dispositionOfKV(usual.kv[e.Progress]), Next: usual.next, Blame: usual.blame}
	if e.Moved { // an engine that was taken out of service is not to blame
		v.Blame = Nobody
		if v.Next != Over { // another engine may get the request, and the attempt does not count
			v.Next = Anew
		}
	}
	return v
}

// dispositionOfKV is what becomes of the KV of a prefill or decode call. usual is the entry of the table for the reason and the progress of
// the call. Three flags of e may change it. Open: the engine's answer began with status 200. Frees: a decode engine that refuses a request
// makes the prefill engine free the KV. Kept: the prefill engine keeps the KV until a decode engine fetches it.
func (e CallEnd) dispositionOfKV(usual Disposition) Disposition {
	kv := usual
	refusalFreesKV := e.Frees && e.Reason != Paused // the part of a paused engine that would free the KV never saw the request
	switch {
	case usual == MaybeRead && e.Open: // the decode engine may still run the request
		kv = MaybeRunning
	case usual == MaybeRead && refusalFreesKV:
		kv = Free
	// The table has no entry (unsaid), which is a bug. Orphan is safe: no engine is told to fetch KV that may not be there, and an
	// engine that has it frees it at its hold timeout.
	case usual == unsaid && e.Call == Prefill:
		kv = Orphan
	case usual == unsaid: // a bug, too; the decode engine may have the request
		kv = MaybeRunning
	}
	if e.Call == Prefill && !e.Kept {
		return withoutKV(kv)
	}
	return kv
}

// withoutKV translates a disposition for a prefill engine that keeps no KV for a decode engine: there is none to free or to lose.
func withoutKV(kv Disposition) Disposition {
	switch kv {
	case Lose: // the engine has failed all the same
		return Refuse
	case Orphan, Discard:
		return Free
	}
	return kv
}

// MayLoseHandoff says whether the end of a decode call before its first event may be due to its hand-off: the KV did not come, or the
// engine failed over it. A refusal, a drain, and KV that was too old say nothing of this.
func (e CallEnd) MayLoseHandoff() bool {
	switch e.Reason {
	case Broke, Silent, Garbled, Unbegun, Failed, Erred:
		return e.Call == Decode && e.Progress != Unsent && !e.Moved
	}
	return false
}

// EngineFailed says whether the call's engine is the reason that the call ended: by its answer, or because its connection or answer failed.
func (e CallEnd) EngineFailed() bool { return e.Reason >= Stale && !e.Moved }

// soleVerdict is the verdict on a Sole call, in which one engine serves all of a request. KV only says whether the engine may have computed
// the request's tokens (Spent) or not (Free). Blame only says whether the engine is at fault. Next alone decides whether the call counts as
// one of the request's failed tries:
//   - Elsewhere: it counts, and no other engine gets the request, because it may be what made its engine fail. The value has its name
//     from the other kinds of calls, whose requests may then go to another region.
//   - Again: it counts, and another engine gets the request.
//   - Over: no other engine gets the request, because the request is at fault.
//   - Anew, NoModel: another engine gets it, and no failure counts.
//   - Same: the same engine gets it once more, over a new connection.
func (e CallEnd) soleVerdict() Consequences {
	v := Consequences{KV: Spent, Next: Elsewhere, Blame: Engine}
	hasErrorStatus := e.Reason >= Lacks && !e.Open // the reasons from Lacks on stand for statuses; Open: the status was 200
	if e.Progress == Unsent || e.Reason == Stale || hasErrorStatus {
		v.KV = Free
	}
	switch {
	case e.Moved: // the engine was taken out of service, so another one gets the request
		v.Next = Again
	case e.Reason == Stale: // the kept-alive connection most likely ended before the engine saw the request
		v.Next = Same
	case e.Reason == Paused: // the engine takes no requests for a short time, for which it is not to blame
		v.Next, v.Blame = Again, Nobody
	case e.Reason == Unlisted: // the engine works, but does not have the model
		v.Next, v.Blame = NoModel, Nobody
	case e.Progress == Unsent || e.Reason == Throttled || e.Reason == Busy: // the engine did not take the request
		v.Next = Again
	case e.Reason == Lacks: // another engine may have the endpoint, and no failure counts
		v.Next = Anew
	case e.Reason == Rejected: // the request is at fault
		v.Next = Over
	}
	return v
}

// DecodeRefused says whether a decode engine refused the request because it has too many, so that it has read no KV for it.
func (e CallEnd) DecodeRefused() bool {
	return e.Call == Decode && (e.Reason == Busy || e.Reason == Throttled)
}

// MayReplaceEngine says whether the engine of a call did not take the request, so that another engine may replace it.
func (e CallEnd) MayReplaceEngine() bool {
	endedHere := e.Reason == HungUp || e.Reason == Moved // the proxy ended the call, which says nothing of the engine
	refused := e.Reason == Throttled || e.Reason == Busy || e.Reason == Paused || e.Reason == Unlisted
	return e.Progress == Unsent && !endedHere || refused
}

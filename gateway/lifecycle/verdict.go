// Package lifecycle decides what happens to a request: how far it has come, what it holds, whether
// another attempt follows a failed one, and whose fault the failure was. It knows no clock, socket
// or engine: gateway/request reports events to it and carries out the effects that it returns.
// Start reading in lifecycle.go.
package lifecycle

// A CallKind says what a call to an engine serves of a request.
type CallKind uint8

// The kinds of calls.
const (
	Prefill CallKind = iota // returns the hand-off of the prompt's KV
	Decode                  // with its prefill if there is no hand-off
	Sole                    // serves all of a passed-through request
)

// Progress says how far a call had come when it ended.
type Progress uint8

// A call goes through these stages in this order.
const (
	Unsent  Progress = iota // no byte was written to the engine
	Sent                    // bytes may have reached the engine, but no byte of an answer came
	Headed                  // the first bytes of the answer have come
	Through                 // the hand-off was returned (prefill), or the KV was read (decode)
)

// Reason says why a call ended without its result.
type Reason uint8

// The ones before Stale do not count as a failure of the call's engine (see EngineFailed).
const (
	Left         Reason = iota // the client left
	Leaving                    // the proxy shuts down
	Unready                    // the proxy does not listen for callbacks
	Moved                      // the engine was taken out of service
	HungUp                     // the proxy ended the call for another reason
	NotOurs                    // another proxy owns the engine now
	Unowned                    // another proxy owns the decode group now
	NoRank                     // the pool had no rank in time, or will have none
	RanksLost                  // the region that has to decode the hand-off has no rank
	Outlived                   // the prefill engine has restarted, so the KV is gone
	MayOutlive                 // the prefill engine may have restarted
	Expired                    // the hand-off was too old when a slot came
	MaybeWrongKV               // read so late that it may be another prompt's
	Ignored                    // the answer began anew instead of going on
	TooLong                    // the engine counted more tokens than its model takes

	// The engine's connection, answer or silence ended the call.
	Stale // a kept-alive connection ended before a byte of the answer
	Unreachable
	Broke // or the engine was declared down while it computed a prompt
	Silent
	Garbled // the answer cannot be parsed or used
	TooLarge
	Unnamed     // the bootstrap server does not name the engine id of the KV
	Bare        // the answer has no hand-off
	Empty       // nor has this one, because its first token ends it
	Uncalled    // the decode engine did not call back in time
	Misplaced   // the decode engine named an address to which KV may not be sent
	Unbegun     // the prompt was prefilled, but the decode engine did not begin
	Stuck       // a rank that also prefills gave no sign of life many times as long as predicted
	Unusable    // the answer cannot be turned into one for the client, or is too large
	Unconfirmed // the prefill engine did not confirm the KV in time
	Incomplete  // the prefill engine broke off the hand-over

	// HTTP statuses of the answer, or of an event in which the engine reports a failure.
	Lacks     // 404 or 405 of the router: no such endpoint
	Rejected  // any other 4xx
	Throttled // 429
	Busy      // 503
	Failed    // 500
	Erred     // 502, 504, or an event that reports a failure without a status
	Unable    // 501
	Odd       // any other status
	Preempted // given back for lack of KV memory
	Paused    // the group of ranks re-forms, or this rank takes nothing; the core saw nothing
	// Unlisted: the engine's list of models had the model, but it does not serve it (engine.Unlisted),
	// and has looked at nothing else of the request.
	Unlisted

	reasons
)

// ReasonOfStatus returns the reason for the status of an engine's answer. Status 0 stands for an
// event that reports a failure without a status.
func ReasonOfStatus(status int) Reason {
	switch {
	case status == 429:
		return Throttled
	case status/100 == 4:
		return Rejected
	}
	switch status {
	case 500: // old engines also answer 500 to a request that they cannot serve
		return Failed
	case 501:
		return Unable
	case 503:
		return Busy
	case 0, 502, 504: // the engine, or a proxy in front of it, has failed
		return Erred
	}
	return Odd
}

// Disposition says what becomes of the KV that a prefill engine has, or may have, for a request.
type Disposition uint8

// The dispositions of KV. Refuse and Lose also say that the prefill engine has failed.
const (
	unsaid       Disposition = iota // the case cannot happen
	Keep                            // for the next decode engine: no byte that names the KV was sent
	Free                            // there is no KV, or it is freed
	Refuse                          // the engine has failed, and has no KV
	Lose                            // the engine has failed, and may hold the KV for its hold timeout
	Orphan                          // left to the hold timeout
	Discard                         // a decode engine fetches the KV and throws it away
	MaybeRead                       // perhaps read; discarded later, unless the request seems to break engines
	MaybeRunning                    // perhaps read, and the decode engine may still run the request
	Spent                           // of a Sole call: the engine may have computed tokens
)

// NextStep says what a request does after a call that ended without its result.
type NextStep uint8

// A request has a limit for each kind of failed attempt (see tries.nextAttempt).
const (
	Over      NextStep = iota // no engine would answer otherwise
	Elsewhere                 // not here, but another region may answer otherwise
	Again                     // another attempt, against the general limit
	Unreached                 // another; no engine had the request
	Untaken                   // another; an engine refused the request
	NoRoom                    // another; no room for KV
	Held                      // another; an engine was Paused
	Granted                   // another; the retry budget has granted it already
	NoModel                   // another; an engine did not have the model
	Anew                      // another; nothing failed, so none counts
	Redial                    // another over new connections, not counted
	Ask                       // ask the new owner of the decode group
	Same                      // the same engine, over a new connection
)

// Blame says against which component a failure is counted.
type Blame uint8

// The components.
const (
	Nobody Blame = iota // the request, the client or the proxy, or it is already counted
	Engine
	Wedged   // the engine, which may have stopped working without closing its connections
	Disputed // the engine or the request: the next engine's answer shows which
)

// kv is indexed by Progress.
type row struct {
	kv    [Through + 1]Disposition
	next  NextStep
	blame Blame
}

// prefills says what follows the end of a prefill call, by its reason and progress. A prefill
// engine's failures are counted when the lease of the prompt is given back, so blame only matters
// for a 500.
var prefills = [reasons]row{
	// kv:          Unsent  Sent    Headed  Through
	// A prefill engine stops a prefill whose connection ends, but keeps KV that it has answered for.
	// RanksLost: no rank is left that could fetch the KV, so it is not discarded.
	Left:      {[...]Disposition{Free, Free, Orphan, Discard}, Over, Nobody},
	Leaving:   {[...]Disposition{Free, Free, Orphan, Discard}, Over, Nobody},
	Moved:     {[...]Disposition{Free, Free, Orphan, Discard}, Anew, Nobody},
	HungUp:    {[...]Disposition{Free, Free, Orphan, Discard}, Elsewhere, Nobody},
	Unowned:   {[...]Disposition{Free, unsaid, unsaid, Orphan}, Ask, Nobody}, // Unsent: no prefill yet
	NoRank:    {[...]Disposition{Free, unsaid, unsaid, Discard}, Over, Nobody},
	RanksLost: {[...]Disposition{Free, unsaid, unsaid, Orphan}, Anew, Nobody},
	Ignored:   {[...]Disposition{unsaid, unsaid, unsaid, Discard}, Over, Nobody},
	TooLong:   {[...]Disposition{unsaid, unsaid, unsaid, Discard}, Over, Nobody}, // a decode engine would read the KV, then refuse

	// Stale, Sent: the engine may still have read the prompt.
	Stale:       {[...]Disposition{Free, Orphan, unsaid, unsaid}, Redial, Nobody},
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

// decodes says what follows the end of a decode call.
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

	// An error status does not prove that the KV is unread: it may come from a proxy in front of the
	// engine, or after the KV was read.
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
	Kept     bool // the prefill engine keeps the KV until it is fetched, and its answer names the KV
	Frees    bool // a decode engine that refuses also makes the prefill engine free the KV
	Moved    bool // the engine was taken out of service while the call ran
	Open     bool // status 200 came: the engine may still run the request, or have finished it
}

// Consequences says what follows from the end of a call.
type Consequences struct {
	KV    Disposition
	Next  NextStep
	Blame Blame
}

// Verdict is the usual case of the tables, changed by the flags of e.
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
	if e.Moved {
		v.Blame = Nobody
		if v.Next != Over { // not counted
			v.Next = Anew
		}
	}
	return v
}

func (e CallEnd) dispositionOfKV(usual Disposition) Disposition {
	kv := usual
	refusalFreesKV := e.Frees && e.Reason != Paused // a paused engine's part that frees KV never saw it
	switch {
	case usual == MaybeRead && e.Open: // the decode engine may still run the request
		kv = MaybeRunning
	case usual == MaybeRead && refusalFreesKV:
		kv = Free
	// A bug. Orphan is safe: no engine is told to fetch KV that may not be there, and an engine that
	// has it frees it at its hold timeout.
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

// withoutKV: the prefill engine keeps no KV for a decode engine.
func withoutKV(kv Disposition) Disposition {
	switch kv {
	case Lose:
		return Refuse
	case Orphan, Discard:
		return Free
	}
	return kv
}

// MayLoseHandoff says whether the hand-off may be why a decode call ended before its first event:
// its KV did not come, or the engine failed over it. A refusal, a drain, and KV that was too old
// say nothing of this.
func (e CallEnd) MayLoseHandoff() bool {
	switch e.Reason {
	case Broke, Silent, Garbled, Unbegun, Failed, Erred:
		return e.Call == Decode && e.Progress != Unsent && !e.Moved
	}
	return false
}

// EngineFailed says whether the engine is why the call ended.
func (e CallEnd) EngineFailed() bool { return e.Reason >= Stale && !e.Moved }

// soleVerdict: Next alone decides whether the call counts as a failed try of the request:
//   - Elsewhere: it counts, and no other engine gets the request, not even of another region: the
//     request may be what made its engine fail.
//   - Again: it counts, and another engine gets the request.
//   - Anew, NoModel: no failure counts, and another engine gets the request.
func (e CallEnd) soleVerdict() Consequences {
	v := Consequences{KV: Spent, Next: Elsewhere, Blame: Engine}
	hasErrorStatus := e.Reason >= Lacks && !e.Open // from Lacks on: statuses; Open: the status was 200
	if e.Progress == Unsent || e.Reason == Stale || hasErrorStatus {
		v.KV = Free
	}
	switch {
	case e.Moved:
		v.Next = Again
	case e.Reason == Stale: // most likely before the engine saw the request
		v.Next = Same
	case e.Reason == Paused: // no requests for a short time, for which the engine is not to blame
		v.Next, v.Blame = Again, Nobody
	case e.Reason == Unlisted:
		v.Next, v.Blame = NoModel, Nobody
	case e.Progress == Unsent || e.Reason == Throttled || e.Reason == Busy:
		v.Next = Again
	case e.Reason == Lacks: // another engine may have the endpoint
		v.Next = Anew
	case e.Reason == Rejected:
		v.Next = Over
	}
	return v
}

// DecodeRefused says whether a decode engine has too many requests, so that it has read no KV.
func (e CallEnd) DecodeRefused() bool {
	return e.Call == Decode && (e.Reason == Busy || e.Reason == Throttled)
}

// MayReplaceEngine says whether the engine did not take the request, so that another may.
func (e CallEnd) MayReplaceEngine() bool {
	endedHere := e.Reason == HungUp || e.Reason == Moved // by the proxy
	refused := e.Reason == Throttled || e.Reason == Busy || e.Reason == Paused || e.Reason == Unlisted
	return e.Progress == Unsent && !endedHere || refused
}

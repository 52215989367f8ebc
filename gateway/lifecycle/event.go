package lifecycle

import "time"

// An Event is something that happened to a request. Lifecycle.Step takes it. Many fields are set only in the kinds of events that their
// comments name.
type Event struct {
	Kind            EventKind
	End             CallEnd // in CallFailed, how the call ended; in an event of a pair, the failure that makes one call end the other
	Bind            Bind    // order of prefill and decode; set in Turn, and in Begun only as Passthrough
	Open            bool    // only in NoTurn: no prefill engine was available here, but another region may have one
	ReusesRequestID bool    // only in HandedOver: the decode request must carry the request id of the prefill call
	Copied          bool    // set in LocalBound, Bound and First: the body is kept in memory, so that a lost answer can go on
	NoEarlyEvents   bool    // set in LocalBound and Bound: perhaps no event comes before the end of the answer
	ClientLeft      bool    // the client had left when the event was reported

	// The fields of this group are set only in CallFailed: a call to an engine has ended without its result.
	Quit       bool       // the call ended because the client left, and no engine uses the slot any more
	Engine     string     // name of the call's engine: its role and its address
	Faulty     bool       // the engine itself says that it failed: status 500, or any 5xx within an answer
	BrokenConn BrokenConn // the connection to the engine that broke and so ended the call; zero: none broke
	Down       []string   // engines whose connections broke earlier under this request, and that are down since
	MostLosses int        // limit of Losses: lost answers that go on, and requests that an engine without KV room gives back

	// The fields of this group belong to a pair: the prefill call and the decode call that run at the same time, because the attempt
	// has bound its decode rank before the prefill.
	Traits         ConnectorTraits // set in Turn: how the connector of the engines works
	Idle           bool            // only in Panicked: neither call of the last pair had begun
	MayIgnoreAbort bool            // only in Bound: the engines may ignore an abort, and notice a closed connection late
	Pair           int             // number of the request's pair, from 1; set in CalledBack and in all kinds of events declared after it
	Prompt         int             // prompt tokens as the engine counted them; 0: the engine reported no count
	Again          bool            // only in PrefillFailed: one more prefill engine may be tried
	Reason         DecodeFailure   // only in DecodeFailed: why the decode call ended
}

// EventKind says what has happened to a request. Each event makes the lifecycle change its state and return effects.
type EventKind uint8

// The kinds of events. The kinds from CalledBack onwards concern one pair of concurrent calls, and the others the whole request.
const (
	Begun          EventKind = iota // the request begins to be served, or its lost answer is to go on
	LocalBound                      // a decode rank that also prefills the prompt has given the request a slot
	NoLocal                         // no decode rank can prefill the prompt itself
	Turn                            // the arrival queue has given the request a prefill engine, or a group of ranks that prefill and decode
	NoTurn                          // the request left the arrival queue without a prefill engine
	Directed                        // another dispatcher should serve the request, so this one forwards it
	PeerAnswers                     // the dispatcher that got the forwarded request answers it
	PeerRefuses                     // the dispatcher that got the forwarded request refuses it, or the request cannot be sent on again
	RegionReturns                   // a proxy of another region gave the request back before the client had any of the answer
	SiblingReturns                  // a proxy of this region gave the request back before the client had any of the answer
	HandedOver                      // the prefill engine has computed the KV and returned a hand-off for it
	Bound                           // a decode rank has given the request a slot
	First                           // the first event of the answer came from the engine
	Ends                            // the last event of the answer came: the answer is whole
	Believed                        // the prefill engine confirmed that the KV of the answer was complete
	CallFailed                      // a call to an engine ended without its result
	Retried                         // the pause before another attempt is over
	GivenUp                         // no other attempt is made, or a lost answer cannot go on
	Offered                         // after the attempts here, another dispatcher may serve the request
	NotOffered                      // after the attempts here, no other dispatcher may serve the request
	Panicked                        // the code that carries out effects panicked

	// Events of a request that one engine serves alone (Passthrough). Such a request also has the event First when its whole answer or
	// the first event of it has come, and CallFailed when its call ended without an answer.
	Chosen   // an engine was chosen for the passed-through request
	NoneLeft // every engine that may serve the passed-through request was tried
	NoRoute  // no engine that serves the model has the request's endpoint

	// Events of a pair: the prefill call and the decode call of one attempt, which run at the same time. Any goroutine may report these
	// events, at any time.
	CalledBack    // the callback of the decode engine says to which address the KV goes
	NeedsNothing  // the callback of the decode engine says that it has the KV of the whole prompt already
	Miscalled     // the callback of the decode engine has no valid address for the KV
	Overdue       // the callback of the decode engine did not come in time
	CalledLate    // the callback of the decode engine came, but the request had ended already
	Uncallable    // the request had ended, and no callback with a valid address came after that either
	ProbeDue      // the prefill call is about to be sent
	PrefillFailed // the prefill call ended without an answer
	Found         // another prefill engine replaces one that did not take the request
	NotFound      // no other prefill engine was found to replace one that did not take the request
	PrefillDone   // the prefill engine has answered without an error
	Began         // the first event of the answer came from the decode engine
	Confirmed     // the proxy's wait for the prefill engine's answer, after the first or the last event of the answer, is over
	Quiet         // the time limit for the first event has passed
	DecodeFailed  // the decode call ended without a first event
	DecodeOver    // the decode call ended after its first event
	ClientGone    // the client left
	ClientWaited  // the grace period after the client left is over, so the decode call may be ended
	NotSent       // neither call of the pair was sent
	Unwanted      // the answer ended or was given up, and the proxy stops waiting for the prefill engine to confirm the KV
)

// Bind says in which order an attempt prefills the prompt and binds the request to a decode rank. Passthrough is the exception: the request
// has neither step.
type Bind uint8

// The orders. The connector of the engines decides which one an attempt takes (bindOrder in gateway/request).
const (
	Late        Bind = iota // the prompt is prefilled, then its decode rank is bound
	Early                   // the decode rank is bound before the prefill, and both calls are under way at once
	Aggregated              // one rank of an aggregated engine prefills and decodes, so no KV is handed over
	Passthrough             // one engine gets the request unchanged and serves all of it
)

// EffectKind says what the code that serves the request has to do.
type EffectKind uint8

// The kinds of effects. After an effect from TryLocal on, the request waits, and its next event says how that effect ended. These effects
// have the order of the states, because stateDuring computes the state from the number of the effect.
const (
	Question EffectKind = iota // while the request is in the arrival queue, evenkeel asks whether another dispatcher should serve it
	Attempt                    // a new attempt to serve the request begins, and is counted
	Settle                     // something that the request holds (a Resource) is given back or passed on
	Restart                    // the next attempts may use all prefill engines again, also those that failed
	Drop                       // the request will not be sent to the dispatcher that was chosen for it
	Avoid                      // the next attempts avoid the decode rank of this attempt
	// ReportFailure counts a failure against the engine of a call. A prefill engine's failures are counted when its lease is given
	// back, so for a prefill engine ReportFailure only notes a 500 until its cause is known.
	ReportFailure
	ReportSuccess // the decode engine served the request
	Resolve       // the cause of earlier 500s of engines is known, or will stay unknown, so their engines are blamed or cleared
	Remember      // the engine does not have the endpoint, so for a while it gets no requests for this endpoint
	Recall        // the error that the client may get becomes that of the failure before the last one
	Complain      // a log line reports the engine that did not answer
	EndDecode     // the proxy closes the decode call
	AbortDecode   // the decode engine is told to abort the request
	AbortPrefill  // the prefill engine is told to abort the request until its call ends; after Until, the proxy closes the call
	HangUp        // the proxy closes the prefill call, if one is under way
	SendBeside    // the prefill call is sent while the decode call is under way
	Seek          // another prefill engine is looked for
	AwaitFirst    // the time limit for the first event of the answer begins
	AwaitPrefill  // the goroutine that reported the event waits for the end of the prefill call before it goes on
	StopWaiting   // the time limit for the first event of the answer is lifted
	Forget        // the proxy stops listening for the callback of the decode engine
	DrainBeside   // a prefill runs only because its end frees blocks of the decode engine
	CountLoss     // metrics count a decode call that was lost before its first event
	LeakBlocks    // the decode engine may keep KV blocks of the request for ever
	WaitGone      // after the limit in Until, the event ClientWaited is reported
	TryLocal      // begins TryingLocal: the dispatcher looks for a decode rank that also prefills the prompt
	Queue         // begins Queued: the request waits in the arrival queue for a prefill engine
	Forward       // begins Forwarded: the request is sent to another dispatcher
	SendProbe     // begins Prefilling: the prefill engine gets the prompt
	Enqueue       // begins Pooled: the request waits in the pool for a slot on a decode rank
	SendDecode    // begins Transferring: the decode engine gets the request
	SendBoth      // begins Coupled: the decode call and the prefill call begin, and run at the same time
	Pause         // begins Pausing: the request waits before another attempt
	Offer         // begins Offering: evenkeel asks whether another dispatcher should serve the request
	AnswerIt      // begins Streaming: the client gets the answer
	Confirm       // begins Confirming: the end of the answer waits until the prefill engine confirms the KV
	GoOn          // begins Lost: another attempt continues the lost answer
	Choose        // begins Choosing: an engine is chosen for a request that is passed through
	SendOver      // begins Calling: the chosen engine gets the request
	SendAnew      // begins Redialing: the chosen engine gets the request once more, over a new connection
	Fail          // the client gets an error
	EndWhole      // the client gets the end of its complete answer
	BreakOff      // the answer that the client has begun to get ends with an error
)

// An Effect is something that the code which serves the request has to do.
type Effect struct {
	Kind        EffectKind
	Resource    Resource    // only in Settle: what is given back or passed on
	Disposition Disposition // only in Settle: what happens to the resource
	Blame       Blame       // in ReportFailure the component at fault; in Resolve the cause: Engine, Nobody (the request), Disputed (unknown)
	Call        CallKind    // only in ReportFailure: which call failed, and with it which engine
	Retry       Retry       // only in Pause: how the next attempt begins
	Bind        Bind        // only in Enqueue: the order of prefill and binding in this attempt
	Permit      bool        // only in Enqueue: the request has no reserved place in the pool, so the pool must reserve one
	Group       bool        // only in Offer; true: another proxy owns the decode group now; false: every attempt here failed
	Error       Error       // only in Fail: which error the client gets
	Until       Timeout     // the time limit of the wait that the effect begins
	Pair        int         // number of the pair that the effect belongs to, from 1; 0: none
}

// A Timeout names the time limit of a wait for an engine. The other waits have none: the arrival queue, the pool, other dispatchers and the
// connection of the client limit them by themselves.
type Timeout uint8

// The time limits. timeoutOf in gateway/request makes a duration of each.
const (
	NoTimeout    Timeout = iota // the wait needs no limit, because another component ends it
	ByProbe                     // the wait while an engine prefills a prompt
	ByFirstEvent                // the wait for the first event from an engine that has the prompt
	ByWhole                     // the wait for an answer in one piece: as long as ByProbe, and then while its rank shows signs of life
	ByCallback                  // the wait for the callback in which a decode engine says where the KV goes
	ByGrace                     // the wait for the outcome of a call whose result is not needed any more
	ByConfirm                   // how long a first event is held back until the prefill engine has answered
	timeouts
)

// timeoutKeys holds, as text for the docs, the config key that sets each timeout, or the value of a timeout that no key sets.
var timeoutKeys = [timeouts]string{
	ByProbe: "`limits.probe_timeout`", ByFirstEvent: "`first_event_timeout`",
	ByWhole: "`limits.probe_timeout`, then as long as its rank gives signs of life within `limits.event_timeout`; in all 1 s more for " +
		"each token that it may have",
	ByCallback: "`bind.callback_timeout`", ByGrace: "5 s", ByConfirm: "100 ms",
}

func (l Timeout) String() string { return timeoutKeys[l] }

// Error says which error the client gets. Package request has the messages.
type Error uint8

// The errors. OfClient replaces all others if the client has left.
const (
	OfAttempt Error = iota // the error of the last attempt, or of the wait in the arrival queue
	OfClient               // the client has left; this error only goes to the record of the request
	// OfRanks: no engine may serve the request. Either only a decode rank that also prefills may do so (NoHandOff), and no rank
	// prefills this prompt; or the request is to be passed through, and no engine was found for it.
	OfRanks
	OfOwner // another dispatcher should serve the request, but the request cannot be sent there
	OfPeer  // the error with which the other dispatcher refused the forwarded request
)

// A Resource is something that a request may hold and must give back or pass on exactly once.
type Resource uint8

// The resources. For each one that a request holds, one effect Settle says what becomes of it.
const (
	Permit      Resource = iota // a reserved place in the pool; once the request has an entry there, the entry owns it
	Lease                       // a prompt counted as load of a prefill engine until it hands the KV over, or of ranks that also prefill
	KV                          // a hand-off that may be sent to a decode engine
	MaybeReadKV                 // a hand-off that an engine may have read, so that no other decode engine may get it
	Slot                        // a slot on a decode rank
	LeaseOwner                  // the name under which the audit for leases that are never given back knows the request
	Copy                        // the body of the request in memory, which is counted and kept so that a lost answer can go on
	Seat                        // permission to run as one of a limited number of passed-through requests
	Body                        // the body of a passed-through request; the code that writes an error to the client gives it back
	// Call is a call to an engine. It counts the tokens to compute against the engine, and a drain may end it. A call to a decode rank
	// is given back with the same disposition as its slot, the call of a passed-through request with Free or Spent.
	Call
	Memory // memory set aside for an answer in one piece, until the answer is written
	resources
)

// The following dispositions also say how a resource is given back. The tables of verdict.go do not use them.
const (
	Back Disposition = Spent + 1 + iota // the resource is given back
	// Pass gives the resource a new owner, which gives it back later: a place goes to the pool's entry, memory to the answer, and a
	// lease to the hand-off, or to the Pair of an attempt whose two calls run at the same time.
	Pass
	Failing   // the slot is given back because its engine did not begin the answer, or broke it off
	Cancelled // the slot is given back because the client left, or because the request was never sent to the engine
	Finish    // the slot is given back after a whole answer
)

// A BrokenConn is a broken connection that looks as if the engine died while it had the request.
type BrokenConn struct {
	Engine string // role and address of the engine, separated by a space; empty: no connection broke
	At     time.Time
}

// Budget names the retry budget that decides whether a request gets another attempt.
type Budget uint8

// The budgets, and NoMore for a request that gets no other attempt.
const (
	NoMore   Budget = iota // there is no other attempt
	Freely                 // the attempt uses no budget
	OfUnsent               // the budget of attempts that reached no engine
	Counted                // the budget of attempts that reached an engine
)

// A Retry says whether and how another attempt begins.
type Retry struct {
	Budget  Budget
	N       int  // how many attempts of this kind have been made, for the budget; 0: the budget is not asked
	Pause   int  // the pause is random, up to the base pause doubled this often; 0: the budget says how long, or there is none
	Despite bool // an empty budget does not end the request if no engine answered the attempt: the client has a part of the answer
}

// ConnectorTraits describes how the connectors that bind a decode rank before the prefill differ.
// Each has one of the two traits.
type ConnectorTraits struct {
	CallsBack bool // the decode engine calls back to say where the KV goes, and the prefill waits for this
	// Aborts: the proxy can tell an engine to abort a request, by the request's id. The engine then reuses the request's blocks at
	// once. If the abort comes while the prefill engine writes the KV, the KV may be incomplete although both calls end without an
	// error.
	Aborts bool
}

// DecodeFailure is why a decode call ends without a first event.
type DecodeFailure uint8

// The reasons. They differ in whether the decode engine may still have the request.
const (
	Refused  DecodeFailure = iota // the decode engine did not take the request
	Declined                      // the decode engine refused the request, because the request itself is wrong
	Died                          // the call failed otherwise, so the engine may still have the request
)

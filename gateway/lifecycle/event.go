package lifecycle

import "time"

// An Event is something that happened to a request.
type Event struct {
	Kind            EventKind
	End             CallEnd // how a call ended, or why one call of a pair ends the other
	Bind            Bind    // in Turn, and in Begun only as Passthrough
	Open            bool    // in NoTurn: another region may have a prefill engine
	ReusesRequestID bool    // in HandedOver: the decode request must carry the id of the prefill call
	Copied          bool    // in LocalBound, Bound, First: the body is kept for a lost answer
	NoEarlyEvents   bool    // in LocalBound, Bound: perhaps no event before the end
	ClientLeft      bool

	// Only in CallFailed.
	Quit       bool       // the client left, and no engine uses the slot any more
	Engine     string     // role and address
	Faulty     bool       // the engine itself reports status 500, or any 5xx within an answer
	BrokenConn BrokenConn // it broke and so ended the call; zero: none
	Down       []string   // engines that broke earlier under this request, and are down
	MostLosses int        // limit of Losses

	// Only for a pair.
	Traits         ConnectorTraits // in Turn
	Idle           bool            // in Panicked: neither call of the last pair had begun
	MayIgnoreAbort bool            // in Bound: the engines may ignore an abort
	Pair           int             // from 1; in CalledBack and all kinds declared after it
	Prompt         int             // tokens as the engine counted them; 0: not reported
	Again          bool            // in PrefillFailed: one more prefill engine may be tried
	Reason         DecodeFailure   // in DecodeFailed
}

// EventKind says what has happened to a request.
type EventKind uint8

// The kinds from CalledBack on concern one pair of concurrent calls, the others the whole request.
const (
	Begun      EventKind = iota // the request begins, or its lost answer goes on
	LocalBound                  // a decode rank that also prefills gave a slot
	NoLocal
	Turn     // a prefill engine, or a group that prefills and decodes, was found
	NoTurn   // the request left the arrival queue with neither
	Directed // another dispatcher should serve the request
	PeerAnswers
	PeerRefuses    // it refuses, or the request cannot be sent on again
	RegionReturns  // a proxy of another region gave the request back, unanswered
	SiblingReturns // a proxy of this region did so
	HandedOver     // the prefill engine returned a hand-off
	Bound          // a decode rank gave a slot
	First          // first event of the answer
	Ends           // the answer is whole
	Believed       // the prefill engine confirmed the KV of the answer
	CallFailed     // a call ended without its result
	Retried
	GivenUp // no other attempt is made, or a lost answer cannot go on
	Offered // another dispatcher may serve the request
	NotOffered
	Panicked // the code that carries out effects panicked

	// Events of Passthrough, which also has First and CallFailed.
	Chosen
	NoneLeft // all were tried
	NoRoute  // no engine of the model has the endpoint

	// Events of a pair. Any goroutine may report them, at any time.
	CalledBack   // the callback says to which address the KV goes
	NeedsNothing // the callback says that the decode engine has all the KV already
	Miscalled    // the callback has no valid address
	Overdue
	CalledLate // the callback came after the request had ended
	Uncallable // no valid callback came, even after the end
	ProbeDue
	PrefillFailed // without an answer
	Found         // another prefill engine replaces one that did not take the request
	NotFound
	PrefillDone  // without an error
	Began        // first event of the answer
	Confirmed    // the wait for the prefill engine's answer is over
	Quiet        // no first event came within its time limit
	DecodeFailed // without a first event for the client
	DecodeOver   // after its first event
	ClientGone
	ClientWaited // the grace period is over
	NotSent      // neither call was sent
	Unwanted     // the answer ended or was given up, so nothing waits for the confirmation
)

// Bind is the order in which an attempt prefills and binds a decode rank. The connector of the
// engines decides it (bindOrder in gateway/request).
type Bind uint8

// The orders.
const (
	Late        Bind = iota // prefill, then bind
	Early                   // bind first; both calls run at once
	Aggregated              // one rank prefills and decodes, so no KV is handed over
	Passthrough             // one engine serves all of the unchanged request
)

// EffectKind says what the code that serves the request has to do.
type EffectKind uint8

// After an effect from TryLocal on, the request waits for an event that says how the effect ended.
// These effects have the order of the states (see stateDuring).
const (
	Question EffectKind = iota // in the arrival queue: should another dispatcher serve the request?
	Attempt
	Settle  // a Resource is given back or passed on
	Restart // the next attempts may use the failed prefill engines again
	Drop    // the request will not be sent to the dispatcher that was chosen
	Avoid   // the decode rank of this attempt
	// ReportFailure: a prefill engine's failures are counted when its lease is given back, so for it
	// the effect only notes a 500 until its cause is known.
	ReportFailure
	ReportSuccess
	Resolve  // blames or clears the engines of earlier 500s
	Remember // the engine lacks the endpoint, and gets no requests for it for a while
	Recall   // the error for the client becomes that of the failure before the last one
	Complain // log the engine that did not answer
	EndDecode
	AbortDecode
	AbortPrefill // repeat the abort until the call ends; after Until, close it
	HangUp       // closes the prefill call
	SendBeside   // the prefill call, while the decode call is under way
	Seek         // another prefill engine
	AwaitFirst   // its time limit begins
	AwaitPrefill // the goroutine that reported the event waits for the end of the prefill call
	StopWaiting  // lifts the limit of AwaitFirst
	Forget       // stops listening for the callback
	DrainBeside  // a prefill runs only because its end frees blocks of the decode engine
	CountLoss    // a decode call was lost before its first event
	LeakBlocks   // the decode engine may keep KV blocks for ever
	WaitGone     // after Until, report ClientWaited
	TryLocal     // begins TryingLocal, and the following begin the states after it
	Queue
	Forward
	SendProbe
	Enqueue
	SendDecode
	SendBoth
	Pause
	Offer
	AnswerIt
	Confirm
	GoOn
	Choose
	SendOver
	SendAnew // to the same engine, over a new connection
	Fail
	EndWhole
	BreakOff // ends the begun answer with an error
)

// An Effect is something that the code which serves the request has to do.
type Effect struct {
	Kind        EffectKind
	Resource    Resource    // in Settle
	Disposition Disposition // in Settle
	Blame       Blame       // at fault; in Resolve the cause: Engine, Nobody (the request) or Disputed
	Call        CallKind    // in ReportFailure
	Retry       Retry       // in Pause
	Bind        Bind        // in Enqueue
	Permit      bool        // in Enqueue: the pool must reserve a place
	Group       bool        // in Offer; true: another proxy owns the group; false: all failed here
	Error       Error       // in Fail
	Until       Timeout
	Pair        int // from 1; 0: none
}

// A Timeout names the time limit of a wait for an engine. The other waits have none: the arrival
// queue, the pool, other dispatchers and the connection of the client limit them by themselves.
type Timeout uint8

// What each limits.
const (
	NoTimeout    Timeout = iota // another component ends the wait
	ByProbe                     // a prefill
	ByFirstEvent                // the first event from an engine that has the prompt
	ByWhole                     // an answer in one piece: ByProbe, then while its rank shows signs of life
	ByCallback                  // the callback in which a decode engine says where the KV goes
	ByGrace                     // the end of a call that is not needed any more
	ByConfirm                   // how long a first event waits for the prefill engine's answer
	timeouts
)

// timeoutKeys is for the docs.
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
	OfAttempt Error = iota // of the last attempt, or of the wait in the arrival queue
	OfClient               // only for the record of the request
	// OfRanks: no decode rank prefills this prompt, and it may not be handed over (NoHandOff); or no
	// engine was found for a passed-through request.
	OfRanks
	OfOwner // another dispatcher should serve the request, but cannot get it
	OfPeer  // as the other dispatcher refused the forwarded request
)

// A Resource is something that a request may hold. One effect Settle gives each back or passes it
// on.
type Resource uint8

// The resources.
const (
	Permit      Resource = iota // a place in the pool, until the entry there owns it
	Lease                       // the prompt as load of its engine or group
	KV                          // a hand-off
	MaybeReadKV                 // a hand-off that no other engine may get
	Slot
	LeaseOwner // for the audit of leases that are never given back
	Copy       // the body, kept so that a lost answer can go on
	Seat       // one of a limited number, if passed through
	Body       // if passed through; the code that writes an error gives it back
	// Call counts the tokens to compute against an engine, and a drain may end it. It is settled like
	// its slot, or with Free or Spent if passed through.
	Call
	Memory // set aside for an answer in one piece, until it is written
	resources
)

// How a resource is given back. The tables of verdict.go do not use these.
const (
	Back Disposition = Spent + 1 + iota
	// Pass gives the resource a new owner: the pool's entry, the answer (memory), the hand-off or the
	// Pair (lease).
	Pass
	Failing   // the engine did not begin the answer, or broke it off
	Cancelled // the client left, or the request was never sent
	Finish    // a whole answer
)

// A BrokenConn looks as if the engine died while it had the request.
type BrokenConn struct {
	Engine string // "role address"; empty: none broke
	At     time.Time
}

// Budget decides whether a request gets another attempt.
type Budget uint8

// The budgets.
const (
	NoMore   Budget = iota // no attempt
	Freely                 // without a budget
	OfUnsent               // of attempts that reached no engine
	Counted                // of attempts that reached an engine
)

// A Retry says whether and how another attempt begins.
type Retry struct {
	Budget  Budget
	N       int  // attempts of this kind so far; 0: the budget is not asked
	Pause   int  // random, up to the base pause doubled this often; 0: as the budget says, or none
	Despite bool // an empty budget is ignored if no engine answered: the client has a part
}

// ConnectorTraits of a connector that binds a decode rank before the prefill: one of the two is
// set.
type ConnectorTraits struct {
	CallsBack bool // the prefill waits for a callback that says where the KV goes
	// Aborts: an engine can be told to abort a request by its id. It reuses the blocks at once: KV
	// that is still written may be incomplete although both calls end without an error.
	Aborts bool
}

// DecodeFailure is why a decode call ends without a first event.
type DecodeFailure uint8

// They differ in whether the decode engine may still have the request.
const (
	Refused  DecodeFailure = iota
	Declined               // the request itself is wrong
	Died                   // the engine may still have the request
)

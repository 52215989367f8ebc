package lifecycle

import "time"

// An Event is what has happened to a request. A field whose comment begins with "of X" is only set in the event X.
type Event struct {
	Kind            EventKind
	End             CallEnd // of CallFailed: how the call ended
	Bind            Bind    // of Turn; of Begun only if the request is passed through
	Open            bool    // of NoTurn: no engine was available here, but another region may have one
	ReusesRequestID bool    // of HandedOver: the decode request must carry the probe's request id
	Copied          bool    // of LocalBound, Bound and First: the proxy keeps bytes of the request in memory, so that a lost answer can go on
	Unstreamed      bool    // of LocalBound and Bound: the answer comes in one piece, so no event before its end shows its progress
	Left            bool    // the client has left

	// The fields of CallFailed.
	Quit       bool       // the call ended because the client left, and no engine uses the slot any more
	Engine     string     // the instance of the call's engine
	Faulty     bool       // the engine itself says that it failed: status 500, or any 5xx within an answer
	BrokenConn BrokenConn // the broken connection to the engine, if the call ended with one
	Down       []string   // engines that have gone down since their connection broke under this request
	MostLosses int        // limit on how often lost answers go on, plus how often engines without KV room give the request back

	// The fields of a pair: the two concurrent calls of an attempt that binds its decode rank before the prefill.
	Traits  ConnectorTraits // of Turn: how the connector of the engines works
	Idle    bool            // of Panicked: neither call of the last pair had begun
	Deaf    bool            // of Bound: the engines may ignore an abort, and notice a closed connection late
	Pair    int             // of CalledBack and every event declared after it: which of the request's pairs is meant, from 1
	Prompt  int             // prompt tokens as the engine counted them; 0: the engine reported no count
	Expired bool            // of Began: the prefill engine may have reused the KV's memory before the first event came
	Again   bool            // of PrefillFailed: one more prefill engine may be tried
	Reason  DecodeFailure   // of DecodeFailed: why the call ended
}

// EventKind says what has happened to a request. Each event makes the lifecycle change its state and return effects.
type EventKind uint8

// What can happen to a request.
const (
	Begun          EventKind = iota // a client sends a request, or a lost answer goes on
	LocalBound                      // a decode rank that also prefills the prompt has given the request a slot
	NoLocal                         // no decode rank prefills the prompt
	Turn                            // the request has its turn at a prefill engine
	NoTurn                          // the request gets no turn at a prefill engine
	Directed                        // another dispatcher should serve the request
	PeerAnswers                     // the other dispatcher answers
	PeerRefuses                     // the other dispatcher refuses, or the request cannot be sent on again
	RegionReturns                   // a proxy of another region gave the request back
	SiblingReturns                  // a proxy of this region gave the request back
	HandedOver                      // the prefill engine has computed the KV and returned a hand-off for it
	Bound                           // a decode rank has given the request a slot
	First                           // the first event of the answer came
	Ends                            // the last event of the answer came: the answer is whole
	Believed                        // the prefill engine confirmed that the KV of the answer was complete
	CallFailed                      // a call to an engine ended without its result
	Retried                         // the pause before another attempt is over
	GivenUp                         // no other attempt is made, or a lost answer cannot go on
	Offered                         // another dispatcher may serve the request
	NotOffered                      // no other dispatcher may serve the request
	Panicked                        // the code that carries out effects panicked

	// Events of a request that is passed through to one engine. Such a request also has the events First (its answer has come, or the first
	// event of it) and CallFailed (its call ended without an answer).
	Chosen   // an engine was chosen
	NoneLeft // every engine that may serve the request was tried
	NoRoute  // no engine has the endpoint

	// Events of a pair: two calls that are under way at once. Any goroutine may report these, at any time.
	CalledBack    // the decode engine says where the KV goes
	NeedsNothing  // the decode engine has the whole prompt already
	Miscalled     // the decode engine called back without a valid address for the KV
	Overdue       // the decode engine did not call back in time
	CalledLate    // the decode engine says where the KV goes, but the request has ended already
	Uncallable    // the request has ended, and no callback with a valid address came
	ProbeDue      // the prefill call is about to be sent
	PrefillFailed // the prefill call ended without an answer
	Found         // another prefill engine replaces one that did not take the request
	NotFound      // no other prefill engine was found
	PrefillDone   // the prefill engine has answered without an error
	Began         // the first event of the answer came
	Confirmed     // the wait for the prefill engine's answer, after the first or the last event, is over
	Quiet         // the time limit for the first event has passed
	DecodeFailed  // the decode call ended without a first event
	DecodeOver    // the decode call ended after its first event
	ClientGone    // the client left
	ClientWaited  // the wait after the client left is over, so the decode call may be ended
	NotSent       // neither call was sent
	Unwanted      // the answer ended or was given up, and the proxy stops waiting for the prefill engine to confirm the KV
)

// Bind is the order of prefill and decode in an attempt, or Passthrough: the request is not split into the two.
type Bind uint8

// The values of Bind.
const (
	Late        Bind = iota // the prompt is prefilled, then its decode rank is bound
	Early                   // the decode rank is bound before the prefill, and both calls are under way at once
	Mixed                   // one rank prefills and decodes, so no KV is handed over
	Passthrough             // the request goes to one engine as it came: see passthrough.go
)

// EffectKind is the kind of an effect.
type EffectKind uint8

// The effects. From TryLocal on, the request waits for the effect, and its next event says how the effect ended. Those effects stand in
// the order of the states, because Step computes the state from the effect.
const (
	Question EffectKind = iota // while the request waits for its turn, evenkeel asks whether another dispatcher should serve it
	Attempt                    // an attempt begins
	Settle                     // something that the request holds (a Resource) is given back or passed on
	Restart                    // the next attempts may use all engines again
	Drop                       // the request will not be sent to the other dispatcher that was chosen
	Avoid                      // the next attempts avoid this decode rank
	// ReportFailure counts a failure against the engine of a call. A prefill engine's failures are counted when its lease is settled, so for a
	// prefill engine ReportFailure only notes a 500 until its cause is known.
	ReportFailure
	ReportSuccess // the decode engine served the request
	Resolve       // the cause of earlier 500s is known, or will stay unknown
	Remember      // the engine does not have the endpoint, and is not asked for it for a while
	Recall        // the client's error becomes that of the failure before the last one
	Complain      // a log line reports the engine that did not answer
	EndDecode     // the decode call is ended
	AbortDecode   // the decode engine is told to abort the request
	AbortPrefill  // the prefill engine is told to abort the request, until its call has ended; the call is ended at the limit in Until
	HangUp        // the prefill call is ended, if there is one
	SendBeside    // the prefill call is sent, beside the decode call
	Seek          // another prefill engine is looked for
	AwaitFirst    // the time limit for the first event begins
	AwaitPrefill  // the goroutine that reported the event waits for the end of the prefill call before it goes on
	StopWaiting   // the time limit for the first event ends
	Forget        // no callback is expected any more
	DrainBeside   // a prefill runs only because its end frees blocks of the decode engine
	CountLoss     // metrics count a decode call that was lost before its first event
	LeakBlocks    // the decode engine may keep blocks for ever
	WaitGone      // after the limit in Until, the event ClientWaited is reported
	TryLocal      // begins TryingLocal: the dispatcher looks for a decode rank that also prefills the prompt
	Queue         // begins Queued: the request waits for its turn at a prefill engine
	Forward       // begins Forwarded: the request is sent to another dispatcher
	SendProbe     // begins Prefilling: the prefill engine gets the prompt
	Enqueue       // begins Pooled: the request waits in the pool for a slot on a decode rank
	SendDecode    // begins Transferring: the decode engine gets the request
	SendBoth      // begins Coupled: the decode call begins, and the prefill call beside it
	Pause         // begins Pausing: the pause before another attempt
	Offer         // begins Offering: evenkeel asks whether another dispatcher should serve the request
	AnswerIt      // begins Streaming: the client gets the answer
	Confirm       // begins Confirming: the end of the answer waits until the prefill engine confirms the KV
	GoOn          // begins Lost: another attempt continues the lost answer
	Choose        // begins Choosing: an engine is chosen for a request that is passed through
	SendOver      // begins Calling: the chosen engine gets the request
	SendAnew      // begins Redialing: the same engine gets the request over a new connection
	Fail          // the client gets an error
	EndWhole      // the client gets the end of its answer
	BreakOff      // the answer ends with an error
)

// An Effect is something that the code which serves the request has to do.
type Effect struct {
	Kind        EffectKind
	Resource    Resource    // of Settle: what is given back or passed on
	Disposition Disposition // of Settle
	Blame       Blame       // of ReportFailure: who is at fault; of Resolve: Engine, Nobody (the request) or Disputed (unknown)
	Call        CallKind    // of ReportFailure: which call's engine is at fault
	Retry       Retry       // of Pause: how the next attempt begins
	Bind        Bind        // of Enqueue: of the present attempt
	Permit      bool        // of Enqueue: the pool must reserve a place, because the request has none
	Group       bool        // of Offer: true: another proxy owns the decode group now; false: every attempt here failed
	Error       Error       // of Fail: which error the client gets
	Until       Timeout     // the limit of the wait that the effect begins
	Pair        int         // the number of the pair that the effect belongs to; 0: none
}

// A Timeout names the limit of a wait in time, for waits that the code which carries out effects has to bound. The arrival queue, the pool,
// other dispatchers and the client's connection bound their waits themselves.
type Timeout uint8

// The timeouts.
const (
	NoTimeout    Timeout = iota // another component bounds the wait
	ByProbe                     // the wait while an engine prefills a prompt
	ByFirstEvent                // the wait for the first event from an engine that has the prompt
	ByHold                      // as ByFirstEvent, but no longer than the prefill engine certainly keeps the KV
	ByWhole                     // the wait for an answer in one piece: as ByProbe, then while its rank gives signs of life
	ByCallback                  // the wait for the callback in which a decode engine says where the KV goes
	ByGrace                     // the wait for the outcome of a call whose result is not needed any more
	ByConfirm                   // how long a first event is held back until the prefill engine has answered
	timeouts
)

// timeoutKeys holds, as text for the docs, the config key that sets each timeout, or the value of a timeout that no key sets.
var timeoutKeys = [timeouts]string{
	ByProbe: "`limits.probe_timeout`", ByFirstEvent: "`first_event_timeout`", ByHold: "`first_event_timeout`, but only until the lease ends",
	ByWhole: "`limits.probe_timeout`, then as long as its rank gives signs of life within `limits.event_timeout`; in all 1 s more for " +
		"each token that it may have",
	ByCallback: "`bind.callback_timeout`", ByGrace: "5 s", ByConfirm: "100 ms",
}

func (l Timeout) String() string { return timeoutKeys[l] }

// Error says which error the client gets.
type Error uint8

// The errors.
const (
	OfAttempt Error = iota // the error of the last attempt, or of the wait for a turn
	OfClient               // the client has left
	// OfRanks: no engine may serve the request. Either only a decode rank that also prefills may do so (NoHandOff), and no rank prefills this
	// prompt; or the request is to be passed through, and no engine was found for it.
	OfRanks
	OfOwner // another dispatcher should serve the request, but it cannot be sent there
	OfPeer  // the error of the other dispatcher
)

// A Resource is something that a request may hold and must give back or pass on exactly once.
type Resource uint8

// The resources that a request may hold.
const (
	Permit      Resource = iota // a reserved place in the pool; once the request has an entry there, the entry owns it
	Lease                       // a prompt charged to a prefill engine that has not handed its KV over, or to a group of mixed ranks
	KV                          // a hand-off that may be sent to a decode engine
	MaybeReadKV                 // a hand-off that an engine may have read, so that no other decode engine may get it
	Slot                        // a slot on a decode rank
	LeaseOwner                  // the name under which the audit of leases knows the request
	Copy                        // the bytes kept in memory, and counted, so that a lost answer can go on
	Seat                        // one of the limited number of requests that are passed through at once
	Body                        // the body of a passed-through request; on an error, the code that answers with the error settles it
	// Call is a call to an engine. It counts the tokens to compute against the engine, and a drain may end it. A call to a decode rank is
	// settled like its slot. The call of a passed-through request is settled as Free or Spent.
	Call
	Memory // memory set aside for an answer in one piece, until the answer is written
	resources
)

// Ways to settle a resource that no verdict in verdict.go uses.
const (
	Back Disposition = Spent + 1 + iota // the resource is given back
	// Pass gives the resource a new owner, which settles it later: a place goes to the pool's entry, memory to the answer, and a
	// lease to the hand-off, or to the Pair of an attempt whose two calls run at the same time.
	Pass
	Failing   // the slot of an answer that its engine did not begin, or broke off
	Cancelled // the slot of a request whose answer nobody wants any more, or that was never sent to the engine
	Finish    // the slot of an answer that is whole
)

// A BrokenConn is a broken connection that looks as if the engine died while it had the request.
type BrokenConn struct {
	Engine string // "role address"; empty: none broke
	At     time.Time
}

// Budget says which budget decides whether there is another attempt.
type Budget uint8

// The budgets.
const (
	NoMore   Budget = iota // there is no other attempt
	Freely                 // the attempt uses no budget
	OfUnsent               // the budget of attempts that reached no engine
	Counted                // the budget of all other attempts
)

// A Retry says whether and how another attempt begins.
type Retry struct {
	Budget  Budget
	N       int  // the attempt's number among those of its kind
	Pause   int  // how often the base pause doubles to give the random pause's upper bound; 0: as the budget says, or none
	Despite bool // the client has a part of the answer: if no engine answered this attempt, an empty budget does not end the request
}

// ConnectorTraits describes how the connectors that bind a decode rank before the prefill differ.
type ConnectorTraits struct {
	CallsBack bool // the decode engine calls back to say where the KV goes, and the prefill waits for this
	// Aborts: engines can be told to abort a request by its id, and then reuse its blocks at once. The KV may be incomplete although both
	// calls end without an error.
	Aborts bool
	Keeps  bool // the prefill engine keeps the KV until the decode engine has it, or until the lease on it ends
	// LeaksBlocks: the decode engine keeps blocks for a prefill that never comes, and no call can free them. vLLM's watchdog for
	// registrations only writes a log line (nixl/push_scheduler.py, vLLM issue 46283). A request of vllm-ascend that was aborted
	// while it waited keeps its blocks until a prefill ends (vllm-ascend issue 16662). That a decode engine which is told of a
	// failed prefill waits for ever is inferred from mooncake_layerwise_connector.py and vLLM pull request 50984.
	LeaksBlocks bool
	// Retries: another prefill engine may replace one that has not taken the request. If the first one has taken the request, a
	// layerwise decode engine would count the ends of both prefills together, and begin too early (vllm-ascend 182b75ea,
	// mooncake_layerwise_connector.py).
	Retries bool
}

// DecodeFailure is why a decode call ends without a first event.
type DecodeFailure uint8

// The reasons.
const (
	Refused  DecodeFailure = iota // the decode engine did not take the request
	Declined                      // the decode engine refused the request, and the request is at fault
	Died                          // the call failed otherwise, so the engine may still have the request
)

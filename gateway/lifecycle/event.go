package lifecycle

import "time"

// An Event is what has happened, and what is known at that moment. A field "of X" only counts in the event X.
type Event struct {
	What   What
	End    Ended  // of Fell
	Script Script // of Turn, and of Begun if it is Passed
	Open   bool   // of NoTurn: no engine was available here, but another region may have some
	Named  bool   // of HandedOver: a decode request must have the probe's id
	Copied bool   // of LocalBound, Bound and First: bytes of the request stay in memory so that a lost answer can go on
	Whole  bool   // of LocalBound and Bound: the answer comes in one piece, so that nothing shows before its end how far it is
	Left   bool   // the client has left

	// Of Fell.
	Quit       bool     // the client has left, which has ended the leg, and no engine uses the slot any more
	Engine     string   // the instance of the leg's engine
	Faulty     bool     // the engine itself says that it failed: status 500, or any 5xx within an answer
	Breach     Breach   // the engine's connection, if it broke
	Down       []string // engines whose connections broke under the request before, and that went down since
	MostLosses int      // how often, in all, a lost answer may go on, and engines without KV room may give the request back

	// Of the legs of an attempt whose decode rank was bound before its prefill.
	Dialect Dialect   // of Turn
	Idle    bool      // of Panicked: neither leg of the last pair was begun
	Deaf    bool      // of Bound: the decode engine may not heed an abort, and notices only after a while that we have left
	Pair    int       // of CalledBack and the events behind it: the number of the request's pair, from 1
	Prompt  int       // tokens of the prompt, as an engine has counted them; 0: it did not say so
	Expired bool      // of Began: the prefill engine may have given the KV's memory away before the first event
	Again   bool      // of PrefillFell: one more prefill engine may be asked
	Reason  EndReason // of DecodeFell
}

// What has happened.
type What uint8

// What may happen.
const (
	Begun          What = iota // a client sends a request, or a lost answer goes on
	LocalBound                 // a decode rank computes the prompt alone, and has a slot
	NoLocal                    // no decode rank does
	Turn                       // its turn at a prefill engine came
	NoTurn                     // its turn did not come
	Directed                   // another dispatcher should have it
	PeerAnswers                // the other dispatcher answers
	PeerRefuses                // the client gets the other dispatcher's refusal, or the request cannot be sent on again
	RegionReturns              // a proxy of another region gave it back
	SiblingReturns             // a proxy of this region gave it back
	HandedOver                 // the prefill engine has the KV, and a hand-off was made of it
	Bound                      // a decode rank has a slot for it
	First                      // the first event of its answer came
	Ends                       // its last event came: the answer is whole
	Believed                   // the KV of the answer was complete
	Fell                       // a leg ended without its result
	Retried                    // it is tried again, and the pause is over
	GivenUp                    // it is not tried again, or a lost answer cannot go on
	Offered                    // another dispatcher may have it
	NotOffered                 // no other dispatcher may have it
	Panicked                   // the code that carries out effects panicked

	// Events of a request that is passed through. If its call ends without an answer, that is Fell. Its answer is First, also if it comes in
	// one piece.
	Chosen   // there is an engine for it
	NoneLeft // no engine is left that takes it
	NoRoute  // no engine has the endpoint

	// Events of a pair: two legs that are under way at once. Any goroutine may report these, at any time.
	CalledBack   // the decode engine says where the KV goes
	NeedsNothing // the decode engine has the whole prompt already
	Miscalled    // the decode engine called back, but named no place where KV may go
	Overdue      // the decode engine did not call back in time
	CalledLate   // the decode engine says where the KV goes, for a request that is over
	Uncallable   // no callback that names a place came for a request that is over
	ProbeDue     // the prefill leg is about to be sent
	PrefillFell  // the prefill leg ended without an answer
	Found        // another prefill engine takes the place of one that took nothing
	NotFound     // no other prefill engine does
	PrefillDone  // the prefill engine has answered well
	Began        // the first event of the answer came
	Confirmed    // the wait for the prefill engine's answer is over, after the first event or after the last
	Quiet        // the time for the first event is over
	DecodeFell   // the decode leg ended without a first event
	DecodeOver   // the decode leg ended after its first event
	ClientGone   // the client left
	ClientWaited // the client left some time ago, and its decode leg may be ended now
	NotSent      // neither leg was sent
	Unwanted     // the answer has ended, or was given up, and the proxy no longer waits for the prefill engine to confirm its KV
)

// Script is the order in which an attempt goes through its legs, or Passed: the request is not split into legs.
type Script uint8

// The scripts.
const (
	Late   Script = iota // the prompt is prefilled, then its decode rank is bound
	Early                // the decode rank is bound before the prefill, and both legs are under way at once
	Mixed                // the rank that is bound prefills and decodes: the attempt has a lease, and no KV is handed over
	Passed               // the request goes to one engine as it came, and is not split into prefill and decode: see passed.go
)

// Do is what an effect has to do.
type Do uint8

// The effects. Each effect from TryLocal on is waited for: the next event says how it ended. These have the order of the states.
const (
	Question Do = iota // with its next turn, evenkeel asks whether another dispatcher should have the request
	Attempt            // an attempt begins
	Settle             // a thing that the request holds is given back or passed on
	Restart            // engines that failed before may be tried again
	Drop               // the request is not sent to the other dispatcher that was chosen
	Shun               // the next attempts avoid the decode rank
	// The failure counts against its engine. A prefill engine's failure is counted when its lease is settled, so for a prefill engine this
	// only notes a 500 until its cause is known.
	Condemn
	Acclaim      // the decode engine served the request
	Find         // the cause of earlier 500s is known, or will stay unknown
	Remember     // the engine does not have the endpoint, and is not asked for it for a while
	Recall       // the last failure does not count: the one before it does
	Complain     // the log tells of an engine that did not answer
	EndDecode    // the call of the decode leg is ended
	AbortDecode  // the decode engine is told to abort the request
	AbortPrefill // the prefill engine is told to abort the request
	HangUp       // the call of the prefill leg is ended, if there is one
	SendBeside   // the prefill leg is sent, beside the decode leg
	Seek         // another prefill engine is looked for
	AwaitFirst   // the time for the first event begins
	AwaitPrefill // the goroutine that reported the event waits for the end of the prefill leg before it goes on
	StopWaiting  // the time for the first event need not be watched any more
	Forget       // no callback is expected any more
	DrainBeside  // a prefill is run only because its end frees blocks of the decode engine
	CountLoss    // the rank was lost before the first event
	Strand       // the decode engine may keep blocks for ever
	WaitGone     // the event ClientWaited is due after the limit in Until
	TryLocal     // TryingLocal
	Queue        // Queued
	Forward      // Forwarded
	SendProbe    // Probing
	Enqueue      // Pooled
	SendDecode   // Opening
	SendBoth     // Coupled
	Pause        // Pausing
	Offer        // Offering
	AnswerIt     // Answering: the client gets the answer
	Confirm      // Confirming
	GoOn         // Lost
	Choose       // Choosing
	SendOver     // Calling
	SendAnew     // Redialing
	Fail         // the client gets an error
	EndWhole     // the client gets the end of its answer
	BreakOff     // its answer ends with an error
)

// An Effect is something to do.
type Effect struct {
	Do      Do
	Thing   Thing // of Settle
	How     How
	Blame   Blame   // of Condemn
	Leg     Leg     // of Condemn: which leg's engine
	Finding Finding // of Find
	Retry   Retry   // of Pause
	Script  Script  // of Enqueue
	Place   bool    // of Enqueue: a place in the pool is to be reserved, because the request has none
	Group   bool    // of Offer: true if its decode group is another proxy's now, false if every attempt here failed
	Error   Error   // of Fail
	Until   Limit   // how long the wait that the effect begins may last
	Pair    int     // of SendBoth, and of each effect that a pair's event has: the number of the pair; 0: the effect is not of a pair
}

// A Limit is how long a wait may last, where the code that carries out effects bounds it. The arrival queue, the pool, other dispatchers
// and the client's connection have bounds of their own.
type Limit uint8

// The limits.
const (
	NotHere      Limit = iota // another component bounds the wait
	ByProbe                   // an engine computes a prompt
	ByFirstEvent              // an engine has a prompt, and is to begin its answer
	ByHold                    // as ByFirstEvent, but only while the prefill engine certainly keeps the KV
	ByWhole                   // an engine makes an answer in one piece: as ByProbe, and then for as long as its rank gives signs of life
	ByCallback                // a decode engine says where the KV goes
	ByGrace                   // an engine says how a leg went that is not needed any more, or whose answer is here
	ByConfirm                 // a first event is held back until the prefill engine has answered
	ByAbort                   // an engine ends what it was told to abort
	limits
)

// limitKeys are, as in the docs, the config keys that set the limits. A limit that no key sets stands there as its value.
var limitKeys = [limits]string{
	ByProbe: "`limits.probe_timeout`", ByFirstEvent: "`first_event_timeout`", ByHold: "`first_event_timeout`, but only until the lease ends",
	ByWhole: "`limits.probe_timeout`, then as long as its rank gives signs of life within `limits.event_timeout`; in all 1 s more for " +
		"each token that it may have",
	ByCallback: "`bind.callback_timeout`", ByGrace: "5 s", ByConfirm: "100 ms", ByAbort: "200 ms",
}

func (l Limit) String() string { return limitKeys[l] }

// Error is which error the client gets.
type Error uint8

// The errors.
const (
	OfAttempt Error = iota // the error of the last attempt, or of the wait for a turn
	OfClient               // the client has left
	OfRanks                // no rank computes the prompt alone, or no engine was found for a request that is passed through
	OfOwner                // another dispatcher should have it, and it cannot go there
	OfPeer                 // the error of the other dispatcher
)

// A Thing is what a request may hold.
type Thing uint8

// The things.
const (
	Place   Thing = iota // a place that is reserved in the pool and belongs to no entry there yet
	Lease                // of a prompt: on a prefill engine that has not handed its KV over, or on a group whose ranks prefill and decode
	KV                   // a hand-off that may be sent to a decode engine
	Doubted              // a hand-off that an engine may have read, and from which no answer may be made
	Slot                 // a slot on a decode rank
	Holder               // what the audit of leases knows the request by
	Copy                 // the bytes that are kept, on an account, so that a lost answer can go on
	Seat                 // a seat among the requests that are passed through at once
	Body                 // the body of such a request; if the request gets an error, the code that answers with the error settles the body
	// A call to an engine, which counts there with the tokens to compute, and which a drain may end. A call to a decode rank is settled as
	// its slot is, and that of a request that is passed through as Free or Spent.
	Call
	Memory // memory for an answer in one piece, until the answer is written
	things
)

// More ways to settle a thing, beside those of verdict.go.
const (
	Back How = Spent + 1 + iota // the thing is given back
	// Another owner settles the thing from now on: the pool's entry a place, the hand-off or the legs of an early attempt a lease, the
	// answer its memory.
	Pass
	Failing   // the slot of an answer that its engine did not begin, or broke
	Cancelled // the slot of an answer that is not wanted any more, or that was never sent
	Finish    // the slot of an answer that is whole
)

// A Breach is a connection that broke under a request in the way in which the connection of a dying engine does.
type Breach struct {
	Engine string // "role address"; empty: none broke
	At     time.Time
}

// Budget says which budget decides whether there is another attempt.
type Budget uint8

// The budgets.
const (
	NoMore   Budget = iota // there is no other attempt
	Freely                 // no budget is asked for the attempt
	OfUnsent               // the budget of attempts that reached no engine
	Counted                // the budget of all other attempts
)

// A Retry is whether and how another attempt begins.
type Retry struct {
	Budget  Budget
	N       int  // which attempt of its kind it is
	Pause   int  // the upper bound of the random pause is the base pause, doubled so often; 0: as the budget says, or none
	Despite bool // the client has a part of the answer, so an empty budget does not end the request if no engine answered this attempt
}

// Finding is what caused a 500.
type Finding uint8

// The findings.
const (
	Unclear  Finding = iota // unknown: no other engine had the request
	Guilty                  // the engine: another engine answered the request
	Innocent                // the request: another engine failed at it, too
)

// Dialect is what the connectors differ in that bind a decode rank before the prefill.
type Dialect struct {
	CallsBack bool // the decode engine says where the KV goes, and before that there is nothing to prefill
	// Aborts: engines can be told to abort a request by its id, and then give its blocks away at once. And the KV may be incomplete although
	// both legs answer well.
	Aborts bool
	Keeps  bool // the prefill engine keeps the KV until the decode engine has it, or until the lease on it ends
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

// EndReason is why a decode leg ends without a first event.
type EndReason uint8

// The reasons.
const (
	Refused  EndReason = iota // its engine took nothing
	Declined                  // its engine refused the request for the request's own fault
	Died                      // the call failed otherwise, and it is not known what its engine does with the request
)

package lifecycle

import "time"

// An Event is what has happened, and what is known at that moment.
type Event struct {
	What   What
	End    Ended  // of Fell
	Script Script // of Turn, and of Begun if it is Passed
	Open   bool   // of NoTurn: for want of engines, so that another region may have some
	Named  bool   // of HandedOver: a decode request must have the probe's id
	Kept   bool   // of RankTakes, Bound and First: bytes of the request stay in memory so that a lost answer can go on
	Whole  bool   // of RankTakes and Bound: the answer comes in one piece, so that nothing shows before its end how far it is
	Left   bool   // the client has left

	// Of Fell.
	Quit   bool     // the client has left, which has ended the leg, and no engine uses the slot any more
	Engine string   // that is asked to have failed
	Faulty bool     // it says itself that it failed: 500, or within an answer any 5xx
	Breach Breach   // its connection
	Down   []string // of the engines whose connections broke before: those that went down since
	Rooms  int      // how often an engine may give a request back for want of KV memory

	// Of the legs of an attempt whose decode rank was bound before its prefill.
	Dialect Dialect   // of Turn
	Idle    bool      // of Panicked: neither leg of the last pair was begun
	Deaf    bool      // of Bound: the decode engine may not heed an abort, and notices only after a while that we have left
	Pair    int       // of CalledBack and those behind it: which of the request's pairs it happened to. The first one is 1
	Prompt  int       // tokens of it, as an engine has counted them; 0: it did not say so
	Expired bool      // of Began: the KV may have been given away by then
	Again   bool      // of PrefillFell: one more prefill engine may be asked
	Reason  EndReason // of DecodeFell
}

// What has happened.
type What uint8

// What may happen.
const (
	Begun          What = iota // a client sends a request, or its answer was lost and goes on
	RankTakes                  // a decode rank computes the prompt alone, and has a slot
	NoRankTakes                // none does
	Turn                       // its turn at a prefill engine came
	NoTurn                     // it did not
	Directed                   // another dispatcher should have it
	PeerAnswers                // and answers
	PeerRefuses                // and has a refusal for the client, or cannot be asked again
	RegionReturns              // a proxy of another region gave it back
	SiblingReturns             // a proxy of this region did
	HandedOver                 // the prefill engine has the KV, and a hand-off was made of it
	Bound                      // a decode rank has a slot for it
	First                      // the first event of its answer came
	Ends                       // its last event came: the answer is whole
	Believed                   // the KV was whole
	Fell                       // a leg ended without what it was for
	Retried                    // it is tried again, and the pause is over
	GivenUp                    // it is not tried again, or a lost answer cannot go on
	Offered                    // another dispatcher may have it
	NotOffered                 // none may
	Panicked                   // the code that carries effects out did

	// Of a request that is passed through. The end of its call is Fell, and its answer is First, also one that comes in one piece.
	Chosen   // there is an engine for it
	NoneLeft // no engine is left that takes it
	NoRoute  // no engine has the endpoint

	// To one of two legs that are under way at once. Any goroutine may tell of these, at any time.
	CalledBack   // the decode engine says where the KV goes
	NeedsNothing // the decode engine has the whole prompt already
	Miscalled    // what the decode engine says names no place for KV
	Overdue      // it did not say anything in time
	CalledLate   // it says where the KV goes, of a request that is over
	Uncallable   // nor does it say anything then that is of use
	ProbeDue     // the prefill leg is about to be sent
	PrefillFell  // the prefill leg ended without an answer
	Found        // another prefill engine takes the place of one that took nothing
	NotFound     // none does
	PrefillDone  // the prefill engine has answered well
	Began        // the first event of the answer came
	Confirmed    // the wait for the prefill engine's answer is over, after the first event or after the last
	Quiet        // the time for the first event is over
	DecodeFell   // the decode leg ended without a first event
	DecodeOver   // it ended after it
	ClientGone   // the client left
	ClientWaited // and what it left may be ended now
	NotSent      // neither leg was sent
	Unwanted     // the prefill engine's answer is not waited for any longer, though the decode leg has ended
)

// Script is in which order an attempt goes through the same legs, or that there are none.
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

// What is to be done. Those from TryAlone on are waited for: the next event tells how they ended. They are in the order of the states.
const (
	Question Do = iota // it is asked about, whether another dispatcher should have it, with its next turn
	Attempt            // an attempt begins
	Settle             // a thing is given back
	Restart            // engines that failed before may be tried again
	Drop               // what another dispatcher was to be sent is not
	Shun               // next attempts keep off the decode rank
	// an engine's failure is held against it; of a prefill engine, which answers for itself with its lease, only a 500 until it is known whose
	// it is
	Condemn
	Acclaim      // the decode engine served the request
	Find         // it is known whose a 500 was
	Remember     // the engine does not have the endpoint, and is not asked for it for a while
	Recall       // the failure that counts is the one before
	Complain     // the log tells of an engine that did not answer
	EndDecode    // the call of the decode leg is ended
	AbortDecode  // the decode engine is told to abort the request
	AbortPrefill // the prefill engine is
	HangUp       // the call of the prefill leg is ended, if there is one
	SendBeside   // the prefill leg is sent, beside the decode leg
	Seek         // another prefill engine is looked for
	AwaitFirst   // the time for the first event begins
	AwaitPrefill // whoever told of the event waits for the end of the prefill leg before anything else is done
	StopWaiting  // and ends
	Forget       // no callback is expected any more
	DrainBeside  // a prefill is run only because its end frees blocks
	CountLoss    // the rank was lost before the first event
	Strand       // the decode engine may keep blocks for ever
	WaitGone     // ClientWaited comes a moment after the abort, or after the grace
	TryAlone     // Placing
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
	Group   bool    // of Offer: because its decode group is another proxy's now. Else because every attempt here failed
	Error   Error   // of Fail
	Until   Limit   // of what is waited for: how long at most
	Pair    int     // of SendBoth, and of what is done for an event of a pair; 0: of the settled lease no pair has it
}

// A Limit is how long something is waited for at most, where the code that carries effects out bounds it. The arrival queue, the pool,
// other dispatchers and the client's connection have bounds of their own.
type Limit uint8

// The limits.
const (
	NotHere      Limit = iota // another component bounds the wait
	ByProbe                   // an engine computes a prompt
	ByFirstEvent              // an engine has a prompt, and is to begin its answer
	ByHold                    // as ByFirstEvent, but only while the prefill engine certainly keeps the KV
	ByWhole                   // an engine makes an answer in one piece: as ByProbe, and then for as long as its rank gives signs of life
	ByCallback                // a decode engine says where the KV goes
	ByGrace                   // an engine says how a leg went that nobody needs any more, or whose answer is here
	ByConfirm                 // a first event is held back until the prefill engine has answered
	ByAbort                   // an engine ends what it was told to abort
	limits
)

// limitKeys are the keys of the config that have the limits, as the docs name them, or the limits themselves.
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
	OfAttempt Error = iota // what the last attempt came to, or its turn
	OfClient               // it has left
	OfRanks                // no rank computes the prompt alone, or no engine was found for a request that is passed through
	OfOwner                // another dispatcher should have it, and it cannot go there
	OfPeer                 // that of the other dispatcher
)

// A Thing is what a request may hold.
type Thing uint8

// The things.
const (
	Place   Thing = iota // in the pool, reserved, and no entry has it yet
	Lease                // of a prompt on a prefill engine that has not handed its KV over, or on a group whose ranks prefill and decode
	KV                   // a hand-off that may be sent to a decode engine
	Doubted              // a hand-off that an engine may have read, and from which no answer may be made
	Slot                 // on a decode rank, with the call to its engine, which expects the tokens of that call until it is over
	Holder               // of leases: what the audit of leases knows the request by
	Kept                 // the account of bytes that are kept so that a lost answer can go on
	Seat                 // among the requests that are passed through at once
	Body                 // of such a request; one that gets an error passes it on to those who answer with that
	Call                 // to an engine, which counts it and is expected to compute its tokens: Free or Spent
	Memory               // for an answer in one piece, which has it until it is written
	things
)

// More ways to settle a thing, beside those of verdict.go.
const (
	Back How = Spent + 1 + iota // a place is free again
	// somebody else has it now, and settles it: the pool's entry a place, the legs of an early attempt a lease, an answer its memory
	Pass
	Failing   // the slot of an answer that its engine did not begin, or broke
	Cancelled // the slot of an answer that is not wanted any more, or that was never sent
	Finish    // the slot of an answer that is whole
)

// A Breach is a connection that broke under a request as that of an engine that dies.
type Breach struct {
	Engine string // "role address"; empty: none broke
	At     time.Time
}

// Budget says who is asked whether there is another attempt.
type Budget uint8

// The budgets.
const (
	NoMore   Budget = iota // there is none
	Freely                 // nobody: nothing failed
	OfUnsent               // the one of attempts that reached no engine
	Counted                // the one of attempts
)

// A Retry is whether and how another attempt begins.
type Retry struct {
	Budget  Budget
	N       int  // which attempt of its kind it is
	Pause   int  // the pause before it doubles so often; 0: the budget says how long it is
	Despite bool // half an answer is out, so that an empty budget does not turn it away as long as no engine answered
}

// Finding is whose a 500 was.
type Finding uint8

// The findings.
const (
	Unclear  Finding = iota // no other engine had the request
	Guilty                  // another engine answered it
	Innocent                // another engine failed at it, too
)

// Dialect is what the connectors differ in that bind a decode rank before the prefill.
type Dialect struct {
	CallsBack bool // the decode engine says where the KV goes, and before that there is nothing to prefill
	// engines are told to abort a request by its id, and give its blocks away at once. And KV may be incomplete although both legs answer well
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

// EndReason is how a decode leg ends without a first event.
type EndReason uint8

// The ways.
const (
	Refused  EndReason = iota // its engine took nothing
	Declined                  // it is the request's fault
	Died                      // it is not known what its engine does
)

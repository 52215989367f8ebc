package lifecycle

import "time"

// An Event is what has happened, and what is known at that moment.
type Event struct {
	What   What
	End    Ended  // of Fell
	Script Script // of Turn, and of Begun if it is Passed
	Open   bool   // of NoTurn: for want of engines, so that another region may have some
	Named  bool   // of HandedOver: a decode request must have the probe's id
	Left   bool   // the client has left

	// Of Fell.
	Quit   bool     // the client has left, which has ended the leg, and no engine uses the slot any more
	Engine string   // that is asked to have failed
	Faulty bool     // it says itself that it failed: 500, or within an answer any 5xx
	Breach Breach   // its connection
	Down   []string // of the engines whose connections broke before: those that went down since
	Rooms  int      // how often an engine may give a request back for want of KV memory
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

// What is to be done. Those from TryAlone on are waited for: the next event tells how they ended.
const (
	Question   Do = iota // it is asked about, whether another dispatcher should have it, with its next turn
	Attempt              // an attempt begins
	Settle               // a thing is given back
	Restart              // engines that failed before may be tried again
	Drop                 // what another dispatcher was to be sent is not
	Shun                 // next attempts keep off the decode rank
	Condemn              // an engine's failure is held against it; of a prefill engine, which answers for itself with its lease, only a 500 until it is known whose it is
	Acclaim              // the decode engine served the request
	Find                 // it is known whose a 500 was
	Remember             // the engine does not have the endpoint, and is not asked for it for a while
	Recall               // the failure that counts is the one before
	Complain             // the log tells of an engine that did not answer
	TryAlone             // Placing
	Queue                // Queued
	Forward              // Forwarded
	SendProbe            // Probing
	Enqueue              // Pooled
	SendDecode           // Opening
	SendBoth             // Coupled
	Pause                // Pausing
	Offer                // Offering
	AnswerIt             // Answering: the client gets the answer
	Confirm              // Confirming
	GoOn                 // Lost
	Choose               // Choosing
	SendOver             // Calling
	SendAnew             // Redialing
	Fail                 // the client gets an error
	EndWhole             // the client gets the end of its answer
	BreakOff             // its answer ends with an error
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
}

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
	Slot                 // on a decode rank
	Seat                 // among the requests that are passed through at once
	Body                 // of such a request; one that gets an error passes it on to those who answer with that
	Call                 // to an engine, which counts it and is expected to compute its tokens: Free or Spent
	Memory               // for an answer in one piece, which has it until it is written
	things
)

// More ways to settle a thing, beside those of verdict.go.
const (
	Back      How = Spent + 1 + iota // a place is free again
	Pass                             // somebody else has it now, and settles it: the pool's entry a place, the legs of an early attempt a lease, an answer its memory
	Failing                          // the slot of an answer that its engine did not begin, or broke
	Cancelled                        // the slot of an answer that is not wanted any more, or that was never sent
	Finish                           // the slot of an answer that is whole
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

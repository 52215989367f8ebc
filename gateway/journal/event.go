package journal

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/prefill"
)

// EventKind says which fields of the Event are set.
type EventKind int

// The kinds, with the fields of Event that each sets.
const (
	Parsing          EventKind = iota // the body is parsed from now on
	Parsed                            // Req; nil: the body is no valid request
	Attempted                         // another attempt begins
	Entered                           // Phase begins; also sets Left, Call, Engine, Peer and Early
	Waited                            // Took: the wait for a prefill turn, even if it got none
	Chose                             // Lease: the prefill engine, and why
	Probed                            // Took: how long the prefill engine worked on the prompt
	Prefilled                         // Tokens and Cached of the prompt, by the engine; Resumed
	Placed                            // Slot: decode rank of a finished prefill; Took: the wait for it
	PlacedAggregated                  // after Placed. Slot; Tokens: expected in its prefix cache
	PlacedLocally                     // Slot: rank that computes the prompt; Tokens: as above
	Coupled                           // Took: until the decode engine's callback, 0: none came; Slot
	First                             // At: of the first event; Sent: decode call began, or zero
	Relayed                           // Took: from the first event to the end; Tokens: of the answer
	Paced                             // Took: first tokens to last; Tokens: of the answer, 2 or more
	AttemptEnded                      // Answer: the error, or nil. Cause, On and Status say why
	Retried                           // the attempt has failed, and another one follows
	Freed                             // At: the client left; now no slot, KV or hand-off is held
	scheduled                         // batch, priority. At: deadline of the first token, or zero
	ended                             // Answer: the client's error; nil: it got its whole answer
)

// Event happened to a request, or to one leg of it.
type Event struct {
	Kind    EventKind
	Took    time.Duration // Took, At, Sent and Tokens depend on Kind
	At      time.Time
	Sent    time.Time
	Phase   Phase
	Left    bool   // the client; Record.Reached stays the phase in which it left
	Call    string // call that begins with this phase; empty: the call before
	Engine  string // to which the request is passed through
	Peer    string // to which the request is sent
	Early   bool   // the decode rank is bound before the prefill
	Req     *openai.Request
	Lease   *prefill.Lease
	Resumed bool // the prompt has a resumed answer, too
	Slot    *dispatcher.Slot
	Tokens  int
	Cached  int // prompt tokens from a prefix cache; -1: not known
	Cause   string
	On      string        // the engine or rank that failed, if known
	Status  int           // of the engine's answer; 0: none came
	Answer  *openai.Error // the error for a client; nil: the attempt did not fail

	batch    bool // only gets capacity that others leave unused
	priority int
}

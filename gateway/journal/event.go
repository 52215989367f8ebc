package journal

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/prefill"
)

// EventKind says what happened, and thereby which fields of the Event are set.
type EventKind int

// The kinds of events, with the fields of Event that each kind sets.
const (
	Parsing          EventKind = iota // the proxy begins to parse the body of the request
	Parsed                            // the body was parsed. Req: the request; nil: the body is no valid request
	Attempted                         // another attempt to serve the request begins
	Entered                           // a phase begins. Phase: which one; also sets Left, Call, Engine, Peer and Early
	Waited                            // Took: how long the request waited for its turn at a prefill engine, also if it got no turn
	Chose                             // Lease: which prefill engine was chosen, and why
	Probed                            // Took: how long the prefill engine worked on the prompt
	Prefilled                         // Tokens and Cached: tokens of the prompt, as the engine counted them; also sets Resumed
	Placed                            // Slot: the decode rank of a finished prefill; Took: how long it waited for the rank
	PlacedAggregated                  // Slot: rank that prefills and decodes; Tokens: expected in its prefix cache. Follows Placed
	PlacedLocally                     // Slot: decode rank that computes the prompt itself; Tokens: expected in its prefix cache
	Coupled                           // Took: how long the decode engine took to say where the KV goes; 0: it did not. Also sets Slot
	First                             // At: when the first event of the answer came; Sent: when the decode call began, zero: there was none
	Relayed                           // Took: from the first event of the answer to its end; Tokens: tokens of the answer
	Paced                             // Took: from the first tokens of a whole answer to the last ones; Tokens: of the answer, at least 2
	AttemptEnded                      // Answer: the error of the attempt, nil: it succeeded. Cause, On and Status say why it failed
	Retried                           // the attempt has failed, and another one follows
	Freed                             // At: when the client left; the request now holds no slot, KV or hand-off any more
	scheduled                         // sets batch and priority. At: deadline of the first token; zero: the caller gave none
	ended                             // Answer: the error that the client got, nil: it got its whole answer
)

// Event is one thing that happened to a request, or to one part of a fanned-out request.
type Event struct {
	Kind    EventKind
	Took    time.Duration // the meaning of Took, At, Sent and Tokens depends on Kind
	At      time.Time
	Sent    time.Time
	Phase   Phase
	Left    bool   // the client has left, and Record.Reached stays the phase in which it left
	Call    string // name of the call that begins with this phase; empty: the phase belongs to the call before
	Engine  string // the engine that the request is passed through to
	Peer    string // the other proxy to which the request is sent
	Early   bool   // the decode rank is bound before the prefill
	Req     *openai.Request
	Lease   *prefill.Lease
	Resumed bool // the prompt is that of a resumed answer, and not only the client's
	Slot    *dispatcher.Slot
	Tokens  int
	Cached  int // tokens of the prompt that were in a prefix cache; -1: not known
	Cause   string
	On      string        // the engine or rank that failed; empty: none failed, or it is not known which
	Status  int           // HTTP status of the engine's answer; 0: no answer came
	Answer  *openai.Error // the error that a client would get; nil: the attempt did not fail

	batch    bool // the request only gets capacity that other requests leave unused
	priority int
}

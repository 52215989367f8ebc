package journal

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/prefill"
)

// EventKind is the kind of an event.
type EventKind int

// The kinds of events, with the fields of Event that each kind sets.
const (
	Parsing       EventKind = iota // the body of the request is read
	Parsed                         // Req: the parsed request; nil: the body is no valid request
	Attempted                      // another attempt begins
	Entered                        // Phase: the phase that begins; Left, Call, Engine, Peer, Early
	Waited                         // Took: how long the request waited for its turn at a prefill engine, whether it got one or not
	Chose                          // Lease: which prefill engine was chosen, and why
	Probed                         // Took: how long the prefill engine worked on the prompt
	Prefilled                      // Tokens, Cached: of the prompt, as the engine counted them; Resumed
	Placed                         // Slot: the decode rank of a finished prefill; Took: how long it waited for the rank
	PlacedMixed                    // Slot: the rank that prefills and decodes; Tokens: expected in its prefix cache. It follows Placed
	PlacedLocally                  // Slot: the decode rank that computes the prompt itself; Tokens: expected in its prefix cache
	Coupled                        // Took: time until the decode engine said where the KV goes, 0: its connector has no callback; Slot
	First                          // At: when the first event of the answer came; Sent: when the decode call began, zero: there was none
	Relayed                        // Took: from the first event of the answer to its end; Tokens: of the answer
	Paced                          // Took: from the first tokens of a whole answer to the last ones; Tokens: of the answer, at least 2
	Failed                         // Cause, On, Status, Answer: the attempt has ended; no Answer: the client got its whole answer
	Retried                        // another attempt follows
	Freed                          // At: when the client left; the request now holds no slot, KV or hand-off any more
	scheduled                      // batch, priority; At: until when the first token is wanted, zero: the caller gave no deadline
	ended                          // Answer: the error that the client got, nil: it got its whole answer
)

// Event is one thing that happened to a request, or to one part of a fanned-out request.
type Event struct {
	Kind    EventKind
	Took    time.Duration // the meaning of Took, At, Sent and Tokens depends on Kind
	At      time.Time
	Sent    time.Time
	Phase   Phase
	Left    bool   // the client has left, and the request stays in the phase in which it left
	Call    string // name of the call that begins with this phase; empty: the phase belongs to the call before
	Engine  string // the engine that the request is passed through to
	Peer    string // the other dispatcher to which the request is sent
	Early   bool   // the decode rank is bound before the prefill
	Req     *openai.Request
	Lease   *prefill.Lease
	Resumed bool // the prompt is that of a resumed answer, and not only the client's
	Slot    *dispatcher.Slot
	Tokens  int
	Cached  int // tokens of the prompt that were in a prefix cache; -1: not known
	Cause   string
	On      string        // the engine or rank that failed; empty: none failed, or it is not known which
	Status  int           // the status of the engine's answer
	Answer  *openai.Error // the error that a client would get; nil: the attempt did not fail

	batch    bool // the request only gets capacity that other requests leave
	priority int
}

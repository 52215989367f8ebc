package journal

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
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
	Failed                         // Cause, On, Status, Answer: the attempt has failed
	Retried                        // another attempt follows
	Freed                          // At: when the client left; the request now holds no slot, KV or hand-off any more
)

// Event is one thing that happened to a request, or to one part of a fanned-out request.
type Event struct {
	Kind    EventKind
	Took    time.Duration // the meaning of Took, At, Sent and Tokens depends on What
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

	prefill *receipt.Prefill // made from Lease by showEvent
	decode  *receipt.Decode  // made from Slot by showEvent
}

// Report adds an event to the request's facts, metrics, receipt and spans.
func (r *Record) Report(e Event) {
	r.countEvent(&e)
	r.showEvent(&e)
	if e.Slot != nil {
		e.Slot.Trace = nil // the receipt has all that it needs, so the memory is freed before the answer runs
	}
}

// countEvent adds an event to the facts and metrics.
func (r *Record) countEvent(e *Event) {
	g, s := r.journal, e.Slot
	switch e.Kind {
	case Parsed:
		e.Took = time.Since(r.Arrival)
		g.stage(parse, e.Took)
		if e.Req != nil {
			r.Model = e.Req.Model
		}
	case Attempted:
		r.Attempts++
	case Entered:
		if r.Reached == "" || !e.Left {
			r.Reached = e.Phase
		}
		if e.Early {
			r.Bind, r.BindMs = AtArrival, ms(time.Since(r.Arrival))
		}
		if e.Engine != "" {
			r.Route, r.Engine = Passed, e.Engine
		}
		if e.Peer != "" {
			r.Peer = e.Peer
		}
	case Waited:
		g.stage(choose, e.Took)
		r.QueueMs += ms(e.Took)
	case Chose:
		r.Route, r.LocalTokens = Disaggregated, 0
		if e.Lease.Candidate.Mixed {
			r.Route = Aggregated
		}
		r.Prefill, r.ProbeBS = e.Lease.Candidate.ID, e.Lease.Others
		r.PrefillPolicy, r.HitTokens = e.Lease.Policy, e.Lease.HitTokens
	case Probed:
		g.stage(probe, e.Took)
		r.ProbeMs += ms(e.Took)
	case Prefilled:
		if !e.Resumed {
			r.PromptTokens, r.CachedTokens = e.Tokens, max(0, e.Cached)
		}
	case Placed:
		g.stage(poolWait, s.Wait)
		g.stage(decide, s.Decide)
		r.Rank, r.Policy, r.Bind = s.WorkerName, s.Policy, Late
		r.WaitMs += ms(e.Took)
	case PlacedLocally:
		r.Route, r.Rank, r.Policy = Local, s.WorkerName, s.Policy
		r.LocalTokens, r.HitTokens = int(s.NewTokens), e.Tokens
	case PlacedMixed:
		r.Bind, r.LocalTokens, r.HitTokens = AtArrival, int(s.NewTokens), e.Tokens
	case Coupled:
		r.CallbackMs = ms(e.Took)
	case First:
		r.TTFTMs = ms(e.At.Sub(r.Arrival))
		g.ttft.Observe(e.At.Sub(r.Arrival).Seconds())
		if took := e.At.Sub(e.Sent); !e.Sent.IsZero() {
			r.TransferMs = ms(took)
			g.stage(transfer, took)
		}
	case Relayed:
		r.OutputTokens = e.Tokens
		g.stage(relay, e.Took)
	case Paced:
		g.tpot.Observe(e.Took.Seconds() / float64(e.Tokens-1))
	case Freed:
		g.released[r.Reached].Observe(time.Since(e.At).Seconds())
	}
}

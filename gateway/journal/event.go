package journal

import (
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/prefill"
)

// What is what happened to a request.
type What int

// The events of a request, with the fields of Event that say more.
const (
	Parsing       What = iota // its body is read
	Parsed                    // Req: what the request turned out to be; nil: no request
	Attempted                 // one more attempt begins
	Entered                   // Phase: it begins; Left, Call, Engine, Peer, Early
	Waited                    // Took: for its turn, whether it got one or not
	Chose                     // Lease: which prefill engine it got, and why
	Probed                    // Took: the prefill engine worked so long on the prompt
	Prefilled                 // Tokens, Cached: what the engine said of the prompt; Resumed
	Placed                    // Slot: which decode rank the finished prefill got; Took: it waited so long
	PlacedMixed               // Slot: which rank prefills and decodes the request; Tokens: expected in its prefix cache. After Placed
	PlacedLocally             // Slot: which decode rank computes the prompt itself; Tokens: expected in its prefix cache
	Coupled                   // Took: until its decode engine had said where the KV goes, 0: with its connector none says that; Slot
	First                     // At: when the first event of the answer came; Sent: when the decode call began, zero: none did
	Relayed                   // Took, Tokens: of the answer from its first event on
	Paced                     // Took, Tokens: from the first tokens of a whole answer to its last ones
	Failed                    // Cause, On, Status, Answer: the attempt was in vain
	Retried                   // another attempt follows
	Freed                     // At: when its client left; nothing of the request is held any more
)

// Event is one thing that happened to a request, or to one leg of it.
type Event struct {
	What    What
	Took    time.Duration // the meaning of Took, At, Sent and Tokens depends on What
	At      time.Time
	Sent    time.Time
	Phase   Phase
	Left    bool   // the client has left, and the request stays in the phase in which it left
	Call    string // name of the call that this phase and the next ones are part of; empty: the one before
	Engine  string // the engine that the request is passed through to
	Peer    string // the other dispatcher that is asked for the answer
	Early   bool   // the decode rank was bound before the prefill
	Req     *openai.Request
	Lease   *prefill.Lease
	Resumed bool // the prompt is not the client's, but that of a resumed answer
	Slot    *dispatcher.Slot
	Tokens  int
	Cached  int // of the prompt; -1: not known
	Cause   string
	On      string        // the engine or rank that failed; empty: none did, or it is not known which
	Status  int           // of the engine
	Answer  *openai.Error // the error that a client would get; nil: the attempt was not in vain

	prefill *receipt.Prefill // of Lease
	decode  *receipt.Decode  // of Slot
}

// Report counts an event where it belongs: in the facts and metrics, and in the receipt and the spans.
func (r *Request) Report(e Event) {
	r.countEvent(&e)
	r.showEvent(&e)
	if e.Slot != nil {
		e.Slot.Trace = nil // the receipt has what it needs of the trace, so free it while the answer runs
	}
}

// countEvent adds an event to the facts and metrics.
func (r *Request) countEvent(e *Event) {
	g, s := r.journal, e.Slot
	switch e.What {
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

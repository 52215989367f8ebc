package journal

import (
	"net/http"
	"time"

	"evenkeel/dispatcher"
	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// Request begins the record of a request with what is known of it when it comes.
func (g *Journal) Request(f Facts) *Request { return &Request{Facts: f, journal: g} }

// Leg is the record of one leg. Receipt and span are those of the whole request.
func (r *Request) Leg(name string) *Request {
	leg := *r
	leg.leg = name
	return &leg
}

// watched says whether the request has a receipt or a span.
func (r *Request) watched() bool { return r.live != nil || r.span != nil }

// Witness opens the receipt and the span of a request whose sender is known. header
// reads a header of the request; trusted callers decide what is sampled. path is that of the endpoint.
func (r *Request) Witness(header func(name string) string, trusted bool, path string) {
	r.path = path
	r.span = r.journal.tracer.Load().Start(header, trusted, operation(path), r.Arrival)
	r.TraceID = r.span.TraceID()
	if r.journal.Receipts != nil {
		r.live = r.journal.Receipts.Open(&receipt.Receipt{
			ID: r.ID, ClientID: r.ClientID, TraceID: r.TraceID, Key: r.Key, Endpoint: path, Arrival: r.Arrival, Origin: r.Origin, State: stageNames[parse],
			Attempts: make([]receipt.Attempt, 0, 1),
		})
	}
	if r.span.Recording() {
		spanArrived(r)
	}
}

// Parsing begins to read the request's body.
func (r *Request) Parsing() { r.attempt.step = r.span.Child("parse", false) }

// Parsed records what the request turned out to be; nil: no request.
func (r *Request) Parsed(req *openai.Request) {
	r.attempt.step.End()
	r.attempt.step = nil
	took := time.Since(r.Arrival)
	r.journal.stage(parse, took)
	if req != nil {
		r.Model = req.Model
		r.tellParsed(req, ms(took))
	}
}

func (r *Request) tellParsed(req *openai.Request, took float64) {
	if r.live != nil {
		r.live.Edit(func(x *receipt.Receipt) { x.Model, x.Stream, x.Waits.Parse = receipt.Clip(req.Model), req.Stream, took })
	}
	if r.span.Recording() {
		spanParsed(r, req)
	}
}

// Queued records how long the request waited for its turn, whether it got one or not.
func (r *Request) Queued(took time.Duration) {
	r.journal.stage(choose, took)
	r.QueueMs += ms(took)
}

// Chose records which prefill engine the request got, and why.
func (r *Request) Chose(l *prefill.Lease) {
	r.Route, r.LocalTokens = Disaggregated, 0
	r.Prefill, r.ProbeBS = l.Candidate.ID, l.Others
	r.PrefillPolicy, r.HitTokens = l.Policy, l.HitTokens
	r.tellChosen(l)
}

// Probed records how long the prefill engine worked on the prompt.
func (r *Request) Probed(took time.Duration) {
	r.journal.stage(probe, took)
	r.ProbeMs += ms(took)
}

// Prefilled records what the engine said of the prompt. The prompt of a resumed
// answer is not the client's: resumed keeps it out of the facts.
func (r *Request) Prefilled(got *mooncake.ProbeAnswer, resumed bool) {
	if !resumed {
		r.PromptTokens, r.CachedTokens = got.PromptTokens, max(0, got.CachedTokens)
	}
	r.tellPrefilled(got)
}

// Placed records which decode rank a finished prefill got, and how long it waited.
func (r *Request) Placed(s *dispatcher.Slot, took time.Duration) {
	r.journal.stage(poolWait, s.Wait)
	r.journal.stage(decide, s.Decide)
	r.Rank, r.Policy = s.WorkerName, s.Policy
	r.WaitMs += ms(took)
	r.Bind = Late
	r.tellBound(s)
}

// BoundEarly records that the rank which it got was bound before the prefill.
func (r *Request) BoundEarly() {
	r.Bind, r.BindMs = AtArrival, ms(time.Since(r.Arrival))
}

// Coupled records how the legs of a request came together that was bound before its prefill: when its decode
// engine had said where the KV goes, 0 where none says that, and how well its first token was predicted.
func (r *Request) Coupled(callback time.Duration, s *dispatcher.Slot) {
	r.CallbackMs = ms(callback)
	if steps, known := s.StartError(); known {
		r.StartError = &steps
	}
}

// PlacedLocally records which decode rank computes the prompt itself, and how much
// of it is expected in the rank's prefix cache.
func (r *Request) PlacedLocally(s *dispatcher.Slot, hit int) {
	r.Route, r.Rank, r.Policy = Local, s.WorkerName, s.Policy
	r.LocalTokens, r.HitTokens = int(s.NewTokens), hit
	r.tellBound(s)
}

// PassedTo records which engine a request was passed through to.
func (r *Request) PassedTo(engine string) {
	r.Route, r.Engine = Passed, engine
	r.edit(func(a *receipt.Attempt) { a.Engine = engine })
}

// Counted records the tokens that an engine says a request had that was passed through.
func (r *Request) Counted(prompt, output int) { r.PromptTokens, r.OutputTokens = prompt, output }

// SentTo records which other dispatcher is asked for the answer.
func (r *Request) SentTo(peer string) {
	r.Peer = peer
	r.edit(func(a *receipt.Attempt) { a.Peer = r.Peer })
}

// First records the first event of the answer.
func (r *Request) First(at time.Time) {
	r.attempt.call.Event("first token")
	took := at.Sub(r.Arrival)
	r.TTFTMs = ms(took)
	r.journal.ttft.Observe(took.Seconds())
}

// Transferred records how long the decode call took to its first event.
func (r *Request) Transferred(took time.Duration) {
	r.TransferMs = ms(took)
	r.journal.stage(transfer, took)
}

// Paced records the time from the first tokens of a whole answer to its last ones.
func (r *Request) Paced(took time.Duration, tokens int) {
	r.journal.tpot.Observe(took.Seconds() / float64(tokens-1))
}

// Relayed records how long the answer ran after its first event, and its tokens.
func (r *Request) Relayed(took time.Duration, tokens int) {
	r.OutputTokens = tokens
	r.journal.stage(relay, took)
}

// Freed observes that nothing of the request is held any more, for a client that left.
func (r *Request) Freed(left time.Time) {
	r.journal.released[r.Reached].Observe(time.Since(left).Seconds())
}

// End writes what became of the request everywhere: its very end, once for each
// request and not for legs. fail is nil for an answer that was whole.
func (r *Request) End(fail *openai.Error) {
	r.Outcome = Outcome(fail)
	r.TotalMs = ms(time.Since(r.Arrival))
	r.tellEnd(fail)
	if fail == nil {
		r.journal.whole.Inc()
	} else {
		r.journal.requests.WithLabelValues(r.Outcome).Inc()
	}
	r.journal.recent.end(fail)
	r.journal.lines.write(&r.Facts)
}

// tellEnd closes the receipt and the span.
func (r *Request) tellEnd(fail *openai.Error) {
	if r.live != nil {
		r.live.End(func(x *receipt.Receipt) {
			x.Outcome, x.Route, x.Peer = r.Outcome, r.Route, r.Peer
			x.PromptTokens, x.CachedTokens, x.OutputTokens = r.PromptTokens, r.CachedTokens, r.OutputTokens
			x.TTFT, x.Total = r.TTFTMs, r.TotalMs
			if fail != nil {
				x.Status = fail.Status
			}
		})
	}
	if r.span.Recording() {
		status := http.StatusOK
		if fail != nil && r.TTFTMs == 0 { // else the answer had begun
			status = fail.Status
		}
		spanEnded(r, fail, status)
	}
	r.span.End()
}

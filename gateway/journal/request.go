package journal

import (
	"net/http"
	"time"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
)

// Request begins the record of a request with what is known of it when it comes.
func (g *Journal) Request(f Facts) *Request { return &Request{Facts: f, journal: g} }

// Leg is the record of one leg of the request, which has that name. Receipt and span are those of the whole request.
func (r *Request) Leg(name string) *Request {
	leg := *r
	leg.leg = name
	return &leg
}

// Witness opens the receipt and the span of a request whose sender is known. header
// reads a header of the request; trusted callers decide what is sampled. path is that of the endpoint.
func (r *Request) Witness(header func(name string) string, trusted bool, path string) {
	r.path = path
	r.span = r.journal.tracer.Load().Start(header, trusted, operation(path), r.Arrival)
	r.TraceID = r.span.TraceID()
	if r.journal.Receipts != nil {
		r.live = r.journal.Receipts.Open(&receipt.Receipt{
			ID: r.ID, ClientID: r.ClientID, TraceID: r.TraceID, Key: r.Key, Endpoint: path, Arrival: r.Arrival, Origin: r.Origin,
			State:    stageNames[parse],
			Attempts: make([]receipt.Attempt, 0, 1),
		})
	}
	if r.span.Recording() {
		spanArrived(r)
	}
}

// Scheduled notes what a request may wait for: batch takes only what others leave, and the deadline is until when the first token is
// wanted; zero: the caller did not say.
func (r *Request) Scheduled(batch bool, priority int, deadline time.Time) {
	if r.live == nil || !batch && priority == 0 && deadline.IsZero() {
		return
	}
	r.live.Edit(func(x *receipt.Receipt) {
		if x.Priority = priority; batch {
			x.Class = "batch"
		}
		if !deadline.IsZero() {
			x.Deadline = ms(deadline.Sub(r.Arrival))
		}
	})
}

// End writes what became of the request everywhere: its very end, once for each
// request and not for legs. fail is nil for an answer that was whole.
func (r *Request) End(fail *openai.Error) {
	r.Outcome = Outcome(fail)
	r.TotalMs = ms(time.Since(r.Arrival))
	r.showEnd(fail)
	if fail == nil {
		r.journal.whole.Inc()
	} else {
		r.journal.requests.WithLabelValues(r.Outcome).Inc()
	}
	r.journal.recent.count(fail)
	r.journal.lines.write(&r.Facts)
}

// showEnd closes the receipt and the span.
func (r *Request) showEnd(fail *openai.Error) {
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

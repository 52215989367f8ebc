package journal

import (
	"net/http"
	"time"

	"evenkeel/gateway/openai"
	"evenkeel/gateway/receipt"
	"evenkeel/internal/words"
)

// Begin makes the record of a request, with what is known when it arrives.
func (g *Journal) Begin(f LogEntry) *Record {
	f.ClientID = words.Clip(f.ClientID)
	return &Record{LogEntry: f, journal: g}
}

// Leg returns the record of one part of a fanned-out request, with the part's name. It shares the receipt and the span of the whole
// request.
func (r *Record) Leg(name string) *Record {
	leg := *r
	leg.leg = name
	return &leg
}

// Witness opens the receipt and the span of a request whose sender is known. header returns a header of the request. A trusted caller
// decides whether the trace is sampled. path is the path of the endpoint.
func (r *Record) Witness(header func(name string) string, trusted bool, path string) {
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

// Scheduled notes how a request is scheduled. A batch request only gets capacity that other requests leave. The deadline is for the first
// token; zero: the caller gave none.
func (r *Record) Scheduled(batch bool, priority int, deadline time.Time) {
	if r.live == nil || !batch && priority == 0 && deadline.IsZero() {
		return
	}
	r.live.Edit(func(x *receipt.Receipt) {
		x.Priority = priority
		if batch {
			x.Class = "batch"
		}
		if !deadline.IsZero() {
			x.Deadline = ms(deadline.Sub(r.Arrival))
		}
	})
}

// End writes the outcome of the request to the receipt, span, metrics and request log. It is called once per request, and not for the parts
// of a fanned-out request. fail is nil if the answer was whole.
func (r *Record) End(fail *openai.Error) {
	r.Outcome = Outcome(fail)
	r.TotalMs = ms(time.Since(r.Arrival))
	r.showEnd(fail)
	if fail == nil {
		r.journal.whole.Inc()
	} else {
		r.journal.requests.WithLabelValues(r.Outcome).Inc()
	}
	r.journal.recent.count(fail)
	r.journal.lines.write(&r.LogEntry)
}

// showEnd closes the receipt and the span.
func (r *Record) showEnd(fail *openai.Error) {
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
		if fail != nil && r.TTFTMs == 0 { // otherwise the answer had begun with status 200
			status = fail.Status
		}
		spanEnded(r, fail, status)
	}
	r.span.End()
}

package journal

import (
	"time"

	"evenkeel/gateway/openai"
	"evenkeel/internal/words"
)

// Begin makes the record of a request, with what is known when it arrives.
func (g *Journal) Begin(f LogEntry) *Record {
	f.ClientID = words.Clip(f.ClientID)
	return &Record{LogEntry: f, journal: g}
}

// Leg returns the record of one part of a fanned-out request, with the part's name. It shares the
// receipt and the span of the whole request.
func (r *Record) Leg(name string) *Record {
	leg := *r
	leg.leg = name
	return &leg
}

// OpenViews opens the receipt and the span of a request whose sender has been identified. header
// returns a header of the request. A trusted caller decides whether the trace is sampled. path is
// the path of the endpoint.
func (r *Record) OpenViews(header func(name string) string, trusted bool, path string) {
	r.path = path
	r.span = r.journal.tracer.Load().Start(header, trusted, operation(path), r.Arrival)
	r.TraceID = r.span.TraceID()
	r.views = r.journal.openViewsOf(r)
}

// ReportScheduled shows in the receipt how a request is scheduled. A batch request only gets
// capacity that other requests leave. The deadline is for the first token; zero: the caller gave
// none.
func (r *Record) ReportScheduled(batch bool, priority int, deadline time.Time) {
	// Most requests are scheduled like this, and the views show nothing of it.
	if !batch && priority == 0 && deadline.IsZero() {
		return
	}
	r.showEvent(Event{Kind: scheduled, batch: batch, priority: priority, At: deadline})
}

// End writes the outcome of the request to its views, the metrics and the request log. It is called
// once per request, and not for the parts of a fanned-out request. fail is nil if the client got
// its whole answer.
func (r *Record) End(fail *openai.Error) {
	r.Outcome = Outcome(fail)
	r.TotalMs = ms(time.Since(r.Arrival))
	r.showEvent(Event{Kind: ended, Answer: fail})
	r.span.End()
	if fail == nil {
		r.journal.okRequests.Inc()
	} else {
		r.journal.requests.WithLabelValues(r.Outcome).Inc()
	}
	r.journal.recent.count(fail)
	r.journal.requestLog.write(&r.LogEntry)
}

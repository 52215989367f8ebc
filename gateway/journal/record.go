package journal

import (
	"time"

	"evenkeel/gateway/tracing"
)

// A Record is the record of one request, or of one part (leg) of a fanned-out request: its facts, and the attempt under way. Only the
// goroutine that serves the request may use it.
type Record struct {
	LogEntry
	Reached Phase // how far the request is, or was when its client left

	journal        *Journal
	path           string        // path of the endpoint; empty before OpenViews
	leg            string        // name of the leg; empty: the record of the whole request
	span           *tracing.Span // span of the whole request; nil: it is not traced
	views          [2]view       // opened by OpenViews; nil: the request has no such view
	attempt        attempt       // the attempt under way, or the last attempt
	leavingCounted bool          // the request is already counted among those whose client left
}

// A view shows operators what happens to a request while it runs: in its receipt, or as its spans. All legs of a request share it. When it
// gets an event, the record's attempt still has the state before the event; only a new attempt has its number already. show may change the
// record's spans.
type view interface{ show(r *Record, e Event) }

// attempt is the state of the attempt under way, for the views.
type attempt struct {
	open      bool      // an attempt is under way
	number    int       // number of the attempt under way, or of the last attempt
	phase     Phase     // the present phase; empty: none
	since     time.Time // when the phase began, or when the last attempt ended
	willRetry bool      // the last attempt failed, and another attempt follows

	span      *tracing.Span
	call      *tracing.Span // span of the call to a decode engine or another region; nil: no call is under way
	phaseSpan *tracing.Span
}

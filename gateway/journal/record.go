package journal

import (
	"time"

	"evenkeel/gateway/tracing"
)

// A Record is that of one request, or of one leg of a fanned-out request. Only the goroutine that
// serves the request may use it.
type Record struct {
	LogEntry
	Reached Phase // how far the request is, or was when its client left

	journal        *Journal
	path           string        // of the endpoint; empty before OpenViews
	leg            string        // empty: the whole request
	span           *tracing.Span // of the whole request; nil: not traced
	views          [2]view       // by OpenViews; or nil
	attempt        attempt       // under way, or the last
	leavingCounted bool          // the client's leaving was counted
}

// A view shows operators what happens to a request: its receipt, or its spans. All legs share it.
// At an event, the record's attempt still has the state before; only a new attempt has its number
// already. show may change the record's spans.
type view interface{ show(r *Record, e Event) }

type attempt struct {
	open      bool // under way
	number    int
	phase     Phase     // empty: none
	since     time.Time // begin of the phase, or end of the last attempt
	willRetry bool      // the last attempt failed, and another follows

	span      *tracing.Span
	call      *tracing.Span // to a decode engine or another region; nil: none is under way
	phaseSpan *tracing.Span
}

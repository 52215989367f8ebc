package receipt

import (
	"strings"
	"time"
)

// Filter says which receipts a caller wants; empty fields leave none out.
type Filter struct {
	Model   string
	Key     string  // name of the caller's API key
	Outcome string  // an outcome; Failed: all requests that failed with 5xx or 429
	Engine  string  // part of the name of a prefill engine or decode rank
	ID      string  // part of the request's id, or of the client's id for it
	SlowMs  float64 // least time in ms that the client waited for the first token
}

// Failed is the value of Filter.Outcome for all requests that failed.
const Failed = "failed"

func (f *Filter) passes(r *Receipt, now time.Time) bool {
	return (f.Model == "" || r.Model == f.Model) &&
		(f.Key == "" || r.Key == f.Key) &&
		(f.Outcome == "" || r.Outcome == f.Outcome || f.Outcome == Failed && r.failed()) &&
		(f.ID == "" || strings.Contains(r.ID, f.ID) || strings.Contains(r.ClientID, f.ID)) &&
		(f.SlowMs == 0 || r.waited(now) >= f.SlowMs) &&
		(f.Engine == "" || r.wentTo(f.Engine))
}

// waited is in ms, from the arrival to the first token, the end without one, or now.
func (r *Receipt) waited(now time.Time) float64 {
	switch {
	case r.TTFT > 0:
		return r.TTFT
	case r.Outcome != "":
		return r.Total
	}
	return now.Sub(r.Arrival).Seconds() * 1000
}

// failed is not for a client's mistake.
func (r *Receipt) failed() bool { return r.Status >= 500 || r.Status == 429 }

func (r *Receipt) wentTo(part string) bool {
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Prefill != nil && strings.Contains(a.Prefill.Candidate, part) {
			return true
		}
		if a.Decode != nil && strings.Contains(a.Decode.Rank, part) {
			return true
		}
	}
	return false
}

package receipt

import (
	"strings"
	"time"
)

// Filter says which receipts are asked for. What is empty asks for nothing.
type Filter struct {
	Model   string
	Key     string  // name of the caller's API key
	Outcome string  // Failed: every one that is the proxy's or an engine's fault
	Engine  string  // part of the name of a prefill engine or a decode rank that it was sent to
	ID      string  // part of its id or its client's
	SlowMs  float64 // its first token came no sooner, or it ran so long without one
}

// Failed is Filter.Outcome for all that failed.
const Failed = "failed"

func (f *Filter) passes(r *Receipt, now time.Time) bool {
	return (f.Model == "" || r.Model == f.Model) &&
		(f.Key == "" || r.Key == f.Key) &&
		(f.Outcome == "" || r.Outcome == f.Outcome || f.Outcome == Failed && r.failed()) &&
		(f.ID == "" || strings.Contains(r.ID, f.ID) || strings.Contains(r.ClientID, f.ID)) &&
		(f.SlowMs == 0 || r.waited(now) >= f.SlowMs) &&
		(f.Engine == "" || r.wentTo(f.Engine))
}

// waited is how many ms passed until the first token, else until the end, else until now.
func (r *Receipt) waited(now time.Time) float64 {
	switch {
	case r.TTFT > 0:
		return r.TTFT
	case r.Outcome != "":
		return r.Total
	}
	return now.Sub(r.Arrival).Seconds() * 1000
}

// failed leaves out what clients did themselves.
func (r *Receipt) failed() bool { return r.Status >= 500 || r.Status == 429 }

func (r *Receipt) wentTo(name string) bool {
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.Prefill != nil && strings.Contains(a.Prefill.Candidate, name) || a.Decode != nil && strings.Contains(a.Decode.Rank, name) {
			return true
		}
	}
	return false
}

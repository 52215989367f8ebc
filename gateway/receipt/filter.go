package receipt

import "strings"

// Filter says which receipts are asked for. What is empty asks for nothing.
type Filter struct {
	Model   string
	Key     string  // name of the caller's API key
	Outcome string  // Failed: every one that is the proxy's or an engine's fault
	Engine  string  // part of the name of a prefill engine or a decode rank that it was sent to
	ID      string  // part of its id or its client's
	SlowMs  float64 // its first token came no sooner, or it ended later without one
}

// Failed is Filter.Outcome for all that failed.
const Failed = "failed"

func (f *Filter) passes(r *Receipt) bool {
	return (f.Model == "" || r.Model == f.Model) &&
		(f.Key == "" || r.Key == f.Key) &&
		(f.Outcome == "" || r.Outcome == f.Outcome || f.Outcome == Failed && r.failed()) &&
		(f.ID == "" || strings.Contains(r.ID, f.ID) || strings.Contains(r.ClientID, f.ID)) &&
		(f.SlowMs == 0 || r.TTFT >= f.SlowMs || r.TTFT == 0 && r.Total >= f.SlowMs) &&
		(f.Engine == "" || r.wentTo(f.Engine))
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

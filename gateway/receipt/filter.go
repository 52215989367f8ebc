package receipt

import (
	"strings"
	"time"
)

// Filter says which receipts are asked for. An empty field leaves no receipt out.
type Filter struct {
	Model   string
	Key     string  // name of the caller's API key
	Outcome string  // Failed: every outcome that counts as a failure, see failed
	Engine  string  // part of the name of a prefill engine or a decode rank that it was sent to
	ID      string  // part of its id or its client's
	SlowMs  float64 // least ms until the first token, or if there was none, that the request ran
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

// failed says whether the request failed, other than by what its client did: 5xx and 429.
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

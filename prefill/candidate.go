package prefill

import (
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// Candidate is one place a prompt can be prefilled: a DP rank of a prefill
// instance, or the whole instance where ranks cannot be pinned.
type Candidate struct {
	ID             string // "<instance>/<rank>"; a candidate that keeps its ID keeps its accounts
	Instance       string // candidates of one instance fail together, so a retry goes to another instance first
	Target         *engine.Target
	Profile        *mooncake.Profile
	Models         []string      // base models and LoRA names; empty: not known yet, so not eligible
	Hardware       string        // candidates of one model and label share a line of prefill times
	CapacityTokens int64         // KV tokens it can hold; 0: what the scrape says
	BlockTokens    int           // tokens of a KV block; 0: what the scrape says, else 16
	RTT            time.Duration // round trip to its engine, used until a scrape has measured it; 0 inside one site
	Region         string        // of its engine; empty: ours
	Board          string        // board of the decode ranks that take its hand-offs
	Live           bool
	Late           bool // not live, but only because its engine's answers are late just now: its requests wait and are not refused
	Decodes        bool // its engine also decodes, so that not all it runs is prefill
	Limit          int  // unanswered probes it may have while it is fresh in service; 0: any number
	Events         EventSource

	// Mixed: the candidate is a group of ranks that prefill and decode. A request that is leased there waits in the
	// pool of its board until it is sent. So the candidate can start as many requests as will soon have a slot. It is
	// never scraped.
	Mixed bool
	// Second: it takes a prompt only where no other candidate of the model can, or each of them has failed at the request, or where the
	// request names it.
	Second bool
	// Idle: no rank would fetch the KV of its prompts, so that the candidate comes after all others.
	Idle bool
	// Behind are the models for which the candidate comes second, because the ranks that list the model, and that its
	// requests can go to, take none now.
	Behind []string
}

// word is the candidate's state, in one word for metrics and status.
func (c *candidate) word(now time.Time) string {
	switch {
	case !c.configured:
		return "removed"
	case !c.Live:
		return "down"
	case len(c.Models) == 0:
		return "unknown"
	case !c.circuit.Allows(now):
		return "out"
	case c.account.Closed(now):
		return "closed"
	default:
		return "open"
	}
}

var candidateStates = []string{"open", "closed", "out", "unknown", "down", "removed"}

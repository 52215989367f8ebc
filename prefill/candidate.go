package prefill

import (
	"time"

	"evenkeel/engine"
	"evenkeel/mooncake"
)

// Candidate is a place at which a prompt can be prefilled: a DP rank of a prefill engine, or the
// whole engine if requests cannot name a rank.
type Candidate struct {
	ID             string // "<instance>/<rank>"; a candidate that keeps its ID keeps its load
	Instance       string // name of the engine; its candidates fail together, so that a retry first goes to another one
	Target         *engine.Target
	Profile        *mooncake.Profile
	Models         []string      // base models and LoRA names; empty: not known yet, and not eligible
	Hardware       string        // label; with the same model and label, candidates share a learned latency
	CapacityTokens int64         // KV tokens that fit; 0: not known
	BlockTokens    int           // per KV block, unless KV events name another size; 0: not known
	RTT            time.Duration // until a scrape has measured it; 0: in the proxy's own site
	Region         string        // empty: the proxy's own region
	Board          string        // dispatcher board whose decode ranks take the hand-offs
	Live           bool
	AnswersLate    bool // not live only because the engine answers late: requests wait for it and are not refused
	Decodes        bool // the engine also decodes, so that not all running requests are prefills
	ProbeLimit     int  // most unanswered probes while it is new in service; 0: no such bound
	Events         EventSource

	// Aggregated says that the candidate is a group of ranks that prefill and decode. A request with a
	// lease of it waits in the pool of the board until it is sent to a rank. The candidate can
	// therefore start as many requests as will soon have a slot. It is never scraped.
	Aggregated bool
	// Fallback says that the candidate is a second choice. It takes a prompt only if no other
	// candidate of the model can, if each of them has failed at the request, or if the request names
	// this one.
	Fallback bool
	// NoDecodeRank says that no rank would fetch the KV of its prompts: it is used after all others.
	NoDecodeRank bool
	// FallbackFor lists the models for which it is second, because the ranks that could decode its
	// prompts take no requests now.
	FallbackFor []string
}

// stateName is the first of these states that applies, as metrics and status name it.
func (c *candidate) stateName(now time.Time) string {
	switch {
	case !c.configured:
		return "removed"
	case !c.Live:
		return "down"
	case len(c.Models) == 0:
		return "unknown"
	case !c.circuit.Allows(now), !c.trialAt.IsZero(): // its probes fail, or its hand-offs are lost
		return "out"
	case c.load.Closed(now): // the KV gate
		return "closed"
	default:
		return "open"
	}
}

var candidateStates = []string{"open", "closed", "out", "unknown", "down", "removed"}

// takesPrompts reports whether probes and hand-offs work, or a prompt may be sent as a trial.
func (c *candidate) takesPrompts(now time.Time) bool {
	return c.circuit.Allows(now) && !now.Before(c.trialAt)
}

// reachesRank is true if no decode rank was chosen for the request.
func (r *Request) reachesRank(c *candidate) bool {
	return r.replaces == nil || c.reachesRankOf(r.replaces)
}

// reachesRankOf reports whether the candidate can hand KV over to a decode rank that was chosen for
// the other one.
func (c *candidate) reachesRankOf(other *Candidate) bool {
	knowsHow := c.Profile != nil && c.Profile.Connector == other.Profile.Connector // nil: it is not known how it hands over KV
	return knowsHow && c.Board == other.Board && c.Region == other.Region
}

package live

import (
	"fmt"

	"evenkeel/gateway/detect"
	"evenkeel/internal/words"
)

// Rounds describes how a group of ranks that prefill and decode gets its prompts. A round sends
// prompts to several ranks at once. If Sent has grown since the document before, rounds were sent
// in this second, to the ranks whose Prompts have grown.
type Rounds struct {
	Sent         uint64  `json:"sent"`          // rounds since the start; 0 for policies without rounds
	RanksFilled  float64 `json:"ranks_filled"`  // mean number of ranks with a prompt to compute when a round was sent, since the start
	PrefillShare float64 `json:"prefill_share"` // share of the steps since the start in which some rank computed a prompt
	EmptyShare   float64 `json:"empty_share"`   // mean share of ranks that computed no prompt in these steps
	HeldS        float64 `json:"held_s"`        // how long the oldest held request has been held back for a round; 0: none is held
	MaxHoldS     float64 `json:"max_hold_s"`    // the policy holds no request longer than this
	Says         string  `json:"says"`          // the fields above in words
}

// roundsOf describes how a group gets its prompts; nil: its ranks do not prefill. Some policies
// hold requests back, although a slot is free, until they send several to different ranks at once
// (a round).
func roundsOf(g *detect.Group) *Rounds {
	t := g.Rounds
	if t == nil {
		return nil
	}
	r := &Rounds{
		Sent: t.Sent, RanksFilled: t.RanksFilled, PrefillShare: float64(t.PrefillSteps) / float64(max(1, t.Steps)), EmptyShare: t.EmptyShare,
		HeldS: t.HeldS, MaxHoldS: t.MaxHoldS,
	}
	switch {
	case t.Steps == 0:
		r.Says = "No step is known yet."
	case t.PrefillSteps == 0:
		r.Says = "No step had a prefill since the start."
	default:
		r.Says = fmt.Sprintf("Since the start %.0f %% of steps had a prefill, and %.0f %% of ranks were empty in them.", 100*r.PrefillShare,
			100*r.EmptyShare)
	}
	if g.Held > 0 {
		longestHoldNow := fmt.Sprintf("%.1f s", r.HeldS)
		if r.HeldS < 1 {
			longestHoldNow = fmt.Sprintf("%.0f ms", 1000*r.HeldS)
		}
		r.Says += fmt.Sprintf(" %s %s held for a round now, for %s at most.", words.Capital(words.Count(g.Held, "request")), words.Are(g.Held),
			longestHoldNow)
	}
	return r
}

package live

import (
	"fmt"

	"evenkeel/gateway/detect"
	"evenkeel/internal/words"
)

// roundsOf describes how a group gets its prompts; nil: its ranks do not prefill.
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
		long := fmt.Sprintf("%.1f s", r.HeldS)
		if r.HeldS < 1 {
			long = fmt.Sprintf("%.0f ms", 1000*r.HeldS)
		}
		r.Says += fmt.Sprintf(" %s %s held for a round now, for %s at most.", words.Capital(words.Count(g.Held, "request")), words.Are(g.Held),
			long)
	}
	return r
}

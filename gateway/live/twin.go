package live

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"evenkeel/gateway/detect"
)

// twinInWords returns the twin's verdict about a group in words, or in note the reason why there is none. Both are empty for a group
// without barrier, because the twin replays common steps of ranks. replays is true if the config lists policies for the twin to replay.
func twinInWords(m *detect.Model, g *detect.Group, replays bool) (says []string, note string) {
	says = []string{}
	switch v := g.Twin; {
	case !g.Barrier: // there is nothing to say
	case g.Rounds != nil:
		note = "The twin replays no ranks that prefill and decode."
	case v != nil && len(v.Against) == 0:
		note = fmt.Sprintf("The twin replayed no other policy: dispatch.twin lists only %s, which is in force.", v.Policy)
	case v != nil:
		for _, a := range v.Against {
			says = append(says, a.Says)
		}
		note = fmt.Sprintf("Replayed: the %s until %s ago; error %.1f %% of a step.", spanText(v.WindowSeconds), spanText(v.AgeSeconds),
			100*v.ErrorRatio)
	case !replays:
		note = "The twin is off: dispatch.twin lists no policy."
	case slices.ContainsFunc(m.Groups, func(other detect.Group) bool { return !other.Barrier }):
		note = "The twin replays only models all of whose ranks step in groups."
	case g.Source == "":
		note = "The twin has replayed nothing yet: how long a step takes is not known."
		if g.ModelWhy != "" {
			note = "The twin has replayed nothing yet, because there is no step model: " + g.ModelWhy
			if !strings.HasSuffix(note, "?") { // ModelWhy may end in a question
				note += "."
			}
		}
	default:
		note = "The twin has replayed nothing yet."
	}
	return says, note
}

// spanText writes a time in seconds, or from 100 s on in minutes.
func spanText(seconds float64) string {
	if seconds < 100 {
		return fmt.Sprintf("%.0f s", seconds)
	}
	return fmt.Sprintf("%.1f min", seconds/60)
}

// Counterfactual is the load of the fullest rank under another policy. It is the present load, plus the KV tokens
// that explain the difference in step time by the step model.
type Counterfactual struct {
	Policy     string  `json:"policy"`
	MostTokens int64   `json:"most_tokens"`
	SavedMs    float64 `json:"saved_ms"` // by how many ms steps under this policy are longer than now; below 0: shorter
}

// counterfactuals returns the load of the fullest rank under other policies. The twin replays the traffic under them: StepMs is the mean
// length of a step, and SavedMs how much shorter steps are under the policy in force (below 0: longer). The step model says how many ms
// each KV token costs (StepModel.PerTokenMs). Policies for which the twin has found no sure difference are left out.
func counterfactuals(g *detect.Group) []Counterfactual {
	list := []Counterfactual{}
	if g.Twin == nil || g.StepModel.PerTokenMs <= 0 || g.SteppingRanks == 0 {
		return list
	}
	for _, a := range g.Twin.Against {
		hasResult := a.Claimed && a.StepMs > 0 // the twin is sure of the difference, and has replayed steps
		if hasResult {
			moreTokens := int64(a.SavedMs / g.StepModel.PerTokenMs) // the present policy saves the time that these tokens would cost
			tokens := max(0, g.MostTokens+moreTokens)
			list = append(list, Counterfactual{a.Policy, tokens, a.SavedMs})
		}
	}
	slices.SortStableFunc(list, func(a, b Counterfactual) int { return cmp.Compare(a.MostTokens, b.MostTokens) })
	return list
}

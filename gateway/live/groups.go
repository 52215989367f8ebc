package live

import (
	"evenkeel/dispatcher/verdict"
	"evenkeel/gateway/detect"
)

// Model is detect.Model with the groups in the form of this package.
type Model struct {
	detect.Model
	Groups []Group `json:"groups"`
}

// Group is detect.Group with further values for people who read the page.
type Group struct {
	detect.Group
	Rounds          *Rounds          `json:"rounds,omitempty"` // nil: the ranks do not prefill
	Twin            Twin             `json:"twin"`
	Counterfactuals []Counterfactual `json:"ghosts"` // load under other policies, lowest first; empty: the twin has found no sure difference
}

// Twin says how the last minutes of a group would have gone under other policies. The twin replays these minutes with each other policy.
type Twin struct {
	Says    []string      `json:"says"`              // a sentence for each policy of dispatch.twin; empty while there is no verdict
	Note    string        `json:"note"`              // replayed time and error, or why there is no verdict; empty: the group has no barrier
	Verdict *verdict.Twin `json:"verdict,omitempty"` // nil: there is no verdict yet
}

// modelOf describes the groups of a model. replays is true if the config lists policies for the twin to replay.
func modelOf(m *detect.Model, replays bool) Model {
	list := make([]Group, len(m.Groups))
	for i := range m.Groups {
		g := &m.Groups[i]
		list[i] = Group{Group: *g, Rounds: roundsOf(g), Twin: Twin{Verdict: g.Twin}, Counterfactuals: counterfactuals(g)}
		list[i].Twin.Says, list[i].Twin.Note = twinInWords(m, g, replays)
	}
	return Model{Model: *m, Groups: list}
}

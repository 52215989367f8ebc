package live

import "evenkeel/gateway/detect"

// Model is detect.Model with the groups in the form of this package.
type Model struct {
	detect.Model
	Groups []Group `json:"groups"`
}

// Group is detect.Group with further values for people who read the page.
type Group struct {
	detect.Group
	Rounds *Rounds `json:"rounds,omitempty"` // nil: the ranks do not prefill
}

func modelOf(m *detect.Model) Model {
	list := make([]Group, len(m.Groups))
	for i := range m.Groups {
		g := &m.Groups[i]
		list[i] = Group{Group: *g, Rounds: roundsOf(g)}
	}
	return Model{Model: *m, Groups: list}
}

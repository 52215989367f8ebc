package live

import (
	"evenkeel/gateway/detect"
	"evenkeel/gateway/watch"
)

// documentOf makes a Document of a look. Its Decisions are empty.
func documentOf(look *watch.Look, version string) Document {
	d := Document{
		Form: Form, AtMs: look.Facts.At.UnixMilli(), EveryMs: detect.Every.Milliseconds(), Facts: look.Facts, Incidents: look.Incidents,
		Models: make([]Model, len(look.Facts.Models)), Decisions: []Decision{},
	}
	d.Proxy.Version = version
	d.Listed()
	for i := range d.Models {
		m := &d.Facts.Models[i]
		d.Models[i] = Model{Model: *m, Groups: make([]Group, len(m.Groups))}
		for j := range m.Groups {
			g := &m.Groups[j]
			d.Models[i].Groups[j] = Group{Group: *g, Rounds: roundsOf(g), Twin: twinOf(m, g, look.Facts.Twin), Counterfactuals: counterfactuals(g)}
		}
	}
	return d
}

package policy

import (
	"fmt"
	"slices"

	"evenkeel/namedargs"
)

// Names lists the built-in policies.
func Names() []string {
	names := make([]string, len(forms))
	for i := range forms {
		names[i] = forms[i].name
	}
	return names
}

// Parse makes the built-in policy or the library's that a user named, as `name` or
// `name:key=value`.
func (l *Library) Parse(text string) (*Policy, error) {
	name, set, err := namedargs.Parse(text, l.Names())
	if err != nil {
		return nil, err
	}
	if u := l.user(name); u != nil {
		if len(set) > 0 {
			return nil, fmt.Errorf("policy %s: %s: it has no parameters; change its expressions in prefill.policies", name, set[0])
		}
		return u.build(), nil
	}
	f := &forms[slices.IndexFunc(forms, func(f form) bool { return f.name == name })]
	p := &Policy{name: f.name, ties: f.ties, score: f.score, param: f.value, rounds: f.rounds, loadBlind: f.loadBlind}
	if err := namedargs.Apply(name, f.takes, &p.param, set...); err != nil {
		return nil, err
	}
	p.spec = namedargs.Text(name, f.takes, &p.param, &f.value)
	return p, nil
}

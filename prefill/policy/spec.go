package policy

import (
	"fmt"
	"slices"
	"strings"

	"evenkeel/internal/namedargs"
)

// Policy chooses among candidates. Only one goroutine at a time may use it, because it reuses its
// memory. Each Parse makes another Policy.
type Policy struct {
	name, spec string
	ties       []tieKey
	score      score
	param      float64
	takesTurns bool
	loadBlind  bool
	user       *run // compiled expressions of a user's policy; nil: the policy is built in

	query  Query     // query of the last choice; its Key is the hash of the ID if the request has no session
	scores []float64 // scores of the last choice, in the candidates' order; NaN: ranked last
}

// Names lists the built-in policies, in the order in which users see them.
func Names() []string {
	names := make([]string, len(builtins))
	for i := range builtins {
		names[i] = builtins[i].name
	}
	return names
}

// simulationOnly also returns what to write in its place (advice).
func simulationOnly(name string) (advice string, only bool) {
	i := slices.IndexFunc(builtins, func(f builtin) bool { return f.name == name })
	if i < 0 {
		return "", false
	}
	advice = builtins[i].advice
	return advice, advice != ""
}

// Parse makes a policy from `name` or `name:key=value`, built in or of the library.
func (l *Library) Parse(text string) (*Policy, error) {
	name, _, _ := strings.Cut(text, ":")
	serving := l != nil && l.ForServing
	if advice, only := simulationOnly(name); only && serving {
		return nil, fmt.Errorf("policy %s is only for comparisons in evenkeel simulate; %s", name, advice)
	}
	name, arguments, err := namedargs.Parse(text, l.Names())
	if err != nil {
		return nil, err
	}
	if u := l.customNamed(name); u != nil {
		if len(arguments) > 0 {
			return nil, fmt.Errorf("policy %s: %s: it has no parameters; change its expressions in prefill.policies", name, arguments[0])
		}
		return u.build(), nil
	}
	b := &builtins[slices.IndexFunc(builtins, func(b builtin) bool { return b.name == name })] // namedargs.Parse has refused other names
	p := &Policy{name: b.name, ties: b.ties, score: b.score, param: b.defaultParam, takesTurns: b.takesTurns, loadBlind: b.loadBlind}
	if err := namedargs.Apply(name, b.params, &p.param, arguments...); err != nil {
		return nil, err
	}
	p.spec = namedargs.Text(name, b.params, &p.param, &b.defaultParam)
	return p, nil
}

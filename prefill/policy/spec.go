package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Names lists the built-in policies.
func Names() []string {
	names := make([]string, len(forms))
	for i := range forms {
		names[i] = forms[i].name
	}
	return names
}

// Parse makes the policy a user named, as `name` or `name:key=value`.
func Parse(text string) (*Policy, error) { return (*Library)(nil).Parse(text) }

// Parse makes the built-in policy or the library's that a user named.
func (l *Library) Parse(text string) (*Policy, error) {
	name, rest, options := strings.Cut(strings.TrimSpace(text), ":")
	if u := l.user(name); u != nil {
		if options {
			return nil, fmt.Errorf("policy %s: %q: it has no parameters; change its expressions in prefill.policies", name, rest)
		}
		return u.build(), nil
	}
	at := slices.IndexFunc(forms, func(f form) bool { return f.name == name })
	if at < 0 {
		return nil, fmt.Errorf("unknown policy %q; there are %s", name, strings.Join(l.Names(), ", "))
	}
	f := &forms[at]
	p := &Policy{name: f.name, spec: f.name, ties: f.ties, score: f.score, param: f.value, rounds: f.rounds, loadBlind: f.loadBlind}
	if !options {
		return p, nil
	}
	seen := false
	for item := range strings.SplitSeq(rest, ",") {
		k, value, ok := strings.Cut(item, "=")
		switch {
		case !ok:
			return nil, fmt.Errorf("policy %s: %q is no setting; write key=value", name, item)
		case k != f.param || f.param == "":
			return nil, fmt.Errorf("policy %s: unknown key %q; %s", name, k, f.takes())
		case seen:
			return nil, fmt.Errorf("policy %s: %s is set twice", name, k)
		}
		v, err := f.parse(value)
		if err != nil {
			return nil, fmt.Errorf("policy %s: %s: %w", name, item, err)
		}
		if p.param, seen = v, true; v != f.value {
			p.spec = name + ":" + k + "=" + f.show(v)
		}
	}
	return p, nil
}

func (f *form) takes() string {
	if f.param == "" {
		return "it takes none"
	}
	return "it takes " + f.param
}

func (f *form) parse(value string) (float64, error) {
	if f.words != nil {
		if i := slices.Index(f.words, value); i >= 0 {
			return float64(i), nil
		}
		return 0, fmt.Errorf("write %s", strings.Join(f.words, " or "))
	}
	v, err := strconv.ParseFloat(value, 64)
	if err != nil || !(v >= 0 && v <= f.most) {
		return 0, fmt.Errorf("write a number from 0 to %g", f.most)
	}
	return v, nil
}

func (f *form) show(v float64) string {
	if f.words != nil {
		return f.words[int(v)]
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}

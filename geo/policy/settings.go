package policy

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Settings are what may be set of a policy, as the config does for all of them
// and a policy's text for one.
type Settings struct {
	Push           Push
	MaxUnanswered  int     // SP-E; Auto: it follows the traffic
	MaxOutstanding int     // SP-O
	CreditMax      int     // SP-P
	Patience       float64 // SP-P: ms waited for a hit, per ms it saves; 0 off
	Tau            int     // requests a peer's queue may hold, for skylb

	QS, W, Load float64 // weights of wait, prefill and batch
	BMs         float64 // a decode step grows by, per request in the batch
	MinGainMs   float64 // what a peer must be better by
	TPMs, T0Ms  float64 // before anything was learned
}

// Defaults are those of the config; Load is what `finish` has.
func Defaults() Settings {
	return Settings{
		Push: SPE, MaxUnanswered: 8, MaxOutstanding: 64, CreditMax: 32, Tau: 4,
		QS: 1, W: 1, Load: 50, BMs: 0.06, MinGainMs: 10, TPMs: 0.0938, T0Ms: 150.72,
	}
}

// setting is a key of a policy's text.
type setting struct {
	key   string
	least float64
	most  float64
	words []string // its values by name, where it is no number
	whole bool
	get   func(s *Settings) float64
	set   func(s *Settings, v float64)
}

func integer(key string, least, most float64, at func(s *Settings) *int) setting {
	return setting{
		key: key, least: least, most: most, whole: true,
		get: func(s *Settings) float64 { return float64(*at(s)) }, set: func(s *Settings, v float64) { *at(s) = int(v) },
	}
}

func number(key string, most float64, at func(s *Settings) *float64) setting {
	return setting{
		key: key, most: most,
		get: func(s *Settings) float64 { return *at(s) }, set: func(s *Settings, v float64) { *at(s) = v },
	}
}

// unbounded is a limit that no setting needs.
const unbounded = 1e6

// pushKeys are those of every policy, costKeys those of what compares costs.
var (
	pushKeys = []setting{
		{
			key: "push", words: pushWords,
			get: func(s *Settings) float64 { return float64(s.Push) }, set: func(s *Settings, v float64) { s.Push = Push(v) },
		},
		integer("max_unanswered", 1, unbounded, func(s *Settings) *int { return &s.MaxUnanswered }),
		integer("max_outstanding", 1, unbounded, func(s *Settings) *int { return &s.MaxOutstanding }),
		integer("credit_max", 1, unbounded, func(s *Settings) *int { return &s.CreditMax }),
	}
	tauKeys  = []setting{integer("tau", 0, unbounded, func(s *Settings) *int { return &s.Tau })}
	costKeys = []setting{
		number("qs", unbounded, func(s *Settings) *float64 { return &s.QS }),
		number("w", unbounded, func(s *Settings) *float64 { return &s.W }),
		number("load", unbounded, func(s *Settings) *float64 { return &s.Load }),
		number("b_ms", unbounded, func(s *Settings) *float64 { return &s.BMs }),
		number("min_gain_ms", unbounded, func(s *Settings) *float64 { return &s.MinGainMs }),
	}
	patienceKeys = []setting{number("patience", unbounded, func(s *Settings) *float64 { return &s.Patience })}
)

// form is a policy: its rule, the keys it takes, and where its settings are
// not those of all.
type form struct {
	name string
	rule rule
	keys []setting
	adds func(s *Settings)
}

// forms in the order in which they are listed to a user.
var forms = []form{
	{name: "finish", rule: rule{compare: true}, keys: slices.Concat(pushKeys, costKeys)},
	{
		name: "gorgo", rule: rule{local: byCost, remote: byCost, stays: true}, keys: slices.Concat(pushKeys, costKeys, patienceKeys),
		adds: func(s *Settings) { s.Load = 0 },
	},
	{name: "skylb", rule: rule{local: byHit, remote: byHit, tau: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "skylb-ch", rule: rule{local: byRing, remote: byRing, tau: true}, keys: slices.Concat(pushKeys, tauKeys)},
	{name: "least-load", rule: rule{local: byLoad, remote: byLoad}, keys: pushKeys},
	{name: "round-robin", rule: rule{local: byTurn, remote: byTurn}, keys: pushKeys},
	{name: "local-only", rule: rule{compare: true, never: true}, keys: slices.Concat(pushKeys, costKeys)},
}

// Names lists the policies.
func Names() []string {
	names := make([]string, len(forms))
	for i := range forms {
		names[i] = forms[i].name
	}
	return names
}

// Parse makes the policy a user named, as `name` or `name:key=value,...`, on
// top of what Defaults says.
func Parse(text string) (*Policy, error) {
	s := Defaults()
	return s.Parse(text)
}

// Parse makes the policy a user named on top of these settings.
func (s *Settings) Parse(text string) (*Policy, error) {
	name, rest, options := strings.Cut(strings.TrimSpace(text), ":")
	at := slices.IndexFunc(forms, func(f form) bool { return f.name == name })
	if at < 0 {
		return nil, fmt.Errorf("unknown policy %q; there are %s", name, strings.Join(Names(), ", "))
	}
	f := &forms[at]
	p := &Policy{name: f.name, rule: f.rule, set: *s}
	if f.adds != nil {
		f.adds(&p.set)
	}
	before := p.set
	seen := map[string]bool{}
	for item := range strings.SplitSeq(rest, ",") {
		if !options {
			break
		}
		key, value, ok := strings.Cut(item, "=")
		k := slices.IndexFunc(f.keys, func(x setting) bool { return x.key == key })
		switch {
		case !ok:
			return nil, fmt.Errorf("policy %s: %q is no setting; write key=value", name, item)
		case k < 0:
			return nil, fmt.Errorf("policy %s: unknown key %q; it takes %s", name, key, strings.Join(f.keyNames(), ", "))
		case seen[key]:
			return nil, fmt.Errorf("policy %s: %s is set twice", name, key)
		}
		seen[key] = true
		v, err := f.keys[k].parse(value)
		if err != nil {
			return nil, fmt.Errorf("policy %s: %s: %w", name, item, err)
		}
		f.keys[k].set(&p.set, v)
	}
	if p.set.Patience > 0 && (p.set.Push != SPP || p.set.Load == 0) {
		return nil, fmt.Errorf("policy %s: patience=%g needs push=sp-p and a load above 0: without them it waits for replicas that are full for long", name, p.set.Patience)
	}
	p.spec = f.text(&before, &p.set)
	return p, nil
}

// text is what Parse makes the same policy of.
func (f *form) text(before, now *Settings) string {
	text, sep := f.name, ":"
	for i := range f.keys {
		if v := f.keys[i].get(now); v != f.keys[i].get(before) {
			text += sep + f.keys[i].key + "=" + f.keys[i].show(v)
			sep = ","
		}
	}
	return text
}

func (f *form) keyNames() []string {
	names := make([]string, len(f.keys))
	for i := range f.keys {
		names[i] = f.keys[i].key
	}
	return names
}

func (k *setting) parse(value string) (float64, error) {
	if k.words != nil {
		if i := slices.Index(k.words, value); i >= 0 {
			return float64(i), nil
		}
		return 0, fmt.Errorf("write one of %s", strings.Join(k.words, ", "))
	}
	v, err := strconv.ParseFloat(value, 64)
	if err != nil || !(v >= k.least && v <= k.most) || k.whole && v != math.Trunc(v) {
		kind := "number"
		if k.whole {
			kind = "whole number"
		}
		return 0, fmt.Errorf("write a %s from %g to %g", kind, k.least, k.most)
	}
	return v, nil
}

func (k *setting) show(v float64) string {
	if k.words != nil {
		return k.words[int(v)]
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}

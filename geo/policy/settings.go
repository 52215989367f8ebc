package policy

import (
	"fmt"
	"slices"

	"evenkeel/namedargs"
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
	Costs
}

// Costs weigh the terms that `finish` and `gorgo` compare.
type Costs struct {
	QS        float64 `yaml:"qs"`          // weight of the wait
	W         float64 `yaml:"w"`           // of the prefill
	Load      float64 `yaml:"load"`        // of the batch
	BMs       float64 `yaml:"b_ms"`        // a decode step grows by, per request in the batch
	MinGainMs float64 `yaml:"min_gain_ms"` // what a peer must be better by
	TPMs      float64 `yaml:"tp_ms"`       // of a token, before anything was learned
	T0Ms      float64 `yaml:"t0_ms"`
}

// Defaults are those of the config; Load is what `finish` has.
func Defaults() Settings {
	return Settings{
		Push: SPE, MaxUnanswered: 8, MaxOutstanding: 64, CreditMax: 32, Tau: 4,
		Costs: Costs{QS: 1, W: 1, Load: 50, BMs: 0.06, MinGainMs: 10, TPMs: 0.0938, T0Ms: 150.72},
	}
}

type setting = namedargs.Key[Settings]

// unbounded is a limit that no setting needs.
const unbounded = 1e6

// pushKeys are those of every policy, costKeys those of what compares costs.
var (
	pushKeys = []setting{
		namedargs.Words("push", func(s *Settings) *Push { return &s.Push }, func(i int) Push { return Push(i) }, pushWords...),
		namedargs.Whole("max_unanswered", 1, unbounded, func(s *Settings) *int { return &s.MaxUnanswered }),
		namedargs.Whole("max_outstanding", 1, unbounded, func(s *Settings) *int { return &s.MaxOutstanding }),
		namedargs.Whole("credit_max", 1, unbounded, func(s *Settings) *int { return &s.CreditMax }),
	}
	tauKeys  = []setting{namedargs.Whole("tau", 0, unbounded, func(s *Settings) *int { return &s.Tau })}
	costKeys = []setting{
		namedargs.Number("qs", 0, unbounded, func(s *Settings) *float64 { return &s.QS }),
		namedargs.Number("w", 0, unbounded, func(s *Settings) *float64 { return &s.W }),
		namedargs.Number("load", 0, unbounded, func(s *Settings) *float64 { return &s.Load }),
		namedargs.Number("b_ms", 0, unbounded, func(s *Settings) *float64 { return &s.BMs }),
		namedargs.Number("min_gain_ms", 0, unbounded, func(s *Settings) *float64 { return &s.MinGainMs }),
	}
	patienceKeys = []setting{namedargs.Number("patience", 0, unbounded, func(s *Settings) *float64 { return &s.Patience })}
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
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return nil, err
	}
	f := &forms[slices.IndexFunc(forms, func(f form) bool { return f.name == name })]
	p := &Policy{name: f.name, rule: f.rule, set: *s}
	if f.adds != nil {
		f.adds(&p.set)
	}
	before := p.set
	if err := namedargs.Apply(name, f.keys, &p.set, set...); err != nil {
		return nil, err
	}
	if p.set.Patience > 0 && (p.set.Push != SPP || p.set.Load == 0) {
		return nil, fmt.Errorf("policy %s: patience=%g needs push=sp-p and a load above 0: without them it waits for replicas that are full for long", name, p.set.Patience)
	}
	p.spec = namedargs.Text(name, f.keys, &p.set, &before)
	return p, nil
}

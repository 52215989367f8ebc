package policy

import (
	"math/rand/v2"
	"slices"

	"evenkeel/dispatcher/rounds"
	"evenkeel/internal/namedargs"
)

// form is a policy, or a preset of one, that a user can name: its name, the keys that may be set, and their defaults.
type form struct {
	name     string
	presets  []string // keys that the preset sets and a user cannot
	keys     []key    // keys that a user may set
	defaults settings
	build    func(name string, v *settings) Policy
}

var commonDefaults = settings{window: 8, theta: groupSize, maxAgeMs: 30_000, watermark: 0.05, ahead: true, margin: 2, seed: 1}

var brhDefaults = changed(commonDefaults, func(v *settings) {
	v.horizon, v.alpha, v.beta, v.gamma = auto, 1, 48, 0.9
	v.predictor, v.tau, v.every = "survival", 0.5, 20
})

var evenkeelDefaults = changed(commonDefaults, func(v *settings) {
	v.candidates, v.budget, v.pairs, v.refill = 128, 4000, 24, 200
	v.kappa, v.ageWeight, v.requests = 0.6, auto, true
	v.near, v.hold = 0.01, 3
	v.patience, v.maxHold = rounds.Default.Patience, rounds.Default.MaxHold
})

// forms are all policies and presets, in the order in which a user sees them.
var forms = slices.Concat([]form{
	{
		name: "br0", keys: keysNamed("window", "theta", "queue", "order", "max_age_ms", "ahead", "watermark"),
		defaults: commonDefaults, build: newBR0,
	},
	{
		name: "br0:paper", keys: keysNamed("window", "theta", "order", "watermark"), presets: []string{"queue", "max_age_ms", "ahead"},
		defaults: changed(commonDefaults, func(v *settings) { v.capacity, v.maxAgeMs, v.ahead = true, 0, false }), build: newPaper,
	},
	{
		name: "br0:bypass", keys: keysNamed("margin", "max_age_ms", "watermark"),
		defaults: commonDefaults, build: newBypass,
	},
	{
		name: "brh",
		keys: keysNamed("window", "theta", "queue", "order", "horizon", "alpha", "beta", "gamma",
			"predictor", "tau", "every", "decrement_anchor", "max_age_ms", "ahead", "watermark"),
		defaults: brhDefaults, build: newBRH,
	},
	{
		name: "brh:paper",
		keys: keysNamed("window", "theta", "order", "horizon", "alpha", "beta", "gamma",
			"predictor", "tau", "every", "watermark"),
		presets:  []string{"queue", "max_age_ms", "ahead", "decrement_anchor"},
		defaults: changed(brhDefaults, func(v *settings) { v.capacity, v.maxAgeMs, v.ahead, v.decrement, v.horizon = true, 0, false, true, 80 }),
		build: func(name string, v *settings) Policy {
			p := newBRH(name, v).(*greedy)
			p.guard = false
			return p
		},
	},
	{
		name: "evenkeel",
		keys: keysNamed("budget", "kappa", "age_weight", "hold", "patience", "max_hold", "requests", "near", "max_age_ms", "ahead",
			"watermark"),
		defaults: evenkeelDefaults, build: newEvenkeel,
	},
}, simpleForms("random", ruleRandom, "seed"), simpleForms("rr", ruleRR), simpleForms("p2c", ruleP2C, "seed"),
	simpleForms("jsq", ruleJSQ), simpleForms("jsq-kv", ruleJSQKV))

func changed(v settings, change func(*settings)) settings {
	change(&v)
	return v
}

// newBR0 makes the policy BR-0 of the BalanceRoute paper, with a starvation guard, which the paper does not have.
func newBR0(name string, v *settings) Policy {
	return &greedy{
		name: name, window: v.window, theta: v.theta, slotsFirst: v.capacity, longest: v.longest,
		guard: true, maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark, sendsAhead: v.ahead,
		ranks: ranks{anyRank: true}, // the golden vectors of BR-0 reserve ranks in this way
	}
}

// newBRH makes the policy BR-H of the BalanceRoute paper: it is BR-0 with a score over all steps up to a horizon, where BR-0 looks only at
// the present step.
func newBRH(name string, v *settings) Policy {
	p := newBR0(name, v).(*greedy)
	p.ahead = &ahead{
		horizon: v.horizon, alpha: v.alpha, beta: v.beta, gamma: v.gamma,
		fixedNeeds: Requirements{Predictor: v.predictor, Tau: v.tau, Every: v.every, DecrementAnchor: v.decrement},
	}
	return p
}

// newPaper makes BR-0 as in the paper: without a starvation guard, even if the snapshot has a MaxAgeMs or an urgent entry.
func newPaper(name string, v *settings) Policy {
	p := newBR0(name, v).(*greedy)
	p.guard = false
	return p
}

func newBypass(name string, v *settings) Policy {
	return &firstCome{
		name: name, rule: ruleLeastF, immediate: true, extra: v.margin,
		maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark,
	}
}

// simpleForms returns the immediate and the pooled form of a rule.
func simpleForms(name string, r rule, keys ...string) []form {
	dice := func(seed uint64) *rand.PCG { return rand.NewPCG(seed, seed^0x9e3779b97f4a7c15) }
	return []form{
		{
			name: name, keys: keysNamed(keys...), defaults: commonDefaults,
			build: func(name string, v *settings) Policy {
				return &firstCome{name: name, rule: r, immediate: true, queues: true, dice: dice(v.seed), lastRank: none}
			},
		},
		{
			name: "p" + name, keys: keysNamed(append(slices.Clone(keys), "max_age_ms", "ahead", "watermark")...), defaults: commonDefaults,
			build: func(name string, v *settings) Policy {
				return &firstCome{
					name: name, rule: r, dice: dice(v.seed), lastRank: none,
					maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark, sendsAhead: v.ahead,
				}
			},
		},
	}
}

// Names lists every policy and preset.
func Names() []string {
	names := make([]string, len(forms))
	for i := range forms {
		names[i] = forms[i].name
	}
	return names
}

// Spec is a policy that a user has written as text, parsed and checked.
type Spec struct {
	form   *form
	values settings
	set    []string // keys that were set
}

// ParseSpec parses the text of one policy, in the syntax of package namedargs.
func ParseSpec(text string) (Spec, error) {
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return Spec{}, err
	}
	at := slices.IndexFunc(forms, func(f form) bool { return f.name == name })
	sp := Spec{form: &forms[at], values: forms[at].defaults}
	for _, s := range set {
		if sp, err = sp.With(s.Key, s.Value); err != nil {
			return Spec{}, err
		}
	}
	return sp, nil
}

// Accepts reports whether the policy has the key.
func (sp Spec) Accepts(key string) bool { return namedargs.Has(sp.form.keys, key) }

// Sets reports whether the text or the preset sets the key.
func (sp Spec) Sets(key string) bool {
	return slices.Contains(sp.set, key) || slices.Contains(sp.form.presets, key)
}

// With returns the spec with a key set to a value, which replaces any earlier value.
func (sp Spec) With(key, value string) (Spec, error) {
	if err := namedargs.Apply(sp.form.name, sp.form.keys, &sp.values, namedargs.Setting{Key: key, Value: value}); err != nil {
		return Spec{}, err
	}
	if !slices.Contains(sp.set, key) {
		sp.set = append(slices.Clone(sp.set), key)
	}
	return sp, nil
}

// String returns the canonical form: the name, and the keys whose values differ from the defaults.
func (sp Spec) String() string {
	return namedargs.Text(sp.form.name, sp.form.keys, &sp.values, &sp.form.defaults)
}

// Build makes a fresh policy.
func (sp Spec) Build() Policy {
	return sp.form.build(sp.String(), &sp.values)
}

// Parse builds the policy that the text names.
func Parse(text string) (Policy, error) {
	sp, err := ParseSpec(text)
	if err != nil {
		return nil, err
	}
	return sp.Build(), nil
}

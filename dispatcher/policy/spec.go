package policy

import (
	"math/rand/v2"
	"slices"

	"evenkeel/dispatcher/rounds"
	"evenkeel/internal/namedargs"
)

// namedPolicy is a policy that a user can name, or a preset of one.
type namedPolicy struct {
	name     string
	presets  []string // keys that the preset fixes
	keys     []key    // keys that a user may set
	defaults settings
	build    func(name string, v *settings) Policy
}

var commonDefaults = settings{window: 8, theta: thetaIsRankCount, maxAgeMs: 30_000, watermark: 0.05, sendsAhead: true, margin: 2, seed: 1}

var brhDefaults = withChange(commonDefaults, func(v *settings) {
	v.horizon, v.alpha, v.beta, v.gamma = auto, 1, 48, 0.9
	v.predictor, v.tau, v.every = "survival", 0.5, 20
})

var evenkeelDefaults = withChange(commonDefaults, func(v *settings) {
	v.extraCandidates, v.budget, v.bestPairMax, v.workerFirstMax = 128, 4000, 24, 200
	v.kappa, v.ageWeight, v.countRequests = 0.6, auto, true
	v.holdSteps = 3
	v.patience, v.maxHoldS = rounds.Default.Patience, rounds.Default.MaxHold
})

// namedPolicies are in the order in which lists show them.
var namedPolicies = slices.Concat([]namedPolicy{
	{
		name: "br0", keys: keysNamed("window", "theta", "queue", "order", "max_age_ms", "ahead", "watermark"),
		defaults: commonDefaults, build: newBR0,
	},
	{
		name: "br0:paper", keys: keysNamed("window", "theta", "order", "watermark"), presets: []string{"queue", "max_age_ms", "ahead"},
		defaults: withChange(commonDefaults, func(v *settings) { v.slotsFirst, v.maxAgeMs, v.sendsAhead = true, 0, false }), build: newPaper,
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
		presets: []string{"queue", "max_age_ms", "ahead", "decrement_anchor"},
		defaults: withChange(brhDefaults, func(v *settings) {
			v.slotsFirst, v.maxAgeMs, v.sendsAhead, v.decrement, v.horizon = true, 0, false, true, 80
		}),
		build: func(name string, v *settings) Policy {
			p := newBRH(name, v).(*greedy)
			p.overdueFirst = false
			return p
		},
	},
	{
		name:     "evenkeel",
		keys:     keysNamed("budget", "kappa", "age_weight", "hold", "patience", "max_hold", "requests", "max_age_ms", "ahead", "watermark"),
		defaults: evenkeelDefaults, build: newEvenkeel,
	},
}, ruleForms("random", ruleRandom, "seed"), ruleForms("rr", ruleRR), ruleForms("p2c", ruleP2C, "seed"),
	ruleForms("jsq", ruleJSQ), ruleForms("jsq-kv", ruleJSQKV))

func withChange(v settings, change func(*settings)) settings {
	change(&v)
	return v
}

// newBR0 makes BR-0 of the BalanceRoute paper, and adds a starvation guard, which the paper does
// not have. For an overdue entry that fits no rank, it reserves the rank with the most KV room of
// all (mostRoomOfAll), even one that the entry would not fit when idle, because the golden vectors,
// recorded decisions that tests compare with, do so.
func newBR0(name string, v *settings) Policy {
	return &greedy{
		name: name, window: v.window, theta: v.theta, slotsFirst: v.slotsFirst, longestFirst: v.longestFirst,
		overdueFirst: true, maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark, sendsAhead: v.sendsAhead,
		ranks: ranks{mostRoomOfAll: true},
	}
}

// newBRH makes BR-H of the BalanceRoute paper: BR-0 with a score over all steps up to a horizon.
// The loads of the later steps follow from predictions of when running requests end.
func newBRH(name string, v *settings) Policy {
	p := newBR0(name, v).(*greedy)
	p.lookahead = &lookahead{
		horizon: v.horizon, alpha: v.alpha, beta: v.beta, gamma: v.gamma,
		fixedNeeds: Requirements{Predictor: v.predictor, Tau: v.tau, Every: v.every, DecrementAnchor: v.decrement},
	}
	return p
}

// newPaper has no starvation guard, even if the snapshot has a MaxAgeMs or an urgent entry.
func newPaper(name string, v *settings) Policy {
	p := newBR0(name, v).(*greedy)
	p.overdueFirst = false
	return p
}

// newBypass sends each entry at once to the rank with the best score of BR-0, and lets engines
// queue a few.
func newBypass(name string, v *settings) Policy {
	return &firstCome{
		name: name, rule: ruleLeastF, immediate: true, extraSlots: v.margin,
		maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark,
	}
}

// ruleForms returns both forms of a first-come rule: the immediate one, and the pooled one, whose
// name begins with p.
func ruleForms(name string, r rule, keys ...string) []namedPolicy {
	// The second seed of a PCG must differ from the first.
	dice := func(seed uint64) *rand.PCG { return rand.NewPCG(seed, seed^0x9e3779b97f4a7c15) }
	return []namedPolicy{
		{
			name: name, keys: keysNamed(keys...), defaults: commonDefaults,
			build: func(name string, v *settings) Policy {
				return &firstCome{name: name, rule: r, immediate: true, engineQueues: true, dice: dice(v.seed), lastRank: none}
			},
		},
		{
			name: "p" + name, keys: keysNamed(append(slices.Clone(keys), "max_age_ms", "ahead", "watermark")...), defaults: commonDefaults,
			build: func(name string, v *settings) Policy {
				return &firstCome{
					name: name, rule: r, dice: dice(v.seed), lastRank: none,
					maxAgeMs: float32(v.maxAgeMs), watermark: v.watermark, sendsAhead: v.sendsAhead,
				}
			},
		},
	}
}

// Names returns all policies and presets, in the order in which users see them.
func Names() []string {
	names := make([]string, len(namedPolicies))
	for i := range namedPolicies {
		names[i] = namedPolicies[i].name
	}
	return names
}

// Spec is a policy that a user has named in text, checked.
type Spec struct {
	form   *namedPolicy
	values settings
	set    []string // keys that the text sets
}

// ParseSpec parses name or name:key=value,... (see package namedargs).
func ParseSpec(text string) (Spec, error) {
	name, set, err := namedargs.Parse(text, Names())
	if err != nil {
		return Spec{}, err
	}
	at := slices.IndexFunc(namedPolicies, func(f namedPolicy) bool { return f.name == name })
	sp := Spec{form: &namedPolicies[at], values: namedPolicies[at].defaults}
	for _, s := range set {
		if sp, err = sp.With(s.Key, s.Value); err != nil {
			return Spec{}, err
		}
	}
	return sp, nil
}

// Accepts reports whether a user may set this key for the policy.
func (sp Spec) Accepts(key string) bool { return namedargs.Has(sp.form.keys, key) }

// Sets reports whether the text or the preset sets the key.
func (sp Spec) Sets(key string) bool {
	return slices.Contains(sp.set, key) || slices.Contains(sp.form.presets, key)
}

// With returns a copy of the spec with a key set to a value.
func (sp Spec) With(key, value string) (Spec, error) {
	if err := namedargs.Apply(sp.form.name, sp.form.keys, &sp.values, namedargs.Setting{Key: key, Value: value}); err != nil {
		return Spec{}, err
	}
	if !slices.Contains(sp.set, key) {
		sp.set = append(slices.Clone(sp.set), key)
	}
	return sp, nil
}

// String returns the canonical form, with only the keys whose values differ from the defaults.
func (sp Spec) String() string {
	return namedargs.Text(sp.form.name, sp.form.keys, &sp.values, &sp.form.defaults)
}

// Build makes a new policy, which shares no state with others.
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

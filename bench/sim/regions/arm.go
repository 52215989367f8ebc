package regions

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"evenkeel/geo"
	"evenkeel/geo/policy"
	"evenkeel/internal/namedargs"
	"evenkeel/prefill"
	prefillpolicy "evenkeel/prefill/policy"
)

// arm is what is compared: the policy between regions and the one that chooses
// among a dispatcher's own replicas, and where they run. Besides the policies of the
// server there are balancers of other kinds.
type arm struct {
	name     string // as the user wrote it
	policy   string // geo.policy, as the server takes it
	prefill  string // prefill.policy; empty: the server's default
	push     policy.Push
	central  bool    // one dispatcher, in the first region, with the replicas of all
	alone    bool    // dispatchers know no peers
	probeMs  float64 // 0: the scenario's
	replicas int     // of all regions; 0: the scenario's
	blindTo  string  // what it is not told
}

// others are the arms that are no policy of the server. Where all replicas are one
// dispatcher's, prefill.policy chooses among them, and the policy between regions
// says only whether there is room for one more request.
var others = []arm{
	{name: "rr", policy: "round-robin", prefill: "round-robin", push: policy.Blind, central: true},
	{name: "central-least-load", policy: "least-load", prefill: "least-load", push: policy.Blind, central: true},
	{name: "ch", policy: "skylb-ch", prefill: "sticky-ring", push: policy.Blind, central: true},
	{name: "prefix-blind", policy: "skylb", prefill: "sglang", push: policy.Blind, central: true},
	{name: "central-queue", policy: "skylb", prefill: longest, push: policy.SPP, central: true},
	{name: "central-gorgo", policy: "gorgo", prefill: "gorgo", push: policy.SPE, central: true},
	{name: "region-local", policy: "local-only", push: policy.SPE, alone: true},
	{name: "skylb-local", policy: "skylb", push: policy.SPP, alone: true},
}

// longest goes where most of a prompt is cached, whatever else is there.
const longest = "bailian:lambda=1"

// definitions are the balancers that prefill.policy can be taught. SGLang's router of
// early 2025 takes the shortest queue when loads are 32 apart, else the longest match
// if that is half of the prompt, else whoever holds least.
var definitions = map[string]prefillpolicy.Definition{
	"least-load": {Score: "kv_tokens", TieBreak: []string{"kv_tokens"}},
	"sglang":     {Score: "max_bs - min_bs > 32 ? bs : (hit_ratio > 0.5 ? -hit_ratio : kv_tokens)", TieBreak: []string{"kv_tokens"}},
}

// Arms lists what may be compared.
func Arms() []string {
	names := policy.Names()
	for i := range others {
		names = append(names, others[i].name)
	}
	return names
}

// simKeys are what the arms take beside the keys of their policy.
var simKeys = []namedargs.Key[arm]{
	{
		Name: "prefill", Must: "a prefill policy",
		Read: func(a *arm, text string) bool { a.prefill = text; return true }, // check has the server read it
		Show: func(a *arm) string { return a.prefill },
	},
	namedargs.Number("probe_ms", 10, 1e5, func(a *arm) *float64 { return &a.probeMs }),
	namedargs.Whole("replicas", 1, 512, func(a *arm) *int { return &a.replicas }),
	namedargs.Words("without", func(a *arm) *string { return &a.blindTo }, func(i int) string { return blindnesses[i] }, blindnesses...),
}

// blindnesses are what `without` keeps from an arm: of the costs of peers their wait or
// their round trip, or the guard of its own replicas, which is the KV gates and the
// detector of hotspots. A balancer of another kind has no such guard.
var blindnesses = []string{"wait", "rtt", "guard"}

// unguarded says that the arm hears nothing of the engines' memory, and watches no
// hotspots.
func (a *arm) unguarded() bool { return a.blindTo == "guard" }

// parseArm reads an arm in the language of the policies.
func parseArm(text string) (*arm, error) {
	name, set, err := namedargs.Parse(text, Arms())
	if err != nil {
		return nil, err
	}
	a := &arm{policy: name, push: policy.Defaults().Push}
	if at := slices.IndexFunc(others, func(o arm) bool { return o.name == name }); at >= 0 {
		*a = others[at]
	}
	a.name = strings.TrimSpace(text)
	separator := ":"
	for _, s := range set {
		if namedargs.Has(simKeys, s.Key) {
			if err := namedargs.Apply(name, simKeys, a, s); err != nil {
				return nil, err
			}
			continue
		}
		a.policy += separator + s.String()
		separator = ","
	}
	return a, a.check()
}

// config is the server's, by default, with the arm's policy.
func (a *arm) config() geo.Config {
	c := geo.Default()
	c.Policy, c.Push.Mode = a.policy, a.push.String()
	return c
}

// check has the server read both policies.
func (a *arm) check() error {
	c := a.config()
	s := c.Settings()
	if _, err := s.Parse(a.policy); err != nil {
		return fmt.Errorf("%s: %w (here also prefill, probe_ms, replicas, without)", a.name, err)
	}
	if err := (prefill.Config{Policy: a.prefill, Policies: definitions, Clock: time.Now}).Validate(); err != nil {
		return fmt.Errorf("%s: %w", a.name, err)
	}
	return nil
}

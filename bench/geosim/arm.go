package geosim

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"evenkeel/geo/policy"
)

// arm is what is compared: a policy, and where it runs. Besides the policies of
// the server there are balancers of other kinds.
type arm struct {
	name     string // as the user wrote it
	policy   string // as policy.Parse takes it
	settings policy.Settings
	central  bool    // one dispatcher, in the first region, with the replicas of all
	alone    bool    // dispatchers know no peers
	sglang   bool    // longest match unless the load is uneven, as SGLang's router
	probeMs  float64 // 0: the scenario's
	replicas int     // of all regions; 0: the scenario's
	blindTo  string  // what the costs of peers leave out
}

// others are the arms that are no policy of the server.
var others = []struct {
	name, policy string
	push         policy.Push
	central      bool
	alone        bool
	sglang       bool
}{
	{name: "rr", policy: "round-robin", push: policy.Blind, central: true},
	{name: "central-least-load", policy: "least-load", push: policy.Blind, central: true},
	{name: "ch", policy: "skylb-ch", push: policy.Blind, central: true},
	{name: "prefix-blind", policy: "skylb", push: policy.Blind, central: true, sglang: true},
	{name: "central-queue", policy: "skylb", push: policy.SPP, central: true},
	{name: "central-gorgo", policy: "gorgo", push: policy.SPE, central: true},
	{name: "region-local", policy: "local-only", push: policy.SPE, alone: true},
	{name: "skylb-local", policy: "skylb", push: policy.SPP, alone: true},
}

// Arms lists what may be compared.
func Arms() []string {
	names := policy.Names()
	for i := range others {
		names = append(names, others[i].name)
	}
	return names
}

// What the arms take beside the keys of their policy.
const simKeys = "probe_ms, replicas, without"

// blindnesses are what `without` leaves out of the costs of peers.
var blindnesses = []string{"wait", "rtt"}

// parseArm reads name:key=value,...
func parseArm(text string) (*arm, error) {
	name, rest, options := strings.Cut(strings.TrimSpace(text), ":")
	a := &arm{name: strings.TrimSpace(text), policy: name, settings: policy.Defaults()}
	for i := range others {
		if o := &others[i]; o.name == name {
			a.policy, a.settings.Push, a.central, a.alone, a.sglang = o.policy, o.push, o.central, o.alone, o.sglang
		}
	}
	if !options {
		_, err := a.parse()
		return a, err
	}
	var keys []string
	for item := range strings.SplitSeq(rest, ",") {
		mine, err := a.take(item)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if !mine {
			keys = append(keys, item)
		}
	}
	if len(keys) > 0 {
		a.policy += ":" + strings.Join(keys, ",")
	}
	_, err := a.parse()
	return a, err
}

func (a *arm) parse() (*policy.Policy, error) {
	p, err := a.settings.Parse(a.policy)
	if err != nil {
		return nil, fmt.Errorf("%s: %w (here also %s; other arms are %s)", a.name, err, simKeys, strings.Join(Arms()[len(policy.Names()):], ", "))
	}
	return p, nil
}

// take reads a key that is the simulator's.
func (a *arm) take(item string) (mine bool, err error) {
	key, value, _ := strings.Cut(item, "=")
	switch key {
	case "probe_ms":
		if a.probeMs, err = strconv.ParseFloat(value, 64); err != nil || !(a.probeMs >= 10 && a.probeMs <= 1e5) {
			return true, fmt.Errorf("%s: write a number from 10 to 100000", item)
		}
	case "replicas":
		if a.replicas, err = strconv.Atoi(value); err != nil || a.replicas < 1 || a.replicas > 512 {
			return true, fmt.Errorf("%s: write a whole number from 1 to 512", item)
		}
	case "without":
		if a.blindTo = value; !slices.Contains(blindnesses, value) {
			return true, fmt.Errorf("%s: write one of %s", item, strings.Join(blindnesses, ", "))
		}
	default:
		return false, nil
	}
	return true, nil
}

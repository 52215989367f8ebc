package steer

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// needsLatency predicts when prefills end. While no latency is known, insteadWithoutLatency chooses
// in its place.
const (
	needsLatency          = "finish"
	insteadWithoutLatency = "lmetric"
)

// maxParsedPolicies bounds the cache, because each request may name a policy.
const maxParsedPolicies = 64

// Policies holds the default policy, and a cache of the policies that requests named.
type Policies struct {
	library        *policy.Library
	parsed         map[string]*policy.Policy // that requests named, by their text
	defaultPolicy  *policy.Policy            // for requests that name none
	withoutLatency *policy.Policy
}

// NewPolicies returns the built-in policies and those of the configuration. With forServing,
// policies that are only meant for simulations are refused.
func NewPolicies(definitions map[string]policy.Definition, defaultSpec string, forServing bool) (*Policies, error) {
	library, err := policy.NewLibrary(definitions)
	if err != nil {
		return nil, fmt.Errorf("prefill.policies: %w", err)
	}
	library.ForServing = forServing
	p := &Policies{library: library, parsed: map[string]*policy.Policy{}}
	if p.defaultPolicy, err = library.Parse(defaultSpec); err != nil {
		return nil, err
	}
	if p.withoutLatency, err = library.Parse(insteadWithoutLatency); err != nil {
		return nil, err
	}
	return p, nil
}

// Names lists the built-in policies, then those of the configuration.
func (p *Policies) Names() []string { return p.library.Names() }

func (p *Policies) Default() *policy.Policy { return p.defaultPolicy }

func (p *Policies) SetDefault(spec string) error {
	parsed, err := p.library.Parse(spec)
	if err == nil {
		p.defaultPolicy = parsed
	}
	return err
}

// Named returns the default policy for an empty spec.
func (p *Policies) Named(spec string) (*policy.Policy, error) {
	if spec == "" {
		return p.defaultPolicy, nil
	}
	if known := p.parsed[spec]; known != nil {
		return known, nil
	}
	parsed, err := p.library.Parse(spec)
	if err != nil {
		return nil, err
	}
	if len(p.parsed) >= maxParsedPolicies { // each is parsed again when a request names it
		clear(p.parsed)
	}
	p.parsed[spec] = parsed
	return parsed, nil
}

func (p *Policies) WithoutLatency(chosen *policy.Policy) *policy.Policy {
	if chosen.Name() == needsLatency {
		return p.withoutLatency
	}
	return chosen
}

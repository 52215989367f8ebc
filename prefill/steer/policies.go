package steer

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// The policy needsLatency predicts when prefills end. While no latency of prefills is known, the policy insteadWithoutLatency
// chooses in its place.
const (
	needsLatency          = "finish"
	insteadWithoutLatency = "lmetric"
)

// maxParsedPolicies bounds the cache of parsed policies, because each request may name a policy.
const maxParsedPolicies = 64

// Policies holds the policy for requests that name none, and a cache of the policies that requests named.
type Policies struct {
	library        *policy.Library
	parsed         map[string]*policy.Policy // policies that requests named, by their text
	defaultPolicy  *policy.Policy            // policy for requests that name none
	withoutLatency *policy.Policy            // lmetric, which chooses in place of finish while no latency is known
}

// NewPolicies returns the built-in policies together with the policies of the configuration (definitions). defaultSpec names the policy for
// requests that name none. With forServing, the policies are for real requests, and those that are only meant for simulations are refused.
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
	// The policy finish cannot choose before the latency of prefills is known. Until then, lmetric chooses in its place.
	if p.withoutLatency, err = library.Parse(insteadWithoutLatency); err != nil {
		return nil, err
	}
	return p, nil
}

// Names lists the built-in policies, then those of the configuration.
func (p *Policies) Names() []string { return p.library.Names() }

// Default is the policy for requests that name none.
func (p *Policies) Default() *policy.Policy { return p.defaultPolicy }

// SetDefault changes the policy for requests that name none.
func (p *Policies) SetDefault(spec string) error {
	parsed, err := p.library.Parse(spec)
	if err == nil {
		p.defaultPolicy = parsed
	}
	return err
}

// Named returns the policy that a request names by its spec; an empty spec means the default policy.
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
	if len(p.parsed) >= maxParsedPolicies { // drops them all: each is parsed again when a request names it
		clear(p.parsed)
	}
	p.parsed[spec] = parsed
	return parsed, nil
}

// WithoutLatency returns the policy that chooses in place of chosen while no latency of prefills is known.
func (p *Policies) WithoutLatency(chosen *policy.Policy) *policy.Policy {
	if chosen.Name() == needsLatency {
		return p.withoutLatency
	}
	return chosen
}

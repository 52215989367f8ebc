package steer

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// The policy needsLine predicts when prefills end. While no line of prefill times is known, the policy instead chooses in
// its place.
const (
	needsLatency = "finish"
	insteadWithoutLatency   = "lmetric"
)

// mostPolicies bounds the cache of parsed policies, because each request may name a policy.
const maxParsedPolicies = 64

// Policies holds the policy for requests that name none, and a cache of the policies that requests named.
type Policies struct {
	library *policy.Library
	parsed    map[string]*policy.Policy // the policies that requests named, by their text
	defaultPolicy   *policy.Policy            // for requests that name none
	withoutLatency  *policy.Policy            // chooses in place of needsLine while no line is known
}

// NewPolicies returns the built-in policies together with the policies of the configuration. serves is false in a
// simulation.
func NewPolicies(definitions map[string]policy.Definition, usual string, serves bool) (*Policies, error) {
	library, err := policy.NewLibrary(definitions)
	if err != nil {
		return nil, fmt.Errorf("prefill.policies: %w", err)
	}
	library.ForServing = serves
	p := &Policies{library: library, parsed: map[string]*policy.Policy{}}
	if p.defaultPolicy, err = library.Parse(usual); err != nil {
		return nil, err
	}
	if p.withoutLatency, err = library.Parse(insteadWithoutLatency); err != nil {
		return nil, err
	}
	return p, nil
}

// Names are the names of all policies.
func (p *Policies) Names() []string { return p.library.Names() }

// Usual is the policy for requests that name none.
func (p *Policies) Default() *policy.Policy { return p.defaultPolicy }

// Use changes the policy for requests that name none.
func (p *Policies) SetDefault(spec string) error {
	usual, err := p.library.Parse(spec)
	if err == nil {
		p.defaultPolicy = usual
	}
	return err
}

// Named returns the policy that a request names by its spec; an empty spec means the usual policy.
func (p *Policies) Named(spec string) (*policy.Policy, error) {
	if spec == "" {
		return p.defaultPolicy, nil
	}
	if made := p.parsed[spec]; made != nil {
		return made, nil
	}
	made, err := p.library.Parse(spec)
	if err != nil {
		return nil, err
	}
	if len(p.parsed) >= maxParsedPolicies {
		clear(p.parsed)
	}
	p.parsed[spec] = made
	return made, nil
}

// WithoutLine returns the policy that chooses in place of chosen while no line of prefill times is known.
func (p *Policies) WithoutLatency(chosen *policy.Policy) *policy.Policy {
	if chosen.Name() == needsLatency {
		return p.withoutLatency
	}
	return chosen
}

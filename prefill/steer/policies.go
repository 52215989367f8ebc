package steer

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// The policy needsLine predicts when prefills end. While no line of prefill times is known, the policy instead chooses in
// its place.
const (
	needsLine = "finish"
	instead   = "lmetric"
)

// mostPolicies bounds the cache of parsed policies, because each request may name a policy.
const mostPolicies = 64

// Policies holds the policy for requests that name none, and a cache of the policies that requests named.
type Policies struct {
	library *policy.Library
	made    map[string]*policy.Policy // the policies that requests named, by their text
	usual   *policy.Policy            // for requests that name none
	noLine  *policy.Policy            // chooses in place of needsLine while no line is known
}

// NewPolicies returns the built-in policies together with the policies of the configuration. serves is false in a
// simulation.
func NewPolicies(definitions map[string]policy.Definition, usual string, serves bool) (*Policies, error) {
	library, err := policy.NewLibrary(definitions)
	if err != nil {
		return nil, fmt.Errorf("prefill.policies: %w", err)
	}
	library.Serves = serves
	p := &Policies{library: library, made: map[string]*policy.Policy{}}
	if p.usual, err = library.Parse(usual); err != nil {
		return nil, err
	}
	if p.noLine, err = library.Parse(instead); err != nil {
		return nil, err
	}
	return p, nil
}

// Names are the names of all policies.
func (p *Policies) Names() []string { return p.library.Names() }

// Usual is the policy for requests that name none.
func (p *Policies) Usual() *policy.Policy { return p.usual }

// Use changes the policy for requests that name none.
func (p *Policies) Use(spec string) error {
	usual, err := p.library.Parse(spec)
	if err == nil {
		p.usual = usual
	}
	return err
}

// Named returns the policy that a request names by its spec; an empty spec means the usual policy.
func (p *Policies) Named(spec string) (*policy.Policy, error) {
	if spec == "" {
		return p.usual, nil
	}
	if made := p.made[spec]; made != nil {
		return made, nil
	}
	made, err := p.library.Parse(spec)
	if err != nil {
		return nil, err
	}
	if len(p.made) >= mostPolicies {
		clear(p.made)
	}
	p.made[spec] = made
	return made, nil
}

// WithoutLine returns the policy that chooses in place of chosen while no line of prefill times is known.
func (p *Policies) WithoutLine(chosen *policy.Policy) *policy.Policy {
	if chosen.Name() == needsLine {
		return p.noLine
	}
	return chosen
}

package steer

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// needsLine is the policy that predicts when prefills end, and instead is the policy that chooses in its place while
// no line of prefill times is known.
const (
	needsLine = "finish"
	instead   = "lmetric"
)

// mostPolicies bounds how many policies are kept that requests named.
const mostPolicies = 64

// Policies are the policies that choose: the usual one, for requests that name none, and those that requests named.
type Policies struct {
	library *policy.Library
	made    map[string]*policy.Policy
	usual   *policy.Policy // of requests that name none
	noLine  *policy.Policy // chooses in place of finish while no line is known
}

// NewPolicies knows the built-in policies and those that a user defines. serves is false in a simulation.
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

// Usual is the policy of requests that name none.
func (p *Policies) Usual() *policy.Policy { return p.usual }

// Use changes the policy of requests that name none.
func (p *Policies) Use(spec string) error {
	usual, err := p.library.Parse(spec)
	if err == nil {
		p.usual = usual
	}
	return err
}

// Named returns the policy of a spec, the usual one for an empty spec. It makes a policy when it is first named.
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

// WithoutLine returns the policy that chooses in place of another while no line of prefill times is known.
func (p *Policies) WithoutLine(of *policy.Policy) *policy.Policy {
	if of.Name() == needsLine {
		return p.noLine
	}
	return of
}

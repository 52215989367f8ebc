package prefill

import (
	"fmt"

	"evenkeel/prefill/policy"
)

// needsLine is the policy that predicts ends, and instead the one that needs no
// prediction: it chooses while no line of prefill times is known.
const (
	needsLine = "finish"
	instead   = "lmetric"
)

// mostPolicies bounds the policies kept for requests that name their own.
const mostPolicies = 64

// policies are those that requests may name, made when they are first named.
type policies struct {
	library *policy.Library
	made    map[string]*policy.Policy
}

func newPolicies(definitions map[string]policy.Definition) (*policies, error) {
	library, err := policy.NewLibrary(definitions)
	if err != nil {
		return nil, fmt.Errorf("prefill.policies: %w", err)
	}
	return &policies{library, map[string]*policy.Policy{}}, nil
}

// named returns the policy that is written so.
func (p *policies) named(spec string) (*policy.Policy, error) {
	if made := p.made[spec]; made != nil {
		return made, nil
	}
	made, err := p.library.Parse(spec)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadPolicy, err)
	}
	if len(p.made) >= mostPolicies {
		clear(p.made)
	}
	p.made[spec] = made
	return made, nil
}

// all makes policies for themselves, one for each of the specs.
func (p *policies) all(specs []string) ([]*policy.Policy, error) {
	made := make([]*policy.Policy, 0, len(specs))
	for _, spec := range specs {
		one, err := p.library.Parse(spec)
		if err != nil {
			return nil, fmt.Errorf("prefill.shadow: %w", err)
		}
		made = append(made, one)
	}
	return made, nil
}

// CheckPolicy says what is wrong with a policy that a request names.
func (t *Tier) CheckPolicy(spec string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, err := t.policies.named(spec)
	return err
}

// SetPolicy changes the policy of requests that name none.
func (t *Tier) SetPolicy(spec string) error {
	t.lock()
	defer t.unlock()
	p, err := t.policies.library.Parse(spec)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBadPolicy, err)
	}
	t.policy = p
	return nil
}

// Policy is the present policy of requests that name none.
func (t *Tier) Policy() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.policy.String()
}

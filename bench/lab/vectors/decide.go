package vectors

import (
	"fmt"

	"evenkeel/dispatcher/policy"
)

// Report is what `evenkeel decide` prints: one round on a dumped snapshot.
type Report struct {
	Policy      string              `json:"policy"`
	Assignments []policy.Assignment `json:"assignments"`
	Left        []policy.Unplaced   `json:"left"`
}

// Decide runs one round of a policy on a snapshot as ReadSnapshot takes it.
// Parameters of the snapshot stand where policySpec sets none; an empty
// policySpec is the snapshot's own policy.
func Decide(snapshotJSON []byte, policySpec string) (Report, error) {
	s, params, err := ReadSnapshot(snapshotJSON)
	if err != nil {
		return Report{}, err
	}
	own := policySpec == ""
	if own {
		policySpec = params.Policy
	}
	if policySpec == "" {
		return Report{}, fmt.Errorf("the snapshot names no policy: give one of %v", policy.Names())
	}
	sp, err := policy.ParseSpec(policySpec)
	if err != nil {
		return Report{}, err
	}
	// What the snapshot says is the guard in force when it was taken; only a
	// policy that is asked for in its place has its own.
	recorded := params.MaxAgeMs != nil && (own || !sp.Sets("max_age_ms"))
	if sp, err = params.Complete(sp); err != nil {
		return Report{}, err
	}
	p := sp.Build()
	if !recorded {
		s.MaxAgeMs = p.MaxAgeMs()
	}
	assigned, left := policy.Explain(p, &s)
	// never null
	return Report{Policy: p.Name(), Assignments: append([]policy.Assignment{}, assigned...), Left: append([]policy.Unplaced{}, left...)}, nil
}

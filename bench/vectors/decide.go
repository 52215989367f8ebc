package vectors

import (
	"fmt"

	"evenkeel/dispatcher/policy"
)

// Report is what `evenkeel decide` prints: one round on a dumped snapshot.
type Report struct {
	Policy      string      `json:"policy"`
	Assignments []Admission `json:"assignments"`
	Left        []Left      `json:"left"`
}

// Admission is one entry placed. Stage 0 is the starvation guard.
type Admission struct {
	Entry  uint64  `json:"entry"`
	Worker int32   `json:"worker"`
	Score  float64 `json:"score"`
	Stage  uint8   `json:"stage"`
}

// Left is one entry that stays in the pool, and why.
type Left struct {
	Entry uint64 `json:"entry"`
	Why   string `json:"why"`
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
	r := Report{Policy: p.Name(), Assignments: make([]Admission, len(assigned)), Left: make([]Left, len(left))}
	for i, a := range assigned {
		r.Assignments[i] = Admission(a)
	}
	for i, l := range left {
		r.Left[i] = Left(l)
	}
	return r, nil
}

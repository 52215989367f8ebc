// Package fakes has policies for tests of the code that calls policies.
package fakes

import (
	"errors"
	"slices"

	"evenkeel/dispatcher/policy"
)

// Policy is a policy made for a test, which decides by calling Decides.
type Policy struct {
	Spec    string
	AtOnce  bool // what Immediate returns
	AgeMs   float32
	Decides func(*policy.Snapshot, []policy.Assignment) []policy.Assignment
}

// Name returns Spec.
func (f *Policy) Name() string { return f.Spec }

// Immediate returns AtOnce.
func (f *Policy) Immediate() bool { return f.AtOnce }

// MaxAgeMs returns AgeMs.
func (f *Policy) MaxAgeMs() float32 { return f.AgeMs }

// Decide calls Decides.
func (f *Policy) Decide(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
	return f.Decides(s, dst)
}

// LeastKV returns a function for Policy.Decides that sends the entries, oldest first, to the rank
// with the fewest KV tokens. If immediate is false, it sends entries only to ranks with a free slot
// and room for the prompt.
func LeastKV(immediate bool) func(*policy.Snapshot, []policy.Assignment) []policy.Assignment {
	var kv []int64
	var free []int32
	return func(s *policy.Snapshot, dst []policy.Assignment) []policy.Assignment {
		kv, free = kv[:0], free[:0]
		for i := range s.Workers {
			var sum int64
			for j := range s.Workers[i].Running {
				sum += s.Workers[i].Running[j].Tokens()
			}
			kv, free = append(kv, sum), append(free, s.Workers[i].Free)
		}
		for _, e := range s.Pool {
			best := -1
			for i, w := range s.Workers {
				hasRoom := free[i] > 0 && (w.Capacity == 0 || kv[i]+int64(e.Prompt) <= w.Capacity)
				if w.Up && (immediate || hasRoom) && (best < 0 || kv[i] < kv[best]) {
					best = i
				}
			}
			if best >= 0 {
				kv[best] += int64(e.Prompt)
				free[best]--
				dst = append(dst, policy.Assignment{Entry: e.ID, Worker: s.Workers[best].ID, Stage: 1})
			}
		}
		return dst
	}
}

// Parser returns a function that builds the policies of tests by name. It looks for the name in
// extra first. Then it knows "immediate", and builds a policy that waits for free slots for the
// name "pooled" and for the name in fallback.
func Parser(fallback string, extra ...*Policy) func(string) (policy.Policy, error) {
	return func(spec string) (policy.Policy, error) {
		if i := slices.IndexFunc(extra, func(f *Policy) bool { return f.Spec == spec }); i >= 0 {
			return extra[i], nil
		}
		switch spec {
		case "pooled", fallback:
			return &Policy{Spec: spec, Decides: LeastKV(false)}, nil
		case "immediate":
			return &Policy{Spec: spec, AtOnce: true, Decides: LeastKV(true)}, nil
		}
		return nil, errors.New("no such policy: " + spec)
	}
}

package config

import (
	"errors"

	"evenkeel/prefill/policy"
)

// checkPolicies compiles the user's prefill policies. Of a wrong one it says in
// which line and column of the file; the library is nil then.
func (c *Config) checkPolicies(bad report) *policy.Library {
	library, err := policy.NewLibrary(c.Prefill.Policies)
	if err == nil {
		return library
	}
	for _, err := range flatten(err) {
		var wrong *policy.DefinitionError
		if !errors.As(err, &wrong) {
			bad("$.prefill.policies", "%v", err)
			continue
		}
		path := "$.prefill.policies." + wrong.Policy
		if wrong.Key != "name" {
			path += "." + wrong.Key
		}
		bad(path, "%s", wrong.Where())
	}
	return nil
}

// flatten takes joined errors apart.
func flatten(err error) (all []error) {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	for _, e := range joined.Unwrap() {
		all = append(all, flatten(e)...)
	}
	return all
}

package dispatcher

import (
	"errors"
	"slices"
	"time"

	"evenkeel/dispatcher/twin"
	"evenkeel/dispatcher/verdict"
)

// errAuto is why a running dispatcher does not leave its policy to the twin.
var errAuto = errors.New("dispatcher: the twin chooses only among the policies that dispatch.policy had at the start; restart with this list, or name one policy")

// auto is a policy that is left to the twin. The loop owns it.
type auto struct {
	specs   []string
	on      bool // until an operator names one policy
	changes uint64
	at      time.Time // of the last change
	why     string
}

// named takes in what an operator wants the policy to be, and returns which one is to be put in force; empty:
// the one in force stays.
func (a *auto) named(spec string) (now string, err error) {
	specs, left := twin.Auto(spec)
	switch {
	case left && (a == nil || !slices.Equal(specs, a.specs)):
		return "", errAuto
	case left:
		return "", nil
	}
	return spec, nil
}

// list is what the twin chooses from.
func (a *auto) list() []string {
	if a == nil {
		return nil
	}
	return a.specs
}

// turn notes what an operator named, once it is in force.
func (a *auto) turn(spec string) {
	if a != nil && spec != "" {
		_, a.on = twin.Auto(spec)
	}
}

// status is what people see of it; nil: the policy is not left to the twin.
func (a *auto) status() *verdict.Auto {
	if a == nil {
		return nil
	}
	return &verdict.Auto{Policies: a.specs, On: a.on, Changes: a.changes, At: a.at, Why: a.why}
}

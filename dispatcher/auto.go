package dispatcher

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
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

// leftToTwin finds in a policy like auto:br0,evenkeel the one to begin with and those that the twin has to
// replay.
func (c Config) leftToTwin() (Config, *auto) {
	specs, ok := twin.Auto(c.Policy)
	if !ok {
		return c, nil
	}
	replayed := slices.Clone(specs)
	for _, spec := range c.Twin {
		if !slices.Contains(specs, spec) {
			replayed = append(replayed, spec)
		}
	}
	c.Policy, c.Twin = specs[0], replayed
	return c, &auto{specs: specs, on: true}
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

// choose puts a policy in force that the twin found to be better.
func (r *runner) choose(c twin.Choice) {
	a := r.auto
	if a == nil || !a.on || !slices.Contains(a.specs, c.Spec) {
		return
	}
	if err := r.set(board.SetPolicy{Spec: c.Spec}); err != nil {
		r.log.Warn("dispatcher: the policy that the twin chose cannot be put in force", zap.String("policy", c.Spec), zap.Error(err))
		return
	}
	a.changes, a.at, a.why = a.changes+1, r.now, c.Why
	r.log.Info("dispatcher: the twin has chosen another policy", zap.String("policy", r.boards.Policy()), zap.String("why", c.Why))
}

// status is what people see of it; nil: the policy is not left to the twin.
func (a *auto) status() *verdict.Auto {
	if a == nil {
		return nil
	}
	return &verdict.Auto{Policies: a.specs, On: a.on, Changes: a.changes, At: a.at, Why: a.why}
}

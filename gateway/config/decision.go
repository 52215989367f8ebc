package config

import (
	"errors"
	"fmt"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// checkDecision looks at who decides and what he is told of the future. What only
// the fit file's contents can tell, the dispatcher says at the start.
func (c *Config) checkDecision(bad report) {
	p := c.Predictor
	kind, err := predictor.ParseKind(p.Kind)
	switch {
	case err != nil:
		bad("$.predictor.kind", "%q predicts nothing; write none, survival, exact or learned", p.Kind)
	case kind == predictor.KindOracle:
		bad("$.predictor.kind", "%v", errOracle)
	case kind == predictor.KindLearned && p.File == "":
		bad("$.predictor.kind", "learned has its trees from a file; set predictor.file to what `evenkeel fit --kind learned` wrote, or write survival")
	case kind == predictor.KindExact && p.SecretFile == "":
		bad("$.predictor.kind", "exact tells prompts apart by a keyed hash; set predictor.secret_file to a file of random bytes, as `head -c 32 /dev/urandom` writes it")
	case kind == predictor.KindNone && p.File != "":
		bad("$.predictor.file", "the kind is none, so that nobody reads it; write survival, exact or learned, or remove the file")
	}
	if _, err := c.decider(c.Dispatch.Policy); err != nil {
		bad("$.dispatch.policy", "%v", err)
	}
	for i, spec := range c.Dispatch.Shadow {
		at := fmt.Sprintf("$.dispatch.shadow[%d]", i)
		switch p, err := c.decider(spec); {
		case err != nil:
			bad(at, "%v", err)
		case p.Immediate():
			bad(at, "%s sends everything on at once, so that its rounds do not compare with those of a pool; write p%[1]s", p.Name())
		}
	}
	for key, v := range map[string]float64{"c0_ms": c.Dispatch.StepModel.C0Ms, "c1_ms": c.Dispatch.StepModel.C1Ms} {
		if !(v >= 0) {
			bad("$.dispatch.step_model."+key, "%v ms; write what `evenkeel fit step` found, or 0 to have it learned", v)
		}
	}
}

var errOracle = errors.New("an oracle knows how requests end, which only a replay can; write survival, exact or learned")

// decider is a policy as the dispatcher will build it: with the configured
// predictor where it names none. One that is no predictor was told already.
func (c *Config) decider(spec string) (policy.Policy, error) {
	sp, err := policy.ParseSpec(spec)
	if err != nil {
		return nil, err
	}
	kind, err := predictor.ParseKind(c.Predictor.Kind)
	if err == nil && kind != predictor.KindOracle && sp.Takes("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			return nil, fmt.Errorf("%w; that is predictor.kind, write another or name one in the policy", err)
		}
	}
	p := sp.Build()
	if n := policy.NeedsOf(p, nil); n.Predictor == string(predictor.KindOracle) || n.Outlook == string(predictor.KindOracle) {
		return nil, fmt.Errorf("policy %s: %w", p.Name(), errOracle)
	}
	return p, nil
}

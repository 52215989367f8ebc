package board

import (
	"errors"
	"fmt"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// Check calls bad for every setting of the config file that cannot work, with its key, in dispatch,
// predictor, pool.ttl and bind.ahead. What only the contents of the fit file show is reported by
// New.
func (c *Config) Check(bad func(key, format string, args ...any)) {
	c.checkNumbers(bad)
	if c.TickLimit == 0 { // the file itself says 0, because Default fills in a limit
		bad("dispatch.tick_limit", "%v; a time above 0 is needed", c.TickLimit)
	}
	c.Predictor.check(bad)
	if _, err := c.policyOf(c.Policy); err != nil {
		bad("dispatch.policy", "%v", err)
	}
}

// check allows fields that are zero, for which the defaults count.
func (c Config) check() error {
	var errs []error
	c.checkNumbers(func(key, format string, args ...any) { errs = append(errs, fmt.Errorf(key+": "+format, args...)) })
	return errors.Join(errs...)
}

func (c *Config) checkNumbers(bad func(key, format string, args ...any)) {
	if c.Window < 0 {
		bad("dispatch.window", "%v is negative; write 0s or more", c.Window)
	}
	if c.TickLimit < 0 {
		bad("dispatch.tick_limit", "%v; a time above 0 is needed", c.TickLimit)
	}
	if c.TTL < 0 {
		bad("pool.ttl", "%v is negative; write 0s for the hold budget of the hand-off", c.TTL)
	}
	if c.BindAhead < AheadAuto {
		bad("bind.ahead", "%d; write how many requests a rank may have beyond its slots, or auto", c.BindAhead)
	}
	m := &c.StepModel
	for key, v := range map[string]float64{
		"c0_ms": m.C0Ms, "c1_ms": m.C1Ms, "request_ms": m.RequestMs, "own_prefill_ms": m.OwnPromptMs,
		"shared_prefill_ms": m.SharedPromptMs, "prefill_step_ms": m.PrefillMs,
	} {
		if !(v >= 0) { // this also refuses NaN
			bad("dispatch.step_model."+key, "%v ms; write what `evenkeel fit step` found, or 0 to have it learned", v)
		}
	}
	if m.RequestMs > 0 && m.C1Ms == 0 {
		bad("dispatch.step_model.request_ms",
			"%v ms without c1_ms; the two together say how many KV tokens a request counts as; write c1_ms, too", m.RequestMs)
	}
}

func (c *PredictorConfig) check(bad func(key, format string, args ...any)) {
	kind, err := predictor.ParseKind(string(c.Kind))
	switch {
	case err != nil:
		bad("predictor.kind", "%q predicts nothing; write none, survival or exact", c.Kind)
	case kind == predictor.KindOracle:
		bad("predictor.kind", "%v", errNoOracle)
	case kind == predictor.KindExact && c.SecretFile == "":
		bad("predictor.kind", "exact tells prompts apart by a keyed hash; set predictor.secret_file to a file of random bytes, as `head -c 32 "+
			"/dev/urandom` writes it")
	case kind == predictor.KindNone && c.File != "":
		bad("predictor.file", "the kind is none, so the file is not read; write survival or exact, or remove the file")
	}
}

// DoubtFit warns if the policy does not read a part of a fit file of this kind; empty: it reads
// all.
func (c *Config) DoubtFit(kind predictor.Kind) string {
	p, err := c.policyOf(c.Policy)
	if err != nil {
		return "" // Check reports it
	}
	needs := needsOf(p)
	read := predictor.Kind(needs.Predictor)
	predictionsRead := read == predictor.KindSurvival || read == predictor.KindExact
	switch {
	case !predictionsRead && !needs.MeanOutput:
		return "the policy of this config does not look at the lengths of answers, so the file changes no decision; remove " +
			"it, or name a policy that does, such as evenkeel (their mean) or brh"
	case kind == predictor.KindExact && !predictionsRead:
		return "the file is of kind exact, and the policy of this config reads only the mean length of answers; fit again " +
			"with --kind survival, or name a policy that predicts, such as brh"
	case kind == predictor.KindExact && read != kind:
		return "the file is of kind exact, and the policy predicts with survival, so what it knows of single prompts is not " +
			"read; write predictor.kind: exact with predictor.secret_file, or fit again with --kind survival"
	case kind == predictor.KindSurvival && read == predictor.KindExact:
		return "the file is of kind survival, so the predictor exact begins without what answers to single prompts were; fit " +
			"again with --kind exact, or write predictor.kind: survival"
	}
	return ""
}

var errNoOracle = errors.New("only a replay can use an oracle, because only there it is known how requests end; write survival or exact")

// policyOf builds a policy as New will. It ignores a predictor.kind that cannot work, because Check
// reports that.
func (c *Config) policyOf(text string) (policy.Policy, error) {
	kind := c.Predictor.Kind
	if _, err := predictor.ParseKind(string(kind)); err != nil || kind == predictor.KindOracle {
		kind = ""
	}
	const hint = "that is predictor.kind, write another or name one in the policy"
	sp, err := parseSpecWithKind(kind, text, hint)
	if err != nil {
		return nil, err
	}
	p := sp.Build()
	if needsOf(p).Predictor == string(predictor.KindOracle) {
		return nil, fmt.Errorf("policy %s: %w", p.Name(), errNoOracle)
	}
	return p, nil
}

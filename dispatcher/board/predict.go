package board

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// parser returns a function that builds a policy from its spec. Where the spec names no predictor or seed, the configured one is used.
func (c Config) parser() func(spec string) (policy.Policy, error) {
	kind, seed := c.Predictor.Kind, c.Seed
	return func(text string) (policy.Policy, error) {
		sp, err := parseSpecWithKind(kind, text, "set predictor.kind, or predictor in the policy itself")
		if err != nil {
			return nil, err
		}
		if seed != 0 && sp.Accepts("seed") && !sp.Sets("seed") {
			if sp, err = sp.With("seed", strconv.FormatUint(seed, 10)); err != nil {
				return nil, err
			}
		}
		return sp.Build(), nil
	}
}

// parseSpecWithKind parses a policy's spec (text). If the spec names no predictor, it gets the given kind; kind "": the policy's default
// stays. If the policy cannot work with the kind, the error ends with hint, which tells the user what to do.
func parseSpecWithKind(kind predictor.Kind, text, hint string) (policy.Spec, error) {
	sp, err := policy.ParseSpec(text)
	if err == nil && kind != "" && sp.Accepts("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			err = fmt.Errorf("%w; %s", err, hint)
		}
	}
	return sp, err
}

// errOracle is the error for a server whose config asks for the oracle, a predictor that only a simulation has.
var errOracle = errors.New("only a replay can use the predictor oracle, because only there it is known how requests end; take survival " +
	"or exact")

// checkAvailableFor returns an error if the predictor that a policy needs is not available.
func (c *PredictorConfig) checkAvailableFor(p policy.Policy) error {
	if err := c.checkKindAvailable(predictor.Kind(policy.RequirementsOf(p, meanUnknown).Predictor)); err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

// checkTwin returns an error if the twin cannot replay one of its policies.
func (c *Config) checkTwin() error {
	for _, spec := range c.Twin {
		p, err := c.Parse(spec)
		if err == nil {
			err = c.Predictor.checkAvailableFor(p)
		}
		if err != nil {
			return fmt.Errorf("dispatcher: twin: %w", err)
		}
	}
	return nil
}

// checkKindAvailable returns an error if a kind of predictor is not available: an oracle needs to know how long the answers will be.
func (c *PredictorConfig) checkKindAvailable(kind predictor.Kind) error {
	if kind == predictor.KindOracle && !c.KnownLengths {
		return errOracle
	}
	return nil
}

// Tables are what a Learner has learned about output lengths for one PredictorKey (a model and a kind of predictor). They never change:
// newer Tables replace them.
type Tables struct {
	predictor predictor.Predictor
	survival  *predictor.Survival
	counts    predictor.Counts
	drift     predictor.Drift // of the last outputs, from survival
	fromFit   predictor.Drift // of the last outputs, from the fit file
}

// noTables returns the tables of a predictor that has learned nothing yet.
func noTables() *Tables { return &Tables{predictor: predictor.None{}} }

const (
	// meanAfter is how many outputs must be known before policies see their mean.
	meanAfter = 50
	// meanUnknown as the mean output of a Snapshot says that the mean is not known.
	meanUnknown = 0
)

// meanOutput returns the mean output in tokens as policies see it: meanUnknown while fewer than meanAfter outputs are known.
func (t *Tables) meanOutput() float64 {
	if t.survival.Len() < meanAfter {
		return meanUnknown
	}
	return t.survival.MeanOutput()
}

// keyFor returns the key of the predictor that must learn for a policy with these needs. Its kind is the one that the policy names or, if
// it names none, the configured one. ok is false if neither is set and the policy does not need the mean output either: nothing must learn.
func (c *PredictorConfig) keyFor(model string, needs policy.Requirements) (k PredictorKey, ok bool) {
	kind := cmp.Or(predictor.Kind(needs.Predictor), c.Kind)
	if kind == predictor.KindOracle || kind == "" && needs.MeanOutput {
		kind = predictor.KindSurvival // the oracle needs no tables, and the mean output comes from those of survival
	}
	return PredictorKey{model, kind}, kind != ""
}

// predictorFor returns the predictor that a policy with these needs reads; nil: it needs none. If the predictor is new, predictorFor emits
// the effect that makes a Learner begin with it.
func (b *board) predictorFor(needs policy.Requirements) *predictorState {
	key, ok := b.cfg.Predictor.keyFor(b.model, needs)
	if !ok {
		return nil
	}
	s := b.predictors[key]
	if s == nil {
		s = &predictorState{PredictorKey: key, Tables: noTables()}
		b.predictors[key] = s
		b.emit(Effect{Kind: EffectNewPredictor, Predictor: key, Fit: b.fit})
	}
	return s
}

// addPredictions writes the predictions that the policy needs into the snapshot: the mean length of an answer, and for every running
// request Rhat, the number of decode steps that it is predicted to have left. Even if the policy reads only the mean, a sample of the
// requests is predicted, because the predictor is scored by comparing predictions with the real lengths.
func (b *board) addPredictions(g *group, p *policyInUse) {
	s := &b.snapshot
	s.MeanOutput, b.survival = meanUnknown, nil
	if p.predictor == nil { // the policy needs no predictions
		return
	}
	t := p.predictor.Tables
	if s.MeanOutput = t.meanOutput(); s.MeanOutput > 0 {
		b.survival = t.survival
	}
	needs := policy.RequirementsOf(p.Policy, s.MeanOutput)
	if needs.Predictor == "" && (!needs.MeanOutput || p.predictor.Kind == predictor.KindNone) {
		return // the policy reads no predictions, and there is no predictor to score
	}
	f := &g.forecast
	f.SetNeeds(needs)
	if predictor.Kind(needs.Predictor) == predictor.KindOracle {
		b.setTrueRemaining(s.Workers, int32(needs.Horizon))
		return
	}
	f.KeepScores()
	f.Update(s.Workers, t.predictor)
}

// setTrueRemaining sets Rhat of the running requests to the number of tokens that they will really still get, but at most to horizon. Only
// simulations know these numbers.
func (b *board) setTrueRemaining(workers []policy.Worker, horizon int32) {
	for i := range workers {
		running := workers[i].Running
		for k := range running {
			request := &running[k]
			left := max(1, b.outputLengths[request.ID]-request.Age) // a request that still runs gets one token more at least
			request.Rhat = float32(min(left, horizon))
		}
	}
}

// recordOutputLength passes the length of an answer to the scores of the predictions and, as an effect, to the Learner. It leaves out
// discarded hand-offs, for which no client waits.
func (b *board) recordOutputLength(s *slotRecord, o Outcome) {
	if s.discard {
		return
	}
	finished, output := o.Kind == Finished, s.age+clampTokens(o.Generated)
	s.rank.group.forecast.RecordEnd(s.rank.slots[s.pos], s.id, finished, output)
	if s.rank.group.chosenPolicy.predictor != nil { // the group's policy reads tables of output lengths
		b.emit(Effect{
			Kind: EffectOutputSample, Sample: OutputSample{Model: b.model, Finished: finished, Prompt: s.prompt - s.age, Output: output, Key: s.key},
		})
	}
}

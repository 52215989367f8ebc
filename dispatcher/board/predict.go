package board

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// parser returns a function that builds a policy from its spec. If the spec names no predictor or no seed, the policy gets the configured
// predictor and seed.
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

// parseSpecWithKind parses the spec of a policy (text). If the spec names no predictor, the policy gets the given kind of predictor; kind
// "": the policy's own default stays. If the policy cannot work with the kind, the error ends with hint, which tells the user what to do.
func parseSpecWithKind(kind predictor.Kind, text, hint string) (policy.Spec, error) {
	sp, err := policy.ParseSpec(text)
	if err == nil && kind != "" && sp.Accepts("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			err = fmt.Errorf("%w; %s", err, hint)
		}
	}
	return sp, err
}

// errOracle is the error for a server whose config asks for the predictor oracle, which knows the lengths of answers in advance. Only a
// simulation has this predictor.
var errOracle = errors.New("only a replay can use the predictor oracle, because only there it is known how requests end; take survival " +
	"or exact")

// checkAvailableFor returns an error if the predictor that a policy needs is not available (see checkKindAvailable).
func (c *PredictorConfig) checkAvailableFor(p policy.Policy) error {
	if err := c.checkKindAvailable(predictor.Kind(needsOf(p).Predictor)); err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

// checkKindAvailable returns an error for the kind oracle if the lengths of answers are not known in advance (KnownLengths). All other
// kinds are always available.
func (c *PredictorConfig) checkKindAvailable(kind predictor.Kind) error {
	if kind == predictor.KindOracle && !c.KnownLengths {
		return errOracle
	}
	return nil
}

// Tables are what a Learner has learned about output lengths for one PredictorKey (a model and a kind of predictor). A Tables value never
// changes: a newer one replaces it.
type Tables struct {
	predictor      predictor.Predictor
	survival       *predictor.Survival
	counts         predictor.Counts
	driftFromTable predictor.Drift // difference of the last output lengths from survival
	driftFromFit   predictor.Drift // difference of the last output lengths from the fit file
}

// noTables returns the tables of a predictor that has learned nothing yet.
func noTables() *Tables { return &Tables{predictor: predictor.None{}} }

const (
	// meanAfter is how many output lengths must be known before policies see their mean.
	meanAfter = 50
	// meanUnknown is the value of Snapshot.MeanOutput while the mean output length is not known.
	meanUnknown = 0
)

// needsOf returns what a policy reads of a Snapshot, for callers that do not use its Horizon. Only the Horizon depends on the mean output
// length, which these callers do not know.
func needsOf(p policy.Policy) policy.Requirements { return policy.RequirementsOf(p, meanUnknown) }

// meanOutput returns the mean output length in tokens, as policies see it; meanUnknown while fewer than meanAfter outputs are known.
func (t *Tables) meanOutput() float64 {
	if t.survival.Len() < meanAfter {
		return meanUnknown
	}
	return t.survival.MeanOutput()
}

// keyFor returns the key of the predictor that must learn for a policy with these needs. Its kind is the one that the policy names, or else
// the configured one. If neither is set, it is survival if the policy needs the mean output. Otherwise nothing must learn, and ok is false.
func (c *PredictorConfig) keyFor(model string, needs policy.Requirements) (k PredictorKey, ok bool) {
	kind := cmp.Or(predictor.Kind(needs.Predictor), c.Kind)
	if kind == predictor.KindOracle || kind == "" && needs.MeanOutput {
		kind = predictor.KindSurvival // the oracle itself needs no tables, and the mean output comes from the tables of survival
	}
	return PredictorKey{model, kind}, kind != ""
}

// findOrStartPredictor returns the predictor that a policy with these needs reads; nil: the policy needs none. For a new predictor, it
// emits the effect that makes a Learner begin to learn.
func (b *board) findOrStartPredictor(needs policy.Requirements) *predictorState {
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

// addPredictions writes the predictions that the policy needs into the snapshot: the mean length of an answer and, for every running
// request, the predicted number of decode steps that it has left (Rhat). If the policy reads only the mean, the forecast predicts a sample
// of the requests all the same, because the predictor is scored by comparing predictions with real lengths.
func (b *board) addPredictions(g *group, p *policyInUse) {
	s := &b.snapshot
	s.MeanOutput, b.survival = meanUnknown, nil
	if p.predictor == nil { // the policy needs no predictions
		return
	}
	t := p.predictor.Tables
	if s.MeanOutput = t.meanOutput(); s.MeanOutput > 0 { // otherwise the mean is not known
		b.survival = t.survival // the decision log shows the table from which the mean was computed
	}
	needs := policy.RequirementsOf(p.Policy, s.MeanOutput) // a policy may look ahead for a horizon that it computes from the mean
	readsPredictions := needs.Predictor != ""
	scoredForMean := needs.MeanOutput && p.predictor.Kind != predictor.KindNone // the kind none predicts nothing that could be scored
	if !readsPredictions && !scoredForMean {
		return
	}
	f := &g.forecast
	f.SetNeeds(needs) // if the policy reads no predictions, Update below predicts only the sample
	if predictor.Kind(needs.Predictor) == predictor.KindOracle {
		b.setTrueRemaining(s.Workers, int32(needs.Horizon)) // the oracle knows the real lengths, so it needs no scores
		return
	}
	f.KeepScores() // from now on, a sample of the predictions is compared with the real lengths, once these are known
	f.Update(s.Workers, t.predictor)
}

// setTrueRemaining sets Rhat of each running request to the number of tokens that the request will really still get, but at most to
// horizon. Only simulations know these numbers.
func (b *board) setTrueRemaining(workers []policy.Worker, horizon int32) {
	for i := range workers {
		running := workers[i].Running
		for k := range running {
			request := &running[k]
			tokensLeft := max(1, b.outputLengths[request.ID]-request.Age) // at least 1, because a request that still runs gets one more token
			request.Rhat = float32(min(tokensLeft, horizon))
		}
	}
}

// recordOutputLength compares the length of an answer with its predictions, and passes it to the Learner as an effect. If the request was
// resumed here, the tokens from earlier ranks count as part of its answer, and not of its prompt. It leaves out discarded hand-offs: no
// client waits for their answers, which run for one step only.
func (b *board) recordOutputLength(s *slotRecord, o Outcome) {
	if s.discard {
		return
	}
	finished, output := o.Kind == Finished, s.tokensFromEarlierRanks+clampTokens(o.Generated)
	slot := s.rank.slots[s.pos]
	s.rank.group.forecast.RecordEnd(slot, s.id, finished, output)
	if s.rank.group.chosenPolicy.predictor != nil { // the group's policy reads tables of output lengths
		prompt := s.prompt - s.tokensFromEarlierRanks
		b.emit(Effect{
			Kind: EffectOutputSample, Sample: OutputSample{Model: b.model, Finished: finished, Prompt: prompt, Output: output, Key: s.key},
		})
	}
}

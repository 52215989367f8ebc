package board

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// parser adds the configured predictor and seed to a spec that names none.
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

// parseSpecWithKind adds kind to a spec that names no predictor; "": the policy's default stays.
// hint tells the user what to do if the policy cannot work with it.
func parseSpecWithKind(kind predictor.Kind, text, hint string) (policy.Spec, error) {
	sp, err := policy.ParseSpec(text)
	if err == nil && kind != "" && sp.Accepts("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			err = fmt.Errorf("%w; %s", err, hint)
		}
	}
	return sp, err
}

var errOracle = errors.New("only a replay can use the predictor oracle, because only there it is known how requests end; take survival " +
	"or exact")

func (c *PredictorConfig) checkAvailableFor(p policy.Policy) error {
	if err := c.checkKindAvailable(predictor.Kind(needsOf(p).Predictor)); err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

func (c *PredictorConfig) checkKindAvailable(kind predictor.Kind) error {
	if kind == predictor.KindOracle && !c.KnownLengths {
		return errOracle
	}
	return nil
}

// Tables are what a Learner has learned for one PredictorKey. They never change: newer ones replace
// them.
type Tables struct {
	predictor      predictor.Predictor
	survival       *predictor.Survival
	counts         predictor.Counts
	driftFromTable predictor.Drift // of the last output lengths from survival
	driftFromFit   predictor.Drift // of the last output lengths from the fit file
}

func noTables() *Tables { return &Tables{predictor: predictor.None{}} }

const (
	// meanAfter is how many output lengths must be known before policies see their mean.
	meanAfter = 50
	// meanUnknown is the value of Snapshot.MeanOutput until then.
	meanUnknown = 0
)

// needsOf is for callers that do not use the Horizon, the only need that depends on the mean output
// length.
func needsOf(p policy.Policy) policy.Requirements { return policy.RequirementsOf(p, meanUnknown) }

func (t *Tables) meanOutput() float64 {
	if t.survival.Len() < meanAfter {
		return meanUnknown
	}
	return t.survival.MeanOutput()
}

// keyFor returns which predictor must learn for a policy; ok is false if none.
func (c *PredictorConfig) keyFor(model string, needs policy.Requirements) (k PredictorKey, ok bool) {
	kind := cmp.Or(predictor.Kind(needs.Predictor), c.Kind)
	if kind == predictor.KindOracle || kind == "" && needs.MeanOutput {
		kind = predictor.KindSurvival // the oracle needs no tables, and the mean comes from survival
	}
	return PredictorKey{model, kind}, kind != ""
}

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

// addPredictions writes the mean output length and the steps left of each request (Rhat) into the
// snapshot, as the policy needs them. If it reads only the mean, a sample of the requests is
// predicted all the same, to score the predictor.
func (b *board) addPredictions(g *group, p *policyInUse) {
	s := &b.snapshot
	s.MeanOutput, b.survival = meanUnknown, nil
	if p.predictor == nil {
		return
	}
	t := p.predictor.Tables
	if s.MeanOutput = t.meanOutput(); s.MeanOutput > 0 { // otherwise not known
		b.survival = t.survival // for the decision log
	}
	needs := policy.RequirementsOf(p.Policy, s.MeanOutput) // the horizon may depend on the mean
	readsPredictions := needs.Predictor != ""
	// The kind none predicts nothing that could be scored.
	scoredForMean := needs.MeanOutput && p.predictor.Kind != predictor.KindNone
	if !readsPredictions && !scoredForMean {
		return
	}
	f := &g.forecast
	f.SetNeeds(needs) // if the policy reads no predictions, Update predicts only the sample
	if predictor.Kind(needs.Predictor) == predictor.KindOracle {
		b.setTrueRemaining(s.Workers, int32(needs.Horizon)) // it needs no scores
		return
	}
	f.KeepScores() // compares a sample with the real lengths, once these are known
	f.Update(s.Workers, t.predictor)
}

// setTrueRemaining is for simulations, which know the output lengths.
func (b *board) setTrueRemaining(workers []policy.Worker, horizon int32) {
	for i := range workers {
		running := workers[i].Running
		for k := range running {
			request := &running[k]
			// A request that still runs gets at least one more token.
			tokensLeft := max(1, b.outputLengths[request.ID]-request.Age)
			request.Rhat = float32(min(tokensLeft, horizon))
		}
	}
}

// recordOutputLength counts the tokens from earlier ranks as part of the answer, not of the prompt.
// It leaves out discarded hand-offs, which run for one step only.
func (b *board) recordOutputLength(s *slotRecord, o Outcome) {
	if s.discard {
		return
	}
	finished, output := o.Kind == Finished, s.tokensFromEarlierRanks+clampTokens(o.Generated)
	slot := s.rank.slots[s.pos]
	s.rank.group.forecast.RecordEnd(slot, s.id, finished, output)
	if s.rank.group.chosenPolicy.predictor != nil {
		prompt := s.prompt - s.tokensFromEarlierRanks
		b.emit(Effect{
			Kind: EffectOutputSample, Sample: OutputSample{Model: b.model, Finished: finished, Prompt: prompt, Output: output, Key: s.key},
		})
	}
}

package board

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// parser reads a policy's spec, with the configured predictor and seed where it names none.
func (c Config) parser() func(spec string) (policy.Policy, error) {
	kind, seed := c.Predictor.Kind, c.Seed
	return func(text string) (policy.Policy, error) {
		sp, err := specWith(kind, text, "set predictor.kind, or predictor in the policy itself")
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

// specWith reads a policy's spec, with that kind of predictor where it names none; "" = none.
// hint says what to do about a policy that cannot work with it.
func specWith(kind predictor.Kind, text, hint string) (policy.Spec, error) {
	sp, err := policy.ParseSpec(text)
	if err == nil && kind != "" && sp.Accepts("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			err = fmt.Errorf("%w; %s", err, hint)
		}
	}
	return sp, err
}

// errOracle answers who asks a server for a predictor that only a simulation has.
var errOracle = errors.New("only a replay can use the predictor oracle, because only there it is known how requests end; take survival " +
	"or exact")

// serves says whether the predictor a policy needs can be had.
func (c *PredictorConfig) serves(p policy.Policy) error {
	if err := c.kindServes(predictor.Kind(policy.NeedsOf(p, 0).Predictor)); err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

// checkTwin refuses what the twin cannot replay.
func checkTwin(cfg Config) error {
	for _, spec := range cfg.Twin {
		p, err := cfg.Parse(spec)
		if err == nil {
			err = cfg.Predictor.serves(p)
		}
		if err != nil {
			return fmt.Errorf("dispatcher: twin: %w", err)
		}
	}
	return nil
}

// kindServes says whether a kind of predictor can be had.
func (c *PredictorConfig) kindServes(kind predictor.Kind) error {
	if kind == predictor.KindOracle && !c.KnownLengths {
		return errOracle
	}
	return nil
}

// Tables are in force until the next ones; they never change.
type Tables struct {
	predictor predictor.Predictor
	survival  *predictor.Survival
	counts    predictor.Counts
	drift     predictor.Drift // of the last outputs, against survival
	fromFit   predictor.Drift // against the fit file
}

// noTables know nothing.
func noTables() *Tables { return &Tables{predictor: predictor.None{}} }

// meanAfter is how many outputs there must be before policies see their mean.
const meanAfter = 50

// mean is that of the outputs as policies see it: 0 while too few are known.
func (t *Tables) mean() float64 {
	if t.survival.Len() < meanAfter {
		return 0
	}
	return t.survival.MeanOutput()
}

// subject is what the needs of a policy are met from, or what is learned in advance; ok is
// false where neither is wanted.
func (c *PredictorConfig) subject(model string, n policy.Needs) (s Subject, ok bool) {
	kind := cmp.Or(predictor.Kind(n.Predictor), c.Kind)
	if kind == predictor.KindOracle || kind == "" && n.MeanOutput {
		kind = predictor.KindSurvival // of what is not told
	}
	return Subject{model, kind}, kind != ""
}

// source is what is known of the subject that a policy's needs are met from; nil: there is none.
func (b *board) source(n policy.Needs) *known {
	key, ok := b.cfg.Predictor.subject(b.model, n)
	if !ok {
		return nil
	}
	s := b.subjects[key]
	if s == nil {
		s = &known{Subject: key, Tables: noTables()}
		b.subjects[key] = s
		b.emit(Effect{Kind: EffectSubject, Subject: key, Fit: b.fit})
	}
	return s
}

// foresee writes what the policy in force wants to know of the future into the
// snapshot: the mean output, and r̂ of every request.
func (b *board) foresee(g *group, p *decider) {
	s := &b.snapshot
	s.MeanOutput, b.survival = 0, nil
	if p.source == nil {
		return
	}
	t := p.source.Tables
	if s.MeanOutput = t.mean(); s.MeanOutput > 0 {
		b.survival = t.survival
	}
	n := policy.NeedsOf(p.Policy, s.MeanOutput)
	if n.Predictor == "" && (!n.MeanOutput || p.source.Kind == predictor.KindNone) {
		return // nobody predicts, so that there is nothing to score
	}
	f := &g.forecast
	f.Demand(n)
	if predictor.Kind(n.Predictor) == predictor.KindOracle {
		b.foretell(s.Workers, int32(n.Horizon))
		return
	}
	f.Score()
	f.Follow(s.Workers, t.predictor)
}

// foretell sets Rhat of the running requests to what is left of them.
func (b *board) foretell(workers []policy.Worker, horizon int32) {
	for g := range workers {
		running := workers[g].Running
		for i := range running {
			q := &running[i]
			q.Rhat = float32(min(max(b.lengths[q.ID]-q.Age, 1), horizon))
		}
	}
}

// learn tells what became of a request to those who learn from it and to the
// live scores. A discarded hand-off was none.
func (b *board) learn(s *charge, o Outcome) {
	if s.discard {
		return
	}
	finished, output := o.Kind == Finished, s.age+tokens(o.Generated)
	s.rank.group.forecast.Ended(s.rank.slots[s.pos], s.id, finished, output)
	if s.rank.group.chosen.source != nil {
		b.emit(Effect{
			Kind: EffectEnding, Ending: Ending{Model: b.model, Finished: finished, Prompt: s.prompt - s.age, Output: output, Key: s.key},
		})
	}
}

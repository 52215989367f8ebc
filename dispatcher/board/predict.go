package board

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"evenkeel/dispatcher/forecast"
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
		if seed != 0 && sp.Takes("seed") && !sp.Sets("seed") {
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
	if err == nil && kind != "" && sp.Takes("predictor") && !sp.Sets("predictor") {
		if sp, err = sp.With("predictor", string(kind)); err != nil {
			err = fmt.Errorf("%w; %s", err, hint)
		}
	}
	return sp, err
}

// errOracle answers who asks a server for a predictor that only a simulation has.
var errOracle = errors.New("predictor oracle knows how requests end, which only a replay can; take survival or exact")

// serves says whether the predictor a policy needs can be had.
func (c *PredictorConfig) serves(p policy.Policy) error {
	n := policy.NeedsOf(p, nil)
	if err := errors.Join(c.kindServes(predictor.Kind(n.Predictor)), c.kindServes(predictor.Kind(n.Outlook))); err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

// checkShadows refuses what cannot be compared, by shadows and by the twin.
func checkShadows(cfg Config) error {
	for i, spec := range slices.Concat(cfg.Shadow, cfg.Twin) {
		who := "shadow"
		if i >= len(cfg.Shadow) {
			who = "twin"
		}
		p, err := cfg.Parse(spec)
		if err != nil {
			return fmt.Errorf("dispatcher: %s: %w", who, err)
		}
		if err := inPool(p); err != nil && who == "shadow" {
			return fmt.Errorf("dispatcher: shadow %w", err)
		}
		if err := cfg.Predictor.serves(p); err != nil {
			return fmt.Errorf("dispatcher: %s: %w", who, err)
		}
	}
	return nil
}

// kindServes says whether a kind of predictor can be had.
func (c *PredictorConfig) kindServes(kind predictor.Kind) error {
	if kind == predictor.KindOracle && !c.Told {
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

// NoTables know nothing.
func NoTables() *Tables { return &Tables{predictor: predictor.None{}} }

// outlookAfter is how many outputs a survival table needs before policies see
// it.
const outlookAfter = 50

// outlook is the survival table as policies see it: nil while it knows too
// little. Of a predictor that tells requests apart it tells them apart too.
func (t *Tables) outlook() policy.Outlook {
	if t.survival.Len() < outlookAfter {
		return nil
	}
	if k, ok := t.predictor.(policy.Keyed); ok {
		return k
	}
	return t.survival
}

// Subject is what the needs of a policy are met from, or what is learned in advance; ok is
// false where neither is wanted.
func (c *PredictorConfig) Subject(model string, n policy.Needs) (s Subject, ok bool) {
	kind := cmp.Or(predictor.Kind(n.Predictor), predictor.Kind(n.Outlook), c.Kind)
	if kind == predictor.KindOracle {
		kind = predictor.KindSurvival // of what is not told
	}
	return Subject{model, kind}, kind != ""
}

// source is what is known of the subject that a policy's needs are met from; nil: there is none.
func (b *board) source(n policy.Needs) *known {
	key, ok := b.cfg.Predictor.Subject(b.model, n)
	if !ok {
		return nil
	}
	s := b.subjects[key]
	if s == nil {
		s = &known{Subject: key, Tables: NoTables()}
		b.subjects[key] = s
		b.emit(Effect{Kind: EffectSubject, Subject: key, Fit: b.fit})
	}
	return s
}

// Look writes what a policy that only looks on wants to know of the future into a snapshot.
func (t *Tables) Look(s *policy.Snapshot, p policy.Policy, f *forecast.Running) {
	s.Outlook = t.outlook()
	if n := policy.NeedsOf(p, s.Outlook); n.Predictor != "" {
		f.Demand(n)
		f.Follow(s.Workers, t.predictor)
	}
}

// foresee writes what the policy in force wants to know of the future into the
// snapshot: the survival table, and r̂ of every request.
func (b *board) foresee(g *group, p *decider) {
	s := &b.snapshot
	s.Outlook, b.survival = nil, nil
	if p.source == nil {
		return
	}
	t := p.source.Tables
	if s.Outlook = t.outlook(); s.Outlook != nil {
		b.survival = t.survival
	}
	n := policy.NeedsOf(p.Policy, s.Outlook)
	if s.Outlook != nil && predictor.Kind(n.Outlook) == predictor.KindOracle {
		b.foresight = foresight{t.survival, b.lengths}
		s.Outlook = &b.foresight
	}
	if n.Predictor == "" && n.Outlook == "" {
		return
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

// Left is how many tokens a request has still to generate.
func (f *foresight) Left(id uint64, age int) int { return max(1, int(f.lengths[id])-age) }

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
		b.emit(Effect{Kind: EffectEnding, Ending: Ending{b.model, finished, s.prompt - s.age, output, s.key}})
	}
}

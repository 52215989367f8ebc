package board

import (
	"cmp"
	"errors"
	"fmt"

	"evenkeel/dispatcher/policy"
	"evenkeel/predictor"
)

// PredictorConfig says where predictions of output lengths come from.
type PredictorConfig struct {
	// Kind is learned for every model from the start, and is that of policies
	// whose spec names none. Empty: each policy's own, learned once it decides.
	Kind predictor.Kind
	// Fit is what the tables start from; nil: from nothing.
	Fit *predictor.Fit
}

// parser reads a policy's spec, with the configured predictor where it names none.
func (c PredictorConfig) parser() func(spec string) (policy.Policy, error) {
	return func(text string) (policy.Policy, error) {
		sp, err := policy.ParseSpec(text)
		if err != nil {
			return nil, err
		}
		if c.Kind != "" && sp.Takes("predictor") && !sp.Sets("predictor") {
			if sp, err = sp.With("predictor", string(c.Kind)); err != nil {
				return nil, fmt.Errorf("%w; set predictor.kind, or predictor in the policy itself", err)
			}
		}
		return sp.Build(), nil
	}
}

// Predictors that cannot be had.
var (
	errOracle  = errors.New("predictor oracle knows how requests end, which only a replay can; take survival, exact or learned")
	errNoTrees = errors.New("predictor learned has no trees; set predictor.file to what `evenkeel fit --kind learned` wrote, or take survival")
)

// serves says whether the predictor a policy needs can be had: with fit, if any.
func serves(p policy.Policy, fit *predictor.Fit) error {
	n := policy.NeedsOf(p, nil)
	err := errors.Join(kindServes(predictor.Kind(n.Predictor), fit), kindServes(predictor.Kind(n.Outlook), fit))
	if err == nil && predictor.Kind(n.Predictor) == predictor.KindLearned {
		err = fit.Serves(n.Horizon) // asked for another it could as well be survival
	}
	if err != nil {
		return fmt.Errorf("policy %s: %w", p.Name(), err)
	}
	return nil
}

// checkShadows refuses what cannot be compared.
func checkShadows(cfg Config, fit *predictor.Fit) error {
	for _, spec := range cfg.Shadow {
		p, err := cfg.Parse(spec)
		if err != nil {
			return fmt.Errorf("dispatcher: shadow: %w", err)
		}
		if p.Immediate() {
			return fmt.Errorf("dispatcher: shadow %s sends everything on at once, so its rounds do not compare with those of a pool; take p%s", spec, p.Name())
		}
		if err := serves(p, fit); err != nil {
			return fmt.Errorf("dispatcher: shadow: %w", err)
		}
	}
	return nil
}

// kindServes says whether a kind of predictor can be had.
func kindServes(kind predictor.Kind, fit *predictor.Fit) error {
	switch {
	case kind == predictor.KindOracle:
		return errOracle
	case kind == predictor.KindLearned && (fit == nil || fit.Trees == nil):
		return errNoTrees
	}
	return nil
}

// Subject is what is learned: the outputs of one model, by one kind of predictor.
type Subject struct {
	Model string
	Kind  predictor.Kind
}

// known is what is known of a subject.
type known struct {
	Subject
	*Tables
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

// Ending is a request that left its rank.
type Ending struct {
	Model          string
	Finished       bool // by itself; else its length is not known (right-censored)
	Prompt, Output int32
	Key            uint64
}

// Subject is what the needs of a policy are met from, or what is learned in advance; ok is
// false where neither is wanted.
func (c *PredictorConfig) Subject(model string, n policy.Needs) (s Subject, ok bool) {
	kind := cmp.Or(predictor.Kind(n.Predictor), predictor.Kind(n.Outlook), c.Kind)
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
func (f *Forecast) Look(s *policy.Snapshot, p policy.Policy, t *Tables) {
	s.Outlook = t.outlook()
	if n := policy.NeedsOf(p, s.Outlook); n.Predictor != "" {
		f.demand(n)
		f.follow(s.Workers, t.predictor)
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
	if n.Predictor == "" && n.Outlook == "" {
		return
	}
	f := &g.forecast
	f.demand(n)
	f.score()
	f.follow(s.Workers, t.predictor)
}

// learn tells what became of a request to those who learn from it and to the
// live scores. A drain was none.
func (b *board) learn(s *charge, o Outcome) {
	if s.drain {
		return
	}
	finished, output := o.Kind == Finished, s.age+tokens(o.Generated)
	s.rank.group.forecast.ended(s.rank.slots[s.pos], s.id, finished, output)
	if s.rank.group.chosen.source != nil {
		b.emit(Effect{Kind: EffectEnding, Ending: Ending{b.model, finished, s.prompt - s.age, output, s.key}})
	}
}

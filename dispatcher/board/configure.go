package board

import (
	"cmp"
	"errors"
	"time"
)

// Settings are the parts of Config that may change while the dispatcher runs.
type Settings struct {
	Policy    string // of barrier groups; empty: the policy in force stays
	Window    time.Duration
	TickLimit time.Duration // 0 = DefaultTickLimit
	TTL       time.Duration // for entries that come from now on
	StepModel StepModel
	BindAhead int             // for early ranks; AheadAuto: the learned number
	Predictor PredictorConfig // with Fit nil, what was learned stays
}

// Accepts returns the error with which the boards would reject these Settings as an event, and changes nothing.
func (l *Boards) Accepts(s Settings) error {
	_, err := l.examine(s)
	return err
}

// examine checks settings and returns what would be in force with them: the config, the fit and the policy. It changes nothing. An error
// says why the settings cannot work.
func (l *Boards) examine(s Settings) (*examined, error) {
	e := &examined{cfg: l.cfg, fit: l.fit, spec: l.spec}
	e.cfg.Window, e.cfg.TickLimit, e.cfg.TTL = s.Window, cmp.Or(s.TickLimit, DefaultTickLimit), s.TTL
	e.cfg.StepModel, e.cfg.BindAhead = s.StepModel, s.BindAhead
	if s.Predictor.Kind != l.cfg.Predictor.Kind {
		e.newPolicies, e.cfg.Predictor.Kind = true, s.Predictor.Kind
		e.cfg.Parse = e.cfg.parser()
	}
	if s.Predictor.Fit != nil {
		e.fit = s.Predictor.Fit
	}
	if s.Policy != "" {
		e.newPolicies, e.spec = true, s.Policy
	}
	p, err := e.cfg.Parse(e.spec)
	if err != nil {
		return nil, err
	}
	return e, errors.Join(e.cfg.check(), e.cfg.Predictor.serves(p), (&Boards{rules: &rules{cfg: e.cfg}}).usable())
}

// configure puts settings into force, or returns the error of examine and changes nothing.
func (l *Boards) configure(s Settings) error {
	e, err := l.examine(s)
	if err != nil {
		return err
	}
	l.cfg = e.cfg
	if s.Predictor.Fit != nil {
		l.fit = e.fit
		l.emit(Effect{Kind: EffectFit, Fit: l.fit})
	}
	for _, b := range l.inOrder {
		b.pool.SetTTL(l.cfg.TTL)
		for _, g := range b.groups {
			if g.barrier {
				g.steps.Configure(l.cfg.StepModel)
			} else if e.newPolicies {
				g.chosen = b.choose(false)
			}
		}
		b.changed = true
	}
	if e.newPolicies {
		return l.setPolicy(e.spec)
	}
	return nil
}

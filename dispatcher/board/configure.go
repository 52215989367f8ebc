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
	TTL       time.Duration // as Config.TTL, for entries that come from now on
	StepModel StepModel
	BindAhead int
	Predictor PredictorConfig // if Fit is nil, the predictors keep what they learned
}

// CheckSettings returns the error with which the event Settings would be rejected.
func (l *Boards) CheckSettings(s Settings) error {
	_, _, err := l.configWith(s)
	return err
}

func (l *Boards) configWith(s Settings) (cfg Config, spec string, err error) {
	cfg, spec = l.cfg, cmp.Or(s.Policy, l.policySpec)
	cfg.Window, cfg.TickLimit, cfg.TTL = s.Window, cmp.Or(s.TickLimit, DefaultTickLimit), s.TTL
	cfg.StepModel, cfg.BindAhead = s.StepModel, s.BindAhead
	if s.Predictor.Kind != l.cfg.Predictor.Kind { // for policies whose spec names no predictor
		cfg.Predictor.Kind = s.Predictor.Kind
		cfg.Parse = cfg.parser()
	}
	p, err := cfg.Parse(spec)
	if err != nil {
		return cfg, spec, err
	}
	return cfg, spec, errors.Join(cfg.check(), cfg.Predictor.checkAvailableFor(p), cfg.checkPolicies())
}

// applySettings changes nothing if it returns an error.
func (l *Boards) applySettings(s Settings) error {
	cfg, spec, err := l.configWith(s)
	if err != nil {
		return err
	}
	newPolicies := s.Policy != "" || cfg.Predictor.Kind != l.cfg.Predictor.Kind
	l.cfg = cfg
	if s.Predictor.Fit != nil {
		l.setFit(s.Predictor.Fit)
	}
	for _, b := range l.inOrder {
		b.pool.SetTTL(l.cfg.TTL)
		for _, g := range b.groups {
			if g.barrier {
				g.steps.Configure(l.cfg.StepModel)
			} else if newPolicies { // setPolicy below replaces the others
				g.chosenPolicy = b.policyFor(g.barrier)
			}
		}
		b.decideNow = true
	}
	if newPolicies {
		return l.setPolicy(spec) // no error is possible, because configWith has made the same checks
	}
	return nil
}

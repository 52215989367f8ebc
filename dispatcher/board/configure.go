package board

import (
	"cmp"
	"errors"
	"time"
)

// Settings are the parts of Config that may change while the dispatcher runs.
type Settings struct {
	Policy    string // policy of the groups whose ranks step together; empty: the policy in force stays
	Window    time.Duration
	TickLimit time.Duration // 0 = DefaultTickLimit
	TTL       time.Duration // longest time in the pool, for entries that come from now on; 0 = until the deadline of the hand-off
	StepModel StepModel
	BindAhead int             // requests that an early rank (Worker.Early) may have beyond its slots; AheadAuto: the learned number
	Predictor PredictorConfig // if Fit is nil, the predictors keep what they learned
}

// CheckSettings returns the error with which the boards would reject the event Settings (EffectRejected); nil: they would accept it. It
// changes nothing.
func (l *Boards) CheckSettings(s Settings) error {
	_, _, err := l.configWith(s)
	return err
}

// configWith returns the config that the boards would have with these settings, and the spec of the policy of barrier groups. It changes
// nothing. An error says why the settings cannot work.
func (l *Boards) configWith(s Settings) (cfg Config, spec string, err error) {
	cfg, spec = l.cfg, cmp.Or(s.Policy, l.policySpec)
	cfg.Window, cfg.TickLimit, cfg.TTL = s.Window, cmp.Or(s.TickLimit, DefaultTickLimit), s.TTL
	cfg.StepModel, cfg.BindAhead = s.StepModel, s.BindAhead
	if s.Predictor.Kind != l.cfg.Predictor.Kind { // policies whose spec names no predictor then get the new kind
		cfg.Predictor.Kind = s.Predictor.Kind
		cfg.Parse = cfg.parser()
	}
	p, err := cfg.Parse(spec)
	if err != nil {
		return cfg, spec, err
	}
	return cfg, spec, errors.Join(cfg.check(), cfg.Predictor.checkAvailableFor(p), cfg.checkPolicies())
}

// applySettings puts the settings into force, and makes the boards decide anew with the next Tick. If they cannot work, it returns why and
// changes nothing.
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
			} else if newPolicies { // the policies of barrier groups are replaced by setPolicy below
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

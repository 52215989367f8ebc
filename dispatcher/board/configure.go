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

// CheckSettings returns the error with which the boards would reject these Settings as an event, and changes nothing.
func (l *Boards) CheckSettings(s Settings) error {
	_, _, err := l.examine(s)
	return err
}

// examine checks settings and returns the config and the spec of the policy that would be in force with them. It changes nothing. An error
// says why the settings cannot work.
func (l *Boards) examine(s Settings) (cfg Config, spec string, err error) {
	cfg, spec = l.cfg, cmp.Or(s.Policy, l.spec)
	cfg.Window, cfg.TickLimit, cfg.TTL = s.Window, cmp.Or(s.TickLimit, DefaultTickLimit), s.TTL
	cfg.StepModel, cfg.BindAhead = s.StepModel, s.BindAhead
	if s.Predictor.Kind != l.cfg.Predictor.Kind {
		cfg.Predictor.Kind = s.Predictor.Kind
		cfg.Parse = cfg.parser()
	}
	p, err := cfg.Parse(spec)
	if err != nil {
		return cfg, spec, err
	}
	return cfg, spec, errors.Join(cfg.check(), cfg.Predictor.serves(p), (&Boards{allBoards: &allBoards{cfg: cfg}}).checkConfig())
}

// configure puts settings into force, or returns the error of examine and changes nothing. The boards decide anew with the next Tick.
func (l *Boards) configure(s Settings) error {
	cfg, spec, err := l.examine(s)
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
			} else if newPolicies { // setPolicy below builds only the policies of barrier groups
				g.chosen = b.choose(false)
			}
		}
		b.changed = true
	}
	if newPolicies {
		return l.setPolicy(spec)
	}
	return nil
}

package dispatcher

import (
	"errors"
	"time"

	"evenkeel/predictor"
)

// Settings are what a running dispatcher may change.
type Settings struct {
	Policy    string // of barrier groups; empty: the one in force stays
	Window    time.Duration
	TickLimit time.Duration // 0 = DefaultTickLimit
	TTL       time.Duration // of entries that come from now on
	StepModel StepModel
	Predictor PredictorConfig // Fit nil: what was learned stays
}

// Configure changes the settings between two rounds. Those that cannot work, or
// not together, are refused, and all stays as it was.
func (d *Dispatcher) Configure(s Settings) error {
	return d.ask(func(l *runner) error { return l.configure(s) })
}

// Accepts says what Configure would, and changes nothing.
func (d *Dispatcher) Accepts(s Settings) error {
	return d.ask(func(l *runner) error {
		_, err := l.examine(s)
		return err
	})
}

// ask has the loop run a command and waits for its answer.
func (d *Dispatcher) ask(command func(l *runner) error) error {
	reply := make(chan error, 1)
	if !d.inbox.push(func(l *runner) { reply <- command(l) }) {
		return ErrDraining
	}
	return <-reply // an accepted command is always run
}

// examined are settings that work.
type examined struct {
	cfg     Config
	fit     *predictor.Fit
	spec    string
	decides bool // policies are made anew
}

func (l *loop) examine(s Settings) (*examined, error) {
	e := &examined{cfg: l.cfg, fit: l.fit, spec: l.spec}
	e.cfg.Window, e.cfg.TickLimit, e.cfg.TTL, e.cfg.StepModel = s.Window, s.TickLimit, s.TTL, s.StepModel
	if e.cfg.TickLimit == 0 {
		e.cfg.TickLimit = DefaultTickLimit
	}
	if s.Predictor.Kind != l.cfg.Predictor.Kind {
		e.decides, e.cfg.Predictor.Kind = true, s.Predictor.Kind
		e.cfg.parse = e.cfg.Predictor.parser()
	}
	if s.Predictor.Fit != nil {
		e.fit = s.Predictor.Fit
	}
	if s.Policy != "" {
		e.decides, e.spec = true, s.Policy
	}
	p, err := e.cfg.parse(e.spec)
	if err != nil {
		return nil, err
	}
	return e, errors.Join(e.cfg.check(), serves(p, e.fit), (&loop{rules: &rules{cfg: e.cfg}}).usable(e.fit))
}

func (l *loop) configure(s Settings) error {
	e, err := l.examine(s)
	if err != nil {
		return err
	}
	l.cfg = e.cfg
	if s.Predictor.Fit != nil {
		l.fit = e.fit
		l.emit(effect{kind: effectFit})
	}
	for _, b := range l.boards {
		b.pool.SetTTL(l.cfg.TTL)
		for _, g := range b.groups {
			if g.barrier {
				g.steps.configured = l.cfg.StepModel
			} else if e.decides {
				g.chosen = b.choose(false)
			}
		}
		b.changed = true
	}
	if e.decides {
		return l.setPolicy(e.spec)
	}
	return nil
}

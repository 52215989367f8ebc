// Package decode is the barrier simulator: decode ranks that step together, in virtual time, behind
// the server's own board, which decides who goes where. It takes seconds where engines take hours,
// and the same seed gives the same run to the bit.
package decode

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/dispatcher/board"
)

// Plan is policies side by side on the same requests.
type Plan struct {
	Source   Source
	Requests int // of a seed; 0: its block of the trace, or as many as its fleet needs
	Fleet    Fleet
	Load     Load
	Policies []string // as a user writes them
	Seeds    int

	// Predictor is that of policies which name none; without a kind: their default. Its fit is
	// what predictors start from, in place of the requests before the run.
	Predictor board.PredictorConfig

	Window time.Duration // of freed slots, as the server has it; 0 = off

	// StepModel is what policies take for true until they have learned it, as the config may say.
	StepModel board.StepModel

	// TellLaw tells policies what a step takes, which they learn otherwise as in the server.
	TellLaw bool

	// Steps keeps every step of the first group in the first seed's runs.
	Steps bool

	// Watch, if set, sees the boards at each round.
	Watch func(b *board.Boards, now time.Time)

	// Progress, if set, is told how many requests of all runs are done. Calls
	// come from several goroutines, one at a time.
	Progress func(done, total int)
}

// Result is what a plan gave.
type Result struct {
	Runs     []report.Run // one a policy, in the plan's order
	Bound    report.Metrics
	Requests int // of a seed
	History  int // before them, that predictors learned from
}

// Validate says what of the plan cannot be run.
func (p *Plan) Validate() error {
	if err := p.Fleet.Validate(); err != nil {
		return err
	}
	switch {
	case p.Source.Drawn == nil && (p.Source.Trace == nil) == (p.Source.Synth == ""):
		return errors.New("want a trace or a synthetic one")
	case p.Source.Trace != nil && len(p.Source.Trace.Requests) == 0:
		return errors.New("the trace is empty")
	case p.Requests < 0:
		return fmt.Errorf("%d requests; 0 is all", p.Requests)
	case p.Seeds < 1:
		return fmt.Errorf("%d seeds; want at least 1", p.Seeds)
	case len(p.Policies) == 0:
		return errors.New("no policy")
	case p.Load.AtArrival && p.Fleet.Spare != nil:
		return errors.New("a rank that is chosen at arrival has the prefill before it, so it has nothing to pull")
	}
	if err := p.Load.validate(); err != nil {
		return err
	}
	replay, _, err := p.size()
	if err != nil {
		return err
	}
	full := p.inSystem()
	if least := max(full, replay/warmShare) + p.Fleet.slots(); p.Source.Drawn == nil && replay < least {
		return fmt.Errorf("%d requests are too few: nothing is measured before %d of them are in the system and as many are done as there are "+
			"slots, %d; take at least %d "+
			"requests, or fewer ranks and slots",
			replay, full, p.Fleet.slots(), least)
	}
	for _, text := range p.Policies {
		if strings.TrimSpace(text) == "" { // the board would take its default, and no name would say so
			return errors.New("a policy without a name; is there a comma too many?")
		}
		cfg := p.config(text, 1)
		if _, err := cfg.Needs(); err != nil {
			return err
		}
	}
	return nil
}

// config is that of the board for a policy and a seed: what is drawn is drawn anew for each.
func (p *Plan) config(text string, seed uint64) board.Config {
	return board.Config{Policy: text, Window: p.Window, StepModel: p.StepModel, Predictor: p.Predictor, Seed: seed * 1_000_003}
}

// name is that of a policy's run in tables. It says where more is told than a server knows.
func (p *Plan) name(text string) string {
	if p.Predictor.Kind == oracle && !strings.Contains(text, "predictor=") {
		text += " (lengths told)"
	}
	if p.TellLaw {
		text += " (law told)"
	}
	return text
}

// oracle is the predictor that is told the lengths of outputs.
const oracle = "oracle"

// trial is one policy on one seed.
type trial struct {
	run, bound report.Sample
	steps      []report.Step
	window     report.Window
}

// Run runs every policy on every seed, as many at once as there are processors.
func (p *Plan) Run(ctx context.Context) (*Result, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	out := &Result{}
	out.Requests, out.History, _ = p.size()
	told := &counter{total: out.Requests * len(p.Policies) * p.Seeds, tell: p.Progress}
	trials, err := report.Trials(ctx, len(p.Policies), p.Seeds, nil, func(ctx context.Context, policy int, seed uint64) (*trial, error) {
		t, err := p.try(ctx, p.Policies[policy], seed, told)
		if err != nil {
			return nil, fmt.Errorf("seed %d: %w", seed, err)
		}
		return t, nil
	})
	if err != nil {
		return nil, err
	}
	told.flush()
	var bounds []report.Sample
	for i, text := range p.Policies {
		run := report.Run{Policy: p.name(text), Seeds: p.Seeds, Steps: trials[i][0].steps, Window: trials[i][0].window}
		for _, t := range trials[i] {
			run.Samples, bounds = append(run.Samples, t.run), append(bounds, t.bound)
		}
		run.Metrics = report.Summarize(run.Samples...)
		out.Runs = append(out.Runs, run)
	}
	out.Bound = report.Summarize(bounds...)
	return out, nil
}

// RunAlone runs the first policy on one seed, the first of which is 1, on the goroutine that asks.
func (p *Plan) RunAlone(ctx context.Context, seed int) (report.Metrics, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	t, err := p.try(ctx, p.Policies[0], uint64(seed), &counter{})
	if err != nil {
		return nil, err
	}
	return report.Summarize(t.run), nil
}

func (p *Plan) try(ctx context.Context, policy string, seed uint64, told *counter) (*trial, error) {
	w, err := p.draw(int(seed))
	if err != nil {
		return nil, err
	}
	if p.Load.Rho > 0 {
		w.pace(p.Load.Rho, &p.Fleet)
	}
	r, err := newRun(&p.Fleet, p.Load, w, p.config(policy, seed))
	if err != nil {
		return nil, err
	}
	r.law = p.TellLaw
	r.ended = told.add
	if p.Watch != nil {
		r.round = func(*board.Round) { p.Watch(r.Boards, instant(r.Now)) }
	}
	r.meter.keep = p.Steps && seed == 1
	if err := r.all(ctx); err != nil {
		return nil, err
	}
	t := &trial{}
	t.run, t.bound = r.meter.sample()
	if r.meter.keep {
		t.steps, t.window = r.meter.kept, report.Window{From: millis(r.meter.from), To: millis(r.meter.to)}
	}
	return t, nil
}

// counter tells how far all runs are, now and then.
type counter struct {
	mu          sync.Mutex
	done, total int
	said        int
	tell        func(done, total int)
}

func (c *counter) add() {
	if c.tell == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done++
	if c.done-c.said >= max(1, c.total/1000) {
		c.said = c.done
		c.tell(c.done, c.total)
	}
}

func (c *counter) flush() {
	if c.tell != nil && c.said != c.total {
		c.tell(c.total, c.total)
	}
}

// names of the metrics that do not repeat, being times of this machine.
var measuredHere = []report.Metric{report.TickP99, report.TickMean}

// Repeatable drops from a metric set what another run of the same seed would
// not give to the bit.
func Repeatable(m report.Metrics) report.Metrics {
	out := maps.Clone(m)
	for _, name := range measuredHere {
		delete(out, name)
	}
	return out
}

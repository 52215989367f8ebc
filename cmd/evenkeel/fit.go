package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"evenkeel/bench/lab/fit"
	"evenkeel/predictor"
)

// fitCmd fits models to logs and traces. Without a subcommand, it fits a predictor of output
// lengths.
type fitCmd struct {
	Predictor fitPredictorCmd `cmd:"" default:"withargs" help:"Fit a predictor of output lengths (the default)."`
	TTFT      fitTTFTCmd      `cmd:"" name:"ttft" help:"Fit the time of a prefill, a + b * tokens, for each prefill engine."`
	Step      fitStepCmd      `cmd:"" help:"Fit the time of a step, c0 + c1 * KV tokens, for each barrier group."`
}

// Help returns the text below the usage line of `evenkeel fit --help`, which itself shows only the
// subcommands.
func (fitCmd) Help() string {
	return "evenkeel fit (--trace FILE | --log FILE) [--kind KIND] [--horizon H] [--holdout F] --out FILE [--json] " +
		"fits a predictor; evenkeel fit predictor --help explains its flags."
}

type fitPredictorCmd struct {
	Trace   string  `placeholder:"FILE" help:"Learn from a trace: CSV or JSON lines, gzipped or not (docs/traces.md has the columns)."`
	Log     string  `placeholder:"FILE" help:"Learn from evenkeel's request log."`
	Kind    string  `default:"auto" enum:"survival,exact,auto" help:"Fit this kind: ${enum}. auto takes the kind with the lowest Brier score (default: ${default})."`
	Horizon int     `default:"80" placeholder:"H" help:"Score predictions of this many steps ahead (default: ${default})."`
	Holdout float64 `default:"0.25" placeholder:"F" help:"Hold back this share of the requests, the last ones, to score with (default: ${default})."`
	Out     string  `required:"" placeholder:"FILE" help:"Write the fit to FILE, and the reliability plot beside it as .svg."`
	JSON    bool    `name:"json" help:"Print one JSON document."`
}

// Run fits a predictor, writes it to a file and prints its scores.
func (c *fitPredictorCmd) Run(std streams) error {
	var history *fit.History
	err := fit.CanWrite(c.Out) // checked first, so that an error shows before the fit
	switch {
	case err != nil:
		return fmt.Errorf("--out: %w", err)
	case c.Horizon < 1:
		return usageError{fmt.Errorf("--horizon %d: look at least 1 step ahead", c.Horizon)}
	case !(c.Holdout > 0 && c.Holdout < 1): // in this form, NaN is refused as well
		return usageError{fmt.Errorf("--holdout %v: write a share above 0 and below 1", c.Holdout)}
	case (c.Trace == "") == (c.Log == ""): // the user has given both or none
		return usageError{errors.New("give --trace or --log, from which the fit learns")}
	case c.Trace != "":
		history, err = fit.FromTrace(c.Trace)
	default:
		history, err = fit.FromLog(c.Log)
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(std.err, "fitting %s to %d requests\n", c.Kind, len(history.Samples))
	done, err := fit.Train(c.Kind, history,
		predictor.Options{Horizon: c.Horizon, Holdout: c.Holdout, Created: time.Now().UTC().Truncate(time.Second)}, c.Out)
	if err != nil {
		return err
	}
	return printFit(std.out, done, c.JSON)
}

type fitTTFTCmd struct {
	Log  string `required:"" placeholder:"FILE" help:"Learn from evenkeel's request log."`
	JSON bool   `name:"json" help:"Print one JSON document."`
}

// Run fits the times of prefills, and prints them. It fails if the fit of no engine is good enough
// to be used, so that the fit has no Config.
func (c *fitTTFTCmd) Run(std streams) error {
	log, err := fit.ReadRequestLog(c.Log)
	if err != nil {
		return err
	}
	lines, err := fit.PrefillLines(log)
	if err != nil {
		return fmt.Errorf("%s: %w", c.Log, err)
	}
	if err := printFit(std.out, lines, c.JSON); err != nil {
		return err
	}
	return failIfEmpty(lines.Config)
}

type fitStepCmd struct {
	Log       string  `required:"" placeholder:"FILE" help:"Learn from a step trace, written by evenkeel engine --step-trace or by vLLM with configs/vllm."`
	Decisions string  `placeholder:"FILE" help:"Compare the KV tokens in the trace with those in evenkeel's decision log of the same time."`
	Shift     float64 `placeholder:"MS" help:"With --decisions, add this to the trace's t_ms, if t_ms does not count from 1970 or the clocks differ."`
	JSON      bool    `name:"json" help:"Print one JSON document."`
}

// Run fits the times of steps, and prints them. With --decisions, it also compares the engines' KV
// tokens in the trace with the mirror: the account of these tokens that evenkeel keeps itself, and
// from which it decides. Run fails if the fit of no group is good enough to be used, so that the
// fit has no Config.
func (c *fitStepCmd) Run(std streams) error {
	if c.Shift != 0 && c.Decisions == "" {
		return usageError{errors.New("--shift needs --decisions, because it shifts the trace against the decision log")}
	}
	trace, err := fit.ReadStepTrace(c.Log)
	if err != nil {
		return err
	}
	steps := fit.StepModels(trace)
	if c.Decisions != "" { // the decision log has what evenkeel's own account was at each decision
		if steps.Mirror, err = fit.CompareMirror(trace, c.Decisions, c.Shift); err != nil {
			return err
		}
	}
	if err := printFit(std.out, steps, c.JSON); err != nil {
		return err
	}
	return failIfEmpty(steps.Config)
}

// failIfEmpty returns errFailed if a fit has no config for evenkeel, because no fit was good
// enough. A script sees it by the exit status. The reason has already been printed.
func failIfEmpty(config string) error {
	if config == "" {
		return errFailed
	}
	return nil
}

// printFit prints a fit as JSON for programs or as text for people.
func printFit(out io.Writer, result interface{ WriteText(io.Writer) error }, asJSON bool) error {
	if !asJSON {
		return result.WriteText(out)
	}
	return writeJSON(out, result)
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/lab/vectors"
	"evenkeel/bench/sim/decode"
	"evenkeel/dispatcher/board"
	"evenkeel/internal/namedargs"
	"evenkeel/internal/spelling"
	"evenkeel/predictor"
)

// simulateCmd compares policies in a simulator that replays a trace, or lets them decide on the
// recorded snapshots of a decision log.
type simulateCmd struct {
	Trace     string        `tier:"decode,aggregated,prefill" placeholder:"FILE|synth:NAME" help:"Replay the requests of FILE, CSV or JSON lines, gzipped or not (docs/traces.md has the columns), or a drawn trace, one of ${synths} (default: Azure's conversation trace of 2023)."`
	Format    string        `tier:"decode,aggregated,prefill" enum:"auto,azure,mooncake" default:"auto" help:"The trace has this format: auto, azure (any CSV) or mooncake (any JSON lines) (default: ${default})."`
	Workers   int           `tier:"decode" default:"8" placeholder:"G" help:"Have this many decode ranks, which step together (default: ${default})."`
	Slots     int           `tier:"decode,aggregated" default:"16" placeholder:"B" help:"Decode this many requests at once on a rank (default: ${default})."`
	Capacity  int64         `tier:"decode,aggregated,prefill" placeholder:"TOKENS" help:"Hold this many KV tokens on a rank (default: unlimited; a prefill engine 1000000)."`
	Budget    int32         `tier:"aggregated" name:"token-budget" default:"8192" placeholder:"N" help:"Compute at most N tokens of prompts and answers on a rank in a step, as with vLLM's --max-num-batched-tokens. SGLang's --chunked-prefill-size is for all ranks of DP attention together (default: ${default})."`
	Interval  int           `tier:"aggregated" name:"prefill-schedule-interval" default:"1" placeholder:"N" help:"Compute prompts only in every Nth step, as vLLM with this flag, or SGLang with --prefill-decode-interval N-1 (default: ${default})."`
	Load      string        `tier:"decode,aggregated,prefill" default:"closed" placeholder:"closed|RHO" help:"With closed, the number of requests in the system stays the same. With a number, requests arrive as in the trace, at that share of what level ranks could serve (default: ${default}). With --tier prefill, give shares of time in which engines prefill under lmetric, like 0.5,0.85 (default: 0.7)."`
	Pool      *int          `tier:"decode,aggregated" placeholder:"N" help:"Closed loop: keep this many requests in the system beyond the slots (default: 4 for each rank; with --tier aggregated, 15 % of the slots are free, as with --pool=-N)."`
	Policies  string        `placeholder:"LIST" help:"Compare these policies; the first is the reference (default: ${decodepolicies}; --tier prefill: all; --tier geo: ${geodefault}). There are: ${policies}; for prefill: ${prefillpolicies}; for geo: ${geopolicies}. With --tier aggregated there are also engine, which is what the engine does by itself, and delayer, which is that of SGLang (default there: ${aggregatedpolicies})."`
	Predictor string        `tier:"decode" placeholder:"FILE|KIND" help:"Policies that predict use this predictor if they name none: a file that evenkeel fit wrote, none, survival, exact or oracle (default: survival)."`
	Seeds     int           `default:"5" placeholder:"N" help:"Run every policy this many times, each time on another part of the trace, or on another drawn one (default: ${default})."`
	Requests  int           `tier:"decode,prefill" placeholder:"N" help:"Take this many requests for a run (default: its part of the trace, repeated if the ranks need more; with --tier prefill, the whole trace, or 12000 drawn requests)."`
	Stale     int           `tier:"decode" placeholder:"N" help:"Let policies see the progress of requests N steps late."`
	Transfer  int           `tier:"decode" placeholder:"N" help:"Let N steps pass between an admission and the first token. The request holds its slot and its KV in this time."`
	Spare     *int          `tier:"decode" placeholder:"N" help:"Let a rank run N requests more than it has slots; the sum is its --max-num-seqs. It begins to pull the KV of a request only while it runs fewer than that, as vLLM does (default: it runs as many requests as it has slots, and pulls at once)."`
	Bind      string        `tier:"decode" enum:"late,arrival" default:"late" help:"With late, a request gets its rank after its prefill. With arrival, it gets its rank before, as some connectors need it, and holds its slot and the room for its KV from then on (default: ${default})."`
	PrefillMs float64       `tier:"decode" default:"50" placeholder:"MS" help:"A prefill takes this time, however short. In a closed loop with --bind late, this counts only for requests that are prefilled again, because all others wait in the pool after their prefill (default: ${default})."`
	PerToken  float64       `tier:"decode" name:"prefill-per-token" default:"0.05" placeholder:"MS" help:"A prefill takes this time more per token of the prompt (default: ${default})."`
	Prefills  *int          `tier:"decode,prefill" placeholder:"P" help:"Have P prefill engines, each of which computes one prompt at a time, in the order of arrival (default: as many as prompts need; with --tier prefill, 8)."`
	Ahead     string        `tier:"decode" default:"0" placeholder:"N|auto" help:"With --bind arrival, let a rank have N requests beyond its slots, because a request needs no slot during its prefill. With auto, N is the mean number of requests that have no first token yet, at most a quarter of the slots (default: ${default})."`
	Scenario  string        `tier:"decode,geo" placeholder:"FILE" help:"Read groups and their ranks from FILE (YAML or JSON), in place of --workers. They may be unequal, join and leave. With --tier geo, read regions from FILE, or take one of ${geoscenarios} (default: skew)."`
	C0        time.Duration `tier:"decode,prefill" name:"c0" default:"55ms" help:"A decode step takes this time, whatever its load (default: ${default})."`
	C1        time.Duration `tier:"decode,prefill" name:"c1" default:"200ns" help:"A decode step takes this time more per KV token of the fullest rank (default: ${default})."`
	Window    time.Duration `tier:"decode" default:"3ms" help:"The first slot of a burst of freed ones waits this long for the others, as dispatch.window (default: ${default})."`
	Law       string        `tier:"decode,aggregated" placeholder:"NAME|list" help:"Let ranks step as those of a deployment: MODEL,ENGINE,GPU,RANKS, such as DeepSeek-V3,sglang,H200,32, by the times of kernels that NVIDIA measured. It takes the place of --workers, --c0 and --c1, the first policy is then the engine's own, and --slots is ${lawslots} unless given. With list, print all laws and simulate nothing."`
	TellLaw   bool          `tier:"decode" help:"Tell policies how long a step takes, and say so in the table. Otherwise they learn it from the steps, as in the server."`
	Tier      string        `enum:"decode,aggregated,prefill,geo" default:"decode" help:"Simulate this part: decode, aggregated (ranks that prefill and decode, which needs --law), prefill or geo (default: ${default})."`
	Prefill   prefillFlags  `embed:"" group:"With --tier prefill"`
	Geo       geoFlags      `embed:"" group:"With --tier geo"`
	Log       string        `tier:"decode" placeholder:"FILE" help:"Replay a decision log: every policy decides on the recorded snapshots."`
	Out       string        `tier:"decode" placeholder:"DIR" help:"Write a page with plots, and the numbers, to DIR."`
	JSON      bool          `name:"json" help:"Print one JSON document."`

	deployment *laws.Entry // the deployment that --law names; nil: none
}

// Run runs the simulation of the tier, or replays the decision log of --log. It fails if the user
// interrupts it. With --law, it first looks up the law: how long the steps of a known deployment
// take. The law sets the number of ranks, and the slots unless the user has given
// --slots.
func (c *simulateCmd) Run(std streams, k *kong.Context) error {
	if err := c.refuseUselessFlags(k); err != nil { // flags that would have no effect
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if c.Law == lawList {
		return listLaws(std, k)
	}
	if err := c.lookUpLaw(namesOf(given(k))); err != nil {
		return err
	}
	if c.Tier == tierAggregated {
		return errorOrSignal(ctx, std, c.simulateAggregated(ctx, std))
	}
	if c.Tier == "prefill" {
		return errorOrSignal(ctx, std, c.simulatePrefill(ctx, std))
	}
	if c.Tier == "geo" {
		return errorOrSignal(ctx, std, c.simulateGeo(ctx, std))
	}
	c.Policies = cmp.Or(c.Policies, c.defaultPolicies())
	if c.Out != "" { // before the simulation, so that an error shows at once
		if err := ensureWritableFolder(c.Out); err != nil {
			return err
		}
	}
	r, columns, err := c.makeReport(ctx, std.err)
	if err != nil {
		return errorOrSignal(ctx, std, err)
	}
	if c.Out != "" {
		page, err := writeReport(r, c.Out)
		if err != nil {
			return err
		}
		fmt.Fprintf(std.err, "report: %s\n", page)
	}
	if c.JSON {
		return r.JSON(std.out)
	}
	return printReport(std.out, r, columns)
}

// printReport prints a report for people: a table with these columns, and the notes.
func printReport(out io.Writer, r *report.Report, columns []report.Metric) error {
	var b bytes.Buffer
	if err := r.Lines(&b, columns...); err != nil {
		return err
	}
	b.WriteByte('\n')
	for _, note := range r.Notes {
		writeWrapped(&b, note)
	}
	_, err := b.WriteTo(out)
	return err
}

// defaultDecodePolicies is the default of --policies for the decode tier if --law is not given.
const defaultDecodePolicies = "jsq,jsq-kv,pjsq-kv,br0,brh,evenkeel"

// errorOrSignal returns err. If a signal from the user caused it, errorOrSignal prints that the run
// was ended, and returns errFailed instead.
func errorOrSignal(ctx context.Context, std streams, err error) error {
	if err != nil && ctx.Err() != nil {
		fmt.Fprintln(std.err, "ended by a signal; what was simulated so far is not shown")
		return errFailed
	}
	return err
}

// The columns of the tables of a simulation and of a replay. The JSON output has all metrics.
var (
	simulatedColumns = []report.Metric{report.Imbalance, report.IdleShare, report.TokensPerS, report.TPOTP95, report.TTFTP50, report.TTFTP99,
		report.WaitMax, report.Preempted, report.Failed, report.TickP99}
	replayedColumns = []report.Metric{report.Imbalance, report.MaxMinusMin, report.IdleShare, report.Placed, report.Agreement,
		report.SamePairs}
)

// makeReport runs the simulation of the decode tier, or replays a decision log. It returns the
// report, and the columns for its table.
func (c *simulateCmd) makeReport(ctx context.Context, progress io.Writer) (_ *report.Report, columns []report.Metric, _ error) {
	if c.Log != "" {
		r, err := c.replayLog(ctx, progress)
		return r, replayedColumns, err
	}
	plan, source, err := c.makePlan()
	if err != nil {
		return nil, nil, err
	}
	fmt.Fprintf(progress, "%s, %d seeds; %s\n", source, c.Seeds, c.describeFleet(&plan.Fleet))
	bar := newProgress(progress)
	plan.Progress = func(done, total int) { bar.update(done, total, fmt.Sprintf("%d of %d requests done", done, total)) }
	began := time.Now()
	result, err := plan.Run(ctx)
	bar.finish()
	if err != nil {
		return nil, nil, err
	}
	r := &report.Report{
		Title: "evenkeel simulate", Command: c.commandLine(), Model: c.stepModel(),
		Runs: result.Runs, Bound: result.Bound,
	}
	r.Facts = c.facts(plan, result, source, began)
	r.Notes = c.notes(r)
	return r, simulatedColumns, nil
}

// makePlan makes the plan of the simulation from the flags, and validates it. It also returns the
// name of the trace.
func (c *simulateCmd) makePlan() (_ *decode.Plan, traceName string, _ error) {
	if c.Workers < 1 {
		return nil, "", fmt.Errorf("--workers %d: at least 1", c.Workers)
	}
	plan := &decode.Plan{
		Requests: c.Requests, Seeds: c.Seeds, Policies: namedargs.List(c.Policies), Steps: c.Out != "",
		Fleet: c.uniformFleet(),
	}
	var err error
	if c.Scenario != "" {
		if plan.Fleet, err = decode.ReadScenario(c.Scenario, plan.Fleet); err != nil {
			return nil, "", err
		}
	}
	plan.Fleet.Stale, plan.Fleet.Transfer, plan.Fleet.Spare = c.Stale, c.Transfer, c.Spare
	plan.Window = c.Window
	plan.TellLaw = c.TellLaw // the simulator tells policies how long a step takes, so they need not learn it
	if plan.Load, err = c.parseLoad(&plan.Fleet); err != nil {
		return nil, "", err
	}
	if err := c.setBinding(&plan.Load); err != nil {
		return nil, "", err
	}
	if err := c.setPredictor(plan); err != nil {
		return nil, "", err
	}
	source, err := c.setTrace(plan)
	if err != nil {
		return nil, "", err
	}
	return plan, source, plan.Validate()
}

// uniformFleet returns the ranks that the flags describe: one group of equal ranks.
func (c *simulateCmd) uniformFleet() decode.Fleet {
	// The number is bounded here, because Validate, which refuses a huge number, is called only later.
	f := decode.Uniform(min(max(c.Workers, 1), 1<<20), c.Slots, c.Capacity)
	g := &f.Groups[0] // the only group
	g.C0Ms, g.C1Ms = float64(c.C0)/float64(time.Millisecond), float64(c.C1)/float64(time.Millisecond)
	if c.deployment != nil {
		law := c.deployment.Law() // how long a step takes for any loads of the ranks
		ifLevel := law.Level()    // how long it takes if all ranks have the same load
		g.C0Ms, g.C1Ms, g.RequestMs, g.Law = ifLevel.C0Ms, ifLevel.C1Ms, ifLevel.RequestMs, &law
	}
	return f
}

// parseLoad reads --load and --pool: a closed loop, or an open loop at a share of what ranks with
// equal loads could serve. f is used only for a closed loop.
func (c *simulateCmd) parseLoad(f *decode.Fleet) (decode.Load, error) {
	if c.Load == "closed" {
		pool := 4 * f.Ranks() // the default of --pool, as its help text says
		if c.Pool != nil {
			pool = *c.Pool
		}
		return decode.Load{Pool: pool}, nil
	}
	rho, err := strconv.ParseFloat(c.Load, 64)
	switch {
	case err != nil || !(rho > 0): // in this form, NaN is refused as well
		return decode.Load{}, fmt.Errorf("--load %q: want closed, or the share of what the ranks could serve, like 0.9", c.Load)
	case rho > 1:
		return decode.Load{}, fmt.Errorf("--load %v is %[1]v times what the ranks can serve, so the pool would only grow, and waits would "+
			"depend on the length of the run; write a share up to 1, like 0.9, or closed", rho)
	case c.Pool != nil:
		return decode.Load{},
			errors.New("--pool has no effect in an open loop, where the arrivals decide how long the pool is; leave it out, or write --load closed")
	}
	return decode.Load{Rho: rho}, nil
}

// setBinding sets, by the flags, whether requests get their decode ranks before or after the
// prefill, and how long a prefill takes. It also sets Ahead: how many requests beyond its slots a
// rank may have if it gets them before their prefill, in which they need no slot.
func (c *simulateCmd) setBinding(l *decode.Load) error {
	l.AtArrival = c.Bind == bindArrival
	l.Prefill = &decode.Prefill{Ms: c.PrefillMs, PerTokenMs: c.PerToken}
	if c.Prefills != nil {
		l.Prefill.Engines = *c.Prefills
		if l.Prefill.Engines < 1 {
			return fmt.Errorf("--prefills %d: at least 1, or leave it out", *c.Prefills)
		}
	}
	if c.Ahead == "auto" { // the board adapts the number to how many requests wait for their first token
		l.Ahead = board.AheadAuto
		return nil
	}
	n, err := strconv.Atoi(c.Ahead)
	if err != nil || n < 0 {
		return fmt.Errorf("--ahead %q: want a number of requests, or auto", c.Ahead)
	}
	l.Ahead = n
	return nil
}

// bindArrival is the value of --bind with which requests get their decode rank before their
// prefill.
const bindArrival = "arrival"

// setPredictor sets the predictor of the plan by --predictor: a kind, or a file that evenkeel fit
// wrote. Without the flag, policies use their own predictors.
func (c *simulateCmd) setPredictor(plan *decode.Plan) error {
	if c.Predictor == "" {
		return nil
	}
	if kind, err := predictor.ParseKind(c.Predictor); err == nil { // otherwise the text is the name of a file
		plan.Predictor.Kind = kind
		return nil
	}
	text, err := os.ReadFile(c.Predictor)
	if err != nil {
		return fmt.Errorf("--predictor: %w%s; give a file that evenkeel fit wrote, or none, survival, exact, oracle", err,
			spelling.Hint(c.Predictor, []string{"none", "survival", "exact", "oracle"}))
	}
	if plan.Predictor.Fit, err = predictor.ParseFit(text); err != nil {
		return fmt.Errorf("--predictor %s: %w", c.Predictor, err)
	}
	plan.Predictor.Kind = plan.Predictor.Fit.Kind
	return nil
}

// setTrace sets the trace of the plan, by default Azure's, and returns its name.
func (c *simulateCmd) setTrace(plan *decode.Plan) (traceName string, _ error) {
	if name, ok := strings.CutPrefix(c.Trace, trace.SynthPrefix); ok { // the plan draws this trace itself, another one for each seed
		if _, err := trace.Synth(name, 1, 1); err != nil { // an unknown name
			return "", fmt.Errorf("--trace: %w", err)
		}
		plan.Source.Synth = name
		return c.Trace, nil
	}
	if c.Trace == "" {
		plan.Source.Trace = trace.Azure()
		return "Azure's conversation trace (2023)", nil
	}
	t, name, err := c.readTrace(0) // 0, because this trace is read from a file and not drawn
	plan.Source.Trace = t
	return name, err
}

// readTrace returns the trace of --trace and its name. drawn is the number of requests if the trace
// is random and not read from a file.
func (c *simulateCmd) readTrace(drawn int) (_ *trace.Trace, traceName string, _ error) {
	if name, ok := strings.CutPrefix(c.Trace, trace.SynthPrefix); ok {
		t, err := trace.Synth(name, drawn, 1) // 1 is the seed
		if err != nil {
			err = fmt.Errorf("--trace: %w", err)
		}
		return t, c.Trace, err
	}
	t, err := trace.Read(c.Trace, trace.Options{Format: trace.Format(c.Format)})
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("--trace: %w%s", err, spelling.Hint(trace.SynthPrefix+c.Trace, trace.SynthNames()))
	}
	return t, filepath.Base(c.Trace), err
}

// replayLog lets the policies decide on the snapshots of a decision log, and reports how even they
// leave the ranks.
func (c *simulateCmd) replayLog(ctx context.Context, progress io.Writer) (*report.Report, error) {
	f, err := os.Open(c.Log)
	if err != nil {
		return nil, fmt.Errorf("--log: %w", err)
	}
	defer func() { _ = f.Close() }() // the file was only read, so an error of Close has no effect
	bar := newProgress(progress)
	began := time.Now()
	runs, isCutOff, err := vectors.Replay(ctx, f, c.Log, namedargs.List(c.Policies),
		func(n int) { bar.update(n, -1, fmt.Sprintf("%d rounds done", n)) })
	bar.finish()
	if err != nil {
		return nil, err
	}
	notes := []string{"Every round starts from the recorded loads, whatever a policy decided before: imbalance is that right after the " +
		"round's admissions, not what the policy would have led to."}
	if isCutOff {
		notes = append(notes, "The last line of the log is not finished and was left out.")
	}
	return &report.Report{
		Title: "evenkeel simulate --log", Command: c.commandLine(), Runs: runs,
		Facts: []report.Fact{
			{Name: "when", Value: fmt.Sprintf("%s, %.0f s in all", began.Format("2006-01-02 15:04:05 MST"), time.Since(began).Seconds())},
			{Name: "log", Value: filepath.Base(c.Log)},
		},
		Notes: notes,
	}, nil
}

// describeFleet returns a text about the decode ranks: how many, with how many slots, and how long
// a step takes.
func (c *simulateCmd) describeFleet(f *decode.Fleet) string {
	if c.Scenario != "" {
		return fmt.Sprintf("%d ranks in %d groups, as %s has them", f.Ranks(), len(f.Groups), filepath.Base(c.Scenario))
	}
	if c.deployment != nil {
		return fmt.Sprintf("%d ranks behind one barrier, %d slots each; %s", c.Workers, c.Slots, describeLaw(c.deployment))
	}
	return fmt.Sprintf("%d ranks behind one barrier, %d slots each; step = %s + %s per KV token of the fullest rank", c.Workers, c.Slots,
		millis(c.C0), millis(c.C1))
}

// commandLine returns the command line that gives the same numbers again. line.Add adds nothing if
// its first argument is false. Flags that another flag makes useless are left out: a decision log
// takes the place of the whole simulation, --law that of --workers, --c0 and --c1, and --scenario
// that of --workers.
func (c *simulateCmd) commandLine() string {
	line := report.Words{Text: "evenkeel simulate", Before: " --"}
	replaysLog, hasLaw := c.Log != "", c.Law != ""
	line.Add(replaysLog, "log %s", c.Log)
	line.Add(true, "policies %s", c.Policies)
	if replaysLog {
		return line.Text
	}
	line.Add(c.Trace != "", "trace %s", c.Trace)
	line.Add(c.Format != "auto", "format %s", c.Format)
	line.Add(c.Scenario != "", "scenario %s", c.Scenario)
	line.Add(c.Scenario == "" && !hasLaw, "workers %d", c.Workers)
	line.Add(true, "slots %d", c.Slots)
	line.Add(c.Capacity != 0, "capacity %d", c.Capacity)
	line.Add(true, "load %s", c.Load)
	if c.Pool != nil {
		line.Add(true, "pool %d", *c.Pool)
	}
	line.Add(c.Predictor != "", "predictor %s", c.Predictor)
	line.Add(true, "seeds %d", c.Seeds)
	line.Add(c.Requests != 0, "requests %d", c.Requests)
	line.Add(c.Stale != 0, "stale %d", c.Stale)
	line.Add(c.Transfer != 0, "transfer %d", c.Transfer)
	if c.Spare != nil {
		line.Add(true, "spare %d", *c.Spare)
	}
	line.Add(c.Bind == bindArrival, "bind %s", c.Bind)
	line.Add(c.PrefillMs != decode.DefaultPrefill.Ms, "prefill-ms %v", c.PrefillMs)
	line.Add(c.PerToken != decode.DefaultPrefill.PerTokenMs, "prefill-per-token %v", c.PerToken)
	if c.Prefills != nil {
		line.Add(true, "prefills %d", *c.Prefills)
	}
	line.Add(c.Ahead != "0", "ahead %s", c.Ahead)
	line.Add(!hasLaw, "c0 %v", c.C0)
	line.Add(!hasLaw, "c1 %v", c.C1)
	line.Add(hasLaw, "law %s", c.Law)
	line.Add(c.Window != board.DefaultWindow, "window %v", c.Window)
	line.Add(c.TellLaw, "tell-law")
	return line.Text
}

// facts returns the conditions of the simulation for the report: machine, trace, ranks, load and
// what policies know beforehand. The speed of this machine changes only how long the board's
// decisions take (report.TickP99, TickMean), because all other times are simulated.
func (c *simulateCmd) facts(plan *decode.Plan, result *decode.Result, source string, began time.Time) []report.Fact {
	v, commit := buildInfo()
	load := fmt.Sprintf("open loop, %g of what the ranks could serve if they were level", plan.Load.Rho)
	if plan.Load.Rho == 0 { // no arrival rate is set
		load = fmt.Sprintf("closed loop, %d requests in the system beyond the slots", plan.Load.Pool)
	}
	stepTimesAre := "learned" // how policies know what a step takes
	if c.TellLaw {
		stepTimesAre = "told"
	}
	return []report.Fact{
		{Name: "when", Value: fmt.Sprintf("%s, %.0f s in all", began.Format("2006-01-02 15:04:05 MST"), time.Since(began).Seconds())},
		{Name: "machine", Value: describeMachine() + "; it decides over the tick's times only"},
		{Name: "program", Value: fmt.Sprintf("evenkeel %s, commit %s", v, commit)},
		{Name: "trace", Value: fmt.Sprintf("%s, %d requests a run, the %d before them for predictors to learn from, %d seeds", source, result.Requests, result.History, c.Seeds)},
		{Name: "decode", Value: c.describeFleet(&plan.Fleet)},
		{Name: "load", Value: load},
		{Name: "predictor", Value: cmp.Or(c.Predictor, "the policies' own")},
		{Name: "board", Value: fmt.Sprintf("the server's, freed slots wait %s for others; what a step takes is %s", millis(c.Window),
			stepTimesAre)},
		{Name: "prefill", Value: c.describePrefill(&plan.Load)},
		{Name: "telemetry", Value: fmt.Sprintf("progress is seen %d steps late, KV takes %d steps to a rank", c.Stale, c.Transfer)},
	}
}

// describePrefill returns a text about the prefill engines, which also says whether requests get
// their ranks before or after the prefill.
func (c *simulateCmd) describePrefill(l *decode.Load) string {
	engines := "as many engines as are asked for"
	if l.Prefill.Engines > 0 {
		engines = fmt.Sprintf("%d engines", l.Prefill.Engines)
	}
	words := fmt.Sprintf("%g + %g·N ms for N tokens on %s", l.Prefill.Ms, l.Prefill.PerTokenMs, engines)
	if !l.AtArrival {
		return words + ", before a request gets its rank"
	}
	return words + fmt.Sprintf(", after a request has its rank; a rank may have %s requests beyond its slots meanwhile", c.Ahead)
}

// notes returns notes on how far the numbers apply to real engines.
func (c *simulateCmd) notes(r *report.Report) []string {
	first := r.Runs[0]
	differs := anotherPart
	if strings.HasPrefix(c.Trace, trace.SynthPrefix) {
		differs = "each on another drawn trace"
	}
	notes := []string{c.simulatedGain("decode", differs, r.Runs), r.Headline()}
	if c.deployment != nil { // --law names the deployment whose steps are simulated
		notes = append(notes, stepTimesNote)
	}
	if kv, ok := first.Metrics[report.KVShare]; ok {
		notes = append(notes, fmt.Sprintf("Throughput and TPOT gain at most the idle share times KV's share of a step, here %.1f %% times %.0f "+
			"%% under %s: imbalance is paid only behind a barrier, and only where steps depend on KV.",
			100*first.Metrics[report.IdleShare].Mean, 100*kv.Mean, first.Policy))
	}
	if c.Load != "closed" {
		notes = append(notes, "In an open loop tokens per second follow the arrivals, unless a policy cannot keep up with them.")
	}
	if c.Bind == bindArrival {
		notes = append(notes, "Ranks are bound before the prefill: slots stand empty meanwhile, and the first token waits for the prefill in a "+
			"closed loop too.")
	}
	enoughPrefill := ""
	if c.Prefills == nil { // without --prefills, there are as many prefill engines as prompts need
		enoughPrefill = ", and prefill is never short"
	}
	return append(notes,
		"× is the ratio to "+first.Policy+
			". balanced is no policy: it is what the steps of all runs would give if all ranks held the same load in each.",
		"The longest wait is that of one request, from the end of its prefill until it has a slot; one that still waits at the end counts too.",
		"Measured once an eighth of the requests and as many as there are slots were done, until the last one arrived. ± is the deviation "+
			"between seeds.",
		"A simulator: the server's own board decides, and learns what a step takes and how long outputs are unless it is told; engines step as "+
			"the model says and never fail"+enoughPrefill+".")
}

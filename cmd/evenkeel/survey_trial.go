package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/survey"
	trials "evenkeel/bench/lab/trial" // trials, because this package already has a type named trial
	"evenkeel/engine"
	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/draft"
)

// surveyTrial has the flags of survey --trial, which sends loads to an engine instead of only
// watching it.
type surveyTrial struct {
	Trial bool          `help:"Instead of watching, play four loads to the one address of --engines, whose ranks prefill and decode: in turn straight to it, and through an evenkeel in this process. Nobody else may use the engine meanwhile."`
	Each  time.Duration `default:"5m" placeholder:"TIME" help:"Play each load for this long each way (default: ${default})."`
	Law   string        `placeholder:"NAME" help:"Expect what the simulator makes of this law: MODEL,ENGINE,GPU,RANKS, such as DeepSeek-V3,vllm,H200,8 (default: all laws that have as many ranks of the engine)."`
	Ranks int           `placeholder:"N" help:"The address has N ranks (default: as many as the engine tells)."`
	Plan  bool          `help:"Print what the trial costs and what to expect, and play nothing."`
	Short bool          `help:"Play a few seconds of each load, with short texts. This shows that it works, and not what is gained."`
}

// Bounds of a trial. A load is sent in pairs of blocks: one block straight to the engine, and one
// block through evenkeel.
const (
	trialPairs, leastTrialPairs = 8, 3             // most and least pairs of blocks for a load
	shortPairs                  = 2                // pairs of blocks for a load with --short
	shortEach                   = time.Second      // how long each load is sent each way with --short
	shortSimulated              = 20 * time.Second // how long each load is simulated with --short
	trialFile                   = "evenkeel-trial.json"
)

// checkTrial refuses flags that cannot be combined.
func (c *surveyCmd) checkTrial() error {
	switch defaults := (surveyTrial{Each: 5 * time.Minute}); { // the values if no flag is given
	case !c.Trial && c.surveyTrial != defaults: // a flag that needs --trial was given
		return errors.New("--each, --law, --ranks, --plan and --short are for --trial; add it, or leave them out")
	case !c.Trial:
		return nil
	case len(c.Engines) != 1:
		return errors.New("--trial compares evenkeel with an engine that balances its ranks itself: name one address, that of all ranks")
	case c.For != 15*time.Minute || c.Every != time.Second: // the user has given --for or --every
		return errors.New("--for and --every are for a survey that watches; with --trial, use --each")
	case c.Each < time.Second || c.Each > 4*time.Hour:
		return fmt.Errorf("--each %v: take a second to four hours", c.Each)
	case c.Ranks < 0 || c.Ranks > engine.MostRanks:
		return fmt.Errorf("--ranks %d: write a number up to %d", c.Ranks, engine.MostRanks)
	}
	return nil
}

// runTrial runs the trial and writes its results to a new file. With --plan, it sends nothing and
// writes no file.
func (c *surveyCmd) runTrial(std streams) error {
	targets, err := c.parseTargets()
	if err != nil {
		return usageError{err}
	}
	target := targets[0] // checkTrial has refused more than one address
	if c.Plan {
		return c.planAndPlay(std, target, nil)
	}
	c.Out = cmp.Or(c.Out, trialFile)
	return withNewFile(c.Out, func(file *os.File) error { return c.planAndPlay(std, target, file) })
}

// untilSignal returns a context that ends at the first SIGINT, SIGTERM or SIGHUP. A second SIGINT
// or SIGTERM ends the process at once. A second SIGHUP does nothing, because the process may get
// two when a terminal is closed: one from the kernel and one from the shell.
func untilSignal() (ctx context.Context, stop func()) {
	interrupted, stopInterrupts := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(interrupted, stopInterrupts) // the next SIGINT or SIGTERM then ends the process
	if signal.Ignored(syscall.SIGHUP) {            // under nohup, SIGHUP is ignored, which NotifyContext would undo
		return interrupted, stopInterrupts
	}
	hungUp, stopHangups := signal.NotifyContext(interrupted, syscall.SIGHUP)
	return hungUp, func() {
		stopHangups()
		stopInterrupts()
	}
}

// planAndPlay prints the plan: what the trial costs, and what to expect of it. Then it starts a
// proxy, sends each load straight to the engine and through the proxy, and writes the results to
// file and terminal. With --plan, it ends after the plan, and file is nil.
func (c *surveyCmd) planAndPlay(std streams, target *engine.Target, file io.Writer) error {
	ctx, stop := untilSignal()
	defer stop()
	client := engine.NewClient(engine.Options{ReadBuffer: 64 << 10})
	defer client.Close()
	r, entry, err := c.preparePlan(ctx, std, client, target)
	if err != nil || c.Plan {
		return err
	}
	g, err := c.startProxy(ctx, r, entry)
	if err != nil {
		return err
	}
	stopProxy := func() error {
		shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return g.Shutdown(shutdownCtx)
	}
	if err := c.sendLoads(ctx, std, r, g, entry.URL, client, target); err != nil {
		_ = stopProxy() // the user should see err, and not an error of the shutdown
		return err
	}
	return c.writeResults(std, r, file, stopProxy)
}

// preparePlan asks the engine for its role and its settings, simulates the loads, and prints the
// plan. It returns the report, which has no results yet, and the engine as it stands in a config.
func (c *surveyCmd) preparePlan(ctx context.Context, std streams, client *engine.Client,
	target *engine.Target) (*trials.Report, *draft.Entry, error) {
	fmt.Fprintf(std.err, "asking the engine what it is; each answer is waited for 5 seconds\n")
	entry, err := c.askEngine(ctx)
	if err != nil {
		return nil, nil, err
	}
	e := trials.Ask(ctx, client, target) // what only a trial needs to know, such as the model
	e.Count(entry.Ranks, entry.Slots)    // sets both, and divides the engine's room for KV by the number of ranks
	e.Budget, e.Interval = entry.Budget, entry.Interval
	loads := trials.Loads(&e, c.Short)
	expected, err := c.simulateLoads(ctx, std, &e, loads)
	if err != nil {
		return nil, nil, err
	}
	r := trials.New(&e, loads, expected)
	perRoute := c.timePerRoute()                  // how long each load is sent straight to the engine, and again through evenkeel
	r.Short, r.Each = c.Short, perRoute.Seconds() // the report says both
	v, commit := buildInfo()
	r.Program = trials.Program{
		Version: v, Commit: commit, Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.GOMAXPROCS(0),
	}
	// A load is sent in pairs of blocks of requests: one block straight to the engine, and one through
	// evenkeel. Even if the engine is slow, leastPairs of them are sent, so the costs in the plan are
	// at least those of so many pairs.
	_, leastPairs := c.pairsPerLoad()
	r.Plan(std.out, trials.Costs(loads, expected, perRoute, leastPairs))
	return r, entry, nil
}

// writeResults writes the report to the file and to the terminal, and then calls stopProxy. The
// file comes first, because the terminal may not exist any more. Each error of writeResults is a
// keepFileError.
func (c *surveyCmd) writeResults(std streams, r *trials.Report, file io.Writer, stopProxy func() error) error {
	err := r.JSON(file)
	r.Text(std.out)
	if err == nil {
		fmt.Fprintf(std.err, "%s is written; it has no prompts and no names of hosts\n", c.Out)
	} else {
		err = fmt.Errorf("%s is not whole: %w", c.Out, err)
	}
	if stopErr := stopProxy(); stopErr != nil {
		err = errors.Join(err, fmt.Errorf("the trial was played, but evenkeel did not end as it should: %w", stopErr))
	}
	switch {
	case err != nil:
		return keepFileError{err}
	case !r.Complete:
		return keepFileError{errFailed} // the text on the terminal says why
	}
	return nil
}

// pairsPerLoad returns how many pairs of blocks are sent for a load, at most and at least. Of the
// blocks of a pair, one is sent straight to the engine and one through evenkeel.
func (c *surveyCmd) pairsPerLoad() (most, least int) {
	if c.Short {
		return shortPairs, shortPairs
	}
	return trialPairs, leastTrialPairs
}

// timePerRoute returns how long each load is sent straight to the engine, and as long again through
// evenkeel.
func (c *surveyCmd) timePerRoute() time.Duration {
	if c.Short {
		return shortEach
	}
	return c.Each
}

// askEngine asks the engine for its role and settings, as evenkeel init does. Values of flags
// override what the engine reports. It fails if a trial with this engine is not possible, with an
// error that says what would have to change.
func (c *surveyCmd) askEngine(ctx context.Context) (*draft.Entry, error) {
	address := c.Engines[0]
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	given := config.Engine{URL: strings.TrimRight(address, "/"), Ranks: c.Ranks, Slots: c.Slots, Budget: c.Budget}
	entries := []draft.Entry{{Engine: given}}
	key := ""
	if os.Getenv(engineKeyEnv) != "" {
		key = engineKeyEnv
	}
	draft.Ask(ctx, entries, key)
	e := &entries[0]
	if ctx.Err() != nil {
		return nil, errors.New("ended by a signal; nothing was played")
	}
	if c.Ranks > 0 {
		e.Ranks = c.Ranks
	}
	if c.Slots > 0 {
		e.Slots = c.Slots
	}
	if c.Budget > 0 {
		e.Budget = c.Budget
	}
	says := strings.Join(e.Notes, " ")
	// An engine with a KV connector hands KV over, so it belongs to a pair even if its role is not
	// known.
	isOfPair := e.Role == "prefill" || e.Role == "decode" || e.Role == "" && e.Connector != ""
	switch {
	case e.Dead != "":
		return nil, fmt.Errorf("%s does not answer (%s); start the engine, or give the address at which it listens", address, e.Dead)
	case isOfPair:
		return nil, fmt.Errorf("%s belongs to a pair of prefill and decode engines, and a trial is for ranks that do both; "+
			"take evenkeel survey without --trial, or start an engine without a KV connector. %s", address, says)
	case e.Role == "":
		return nil, fmt.Errorf("%s answers, but nothing tells that it is an engine that prefills and decodes; "+
			"look whether the address is that of vLLM or SGLang, and whether a model is loaded. %s", address, says)
	case e.Ranks < 2:
		return nil, fmt.Errorf("%s has one rank, which waits for no other; start vLLM with --data-parallel-size 8, "+
			"or SGLang with --enable-dp-attention --dp-size 8, behind one address. If it has several and does not tell, add --ranks",
			address)
	case e.Slots < 1:
		return nil, fmt.Errorf("%s does not tell how many requests a rank runs at once; "+
			"add --slots with its --max-num-seqs, or start vLLM with VLLM_SERVER_DEV_MODE=1", address)
	}
	return e, nil
}

// simulateLoads simulates the loads with the step times of --law, or of all laws that may apply,
// and returns the results to expect from the trial.
func (c *surveyCmd) simulateLoads(ctx context.Context, std streams, e *trials.Engine, loads []*trials.Load) (*trials.Expectation, error) {
	laws, err := trials.Find(c.Law, e)
	if err != nil {
		return nil, usageError{err}
	}
	// Without --law, Find returns only laws with as many ranks as the engine has.
	if len(laws) > 0 && laws[0].Ranks != e.Ranks {
		return nil, usageError{
			fmt.Errorf("--law %s is of %d ranks, and the engine has %d; name a law with as many", c.Law, laws[0].Ranks, e.Ranks),
		}
	}
	duration := c.Each
	if c.Short {
		duration = shortSimulated
	}
	fmt.Fprintln(std.err, "simulating the loads, for up to some minutes; Ctrl-C ends it")
	bar := newProgress(std.err)
	expected, err := trials.Expect(ctx, e, loads, laws, duration, func(done, of int) {
		bar.update(done, of, fmt.Sprintf("simulated %d of %d", done, of))
	})
	bar.finish()
	if ctx.Err() != nil {
		return nil, errors.New("ended by a signal; nothing was played")
	}
	return &expected, err
}

// sendLoads sends all loads, straight to the engine and through evenkeel, and writes the results
// into r. While it does so, it reads the engine's metrics once per second, or five times per second
// with --short.
func (c *surveyCmd) sendLoads(ctx context.Context, std streams, r *trials.Report, g *gateway.Gateway, straight string,
	client *engine.Client, target *engine.Target,
) error {
	bar := newProgress(std.err)
	defer bar.finish()
	p := c.newPlayer(ctx, r, g, straight, bar)
	scrapeEvery := time.Second
	if c.Short {
		scrapeEvery = 200 * time.Millisecond
	}
	if err := p.Measure(ctx); err != nil { // asks for a few answers, and learns how the engine counts tokens
		if ctx.Err() != nil {
			return errors.New("ended by a signal; nothing was played")
		}
		return err
	}
	r.Engine.Tokens = p.Engine.Tokens
	followCtx, stopFollowing := context.WithCancel(ctx)
	defer stopFollowing()
	var pages []*survey.Series // the engine's metrics over time
	done := make(chan struct{})
	go func() {
		defer close(done)
		pages = survey.Follow(followCtx, client, []*engine.Target{target}, scrapeEvery) // if the metrics cannot be read, r.Law reports it
	}()
	began := time.Now()
	r.Began = began.UTC()
	r.Play(ctx, p)
	r.Seconds = time.Since(began).Seconds()
	stopFollowing()
	<-done // pages is complete when the goroutine has ended

	if !r.Any() { // the trial ended before its first results
		return fmt.Errorf("no pair of blocks was played: %w", r.Ended())
	}
	r.Law = trials.Explain(r.Engine, r.Learned(), pages)
	return nil
}

// newPlayer returns a player for the loads of r. It sends a load in pairs of blocks of requests:
// one block straight to the engine at engineURL, and one through the proxy g.
func (c *surveyCmd) newPlayer(ctx context.Context, r *trials.Report, g *gateway.Gateway, engineURL string, bar *progress) *trials.Player {
	mostPairs, leastPairs := c.pairsPerLoad() // for one load
	return &trials.Player{
		Engine: *r.Engine, APIKey: os.Getenv(engineKeyEnv),
		URLs: map[trials.Way]string{trials.Straight: engineURL, trials.Ours: "http://" + g.Addr()},
		// A load is sent to each of the two URLs for Each, in at most Pairs pairs of blocks. At least
		// Least pairs are sent, even if they take longer than Each.
		Each: c.timePerRoute(), Pairs: mostPairs, Least: leastPairs,
		Bound:   trials.Patience,                                                   // how long answers are waited for
		Told:    func(now load.Progress, what string) { bar.showTrial(now, what) }, // called whenever there is progress
		Learned: func() *trials.Learned { return learnedStepTimes(ctx, g) },        // what evenkeel knows of the step times by then
	}
}

// startProxy starts evenkeel on free ports, with the config that evenkeel init would write for this
// engine. It records the name of the policy in the report.
func (c *surveyCmd) startProxy(ctx context.Context, r *trials.Report, entry *draft.Entry) (*gateway.Gateway, error) {
	base := config.Default()
	(&exampleProxyFlags{}).setProfiles(base) // the profiles that a command line without flags would give
	text, err := draft.File(base, []draft.Entry{*entry})
	if err != nil {
		return nil, err
	}
	cfg, err := config.Parse("the config for "+entry.URL, text)
	if err != nil {
		return nil, err
	}
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	for _, l := range r.Loads { // all requests of a load may wait in the pool at the same time
		cfg.Pool.Size = max(cfg.Pool.Size, l.InFlight)
	}
	r.Program.Policy = cfg.Dispatch.Policy
	const enginesToAwait = 1 // all ranks are behind one address
	return startGateway(ctx, cfg, enginesToAwait, trialStartTimeout)
}

// trialStartTimeout is how long evenkeel may take until it is ready and the engine is up.
const trialStartTimeout = time.Minute

// learnedStepTimes returns what evenkeel has learned about how long a step takes; nil: nothing yet.
func learnedStepTimes(ctx context.Context, g *gateway.Gateway) *trials.Learned {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, m := range g.Status(ctx).Dispatch.Models {
		for _, group := range m.Groups {
			if s := group.Step; s != nil && s.C0Ms+s.OwnPromptMs > 0 { // otherwise nothing is learned yet
				return &trials.Learned{
					Way: string(s.Bottleneck), C0Ms: s.C0Ms, C1Ms: s.C1Ms, RequestMs: s.RequestMs, Steps: s.Samples, R2: s.R2,
					OwnMs: s.OwnPromptMs, SharedMs: s.SharedPromptMs, PrefillMs: s.PrefillMs,
				}
			}
		}
	}
	return nil
}

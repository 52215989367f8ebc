package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/steplog"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// trial is the result of running the demo's load under one policy.
type trial struct {
	policy     demoPolicy
	load       *load.Result
	run        report.Run
	ifBalanced report.Sample // the results if, in each of the same steps, all ranks had the same load
	// learnedTimes says, with --aggregated, how long prompts take by what the proxy knew when
	// measuring began, and at the end.
	learnedTimes string
	audit        audit
}

// audit has counts from the engines and the proxy after a run. Except for pulls and writes, all
// must be 0.
type audit struct {
	pulls, writes           int64 // hand-offs that were pulled, and parts of KV that prefill engines wrote; not errors
	leaks, pinned, kvErrors int64 // hand-offs that no decode engine pulled; hand-offs whose KV an engine still keeps; wrong pulls and writes
	drift                   int64 // slots and KV tokens by which the proxy's accounts do not balance
}

// hasErrors says whether KV leaked, is still pinned, or was read or written wrongly, or whether the
// proxy's accounts do not balance.
func (a audit) hasErrors() bool {
	return a.leaks != 0 || a.pinned != 0 || a.kvErrors != 0 || a.drift != 0
}

// runTrials runs one policy after another by calling try. A policy starts when all requests of the
// previous policy have been sent, so the last answers of the previous policy come while the next
// one fills its slots. This overlap changes no result, because neither of these periods is
// measured. After the end of ctx, no further policy starts. After a failure, at most the next
// policy still runs: the one that had started because all requests of the failed policy had been
// sent.
func (c *demoCmd) runTrials(ctx context.Context, policies []demoPolicy,
	try func(p demoPolicy, title string, sent func()) (*trial, error)) ([]*trial, error) {
	trials, errs := make([]*trial, len(policies)), make([]error, len(policies))
	var previousEnded chan struct{} // nil: there is no previous policy
	for i, p := range policies {
		sent, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			if trials[i], errs[i] = try(p, fmt.Sprintf("%d/%d %s", i+1, len(policies), p.name), func() { close(sent) }); errs[i] != nil {
				errs[i] = fmt.Errorf("policy %s: %w", p.name, errs[i])
			}
		}()
		failedEarly := false
		select {
		case <-sent:
		case <-ended: // a policy that fails early may never call sent
			failedEarly = errs[i] != nil
		}
		if previousEnded != nil {
			<-previousEnded // at most two policies run at the same time
		}
		previousEnded = ended
		previousFailed := i > 0 && errs[i-1] != nil // errs[i] is not read here, because policy i may still run
		if ctx.Err() != nil || previousFailed || failedEarly {
			break
		}
	}
	<-previousEnded // the last policy that was started
	return trials, errors.Join(errs...)
}

// runTrial runs one policy on new engines and a new proxy, stops them, and returns what was
// measured. It calls sent when the last request has been sent. If ctx ends first, the returned
// trial is incomplete.
func (c *demoCmd) runTrial(ctx context.Context, p demoPolicy, requests []trace.Request, fitFile, logFile, title string, progress io.Writer,
	sent func()) (*trial, error) {
	// The proxy appends to the log file, so an old file must be removed.
	if err := os.Remove(logFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	prefills, decode, err := c.startEngines(p)
	defer closeEngines(prefills, decode)
	if err != nil {
		return nil, err
	}
	g, err := c.startProxy(ctx, p, prefills, decode, fitFile, logFile)
	if err != nil {
		return nil, err
	}
	fmt.Fprintln(progress, title)
	result, learnedAtStart, err := c.sendRequests(ctx, g, requests, progress, sent)
	t := &trial{policy: p, load: result}
	sample := report.Sample{} // the results by metric: from the proxy, its log, the clients and the engines' steps
	if err == nil {
		if c.Aggregated {
			t.learnedTimes = fmt.Sprintf("%s when measuring began, %s at the end", cmp.Or(learnedAtStart, nothingLearned),
				learnedPromptTimes(ctx, g))
		}
		t.audit.drift, err = readGateway(ctx, g, sample) // while the proxy still runs
	}
	if err := errors.Join(err, stopProxy(ctx, g)); err != nil {
		return nil, err
	}
	if ctx.Err() != nil { // the user has interrupted the demo, so what follows would be wrong
		return t, nil
	}
	t.audit.addCounts(prefills, decode)
	if err := readLongestWait(logFile, sample); err != nil {
		return nil, err
	}
	copyClientResults(result, sample)
	t.measureSteps(decode.Steps(), c.stepModel(), c.Aggregated, sample)
	return t, nil
}

// closeEngines closes the engines of a trial. decode is nil if it did not start.
func closeEngines(prefills []*refengine.Engine, decode *refengine.Engine) {
	for _, e := range append(prefills, decode) {
		if e != nil {
			e.Close()
		}
	}
}

// stopProxy shuts the proxy down, and waits at most 10 s for its streams. If ctx has ended, because
// the user has interrupted the demo, it cuts the streams at once, which is no error then.
func stopProxy(ctx context.Context, g *gateway.Gateway) error {
	shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if ctx.Err() != nil {
		cancel()
	}
	if err := g.Shutdown(shutdownCtx); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// sendRequests sends the requests to the proxy, shows the progress, and calls sent when the last
// request has been sent. learnedAtStart says what the proxy had learned about the times of prompts
// when measuring began; empty: measuring never began, or the ranks only decode.
func (c *demoCmd) sendRequests(ctx context.Context, g *gateway.Gateway, requests []trace.Request, progress io.Writer,
	sent func()) (result *load.Result, learnedAtStart string, err error) {
	show := newProgress(progress)
	allSent := sync.OnceFunc(func() {
		show.finish() // the next policy shows its own progress from here on
		sent()
	})
	defer allSent() // needed if the load fails before all requests are sent
	onProgress := func(now load.Progress) {
		if now.Sent < now.Total {
			show.showLoad(now)
		} else {
			allSent()
		}
	}
	result, err = load.Run(ctx, load.Config{
		URLs: []string{"http://" + g.Addr()}, Requests: requests, Concurrency: c.concurrency(),
		Chat: 0.5, Stream: 1, Usage: 0.5, Seed: c.Seed, OnProgress: onProgress,
		Warm: func(p load.Progress) bool {
			warm := p.Ended >= c.warmUpRequests()
			if warm && c.Aggregated {
				learnedAtStart = learnedPromptTimes(ctx, g)
			}
			return warm
		},
	})
	return result, learnedAtStart, err
}

// startEngines starts the engines for a policy. With --aggregated there are no prefill engines, and
// the engine decode also prefills. With an error, it returns the engines that did start, which the
// caller must close.
func (c *demoCmd) startEngines(p demoPolicy) (prefills []*refengine.Engine, decode *refengine.Engine, err error) {
	if c.Aggregated {
		decode, err = refengine.Start(c.aggregatedEngine(p))
		return nil, decode, err
	}
	for i := range c.Prefills {
		e, err := refengine.Start(refengine.Config{
			Role: refengine.Prefill, Model: refengine.Model{Name: "demo"}, Connector: refengine.Connector(c.Connector),
			Prompts: refengine.Prompts{Base: c.PrefillBase, PerToken: c.PrefillPerToken},
			Answers: refengine.Answers{PromptTokensDetails: true}, Seed: c.Seed + uint64(i),
		})
		if err != nil {
			return prefills, nil, err
		}
		prefills = append(prefills, e)
	}
	cfg := refengine.Config{
		Role: refengine.Decode, Model: refengine.Model{Name: "demo"}, Connector: refengine.Connector(c.Connector), DPSize: c.Workers,
		Slots: c.Slots, Steps: refengine.Steps{C0: c.C0, C1: c.C1, Log: demoSteps},
		Answers: refengine.Answers{PromptTokensDetails: true}, Seed: c.Seed,
	}
	c.setStepLaw(&cfg)
	decode, err = refengine.Start(cfg)
	return prefills, decode, err
}

// startProxy starts the proxy and waits until it is ready to serve.
func (c *demoCmd) startProxy(ctx context.Context, p demoPolicy, prefills []*refengine.Engine, decode *refengine.Engine, fitFile,
	logFile string) (*gateway.Gateway, error) {
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Dispatch.Policy, cfg.Dispatch.Window = p.spec, c.Window
	cfg.Pool.Size = c.concurrency() // at the start, all requests may wait in the pool at the same time
	cfg.Log.Requests = logFile
	cfg.Predictor.File = fitFile
	if c.Aggregated {
		c.addRanks(cfg, decode)
	} else {
		c.addPrefills(cfg, prefills)
		for _, url := range decode.URLs() { // one per rank
			cfg.Engines.Decode = append(cfg.Engines.Decode, config.Engine{URL: url, Slots: c.Slots})
		}
	}
	// Each rank has its own address, and so counts as one engine.
	return startGateway(ctx, cfg, len(prefills)+c.Workers, 10*time.Second)
}

// startGateway starts a proxy in this process, and waits until it is ready and this number of
// engines is up. If that takes longer than patience, startGateway shuts the proxy down and fails.
func startGateway(ctx context.Context, cfg *config.Config, engines int, patience time.Duration) (*gateway.Gateway, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	log, err := newLogger("error", os.Stderr)
	if err != nil {
		return nil, err
	}
	g, err := gateway.New(cfg, log)
	if err != nil {
		return nil, err
	}
	handler, err := admin.New(g, admin.Options{Log: log})
	if err != nil {
		return nil, err
	}
	if err := g.Start(handler); err != nil {
		return nil, err
	}
	if err := awaitReady(ctx, g, engines, patience); err != nil {
		shutdownCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		cancel() // no request is running, so there is nothing to wait for
		if shutdownErr := g.Shutdown(shutdownCtx); shutdownErr != nil {
			log.Debug("shutdown", zap.Error(shutdownErr))
		}
		return nil, err
	}
	return g, nil
}

// addPrefills adds the connector and the prefill engines to the proxy's config. Each prefill engine
// gets its own profile, because the bootstrap server of a reference engine listens at that engine's
// own port.
func (c *demoCmd) addPrefills(cfg *config.Config, prefills []*refengine.Engine) {
	cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: c.Connector}}
	if c.Connector == mooncake.AscendLayerwise { // its decode engines call the proxy back
		cfg.Bind.Listen = "127.0.0.1:0"
	}
	for i, e := range prefills {
		name, at := fmt.Sprintf("prefill-%d", i), e.URLs()[0]
		p := mooncake.Profile{Connector: c.Connector}
		if c.Connector == mooncake.SGLang || c.Connector == mooncake.VLLMMooncake {
			_, port, _ := strings.Cut(strings.TrimPrefix(at, "http://"), ":")
			p.BootstrapPort, _ = strconv.Atoi(port) // the port of the engine is also that of its bootstrap server
		}
		cfg.Profiles[name] = p
		cfg.Engines.Prefill = append(cfg.Engines.Prefill, config.Engine{URL: at, Profile: name})
	}
}

// awaitReady waits until the proxy is ready and all engines are up, because results with fewer
// engines could not be compared. It fails after the time patience.
func awaitReady(ctx context.Context, g *gateway.Gateway, engines int, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		up := 0
		for _, e := range g.Status(ctx).Engines {
			if e.Up {
				up++
			}
		}
		isReady, why := g.Ready()
		if isReady && up == engines {
			return nil
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return fmt.Errorf("engines did not come up: %d of %d; %s", up, engines, why)
		}
	}
}

// addCounts adds the engines' counts of transfers and of errors with KV. A pin is the KV of one
// hand-off, which the prefill engine keeps until a decode engine has pulled it.
func (a *audit) addCounts(prefills []*refengine.Engine, decode *refengine.Engine) {
	for _, e := range append([]*refengine.Engine{decode}, prefills...) {
		s := e.Stats()
		a.pulls += s.Pulls
		a.writes += s.Pushes
		a.leaks += s.Leaks
		a.pinned += int64(s.Pins)
		// Pulls of KV that was used up, had timed out, lay in other blocks, belonged to another prompt,
		// or was unknown.
		wrongPulls := s.Replays + s.ExpiredPulls + s.WrongBlocks + s.KeyMismatches + s.Unknown
		// Writes that ended too late, came from two engines, or went into pages of another request.
		wrongWrites := s.OutlivedWrites + s.MixedPushes + s.FreedWrites
		a.kvErrors += wrongPulls + wrongWrites + s.SampledApart // SampledApart: the legs of a request differ in its first token
	}
}

// readLongestWait reads the longest wait in the pool, in ms, from the request log into a sample.
// The metrics cannot say it, because their histogram has no maximum.
func readLongestWait(path string, into report.Sample) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // the file was only read, so an error of Close has no effect
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line struct {
			WaitMs float64 `json:"wait_ms"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		into[report.PoolWaitMax] = max(into[report.PoolWaitMax], line.WaitMs)
	}
	return lines.Err()
}

// copyClientResults copies the results that clients saw into a sample. The latencies are those of
// requests that were sent while measuring.
func copyClientResults(r *load.Result, into report.Sample) {
	into[report.OK], into[report.Failed] = float64(r.OK), float64(r.Failed)
	if r.Window == nil { // measuring never began
		return
	}
	if t := r.Window.TTFT; t.N > 0 {
		into[report.TTFTMean] = t.Mean
		into[report.TTFTP50], into[report.TTFTP99] = t.P50, t.P99
	}
	if t := r.Window.TPOT; t.N > 0 {
		into[report.TPOTP50], into[report.TPOTP95] = t.P50, t.P95
	}
}

// measureSteps computes results from the engine's log of steps, adds them to the sample, and sets
// t.run. It sets t.ifBalanced to the results that the same steps would have with equal loads on all
// ranks. Only the steps while measuring count; if measuring never began, there are none.
// ranksPrefill says that the engine's ranks also prefill.
func (t *trial) measureSteps(log []steplog.Step, m report.StepModel, ranksPrefill bool, sample report.Sample) {
	steps := make([]report.Step, len(log))
	for i, s := range log {
		steps[i] = report.Step{Start: s.Start.Sub(t.load.Start), Length: s.Length, Late: s.Late}
		for _, r := range s.Ranks {
			steps[i].Running = append(steps[i].Running, r.Running)
			steps[i].KVTokens = append(steps[i].KVTokens, r.KVTokens)
			if ranksPrefill {
				steps[i].Prefill = append(steps[i].Prefill, r.Prefill)
			}
		}
	}
	var w report.Window       // from when measuring began until the last request was sent, since the start of the load
	if t.load.Window != nil { // nil: measuring never began, because the run was too short
		w = report.Window{From: t.load.Warm.Sub(t.load.Start), To: t.load.LastSend.Sub(t.load.Start)}
	}
	measured, balanced := report.Measure(w.Cut(steps), m)
	for name, v := range measured {
		sample[name] = v
	}
	t.ifBalanced = balanced
	t.run = report.Run{Policy: t.policy.name, Seeds: 1, Metrics: report.Summarize(sample), Samples: []report.Sample{sample},
		Steps: steps, Window: w}
}

// printErrors prints what went wrong in a trial: streams that failed, accounts of KV that do not
// balance, or that nothing was measured.
func (t *trial) printErrors(out io.Writer) {
	r := t.load
	if r.Failed > 0 || r.Stopped > 0 {
		fmt.Fprintf(out, "%s: %d of %d streams failed, %d of them with a wrong answer\n", t.policy.name, r.Failed+r.Stopped, r.Sent, r.Wrong)
		for _, f := range r.Failures {
			fmt.Fprintf(out, "  %s %s: %s\n", f.Request, f.Kind, f.Detail)
		}
	}
	if a := t.audit; a.hasErrors() {
		fmt.Fprintf(out, "%s: the books do not close: %d hand-offs leaked, %d still pinned, %d pulls or writes of other KV, "+
			"drift %d\n", t.policy.name, a.leaks, a.pinned, a.kvErrors, a.drift)
	}
	if t.run.Window.Length() == 0 {
		fmt.Fprintf(out, "%s: nothing could be measured: the last request was sent before all slots were refilled; send more with --requests\n",
			t.policy.name)
	}
}

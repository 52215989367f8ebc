package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/fit"
	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/policy"
	"evenkeel/internal/namedargs"
	"evenkeel/internal/spelling"
	"evenkeel/predictor"
)

// demoCmd compares policies on a real trace. For each policy, it runs new reference engines, a new
// proxy and a new load in this process. They talk HTTP over loopback. With --aggregated, the
// engines both prefill and decode: see demo_aggregated.go.
type demoCmd struct {
	Trace    string `placeholder:"FILE" help:"Send the requests of a trace: CSV or JSON lines, gzipped or not (default: Azure's conversation trace of 2023; docs/traces.md has the columns)."`
	Requests int    `default:"640" placeholder:"N" help:"Send this many requests for each policy (default: ${default})."`
	Workers  int    `default:"8" placeholder:"G" help:"Have this many decode ranks, which step together (default: ${default})."`
	Slots    int    `default:"16" placeholder:"B" help:"Decode this many requests at once on a rank (default: ${default})."`
	Extra    int    `default:"32" placeholder:"N" help:"Keep this many requests in the system beyond the slots (default: ${default})."`
	Policies string `default:"jsq-kv,jsq,br0,brh,evenkeel" placeholder:"LIST" help:"Compare these policies; the first is the reference (default: ${default}). There are: ${policies}."`
	Law      string `placeholder:"NAME|list" help:"Have ranks that step as those of a deployment, but up to ${demofactor} times as fast: MODEL,ENGINE,GPU,RANKS, such as DeepSeek-V3,vllm,H200,8, by the times of kernels that NVIDIA measured. It takes the place of --workers, --c0 and --c1, and with --aggregated of the times of prompts. The first policy is then the engine's own. With list, print all laws and run nothing."`
	Out      string `placeholder:"DIR" help:"Write the report to DIR (default: a new folder, evenkeel-demo-NUMBER, in the folder for temporary files)."`
	JSON     bool   `name:"json" help:"Print one JSON document."`
	Seed     uint64 `default:"1" help:"Choose with this seed which part of the trace is sent, and the text of its prompts (default: ${default})."`

	Connector       string        `enum:"ascend-mooncake-v1,nixl-pull,nixl-push,vllm-mooncake,ascend-layerwise,sglang" default:"ascend-mooncake-v1" placeholder:"NAME" help:"Have the engines hand KV over in this way (default: ${default}). With ascend-layerwise and sglang, a request gets its decode rank before its prefill."`
	C0              time.Duration `name:"c0" default:"5ms" help:"A decode step takes this time, whatever its load (default: ${default})."`
	C1              time.Duration `name:"c1" default:"200ns" help:"A decode step takes this time more per KV token of the fullest rank (default: ${default})."`
	Prefills        int           `default:"2" placeholder:"N" help:"Have this many prefill engines (default: ${default})."`
	PrefillBase     time.Duration `default:"9ms" help:"A prefill takes this time, however short (default: ${default})."`
	PrefillPerToken time.Duration `default:"9us" help:"A prefill takes this time more per prompt token (default: ${default})."`
	Window          time.Duration `default:"1ms" help:"The dispatcher collects a burst of freed slots for this long (default: ${default})."`
	MaxAge          time.Duration `default:"3s" help:"Set max_age_ms of policies that have this parameter and name no value: a request that waited longer goes first (default: ${default})."`

	demoAggregated `embed:"" group:"Ranks that prefill and decode"`

	deployment *laws.Entry // the deployment that --law names; nil: none
}

// demoPolicy is one of the policies to compare.
type demoPolicy struct {
	name string // the policy as the user wrote it
	spec string // the policy with all settings with which it runs
}

// Run runs the demo. It fails if any stream was wrong or broken, or if the user interrupts the
// demo.
func (c *demoCmd) Run(std streams, k *kong.Context) error {
	if c.Law == lawList {
		return listLaws(std, k)
	}
	if err := c.setDefaults(k); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // after the first signal, a second one ends the program at once
	return c.run(ctx, std)
}

// run sends the load under each policy, writes the report and prints the result. It fails if the
// user interrupts the demo, if a stream is wrong, or if the audit of a trial finds an error.
func (c *demoCmd) run(ctx context.Context, std streams) error {
	policies, err := c.checkFlags()
	if err != nil {
		return err
	}
	requests, history, source, err := c.readRequests()
	if err != nil {
		return err
	}
	dir, err := c.createFolder()
	if err != nil {
		return err
	}
	fitFile, err := writeDemoFit(history, filepath.Join(dir, "fit.json"), source)
	if err != nil {
		return err
	}
	c.announce(std.err, source)
	began := time.Now()
	trials, err := c.runTrials(ctx, policies, func(p demoPolicy, title string, sent func()) (*trial, error) {
		return c.runTrial(ctx, p, requests, fitFile, filepath.Join(dir, "requests-"+fileName(p.name)+".jsonl"), title, std.err, sent)
	})
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		fmt.Fprintln(std.err, "ended by a signal; what was measured so far is not shown")
		return errFailed
	}
	r := c.makeReport(trials, requests, source, began)
	page, err := writeReport(r, dir)
	if err != nil {
		return err
	}
	if err := c.printResult(r, std); err != nil {
		return err
	}
	for _, t := range trials {
		t.printErrors(std.err)
	}
	fmt.Fprintf(std.err, "report: %s\n", page)
	for _, t := range trials {
		if t.load.OK != c.Requests || t.audit.hasErrors() {
			return errFailed
		}
	}
	return nil
}

// announce prints what the demo will run, and a warning if nothing can be measured. source is the
// name of the trace.
func (c *demoCmd) announce(w io.Writer, source string) {
	ranks := fmt.Sprintf("%d prefill engines, %d decode ranks of %d slots", c.Prefills, c.Workers, c.Slots)
	if c.Aggregated {
		ranks = fmt.Sprintf("%d ranks of %d slots that prefill and decode", c.Workers, c.Slots)
	}
	fmt.Fprintf(w, "%d requests of %s; %s, %d requests in the system; %s\n", c.Requests, source, ranks, c.concurrency(), c.describeStep())

	// If the requests are too few, all of them are sent before measuring begins.
	if sentWhileWarming := c.concurrency() + c.warmUpRequests(); c.Requests <= sentWhileWarming {
		fmt.Fprintf(w, "%d requests are too few to measure anything, so only the streams are checked; take more than %d, or fewer ranks, "+
			"--slots or --extra\n",
			c.Requests, sentWhileWarming)
	}
}

// createFolder creates the folder for the report. Without --out, the folder gets a new name, so
// that several demos do not overwrite each other's files.
func (c *demoCmd) createFolder() (string, error) {
	if c.Out == "" {
		return os.MkdirTemp("", "evenkeel-demo-")
	}
	return c.Out, ensureWritableFolder(c.Out)
}

// ensureWritableFolder creates the folder of --out if it does not exist. It also checks that files
// can be written there, so that an error shows before a run that takes minutes.
func ensureWritableFolder(dir string) error {
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = fit.CanWrite(filepath.Join(dir, "report.json"))
	}
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	return nil
}

// checkFlags checks the values of the flags, and returns the policies of --policies.
func (c *demoCmd) checkFlags() ([]demoPolicy, error) {
	for flag, n := range map[string]int{"--requests": c.Requests, "--workers": c.Workers, "--slots": c.Slots, "--prefills": c.Prefills} {
		if n < 1 {
			return nil, fmt.Errorf("%s %d: at least 1", flag, n)
		}
	}
	if c.Aggregated {
		if err := c.checkAggregated(); err != nil {
			return nil, err
		}
	}
	badExtra := c.Extra < 0 && !c.Aggregated // with --aggregated, a negative number keeps slots free
	badTime := c.C0 <= 0 || c.C1 <= 0 || c.PrefillBase < 0 || c.PrefillPerToken < 0 || c.Window < 0 || c.MaxAge < 0
	if badExtra || badTime {
		return nil, errors.New("--extra and times must not be negative, and --c0 and --c1 must not be 0")
	}
	var policies []demoPolicy
	for _, text := range namedargs.List(c.Policies) {
		p, err := c.parsePolicy(text)
		if err != nil {
			return nil, err
		}
		policies = append(policies, p)
	}
	return policies, nil
}

// parsePolicy reads one policy of --policies. If the policy has a setting for --max-age, or with
// --aggregated for --max-hold, and gives no value for it, parsePolicy adds the value of the flag.
// The name delayer, which stands for engines that hold prompts, becomes the policy jsq-kv.
func (c *demoCmd) parsePolicy(text string) (demoPolicy, error) {
	if c.Aggregated && text == delayerPolicy { // the engines hold prompts, and the proxy places requests as jsq-kv does
		return demoPolicy{name: text, spec: "jsq-kv"}, nil
	}
	spec, err := policy.ParseSpec(text)
	if err != nil && c.Aggregated {
		err = fmt.Errorf("%w; besides them there is %s%s", err, delayerPolicy, spelling.Hint(text, []string{delayerPolicy}))
	}
	if err != nil {
		return demoPolicy{}, fmt.Errorf("--policies: %w", err)
	}
	if c.Aggregated {
		if spec, err = c.withMaxHold(spec); err != nil {
			return demoPolicy{}, err
		}
	}
	if spec.Accepts("max_age_ms") && !spec.Sets("max_age_ms") {
		if spec, err = spec.With("max_age_ms", strconv.FormatInt(c.MaxAge.Milliseconds(), 10)); err != nil {
			return demoPolicy{}, fmt.Errorf("--max-age: %w", err)
		}
	}
	return demoPolicy{name: text, spec: spec.String()}, nil
}

// readRequests reads the trace and returns its name as source. send is a part of the trace that the
// seed chooses. history is the part right before send, from which predictors may learn; it has at
// most 2,000 requests and at most a quarter of the trace.
func (c *demoCmd) readRequests() (send, history []trace.Request, source string, err error) {
	t := trace.Azure()
	source = "Azure's conversation trace (2023)"
	if c.Trace != "" {
		if t, err = trace.Read(c.Trace, trace.Options{}); err != nil {
			return nil, nil, "", err
		}
		source = filepath.Base(c.Trace)
	}
	n := uint64(len(t.Requests))
	historyLength := min(demoHistory, n/4)
	first := firstToSend(c, n, historyLength)
	send = make([]trace.Request, c.Requests)
	for i := range send {
		send[i] = t.Requests[(first+uint64(i))%n] // the trace is repeated from its first request if it is too short
	}
	history = t.Requests[first-min(first, historyLength) : first] // shorter if send begins near the beginning of the trace
	return send, history, source, nil
}

// firstToSend returns the index of the first request to send, in a trace of n requests. For seed 1
// it lies behind the history, and for each further seed where the part of the previous seed ends.
// The trace repeats, so indices count modulo n.
func firstToSend(c *demoCmd, n, historyLength uint64) uint64 {
	partLength := uint64(c.Requests) % n // modulo n, so that the product below does not overflow
	partsBefore := (c.Seed - 1) % n      // the parts of the smaller seeds
	return (historyLength + partsBefore*partLength) % n
}

// warmUpRequests returns how many requests must end before measuring begins, so that every slot has
// been refilled once. With --aggregated it is more, so that the proxy has learned how long a prompt
// takes.
func (c *demoCmd) warmUpRequests() int {
	if c.Aggregated {
		return 5 * c.Workers * c.Slots / 2 // two and a half times as many as there are slots
	}
	return c.Workers * c.Slots
}

// concurrency returns how many requests are in the system at the same time: one per slot, and those
// of --extra.
func (c *demoCmd) concurrency() int { return c.Workers*c.Slots + c.Extra }

// perTokenText returns the part of a step's time per KV token as text, in µs with --aggregated and
// otherwise in ms.
func (c *demoCmd) perTokenText() string {
	if c.Aggregated {
		return micros(c.C1)
	}
	return millis(c.C1)
}

// stepModel returns how long the engines' steps take, for the report: the fixed time C0, and C1 for
// each KV token of the fullest rank. With
// --aggregated, a step also takes Own for each prompt token of the slowest rank, Shared for each prompt token of a rank in the mean, and
// Prefill once if any rank computes a prompt. With --law, these are the law's times for ranks that
// all have the same load.
func (c *demoCmd) stepModel() report.StepModel {
	if c.deployment != nil { // --law names a deployment
		return stepModelIfLevel(c.scaledLaw())
	}
	m := report.StepModel{C0: c.C0, C1: float64(c.C1)} // a report has C1 as a number of nanoseconds
	if c.Aggregated {
		m.Own, m.Shared, m.Prefill = c.PrefillPerToken, c.PrefillShared, c.PrefillBase
	}
	return m
}

// printResult prints the result as JSON for programs or as text for people.
func (c *demoCmd) printResult(r *report.Report, std streams) error {
	if c.JSON {
		return r.JSON(std.out)
	}
	var b bytes.Buffer
	b.WriteByte('\n')
	if err := r.Table(&b); err != nil {
		return err
	}
	also := ""
	if c.Aggregated {
		also = " and computed equally many prompt tokens"
	}
	b.WriteString("\n× is the ratio to " + r.Runs[0].Policy + "; balanced: the same steps, had all ranks held the same load" + also + ".\n\n")
	for _, n := range append([]string{r.Headline()}, r.Notes...) {
		writeWrapped(&b, n)
	}
	_, err := b.WriteTo(std.out)
	return err
}

// writeWrapped writes text as an item of a list, in lines of about 100 characters, which fit into a
// terminal. An empty text writes nothing.
func writeWrapped(b *bytes.Buffer, text string) {
	const width = 100
	if text == "" { // empty: a note that does not apply
		return
	}
	column := 0
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
			b.WriteString("- ")
		case column+len(word) >= width:
			b.WriteString("\n  ")
			column = 0
		default:
			b.WriteByte(' ')
		}
		b.WriteString(word)
		column += len(word) + 1
	}
	b.WriteByte('\n')
}

// writeReport writes the page, its numbers and its animation to dir, and returns the path of the
// page.
func writeReport(r *report.Report, dir string) (string, error) {
	page := filepath.Join(dir, "report.html")
	for path, write := range map[string]func(io.Writer) error{page: r.HTML, filepath.Join(dir, "report.json"): r.JSON,
		filepath.Join(dir, "waterline.svg"): r.WriteWaterline} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			return "", err
		}
		if b.Len() == 0 { // the animation is empty if only one policy ran
			continue
		}
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			return "", err
		}
	}
	return filepath.Abs(page)
}

// fileName returns a policy's name with a dash for each character that a file system may not allow.
func fileName(name string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(`:=,/\ `, r) {
			return '-'
		}
		return r
	}, name)
}

// demoHistory is how many requests, those right before the requests that are sent, a predictor
// learns from. A proxy has seen as many after a few minutes.
const demoHistory = 2000

// writeDemoFit writes a fitted predictor, as `evenkeel fit` does, and returns the path of the file.
// Empty: there are too few requests to learn from, so the proxy learns only while it runs.
func writeDemoFit(history []trace.Request, path, source string) (string, error) {
	const enough = 100
	if len(history) < enough {
		return "", nil
	}
	learned, err := predictor.Train(string(predictor.KindSurvival), fit.Samples(history),
		predictor.Options{Created: time.Now(), Source: predictor.Source{File: source, Rows: len(history)}})
	if err != nil {
		return "", fmt.Errorf("a predictor could not be fitted to the requests before those that are sent: %w", err)
	}
	text, err := learned.Encode()
	if err != nil {
		return "", err
	}
	return path, os.WriteFile(path, text, 0o644)
}

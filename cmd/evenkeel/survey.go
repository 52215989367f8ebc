package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/lab/survey"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/draft"
	"evenkeel/mooncake"
)

// surveyCmd watches engines that already serve clients, and estimates what evenkeel could gain
// there. With --trial, it sends loads to an engine instead: see survey_trial.go.
type surveyCmd struct {
	Engines []string      `sep:"none" required:"" placeholder:"ADDR ..." help:"Ask the engines at these addresses, host:port or a URL. Name an address with several ranks once."`
	For     time.Duration `default:"15m" placeholder:"TIME" help:"Watch for this long; Ctrl-C ends it sooner (default: ${default})."`
	Every   time.Duration `default:"1s" placeholder:"TIME" help:"Ask each engine once in this time (default: ${default})."`
	Slots   int           `placeholder:"N" help:"A rank runs N requests at once: its --max-num-seqs, or SGLang's --max-running-requests divided by the number of ranks (default: the largest number that the survey sees; with --trial, the one that the engine tells)."`
	Budget  int           `name:"token-budget" placeholder:"N" help:"A step of a rank that prefills and decodes has at most N tokens, its --max-num-batched-tokens (default: the number that an engine tells, else 8192)."`
	Out     string        `short:"o" placeholder:"FILE" help:"Also write the report as a page to FILE, which must not exist yet. With --trial, it is a file of JSON, and is always written (default then: evenkeel-trial.json)."`

	surveyTrial `embed:"" group:"Play loads instead of watching"`
}

// Help returns the text that `survey --help` prints below its first line.
func (surveyCmd) Help() string {
	return `survey reads GET /metrics of engines that serve already, behind any router, and changes nothing:

    evenkeel survey --engines 10.0.0.3:8200 10.0.0.3:8201 10.0.0.4:8200 --for 15m --out survey.html

It finds which ranks step together, how uneven they are, how long a step takes, and what evenkeel could gain there. It prints the gain with an interval and with its assumptions, or the reason why it cannot tell. It takes the engines' API key from the variable OPENAI_API_KEY. SGLang has metrics only with --enable-metrics, and renews most of them every 40 steps (--decode-log-interval). Watch while traffic is as usual, because the survey counts only what it sees.

With --trial, survey does not watch. It plays four loads to ranks that prefill and decode behind one address, which nobody else may use meanwhile:

    evenkeel survey --trial --engines 10.0.0.1:8000 --law DeepSeek-V3,vllm,H200,8 --out trial.json

The requests of a load go both ways, in short blocks in turn: straight to the address, where the engine balances its ranks, and through an evenkeel in this process. First it prints what that costs and what the simulator expects. Then it prints the gain with an interval, and writes one file with all figures, without prompts and names of hosts. Start vLLM with --data-parallel-size 8 and VLLM_SERVER_DEV_MODE=1, or SGLang with --enable-dp-attention --dp-size 8 --enable-metrics (docs/trial.md).`
}

// Run watches the engines, simulates what evenkeel could gain, and prints a report. With --trial,
// it sends loads to one engine instead, in turn straight and through evenkeel, and reports what
// evenkeel gained. It first refuses values of flags that cannot work.
func (c *surveyCmd) Run(std streams) error {
	switch err := c.checkTrial(); {
	case err != nil:
		return usageError{err}
	case c.Every < 200*time.Millisecond:
		return usageError{fmt.Errorf("--every %v asks too often; take 200ms or more", c.Every)}
	case c.For < 10*c.Every:
		return usageError{fmt.Errorf("--for %v is too short for --every %v; take ten times that or more", c.For, c.Every)}
	case c.Slots < 0 || c.Slots > survey.MostSlots || c.Budget < 0: // 0 passes, because it stands for a flag that was not given
		return usageError{fmt.Errorf("--slots is a number up to %d, and --token-budget cannot be below 0", survey.MostSlots)}
	}
	if c.Trial {
		return c.runTrial(std)
	}
	targets, err := c.parseTargets()
	if err != nil {
		return usageError{err}
	}
	if c.Out == "" {
		return c.watch(std, targets, io.Discard)
	}
	return withNewFile(c.Out, func(file *os.File) error { return c.watch(std, targets, file) })
}

// withNewFile creates a new file, calls work with it and closes it. It fails if the file exists. If
// work fails, withNewFile removes the file, unless the error is a keepFileError.
func withNewFile(path string, work func(file *os.File) error) (fail error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666) //nolint:gosec // a report is read by others
	if errors.Is(err, fs.ErrExist) {
		return existsError(path)
	}
	if err != nil {
		return err
	}
	defer func() {
		keep := fail == nil || errors.As(fail, new(keepFileError))
		fail = errors.Join(fail, f.Close())
		if !keep {
			_ = os.Remove(path)
		}
	}()
	return work(f)
}

// keepFileError is an error after which withNewFile keeps the file, because its content is still
// useful.
type keepFileError struct{ error }

// Unwrap returns the error inside, so that errors.Is finds it.
func (k keepFileError) Unwrap() error { return k.error }

// watch watches the engines, simulates what evenkeel could gain, prints the report, and writes it
// as HTML to page.
func (c *surveyCmd) watch(std streams, targets []*engine.Target, page io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	client := engine.NewClient(engine.Options{ReadBuffer: 64 << 10})
	defer client.Close()
	fmt.Fprintf(std.err, "watching for %v (%s); Ctrl-C ends it with what was seen\n", c.For, shortList(c.Engines))
	bar := newProgress(std.err)
	given := survey.Given{Slots: c.Slots, Budget: c.Budget}
	for i := 0; given.Budget == 0 && i < len(targets); i++ {
		given.Budget = draft.StepBudget(ctx, client, targets[i])
	}
	began := time.Now()
	all, err := survey.Watch(ctx, client, targets, c.Every, c.For, func(gone time.Duration) {
		bar.update(int(gone.Seconds()), int(c.For.Seconds()), fmt.Sprintf("watched for %v of %v", gone.Round(time.Second), c.For))
	})
	bar.finish()
	if err != nil {
		return err
	}
	lasted := time.Since(began) // less than c.For if the user ended it
	stop()
	// A new context, so that a signal from here on ends only the simulation, and the report is still
	// written.
	ctx, stop = signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	fmt.Fprintln(std.err, "simulating what was seen, for about half a minute; Ctrl-C now ends it without the gain")
	bar = newProgress(std.err)
	findings := survey.Judge(ctx, all, given, func(done, of int) {
		bar.update(done, of, fmt.Sprintf("simulated %d of %d", done, of))
	})
	bar.finish()
	r := survey.NewReport("evenkeel "+strings.Join(os.Args[1:], " "), lasted, all, findings)
	if len(findings) == 0 {
		return errors.New("no engine gave its metrics twice, so there is nothing to compare; watch for longer")
	}
	if err := r.Text(std.out); err != nil {
		return err
	}
	if err := r.HTML(page); err != nil {
		return err
	}
	if c.Out != "" {
		fmt.Fprintf(std.err, "report: %s\n", c.Out)
	}
	return nil
}

// parseTargets returns the engines at the addresses of --engines. It fails if an address is given
// twice.
func (c *surveyCmd) parseTargets() (all []*engine.Target, err error) {
	profile := &mooncake.Profile{}
	if os.Getenv(engineKeyEnv) != "" {
		profile.APIKeyEnv = engineKeyEnv
	}
	known := map[string]bool{}
	for _, addr := range c.Engines {
		url := addr
		if !strings.Contains(url, "://") {
			url = "http://" + url
		}
		t, err := config.Target(config.Engine{URL: strings.TrimRight(url, "/")}, profile)
		if err != nil {
			return nil, fmt.Errorf("--engines %s: %w", addr, err)
		}
		if known[t.ID] {
			return nil, fmt.Errorf("--engines %s: the address is given twice; remove one", addr)
		}
		known[t.ID] = true
		all = append(all, t)
	}
	return all, nil
}

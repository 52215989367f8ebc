package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"

	"evenkeel/dispatcher/policy"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	kubernetes "evenkeel/gateway/cluster"
	"evenkeel/gateway/config"
)

// serveCmd runs the proxy. Without --config, it accepts the command line of vllm-ascend's
// load_balance_proxy_server_example.py.
type serveCmd struct {
	Config string `short:"c" placeholder:"FILE" help:"Read the config from FILE. docs/configuration.md lists every key."`

	overrides

	SelfTest bool `default:"true" negatable:"" help:"After the start, send one tiny request through every rank, with one partner of the other side, and log what is wrong (default: yes)."`

	exampleProxyFlags
}

// overrides are the flags that may be combined with --config. They override the values in the file.
type overrides struct {
	Policy     string `placeholder:"NAME" help:"The policy that chooses decode ranks (default: evenkeel). There are: ${policies}."`
	Admin      string `placeholder:"ADDR" help:"Listen here for operators: metrics, health and status (default: 127.0.0.1:9090)."`
	RequestLog string `placeholder:"FILE" help:"Write one JSON line for every request to FILE; - is stdout."`
	LogLevel   string `placeholder:"LEVEL" help:"Log lines of this level and above: debug, info, warn or error (default: info)."`
}

// Help returns the text that `serve --help` prints below its first line.
func (serveCmd) Help() string {
	return `With a file:

    evenkeel serve --config evenkeel.yaml

Relative paths in the file start at the working directory, not at the file's folder.

Without a file, in place of vllm-ascend's example proxy:

    evenkeel serve --port 9000 --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 --decoder-hosts 10.0.0.3 10.0.0.3 --decoder-ports 8200 8201 --slots 32

For engines that prefill and decode, eight ranks behind one address:

    evenkeel serve --aggregated-hosts 10.0.0.1 --aggregated-ports 8000 --aggregated-data-parallel-size 8 --slots 64

The proxy reads the file again when it changes, and on SIGHUP. A file with errors changes nothing; the errors are in the log.
SIGTERM drains the proxy: /readyz turns false at once, new requests are refused after limits.drain_grace, and running streams then have limits.drain_timeout to finish. SIGINT does the same without the grace. A second
signal ends the proxy at once. The exit status is 0 if everything finished, and 1 if something was cut.
The log goes to stderr: readable lines on a terminal, JSON lines anywhere else.
The proxy goes on if stdout or stderr is closed. It loses the lines that it cannot write, and logs their number once it can write again.`
}

// Run serves until SIGTERM or SIGINT, and then lets streams finish. A second signal ends them at
// once.
func (c *serveCmd) Run(streams) error {
	signal.Ignore(syscall.SIGPIPE) // if the program that reads the logs ends, running streams must go on
	cfg, err := c.loadConfig()
	if err != nil {
		return err
	}
	log, err := newLogger(cfg.Log.Level, os.Stderr)
	if err != nil {
		return err
	}
	kubernetes.LogTo(log)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	reloads := make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP) // registered before the start, because SIGHUP would otherwise end the program
	defer signal.Stop(reloads)

	g, err := gateway.New(cfg, log)
	if err != nil {
		return err
	}
	if c.Config != "" {
		g.Reloader().SetSource(c.Config, c.loadConfig)
	}
	handler, err := admin.New(g, admin.Options{Log: log, Version: versionText()})
	if err != nil {
		return err
	}
	if err := g.Start(handler); err != nil {
		return err
	}
	notifySystemd(log, daemon.SdNotifyReady)
	startGCTuning()
	endSelfTest := startSelfTest(g, cfg, log)
	s := reloadUntilSignal(signals, reloads, g, log)
	notifySystemd(log, daemon.SdNotifyStopping)
	endSelfTest()
	limit := g.Config().Limits.DrainTimeout
	log.Info("the proxy got a signal and ends; running requests may finish", zap.Stringer("signal", s), zap.Duration("at_most", limit))
	grace := g.Service().DrainForExit() // the proxy drains from now on, but still accepts requests for the time grace
	if s == syscall.SIGINT {            // a user at a terminal does not want to wait, and no load balancer has to notice the drain
		grace = 0
	}
	if err := shutDown(g, grace, limit, signals, log); err != nil {
		log.Error("the proxy has ended, but some requests or parts of it had not finished", zap.Error(err))
		return errFailed
	}
	log.Info("the proxy has ended: every request had finished")
	return nil
}

// reloadUntilSignal waits for a signal in signals and returns it. Meanwhile, it reloads the config
// on each signal in reloads. A reload that hangs, for example on a disk that does not answer, does
// not delay the return. It also takes the pages of the program file out of memory, at once and then
// every dropPagesEvery. A page comes back when the program uses it again, so only the pages in use
// stay in memory.
func reloadUntilSignal(signals, reloads <-chan os.Signal, g *gateway.Gateway, log *zap.Logger) os.Signal {
	dropPages := func() {
		if err := dropProgramPages(); err != nil {
			log.Debug("memory that only the start needed could not be given back to the system", zap.Error(err))
		}
	}
	dropPages()
	again := time.NewTicker(dropPagesEvery)
	defer again.Stop()
	ended := make(chan struct{})
	defer close(ended)
	go reloadOn(reloads, ended, g, log)
	for {
		select {
		case <-again.C:
			dropPages()
		case s := <-signals:
			return s
		}
	}
}

// reloadOn reloads the config on each signal in reloads until ended is closed.
func reloadOn(reloads <-chan os.Signal, ended <-chan struct{}, g *gateway.Gateway, log *zap.Logger) {
	for {
		select {
		case <-ended:
			return
		case <-reloads:
		}
		notifySystemd(log, daemon.SdNotifyReloading)
		g.Reloader().Reload(false) // Reload logs its result
		select {
		case <-ended: // the proxy has told systemd that it stops, so it must not report to be ready
			return
		default:
			notifySystemd(log, daemon.SdNotifyReady)
		}
	}
}

// dropPagesEvery is the time between two calls of dropProgramPages. It bounds how long a page of
// the program stays in memory that was used only once, for example by the self-test or in a burst
// of requests.
const dropPagesEvery = 10 * time.Second

// shutDown first waits for the time grace, so that load balancers notice the drain. Then running
// streams have the time limit to finish. A second signal ends both waits. Streams that have not
// finished are then cut, and the proxy has the time gateway.CutTime to end. One more signal ends
// this wait, too.
func shutDown(g *gateway.Gateway, grace, limit time.Duration, signals <-chan os.Signal, log *zap.Logger) error {
	ctx, cancel := context.WithTimeout(context.Background(), grace+limit)
	defer cancel()
	cutStreams := func(s os.Signal) {
		log.Warn("the proxy ends at once and cuts its streams", zap.Stringer("signal", s))
		cancel()
	}
	select {
	case <-time.After(grace):
	case s := <-signals:
		cutStreams(s)
	}
	done := make(chan error, 1)
	go func() { done <- g.Shutdown(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done(): // the time is over, or a signal has come already: Shutdown cuts the streams
	case s := <-signals:
		cutStreams(s)
	}
	select {
	case err := <-done:
		return err
	case s := <-signals:
		return fmt.Errorf("ended by another signal, %v, before every connection was closed", s)
	case <-time.After(gateway.CutTime):
		return fmt.Errorf("some parts of the proxy had not ended %v after the last stream was cut", gateway.CutTime)
	}
}

// loadConfig reads the config file or, without --config, makes a config from the flags, and
// validates it. With --config, it refuses the flags of exampleProxyFlags, because their values
// belong in the file.
func (c *serveCmd) loadConfig() (*config.Config, error) {
	if c.Config == "" {
		cfg, err := c.asConfig()
		if err != nil {
			return nil, err
		}
		c.applyFlags(cfg)
		if err := cfg.Validate(); err != nil {
			return nil, usageError{err}
		}
		return cfg, nil
	}
	if used := c.usedFlags(); len(used) > 0 {
		return nil, usageError{fmt.Errorf("--config does not go with %s; write their values into %s", strings.Join(used, ", "), c.Config)}
	}
	cfg, err := config.Load(c.Config)
	if err != nil {
		return nil, err
	}
	c.applyFlags(cfg)
	return cfg, cfg.Validate()
}

// applyFlags sets those values of a config for which the user has given flags.
func (c *serveCmd) applyFlags(cfg *config.Config) {
	c.applyOverrides(cfg)
	cfg.SelfTest = cfg.SelfTest && c.SelfTest // --no-self-test switches the self-test off; no flag switches it on
}

// applyOverrides sets those values of a config for which the user has given flags. It records the
// flags, so that errors about these values name the flag.
func (c *overrides) applyOverrides(cfg *config.Config) {
	for _, f := range []struct {
		flag, value string
		path        string
		into        *string
	}{
		{"--policy", c.Policy, "dispatch.policy", &cfg.Dispatch.Policy},
		{"--admin", c.Admin, "admin.listen", &cfg.Admin.Listen},
		{"--request-log", c.RequestLog, "log.requests", &cfg.Log.Requests},
		{"--log-level", translateLogLevel(c.LogLevel), "log.level", &cfg.Log.Level},
	} {
		if f.value != "" {
			*f.into = f.value
			cfg.Flag(f.path, f.flag)
		}
	}
}

// translateLogLevel returns evenkeel's name for a log level of vllm-ascend's proxy. Any other name
// is returned in lower case.
func translateLogLevel(level string) string {
	switch l := strings.ToLower(level); l {
	case "warning":
		return "warn"
	case "critical":
		return "error"
	default:
		return l
	}
}

// policyNames returns the names of all decode policies, with commas between them, for help texts.
func policyNames() string { return strings.Join(policy.Names(), ", ") }

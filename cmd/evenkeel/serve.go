package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"evenkeel/dispatcher/policy"
	"evenkeel/gateway"
	"evenkeel/gateway/admin"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// serveCmd is the proxy. Without --config it takes the command line of
// vllm-ascend's load_balance_proxy_server_example.py as its users type it.
type serveCmd struct {
	Config string `short:"c" placeholder:"FILE" help:"Config file. The flags below are for running without one."`

	Host           string   `default:"localhost" help:"Address to listen on."`
	Port           int      `default:"8000" help:"Port to listen on."`
	PrefillerHosts []string `sep:"none" placeholder:"HOST" help:"Hosts of the prefill engines, separated by spaces (default: localhost)."`
	PrefillerPorts []int    `sep:"none" placeholder:"PORT" help:"Their ports, one for each host (default: 8001)."`
	DecoderHosts   []string `sep:"none" placeholder:"HOST" help:"Hosts of the decode engines; each is a rank of one barrier group (default: localhost)."`
	DecoderPorts   []int    `sep:"none" placeholder:"PORT" help:"Their ports, one for each host (default: 8002)."`
	MaxRetries     int      `default:"3" help:"Attempts for a request in all."`
	RetryDelay     float64  `default:"0.001" help:"Seconds of the first backoff."`

	Slots                   int    `placeholder:"B" help:"Requests a decode rank runs at once: its --max-num-seqs (default: 32, with a warning)."`
	Policy                  string `placeholder:"NAME" help:"Decode policy (default: br0). One of: ${policies}."`
	Admin                   string `placeholder:"ADDR" help:"Admin listener (default: 127.0.0.1:9090)."`
	PrefillDataParallelSize int    `placeholder:"N" help:"DP ranks behind each prefill engine, addressed by header."`
	DecodeDataParallelSize  int    `placeholder:"N" help:"DP ranks behind each decode engine, addressed by header."`
	Connector               string `placeholder:"NAME" help:"KV connector of the engines (default: ascend-mooncake-v1)."`
	RequestLog              string `placeholder:"FILE" help:"Write a JSON line for every request; - is stdout."`
	LogLevel                string `placeholder:"LEVEL" help:"debug, info, warn or error (default: info)."`
}

// Run serves until SIGTERM or SIGINT, then lets streams finish; a second signal
// ends at once.
func (c *serveCmd) Run(streams) error {
	cfg, err := c.config()
	if err != nil {
		return err
	}
	log, err := newLogger(cfg.Log.Level)
	if err != nil {
		return err
	}
	g, err := gateway.New(cfg, log)
	if err != nil {
		return err
	}
	handler, err := admin.New(g, admin.Options{TokenFile: cfg.Admin.TokenFile, Log: log})
	if err != nil {
		return err
	}
	if err := g.Start(handler); err != nil {
		return err
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	s := <-signals
	log.Info("draining: no new requests, running ones may finish", zap.Stringer("signal", s), zap.Duration("at_most", cfg.Limits.DrainTimeout))
	ctx, cancel := context.WithTimeout(context.Background(), cfg.Limits.DrainTimeout)
	defer cancel()
	go func() {
		s := <-signals
		log.Warn("ending at once", zap.Stringer("signal", s))
		cancel()
	}()
	return g.Shutdown(ctx)
}

// config reads the file, or makes one of the flags.
func (c *serveCmd) config() (*config.Config, error) {
	if c.Config != "" {
		if used := c.dialect(); len(used) > 0 {
			return nil, fmt.Errorf("--config and %s together: write it into %s", strings.Join(used, ", "), c.Config)
		}
		cfg, err := config.Load(c.Config)
		if err != nil {
			return nil, err
		}
		return cfg, c.override(cfg)
	}
	cfg := config.Default()
	cfg.Listen = net.JoinHostPort(c.Host, strconv.Itoa(c.Port))
	cfg.Prefill.Retry.Attempts = c.MaxRetries
	cfg.Prefill.Retry.Base = time.Duration(c.RetryDelay * float64(time.Second))
	if c.Connector != "" {
		cfg.Profiles = map[string]mooncake.Profile{config.DefaultProfile: {Connector: c.Connector}}
	}
	var err error
	if cfg.Engines.Prefill, err = engines("prefiller", c.PrefillerHosts, c.PrefillerPorts, 8001); err != nil {
		return nil, err
	}
	if cfg.Engines.Decode, err = engines("decoder", c.DecoderHosts, c.DecoderPorts, 8002); err != nil {
		return nil, err
	}
	for i := range cfg.Engines.Prefill {
		cfg.Engines.Prefill[i].Ranks = c.PrefillDataParallelSize
	}
	for i := range cfg.Engines.Decode {
		cfg.Engines.Decode[i].Slots = c.Slots
		cfg.Engines.Decode[i].Ranks = c.DecodeDataParallelSize
	}
	return cfg, c.override(cfg)
}

// override applies the flags that go with a file, too.
func (c *serveCmd) override(cfg *config.Config) error {
	if c.Policy != "" {
		cfg.Dispatch.Policy = c.Policy
	}
	if c.Admin != "" {
		cfg.Admin.Listen = c.Admin
	}
	if c.RequestLog != "" {
		cfg.Log.Requests = c.RequestLog
	}
	if c.LogLevel != "" {
		cfg.Log.Level = c.LogLevel
	}
	return cfg.Validate()
}

// dialect lists the engine flags in use, which a file replaces.
func (c *serveCmd) dialect() (used []string) {
	for name, set := range map[string]bool{
		"--prefiller-hosts": len(c.PrefillerHosts) > 0, "--prefiller-ports": len(c.PrefillerPorts) > 0,
		"--decoder-hosts": len(c.DecoderHosts) > 0, "--decoder-ports": len(c.DecoderPorts) > 0,
		"--slots": c.Slots > 0, "--connector": c.Connector != "",
		"--prefill-data-parallel-size": c.PrefillDataParallelSize > 0, "--decode-data-parallel-size": c.DecodeDataParallelSize > 0,
	} {
		if set {
			used = append(used, name)
		}
	}
	return used
}

// engines pairs hosts with ports.
func engines(side string, hosts []string, ports []int, port int) ([]config.Engine, error) {
	if len(hosts) == 0 && len(ports) == 0 {
		hosts, ports = []string{"localhost"}, []int{port}
	}
	if len(hosts) != len(ports) {
		return nil, fmt.Errorf("--%s-hosts has %d entries and --%s-ports %d; every engine needs one of each", side, len(hosts), side, len(ports))
	}
	list := make([]config.Engine, len(hosts))
	for i := range hosts {
		list[i].URL = "http://" + net.JoinHostPort(strings.Trim(hosts[i], "[]"), strconv.Itoa(ports[i]))
	}
	return list, nil
}

// newLogger writes JSON lines to stderr.
func newLogger(level string) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, err
	}
	c := zap.NewProductionConfig()
	c.Level = zap.NewAtomicLevelAt(l)
	c.EncoderConfig.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	c.Sampling = nil // an SRE needs every line of the one request that failed
	return c.Build()
}

func policyNames() string { return strings.Join(policy.Names(), ", ") }

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"evenkeel/gateway/config"
	"evenkeel/gateway/selftest"
)

type checkCmd struct {
	Config  string `required:"" short:"c" placeholder:"FILE" help:"Config file."`
	Against string `placeholder:"FILE" help:"Also print what a reload would change in a proxy that runs with this file."`
	Probe   bool   `help:"Send one tiny request through every pair of engines and tell what their profiles promise but they do not do."`
	Fixture string `placeholder:"FILE" help:"Also decide the cases of FILE with the file's prefill policies, as configs/prefill-cases.json has them; fails where another engine is chosen."`
	JSON    bool   `name:"json" help:"Print one JSON document."`
}

// discoveryFiles looks at the files that list engines. serve starts without them,
// so what is wrong there is a warning.
func discoveryFiles(cfg *config.Config) []selftest.Finding {
	found := []selftest.Finding{}
	for _, path := range cfg.Discovery.Files {
		text, err := os.ReadFile(path)
		if err == nil {
			_, err = cfg.ParseEngines(path, text)
		}
		if err != nil {
			found = append(found, selftest.Finding{Level: selftest.Warn, Engine: "discovery.files", Msg: err.Error()})
		}
	}
	return found
}

// Run fails on a config that serve would refuse and on engines that would fail
// requests.
func (c *checkCmd) Run(std streams) error {
	cfg, err := config.Load(c.Config)
	if err != nil {
		return err
	}
	changes := []config.Change{}
	if c.Against != "" {
		running, err := config.Load(c.Against)
		if err != nil {
			return err
		}
		_, found, err := running.Succeed(cfg)
		if err != nil {
			return err
		}
		changes = append(changes, found...)
	}
	cases := []verdict{}
	if c.Fixture != "" {
		if cases, err = runFixture(c.Fixture, cfg); err != nil {
			return err
		}
	}
	findings := discoveryFiles(cfg)
	if c.Probe {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		findings = append(findings, selftest.Run(ctx, cfg)...)
	}
	if c.JSON {
		answer := map[string]any{"config": c.Config, "findings": findings}
		if c.Against != "" {
			answer["changes"] = changes
		}
		if c.Fixture != "" {
			answer["cases"] = cases
		}
		enc := json.NewEncoder(std.out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(answer); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(std.out, "%s: ok, %d prefill and %d decode engines, policy %s\n",
			c.Config, len(cfg.Engines.Prefill), len(cfg.Engines.Decode), cfg.Dispatch.Policy)
		for _, change := range changes {
			fmt.Fprintln(std.out, change)
		}
		for _, v := range cases {
			fmt.Fprintln(std.out, v)
		}
		for _, f := range findings {
			fmt.Fprintf(std.out, "%-4s %s: %s\n", f.Level, f.Engine, f.Msg)
		}
	}
	bad := func(f selftest.Finding) bool { return f.Level == selftest.Bad }
	if slices.ContainsFunc(findings, bad) || slices.ContainsFunc(cases, func(v verdict) bool { return !v.OK }) {
		return errFailed
	}
	return nil
}

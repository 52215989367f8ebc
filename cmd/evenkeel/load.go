package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/bench/lab/trace"
)

// loadCmd sends requests to a server. With --trace alone, it sends them at the times of the trace.
// With --rate, it scales these times to that mean rate; if there are no times, it sends at equal
// intervals. With --concurrency, it ignores the times, and keeps that many requests in the system
// (closed loop).
type loadCmd struct {
	URL []string `name:"url" required:"" sep:"none" placeholder:"URL" help:"Send to this server, such as http://127.0.0.1:8000. If there are several, requests go to them in turn."`

	Trace         string        `placeholder:"FILE" help:"Send the requests of a trace: CSV or JSON lines, gzipped or not (default: Azure's conversation trace of 2023; docs/traces.md has the columns)."`
	Format        string        `default:"auto" enum:"auto,azure,mooncake" help:"The trace has this format: ${enum}. azure is any CSV, mooncake any JSON lines (default: ${default})."`
	Rate          float64       `placeholder:"R" help:"Open loop: scale the arrival times to R requests per second."`
	Concurrency   int           `placeholder:"N" help:"Closed loop: keep N requests in the system."`
	Requests      int           `placeholder:"N" help:"Send N requests (default: the trace once, or 1000 without a trace; with --duration, no limit)."`
	Duration      time.Duration `placeholder:"D" help:"Stop sending after D. Requests in flight may finish."`
	PromptTokens  int           `placeholder:"N" help:"Without --trace, send prompts of N tokens each, with --output-tokens."`
	OutputTokens  int           `placeholder:"N" help:"Without --trace, ask for answers of N tokens each, with --prompt-tokens."`
	SharePrefixes bool          `help:"Give equal hash ids of a Mooncake trace equal text, so that prefix caches can hit."`
	MaxPrompt     int           `placeholder:"N" help:"Cut longer prompts to N tokens."`
	MaxOutput     int           `placeholder:"N" help:"Cut longer answers to N tokens."`

	Chat         float64  `default:"0.5" placeholder:"SHARE" help:"Send this share as chat completions, and the rest as completions (default: ${default})."`
	Stream       float64  `default:"1" placeholder:"SHARE" help:"Ask for this share of the answers as streams (default: ${default})."`
	Usage        float64  `default:"0.5" placeholder:"SHARE" help:"Ask for usage in this share of the streams (default: ${default})."`
	Cancel       float64  `placeholder:"SHARE" help:"Have this share of the clients leave before the end."`
	CancelPhases []string `placeholder:"PHASE" enum:"waiting,pooled,transferring,streaming" help:"Have them leave in these phases: ${enum} (default: all)."`

	Seed           uint64        `default:"1" help:"Draw prompts and shares with this seed (default: ${default})."`
	Model          string        `default:"auto" help:"Ask for this model. With auto, it is the first of /v1/models (default: ${default})."`
	APIKeyEnv      string        `name:"api-key-env" placeholder:"VAR" help:"Send the API key that this environment variable holds."`
	Timeout        time.Duration `default:"10m" help:"Give up a request after this time (default: ${default})."`
	MaxOutstanding int           `placeholder:"N" help:"Open loop: have at most N requests in flight. Requests beyond this are sent late, and the report counts them (default: 8192)."`
	Check          string        `default:"text" enum:"text,shape" help:"With text, compare every token (for reference engines). With shape, check only structure and counts (for any other engine) (default: ${default})."`
	JSON           bool          `name:"json" help:"Print one JSON document."`
}

// Run sends the load. It fails if any request failed or got a wrong answer.
func (c *loadCmd) Run(std streams) error {
	cfg, notes, err := c.config()
	if err != nil {
		return err
	}
	for _, n := range notes {
		fmt.Fprintf(std.err, "%s: %s\n", c.Trace, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	show := newProgress(std.err)
	cfg.OnProgress = show.showLoad
	result, err := load.Run(ctx, cfg)
	show.finish()
	if err != nil {
		return err
	}
	if c.JSON {
		err = writeJSON(std.out, result)
	} else {
		err = result.WriteTable(std.out)
	}
	if err == nil && (result.Failed > 0 || result.Stopped > 0) { // the output says what failed
		return errFailed
	}
	return err
}

// config checks the flags, reads the trace, and returns the config of the load. notes say what is
// special about the trace.
func (c *loadCmd) config() (_ load.Config, notes []string, _ error) {
	var none load.Config
	if err := c.checkConflicts(); err != nil {
		return none, nil, err
	}
	key, err := c.apiKey()
	if err != nil {
		return none, nil, err
	}
	t := trace.Azure() // the requests to send, unless flags give others
	if c.PromptTokens > 0 {
		t = &trace.Trace{Requests: []trace.Request{{Prompt: c.PromptTokens, Output: c.OutputTokens}}}
	}
	if c.Trace != "" {
		if t, err = trace.Read(c.Trace, trace.Options{Format: trace.Format(c.Format), Max: c.Requests}); err != nil {
			return none, nil, err
		}
	}
	cfg := load.Config{
		URLs: c.URL, APIKey: key, Model: c.Model, Requests: t.Requests, Count: c.Requests, Duration: c.Duration,
		SharePrefixes: c.SharePrefixes, MaxPrompt: c.MaxPrompt, MaxOutput: c.MaxOutput,
		Concurrency: c.Concurrency, Rate: c.Rate, MaxOutstanding: c.MaxOutstanding,
		Chat: c.Chat, Stream: c.Stream, Usage: c.Usage, Cancel: load.Cancel{Share: c.Cancel},
		Seed: c.Seed, Timeout: c.Timeout, Check: load.Check(c.Check),
	}
	for _, p := range c.CancelPhases {
		cfg.Cancel.Phases = append(cfg.Cancel.Phases, load.Phase(p))
	}
	if c.Model == "auto" {
		cfg.Model = "" // load.Run then takes the first model of /v1/models
	}
	if c.Trace == "" && c.Requests == 0 && c.Duration == 0 {
		cfg.Count = 1000 // without a count, all of t would be sent: a whole hour of Azure's trace, or a single request
	}
	if cfg.Count > 0 && cfg.Count < len(cfg.Requests) {
		// --rate scales the arrival times by the mean rate of cfg.Requests. Requests that are never sent must not count, so they are cut off.
		cfg.Requests = cfg.Requests[:cfg.Count]
	}
	return cfg, t.Notes(), cfg.Validate()
}

// checkConflicts returns an error if flags cannot be combined, or if a flag needs another one; nil:
// the flags fit together.
func (c *loadCmd) checkConflicts() error {
	for _, conflict := range []struct {
		applies bool
		why     string
	}{
		{c.Rate > 0 && c.Concurrency > 0, "--rate and --concurrency: open loop or closed loop, take one"},
		{c.MaxOutstanding > 0 && c.Concurrency > 0, "--max-outstanding and --concurrency: a closed loop is bounded by its concurrency"},
		{c.Trace == "" && c.Rate == 0 && c.Concurrency == 0, "neither --trace nor --rate nor --concurrency: one of them must set the pace"},
		{c.Trace != "" && (c.PromptTokens > 0 || c.OutputTokens > 0), "--trace and --prompt-tokens or --output-tokens: the trace says how long they are; --max-prompt and --max-output cut"},
		{(c.PromptTokens > 0) != (c.OutputTokens > 0), "--prompt-tokens and --output-tokens: give both or none"},
		{c.Trace == "" && c.Format != "auto", "--format without --trace: it is the format of that file"},
		{c.Trace == "" && c.SharePrefixes, "--share-prefixes without --trace: only a file can have hash ids"},
		{len(c.CancelPhases) > 0 && c.Cancel == 0, "--cancel-phases without --cancel: say which share of clients leaves"},
	} {
		if conflict.applies {
			return errors.New(conflict.why)
		}
	}
	return nil
}

// apiKey returns the API key from the variable of --api-key-env; empty: the flag was not given.
func (c *loadCmd) apiKey() (string, error) {
	if c.APIKeyEnv == "" {
		return "", nil
	}
	key := strings.TrimSpace(os.Getenv(c.APIKeyEnv))
	if key == "" {
		return "", fmt.Errorf("--api-key-env %s: the variable is not set", c.APIKeyEnv)
	}
	return key, nil
}

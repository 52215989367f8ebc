package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/refengine"
	"evenkeel/bench/refengine/plain"
)

// engineCmd is the reference engine: it speaks what vLLM and vllm-ascend speak,
// steps its ranks behind a barrier, and fails on demand. It generates a
// language of its own, so that a wrong token is seen.
type engineCmd struct {
	Role      string `enum:"prefill,decode,both" default:"both" help:"prefill, decode or both."`
	Listen    string `default:"127.0.0.1:8200" help:"Address of rank 0; rank i listens i ports above."`
	Advertise string `help:"Host in hand-offs (default: the host of --listen)."`
	DPSize    int    `name:"dp-size" default:"1" help:"Data-parallel ranks. Those of a decode engine step together."`
	DPMode    string `name:"dp-mode" enum:"external,internal" default:"external" help:"external: one port a rank; internal: one port, rank by header."`
	Group     string `default:"main" help:"Name of the barrier group in the step trace."`

	Model       string `default:"ref" help:"Name of the model."`
	MaxModelLen int    `default:"131072" help:"Context length in tokens."`
	Version     string `default:"0.27.1" help:"What /version says."`
	Task        string `enum:"generate,pooling,transcription" default:"generate" help:"What the model is for: generate (completions), pooling (embeddings, scores, classes) or transcription."`
	APIKey      string `name:"api-key" help:"Ask for this bearer token."`

	Slots     int `default:"32" help:"Requests a rank decodes at once (max_num_seqs)."`
	KVTokens  int `name:"kv-tokens" default:"524288" help:"KV capacity of a rank in tokens."`
	MaxQueued int `help:"Requests on a rank beyond which it answers 503; 0: no limit."`

	C0             time.Duration `name:"c0" default:"5ms" help:"Fixed time of a decode step."`
	C1             time.Duration `name:"c1" default:"200ns" help:"Time of a step per KV token of the fullest rank."`
	TokensPerChunk int           `default:"1" help:"Tokens a request gets in one step, as with speculative decoding."`
	StreamInterval int           `default:"1" help:"Steps between two chunks."`
	Recompute      bool          `help:"A preempted request ends with stop_reason recomputed, as with vllm-ascend's recompute scheduler."`

	PrefillBase     time.Duration `default:"9ms" help:"Fixed time of a prefill."`
	PrefillPerToken time.Duration `default:"9us" help:"Time of a prefill per uncached prompt token."`
	PrefixCache     int           `placeholder:"BLOCKS" help:"Blocks of 128 tokens that a rank's prefix cache keeps; 0: none. As many as --kv-tokens holds is what an engine has."`

	KVEvents         int    `name:"kv-events" placeholder:"PORT" help:"Publish KV events of rank 0 at this port, of rank i at i above; replays are as many ports above as there are ranks."`
	KVEventsEncoding string `name:"kv-events-encoding" enum:"array,map" default:"array" help:"Shape of KV events: array or map."`

	Connector        string        `enum:"ascend-mooncake-v1,nixl-pull,vllm-mooncake,opaque,ascend-layerwise,sglang,nixl-push" default:"ascend-mooncake-v1" help:"How KV is handed over: ascend-mooncake-v1, nixl-pull, vllm-mooncake or opaque; with ascend-layerwise, sglang and nixl-push the prefill engine writes it to the decode engine."`
	FlatBlockIDs     bool          `name:"flat-block-ids" help:"One flat list of block ids, as old versions."`
	KVHoldTimeout    time.Duration `name:"kv-hold-timeout" help:"How long a prefill keeps KV that nobody pulls (default: 480s; nixl-pull and nixl-push 30s)."`
	BootstrapTimeout time.Duration `placeholder:"300s" help:"sglang: how long a prefill waits for its decode engine (default: 300s)."`
	WaitingTimeout   time.Duration `placeholder:"300s" help:"sglang: how long a decode engine waits for KV (default: 300s)."`
	RejectReleases   bool          `help:"A decode request that fails validation frees the prefill's KV."`
	ErrorShape       string        `enum:"new,old,rust," default:"" help:"Shape of error bodies: new (default), old (default with sglang) or rust."`
	OldMetricNames   bool          `help:"Metric names of old versions."`

	Fault     []string `sep:"none" placeholder:"JSON" help:"A fault rule, as POST /faults takes it; may be repeated. Faults: ${faults}."`
	StepTrace string   `placeholder:"FILE" help:"Write a JSON line for every rank and step."`
	Seed      uint64   `help:"Of request ids and fault probabilities."`
}

// Run serves until SIGTERM or SIGINT.
func (c *engineCmd) Run(std streams) (err error) {
	cfg, err := c.config()
	if err != nil {
		return err
	}
	if c.StepTrace != "" {
		f, ferr := os.Create(c.StepTrace)
		if ferr != nil {
			return ferr
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		cfg.StepTrace = f
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	e, err := refengine.Start(cfg)
	if err != nil {
		return err
	}
	fmt.Fprintf(std.err, "reference engine, %s, on %s\n", c.Role, strings.Join(e.URLs(), " "))
	<-signals
	e.Close()
	return nil
}

func (c *engineCmd) config() (refengine.Config, error) {
	cfg := refengine.Config{
		Role: refengine.Role(c.Role), Listen: c.Listen, Advertise: c.Advertise, DPSize: c.DPSize, DPMode: c.DPMode, Group: c.Group,
		Model: c.Model, MaxModelLen: c.MaxModelLen, Version: c.Version, APIKey: c.APIKey, Task: plain.Task(strings.TrimPrefix(c.Task, "generate")),
		Slots: c.Slots, KVTokens: c.KVTokens, MaxQueued: c.MaxQueued,
		C0: c.C0, C1: c.C1, TokensPerChunk: c.TokensPerChunk, StreamInterval: c.StreamInterval, RecomputeEnable: c.Recompute,
		PrefillBase: c.PrefillBase, PrefillPerToken: c.PrefillPerToken, PrefixCache: c.PrefixCache, KVEventsEncoding: c.KVEventsEncoding,
		Connector: refengine.Connector(c.Connector), FlatBlockIDs: c.FlatBlockIDs, KVHoldTimeout: c.KVHoldTimeout,
		BootstrapTimeout: c.BootstrapTimeout, WaitingTimeout: c.WaitingTimeout, RejectReleases: c.RejectReleases,
		PromptTokensDetails: true, ErrorShape: refengine.ErrorShape(c.ErrorShape), OldMetricNames: c.OldMetricNames, Seed: c.Seed,
	}
	if c.KVEvents != 0 {
		host, _, err := net.SplitHostPort(c.Listen)
		if err != nil {
			return cfg, usageError{fmt.Errorf("--listen %s: %w; write host:port", c.Listen, err)}
		}
		cfg.KVEvents = net.JoinHostPort(host, strconv.Itoa(c.KVEvents))
	}
	for _, text := range c.Fault {
		var r refengine.Rule
		dec := json.NewDecoder(strings.NewReader(text))
		dec.DisallowUnknownFields()
		err := dec.Decode(&r)
		if err == nil {
			err = r.Validate()
		}
		if err != nil {
			return cfg, usageError{fmt.Errorf("--fault %s: %w", text, err)}
		}
		cfg.Faults = append(cfg.Faults, r)
	}
	if err := cfg.WithDefaults().Validate(); err != nil {
		return cfg, usageError{err}
	}
	return cfg, nil
}

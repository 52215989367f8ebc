package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/dispatcher/step"
)

// engineCmd runs the reference engine, which has the API of vLLM, vllm-ascend and SGLang without a
// model. Its ranks step together, and it fails on demand. The prompt alone determines the tokens of
// an answer, so that a client can detect a wrong answer.
type engineCmd struct {
	Role      string `enum:"prefill,decode,both,aggregated" default:"both" help:"Have this role: prefill, decode or both, with hand-offs between engines; or aggregated, with ranks that compute prompts in chunks beside their decodes, and no KV connector (default: ${default})."`
	Listen    string `default:"127.0.0.1:8200" help:"Listen here with rank 0; rank i listens i ports above (default: ${default})."`
	Advertise string `help:"Name this host in hand-offs (default: the host of --listen)."`
	DPSize    int    `name:"dp-size" default:"1" help:"Have this many data-parallel ranks. The ranks of a decode or an aggregated engine step together (default: ${default})."`
	DPMode    string `name:"dp-mode" enum:"external,internal" default:"external" help:"With external, each rank has a port. With internal, all ranks share one port, and a header names the rank (default: ${default})."`
	Group     string `default:"main" help:"Name the barrier group in the step trace (default: ${default})."`

	Model       string `default:"ref" help:"Serve a model of this name (default: ${default})."`
	MaxModelLen int    `default:"131072" help:"Take this many tokens of context (default: ${default})."`
	Version     string `help:"Answer this version to /version, or with sglang to /server_info (default: 0.27.1, with sglang 0.5.23)."`
	Task        string `enum:"generate,pooling,transcription" default:"generate" help:"Serve a model for this: generate (completions), pooling (embeddings, scores, classes) or transcription (default: ${default})."`
	APIKey      string `name:"api-key" help:"Refuse requests without this bearer token."`

	Slots     int `default:"32" help:"Run this many requests at once on a rank, as max_num_seqs (default: ${default})."`
	KVTokens  int `name:"kv-tokens" default:"524288" help:"Hold this many KV tokens on a rank (default: ${default})."`
	MaxQueued int `help:"Answer 503 beyond this many requests on a rank; 0 is no limit."`

	C0             time.Duration `name:"c0" default:"5ms" help:"Take this time for a decode step, whatever its load (default: ${default})."`
	C1             time.Duration `name:"c1" default:"200ns" help:"Take this time more per KV token of the slowest rank (default: ${default})."`
	TokensPerChunk int           `default:"1" help:"Give a request this many tokens in one step, as with speculative decoding (default: ${default})."`
	StreamInterval int           `default:"1" help:"Send a chunk once in this many steps (default: ${default})."`
	Recompute      bool          `help:"End a preempted request with stop_reason recomputed, as vllm-ascend's recompute scheduler does."`

	PrefillBase     time.Duration `default:"9ms" help:"Take this time for a prefill, however short. An aggregated engine takes it for each step that computes a prompt (default: ${default})."`
	PrefillPerToken time.Duration `default:"9us" help:"Take this time more per prompt token that is not cached. In a step of an aggregated engine, the tokens of the slowest rank count (default: ${default})."`
	PrefixCache     int           `placeholder:"BLOCKS" help:"Keep this many blocks of 128 tokens in a rank's prefix cache; with 0, there is no cache. Real engines keep as many as fit into --kv-tokens."`

	KVEvents         int    `name:"kv-events" placeholder:"PORT" help:"Publish KV events of rank 0 at this port, and of rank i at this port plus i. The port for replays is the port for events plus the number of ranks."`
	KVEventsEncoding string `name:"kv-events-encoding" enum:"array,map" default:"array" help:"Write KV events in this shape: array or map (default: ${default})."`

	Connector      string    `enum:"ascend-mooncake-v1,nixl-pull,vllm-mooncake,opaque,ascend-layerwise,sglang,nixl-push" default:"ascend-mooncake-v1" help:"Hand KV over in this way: ascend-mooncake-v1, nixl-pull, vllm-mooncake or opaque; with ascend-layerwise, sglang and nixl-push the prefill engine writes it to the decode engine (default: ${default}). The bootstrap server of vllm-mooncake and sglang is at the port of --listen: set bootstrap_port of the profile to it."`
	FlatBlockIDs   bool      `name:"flat-block-ids" help:"Write one flat list of block ids, as old versions do."`
	Holds          holdFlags `embed:""`
	RejectReleases bool      `help:"Free the prefill's KV when a decode request fails validation."`
	ErrorShape     string    `enum:"new,old,rust," default:"" help:"Write error bodies in this shape: new (default), old (default with sglang) or rust."`
	OldMetricNames bool      `help:"Use the metric names of old versions."`

	Fault []string `sep:"none" placeholder:"JSON" help:"Fail in this way: one fault rule, such as {\"fault\":\"busy\",\"count\":2}. The flag may be repeated. POST /faults takes a list of such rules. Faults: ${faults}."`
	Seed  uint64   `help:"Draw request ids, faults and --jitter with this seed."`

	Steps      stepFlags       `embed:""`
	SGLang     sglangFlags     `embed:"" group:"With --connector sglang"`
	Aggregated aggregatedFlags `embed:"" group:"With --role aggregated"`
}

type holdFlags struct {
	KVHoldTimeout time.Duration `name:"kv-hold-timeout" help:"Keep KV for this long if no decode engine pulls it (default: 480s; nixl-pull and nixl-push 30s)."`
	KeepsAnswers  time.Duration `name:"decoder-kv-blocks-ttl" placeholder:"480s" help:"Keep the KV of each answer for this long, as decode engines of nixl-pull do with bidirectional_kv_xfer (default: keep none)."`
}

// paddings has, at the index of each step.Form, the value of --padding that means this form.
var paddings = []string{step.Eager: "none", step.Unmasked: "all", step.Masked: "masked", step.OwnBuckets: "own"}

type stepFlags struct {
	CR        time.Duration `name:"cr" help:"Take this time more in a step per request of the slowest rank."`
	CM        time.Duration `name:"cm" help:"Take this time more in a step per request of the rank with most requests."`
	CS        time.Duration `name:"cs" help:"Take this time more in a step per request of all ranks, divided by the number of ranks."`
	Padding   string        `enum:"none,all,masked,own" default:"none" help:"Pad the requests of ranks to the size of a graph, as engines do: none; all ranks to the largest one, where --cs is taken for what pads, too (all) or not (masked); or each rank by itself (own) (default: ${default})."`
	Captured  int           `default:"512" help:"With --padding, have graphs for up to this many requests of a rank (default: ${default})."`
	Jitter    time.Duration `placeholder:"20ms" help:"The scheduler sees a request after a random time, from a tenth of this to all of it, as with tokenizers that work in parallel."`
	StepTrace string        `placeholder:"FILE" help:"Write a JSON line for every rank and step to FILE."`
}

type sglangFlags struct {
	BootstrapTimeout time.Duration `placeholder:"300s" help:"sglang: let a prefill wait this long for its decode engine (default: 300s)."`
	WaitingTimeout   time.Duration `placeholder:"300s" help:"sglang: let a decode engine wait this long for KV (default: 300s)."`
	BarrierMetrics   bool          `help:"sglang: count in the metrics how long ranks wait for each other, as with SGLANG_ENABLE_METRICS_DP_ATTENTION=1."`
}

type aggregatedFlags struct {
	MaxNumBatchedTokens     int           `default:"8192" help:"Compute this many tokens of prompts and answers on a rank in one step (default: ${default})."`
	PrefillShared           time.Duration `help:"Take this time more per prompt token, divided by the number of ranks: the part that all ranks compute together."`
	PrefillScheduleInterval int           `default:"1" help:"Compute prompts only in every Nth step, as vLLM's flag of this name does; with --prefill-first, N-1 steps without prompts follow each step with some, as in SGLang (default: ${default})."`
	PrefillFirst            bool          `help:"Have a rank not decode while it can compute a prompt, as SGLang does."`
	PrefillDelayer          int           `placeholder:"STEPS" help:"Begin no prompt until each rank has one, but wait at most this many steps, as SGLang's delayer does (30 there)."`
}

// Run serves until SIGTERM or SIGINT, and then ends at once.
func (c *engineCmd) Run(std streams) (err error) {
	cfg, err := c.config()
	if err != nil {
		return err
	}
	if c.Steps.StepTrace != "" {
		f, ferr := os.Create(c.Steps.StepTrace)
		if ferr != nil {
			return ferr
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		cfg.Steps.Trace = f
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

// config returns the engine's config as the flags describe it, and validates it. Each of its errors
// is a usageError.
func (c *engineCmd) config() (refengine.Config, error) {
	cfg := refengine.Config{
		Role: refengine.Role(c.Role), Connector: refengine.Connector(c.Connector), Version: c.Version, Group: c.Group,
		DPSize: c.DPSize, DPMode: c.DPMode, Slots: c.Slots, MaxQueued: c.MaxQueued, Jitter: c.Steps.Jitter, Seed: c.Seed,
		Server: refengine.Server{Listen: c.Listen, Advertise: c.Advertise, APIKey: c.APIKey},
		// The task generate is the zero value of Task.
		Model: refengine.Model{Name: c.Model, MaxLen: c.MaxModelLen, Task: plain.Task(strings.TrimPrefix(c.Task, "generate"))},
		// A step takes C0, and times for the slowest rank (C1 per KV token, CR per request), for the rank
		// with most requests (CM per request) and for all ranks (CS per request, divided by the number of
		// ranks).
		Steps: refengine.Steps{C0: c.C0, C1: c.C1, CR: c.Steps.CR, CM: c.Steps.CM, CS: c.Steps.CS, TokensPerChunk: c.TokensPerChunk,
			StreamInterval: c.StreamInterval, Recompute: c.Recompute},
		Prompts: refengine.Prompts{Base: c.PrefillBase, PerToken: c.PrefillPerToken, MaxBatchedTokens: c.Aggregated.MaxNumBatchedTokens,
			Shared: c.Aggregated.PrefillShared, Interval: c.Aggregated.PrefillScheduleInterval, First: c.Aggregated.PrefillFirst,
			Delayer: c.Aggregated.PrefillDelayer},
		KV: refengine.KV{Tokens: c.KVTokens, PrefixCache: c.PrefixCache, FlatBlockIDs: c.FlatBlockIDs, HoldTimeout: c.Holds.KVHoldTimeout,
			KeepsAnswers: c.Holds.KeepsAnswers, RejectReleases: c.RejectReleases},
		KVEvents: refengine.KVEvents{Encoding: c.KVEventsEncoding},
		SGLang: refengine.SGLangOptions{BootstrapTimeout: c.SGLang.BootstrapTimeout, WaitingTimeout: c.SGLang.WaitingTimeout,
			BarrierMetrics: c.SGLang.BarrierMetrics},
		// Answers always say how many prompt tokens were cached. vLLM does so only with
		// --enable-prompt-tokens-details, which evenkeel asks operators to set.
		Answers: refengine.Answers{
			PromptTokensDetails: true, ErrorShape: refengine.ErrorShape(c.ErrorShape), OldMetricNames: c.OldMetricNames,
		},
	}
	if c.KVEvents != 0 {
		host, _, err := net.SplitHostPort(c.Listen)
		if err != nil {
			return cfg, usageError{fmt.Errorf("--listen %s: %w; write host:port", c.Listen, err)}
		}
		cfg.KVEvents.Address = net.JoinHostPort(host, strconv.Itoa(c.KVEvents))
	}
	if form := slices.Index(paddings, c.Steps.Padding); form > 0 { // 0 is step.Eager, the default, which pads nothing
		cfg.Steps.Form = step.Form(form)      // for which ranks padding costs time
		cfg.Steps.Captured = c.Steps.Captured // the size of the largest graph, in requests of a rank
	}
	for _, text := range c.Fault {
		r, err := parseFault(text)
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

// parseFault reads one rule of --fault from its JSON, and validates it.
func parseFault(text string) (r refengine.Rule, err error) {
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	if err = dec.Decode(&r); err == nil {
		err = r.Validate()
	}
	return r, err
}

package refengine

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/dispatcher/step"
)

// Role says which requests an engine takes.
type Role string

// The roles. A request without kv_transfer_params is served by all of them. Those with a KV
// connector compute its prompt as a local prefill that is counted, and an aggregated engine in
// chunks, beside its decodes.
const (
	Prefill    Role = "prefill" // kv_producer: answers probes
	Decode     Role = "decode"  // kv_consumer: takes hand-offs
	Both       Role = "both"
	Aggregated Role = "aggregated" // has no connector: kv_transfer_params are ignored
)

// Config describes one deployment: DPSize ranks that share a role. The zero
// value of a field means its default.
type Config struct {
	Role      Role      // default both
	Connector Connector // shape of hand-offs, default ascend-mooncake-v1
	Version   string    // default 0.27.1, of SGLang 0.5.23
	Group     string    // name in the step trace, default "main"
	DPSize    int       // ranks, default 1
	// external (default): one port a rank; internal: one port, header X-data-parallel-rank, which is
	// read at /v1/responses from Version 0.33 on
	DPMode string
	// of a node in hybrid mode: the number of its first rank in the deployment. Metrics count from it,
	// and with ShapeRust, the header too
	DPFirst int

	Slots     int // requests that run at once on a rank (max_num_seqs), default 32
	MaxQueued int // requests on a rank beyond which it answers 503, 0 = no limit
	// a request is seen by the scheduler so much later than it came, at most, and a tenth of it at
	// least: tokenizers work side by side
	Jitter         time.Duration
	FaultTolerance bool // vLLM was started with --enable-fault-tolerance

	Server   Server
	Model    Model
	Steps    Steps
	Prompts  Prompts
	KV       KV
	KVEvents KVEvents
	SGLang   SGLangOptions
	Answers  Answers

	Seed   uint64 // of request id suffixes and of fault probabilities
	Faults []Rule
	Hooks  Hooks
}

const blockSize = cache.BlockSize

// WithDefaults fills in what was left zero.
func (c Config) WithDefaults() Config {
	c.Role = cmp.Or(c.Role, Both)
	c.Connector = cmp.Or(c.Connector, AscendMooncake)
	if c.Connector == SGLang {
		c.Version = cmp.Or(c.Version, "0.5.23")
	}
	c.Version = cmp.Or(c.Version, "0.27.1")
	c.Group = cmp.Or(c.Group, "main")
	c.DPSize = cmp.Or(c.DPSize, 1)
	c.DPMode = cmp.Or(c.DPMode, "external")
	c.Slots = cmp.Or(c.Slots, 32)
	c.Server = c.Server.withDefaults()
	c.Model = c.Model.withDefaults()
	c.Steps = c.Steps.withDefaults()
	c.Prompts = c.Prompts.withDefaults(c.Role)
	c.KV = c.KV.withDefaults(c.Connector, c.Role)
	c.KVEvents = c.KVEvents.withDefaults()
	c.SGLang = c.SGLang.withDefaults(c.Role)
	c.Answers = c.Answers.withDefaults(c.Connector)
	return c
}

// Validate expects the defaults to be filled in.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("refengine: "+format, args...)) }
	oneOf := func(field, value string, allowed ...string) {
		if !slices.Contains(allowed, value) {
			bad("%s is %q; use one of %q", field, value, allowed)
		}
	}
	oneOf("role", string(c.Role), string(Prefill), string(Decode), string(Both), string(Aggregated))
	if s := c.Steps; c.Role == Aggregated && (c.Connector == SGLang || s.TokensPerChunk > 1 || s.FirstAtOnce || s.Spread || s.Recompute) {
		bad("role aggregated: the engine speaks as vLLM, has one token of each request per step, at the step's end, and computes what it has " +
			"preempted")
	}
	oneOf("dp mode", c.DPMode, "external", "internal")
	oneOf("connector", string(c.Connector), string(AscendMooncake), string(NIXLPull), string(VLLMMooncake), string(Opaque),
		string(AscendLayerwise), string(SGLang), string(NIXLPush))
	if c.Connector == SGLang && c.Role == Both {
		bad("connector %s: an engine is for prefill or for decode, because its requests do not say which leg they are", c.Connector)
	}
	if c.Connector == SGLang {
		oneOf("load balance", c.SGLang.LoadBalance, followRoom, roundRobin)
	}
	oneOf("KV events encoding", c.KVEvents.Encoding, "array", "map")
	oneOf("error shape", string(c.Answers.ErrorShape), string(ShapeNew), string(ShapeOld), string(ShapeRust))
	if _, _, err := net.SplitHostPort(c.Server.Listen); err != nil {
		bad("listen address %q: %w; write host:port", c.Server.Listen, err)
	}
	atLeast := func(field string, value, least int64) {
		if value < least {
			bad("%s is %d; it must be at least %d", field, value, least)
		}
	}
	atLeast("dp size", int64(c.DPSize), 1)
	atLeast("slots", int64(c.Slots), 1)
	atLeast("KV tokens", int64(c.KV.Tokens), blockSize)
	atLeast("max model len", int64(c.Model.MaxLen), 2)
	atLeast("tokens per chunk", int64(c.Steps.TokensPerChunk), 1)
	atLeast("stream interval", int64(c.Steps.StreamInterval), 1)
	atLeast("prefill concurrency", int64(c.Prompts.Concurrency), 1)
	atLeast("max batched tokens", int64(c.Prompts.MaxBatchedTokens), 1)
	if c.Role == Aggregated && c.Prompts.MaxBatchedTokens < c.Slots {
		bad("max batched tokens is %d; each of the %d slots needs one", c.Prompts.MaxBatchedTokens, c.Slots)
	}
	atLeast("prefill interval", int64(c.Prompts.Interval), 1)
	atLeast("prefill delayer", int64(c.Prompts.Delayer), 0)
	atLeast("prefix cache", int64(c.KV.PrefixCache), 0)
	atLeast("step log", int64(c.Steps.Log), 1)
	atLeast("heartbeat", int64(c.SGLang.Heartbeat), 1)
	if c.KVEvents.Address != "" && c.KV.PrefixCache == 0 {
		bad("KV events without a prefix cache; give it a size")
	}
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"c0", c.Steps.C0}, {"c1", c.Steps.C1}, {"cr", c.Steps.CR}, {"cm", c.Steps.CM}, {"cs", c.Steps.CS}, {"prefill base", c.Prompts.Base},
		{"prefill per token", c.Prompts.PerToken}, {"prefill shared", c.Prompts.Shared}, {"jitter", c.Jitter},
		{"KV hold timeout", c.KV.HoldTimeout}, {"time to keep answers", c.KV.KeepsAnswers},
		{"bootstrap timeout", c.SGLang.BootstrapTimeout}, {"waiting timeout", c.SGLang.WaitingTimeout},
		{"keep-alive", c.Server.KeepAlive}} {
		if d.value < 0 {
			bad("%s is %v; it must not be negative", d.field, d.value)
		}
	}
	if c.KV.KeepsAnswers > 0 && c.Connector != NIXLPull { // vLLM 0.33, nixl/push_scheduler.py
		bad("connector %s keeps no KV of answers; only %s does", c.Connector, NIXLPull)
	}
	atLeast("captured", int64(c.Steps.Captured), 0)
	if c.Steps.Form != step.Eager && c.Steps.Captured == 0 {
		bad("the form %s has no graphs; say how large the largest one is", c.Steps.Form)
	}
	for i, r := range c.Faults {
		if err := r.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("refengine: fault %d: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

// Quick is the config with times that hold no test up, where it has none of its own.
func (c Config) Quick() Config {
	c.Steps.C0, c.Steps.C1 = cmp.Or(c.Steps.C0, time.Millisecond), cmp.Or(c.Steps.C1, time.Nanosecond)
	c.Prompts.Base, c.Prompts.PerToken = cmp.Or(c.Prompts.Base, time.Millisecond), cmp.Or(c.Prompts.PerToken, time.Nanosecond)
	c.KV.TransferBase, c.KV.TransferPer = cmp.Or(c.KV.TransferBase, 100*time.Microsecond), cmp.Or(c.KV.TransferPer, time.Nanosecond)
	c.Slots = cmp.Or(c.Slots, 16)
	return c
}

// group is the part that says how requests are decoded.
func (c Config) group() group.Config {
	waits := group.WaitsForBlocks
	switch c.Connector {
	case NIXLPull, NIXLPush:
		waits = group.WaitsForSlot
	case SGLang:
		waits = group.WaitsForPlace
	}
	s, p := c.Steps, c.Prompts
	var mixed *group.Mixed
	if c.Role == Aggregated {
		mixed = &group.Mixed{Budget: p.MaxBatchedTokens, Interval: p.Interval, First: p.First, Delay: p.Delayer, Shared: p.Shared}
	}
	return group.Config{
		Ranks: c.DPSize, Slots: c.Slots, Blocks: c.KV.Tokens / blockSize, TokensPerChunk: s.TokensPerChunk,
		C0: s.C0, C1: s.C1, CR: s.CR, CM: s.CM, CS: s.CS, Form: s.Form, Captured: s.Captured, Law: s.Law, Phase: s.Phase,
		FirstAtOnce: s.FirstAtOnce, Spread: s.Spread, Recompute: s.Recompute, PrefillBase: p.Base, PrefillPer: p.PerToken, Waits: waits,
		Mixed: mixed,
	}
}

// before tells whether the engine is older than a 0.x of vLLM.
func (c Config) before(minor int) bool { return c.minor() < minor }

// minor is the x of vLLM 0.x. An engine whose version says nothing is new.
func (c Config) minor() int {
	var major, has int
	n, _ := fmt.Sscanf(c.Version, "%d.%d", &major, &has)
	if c.Connector == SGLang || n != 2 || major > 0 {
		return math.MaxInt
	}
	return has
}

// resumeKey is the member of kv_transfer_params whose token ids stand for the prompt of a chat:
// vLLM has one from 0.27 on, and vllm-ascend 0.26 has its own.
func (c Config) resumeKey() string {
	ascend := c.Connector == AscendMooncake || c.Connector == AscendLayerwise
	switch {
	case c.Answers.NoResumeIDs, ascend && c.before(26), !ascend && c.before(27):
		return ""
	case c.before(27):
		return "_vllm_ascend_recompute_token_ids"
	}
	return "prompt_token_ids"
}

// namesRequests: before 0.14 a hand-off of vllm-ascend did not say which request
// made it, nor before 0.13 one of vLLM's NIXL. Its blocks are known by the probe's
// own id then, which has no random suffix yet, and a decode engine reports a pull
// under the id of its request.
func (c Config) namesRequests() bool {
	return !(c.Connector == AscendMooncake && c.before(14) || c.Connector == NIXLPull && c.before(13))
}

// keepsEnded: the NIXL connector of 0.32, and the one that pushes, hand off also what the end of
// its sequence has ended.
func (c Config) keepsEnded() bool {
	return c.Connector == NIXLPull && !c.before(32) || c.Connector == NIXLPush
}

func blocks(tokens int) int { return cache.Blocks(tokens) }

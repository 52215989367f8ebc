package refengine

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"time"

	"evenkeel/bench/lab/refengine/cache"
	"evenkeel/bench/lab/refengine/group"
	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/refengine/prompts"
	"evenkeel/dispatcher/step"
)

// Role says which requests an engine takes.
type Role string

// The roles. A request without kv_transfer_params is served by all of them. Those with a KV connector compute its
// prompt as a local prefill that is counted, and an aggregated engine in chunks, beside its decodes.
const (
	Prefill    Role = "prefill" // kv_producer: answers probes
	Decode     Role = "decode"  // kv_consumer: takes hand-offs
	Both       Role = "both"
	Aggregated Role = "aggregated" // has no connector: kv_transfer_params are ignored
)

// Config describes one deployment: DPSize ranks that share a role. The zero
// value of a field means its default.
type Config struct {
	Role      Role   // default both
	Listen    string // address of rank 0, default 127.0.0.1:0; rank i listens i ports above, port 0 takes free ones
	Advertise string // host in hand-offs and URLs, default the host of Listen, 127.0.0.1 when that is a wildcard
	DPSize    int    // ranks, default 1
	// external (default): one port a rank; internal: one port, header X-data-parallel-rank, which is read at /v1/responses from Version 0.33
	// on
	DPMode string
	// of a node in hybrid mode: the number of its first rank in the deployment. Metrics count from it, and with ShapeRust, the header too
	DPFirst int
	Group   string // name in the step trace, default "main"

	Model       string     // default "ref"
	Aliases     []string   // more names of it, which /v1/models lists, too
	Adapters    []string   // LoRA adapters that every rank has from the start
	Parentless  bool       // /v1/models lists adapters without parent
	MaxModelLen int        // tokens, default 131072
	Version     string     // default 0.27.1, of SGLang 0.5.23
	Task        plain.Task // what the model is for; default completions
	APIKey      string     // empty: none is asked for

	Slots     int // requests that run at once on a rank (max_num_seqs), default 32
	KVTokens  int // KV capacity of a rank, default 524288; with role both its prefill and its decode half have as much each
	MaxQueued int // requests on a rank beyond which it answers 503, 0 = no limit

	C0       time.Duration // a step's fixed time, default 5 ms
	C1       time.Duration // a step's time per KV token of the slowest rank, default 200 ns
	CR       time.Duration // a step's time per request of the slowest rank
	CM       time.Duration // a step's time per request of the rank with most requests
	CS       time.Duration // a step's time per request of all ranks, divided by how many ranks there are
	Form     step.Form     // whether ranks are padded to the size of a graph, and for whom that costs something
	Captured int           // the largest graph, by requests of a rank; 0: there are none
	// what a step takes in place of all of these, and of PrefillBase, PrefillPerToken and PrefillShared on aggregated ranks; nil: they say
	Law *step.Law
	// steps end so long after whole multiples of C0, so that engines in turn do not all speak at once; 0: the first begins when a request
	// comes
	Phase          time.Duration
	TokensPerChunk int // tokens a request gets in one step, as with MTP, default 1
	StreamInterval int // steps between two chunks after the first, default 1
	// a request's first token comes when its KV is there, not at the end of a step: for measurements of what lies in front of the engine
	FirstAtOnce bool
	// a step's tokens come one after the other while it runs, as if each request had a clock of its own, and not all at the step's end
	Spread          bool
	RecomputeEnable bool // a preempted request ends with stop_reason "recomputed" instead of being recomputed in place

	PrefillBase        time.Duration // default 9 ms; of aggregated ranks, of each step in which any of them computes a prompt, default 0
	PrefillPerToken    time.Duration // of uncached prompt tokens, default 9 µs; of aggregated ranks, the part that is the rank's own
	PrefillConcurrency int           // prompts a rank prefills at once, default 1
	// blocks of 128 tokens that a rank's prefix cache keeps, 0 = none; on a decode rank prompts that were pulled, and computed there. Decode
	// ranks of SGLang have none
	PrefixCache int

	// Of aggregated ranks.
	MaxBatchedTokens int           // tokens of prompts and answers that a rank computes in a step (max_num_batched_tokens), default 8192
	PrefillShared    time.Duration // of uncached prompt tokens, the part that all ranks compute together
	PrefillInterval  int           // prompts are computed in every so many steps (vLLM's prefill_schedule_interval), default 1
	PrefillFirst     bool          // a rank does not decode while it can compute a prompt, as those of SGLang
	PrefillDelayer   int           // steps for which no prompt is begun until each rank has one, as SGLang's delayer does; 0: none is held

	// a request is seen by the scheduler so much later than it came, at most, and a tenth of it at least: tokenizers work side by side
	Jitter time.Duration

	// address of rank 0's KV events, empty = none; rank i publishes i ports above, replays are DPSize ports above; port 0 takes free ones
	KVEvents         string
	KVEventsEncoding string        // array (default) or map
	KVEventsHWM      int           // batches a subscriber may be behind before it loses some, default 1000
	KVEventsDelay    time.Duration // of each batch on its way to a subscriber

	Connector     Connector     // shape of hand-offs, default ascend-mooncake-v1
	FlatBlockIDs  bool          // one flat list of block ids, as versions up to 0.13 sent
	KVHoldTimeout time.Duration // how long a prefill keeps KV nobody pulls, default 480 s, 30 s for nixl-pull
	// how long a decode engine keeps the KV of an answer for a next turn (decoder_kv_blocks_ttl, with bidirectional_kv_xfer); 0: it does not
	KeepsAnswers     time.Duration
	NoRenewals       bool          // like versions of NIXL without leases: a decode engine's queue renews no hold
	TransferBase     time.Duration // of a pull, default 1 ms
	TransferPer      time.Duration // of a pull per prompt token, default 100 ns
	BootstrapTimeout time.Duration // how long a prefill of SGLang waits for its decode engine, default 300 s
	WaitingTimeout   time.Duration // how long a decode engine of SGLang waits for KV, default 300 s
	// which rank of SGLang behind one port gets a request that names none: follow_bootstrap_room (default of prefill) or round_robin (default
	// of decode)
	LoadBalance    string
	ElasticEP      *string       // backend with which SGLang goes on without a rank that has lost its GPU; nil: it does not
	FaultTolerance bool          // vLLM was started with --enable-fault-tolerance
	Replicas       bool          // the ranks of SGLang are replicas without DP attention
	BarrierMetrics bool          // ranks of SGLang count how long they wait for each other (SGLANG_ENABLE_METRICS_DP_ATTENTION=1)
	Heartbeat      time.Duration // between two looks of it at a prefill engine that it waits for, default 5 s
	RejectReleases bool          // a decode request that fails validation frees the prefill's KV (vllm#41269)

	PromptTokensDetails bool // report cached_tokens
	ForceUsage          bool // usage on every chunk though nobody asked
	NoContinuousUsage   bool // as versions that ignore continuous_usage_stats
	NoScaleOut          bool // started without --enable-scale-out: token ids are refused
	NoTokenIDs          bool // as versions that ignore return_token_ids
	NoResumeIDs         bool // as versions that ignore the token ids in kv_transfer_params
	ReasoningTokens     int  // the first tokens of a chat answer go into ReasoningField
	ReasoningField      string
	ErrorShape          ErrorShape // default new
	OldMetricNames      bool

	KeepAlive time.Duration // an idle connection is closed after it, default 5 s as uvicorn does
	MaxBody   int64         // bytes, default 64 MiB

	Seed   uint64 // of request id suffixes and of fault probabilities
	Faults []Rule
	// told of each rule that strikes a request: reftext's key of its answer says whose; nil: nobody is
	OnStrike  func(answer uint64, r Rule)
	OnRequest func(path string, header http.Header) // told of each request that was read; nil: nobody is
	// asked before a rule breaks an answer off that has begun to come: how many tokens are out, from its beginning.
	// The engine waits until it returns. nil: nobody is
	OnBreak   func(answer uint64, tokens int)
	StepTrace io.Writer // JSON lines, one for each step; nil = none
	StepLog   int       // steps kept in memory, default 65536
}

const blockSize = cache.BlockSize

// How a server of SGLang chooses a rank, as its --load-balance-method.
const (
	followRoom = "follow_bootstrap_room"
	roundRobin = "round_robin"
)

// prompts is the part that says how prompts are computed.
func (c Config) prompts() prompts.Config {
	return prompts.Config{Blocks: c.KVTokens / blockSize, Cache: c.PrefixCache, Concurrency: c.PrefillConcurrency, Base: c.PrefillBase,
		PerToken: c.PrefillPerToken}
}

// WithDefaults fills in what was left zero.
func (c Config) WithDefaults() Config {
	c.Role = cmp.Or(c.Role, Both)
	c.Listen = cmp.Or(c.Listen, "127.0.0.1:0")
	if host, _, err := net.SplitHostPort(c.Listen); err == nil {
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		c.Advertise = cmp.Or(c.Advertise, host)
	}
	c.DPSize = cmp.Or(c.DPSize, 1)
	c.DPMode = cmp.Or(c.DPMode, "external")
	c.Group = cmp.Or(c.Group, "main")
	c.Model = cmp.Or(c.Model, "ref")
	c.MaxModelLen = cmp.Or(c.MaxModelLen, 131072)
	if c.Connector == SGLang {
		c.Version = cmp.Or(c.Version, "0.5.23")
	}
	c.Version = cmp.Or(c.Version, "0.27.1")
	c.Slots = cmp.Or(c.Slots, 32)
	c.KVTokens = cmp.Or(c.KVTokens, 524288)
	c.C0 = cmp.Or(c.C0, 5*time.Millisecond)
	c.C1 = cmp.Or(c.C1, 200*time.Nanosecond)
	c.TokensPerChunk = cmp.Or(c.TokensPerChunk, 1)
	c.StreamInterval = cmp.Or(c.StreamInterval, 1)
	if c.Role != Aggregated {
		c.PrefillBase = cmp.Or(c.PrefillBase, 9*time.Millisecond)
	}
	c.PrefillPerToken = cmp.Or(c.PrefillPerToken, 9*time.Microsecond)
	c.PrefillConcurrency = cmp.Or(c.PrefillConcurrency, 1)
	c.MaxBatchedTokens = cmp.Or(c.MaxBatchedTokens, 8192)
	c.PrefillInterval = cmp.Or(c.PrefillInterval, 1)
	c.KVEventsEncoding = cmp.Or(c.KVEventsEncoding, "array")
	c.KVEventsHWM = cmp.Or(c.KVEventsHWM, 1000)
	c.Connector = cmp.Or(c.Connector, AscendMooncake)
	if c.Connector == NIXLPull || c.Connector == NIXLPush {
		c.KVHoldTimeout = cmp.Or(c.KVHoldTimeout, 30*time.Second)
	}
	c.KVHoldTimeout = cmp.Or(c.KVHoldTimeout, 480*time.Second)
	c.TransferBase = cmp.Or(c.TransferBase, time.Millisecond)
	c.TransferPer = cmp.Or(c.TransferPer, 100*time.Nanosecond)
	c.BootstrapTimeout = cmp.Or(c.BootstrapTimeout, 300*time.Second)
	c.WaitingTimeout = cmp.Or(c.WaitingTimeout, 300*time.Second)
	c.Heartbeat = cmp.Or(c.Heartbeat, 5*time.Second)
	if c.Connector == SGLang {
		c.ReasoningField = cmp.Or(c.ReasoningField, "reasoning_content")
		c.ErrorShape = cmp.Or(c.ErrorShape, ShapeOld)
		if c.Role == Decode { // unless --disaggregation-decode-enable-radix-cache is set
			c.PrefixCache = 0
		}
		if c.Role == Prefill {
			c.LoadBalance = cmp.Or(c.LoadBalance, followRoom)
		}
		c.LoadBalance = cmp.Or(c.LoadBalance, roundRobin)
	}
	c.ReasoningField = cmp.Or(c.ReasoningField, "reasoning")
	c.ErrorShape = cmp.Or(c.ErrorShape, ShapeNew)
	c.KeepAlive = cmp.Or(c.KeepAlive, 5*time.Second)
	c.MaxBody = cmp.Or(c.MaxBody, 64<<20)
	c.StepLog = cmp.Or(c.StepLog, 65536)
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
	if c.Role == Aggregated && (c.Connector == SGLang || c.TokensPerChunk > 1 || c.FirstAtOnce || c.Spread || c.RecomputeEnable) {
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
		oneOf("load balance", c.LoadBalance, followRoom, roundRobin)
	}
	oneOf("KV events encoding", c.KVEventsEncoding, "array", "map")
	oneOf("error shape", string(c.ErrorShape), string(ShapeNew), string(ShapeOld), string(ShapeRust))
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		bad("listen address %q: %w; write host:port", c.Listen, err)
	}
	atLeast := func(field string, value, least int64) {
		if value < least {
			bad("%s is %d; it must be at least %d", field, value, least)
		}
	}
	atLeast("dp size", int64(c.DPSize), 1)
	atLeast("slots", int64(c.Slots), 1)
	atLeast("KV tokens", int64(c.KVTokens), blockSize)
	atLeast("max model len", int64(c.MaxModelLen), 2)
	atLeast("tokens per chunk", int64(c.TokensPerChunk), 1)
	atLeast("stream interval", int64(c.StreamInterval), 1)
	atLeast("prefill concurrency", int64(c.PrefillConcurrency), 1)
	atLeast("max batched tokens", int64(c.MaxBatchedTokens), 1)
	if c.Role == Aggregated && c.MaxBatchedTokens < c.Slots {
		bad("max batched tokens is %d; each of the %d slots needs one", c.MaxBatchedTokens, c.Slots)
	}
	atLeast("prefill interval", int64(c.PrefillInterval), 1)
	atLeast("prefill delayer", int64(c.PrefillDelayer), 0)
	atLeast("prefix cache", int64(c.PrefixCache), 0)
	atLeast("step log", int64(c.StepLog), 1)
	atLeast("heartbeat", int64(c.Heartbeat), 1)
	if c.KVEvents != "" && c.PrefixCache == 0 {
		bad("KV events without a prefix cache; give it a size")
	}
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"c0", c.C0}, {"c1", c.C1}, {"cr", c.CR}, {"cm", c.CM}, {"cs", c.CS}, {"prefill base", c.PrefillBase},
		{"prefill per token", c.PrefillPerToken},
		{"prefill shared", c.PrefillShared}, {"jitter", c.Jitter},
		{"KV hold timeout", c.KVHoldTimeout}, {"time to keep answers", c.KeepsAnswers}, {"bootstrap timeout", c.BootstrapTimeout},
		{"waiting timeout", c.WaitingTimeout}, {"keep-alive", c.KeepAlive}} {
		if d.value < 0 {
			bad("%s is %v; it must not be negative", d.field, d.value)
		}
	}
	if c.KeepsAnswers > 0 && c.Connector != NIXLPull { // vLLM 0.33, nixl/push_scheduler.py
		bad("connector %s keeps no KV of answers; only %s does", c.Connector, NIXLPull)
	}
	atLeast("captured", int64(c.Captured), 0)
	if c.Form != step.Eager && c.Captured == 0 {
		bad("the form %s has no graphs; say how large the largest one is", c.Form)
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
	c.C0, c.C1 = cmp.Or(c.C0, time.Millisecond), cmp.Or(c.C1, time.Nanosecond)
	c.PrefillBase, c.PrefillPerToken = cmp.Or(c.PrefillBase, time.Millisecond), cmp.Or(c.PrefillPerToken, time.Nanosecond)
	c.TransferBase, c.TransferPer = cmp.Or(c.TransferBase, 100*time.Microsecond), cmp.Or(c.TransferPer, time.Nanosecond)
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
	var mixed *group.Mixed
	if c.Role == Aggregated {
		mixed = &group.Mixed{Budget: c.MaxBatchedTokens, Interval: c.PrefillInterval, First: c.PrefillFirst, Delay: c.PrefillDelayer,
			Shared: c.PrefillShared}
	}
	return group.Config{Ranks: c.DPSize, Slots: c.Slots, Blocks: c.KVTokens / blockSize, TokensPerChunk: c.TokensPerChunk, C0: c.C0, C1: c.C1,
		CR: c.CR, CM: c.CM, CS: c.CS, Form: c.Form, Captured: c.Captured, Law: c.Law, Phase: c.Phase,
		FirstAtOnce: c.FirstAtOnce, Spread: c.Spread, Recompute: c.RecomputeEnable, PrefillBase: c.PrefillBase, PrefillPer: c.PrefillPerToken,
		Waits: waits, Mixed: mixed}
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

// resumeKey is the member of kv_transfer_params whose token ids stand for the prompt of a chat: vLLM has one from 0.27 on, and
// vllm-ascend 0.26 has its own.
func (c Config) resumeKey() string {
	ascend := c.Connector == AscendMooncake || c.Connector == AscendLayerwise
	switch {
	case c.NoResumeIDs, ascend && c.before(26), !ascend && c.before(27):
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

// keepsEnded: the NIXL connector of 0.32, and the one that pushes, hand off also what the end of its sequence has ended.
func (c Config) keepsEnded() bool {
	return c.Connector == NIXLPull && !c.before(32) || c.Connector == NIXLPush
}

func blocks(tokens int) int { return cache.Blocks(tokens) }

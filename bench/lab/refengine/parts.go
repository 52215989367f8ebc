package refengine

import (
	"cmp"
	"io"
	"net"
	"net/http"
	"time"

	"evenkeel/bench/lab/refengine/plain"
	"evenkeel/bench/lab/refengine/prompts"
	"evenkeel/dispatcher/step"
)

// Server says how clients reach the engine.
type Server struct {
	Listen    string        // address of rank 0, default 127.0.0.1:0; rank i listens i ports above, port 0 takes free ones
	Advertise string        // host in hand-offs and URLs, default the host of Listen, 127.0.0.1 when that is a wildcard
	APIKey    string        // empty: none is asked for
	KeepAlive time.Duration // an idle connection is closed after it, default 5 s as uvicorn does
	MaxBody   int64         // bytes, default 64 MiB
}

func (s Server) withDefaults() Server {
	s.Listen = cmp.Or(s.Listen, "127.0.0.1:0")
	if host, _, err := net.SplitHostPort(s.Listen); err == nil {
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			host = "127.0.0.1"
		}
		s.Advertise = cmp.Or(s.Advertise, host)
	}
	s.KeepAlive = cmp.Or(s.KeepAlive, 5*time.Second)
	s.MaxBody = cmp.Or(s.MaxBody, 64<<20)
	return s
}

// Model is what the engine serves.
type Model struct {
	Name       string     // default "ref"
	Aliases    []string   // more names of it, which /v1/models lists, too
	Adapters   []string   // LoRA adapters that every rank has from the start
	Parentless bool       // /v1/models lists adapters without parent
	MaxLen     int        // tokens, default 131072
	Task       plain.Task // what the model is for; default completions
}

func (m Model) withDefaults() Model {
	m.Name = cmp.Or(m.Name, "ref")
	m.MaxLen = cmp.Or(m.MaxLen, 131072)
	return m
}

// Steps says how long steps take, and when a request gets its tokens.
type Steps struct {
	C0       time.Duration // a step's fixed time, default 5 ms
	C1       time.Duration // a step's time per KV token of the slowest rank, default 200 ns
	CR       time.Duration // a step's time per request of the slowest rank
	CM       time.Duration // a step's time per request of the rank with most requests
	CS       time.Duration // a step's time per request of all ranks, divided by how many ranks there are
	Form     step.Form     // whether ranks are padded to the size of a graph, and for whom that costs something
	Captured int           // the largest graph, by requests of a rank; 0: there are none
	// what a step takes in place of all of these, and of Base, PerToken and Shared of Prompts on
	// aggregated ranks; nil: they say
	Law *step.Law
	// steps end so long after whole multiples of C0, so that engines in turn do not all speak at once;
	// 0: the first begins when a request comes
	Phase          time.Duration
	TokensPerChunk int // tokens a request gets in one step, as with MTP, default 1
	StreamInterval int // steps between two chunks after the first, default 1
	// a request's first token comes when its KV is there, not at the end of a step: for measurements
	// of what lies in front of the engine
	FirstAtOnce bool
	// a step's tokens come one after the other while it runs, as if each request had a clock of its
	// own, and not all at the step's end
	Spread    bool
	Recompute bool      // a preempted request ends with stop_reason "recomputed" instead of being recomputed in place
	Trace     io.Writer // JSON lines, one for each step; nil = none
	Log       int       // steps kept in memory, default 65536
}

func (s Steps) withDefaults() Steps {
	s.C0 = cmp.Or(s.C0, 5*time.Millisecond)
	s.C1 = cmp.Or(s.C1, 200*time.Nanosecond)
	s.TokensPerChunk = cmp.Or(s.TokensPerChunk, 1)
	s.StreamInterval = cmp.Or(s.StreamInterval, 1)
	s.Log = cmp.Or(s.Log, 65536)
	return s
}

// Prompts says how prompts are computed.
type Prompts struct {
	Base        time.Duration // default 9 ms; of aggregated ranks, of each step in which any of them computes a prompt, default 0
	PerToken    time.Duration // of uncached prompt tokens, default 9 µs; of aggregated ranks, the part that is the rank's own
	Concurrency int           // prompts a rank prefills at once, default 1

	// Of aggregated ranks.
	MaxBatchedTokens int           // tokens of prompts and answers that a rank computes in a step (max_num_batched_tokens), default 8192
	Shared           time.Duration // of uncached prompt tokens, the part that all ranks compute together
	Interval         int           // prompts are computed in every so many steps (vLLM's prefill_schedule_interval), default 1
	First            bool          // a rank does not decode while it can compute a prompt, as those of SGLang
	Delayer          int           // steps for which no prompt is begun until each rank has one, as SGLang's delayer does; 0: none is held
}

func (p Prompts) withDefaults(role Role) Prompts {
	if role != Aggregated {
		p.Base = cmp.Or(p.Base, 9*time.Millisecond)
	}
	p.PerToken = cmp.Or(p.PerToken, 9*time.Microsecond)
	p.Concurrency = cmp.Or(p.Concurrency, 1)
	p.MaxBatchedTokens = cmp.Or(p.MaxBatchedTokens, 8192)
	p.Interval = cmp.Or(p.Interval, 1)
	return p
}

// prompts is the part of a config that says how prompts are computed, and where they are kept.
func (c Config) prompts() prompts.Config {
	return prompts.Config{
		Blocks: c.KV.Tokens / blockSize, Cache: c.KV.PrefixCache,
		Concurrency: c.Prompts.Concurrency, Base: c.Prompts.Base, PerToken: c.Prompts.PerToken,
	}
}

// KV is the room that a rank has for KV, and how KV goes from one engine to another.
type KV struct {
	Tokens int // capacity of a rank, default 524288; with role both its prefill and its decode half have as much each
	// blocks of 128 tokens that a rank's prefix cache keeps, 0 = none; on a decode rank prompts that
	// were pulled, and computed there. Decode ranks of SGLang have none
	PrefixCache  int
	FlatBlockIDs bool          // a hand-off has one flat list of block ids, as versions up to 0.13 sent
	HoldTimeout  time.Duration // how long a prefill keeps KV nobody pulls, default 480 s, 30 s for nixl-pull
	// how long a decode engine keeps the KV of an answer for a next turn (decoder_kv_blocks_ttl, with
	// bidirectional_kv_xfer); 0: it does not
	KeepsAnswers   time.Duration
	NoRenewals     bool          // like versions of NIXL without leases: a decode engine's queue renews no hold
	TransferBase   time.Duration // of a pull, default 1 ms
	TransferPer    time.Duration // of a pull per prompt token, default 100 ns
	RejectReleases bool          // a decode request that fails validation frees the prefill's KV (vllm#41269)
}

func (k KV) withDefaults(connector Connector, role Role) KV {
	k.Tokens = cmp.Or(k.Tokens, 524288)
	if connector == SGLang && role == Decode { // unless --disaggregation-decode-enable-radix-cache is set
		k.PrefixCache = 0
	}
	if connector == NIXLPull || connector == NIXLPush {
		k.HoldTimeout = cmp.Or(k.HoldTimeout, 30*time.Second)
	}
	k.HoldTimeout = cmp.Or(k.HoldTimeout, 480*time.Second)
	k.TransferBase = cmp.Or(k.TransferBase, time.Millisecond)
	k.TransferPer = cmp.Or(k.TransferPer, 100*time.Nanosecond)
	return k
}

// KVEvents says how ranks publish what their prefix caches keep.
type KVEvents struct {
	// of rank 0, empty = none; rank i publishes i ports above, replays are DPSize ports above; port 0
	// takes free ones
	Address  string
	Encoding string        // array (default) or map
	HWM      int           // batches a subscriber may be behind before it loses some, default 1000
	Delay    time.Duration // of each batch on its way to a subscriber
}

func (k KVEvents) withDefaults() KVEvents {
	k.Encoding = cmp.Or(k.Encoding, "array")
	k.HWM = cmp.Or(k.HWM, 1000)
	return k
}

// SGLangOptions are what only engines of SGLang have.
type SGLangOptions struct {
	BootstrapTimeout time.Duration // how long a prefill waits for its decode engine, default 300 s
	WaitingTimeout   time.Duration // how long a decode engine waits for KV, default 300 s
	Heartbeat        time.Duration // between two looks of a decode engine at a prefill engine that it waits for, default 5 s
	// which rank behind one port gets a request that names none: follow_bootstrap_room (default of
	// prefill) or round_robin (default of decode)
	LoadBalance    string
	ElasticEP      *string // backend with which it goes on without a rank that has lost its GPU; nil: it does not
	Replicas       bool    // the ranks are replicas without DP attention
	BarrierMetrics bool    // ranks count how long they wait for each other (SGLANG_ENABLE_METRICS_DP_ATTENTION=1)
}

// How a server of SGLang chooses a rank, as its --load-balance-method.
const (
	followRoom = "follow_bootstrap_room"
	roundRobin = "round_robin"
)

func (s SGLangOptions) withDefaults(role Role) SGLangOptions {
	s.BootstrapTimeout = cmp.Or(s.BootstrapTimeout, 300*time.Second)
	s.WaitingTimeout = cmp.Or(s.WaitingTimeout, 300*time.Second)
	s.Heartbeat = cmp.Or(s.Heartbeat, 5*time.Second)
	if role == Prefill {
		s.LoadBalance = cmp.Or(s.LoadBalance, followRoom)
	}
	s.LoadBalance = cmp.Or(s.LoadBalance, roundRobin)
	return s
}

// Answers says what answers and pages tell, and how: versions and flags of engines differ in it.
type Answers struct {
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
}

func (a Answers) withDefaults(connector Connector) Answers {
	if connector == SGLang {
		a.ReasoningField = cmp.Or(a.ReasoningField, "reasoning_content")
		a.ErrorShape = cmp.Or(a.ErrorShape, ShapeOld)
	}
	a.ReasoningField = cmp.Or(a.ReasoningField, "reasoning")
	a.ErrorShape = cmp.Or(a.ErrorShape, ShapeNew)
	return a
}

// Hooks tell a test what happens in the engine. One that is nil is told nothing.
type Hooks struct {
	OnStrike  func(answer uint64, r Rule)           // each rule that strikes a request: reftext's key of its answer says whose
	OnRequest func(path string, header http.Header) // each request that was read
	// asked before a rule breaks an answer off that has begun to come: how many tokens are out, from
	// its beginning. The engine waits until it returns
	OnBreak func(answer uint64, tokens int)
}

package mooncake

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"evenkeel/internal/spelling"
)

// The connectors are the ways in which KV gets from a prefill engine to a decode engine.
const (
	AscendMooncakeV1 = "ascend-mooncake-v1"
	NIXLPull         = "nixl-pull"
	// The decode engine registers its blocks with the prefill engine, which writes into them.
	NIXLPush     = "nixl-push"
	VLLMMooncake = "vllm-mooncake"
	Opaque       = "opaque"
	// The prefill engine writes the KV, layer by layer, to the address in a callback.
	AscendLayerwise = "ascend-layerwise"
	// Both engines get the request at once, with a bootstrap_room.
	SGLang = "sglang"
	None   = "none" // one engine prefills and decodes, so no KV is transferred
)

// Connectors lists the connectors that a profile may name.
func Connectors() []string {
	return []string{AscendMooncakeV1, NIXLPull, NIXLPush, VLLMMooncake, Opaque, AscendLayerwise, SGLang, None}
}

// Alone returns the profile for an aggregated engine, which both prefills and decodes: the
// connector then only says what kind of engine it is.
func (p Profile) Alone() Profile {
	p.Aggregated = true
	return p
}

// Early says whether a request is bound to its decode rank before its prefill.
func (p *Profile) Early() bool { return !p.HasHandoff() }

// HasHandoff says whether the decode rank can be chosen after the prefill.
func (p *Profile) HasHandoff() bool { return !p.handsNothingOff() && !p.Aggregated }

// handsNothingOff: the decode rank of AscendLayerwise allocates blocks before the prefill starts,
// both engines of SGLang must get the request at once, and with None one engine does both.
func (p *Profile) handsNothingOff() bool {
	return p.Connector == AscendLayerwise || p.Connector == SGLang || p.Connector == None
}

// NIXL keeps KV under a lease that the decode engine renews while a request is queued.
func (p *Profile) nixl() bool { return p.Connector == NIXLPull || p.Connector == NIXLPush }

// Ascend says whether the engines run vllm-ascend.
func (p *Profile) Ascend() bool {
	return p.Connector == AscendMooncakeV1 || p.Connector == AscendLayerwise
}

// MayGiveBack says whether a decode engine may end an answer early for lack of memory, and report
// it only by a stop_reason. Answers of /v1/responses and /v1/messages do not show it (vLLM 0.27.1,
// messages_full_converter in entrypoints/anthropic/serving.py, responses_full_generator in
// entrypoints/openai/responses/serving.py).
func (p *Profile) MayGiveBack() bool { return p.Ascend() && (p.GivesBack == nil || *p.GivesBack) }

// A probe that ends with the end-of-sequence token returns no hand-off. These are the ways against
// it.
const (
	MinTokensOne       = "1"
	MinTokensOmit      = "omit"
	MinTokensIgnoreEOS = "ignore_eos"
)

// Without a stream, evenkeel joins the events, or passes on the decode engine's own answer.
const (
	NonStreamAssemble    = "assemble"
	NonStreamPassthrough = "passthrough"
)

// The ways to address a rank of a decode engine.
const (
	DPExternal = "external" // one URL per rank
	DPHybrid   = "hybrid"   // one URL per node, and a header with the number of the rank on this node
	DPInternal = "internal" // one URL, and a header with the rank in the whole deployment
)

// How a chat is continued if its decode rank fails after the client got a part of the answer.
const (
	ChatResumeNone = "none"
	// The token ids are sent beside the hand-off, to vLLM from 0.27 on (PR 48145).
	ChatResumeVLLM = "vllm_prompt_token_ids"
	// The token ids are sent beside the hand-off, to vllm-ascend from 0.26 on.
	ChatResumeAscend   = "ascend_private"
	ChatResumeContinue = "continue_final_message" // the text so far is sent as the last message
)

var chatResumes = []string{ChatResumeNone, ChatResumeVLLM, ChatResumeAscend, ChatResumeContinue}

// The values of hand_back: whether a decode engine keeps the KV of an answer for the chat's next
// turn.
const (
	HandBackNone = "none" // the decode engine keeps no KV of answers
	// It keeps the KV (vLLM's bidirectional_kv_xfer), and evenkeel counts its memory as used. No
	// prefill engine is asked to fetch it.
	HandBackCounted = "counted"
)

// Profile has the operator's settings for one kind of engine, after WithDefaults.
type Profile struct {
	Name          string        `yaml:"name"`
	Connector     string        `yaml:"connector"`
	KVHoldTimeout time.Duration `yaml:"kv_hold_timeout"` // of a hand-off, at the prefill engine
	// HoldMargin is the part of kv_hold_timeout for decode to queue and pull; 0: half, at most 120 s.
	HoldMargin      time.Duration `yaml:"hold_margin"`
	ProbeMinTokens  string        `yaml:"probe_min_tokens"`
	ProbeIgnoreEOS  bool          `yaml:"probe_ignore_eos"`
	ContinuousUsage *bool         `yaml:"continuous_usage"`
	ReturnTokenIDs  *bool         `yaml:"return_token_ids"`
	ChatResume      string        `yaml:"chat_resume"`
	DPMode          string        `yaml:"dp_mode"`
	MaxNumSeqs      int           `yaml:"max_num_seqs"`
	KVTokensPerRank int64         `yaml:"kv_tokens_per_rank"` // 0: from the engine's metrics
	VocabSize       int           `yaml:"vocab_size"`         // tokens; 0: unknown
	// MaxModelLen bounds prompt and answer together, in tokens. 0: from the engine's /v1/models.
	MaxModelLen int `yaml:"max_model_len"`
	// AllowLocalPrefill says that decode engines may compute prompts themselves, without a hand-off.
	AllowLocalPrefill bool `yaml:"allow_local_prefill"`
	// MaxBatchedTokens is the most tokens in one step of a decode engine; 0: unknown.
	MaxBatchedTokens  int           `yaml:"max_num_batched_tokens"`
	PassThrough       bool          `yaml:"pass_through"`
	NonStream         string        `yaml:"nonstream"`
	Metrics           MetricNames   `yaml:"metrics"`
	RecomputeMax      *int          `yaml:"recompute_max"`
	FirstEventTimeout time.Duration `yaml:"first_event_timeout"`
	APIKeyEnv         string        `yaml:"api_key_env"`
	CAFile            string        `yaml:"ca_file"`     // PEM file; empty: the system's authorities
	CertFile          string        `yaml:"cert_file"`   // for engines that ask for one
	KeyFile           string        `yaml:"key_file"`    // PEM file with the key of CertFile
	ServerName        string        `yaml:"server_name"` // in certificates; empty: the URL's host
	// KVHosts are those that a hand-off may name besides the engine's own.
	KVHosts     []string `yaml:"kv_hosts"`
	KVPlainKeys []string `yaml:"kv_plain_keys"` // of a hand-off, never checked as addresses
	// RejectReleases says whether a decode request that fails the engine's validation frees the KV of
	// its prefill. nil: by the engine's version.
	RejectReleases *bool `yaml:"reject_releases"`
	// ClampsMaxTokens says whether decode engines lower a max_tokens above the context. nil: by the
	// engine's version.
	ClampsMaxTokens *bool `yaml:"clamps_max_tokens"`
	BootstrapPort   int   `yaml:"bootstrap_port"` // for vllm-mooncake and sglang
	NameRanks       *bool `yaml:"name_ranks"`     // sglang: requests name their rank; nil: true
	// GivesBack says whether vllm-ascend's recompute scheduler may be on, which ends answers early for
	// lack of memory. nil: true.
	GivesBack *bool `yaml:"gives_back"`
	// SharedAddress says that several engines answer behind one address, so that hand-offs name
	// different engines although none has restarted.
	SharedAddress bool          `yaml:"shared_address"`
	HandBack      string        `yaml:"hand_back"`
	DecoderTTL    time.Duration `yaml:"decoder_kv_blocks_ttl"` // of the KV of an ended answer
	Aggregated    bool          `yaml:"-"`
}

// MetricNames are the engine's load gauges; empty: vLLM's new name, then its old one.
type MetricNames struct {
	KVUsage string `yaml:"kv_usage"`
	Running string `yaml:"running"`
	Waiting string `yaml:"waiting"`
}

// holdWithoutLease is how long engines without leases keep KV.
const holdWithoutLease = 480 * time.Second

// WithDefaults sets the fields that are not set.
func (p Profile) WithDefaults() Profile {
	setDefault(&p.Connector, AscendMooncakeV1)
	setDefault(&p.Name, p.Connector)
	p.setConnectorDefaults()
	setDefault(&p.ChatResume, ChatResumeNone)
	setDefault(&p.DPMode, DPExternal)
	setDefault(&p.NonStream, NonStreamAssemble)
	setDefault(&p.FirstEventTimeout, 60*time.Second)
	setDefault(&p.BootstrapPort, 8998)
	setDefault(&p.HandBack, HandBackNone)
	setDefault(&p.DecoderTTL, 480*time.Second)
	if p.ContinuousUsage == nil {
		p.ContinuousUsage = new(true)
	}
	if p.ReturnTokenIDs == nil {
		p.ReturnTokenIDs = new(true)
	}
	if p.RecomputeMax == nil {
		p.RecomputeMax = new(3)
	}
	return p
}

func (p *Profile) setConnectorDefaults() {
	if !p.handsNothingOff() {
		hold := holdWithoutLease
		if p.nixl() {
			hold = 30 * time.Second // vLLM's lease since mid 2026
		}
		setDefault(&p.KVHoldTimeout, hold)
		// Otherwise a probe may end with the end-of-sequence token, and return no hand-off.
		setDefault(&p.ProbeMinTokens, MinTokensOne)
	}
	if p.Ascend() { // most tutorials turn on its recompute scheduler, which interrupts answers
		setDefault(&p.ChatResume, ChatResumeAscend)
	}
}

func setDefault[T comparable](field *T, def T) {
	var zero T
	if *field == zero {
		*field = def
	}
}

// Validate returns all errors of a profile, after WithDefaults.
func (p Profile) Validate() error {
	var errs []error
	bad := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("profile %q: "+format, append([]any{p.Name}, args...)...))
	}
	oneOf := func(field, got string, want ...string) {
		if !slices.Contains(want, got) {
			bad("%s is %q%s; use one of: %s", field, got, spelling.Hint(got, want), strings.Join(want, ", "))
		}
	}
	notNegative := func(field string, n int64) {
		if n < 0 {
			bad("%s is %d; it cannot be negative", field, n)
		}
	}
	oneOf("connector", p.Connector, Connectors()...)
	if p.handsNothingOff() {
		p.reportMeaningless(bad)
	} else {
		oneOf("probe_min_tokens", p.ProbeMinTokens, MinTokensOne, MinTokensOmit, MinTokensIgnoreEOS)
	}
	oneOf("chat_resume", p.ChatResume, chatResumes...)
	oneOf("dp_mode", p.DPMode, DPExternal, DPHybrid, DPInternal)
	oneOf("nonstream", p.NonStream, NonStreamAssemble, NonStreamPassthrough)
	if _, err := p.HoldBudget(); err != nil {
		bad("%w", err)
	}
	oneOf("hand_back", p.HandBack, HandBackNone, HandBackCounted)
	// With nixl-push, an engine refuses to start with bidirectional_kv_xfer (vLLM 0.33,
	// nixl/push_scheduler.py).
	if p.HandBack == HandBackCounted && p.Connector != NIXLPull {
		bad("hand_back is %s, and engines with connector %s keep no KV of answers; only those with %s do", p.HandBack, p.Connector, NIXLPull)
	}
	if p.DecoderTTL <= 0 {
		bad("decoder_kv_blocks_ttl is %v; set it to the engine's value, which is 480s unless kv_connector_extra_config says otherwise",
			p.DecoderTTL)
	}
	if p.FirstEventTimeout <= 0 {
		bad("first_event_timeout is %v; it must be above zero", p.FirstEventTimeout)
	}
	notNegative("max_num_seqs", int64(p.MaxNumSeqs))
	notNegative("kv_tokens_per_rank", p.KVTokensPerRank)
	notNegative("vocab_size", int64(p.VocabSize))
	notNegative("max_model_len", int64(p.MaxModelLen))
	notNegative("max_num_batched_tokens", int64(p.MaxBatchedTokens))
	if p.RecomputeMax != nil {
		notNegative("recompute_max", int64(*p.RecomputeMax))
	}
	if p.BootstrapPort < 1 || p.BootstrapPort > 65535 {
		bad("bootstrap_port is %d; ports are 1 to 65535", p.BootstrapPort)
	}
	if p.NameRanks != nil && p.Connector != SGLang {
		bad("name_ranks has no meaning with connector %s: only requests to SGLang name ranks in their bodies; remove it", p.Connector)
	}
	if p.GivesBack != nil && !p.Ascend() {
		bad("gives_back has no meaning with connector %s: only engines of vllm-ascend give requests back; remove it", p.Connector)
	}
	for _, h := range p.KVHosts {
		if strings.TrimSpace(h) == "" {
			bad("kv_hosts has an empty entry; remove it")
		}
	}
	return errors.Join(errs...)
}

// reportMeaningless is for connectors without a hand-off, which could wait, expire or be released.
// A room is the number by which the two requests to SGLang find each other.
func (p *Profile) reportMeaningless(bad func(format string, args ...any)) {
	for _, key := range []struct {
		name string
		set  bool
		why  string
	}{
		{"kv_hold_timeout", p.KVHoldTimeout != 0, "its prefill engine keeps nothing for us"},
		{"hold_margin", p.HoldMargin != 0, "its prefill engine keeps nothing for us"},
		{"reject_releases", p.RejectReleases != nil, "no hand-off can be released"},
		{"probe_min_tokens", p.ProbeMinTokens != "", "it does not matter which token ends the prefill"},
		{"probe_ignore_eos", p.ProbeIgnoreEOS, "it does not matter which token ends the prefill"},
		{"allow_local_prefill", p.AllowLocalPrefill && p.Connector == SGLang, "its decode engines compute no prompts"},
		{"allow_local_prefill", p.AllowLocalPrefill && p.Connector == None, "its engines compute every prompt"},
		{"pass_through", p.PassThrough && p.Connector == None, "its engines compute whatever is passed through"},
		{"pass_through", p.PassThrough && p.Connector == SGLang, "its server ends when it gets a request that is computed without a room"},
	} {
		if key.set {
			bad("%s has no meaning with connector %s, because %s; remove it", key.name, p.Connector, key.why)
		}
	}
	// Other connectors take token ids in kv_transfer_params.
	chatTakesNoIDs := p.Connector == SGLang || p.Connector == None
	needsIDs := p.ChatResume == ChatResumeVLLM || p.ChatResume == ChatResumeAscend
	if chatTakesNoIDs && needsIDs {
		bad("chat_resume is %q, and connector %s has no place for token ids beside a chat; use %s or %s", p.ChatResume, p.Connector,
			ChatResumeNone, ChatResumeContinue)
	}
}

const maxHoldMargin = 120 * time.Second

// HoldBudget returns how long a finished prefill may wait for a decode rank, counted from the
// probe's response headers: the time for which the prefill engine keeps the blocks, less the margin
// that a decode rank may need to queue and pull. It fails if nothing is left, because a late pull
// can read blocks that another request uses by now, and still answer 200.
func (p Profile) HoldBudget() (time.Duration, error) {
	timeout, margin := p.KVHoldTimeout, p.holdMargin()
	switch {
	case p.handsNothingOff():
		return math.MaxInt64, nil
	case timeout <= 0:
		return 0, fmt.Errorf("kv_hold_timeout is %v; set it to the time for which the prefill engine keeps the blocks of a finished request",
			timeout)
	case margin < 0:
		return 0, fmt.Errorf("hold_margin is %v; it cannot be negative", margin)
	}
	if margin >= timeout {
		return 0, fmt.Errorf("hold_margin %v leaves nothing of kv_hold_timeout %v; lower it or raise the engine's timeout", margin, timeout)
	}
	return timeout - margin, nil
}

// Ready returns the path that reports quickly whether an engine takes requests; empty: GET /health.
// SGLang's GET /health generates a token, which takes from 1 to 20 s (0.5.23, health_generate in
// entrypoints/http_server.py).
func (p *Profile) Ready() string {
	if p.Connector == SGLang {
		return "/ready"
	}
	return ""
}

// VersionPath returns the path of an engine's version; empty: GET /version. SGLang's is from
// 0.5.23, entrypoints/http_server.py.
func (p *Profile) VersionPath() string {
	if p.Connector == SGLang {
		return "/server_info"
	}
	return ""
}

// fakeBootstrapHost makes an SGLang engine run a request without a partner: a decode engine waits
// for no KV, decodes on whatever its pages contain, and keeps none of it in its prefix cache.
// SGLang warms up each rank so (0.5.23: FAKE_BOOTSTRAP_HOST in disaggregation/utils.py,
// _is_fake_transfer in disaggregation/decode.py).
const fakeBootstrapHost = "2.2.2.2"

// Canary returns a function that makes a short completion to show whether a rank computes; nil: any
// completion shows it. Without a bootstrap_room, an SGLang engine refuses every request, and a
// server whose ranks are chosen by the room crashes. The second token is there because a decode
// rank computes only that one. SGLang's GET /health_generate asks only one rank, ends with the
// first token, and succeeds whenever any other answer makes progress.
func (p *Profile) Canary() func(model string, rank int) []byte {
	if p.Connector != SGLang {
		return nil
	}
	return func(model string, rank int) []byte {
		room := max(0, rank) // the server may choose the rank by the room
		request := map[string]any{"model": model, "prompt": "a", "max_tokens": 2, "ignore_eos": true, "temperature": 0, "stream": false,
			"bootstrap_host": fakeBootstrapHost, "bootstrap_port": p.BootstrapPort, "bootstrap_room": room}
		if named := p.NamedRank(rank); named >= 0 {
			request["routed_dp_rank"] = named
		}
		body, _ := json.Marshal(request) // always marshals
		return body
	}
}

// Keeps returns how long a decode engine keeps the KV of an ended answer; 0: not at all.
func (p *Profile) Keeps() time.Duration {
	if p.HandBack != HandBackCounted {
		return 0
	}
	return p.DecoderTTL
}

// NamedRank returns the rank to name in a request to SGLang; -1: none. With elastic EP (expert
// parallelism), operators must turn names off, because a request for a rank that has lost its GPU
// ends the whole server (SGLang 0.5.23, maybe_external_dp_rank_routing in
// managers/data_parallel_controller.py).
func (p *Profile) NamedRank(rank int) int {
	if p.NameRanks != nil && !*p.NameRanks {
		return -1
	}
	return rank
}

func (p *Profile) continuousUsage() bool { return p.ContinuousUsage == nil || *p.ContinuousUsage }
func (p *Profile) returnTokenIDs() bool  { return p.ReturnTokenIDs == nil || *p.ReturnTokenIDs }

// PulledWithin returns how long after a prefill its KV is certainly kept. An answer whose first
// event comes within it pulled the right KV. It is a quarter of the hold margin shorter than the
// hold, because the engine counts from the end of the prefill, and the proxy from its answer.
func (p *Profile) PulledWithin() time.Duration { return p.KVHoldTimeout - p.holdMargin()/4 }

func (p *Profile) holdMargin() time.Duration {
	if p.HoldMargin == 0 {
		return min(p.KVHoldTimeout/2, maxHoldMargin)
	}
	return p.HoldMargin
}

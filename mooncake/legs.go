package mooncake

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"

	"evenkeel/internal/rawjson"
)

// Endpoint is an HTTP endpoint whose requests are split into a prefill and a decode request.
type Endpoint uint8

// The endpoints.
const (
	Chat Endpoint = iota
	Completions
	Responses // OpenAI's Responses API
	Messages  // Anthropic's API
	Tokens    // vLLM's API: token ids in, token ids out
	Generate  // SGLang's API: token ids or text in, text and token ids out

	Endpoints = iota
)

var paths = [Endpoints]string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
	"/generate"}

// Path is the same at evenkeel and at the engines.
func (e Endpoint) Path() string { return paths[e] }

// IsChatOrCompletions tells the two endpoints that are fully supported everywhere: all engines
// accept hand-offs for them and report the length of prompts, and every peer proxy knows how their
// streams end.
func (e Endpoint) IsChatOrCompletions() bool { return e <= Completions }

// CanResume says whether another engine can continue an interrupted answer.
func (e Endpoint) CanResume() bool { return e.Assembles() || e == Generate }

// Assembles says whether evenkeel can join the events of a stream into one answer.
func (e Endpoint) Assembles() bool { return e.IsChatOrCompletions() || e == Tokens }

// RequestID returns the engine's id of a request with X-Request-Id id, without the random suffix
// that the engine adds. With nixl-push, both engines match their requests by it (vLLM 0.32.0,
// get_base_request_id in nixl/push_worker.py).
func (e Endpoint) RequestID(id string) string {
	switch e {
	case Chat, Messages:
		return "chatcmpl-" + id
	case Tokens:
		// As in vLLM 0.32.0, serve_tokens in entrypoints/scale_out/token_in_token_out/serving.py.
		return "generate-tokens-" + id
	}
	return "cmpl-" + id + "-0" // -0 is the index of the prompt, of which evenkeel sends one
}

// Patch is how a request to an engine differs from the client's body. A nil Patch changes nothing.
// Each of several choices or prompts is a request with its own Patch.
type Patch struct {
	Prompt     json.RawMessage // replaces the body's "prompt"; nil: the body's own prompt stays
	SeedOffset int             // added to the client's seed, so that the choices of one request differ
	RID        string          // for SGLang's Generate on one engine; empty: the engine chooses
	IgnoreEOS  bool            // the probe before ended with its first token
	Resume     *Resume         // nil: the request begins the answer
	Adapter    Adapter         // zero: a base model
	ProbeSalt  string          // of a probe to an engine that also decodes; empty: none
}

// Adapter is a LoRA adapter, by its own name and that of its base model.
type Adapter struct{ Base, Name string }

// nameAdapter names the adapter as SGLang wants it: behind the base model's name (from 0.5.4 on,
// _resolve_lora_path in entrypoints/openai/serving_base.py) and in lora_path, which older versions
// and /generate read. Without either, SGLang answers with the base model.
func (p *Profile) nameAdapter(b *Body, ep Endpoint, changes *Patch) *Body {
	if p.Connector != SGLang || changes == nil || changes.Adapter.Name == "" {
		return b
	}
	named := *b
	named.pending = slices.Clone(b.pending) // the other leg's engine may want other names
	if ep != Generate {
		named.Set("model", appendString(nil, changes.Adapter.Base+":"+changes.Adapter.Name))
	}
	if ep != Messages { // no lora_path there
		named.Set("lora_path", appendString(nil, changes.Adapter.Name))
	}
	return &named
}

// BootstrapInfo is what the proxy invents or looks up for a hand-off of vllm-mooncake.
type BootstrapInfo struct {
	TransferID    string // id that evenkeel invents, new for every probe
	BootstrapAddr string // URL of the prefill engine's bootstrap server, such as "http://host:8998"
	EngineID      string // id of the prefill engine, from GET /query of its bootstrap server
}

// Reserved says whether engines must never get a client's value of this top-level key: with it, a
// client could reach another request's KV, a rank, or the engine's internal code.
func Reserved(key string) bool {
	switch key {
	// vLLM takes parameters of the KV and encoder caches from vllm_xargs, too.
	case "kv_transfer_params", "ec_transfer_params", "batch_kv_transfer_params", "vllm_xargs", "metaserver", "do_virtual",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key":
		return true
	// They name the rank.
	case "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank":
		return true
	// They name the request, say when it runs, and how many tokens come in one event.
	case "request_id", "rid", "session_id", "priority", "stream_interval":
		return true
	// They name code to load, and tensors to read or return.
	case "logits_processors", "prompt_embeds", "return_hidden_states":
		return true
	case "prompt_token_ids": // would replace the messages, without the chat template (vLLM PR 55771)
		return true
	// They are for SGLang's own components and routers (0.5.23, GenerateReqInput in
	// managers/io_struct.py).
	case "lora_id", "http_worker_ipc", "kv_hints", "external_trace_header", "received_time", "encoder_urls", "num_items_assigned",
		"need_wait_for_mm_inputs", "decode_tp_size", "positional_embed_overrides", "routing_key":
		return true
	}
	return strings.HasPrefix(key, "_vllm_ascend_") || strings.HasPrefix(key, "pd_")
}

// A decode request asks for one answer.
func dropOnDecode(key string) bool {
	return key == "n" || key == "best_of" || key == "use_beam_search" || Reserved(key)
}

// The one token of a probe is thrown away, so keys that do not change the prompt have no use, and a
// prefill engine refuses some of them or even crashes.
func dropOnProbe(key string) bool {
	switch key {
	case "stream_options", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "stop", "stop_token_ids",
		"structured_outputs", "min_p", "logit_bias", "bad_words", "allowed_token_ids", "thinking_token_budget",
		"repetition_detection", "echo", "ignore_eos", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
		"output_mode", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "trace_decode_token_ids":
		return true
	}
	return strings.HasPrefix(key, "guided_") || strings.HasPrefix(key, "return_") || dropOnDecode(key)
}

// defaultMaxLogprobs is vLLM's default of --max-logprobs, above which it refuses a request.
const defaultMaxLogprobs = 20

var (
	jsonTrue      = []byte("true")
	jsonFalse     = []byte("false")
	jsonOne       = []byte("1")
	pullProbe     = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)
	usageTotal    = []byte(`{"include_usage":true,"continuous_usage_stats":false}`)
	usageEachStep = []byte(`{"include_usage":true,"continuous_usage_stats":true}`)
)

// ProbeBody appends the prefill request, which asks for one token and a hand-off. The prompt, and
// every key that changes it, are byte for byte as in DecodeBody. Only vllm-mooncake needs info.
func (p *Profile) ProbeBody(b *Body, ep Endpoint, changes *Patch, info *BootstrapInfo, dst [][]byte) [][]byte {
	params := pullProbe
	if p.Connector == VLLMMooncake && info != nil {
		params = info.probeParams()
	}
	if s := bodyRulesOf[ep]; s != nil {
		return s.probe(p, b, changes, params, dst)
	}
	return p.probeBody(b, changes, params, dst)
}

// params becomes the kv_transfer_params.
func (p *Profile) probeBody(b *Body, changes *Patch, params json.RawMessage, dst [][]byte) [][]byte {
	resume := changes.resumeOrNil()
	params = resume.addTokenIDs(params)
	// A prompt with the answer so far must not be truncated again.
	drop := resume.dropForLongerPrompt(droppedFromProbe(b))
	members := addOneToken(b, changes, make([]Member, 0, 12))
	members = addSalt(b, changes.probeSalt(), p.addAgainstEOS(changes, members))
	// Only Tokens, whose prompt is token ids, and Generate, whose probes come from sglangBody, have a
	// layout.
	promptIsTokenIDs := b.layout != nil
	if p.returnTokenIDs() && !promptIsTokenIDs {
		members = append(members, Member{"return_token_ids", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, Member{"kv_transfer_params", params}))
}

// A probe that ends with the end-of-sequence token would return no hand-off. Against it, the
// profile asks for min_tokens, ignore_eos, both or none. A probe that is repeated because its first
// token ended the answer always gets ignore_eos. Connectors that hand nothing off need no
// min_tokens.
func (p *Profile) addAgainstEOS(changes *Patch, members []Member) []Member {
	setsMinTokens := p.ProbeMinTokens == MinTokensOne || p.ProbeMinTokens == ""
	if setsMinTokens && !p.handsNothingOff() {
		members = append(members, Member{"min_tokens", jsonOne})
	}
	if p.ProbeIgnoreEOS || p.ProbeMinTokens == MinTokensIgnoreEOS || changes.ignoresEOS() {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	return members
}

// droppedFromProbe keeps some keys with a value that may be invalid, so that the prefill engine
// refuses the request. If only the decode engine refused it, the prefill engine could keep the KV
// until its hold ends.
func droppedFromProbe(b *Body) (drop func(key string) bool) {
	drop = dropOnProbe
	if asksTooManyLogprobs(b) {
		drop = dropOnProbeExceptLogprobs
	}
	// vLLM 0.32.0 refuses an invalid output_mode (GenerateRequest in
	// entrypoints/scale_out/token_in_token_out/protocol.py). With derender, which is valid, the
	// prefill engine would parse its one token as an answer.
	mode, hasMode := b.Get("output_mode")
	if modeStays := hasMode && string(mode) != `"derender"`; modeStays {
		dropOthers := drop
		drop = func(key string) bool { return key != "output_mode" && dropOthers(key) }
	}
	return drop
}

// Before vLLM 0.25, the prefill engine would keep the KV if only the decode engine refused the
// number of logprobs.
func dropOnProbeExceptLogprobs(key string) bool {
	return key != "logprobs" && key != "top_logprobs" && dropOnProbe(key)
}

// asksTooManyLogprobs tells numbers that engines refuse by default.
func asksTooManyLogprobs(b *Body) bool {
	for _, key := range [...]string{"top_logprobs", "logprobs"} {
		v, ok := b.Get(key)
		isNumber := ok && (v[0] == '-' || v[0] >= '0' && v[0] <= '9')
		if !isNumber {
			continue
		}
		if n, err := strconv.ParseFloat(string(v), 64); err != nil || n < 0 || n > defaultMaxLogprobs {
			return true
		}
	}
	return false
}

// DecodeBody appends the decode request: the client's body with the hand-off kv, unchanged, and
// without reserved keys. If stream is false, the client gets the engine's own answer, so the
// request asks for nothing that the client did not ask for. If kv is nil, the decode engine
// computes the prompt itself (AllowLocalPrefill).
//
// After a pull that came too late, a rank's prefix cache may have another prompt's KV. evenkeel
// then invents a new salt for the rank, and the engine shares cached blocks only among requests
// with the same cache_salt. An empty salt changes nothing.
func (p *Profile) DecodeBody(b *Body, ep Endpoint, changes *Patch, kv json.RawMessage, salt string, stream bool, dst [][]byte) [][]byte {
	b = p.nameAdapter(b, ep, changes)
	if s := bodyRulesOf[ep]; s != nil {
		return s.decode(p, b, kv, salt, stream, dst)
	}
	members, drop := p.answerMembers(b, changes, stream)
	if changes != nil && changes.RID != "" {
		members = append(members, Member{"rid", appendString(nil, changes.RID)})
	}
	members = addSalt(b, salt, members)
	resume := changes.resumeOrNil()             // nil changes nothing
	if kv != nil || resume.tokenIDsInParams() { // else it needs no kv_transfer_params
		members = append(members, Member{"kv_transfer_params", resume.addTokenIDs(kv)})
	}
	drop = resume.dropForLongerPrompt(drop) // echo must not apply to the answer so far
	return b.Splice(dst, drop, members)
}

func addSalt(b *Body, salt string, members []Member) []Member {
	if salt == "" {
		return members
	}
	if clientSalt, ok := b.Salt(); ok {
		if len(clientSalt) <= 2 || clientSalt[0] != '"' {
			return members // every engine refuses such a salt
		}
		// It is a hash of both salts, because vLLM allows at most 128 characters in a salt.
		hash := sha256.Sum256([]byte(rawjson.Unquote(clientSalt) + " " + salt))
		salt = hex.EncodeToString(hash[:])
	}
	// Each decode request has a salt. It has letters and digits only, so quoting is one allocation.
	value := append(make([]byte, 0, len(salt)+2), '"')
	return append(members, Member{"cache_salt", append(append(value, salt...), '"')})
}

func (p *Profile) answerMembers(b *Body, changes *Patch, stream bool) (members []Member, drop func(key string) bool) {
	members, drop = changedMembers(b, changes, make([]Member, 0, 14)), p.droppedFromAnswer(b)
	if !stream {
		dropOthers := drop // engines refuse stream_options without a stream
		drop = func(key string) bool { return key == "stream_options" || dropOthers(key) }
		return append(members, Member{"stream", jsonFalse}), drop
	}
	usage := usageTotal
	if p.continuousUsage() {
		usage = usageEachStep
	}
	members = append(members, Member{"stream", jsonTrue}, Member{"stream_options", usage})
	// A request that continues an answer drops echo.
	willEcho := wantsEcho(b) && changes.resumeOrNil() == nil
	if p.mayAskTokenIDs(b) && !willEcho {
		members = append(members, Member{"return_token_ids", jsonTrue})
	}
	return members, drop
}

func (p *Profile) droppedFromAnswer(b *Body) (drop func(key string) bool) {
	drop = dropOnDecode
	if beams, _ := b.Get("use_beam_search"); string(beams) == "true" {
		drop = Reserved // n stays: it is the number of beams
	}
	if !p.mayForwardStopTokens(b) {
		// Such ids could crash the engine; without them, the answer may become longer.
		dropOthers := drop
		drop = func(key string) bool { return key == "stop_token_ids" || dropOthers(key) }
	}
	return drop
}

// SGLang refuses a chat that asks for token ids (0.5.23, entrypoints/openai/serving_chat.py), but
// allows it for completions, as vLLM does.
func (p *Profile) mayAskTokenIDs(b *Body) bool {
	if b.layout != nil { // these answers always have token ids
		return false
	}
	if p.Connector == SGLang {
		if _, chat := b.Get("messages"); chat {
			return false
		}
	}
	return p.returnTokenIDs()
}

// DiscardBody appends a request whose only purpose is that a decode engine pulls kv, so that the
// prefill engine frees its blocks. These may have another prompt's KV by now, so each discard needs
// a new salt, with which no other request finds it in the decode engine's prefix cache.
func (p *Profile) DiscardBody(b *Body, ep Endpoint, changes *Patch, kv json.RawMessage, salt string, dst [][]byte) [][]byte {
	if s := bodyRulesOf[ep]; s != nil {
		return s.discard(b, changes, kv, salt, dst)
	}
	members := addOneToken(b, changes, make([]Member, 0, 7))
	resume := changes.resumeOrNil()
	kv = resume.addTokenIDs(kv)
	members = append(members, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
	// The one token is thrown away, as that of a probe.
	drop := resume.dropForLongerPrompt(dropOnProbe)
	return b.Splice(dst, drop, members)
}

// addOneToken makes the answer one token, in one piece of JSON.
func addOneToken(b *Body, changes *Patch, members []Member) []Member {
	members = append(promptMembers(b, changes, members), Member{"stream", jsonFalse}, Member{"max_tokens", jsonOne})
	if _, ok := b.Get("max_completion_tokens"); ok { // only chat has this key, which engines prefer
		members = append(members, Member{"max_completion_tokens", jsonOne})
	}
	return members
}

func promptMembers(b *Body, changes *Patch, members []Member) []Member {
	switch {
	case changes == nil:
		return members
	case changes.Resume != nil && changes.Resume.replacesPrompt():
		return changes.Resume.promptMembers(b, members)
	case changes.Prompt != nil:
		return append(members, Member{"prompt", changes.Prompt})
	}
	return members
}

func (c *Patch) resumeOrNil() *Resume {
	if c == nil {
		return nil
	}
	return c.Resume
}

// Each choice of a client's request is a request of its own: with the same seed, they would be
// equal.
func changedMembers(b *Body, changes *Patch, members []Member) []Member {
	if changes == nil {
		return members
	}
	members = promptMembers(b, changes, members)
	members = changes.Resume.addLimits(b, members) // nil adds nothing
	if changes.SeedOffset != 0 {
		if raw, ok := b.Get("seed"); ok { // else the choices differ anyway
			if seed, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
				members = append(members, Member{"seed", strconv.AppendInt(nil, offsetSeed(seed, int64(changes.SeedOffset)), 10)})
			}
		}
	}
	return members
}

// offsetSeed subtracts if the sum would overflow, so that the choices still get different seeds.
func offsetSeed(seed, offset int64) int64 {
	if seed > math.MaxInt64-offset {
		return seed - offset
	}
	return seed + offset
}

// vLLM leaves out the prompt's text if a request has return_token_ids, so evenkeel does not ask for
// them then.
func wantsEcho(b *Body) bool {
	echo, ok := b.Get("echo")
	return ok && string(echo) == "true"
}

// If min_tokens is above zero, the engine uses stop_token_ids as indices into the logits without a
// check: a single id outside the vocabulary crashes the whole engine.
func (p *Profile) mayForwardStopTokens(b *Body) bool {
	ids, ok := b.Get("stop_token_ids")
	if !ok || string(ids) == "null" {
		return true
	}
	if ids[0] != '[' {
		return false
	}
	// The ids of the vocabulary are from 0 to limit-1.
	limit := int64(p.VocabSize)
	if limit <= 0 { // any id may be outside the vocabulary
		minTokens, ok := b.Get("min_tokens")
		usedAsIndices := ok && string(minTokens) != "null" && string(minTokens) != "0"
		if usedAsIndices && string(ids) != "[]" {
			return false
		}
		limit = math.MaxInt32 // harmless if not used as indices
	}
	for raw := range rawjson.Elements(ids) {
		if id, err := strconv.ParseInt(string(raw), 10, 64); err != nil || id < 0 || id >= limit {
			return false
		}
	}
	return true
}

func (info *BootstrapInfo) probeParams() []byte {
	out := []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":`)
	return append(appendString(out, info.TransferID), '}')
}

// With vllm-mooncake the prefill engine returns no kv_transfer_params.
func (info *BootstrapInfo) handoff() json.RawMessage {
	out := []byte(`{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":`)
	out = append(appendString(out, info.TransferID), `,"remote_bootstrap_addr":`...)
	out = append(appendString(out, info.BootstrapAddr), `,"remote_engine_id":`...)
	return append(appendString(out, info.EngineID), '}')
}

func appendString(dst []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always marshals
	return append(dst, quoted...)
}

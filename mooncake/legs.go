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

// Endpoint is an HTTP endpoint whose requests evenkeel splits into a prefill and a decode request.
type Endpoint uint8

// The endpoints whose requests are split into prefill and decode.
const (
	Chat Endpoint = iota
	Completions
	Responses // OpenAI's Responses API
	Messages  // Anthropic's API
	Tokens    // vLLM's API: token ids in, token ids out
	Generate  // SGLang's API: token ids or text in, text and token ids out

	Endpoints = iota // how many endpoints there are
)

var paths = [Endpoints]string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
	"/generate"}

// Path returns the URL path of the endpoint. It is the same at evenkeel and at the engines.
func (e Endpoint) Path() string { return paths[e] }

// IsChatOrCompletions says whether the endpoint is Chat or Completions. Only these two are fully supported everywhere: all engines accept
// hand-offs for them and report the length of prompts, and every peer proxy knows how their streams end.
func (e Endpoint) IsChatOrCompletions() bool { return e <= Completions }

// CanResume says whether another engine can continue an interrupted answer of the endpoint.
func (e Endpoint) CanResume() bool { return e.Assembles() || e == Generate }

// Assembles says whether evenkeel can join the events of this endpoint's streams into one answer, for a client that wants no stream.
func (e Endpoint) Assembles() bool { return e.IsChatOrCompletions() || e == Tokens }

// RequestID returns the engine's internal id of a request whose X-Request-Id is id, without
// the random suffix that the engine adds. With nixl-push, the two engines match their requests by this id
// (vLLM 0.32.0, get_base_request_id in nixl/push_worker.py).
func (e Endpoint) RequestID(id string) string {
	switch e {
	case Chat, Messages:
		return "chatcmpl-" + id
	case Tokens:
		return "generate-tokens-" + id // vLLM 0.32.0, serve_tokens in entrypoints/scale_out/token_in_token_out/serving.py
	}
	return "cmpl-" + id + "-0" // -0 is the index of the prompt: evenkeel sends one prompt per request
}

// Patch says how a request to an engine differs from the client's body. A nil Patch changes nothing. If a client asks for several choices
// or prompts, each of them becomes a request with its own Patch.
type Patch struct {
	Prompt     json.RawMessage // replaces the body's "prompt"; nil: the body's own prompt stays
	SeedOffset int             // added to the client's seed, so that the choices of one request differ
	RID        string          // the rid of a request to SGLang's Generate that one engine computes alone; empty: the engine chooses an id
	IgnoreEOS  bool            // true for a probe that is repeated because its first token ended the answer
	Resume     *Resume         // set if the request continues an interrupted answer; nil: it begins the answer
	Adapter    Adapter         // the LoRA adapter that the client asks for; zero: it asks for a base model
	ProbeSalt  string          // salt of a probe to an engine that also decodes, as that of DecodeBody; empty: it needs none
}

// Adapter is a LoRA adapter, by its own name and that of its base model.
type Adapter struct{ Base, Name string }

// nameAdapter returns the body with the adapter named as SGLang wants it: behind the name of the base model (from
// 0.5.4 on, _resolve_lora_path in entrypoints/openai/serving_base.py) and in lora_path, which older versions and
// /generate read. Without either, SGLang answers with the base model.
func (p *Profile) nameAdapter(b *Body, ep Endpoint, changes *Patch) *Body {
	if p.Connector != SGLang || changes == nil || changes.Adapter.Name == "" {
		return b
	}
	named := *b
	named.pending = slices.Clone(b.pending) // the other leg's engine may want other names
	if ep != Generate {
		named.Set("model", appendString(nil, changes.Adapter.Base+":"+changes.Adapter.Name))
	}
	if ep != Messages { // which have no lora_path
		named.Set("lora_path", appendString(nil, changes.Adapter.Name))
	}
	return &named
}

// BootstrapInfo is the part of a vllm-mooncake hand-off that the proxy invents or
// looks up. Other connectors need none.
type BootstrapInfo struct {
	TransferID    string // id that evenkeel invents, new for every probe
	BootstrapAddr string // URL of the prefill engine's bootstrap server, such as "http://host:8998"
	EngineID      string // id of the prefill engine, from GET /query of its bootstrap server
}

// Reserved says whether engines must never get a client's value of this top-level key, because a client
// could use it to reach another request's KV, a rank, or internal code of the engine.
func Reserved(key string) bool {
	switch key {
	// Which KV or encoder cache the engines hand over, and where they meet for this. vLLM takes such parameters from vllm_xargs, too.
	case "kv_transfer_params", "ec_transfer_params", "batch_kv_transfer_params", "vllm_xargs", "metaserver", "do_virtual",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key":
		return true
	// Which rank runs the request.
	case "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank":
		return true
	// How the engine names the request, when it runs it, and how many tokens come in one event.
	case "request_id", "rid", "session_id", "priority", "stream_interval":
		return true
	// Code that the engine would load, and tensors that it would read or return.
	case "logits_processors", "prompt_embeds", "return_hidden_states":
		return true
	case "prompt_token_ids": // this key would replace the messages, without the chat template (vLLM PR 55771)
		return true
	// SGLang's own components and routers use these keys (0.5.23, GenerateReqInput in managers/io_struct.py).
	case "lora_id", "http_worker_ipc", "kv_hints", "external_trace_header", "received_time", "encoder_urls", "num_items_assigned",
		"need_wait_for_mm_inputs", "decode_tp_size", "positional_embed_overrides", "routing_key":
		return true
	}
	return strings.HasPrefix(key, "_vllm_ascend_") || strings.HasPrefix(key, "pd_")
}

// dropOnDecode says which keys a decode request leaves out: the reserved keys, and the keys that ask for several answers, because a decode
// request asks for one answer.
func dropOnDecode(key string) bool {
	return key == "n" || key == "best_of" || key == "use_beam_search" || Reserved(key)
}

// dropOnProbe says which keys a probe leaves out: those that do not change the prompt. The one token that a probe generates is thrown away,
// so these keys have no use, and a prefill engine refuses some of them or even crashes.
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

// ProbeBody appends the segments of the prefill request, which asks for one token, without a stream, and for a hand-off. The prompt, and
// every key that changes it, are byte for byte as in DecodeBody. info is for vllm-mooncake; other connectors need none. The member
// kv_transfer_params (params) asks for the hand-off.
func (p *Profile) ProbeBody(b *Body, ep Endpoint, changes *Patch, info *BootstrapInfo, dst [][]byte) [][]byte {
	params := pullProbe
	if p.Connector == VLLMMooncake && info != nil { // it needs the id of the transfer
		params = info.probeParams()
	}
	if s := bodyRulesOf[ep]; s != nil { // the bodies of this endpoint differ from those of chat and completions
		return s.probe(p, b, changes, params, dst)
	}
	return p.probeBody(b, changes, params, dst)
}

// probeBody appends a probe, which is a prefill request, of an endpoint without rules of its own. params becomes its kv_transfer_params. If
// the request continues an answer that broke off, some engines take the token ids of prompt and answer so far there.
func (p *Profile) probeBody(b *Body, changes *Patch, params json.RawMessage, dst [][]byte) [][]byte {
	resume := changes.resumeOrNil() // nil: the request begins the answer, and the two calls below change nothing
	params = resume.addTokenIDs(params)
	drop := resume.dropForLongerPrompt(droppedFromProbe(b)) // a prompt with the answer so far must not be truncated a second time
	members := addOneToken(b, changes, make([]Member, 0, 12))
	members = addSalt(b, changes.probeSalt(), p.addAgainstEOS(changes, members))
	// Only bodies of the endpoints Tokens and Generate have a layout. One of Tokens has token ids as its prompt. One of Generate does
	// not come here, because this endpoint is SGLang's own, and its probes come from sglangBody.
	promptIsTokenIDs := b.layout != nil
	if p.returnTokenIDs() && !promptIsTokenIDs {
		members = append(members, Member{"return_token_ids", jsonTrue})
	}
	return b.Splice(dst, drop, append(members, Member{"kv_transfer_params", params}))
}

// addAgainstEOS adds the members that keep a probe from ending with the end-of-sequence token,
// after which it would return no hand-off: by the profile min_tokens, ignore_eos, both or none. A
// probe that is repeated because its first token ended the answer always gets ignore_eos
// (ignoresEOS). Connectors that bind every request to its decode rank before the prefill
// (handsNothingOff) return no hand-off, and so need no min_tokens. Their profiles cannot ask for
// ignore_eos either.
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

// droppedFromProbe returns a function that says which keys a probe of this body leaves out: those of dropOnProbe, except some keys with a
// value that may be invalid. These stay, so that the prefill engine refuses the request before it computes anything. If only the decode
// engine refused it, after the prefill, the prefill engine could keep the KV until its hold ends.
func droppedFromProbe(b *Body) (drop func(key string) bool) {
	drop = dropOnProbe
	if asksTooManyLogprobs(b) {
		drop = dropOnProbeExceptLogprobs
	}
	// vLLM 0.32.0 refuses an invalid output_mode (GenerateRequest in entrypoints/scale_out/token_in_token_out/protocol.py). The valid
	// value derender does not stay, because with it the prefill engine would parse its one token as an answer.
	mode, hasMode := b.Get("output_mode")
	if modeStays := hasMode && string(mode) != `"derender"`; modeStays {
		dropOthers := drop
		drop = func(key string) bool { return key != "output_mode" && dropOthers(key) }
	}
	return drop
}

// dropOnProbeExceptLogprobs drops what dropOnProbe drops, except the number of logprobs. It is for a request for more logprobs than engines
// allow by default. Before vLLM 0.25, the prefill engine would keep the KV if only the decode engine refused this number.
func dropOnProbeExceptLogprobs(key string) bool {
	return key != "logprobs" && key != "top_logprobs" && dropOnProbe(key)
}

// asksTooManyLogprobs says whether a body asks for a number of logprobs that engines refuse by default: a negative one, or more than
// defaultMaxLogprobs.
func asksTooManyLogprobs(b *Body) bool {
	for _, key := range [...]string{"top_logprobs", "logprobs"} {
		v, ok := b.Get(key)
		isNumber := ok && (v[0] == '-' || v[0] >= '0' && v[0] <= '9')
		if !isNumber { // missing, or true or false as in chats
			continue
		}
		if n, err := strconv.ParseFloat(string(v), 64); err != nil || n < 0 || n > defaultMaxLogprobs {
			return true
		}
	}
	return false
}

// DecodeBody appends the segments of the decode request: the client's body with kv, the prefill engine's hand-off, unchanged. Keys that
// engines must not get from clients are dropped. If stream is false, the client gets the engine's own answer, so the request asks for
// nothing that the client did not ask for. If kv is nil, the decode engine computes the prompt itself, which the profile must allow by
// AllowLocalPrefill. If the request continues an answer that broke off (Patch.Resume), the answer so far goes with it: in the prompt or, by
// some ways of resuming, as token ids in kv_transfer_params. salt goes into the request's cache_salt; empty: it does not. An engine shares
// cached blocks only among requests with the same cache_salt, so a new salt keeps the request from using blocks that may be wrong.
func (p *Profile) DecodeBody(b *Body, ep Endpoint, changes *Patch, kv json.RawMessage, salt string, stream bool, dst [][]byte) [][]byte {
	b = p.nameAdapter(b, ep, changes)
	if s := bodyRulesOf[ep]; s != nil { // Responses and Messages, whose bodies differ from those of chat and completions
		return s.decode(p, b, kv, salt, stream, dst)
	}
	members, drop := p.answerMembers(b, changes, stream)
	if changes != nil && changes.RID != "" {
		members = append(members, Member{"rid", appendString(nil, changes.RID)})
	}
	members = addSalt(b, salt, members)
	resume := changes.resumeOrNil()             // nil: the request begins the answer, and the calls below change nothing
	if kv != nil || resume.tokenIDsInParams() { // without KV to pull and without ids in it, the request needs no kv_transfer_params
		members = append(members, Member{"kv_transfer_params", resume.addTokenIDs(kv)})
	}
	drop = resume.dropForLongerPrompt(drop) // echo, for example, must not apply to a prompt that contains the answer so far
	return b.Splice(dst, drop, members)
}

// addSalt adds a cache_salt, so that the request does not use blocks of the decode engine's prefix cache that may be wrong: an engine that
// pulled KV too late may have got another prompt's KV. evenkeel then invents a new salt for the rank, and the engine shares cached blocks
// only among requests with the same salt. If the client sent a salt, the new salt is a hash of both. An empty salt changes nothing.
func addSalt(b *Body, salt string, members []Member) []Member {
	if salt == "" {
		return members
	}
	if clientSalt, ok := b.Salt(); ok {
		if len(clientSalt) <= 2 || clientSalt[0] != '"' {
			return members // every engine refuses a salt that is empty or not a string
		}
		hash := sha256.Sum256([]byte(rawjson.Unquote(clientSalt) + " " + salt)) // a hash, because vLLM allows at most 128 characters in a salt
		salt = hex.EncodeToString(hash[:])
	}
	return append(members, Member{"cache_salt", appendString(nil, salt)})
}

// answerMembers returns the members to set and the keys to drop in a request whose answer goes to the client. stream says whether the
// engine streams the answer.
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
	// A request that continues an answer drops echo: see Resume.dropForLongerPrompt.
	willEcho := wantsEcho(b) && changes.resumeOrNil() == nil
	if p.mayAskTokenIDs(b) && !willEcho {
		members = append(members, Member{"return_token_ids", jsonTrue})
	}
	return members, drop
}

// droppedFromAnswer returns a function that says which keys are left out of a request whose answer goes to the client, streamed or not.
func (p *Profile) droppedFromAnswer(b *Body) (drop func(key string) bool) {
	drop = dropOnDecode
	if beams, _ := b.Get("use_beam_search"); string(beams) == "true" {
		drop = Reserved // less than dropOnDecode: n stays, because with beam search it is the number of beams
	}
	if !p.mayForwardStopTokens(b) { // these ids could crash the engine; without them, the answer may become longer
		dropOthers := drop
		drop = func(key string) bool { return key == "stop_token_ids" || dropOthers(key) }
	}
	return drop
}

// mayAskTokenIDs says whether evenkeel may ask for token ids in the streamed answer to a body. SGLang refuses a chat
// that asks for them (0.5.23, entrypoints/openai/serving_chat.py), but allows it for completions, as vLLM does.
func (p *Profile) mayAskTokenIDs(b *Body) bool {
	if b.layout != nil { // answers of endpoints with a layout always have token ids
		return false
	}
	if p.Connector == SGLang {
		if _, chat := b.Get("messages"); chat {
			return false
		}
	}
	return p.returnTokenIDs()
}

// DiscardBody appends the segments of a request whose only purpose is that a decode engine pulls the KV of a hand-off (kv), so that the
// prefill engine frees its blocks. It has the prompt of the request whose hand-off is not needed. The blocks may have another prompt's KV
// by now. Each discard therefore needs a new salt, with which no other request finds this KV in the decode engine's prefix cache.
func (p *Profile) DiscardBody(b *Body, ep Endpoint, changes *Patch, kv json.RawMessage, salt string, dst [][]byte) [][]byte {
	if s := bodyRulesOf[ep]; s != nil { // Responses and Messages, whose bodies differ from those of chat and completions
		return s.discard(b, changes, kv, salt, dst)
	}
	members := addOneToken(b, changes, make([]Member, 0, 7))
	resume := changes.resumeOrNil() // nil: the discarded request does not continue an answer, and the two calls below change nothing
	kv = resume.addTokenIDs(kv)     // some engines take the ids of prompt and answer so far beside the KV
	members = append(members, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", kv})
	// Like the one token of a probe, the one token of a discard is thrown away, so the keys of dropOnProbe have no use here either.
	drop := resume.dropForLongerPrompt(dropOnProbe) // a prompt that contains the answer so far must not be truncated a second time
	return b.Splice(dst, drop, members)
}

// addOneToken adds the members that end a request after its first token and make its answer one piece of JSON. It also adds those that
// replace the client's prompt, if changes says so.
func addOneToken(b *Body, changes *Patch, members []Member) []Member {
	members = append(promptMembers(b, changes, members), Member{"stream", jsonFalse}, Member{"max_tokens", jsonOne})
	if _, ok := b.Get("max_completion_tokens"); ok { // only chat has this key, which engines prefer to max_tokens
		members = append(members, Member{"max_completion_tokens", jsonOne})
	}
	return members
}

// promptMembers adds the members that replace the client's prompt, if changes has another prompt or continues an answer.
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

// resumeOrNil returns Resume; nil also if c is nil.
func (c *Patch) resumeOrNil() *Resume {
	if c == nil {
		return nil
	}
	return c.Resume
}

// changedMembers adds what changes sets in a request whose answer goes to the client: the prompt, the limits of an answer that is
// continued, and the seed. Each choice of a client's request is a request of its own: with the same seed, the choices would be equal.
func changedMembers(b *Body, changes *Patch, members []Member) []Member {
	if changes == nil {
		return members
	}
	members = promptMembers(b, changes, members)
	members = changes.Resume.addLimits(b, members) // Resume nil: the request begins the answer, and this adds nothing
	if changes.SeedOffset != 0 {
		if raw, ok := b.Get("seed"); ok { // without a seed, the engine samples each choice differently anyway
			if seed, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
				members = append(members, Member{"seed", strconv.AppendInt(nil, offsetSeed(seed, int64(changes.SeedOffset)), 10)})
			}
		}
	}
	return members
}

// offsetSeed adds offset to seed, or subtracts offset if the sum would overflow. In both cases, the choices of one request get different
// seeds.
func offsetSeed(seed, offset int64) int64 {
	if seed > math.MaxInt64-offset { // the sum would overflow
		return seed - offset
	}
	return seed + offset
}

// wantsEcho says whether the client wants the answer to begin with the prompt's text. vLLM leaves out this text if a request has
// return_token_ids, so evenkeel does not ask for token ids then.
func wantsEcho(b *Body) bool {
	echo, ok := b.Get("echo")
	return ok && string(echo) == "true"
}

// mayForwardStopTokens says whether an engine may get the body's stop_token_ids. If min_tokens is above zero, the engine uses these ids as
// indices into the logits without a check. A single id outside the vocabulary then crashes the whole engine.
func (p *Profile) mayForwardStopTokens(b *Body) bool {
	ids, ok := b.Get("stop_token_ids")
	if !ok || string(ids) == "null" {
		return true
	}
	if ids[0] != '[' { // not a list, so not a value that engines expect
		return false
	}
	// The ids in the vocabulary are those from 0 to limit-1.
	limit := int64(p.VocabSize)
	if limit <= 0 { // the size of the vocabulary is not known, so any id may be outside it
		minTokens, ok := b.Get("min_tokens")
		usedAsIndices := ok && string(minTokens) != "null" && string(minTokens) != "0"
		if usedAsIndices && string(ids) != "[]" {
			return false
		}
		limit = math.MaxInt32 // ids that the engine does not use as indices are harmless
	}
	for raw := range rawjson.Elements(ids) {
		if id, err := strconv.ParseInt(string(raw), 10, 64); err != nil || id < 0 || id >= limit {
			return false
		}
	}
	return true
}

// probeParams returns the kv_transfer_params of a probe to vllm-mooncake.
func (info *BootstrapInfo) probeParams() []byte {
	out := []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":`)
	return append(appendString(out, info.TransferID), '}')
}

// handoff returns the kv_transfer_params for the decode engine. evenkeel makes them itself, because with vllm-mooncake the prefill engine
// returns none.
func (info *BootstrapInfo) handoff() json.RawMessage {
	out := []byte(`{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":`)
	out = append(appendString(out, info.TransferID), `,"remote_bootstrap_addr":`...)
	out = append(appendString(out, info.BootstrapAddr), `,"remote_engine_id":`...)
	return append(appendString(out, info.EngineID), '}')
}

// appendString appends s as a JSON string, in quotes and escaped.
func appendString(dst []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always marshals
	return append(dst, quoted...)
}

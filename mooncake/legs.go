package mooncake

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"strconv"
	"strings"

	"evenkeel/internal/rawjson"
)

// Endpoint is one of the calls that are split into prefill and decode.
type Endpoint uint8

// The endpoints.
const (
	Chat Endpoint = iota
	Completions
	Responses // of OpenAI's second API
	Messages  // of Anthropic's
	Tokens    // of vLLM: token ids in, token ids out
	Generate  // of SGLang: token ids or text, with token ids out

	Endpoints = iota // how many there are
)

var paths = [Endpoints]string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
	"/generate"}

// Path is the endpoint's URL path, with us and with the engines.
func (e Endpoint) Path() string { return paths[e] }

// Common says whether every engine takes hand-offs at this endpoint and knows how long its prompts
// are, and whether every dispatcher knows how its streams end.
func (e Endpoint) Common() bool { return e <= Completions }

// GoesOn says whether an answer of the endpoint that breaks off can go on at another engine.
func (e Endpoint) GoesOn() bool { return e.Assembles() || e == Generate }

// Assembles says whether evenkeel can put an unstreamed answer of the endpoint together from a stream's events.
func (e Endpoint) Assembles() bool { return e.Common() || e == Tokens }

// RequestID is what an engine calls the request that has id as its X-Request-Id, less
// the random suffix that it adds. The two engines of nixl-push find a request by this name, whichever leg
// comes first (vLLM 0.32.0, get_base_request_id in nixl/push_worker.py).
func (e Endpoint) RequestID(id string) string {
	switch e {
	case Chat, Messages:
		return "chatcmpl-" + id
	case Tokens:
		return "generate-tokens-" + id // vLLM 0.32.0, serve_tokens in entrypoints/scale_out/token_in_token_out/serving.py
	}
	return "cmpl-" + id + "-0" // each of our requests has one prompt
}

// Changes are how a request to an engine differs from the client's body. Nil Changes
// change nothing. A client's request for several choices or with several prompts
// has Changes for each answer.
type Changes struct {
	Prompt     json.RawMessage // replaces "prompt"; nil: the body's own
	SeedOffset int             // added to the client's seed, so that samples differ
	RID        string          // SGLang's id of a request to Generate that one engine gets alone; empty: the engine chooses one
	IgnoreEOS  bool            // set for a probe that is sent again because its first token ended the answer
	Resume     *Resume         // set for a leg that goes on with an answer; nil: the leg begins the answer
	Fetch      json.RawMessage // kv_transfer_params by which a prefill engine fetches the KV of the chat's last turn; nil: it computes all
}

// Exchange is the part of a vllm-mooncake handoff that the proxy invents or
// looks up; the other connectors have none.
type Exchange struct {
	TransferID    string // new for every probe
	BootstrapAddr string // "http://host:8998" of the prefill engine
	EngineID      string // from GET /query of that address
}

// Reserved tells whether a client's value of a top-level key must never reach
// an engine: it would address another request's KV, a rank, or
// code inside the engine.
func Reserved(key string) bool {
	switch key {
	case "kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "priority", "vllm_xargs", "stream_interval",
		// What SGLang has for its own parts or for its routers alone (0.5.23, GenerateReqInput in managers/io_struct.py):
		"lora_id", "http_worker_ipc", "kv_hints", "external_trace_header", "received_time", "encoder_urls", "num_items_assigned",
		"need_wait_for_mm_inputs", "decode_tp_size", "positional_embed_overrides", "routing_key",
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "routed_dp_rank", "data_parallel_rank",
		"disagg_prefill_dp_rank", "rid", "metaserver", "do_virtual", "batch_kv_transfer_params", "return_hidden_states", "logits_processors",
		"prompt_embeds",
		"prompt_token_ids": // would replace the messages, without the chat template (vLLM PR 55771)
		return true
	}
	return strings.HasPrefix(key, "_vllm_ascend_") || strings.HasPrefix(key, "pd_")
}

// dropOnDecode drops the reserved keys, and the keys that ask for several answers, because each leg asks for one answer.
func dropOnDecode(key string) bool {
	return key == "n" || key == "best_of" || key == "use_beam_search" || Reserved(key)
}

// dropOnProbe drops the keys that do not shape the prompt: the probe's one token is
// thrown away, and some of these keys are refused or dangerous on a prefill engine.
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

var (
	jsonTrue      = []byte("true")
	jsonFalse     = []byte("false")
	jsonOne       = []byte("1")
	pullProbe     = []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)
	usageTotal    = []byte(`{"include_usage":true,"continuous_usage_stats":false}`)
	usageEachStep = []byte(`{"include_usage":true,"continuous_usage_stats":true}`)
)

// ProbeBody appends the segments of the prefill request: one token, not
// streamed, asking for a handoff. The prompt and all that shapes
// it stay byte for byte what DecodeBody sends. x is for vllm-mooncake only.
func (p *Profile) ProbeBody(b *Body, ep Endpoint, changes *Changes, x *Exchange, dst [][]byte) [][]byte {
	params := pullProbe
	if changes != nil && changes.Fetch != nil {
		params = changes.Fetch
	}
	if p.Connector == VLLMMooncake && x != nil {
		params = x.probeParams()
	}
	if s := shapes[ep]; s != nil {
		return s.probe(p, b, changes, params, dst)
	}
	return p.probeWith(b, changes, params, dst)
}

// probeWith is ProbeBody with params as kv_transfer_params.
func (p *Profile) probeWith(b *Body, changes *Changes, params json.RawMessage, dst [][]byte) [][]byte {
	params = changes.resume().addIDs(params)
	members := make([]Member, 0, 12)
	members = oneToken(b, changes, members)
	if (p.ProbeMinTokens == MinTokensOne || p.ProbeMinTokens == "") && !p.alwaysEarly() {
		members = append(members, Member{"min_tokens", jsonOne})
	}
	if p.ProbeIgnoreEOS || p.ProbeMinTokens == MinTokensIgnoreEOS || changes.ignoresEOS() {
		members = append(members, Member{"ignore_eos", jsonTrue})
	}
	if p.returnTokenIDs() && b.form == nil { // with a form, the client's own body has the ids
		members = append(members, Member{"return_token_ids", jsonTrue})
	}
	drop := dropOnProbe
	if asksForMany(b) {
		drop = dropOnProbeButLogprobs
	}
	// output_mode stays, so that the prefill engine refuses a value that does not exist. Otherwise the decode engine would refuse it when
	// it reads the body, and the prefill engine would not learn that, and would keep the KV until its hold ends (vLLM 0.32.0,
	// GenerateRequest in entrypoints/scale_out/token_in_token_out/protocol.py). With derender, the prefill engine would parse its one
	// token as an answer.
	if mode, ok := b.Get("output_mode"); ok && string(mode) != `"derender"` {
		inner := drop
		drop = func(key string) bool { return key != "output_mode" && inner(key) }
	}
	return b.Splice(dst, changes.resume().alsoDrop(drop), append(members, Member{"kv_transfer_params", params}))
}

// dropOnProbeButLogprobs is dropOnProbe for a request for more likeliest tokens than engines give by default (vLLM's
// --max-logprobs is 20). If the engines do not allow so many, the prefill engine refuses the request before it computes anything. A
// decode engine would refuse it after the prefill, and before vLLM 0.25 not pull the KV, so that the prefill engine would keep it.
func dropOnProbeButLogprobs(key string) bool {
	return key != "logprobs" && key != "top_logprobs" && dropOnProbe(key)
}

// asksForMany says whether a body asks for more likeliest tokens than engines give by default.
func asksForMany(b *Body) bool {
	for _, key := range [...]string{"top_logprobs", "logprobs"} {
		if v, ok := b.Get(key); ok && (v[0] == '-' || v[0] >= '0' && v[0] <= '9') {
			if n, err := strconv.ParseFloat(string(v), 64); err != nil || n < 0 || n > 20 {
				return true
			}
		}
	}
	return false
}

// DecodeBody appends the segments of the decode request: the client's body
// with the prefill engine's handoff kv, verbatim. With stream false, the client gets the
// engine's own answer, so evenkeel asks for nothing that the client
// did not ask for. A nil kv makes the decode engine prefill by itself; pass it
// only if the profile has AllowLocalPrefill.
func (p *Profile) DecodeBody(b *Body, ep Endpoint, changes *Changes, kv json.RawMessage, salt string, stream bool, dst [][]byte) [][]byte {
	if s := shapes[ep]; s != nil {
		return s.decode(p, b, kv, salt, stream, dst)
	}
	members, drop := p.answerMembers(b, changes, stream)
	if changes != nil && changes.RID != "" {
		members = append(members, Member{"rid", appendString(nil, changes.RID)})
	}
	members = salted(b, salt, members)
	if kv != nil || changes.resume().idsInParams() {
		members = append(members, Member{"kv_transfer_params", changes.resume().addIDs(kv)})
	}
	return b.Splice(dst, changes.resume().alsoDrop(drop), members)
}

// salted adds a cache_salt, so that a request does not find blocks in a decode engine's prefix cache which may be wrong. It
// is appended to the client's own salt. An empty one changes nothing.
func salted(b *Body, salt string, members []Member) []Member {
	if salt == "" {
		return members
	}
	if own, ok := b.Salt(); ok {
		if len(own) <= 2 || own[0] != '"' {
			return members // every engine refuses such a salt, and so the request
		}
		hash := sha256.Sum256([]byte(rawjson.Unquote(own) + " " + salt)) // a hash, because vLLM takes a salt of at most 128 characters
		salt = hex.EncodeToString(hash[:])
	}
	return append(members, Member{"cache_salt", appendString(nil, salt)})
}

// answerMembers returns the members that are set, and the keys that are dropped, in a request whose answer the client
// gets. stream says that the engine is to stream the answer.
func (p *Profile) answerMembers(b *Body, changes *Changes, stream bool) (members []Member, drop func(key string) bool) {
	members = changedMembers(b, changes, make([]Member, 0, 14))
	drop = dropOnDecode
	if beams, _ := b.Get("use_beam_search"); string(beams) == "true" { // n is the number of beams then, and one engine computes them all
		drop = Reserved
	}
	if !p.stopTokensSafe(b) {
		inner := drop
		drop = func(key string) bool { return key == "stop_token_ids" || inner(key) }
	}
	if stream {
		usage := usageTotal
		if p.continuousUsage() {
			usage = usageEachStep
		}
		members = append(members, Member{"stream", jsonTrue}, Member{"stream_options", usage})
		if p.tellsIDs(b) && (!echoes(b) || changes.resume() != nil) {
			members = append(members, Member{"return_token_ids", jsonTrue})
		}
	} else {
		members = append(members, Member{"stream", jsonFalse})
		inner := drop
		drop = func(key string) bool { return key == "stream_options" || inner(key) }
	}
	return members, drop
}

// tellsIDs says whether a streamed answer to a body may be asked for token ids. SGLang refuses a chat
// that asks for them (0.5.23, entrypoints/openai/serving_chat.py); its completions have them as vLLM's do.
func (p *Profile) tellsIDs(b *Body) bool {
	if b.form != nil { // answers to such a body always have token ids
		return false
	}
	if p.Connector == SGLang {
		if _, chat := b.Get("messages"); chat {
			return false
		}
	}
	return p.returnTokenIDs()
}

// DiscardBody appends the segments of a request that only makes a decode engine
// pull the handoff, so that the prefill engine frees it. By then, the blocks that it
// pulls may have another prompt's KV. The salt, new for every discard, keeps this KV apart
// in the engine's prefix cache, so that no other request finds it.
func (p *Profile) DiscardBody(b *Body, ep Endpoint, changes *Changes, kv json.RawMessage, salt string, dst [][]byte) [][]byte {
	if s := shapes[ep]; s != nil {
		return s.discard(b, changes, kv, salt, dst)
	}
	members := oneToken(b, changes, make([]Member, 0, 7))
	members = append(members, Member{"cache_salt", appendString(nil, salt)}, Member{"kv_transfer_params", changes.resume().addIDs(kv)})
	return b.Splice(dst, changes.resume().alsoDrop(dropOnProbe), members)
}

// oneToken adds the members that end a request after its first token, with an answer that is not streamed.
func oneToken(b *Body, changes *Changes, members []Member) []Member {
	members = append(promptMembers(b, changes, members), Member{"stream", jsonFalse}, Member{"max_tokens", jsonOne})
	if _, ok := b.Get("max_completion_tokens"); ok { // of a chat: engines prefer it to max_tokens
		members = append(members, Member{"max_completion_tokens", jsonOne})
	}
	return members
}

// promptMembers adds what replaces the body's own prompt.
func promptMembers(b *Body, changes *Changes, members []Member) []Member {
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

// resume is the Resume of the changes; nil for nil changes.
func (l *Changes) resume() *Resume {
	if l == nil {
		return nil
	}
	return l.Resume
}

// changedMembers adds the members by which changes make an answer's request differ from the client's body: the prompt,
// the limits and the seed.
func changedMembers(b *Body, changes *Changes, members []Member) []Member {
	if changes == nil {
		return members
	}
	members = changes.Resume.addLimits(b, promptMembers(b, changes, members))
	if changes.SeedOffset != 0 {
		if raw, ok := b.Get("seed"); ok {
			if seed, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
				members = append(members, Member{"seed", strconv.AppendInt(nil, shift(seed, int64(changes.SeedOffset)), 10)})
			}
		}
	}
	return members
}

// shift adds offset to seed, or subtracts it if the sum would overflow; the
// samples of one request get different seeds either way.
func shift(seed, offset int64) int64 {
	if seed > math.MaxInt64-offset {
		return seed - offset
	}
	return seed + offset
}

// echoes tells whether the answer begins with the prompt's text. vLLM leaves that
// text out beside return_token_ids, because the ids then stand for it. The text is
// what the client asked for, so the ids are not asked for: usage counts the tokens.
// A resumed request has no echo any more, see Resume.drop.
func echoes(b *Body) bool {
	echo, ok := b.Get("echo")
	return ok && string(echo) == "true"
}

// stopTokensSafe tells whether the body's stop_token_ids may go to an engine.
// If min_tokens is above zero, the engine uses these ids as indices of the logits and does not check
// them, so that one id beyond the vocabulary ends the whole engine.
func (p *Profile) stopTokensSafe(b *Body) bool {
	ids, ok := b.Get("stop_token_ids")
	if !ok || string(ids) == "null" {
		return true
	}
	if ids[0] != '[' {
		return false
	}
	limit := int64(p.VocabSize)
	if limit <= 0 { // the size of the vocabulary is not known, so no id is known to be within it
		minTokens, ok := b.Get("min_tokens")
		if usedAsIndices := ok && string(minTokens) != "null" && string(minTokens) != "0"; usedAsIndices && string(ids) != "[]" {
			return false
		}
		limit = math.MaxInt32 // where they are no indices, all ids are harmless
	}
	for raw := range rawjson.Elements(ids) {
		if id, err := strconv.ParseInt(string(raw), 10, 64); err != nil || id < 0 || id >= limit {
			return false
		}
	}
	return true
}

// probeParams returns the kv_transfer_params of a probe to vllm-mooncake.
func (x *Exchange) probeParams() []byte {
	out := []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":`)
	return append(appendString(out, x.TransferID), '}')
}

// handoff is what the prefill engine would have returned if this connector's
// engine returned anything.
func (x *Exchange) handoff() json.RawMessage {
	out := []byte(`{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":`)
	out = append(appendString(out, x.TransferID), `,"remote_bootstrap_addr":`...)
	out = append(appendString(out, x.BootstrapAddr), `,"remote_engine_id":`...)
	return append(appendString(out, x.EngineID), '}')
}

// appendString appends a string as JSON.
func appendString(dst []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // a string always marshals
	return append(dst, quoted...)
}

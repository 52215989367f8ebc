package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"evenkeel/rawjson"
)

// Sentinels of ReadProbe.
var (
	// ErrNoHandoff: the prefill engine answered 200 and keeps no blocks for us.
	// If FinishReason is "stop" the first token ended the answer; else a
	// preemption took the blocks. Probe again.
	ErrNoHandoff = errors.New("mooncake: the prefill engine returned no handoff")
	// ErrBadHandoff: what came is not a handoff of this connector.
	ErrBadHandoff = errors.New("mooncake: the prefill engine returned a malformed handoff")
	// ErrUnknownHost: the handoff names a host that is no prefill engine's.
	ErrUnknownHost = errors.New("mooncake: the handoff points to an unknown host")
)

const (
	// MaxProbeAnswer bounds the answer of a probe: the token ids of a prompt of
	// a million tokens take about 7 MB.
	MaxProbeAnswer = 16 << 20
	// maxHandoff bounds the handoff in it: a million tokens' block ids take
	// about 100 KB.
	maxHandoff = 1 << 20
	// maxName bounds the names in a handoff: hosts, engine and request ids.
	maxName = 512
)

// ProbeAnswer is what a prefill engine answered.
type ProbeAnswer struct {
	ID             string
	KV             json.RawMessage // the handoff, byte for byte; a copy
	PromptTokens   int             // 0: not reported; may be one less than decode's count
	CachedTokens   int             // -1: not reported
	PromptTokenIDs json.RawMessage // nil: not reported; points into the answer
	FinishReason   string
	EngineID       string // of the engine that has the blocks; empty: not told

	// ByProbeID: the handoff does not say which request made it, so the decode
	// request must have the probe's X-Request-Id. A decode engine of such a version
	// reports a finished pull under its own request's id, and the prefill engine
	// keeps the blocks until the hold timeout if it does not know that id.
	ByProbeID bool
}

// ReadProbe reads the JSON of a probe's 200 and checks the handoff by its
// shape, never against a fixed list of fields: they differ by version.
// knownHost tells which hosts a decode engine may be sent
// to; nil knows none. With ErrNoHandoff the rest of the answer is valid.
func (p *Profile) ReadProbe(answer []byte, x *Exchange, knownHost func(host string) bool) (ProbeAnswer, error) {
	if len(answer) > MaxProbeAnswer {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer has %d bytes, more than %d", ErrBadHandoff, len(answer), MaxProbeAnswer)
	}
	b, err := ScanBody(answer, 0)
	if err != nil {
		return ProbeAnswer{}, fmt.Errorf("%w: the answer is not JSON: %w", ErrBadHandoff, err)
	}
	if e, ok := b.Get("error"); ok && string(e) != "null" { // some routes send an error with status 200
		return ProbeAnswer{}, fmt.Errorf("%w: an error came with status 200; the engine's log says which", ErrBadHandoff) // not quoted: it may repeat the prompt
	}
	a := readAnswer(&b)
	if p.Connector == VLLMMooncake {
		if x == nil || x.TransferID == "" || x.BootstrapAddr == "" || x.EngineID == "" {
			return a, fmt.Errorf("%w: the exchange lacks transfer id, bootstrap address or engine id; query the bootstrap server first", ErrBadHandoff)
		}
		if a.FinishReason != "length" { // blocks are kept for a request that ran into its limit only
			return a, fmt.Errorf("%w: finish_reason is %s", ErrNoHandoff, reasonOf(a.FinishReason))
		}
		a.KV, a.EngineID = x.handoff(), x.EngineID
		return a, nil
	}
	kv, ok := b.Get("kv_transfer_params")
	if !ok || string(kv) == "null" {
		return a, fmt.Errorf("%w: kv_transfer_params is missing or null, finish_reason is %s; start the engine with kv_role kv_producer or kv_both",
			ErrNoHandoff, reasonOf(a.FinishReason))
	}
	if a.ByProbeID, err = p.checkHandoff(kv, knownHost); err != nil {
		return a, err
	}
	a.KV = bytes.Clone(kv)
	if h, ok := object(kv, true); ok {
		a.EngineID, _ = text(&h, "remote_engine_id")
	}
	return a, nil
}

func readAnswer(b *Body) ProbeAnswer {
	a := ProbeAnswer{CachedTokens: -1}
	a.ID, _ = text(b, "id")
	a.PromptTokenIDs = tokenList(b.Get("prompt_token_ids")) // chat; completions have it in the choice
	if usage, ok := object(b.Get("usage")); ok {
		a.PromptTokens, _ = number(&usage, "prompt_tokens")
		if details, ok := object(usage.Get("prompt_tokens_details")); ok {
			if n, ok := number(&details, "cached_tokens"); ok {
				a.CachedTokens = n
			}
		}
	}
	if choice, ok := object(first(b.Get("choices"))); ok {
		a.FinishReason, _ = text(&choice, "finish_reason")
		if a.PromptTokenIDs == nil {
			a.PromptTokenIDs = tokenList(choice.Get("prompt_token_ids"))
		}
	}
	return a
}

// checkHandoff checks the parts a decode engine would act on.
func (p *Profile) checkHandoff(kv json.RawMessage, knownHost func(string) bool) (byProbeID bool, err error) {
	if len(kv) > maxHandoff {
		return false, fmt.Errorf("%w: kv_transfer_params has %d bytes, more than %d", ErrBadHandoff, len(kv), maxHandoff)
	}
	h, ok := object(kv, true)
	if !ok {
		return false, fmt.Errorf("%w: kv_transfer_params is not an object: %s", ErrBadHandoff, kindOf(kv))
	}
	if len(h.members) == 0 {
		return false, fmt.Errorf("%w: kv_transfer_params is {}", ErrNoHandoff)
	}
	if p.Connector == Opaque {
		return false, nil
	}
	if v, _ := h.Get("do_remote_prefill"); string(v) != "true" {
		return false, fmt.Errorf("%w: do_remote_prefill is %s, not true", ErrBadHandoff, kindOf(v))
	}
	ids, _ := h.Get("remote_block_ids")
	switch n, ok := countBlocks(ids); {
	case !ok:
		return false, fmt.Errorf("%w: remote_block_ids is %s, not a list of block numbers or a list of such lists", ErrBadHandoff, kindOf(ids))
	case n == 0: // the blocks were preempted; with it the decode engine would crash
		return false, fmt.Errorf("%w: remote_block_ids is empty", ErrNoHandoff)
	}
	names := []string{"remote_engine_id", "remote_host", "remote_request_id"}
	if _, named := h.Get("remote_request_id"); !named { // vllm-ascend before 0.14, vLLM's NIXL before 0.13
		names, byProbeID = names[:2], true
	}
	for _, key := range names {
		if s, ok := text(&h, key); !ok || s == "" || len(s) > maxName {
			v, _ := h.Get(key)
			return false, fmt.Errorf("%w: %s is %s, not a name", ErrBadHandoff, key, kindOf(v))
		}
	}
	if port, ok := number(&h, "remote_port"); !ok || port < 1 || port > 65535 {
		v, _ := h.Get("remote_port")
		return false, fmt.Errorf("%w: remote_port is %s, not a port", ErrBadHandoff, kindOf(v))
	}
	return byProbeID, p.checkHosts(kv, knownHost)
}

// countBlocks counts the block numbers in a list or in a list of lists, one
// for each KV cache group; ok is false for any other shape.
func countBlocks(ids json.RawMessage) (n int, ok bool) {
	if len(ids) == 0 || ids[0] != '[' {
		return 0, false
	}
	flat, nested := 0, 0
	for id := range rawjson.Elements(ids) {
		if id[0] != '[' {
			flat++
			if !isBlock(id) {
				return 0, false
			}
			continue
		}
		nested++
		for id := range rawjson.Elements(id) {
			n++
			if !isBlock(id) {
				return 0, false
			}
		}
	}
	return n + flat, flat == 0 || nested == 0
}

func isBlock(raw json.RawMessage) bool {
	for _, c := range raw {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// first, object, text, number and tokenList read parts of an answer; what has another
// type is as good as missing.

func first(list json.RawMessage, ok bool) (json.RawMessage, bool) {
	if ok {
		for raw := range rawjson.Elements(list) {
			return raw, true
		}
	}
	return nil, false
}

func object(raw json.RawMessage, ok bool) (Body, bool) {
	if !ok || len(raw) == 0 || raw[0] != '{' {
		return Body{}, false
	}
	b, err := ScanBody(raw, 0)
	return b, err == nil
}

func text(b *Body, key string) (string, bool) {
	raw, ok := b.Get(key)
	if !ok || raw[0] != '"' {
		return "", false
	}
	return rawjson.Unquote(raw), true
}

func number(b *Body, key string) (int, bool) {
	raw, ok := b.Get(key)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(string(raw))
	return n, err == nil && n >= 0
}

func tokenList(raw json.RawMessage, ok bool) json.RawMessage {
	if !ok || raw[0] != '[' {
		return nil
	}
	return raw
}

package mooncake

import (
	"encoding/json"
	"fmt"
	"strconv"

	"evenkeel/internal/rawjson"
)

// ReadHandBack checks the kv_transfer_params by which a decode engine with connector nixl-pull reports that it keeps the KV of an
// answer. A prefill engine that gets them with a later request fetches this KV (vLLM 0.33.0, request_finished and
// get_num_new_matched_tokens in nixl/pull_scheduler.py). They are therefore params of a probe, with do_remote_decode true, while a hand-off
// has params of a decode request, with do_remote_prefill true. tokens is the length of the KV: the prompt and the answer without its last
// token.
func (p *Profile) ReadHandBack(kv json.RawMessage, knownHost func(host string) bool) (tokens int, err error) {
	if len(kv) > maxHandoff {
		return 0, fmt.Errorf("%w: kv_transfer_params has %d bytes, more than %d", ErrBadHandoff, len(kv), maxHandoff)
	}
	if kv[0] == '{' { // package sse has only matched the brackets, and a prefill engine would refuse a request with invalid JSON
		if _, err := rawjson.Scan(kv, 0, nil); err != nil {
			return 0, fmt.Errorf("%w: kv_transfer_params is not JSON: %w", ErrBadHandoff, err)
		}
	}
	h, ok := readHandoff(kv)
	if !ok {
		return 0, fmt.Errorf("%w: kv_transfer_params is not an object: %s", ErrBadHandoff, describeValue(kv))
	}
	forProbe := false // do_remote_decode is true: the params are for a probe, which fetches the KV
	for key, v := range rawjson.Members(kv) {
		switch key {
		case "do_remote_decode":
			forProbe = string(v) == "true"
		case "remote_num_tokens":
			if tokens, err = strconv.Atoi(string(v)); err != nil {
				tokens = 0 // 0 tokens are refused below, where err is set
			}
		}
	}
	forDecode := string(h.doPrefill) == "true" // the params are for a decode request, so they are a hand-off
	isHandBack := forProbe && !forDecode
	if !isHandBack || tokens <= 0 || h.requestID == nil { // no engine could fetch the KV by it
		return 0, fmt.Errorf("%w: kv_transfer_params does not say whose KV of how many tokens is kept for a prefill engine", ErrBadHandoff)
	}
	if err := p.checkTransferMode(&h); err != nil {
		return tokens, err
	}
	if err := h.checkSource(); err != nil {
		return tokens, err
	}
	return tokens, p.checkHosts(kv, knownHost)
}

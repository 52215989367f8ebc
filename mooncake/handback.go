package mooncake

import (
	"encoding/json"
	"fmt"
	"strconv"

	"evenkeel/internal/rawjson"
)

// ReadHandBack checks the kv_transfer_params by which a decode engine with connector nixl-pull reports that it keeps the KV of an
// answer. A prefill engine that gets them with a later request fetches this KV (vLLM 0.33.0, request_finished and
// get_num_new_matched_tokens in nixl/pull_scheduler.py). tokens is the length of the KV: the prompt and the answer without its last token.
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
	keepsKV := false // the decode engine offers its KV to a prefill engine
	for key, v := range rawjson.Members(kv) {
		switch key {
		case "do_remote_decode":
			keepsKV = string(v) == "true"
		case "remote_num_tokens":
			if tokens, err = strconv.Atoi(string(v)); err != nil {
				tokens = 0 // 0 tokens are refused below, where err is set
			}
		}
	}
	handsOff := string(h.doPrefill) == "true" // this is a hand-off to a decode engine
	isHandBack := keepsKV && !handsOff
	if !isHandBack || tokens <= 0 || h.requestID == nil { // no engine could fetch the KV by it
		return 0, fmt.Errorf("%w: kv_transfer_params does not say whose KV of how many tokens is kept for a prefill engine", ErrBadHandoff)
	}
	h.doPrefill = json.RawMessage("true") // the other members are the same as in a hand-off, so checkHandoff can check them
	_, err = p.checkHandoff(&h, knownHost)
	return tokens, err
}

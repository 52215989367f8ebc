package mooncake

import (
	"encoding/json"
	"fmt"
	"strconv"

	"evenkeel/internal/rawjson"
)

// ReadHandBack checks what a decode engine of nixl-pull says of the KV that it keeps of an answer, and returns how many tokens that is:
// those of the prompt and of the answer, less the last one. They are the kv_transfer_params of a prefill request that fetches it
// (vLLM 0.33.0, request_finished and get_num_new_matched_tokens in nixl/pull_scheduler.py).
func (p *Profile) ReadHandBack(kv json.RawMessage, knownHost func(host string) bool) (tokens int, err error) {
	if len(kv) > maxHandoff {
		return 0, fmt.Errorf("%w: kv_transfer_params has %d bytes, more than %d", ErrBadHandoff, len(kv), maxHandoff)
	}
	h, ok := readHandoff(kv)
	if !ok {
		return 0, fmt.Errorf("%w: kv_transfer_params is not an object: %s", ErrBadHandoff, kindOf(kv))
	}
	decode := false
	for key, v := range rawjson.Members(kv) {
		switch key {
		case "do_remote_decode":
			decode = string(v) == "true"
		case "remote_num_tokens":
			tokens, _ = strconv.Atoi(string(v)) // anything else is no number of tokens
		}
	}
	if string(h.doPrefill) == "true" || !decode || tokens <= 0 || h.requestID == nil {
		return 0, fmt.Errorf("%w: kv_transfer_params does not say whose KV of how many tokens is kept for a prefill engine", ErrBadHandoff)
	}
	h.doPrefill = json.RawMessage("true") // the rest is as in a hand-off
	_, err = p.checkHandoff(&h, knownHost)
	return tokens, err
}

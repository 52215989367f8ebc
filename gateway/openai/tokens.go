package openai

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// tokensRules are for /inference/v1/generate, by the keys of completions (vLLM 0.32.0 and 0.33.0,
// GenerateRequest in entrypoints/scale_out/token_in_token_out/protocol.py).
var tokensRules = map[string]rule{
	"model":           setModel,
	"prompt":          checkTokenList,
	"sampling_params": checkSamplingParams,
	"stream":          rules["stream"],
	"stream_options":  streamOptions,
	"content_parts":   optional(checkContentParts),
	"features":        refuse("engines do not load tensors that clients send, nor media that only a hash names; send content_parts"),
	"output_mode":     optional(setOutputMode),
	"priority":        rules["priority"],

	"kv_transfer_params": nil,
	"ec_transfer_params": nil,

	"n":                  setAnswers,
	"max_tokens":         atLeastOneToken,
	"min_tokens":         rules["min_tokens"],
	"seed":               rules["seed"],
	"logprobs":           logprobs,
	"prompt_logprobs":    rules["prompt_logprobs"], // a stream has no place for them (checkTokensKeys)
	"stop":               rules["stop"],
	"bad_words":          rules["bad_words"],
	"stop_token_ids":     rules["stop_token_ids"],
	"allowed_token_ids":  rules["allowed_token_ids"],
	"logit_bias":         logitBias,
	"min_p":              rules["min_p"],
	"presence_penalty":   rules["presence_penalty"],
	"frequency_penalty":  rules["frequency_penalty"],
	"repetition_penalty": rules["repetition_penalty"],
	"ignore_eos":         rules["ignore_eos"],

	// Engines refuse these scores in a stream, which has no place for them (vLLM 0.32.0,
	// serve_tokens).
	"prompt_logprob_token_ids": optional(func(p *parser, _ string, _ json.RawMessage) *Error {
		p.promptLogprobs, p.promptLogprobsMayStream = true, false
		return nil
	}),
	"trace_decode_token_ids": tokenIDs(math.MaxInt32, nil),
}

func checkTokenList(p *parser, key string, v json.RawMessage) *Error {
	if !isArray(v) {
		return wrongValue(key, v, isArray, "a list of token ids")
	}
	n, refusal := p.countTokens(key, v)
	if refusal != nil {
		return refusal
	}
	if n == 0 {
		return badRequest(CodeInvalidValue, key, "%q is empty; send at least one token id", key)
	}
	p.hasPrompt = true
	p.req.PromptBytes += len(v)
	p.req.PromptTokens = n
	return nil
}

// Each member of sampling_params has a rule of its own.
func checkSamplingParams(_ *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	seenKeys := map[string]bool{}
	for inner := range rawjson.Members(v) {
		if seenKeys[inner] { // engines would take the last value, other parsers the first
			return badRequest(CodeDuplicateKey, key+"."+inner, "the key %q appears more than once; send it once", key+"."+inner)
		}
		seenKeys[inner] = true
	}
	return nil
}

// Each part has its URL beside its type.
func checkContentParts(p *parser, key string, v json.RawMessage) *Error {
	if !isArray(v) {
		return wrongValue(key, v, isArray, "a list of parts")
	}
	p.req.PromptBytes += len(v)
	_, refusal := eachObject(key, v, "a part", func(path string, part json.RawMessage) *Error {
		// As in checkPart, no client may name another client's medium.
		rawjson.Blank(part, func(key string) bool { return key == "uuid" })
		for field, url := range rawjson.Members(part) {
			if field == "url" && !isNull(url) {
				if refusal := p.checkMedium(field, url); refusal != nil {
					return refusal.prefixParam(path + ".")
				}
			}
		}
		return nil
	})
	return refusal
}

// In the mode derender (vLLM 0.33.0), engines parse the answer once all of it is generated, and
// never stream it. The engines check other modes.
func setOutputMode(p *parser, key string, v json.RawMessage) *Error {
	if !isString(v) {
		return wrongValue(key, v, isString, "tokens, text or derender")
	}
	p.wantsDerender = rawjson.Unquote(v) == "derender"
	return nil
}

func (p *parser) checkTokensKeys() *Error {
	if v, ok := p.req.Body.Get("sampling_params"); !ok || isNull(v) {
		return badRequest(CodeMissing, "sampling_params", "the request has no \"sampling_params\"; send an object, which may be empty")
	}
	if HasMedia(&p.req.Body, mooncake.Tokens) {
		p.req.PromptTokens = 0 // engines replace each medium by more tokens
	}
	if p.req.Stream && p.promptLogprobs {
		// Engines refuse prompt_logprob_token_ids in a stream, and would compute prompt_logprobs for
		// nothing.
		if scores, ok := p.req.Body.Get("prompt_logprob_token_ids"); ok && !isNull(scores) {
			return badRequest(CodeInvalidValue, "prompt_logprob_token_ids",
				"\"prompt_logprob_token_ids\" is not available in a stream; send \"stream\": false")
		}
		p.req.Body.Set("prompt_logprobs", []byte("null"))
		p.promptLogprobs = false
	}
	if p.wantsDerender && p.req.Stream {
		// The decode engine would refuse it, after a whole prefill (vLLM 0.33.0, serve_tokens).
		return badRequest(CodeInvalidValue, "output_mode", "\"output_mode\" \"derender\" cannot be streamed; send \"stream\": false")
	}
	return nil
}

// NameTokens returns the request_id of an answer, by which clients abort requests. header is the
// client's X-Request-Id, and id evenkeel's. The order is vLLM's (0.32.0, _base_request_id in
// entrypoints/serve/engine/serving.py).
func NameTokens(body *mooncake.Body, header, id string) []byte {
	requestID, _ := body.Get("request_id")
	switch {
	case header != "":
		id = header
	case isRequestName(requestID):
		id = rawjson.Unquote(requestID)
	}
	return []byte("generate-tokens-" + id)
}

// isRequestName is false for nil, the value of an absent key.
func isRequestName(v json.RawMessage) bool {
	return len(v) > len(`""`) && len(v) <= maxNameBytes && isString(v)
}

// maxNameBytes is with the quotes. A longer name is replaced by evenkeel's own, but refused in a
// list.
const maxNameBytes = 256

// AbortTokensPath is where a client ends requests to /inference/v1/generate by their names.
const AbortTokensPath = "/inference/v1/abort_requests"

// maxAborts bounds the memory, in which each name takes several times its bytes in the body.
const maxAborts = 1 << 16

// parseAbortNames refuses the same bodies as vLLM, but in OpenAI's shape (0.32.0, abort_requests in
// entrypoints/scale_out/token_in_token_out/api_router.py).
func parseAbortNames(body *mooncake.Body) (names map[string]bool, refusal *Error) {
	list, ok := body.Get("request_ids")
	if !ok || isNull(list) {
		return nil, badRequest(CodeMissing, "request_ids", "the request has no \"request_ids\"")
	}
	if !isArray(list) {
		return nil, wrongValue("request_ids", list, isArray, "a list of names of requests")
	}
	names, n := map[string]bool{}, 0
	for name := range rawjson.Elements(list) {
		if n == maxAborts {
			return nil, badRequest(CodeInvalidValue, "request_ids",
				"\"request_ids\" has more than %d names; send the rest in another request", maxAborts)
		}
		if !isString(name) {
			return nil, wrongValue(fmt.Sprintf("request_ids[%d]", n), name, isString, "the name of a request")
		}
		names[rawjson.Unquote(name)] = true
		n++
	}
	return names, nil
}

// OutputMode is the request's own, as a JSON string, or "tokens".
func OutputMode(body *mooncake.Body) json.RawMessage {
	if mode, ok := body.Get("output_mode"); ok && isString(mode) {
		return mode
	}
	return json.RawMessage(`"tokens"`)
}

// Keys of some endpoints are translated to those of completions before they are checked:
// withClientKey translates back in the error, which may be nil.
func (e *Error) withClientKey(body *mooncake.Body, key string) *Error {
	if name := body.Name(key); e != nil && name != key {
		e.Param = strings.Replace(e.Param, key, name, 1)
		e.Message = strings.NewReplacer(`"`+key+`"`, `"`+name+`"`, `"`+key+`[`, `"`+name+`[`).Replace(e.Message)
	}
	return e
}

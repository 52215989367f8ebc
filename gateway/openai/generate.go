package openai

import (
	"encoding/json"
	"math"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// generateRules are the rules for /generate (SGLang 0.5.23, GenerateReqInput in managers/io_struct.py). Package mooncake translates the
// keys of the body to those of completions, such as max_new_tokens to max_tokens. CheckForSGLang also refuses the keys of sglangRefused.
var generateRules = map[string]rule{
	"model":            setModel,
	"prompt":           optional(checkPromptOrList),
	"sampling_params":  optional(checkSamplingParams),
	"stream":           rules["stream"],
	"priority":         rules["priority"],
	"return_logprob":   flag(func(p *parser, on bool) { p.logprobs = on }),
	"top_logprobs_num": integers(0, math.MaxInt32, func(p *parser, n int) { p.req.TopLogprobs = n }),
	"logprob_start_len": integers(-1, math.MaxInt32, func(p *parser, n int) {
		p.promptLogprobs, p.promptLogprobsMayStream = n >= 0, true
	}),
	"token_ids_logprob":    tokenIDs(math.MaxInt32, nil),
	"rid":                  optional(checkRequestNames),
	"return_hidden_states": refuse("an answer that goes on with another engine has none of those before", "false"),

	"image_data": refuse("media are not supported here; send a chat"),
	"video_data": refuse("media are not supported here; send a chat"),
	"audio_data": refuse("media are not supported here; send a chat"),

	"n":                  setAnswers,
	"max_tokens":         atLeastOneToken,
	"min_tokens":         rules["min_tokens"],
	"seed":               rules["seed"],
	"stop":               rules["stop"],
	"stop_token_ids":     rules["stop_token_ids"],
	"stop_regex":         refuse(sglangRefused["stop_regex"]),
	"custom_params":      refuse(sglangRefused["custom_params"]),
	"logit_bias":         logitBias,
	"min_p":              rules["min_p"],
	"presence_penalty":   rules["presence_penalty"],
	"frequency_penalty":  rules["frequency_penalty"],
	"repetition_penalty": rules["repetition_penalty"],
	"ignore_eos":         rules["ignore_eos"],
	"beam_width":         integers(1, 1, nil),
}

// defaultNewTokens is the limit of an answer of /generate if the request sets none, in tokens (SGLang 0.5.23, sampling/sampling_params.py).
const defaultNewTokens = 128

// checkPromptOrList checks a prompt, or a list of prompts. The answer to a list is a list, too, even if the list has only one prompt.
func checkPromptOrList(p *parser, key string, v json.RawMessage) *Error {
	if refusal := p.checkPrompt(key, v); refusal != nil {
		return refusal
	}
	if !isArray(v) {
		return nil
	}
	list := rawjson.ArrayAt(v, 0)
	list.Next() // checkPrompt has refused an empty list, so there is a first element
	first := v[list.Val:rawjson.ValueEnd(v, list.Val)]
	p.req.AnswerIsList = !isNumber(first) // a list of numbers is one prompt, in token ids
	if p.req.AnswerIsList && p.req.Prompts == nil {
		p.req.Prompts = []json.RawMessage{first} // checkPrompt sets Prompts only if there are several
	}
	return nil
}

// checkRequestNames checks rid, the names that the client gives: one for the request, or a different one for each prompt of a list (SGLang
// 0.5.23, _normalize_rid and _validate_rid_uniqueness in managers/io_struct.py).
func checkRequestNames(p *parser, key string, v json.RawMessage) *Error {
	if isString(v) { // NameGenerate reads a single name from the body; if the name is empty or too long, it takes the request's own id
		return nil
	}
	if !isArray(v) {
		return wrongValue(key, v, isString, "the name of the request, or a list with a name for each prompt")
	}
	p.req.Names = [][]byte{}   // not nil, so that checkGenerateKeys refuses an empty list
	names := map[string]bool{} // a map, so that a look-up among very many names is fast
	for value := range rawjson.Elements(v) {
		// Each name belongs to one answer or more, so the limit of answers bounds the names, too.
		if maxNames := limitOrInfinite(p.limits.Answers); len(names) == maxNames {
			return badRequest(CodeInvalidValue, key, "%q has more than %d names", key, maxNames)
		}
		if !isRequestName(value) {
			return badRequest(CodeInvalidType, key, "%q must have names of 1 to %d bytes", key, maxNameBytes-len(`""`))
		}
		name := rawjson.Unquote(value)
		if names[name] {
			return badRequest(CodeInvalidValue, key, "%q has a name twice", key)
		}
		names[name] = true
		p.req.Names = append(p.req.Names, []byte(name))
	}
	return nil
}

// checkGenerateKeys checks conditions between several keys of a request to /generate, and sets the fields of the request that follow from
// them.
func (p *parser) checkGenerateKeys() *Error {
	req := p.req
	p.promptLogprobs = p.promptLogprobs && p.logprobs // logprob_start_len has no meaning without return_logprob
	promptsAreList := req.AnswerIsList                // set by checkPromptOrList; several answers to one prompt do not count here
	onePerPrompt := promptsAreList && len(req.Names) == len(req.Prompts)
	if req.Names != nil && !onePerPrompt {
		return badRequest(CodeInvalidValue, "rid", "\"rid\" is a list of %d names; it must have one for each prompt of a list",
			len(req.Names))
	}
	if req.N > 1 { // SGLang itself names the answers in that case (0.5.23, _handle_batch_request in managers/tokenizer_manager.py)
		req.Names = nil
	}
	req.AnswerIsList = promptsAreList || req.N > 1 // several answers come as a list, too
	if req.Body.Count("max_tokens") == 0 {
		req.Limit = defaultNewTokens
	}
	return nil
}

// NameGenerate returns the meta_info.id of an answer to /generate: the client's rid if it can name a request, or else id, the request's id
// in evenkeel.
func NameGenerate(body *mooncake.Body, id string) []byte {
	if rid, _ := body.Get("rid"); isRequestName(rid) {
		id = rawjson.Unquote(rid)
	}
	return []byte(id)
}

// AbortGeneratePath is the path, of evenkeel and of engines, at which a client ends requests to /generate by their rid. A body without a
// rid ends none (SGLang 0.5.23, abort_request in managers/tokenizer_manager.py).
const AbortGeneratePath = "/abort_request"

// ParseAbort reads a body that asks to end requests. matches says whether the request with the given name is to end. At AbortTokensPath,
// the body has a list of names. At AbortGeneratePath, it has the rid of one request, or asks to end all requests of the caller.
func ParseAbort(path string, raw []byte) (matches func(name string) bool, refusal *Error) {
	body, err := mooncake.ScanBody(raw, 0)
	if err != nil {
		return nil, badRequest(CodeInvalidJSON, "", "the request body is not acceptable: %v", err)
	}
	if path == AbortTokensPath {
		names, refusal := parseAbortNames(&body)
		return func(name string) bool { return names[name] }, refusal
	}
	abortAll, ok := body.Get("abort_all")
	if ok && !isNull(abortAll) && !isBoolean(abortAll) {
		return nil, wrongValue("abort_all", abortAll, isBoolean, "true or false")
	}
	rid, ok := body.Get("rid")
	if ok && !isNull(rid) && !isString(rid) {
		return nil, wrongValue("rid", rid, isString, "the rid of a request")
	}
	if string(abortAll) == "true" {
		return func(string) bool { return true }, nil
	}
	name := "" // empty: the body has no rid, so no request is to end
	if ok && isString(rid) {
		name = rawjson.Unquote(rid)
	}
	return func(requestName string) bool { return name != "" && requestName == name }, nil
}

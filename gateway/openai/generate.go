package openai

import (
	"encoding/json"
	"math"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// generateRules are for /generate (SGLang 0.5.23, GenerateReqInput in managers/io_struct.py), by
// the keys of completions. CheckForSGLang also refuses those of sglangRefused.
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

// defaultNewTokens is the limit of an answer without one, in tokens (SGLang 0.5.23,
// sampling/sampling_params.py).
const defaultNewTokens = 128

// The answer to a list of prompts is a list, even if the list has only one.
func checkPromptOrList(p *parser, key string, v json.RawMessage) *Error {
	if refusal := p.checkPrompt(key, v); refusal != nil {
		return refusal
	}
	if !isArray(v) {
		return nil
	}
	list := rawjson.ArrayAt(v, 0)
	list.Next() // checkPrompt has refused an empty list
	first := v[list.Val:rawjson.ValueEnd(v, list.Val)]
	p.req.AnswerIsList = !isNumber(first) // a list of numbers is one prompt, in token ids
	if p.req.AnswerIsList && p.req.Prompts == nil {
		p.req.Prompts = []json.RawMessage{first} // checkPrompt sets Prompts only if there are several
	}
	return nil
}

// rid has one name for the request, or a different one for each prompt of a list (SGLang 0.5.23,
// _normalize_rid and _validate_rid_uniqueness in managers/io_struct.py).
func checkRequestNames(p *parser, key string, v json.RawMessage) *Error {
	if isString(v) { // NameGenerate reads it, and replaces one that is empty or too long
		return nil
	}
	if !isArray(v) {
		return wrongValue(key, v, isString, "the name of the request, or a list with a name for each prompt")
	}
	p.req.Names = [][]byte{} // not nil, so that checkGenerateKeys refuses an empty list
	names := map[string]bool{}
	for value := range rawjson.Elements(v) {
		// Each name belongs to at least one answer.
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

func (p *parser) checkGenerateKeys() *Error {
	req := p.req
	// logprob_start_len has no meaning without return_logprob.
	p.promptLogprobs = p.promptLogprobs && p.logprobs
	// checkPromptOrList has set it; several answers to one prompt do not count here.
	promptsAreList := req.AnswerIsList
	onePerPrompt := promptsAreList && len(req.Names) == len(req.Prompts)
	if req.Names != nil && !onePerPrompt {
		return badRequest(CodeInvalidValue, "rid", "\"rid\" is a list of %d names; it must have one for each prompt of a list",
			len(req.Names))
	}
	if req.N > 1 {
		// SGLang then names the answers itself (0.5.23, _handle_batch_request in
		// managers/tokenizer_manager.py).
		req.Names = nil
	}
	req.AnswerIsList = promptsAreList || req.N > 1
	if req.Body.Count("max_tokens") == 0 {
		req.Limit = defaultNewTokens
	}
	return nil
}

// NameGenerate returns the meta_info.id of an answer: the client's rid if it can name a request, or
// else evenkeel's id.
func NameGenerate(body *mooncake.Body, id string) []byte {
	if rid, _ := body.Get("rid"); isRequestName(rid) {
		id = rawjson.Unquote(rid)
	}
	return []byte(id)
}

// AbortGeneratePath is where a client ends requests to /generate by their rid. A body without a rid
// ends none (SGLang 0.5.23, abort_request in managers/tokenizer_manager.py).
const AbortGeneratePath = "/abort_request"

// ParseAbort returns which requests are to end, by their names: at AbortTokensPath those of a list,
// at AbortGeneratePath one rid, or all requests of the caller.
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
	name := "" // no request is to end
	if ok && isString(rid) {
		name = rawjson.Unquote(rid)
	}
	return func(requestName string) bool { return name != "" && requestName == name }, nil
}

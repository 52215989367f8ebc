package openai

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// A rule checks the value v of a key, and stores in p what later steps need.
type rule func(p *parser, key string, v json.RawMessage) *Error

// rules are for the keys of chat and completions that evenkeel sets or drops, or that only the
// decode engine would refuse, after a whole prefill. A nil rule only forbids to repeat the key.
// Reserved keys without a rule are dropped. All other keys are left to the engines.
var rules = map[string]rule{
	"model":    setModel,
	"messages": onlyAt(mooncake.Chat, (*parser).checkMessages),
	"prompt":   onlyAt(mooncake.Completions, (*parser).checkPrompt),

	"stream":           flag(func(p *parser, on bool) { p.req.Stream = on }),
	"stream_options":   streamOptions,
	"return_token_ids": flag(func(p *parser, on bool) { p.req.ReturnTokenIDs = on }),

	"n":                     setAnswers,
	"max_tokens":            setMaxTokens,
	"max_completion_tokens": integers(1, math.MaxInt32, func(p *parser, n int) { p.maxCompletionTokens = n }),
	"min_tokens":            integers(0, math.MaxInt32, func(p *parser, n int) { p.minTokens = n }),
	"seed":                  integers(math.MinInt64, math.MaxInt64, nil),
	"logprobs":              logprobs,
	"top_logprobs":          topLogprobs,

	"stop": stopStrings(true),
	// Engines limit the tokens of bad words (vLLM's VLLM_MAX_NUM_BAD_WORDS).
	"bad_words":          stringList(nil, false),
	"stop_token_ids":     tokenIDs(128, func(p *parser, n int) { p.hasStopTokenIDs = n > 0 }),
	"allowed_token_ids":  tokenIDs(math.MaxInt32, nil),
	"logit_bias":         logitBias,
	"min_p":              numbers(0, 1),
	"presence_penalty":   numbers(-2, 2),
	"frequency_penalty":  numbers(-2, 2),
	"repetition_penalty": numbers(math.SmallestNonzeroFloat64, math.MaxFloat64),
	"echo":               flag(func(p *parser, on bool) { p.echo = on }),
	"ignore_eos":         flag(nil),
	"best_of":            integers(1, 1, nil),
	// With another value, the request would overtake others in the engine's queue.
	"priority":              integers(0, 0, nil),
	"use_beam_search":       flag(func(p *parser, on bool) { p.wantsBeams = on }),
	"prompt_logprobs":       promptLogprobs,
	"prompt_embeds":         refuse("prompts are text or token ids here"),
	"logits_processors":     refuse("engines do not load code that clients name"),
	"chat_template":         chatTemplate,
	"chat_template_kwargs":  chatTemplateArgs,
	"structured_outputs":    nil, // not for the prefill engine; the decode engine checks it
	"kv_transfer_params":    nil,
	"ec_transfer_params":    nil,
	"vllm_xargs":            nil,
	"thinking_token_budget": nil,
	"repetition_detection":  nil,
}

// With echo, a completion may ask for 0 tokens, to get only the prompt.
func setMaxTokens(p *parser, key string, v json.RawMessage) *Error {
	echo, _ := p.req.Body.Get("echo")
	_, isZero := parseInteger(v, 0, 0)
	if isZero && p.req.Endpoint == mooncake.Completions && string(echo) == "true" {
		p.req.Body.Set(key, []byte("0")) // it may be 0.0 or 0e0
		p.maxTokens = 1                  // computed, but not sent
		return nil
	}
	return atLeastOneToken(p, key, v)
}

var atLeastOneToken = integers(1, math.MaxInt32, func(p *parser, n int) { p.maxTokens = n })

// optional treats null as an absent key, as engines do.
func optional(r rule) rule {
	return func(p *parser, key string, v json.RawMessage) *Error {
		if isNull(v) {
			return nil
		}
		return r(p, key, v)
	}
}

// At other endpoints, the key has no meaning.
func onlyAt(endpoint mooncake.Endpoint, r rule) rule {
	return func(p *parser, key string, v json.RawMessage) *Error {
		if p.req.Endpoint != endpoint || isNull(v) {
			return nil
		}
		return r(p, key, v)
	}
}

// refuse makes a rule for an unsupported key. The JSON values in unless turn the feature off, and
// are allowed.
func refuse(reason string, unless ...string) rule {
	return optional(func(_ *parser, key string, v json.RawMessage) *Error {
		for _, allowed := range unless {
			if string(v) == allowed {
				return nil
			}
		}
		return badRequest(CodeUnsupported, key, "%q is not supported: %s", key, reason)
	})
}

// store may be nil.
func flag(store func(*parser, bool)) rule {
	return optional(func(p *parser, key string, v json.RawMessage) *Error {
		on, ok := parseBoolean(v)
		if !ok {
			return wrongValue(key, v, isBoolean, "true or false")
		}
		if store != nil {
			store(p, on)
		}
		return nil
	})
}

// store may be nil.
func integers(lo, hi int64, store func(*parser, int)) rule {
	return optional(func(p *parser, key string, v json.RawMessage) *Error {
		n, ok := parseInteger(v, lo, hi)
		if !ok {
			return wrongValue(key, v, isInteger, describeRange(lo, hi))
		}
		if !hasOnlyDigits(v) { // not every engine takes 1.0 or 1e0 for an integer
			p.req.Body.Set(key, strconv.AppendInt(nil, n, 10))
		}
		if store != nil {
			store(p, int(n))
		}
		return nil
	})
}

// math.MinInt64 as lo and math.MaxInt32 as hi stand for no bound. If lo equals hi, only this value
// is allowed, the default of the key.
func describeRange(lo, hi int64) string {
	switch {
	case lo == hi:
		return fmt.Sprintf("%d or absent", lo)
	case lo == math.MinInt64:
		return "an integer of 64 bits"
	case hi == math.MaxInt32:
		return fmt.Sprintf("an integer of %d or more", lo)
	}
	return fmt.Sprintf("an integer from %d to %d", lo, hi)
}

// math.MaxFloat64 as hi stands for no upper bound; lo then is the smallest number above 0.
func numbers(lo, hi float64) rule {
	want := fmt.Sprintf("a number from %g to %g", lo, hi)
	if hi == math.MaxFloat64 {
		want = "a number above 0"
	}
	return optional(func(_ *parser, key string, v json.RawMessage) *Error {
		if !isNumberIn(v, lo, hi) {
			return wrongValue(key, v, isNumber, want)
		}
		return nil
	})
}

// limitOf returns how many strings the list may have; nil or 0: any number. With orString, the
// value may also be one string.
func stringList(limitOf func(Limits) int, orString bool) rule {
	want := "a list of strings that are not empty"
	if orString {
		want = "a string or " + want
	}
	return optional(func(p *parser, key string, v json.RawMessage) *Error {
		if orString && isString(v) {
			if len(v) == len(`""`) {
				return wrongValue(key, v, isString, want)
			}
			return nil
		}
		if !isArray(v) {
			return wrongValue(key, v, isArray, want)
		}
		n := 0
		for s := range rawjson.Elements(v) {
			n++
			if !isString(s) || len(s) == len(`""`) {
				return wrongValue(fmt.Sprintf("%s[%d]", key, n-1), s, isString, "a string that is not empty")
			}
		}
		if limitOf != nil && n > limitOrInfinite(limitOf(p.limits)) {
			return badRequest(CodeInvalidValue, key, "%q has %d entries, more than %d", key, n, limitOf(p.limits))
		}
		return nil
	})
}

// A prefill request has no stop strings, so only the decode engine would refuse too many of them,
// after a whole prefill.
func stopStrings(orString bool) rule {
	return stringList(func(l Limits) int { return l.StopStrings }, orString)
}

// store may be nil.
func tokenIDs(maxIDs int, store func(p *parser, n int)) rule {
	return optional(func(p *parser, key string, v json.RawMessage) *Error {
		if !isArray(v) {
			return wrongValue(key, v, isArray, "a list of token ids")
		}
		n, refusal := p.countTokens(key, v)
		if refusal != nil {
			return refusal
		}
		if n > maxIDs {
			return badRequest(CodeInvalidValue, key, "%q has %d entries, more than %d", key, n, maxIDs)
		}
		if store != nil {
			store(p, n)
		}
		return nil
	})
}

// countTokens also rewrites ids such as 1.0 in the body.
func (p *parser) countTokens(key string, list json.RawMessage) (n int, refusal *Error) {
	for id := range rawjson.Elements(list) {
		if !p.normalizeToken(id) {
			return 0, wrongValue(fmt.Sprintf("%s[%d]", key, n), id, isInteger, fmt.Sprintf("a token id from 0 to %d", p.maxToken()))
		}
		n++
	}
	return n, nil
}

// Not every engine accepts 1.0 as an integer. An id that is shorter than its digits, such as 1e4,
// is refused.
func (p *parser) normalizeToken(id json.RawMessage) (ok bool) {
	token, isToken := parseInteger(id, 0, p.maxToken())
	return isToken && overwriteWithDigits(id, token)
}

func (p *parser) isToken(id json.RawMessage) bool {
	_, ok := parseInteger(id, 0, p.maxToken())
	return ok
}

// maxToken is the last token of the vocabulary, or math.MaxInt32 if its size is not known.
func (p *parser) maxToken() int64 {
	if p.limits.VocabSize > 0 {
		return int64(p.limits.VocabSize) - 1
	}
	return math.MaxInt32
}

// maxModelBytes includes the quotes. Errors and the request log repeat a model's name.
const maxModelBytes = 1024

// null is the same as an absent key.
func setModel(p *parser, key string, v json.RawMessage) *Error {
	if isNull(v) {
		return nil
	}
	if !isString(v) {
		return wrongValue(key, v, isString, "the name of a model")
	}
	if len(v) > maxModelBytes {
		return badRequest(CodeInvalidValue, key, "%q has more than %d bytes", key, maxModelBytes)
	}
	p.req.Model = rawjson.Unquote(v)
	return nil
}

var streamOptions = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	p.hasStreamOptions = true
	seen := map[string]bool{}
	for inner, v := range rawjson.Members(v) {
		var field *bool
		switch inner {
		case "include_usage":
			field = &p.req.IncludeUsage
		case "continuous_usage_stats":
			field = &p.req.ContinuousUsage
		default: // only for the engines
			continue
		}
		param := key + "." + inner
		if seen[inner] {
			return badRequest(CodeDuplicateKey, param, "the key %q appears more than once; send it once", param)
		}
		seen[inner] = true
		if isNull(v) {
			continue
		}
		on, ok := parseBoolean(v)
		if !ok {
			return wrongValue(param, v, isBoolean, "true or false")
		}
		*field = on
	}
	return nil
})

func setAnswers(p *parser, key string, v json.RawMessage) *Error {
	return integers(1, int64(limitOrInfinite(p.limits.AnswersPerPrompt)), func(p *parser, n int) { p.req.N = n })(p, key, v)
}

// Engines limit this themselves (vLLM's --max-logprobs).
var topLogprobs = integers(AllTokens, math.MaxInt32, func(p *parser, n int) { p.req.TopLogprobs = n })

// The value 0 asks only for the probabilities of the tokens themselves, which fit into a stream.
var promptLogprobs = integers(-1, math.MaxInt32, func(p *parser, n int) { p.promptLogprobs, p.promptLogprobsMayStream = true, n == 0 })

// In completions, logprobs is the number of likeliest tokens, which a chat has in top_logprobs.
var logprobs = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if p.req.Endpoint == mooncake.Chat {
		return flag(func(p *parser, on bool) { p.logprobs = on })(p, key, v)
	}
	p.logprobs = true
	return topLogprobs(p, key, v)
})

var logitBias = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	n := 0
	for id, bias := range rawjson.Members(v) {
		if !isDigits(id) || !p.isToken(json.RawMessage(id)) {
			return badRequest(CodeInvalidValue, key, "%q has the key %q, which is not a token id of the model", key, shorten(id))
		}
		if !isNumberIn(bias, -100, 100) {
			return wrongValue(key+"."+id, bias, isNumber, "a number from -100 to 100")
		}
		n++
	}
	if n > 1024 {
		return badRequest(CodeInvalidValue, key, "%q has %d entries, more than 1024", key, n)
	}
	return nil
})

// In engines before vLLM 0.11, an argument chat_template replaces the template itself
// (CVE-2025-61620).
var chatTemplateArgs = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	for inner, arg := range rawjson.Members(v) {
		if inner == "chat_template" {
			if refusal := chatTemplate(p, key+"."+inner, arg); refusal != nil {
				return refusal
			}
		}
	}
	return nil
})

var chatTemplate = optional(func(p *parser, key string, _ json.RawMessage) *Error {
	if p.limits.ChatTemplate {
		return nil
	}
	return badRequest(CodeUnsupported, key, "%q is not allowed here; the model's own template is used", key)
})

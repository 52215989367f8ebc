package openai

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// A rule checks the value v of a key, and stores in p what later steps need. It returns an error if the value is refused, else nil.
type rule func(p *parser, key string, v json.RawMessage) *Error

// rules has the keys of chat and completions that evenkeel checks: keys that it sets or drops in a request to an engine, and keys that
// only the decode engine would refuse, after a whole prefill. A nil rule only forbids to repeat the key. Reserved keys without a rule are
// dropped, whatever their value. All other keys are left to the engines.
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

	"stop":                  stopStrings(true),
	"bad_words":             stringList(nil, false), // engines limit the tokens of bad words themselves (vLLM's VLLM_MAX_NUM_BAD_WORDS)
	"stop_token_ids":        tokenIDs(128, func(p *parser, n int) { p.hasStopTokenIDs = n > 0 }),
	"allowed_token_ids":     tokenIDs(math.MaxInt32, nil),
	"logit_bias":            logitBias,
	"min_p":                 numbers(0, 1),
	"presence_penalty":      numbers(-2, 2),
	"frequency_penalty":     numbers(-2, 2),
	"repetition_penalty":    numbers(math.SmallestNonzeroFloat64, math.MaxFloat64),
	"echo":                  flag(func(p *parser, on bool) { p.echo = on }),
	"ignore_eos":            flag(nil),
	"best_of":               integers(1, 1, nil),
	"priority":              integers(0, 0, nil), // with another value, the request would overtake others in the engine's queue
	"use_beam_search":       flag(func(p *parser, on bool) { p.wantsBeams = on }),
	"prompt_logprobs":       promptLogprobs,
	"prompt_embeds":         refuse("prompts are text or token ids here"),
	"logits_processors":     refuse("engines do not load code that clients name"),
	"chat_template":         chatTemplate,
	"chat_template_kwargs":  chatTemplateArgs,
	"structured_outputs":    nil, // dropped from the request to the prefill engine; the decode engine checks its value
	"kv_transfer_params":    nil,
	"ec_transfer_params":    nil,
	"vllm_xargs":            nil,
	"thinking_token_budget": nil,
	"repetition_detection":  nil,
}

// setMaxTokens stores the limit of the answer. With echo, a completion may ask for 0 tokens, to get only the prompt.
func setMaxTokens(p *parser, key string, v json.RawMessage) *Error {
	echo, _ := p.req.Body.Get("echo")
	_, isZero := parseInteger(v, 0, 0)
	if isZero && p.req.Endpoint == mooncake.Completions && string(echo) == "true" {
		p.req.Body.Set(key, []byte("0")) // the client may have written 0.0 or 0e0
		p.maxTokens = 1                  // an engine still computes one token, but does not send it
		return nil
	}
	return atLeastOneToken(p, key, v)
}

var atLeastOneToken = integers(1, math.MaxInt32, func(p *parser, n int) { p.maxTokens = n })

// optional makes a rule that treats null as an absent key, as engines do.
func optional(r rule) rule {
	return func(p *parser, key string, v json.RawMessage) *Error {
		if isNull(v) {
			return nil
		}
		return r(p, key, v)
	}
}

// onlyAt makes a rule for one endpoint. At other endpoints, the key has no meaning.
func onlyAt(endpoint mooncake.Endpoint, r rule) rule {
	return func(p *parser, key string, v json.RawMessage) *Error {
		if p.req.Endpoint != endpoint || isNull(v) {
			return nil
		}
		return r(p, key, v)
	}
}

// refuse makes a rule for an unsupported key. The error for the client has the reason. The JSON values in unless are allowed, because they
// turn the feature off.
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

// flag makes a rule for a key that is true or false. store gets the value; nil: the value is not stored.
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

// integers makes a rule for an integer from lo to hi. store gets the value; nil: the value is not stored.
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

// describeRange describes an integer from lo to hi, for error messages. If lo equals hi, only this value is allowed, which is the default
// of the key. math.MinInt64 as lo allows any integer, and math.MaxInt32 as hi stands for no upper bound.
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

// numbers makes a rule for a number from lo to hi. math.MaxFloat64 as hi stands for no upper bound; lo then is the smallest number above 0.
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

// stringList makes a rule for a list of strings. limitOf returns how many strings the list may have; nil or 0: any number. If orString is
// true, the value may also be one string.
func stringList(limitOf func(Limits) int, orString bool) rule {
	want := "a list of strings that are not empty"
	if orString {
		want = "a string or " + want
	}
	return optional(func(p *parser, key string, v json.RawMessage) *Error {
		if orString && isString(v) {
			if len(v) == len(`""`) { // the string is empty
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

// stopStrings makes the rule for stop strings. A prefill request has none, so without the rule only the decode engine would refuse too many
// of them, after a whole prefill. If orString is true, the value may also be one string.
func stopStrings(orString bool) rule {
	return stringList(func(l Limits) int { return l.StopStrings }, orString)
}

// tokenIDs makes a rule for a list of at most maxIDs token ids. store gets the number of ids; nil: the number is not stored.
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

// countTokens checks that each element of a list is a token id of the vocabulary, and returns how many there are. It rewrites ids such as
// 1.0 in the body.
func (p *parser) countTokens(key string, list json.RawMessage) (n int, refusal *Error) {
	for id := range rawjson.Elements(list) {
		if !p.normalizeToken(id) {
			return 0, wrongValue(fmt.Sprintf("%s[%d]", key, n), id, isInteger, fmt.Sprintf("a token id from 0 to %d", p.maxToken()))
		}
		n++
	}
	return n, nil
}

// normalizeToken rewrites a token id in the body with digits only, because not every engine accepts 1.0 as an integer. ok is false, and
// nothing is rewritten, if the value is no token id, or is shorter than its digits, such as 1e4.
func (p *parser) normalizeToken(id json.RawMessage) (ok bool) {
	token, isToken := parseInteger(id, 0, p.maxToken())
	return isToken && overwriteWithDigits(id, token)
}

// isToken says whether a value is a token id of the vocabulary.
func (p *parser) isToken(id json.RawMessage) bool {
	_, ok := parseInteger(id, 0, p.maxToken())
	return ok
}

// maxToken returns the largest token id that is accepted: the last of the vocabulary, or math.MaxInt32 if its size is not known.
func (p *parser) maxToken() int64 {
	if p.limits.VocabSize > 0 {
		return int64(p.limits.VocabSize) - 1
	}
	return math.MaxInt32
}

// maxModelBytes bounds a model's name in bytes, with its quotes, because errors and the request log repeat it.
const maxModelBytes = 1024

// setModel stores the model that the request names. null is the same as an absent key.
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

// streamOptions checks stream_options, and stores the two values that evenkeel uses. null is the same as an absent key.
var streamOptions = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	p.hasStreamOptions = true
	seen := map[string]bool{} // those of the two keys below that have come already
	for inner, v := range rawjson.Members(v) {
		var field *bool
		switch inner {
		case "include_usage":
			field = &p.req.IncludeUsage
		case "continuous_usage_stats":
			field = &p.req.ContinuousUsage
		default: // only the engines use other keys of stream_options
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

// setAnswers stores how many answers each prompt gets: from 1 to Limits.AnswersPerPrompt.
func setAnswers(p *parser, key string, v json.RawMessage) *Error {
	return integers(1, int64(limitOrInfinite(p.limits.AnswersPerPrompt)), func(p *parser, n int) { p.req.N = n })(p, key, v)
}

// topLogprobs stores for how many tokens, at each position, the client wants probabilities. Engines limit this themselves (vLLM's
// --max-logprobs).
var topLogprobs = integers(AllTokens, math.MaxInt32, func(p *parser, n int) { p.req.TopLogprobs = n })

// promptLogprobs asks for probabilities of the prompt's tokens. 0 asks only for those of the tokens themselves, which fit into a stream.
var promptLogprobs = integers(-1, math.MaxInt32, func(p *parser, n int) { p.promptLogprobs, p.promptLogprobsMayStream = true, n == 0 })

// logprobs checks the key logprobs: true or false in a chat; in completions, the number of likeliest tokens, which a chat has in
// top_logprobs.
var logprobs = optional(func(p *parser, key string, v json.RawMessage) *Error {
	if p.req.Endpoint == mooncake.Chat {
		return flag(func(p *parser, on bool) { p.logprobs = on })(p, key, v)
	}
	p.logprobs = true
	return topLogprobs(p, key, v)
})

// logitBias checks logit_bias: at most 1024 token ids of the model, each with a number from -100 to 100.
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

// chatTemplateArgs checks chat_template_kwargs: in engines before vLLM 0.11, an argument chat_template
// replaces the template itself (CVE-2025-61620).
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

// chatTemplate refuses a client's own chat template, unless the operator allows it.
var chatTemplate = optional(func(p *parser, key string, _ json.RawMessage) *Error {
	if p.limits.ChatTemplate {
		return nil
	}
	return badRequest(CodeUnsupported, key, "%q is not allowed here; the model's own template is used", key)
})

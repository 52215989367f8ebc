package openai

import (
	"encoding/json"
	"fmt"
	"math"

	"evenkeel/internal/rawjson"
)

// Keys that need an engine to keep a response or a conversation are refused.
var responsesRules = map[string]rule{
	"model":        setModel,
	"input":        checkResponseInput,
	"instructions": optional(checkInstructions),
	"stream":       flag(func(p *parser, on bool) { p.req.Stream = on }),
	"tools":        optional(checkResponseTools),

	"store":                   refuse("no engine keeps responses here, because the next request may go to another; leave it out or send false", "false"),
	"background":              refuse("no engine keeps responses here, so they cannot be fetched later; wait for the answer", "false"),
	"previous_response_id":    refuse("no engine keeps responses here; send the whole conversation as \"input\""),
	"previous_input_messages": refuse("it has messages of another kind; send the whole conversation as \"input\""),
	"n":                       integers(1, 1, nil), // a response has one output
	"best_of":                 integers(1, 1, nil),
	"min_tokens":              rules["min_tokens"],
	"use_beam_search":         refuse("no engine has beam search for responses", "false"),
	"prompt_logprobs":         refuse("no engine tells them of a response"),
	"conversation":            refuse("no engine keeps conversations here; send the whole conversation as \"input\""),
	"prompt":                  refuse("no engine has prompt templates; send \"input\""),
	"truncation":              refuse("both engines would cut the prompt, each in its own way", `"disabled"`),

	"max_output_tokens":    integers(1, math.MaxInt32, func(p *parser, n int) { p.maxTokens = n }),
	"top_logprobs":         topLogprobs,
	"seed":                 integers(math.MinInt64, math.MaxInt64, nil),
	"stop":                 rules["stop"],
	"stop_token_ids":       rules["stop_token_ids"],
	"logit_bias":           logitBias,
	"min_p":                rules["min_p"],
	"presence_penalty":     rules["presence_penalty"],
	"frequency_penalty":    rules["frequency_penalty"],
	"repetition_penalty":   rules["repetition_penalty"],
	"ignore_eos":           rules["ignore_eos"],
	"priority":             rules["priority"],
	"prompt_embeds":        rules["prompt_embeds"],
	"logits_processors":    rules["logits_processors"],
	"chat_template":        chatTemplate,
	"chat_template_kwargs": chatTemplateArgs,
}

func checkResponseInput(p *parser, key string, v json.RawMessage) *Error {
	switch {
	case isString(v):
	case !isArray(v):
		return wrongValue(key, v, isArray, "a text or a list of items")
	default:
		n, refusal := eachObject(key, v, "an item of a conversation", func(path string, item json.RawMessage) *Error {
			for field, kind := range rawjson.Members(item) {
				if field == "type" && isString(kind) && rawjson.Unquote(kind) == "item_reference" {
					return badRequest(CodeUnsupported, path+".type",
						"an item_reference is not supported: no engine keeps items here; send the item itself")
				}
			}
			return p.checkMediaIn(path, item)
		})
		if refusal != nil {
			return refusal
		}
		if n == 0 {
			return badRequest(CodeInvalidValue, key, "%q is empty; send at least one item", key)
		}
	}
	p.hasPrompt = true
	p.req.PromptBytes += len(v)
	return nil
}

func checkInstructions(p *parser, key string, v json.RawMessage) *Error {
	if !isString(v) {
		return wrongValue(key, v, isString, "a text")
	}
	p.req.PromptBytes += len(v)
	return nil
}

// After a tool that an engine would run itself, it generates again, and would use the same hand-off
// a second time.
func checkResponseTools(_ *parser, key string, v json.RawMessage) *Error {
	if !isArray(v) {
		return wrongValue(key, v, isArray, "a list of tools")
	}
	_, refusal := eachObject(key, v, "a tool", func(path string, tool json.RawMessage) *Error {
		for field, kind := range rawjson.Members(tool) {
			if field != "type" { // a parser may take any of repeated keys
				continue
			}
			if !isString(kind) {
				return wrongValue(path+".type", kind, isString, "a string")
			}
			if name := rawjson.Unquote(kind); name != "function" && name != "custom" {
				return badRequest(CodeUnsupported, path+".type",
					"a tool of type %q is not supported: only tools of type function or custom, which the client runs", shorten(name))
			}
		}
		return nil
	})
	return refusal
}

// eachObject calls check for each element, which must be an object. path and want are for error
// messages.
func eachObject(key string, list json.RawMessage, want string, check func(path string, item json.RawMessage) *Error) (n int,
	refusal *Error) {
	for item := range rawjson.Elements(list) {
		at := fmt.Sprintf("%s[%d]", key, n)
		n++
		if !isObject(item) {
			return n, wrongValue(at, item, isObject, want)
		}
		if refusal := check(at, item); refusal != nil {
			return n, refusal
		}
	}
	return n, nil
}

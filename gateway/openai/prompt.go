package openai

import (
	"encoding/json"
	"fmt"

	"evenkeel/internal/rawjson"
)

func (p *parser) checkMessages(key string, v json.RawMessage) *Error {
	if !isArray(v) {
		return wrongValue(key, v, isArray, "a list of messages")
	}
	n := 0
	for message := range rawjson.Elements(v) {
		if !isObject(message) {
			return wrongValue(fmt.Sprintf("%s[%d]", key, n), message, isObject, "a message object")
		}
		for field, content := range rawjson.Members(message) {
			if field != "content" { // a parser may take any of repeated keys
				continue
			}
			if refusal := p.checkContent(content); refusal != nil {
				return refusal.prefixParam(fmt.Sprintf("%s[%d].content", key, n))
			}
		}
		n++
	}
	if n == 0 {
		return badRequest(CodeInvalidValue, key, "%q is empty; send at least one message", key)
	}
	p.hasPrompt = true
	p.req.PromptBytes += len(v)
	return nil
}

// What the elements of a prompt list are. A list of token ids is one prompt.
const (
	listUnknown = iota
	listStrings
	listTokens
	listTokenLists
)

// checkPrompt sets Request.Prompts if there are several: each becomes a request of its own, because
// a prefill engine hands over only the first prompt's KV. For strings, PromptTokens is 0.
func (p *parser) checkPrompt(key string, v json.RawMessage) *Error {
	if isString(v) {
		p.hasPrompt = true
		p.req.PromptBytes = len(v)
		return nil
	}
	if !isArray(v) {
		return wrongValue(key, v, isArray, promptShapes)
	}
	shape := listUnknown
	n, tokens := 0, 0             // tokens of all prompts together
	var prompts []json.RawMessage // none if the whole list is one prompt
	for item := range rawjson.Elements(v) {
		itemShape := listShapeOf(item)
		if itemShape == listUnknown {
			return wrongValue(fmt.Sprintf("%s[%d]", key, n), item, isNumber, "a string, a token id or a list of token ids")
		}
		if shape == listUnknown {
			shape = itemShape
		}
		if itemShape != shape {
			return badRequest(CodeInvalidType, key, "%q mixes strings, numbers and lists; it must be %s", key, promptShapes)
		}
		n++
		if shape == listTokens { // counted below
			continue
		}
		if maxPrompts := limitOrInfinite(p.limits.Answers); n > maxPrompts {
			// Each prompt has at least one answer.
			return badRequest(CodeInvalidValue, key, "%q has more than %d prompts", key, maxPrompts)
		}
		prompts = append(prompts, item)
		if shape == listTokenLists {
			count, refusal := p.countTokens(fmt.Sprintf("%s[%d]", key, n-1), item)
			if refusal != nil {
				return refusal
			}
			if count == 0 {
				return badRequest(CodeInvalidValue, fmt.Sprintf("%s[%d]", key, n-1), "a prompt of token ids is empty")
			}
			tokens += count
		}
	}
	if n == 0 {
		return badRequest(CodeInvalidValue, key, "%q is empty; send at least one prompt", key)
	}
	if shape == listTokens { // one prompt
		count, refusal := p.countTokens(key, v)
		if refusal != nil {
			return refusal
		}
		tokens = count
	}
	if len(prompts) > 1 { // one stays in the body
		p.req.Prompts = prompts
	}
	p.hasPrompt = true
	p.req.PromptBytes, p.req.PromptTokens = len(v), tokens
	return nil
}

func listShapeOf(item json.RawMessage) int {
	switch {
	case isString(item):
		return listStrings
	case isArray(item):
		return listTokenLists
	case isNumber(item):
		return listTokens
	}
	return listUnknown
}

const promptShapes = "a string, a list of strings, a list of token ids, or a list of such lists"

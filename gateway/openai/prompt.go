package openai

import (
	"encoding/json"
	"fmt"

	"evenkeel/internal/rawjson"
)

// checkMessages checks the messages of a chat as far as evenkeel acts on them: their media.
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
			if field != "content" { // a repeated key is checked each time, because a parser may take any of them
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

// What the elements of a prompt list are: strings, token ids (the list is one prompt), or lists of token ids.
const (
	listUnknown = iota
	listStrings
	listTokens
	listTokenLists
)

// checkPrompt checks a prompt: a string, a list of strings, a list of token ids, or a list of such lists. Each of several prompts becomes a
// request of its own, because a prefill engine hands over only the KV cache of the first prompt. It sets Request.Prompts only if there are
// several prompts, and PromptTokens to 0 for strings.
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
	n, tokens := 0, 0             // n: elements of the list; tokens: token ids of all prompts together
	var prompts []json.RawMessage // elements that are prompts; none if the whole list is one prompt
	for item := range rawjson.Elements(v) {
		itemShape := listShapeOf(item)
		if itemShape == listUnknown {
			return wrongValue(fmt.Sprintf("%s[%d]", key, n), item, isNumber, "a string, a token id or a list of token ids")
		}
		if shape == listUnknown { // the first element decides the shape of the list
			shape = itemShape
		}
		if itemShape != shape {
			return badRequest(CodeInvalidType, key, "%q mixes strings, numbers and lists; it must be %s", key, promptShapes)
		}
		n++
		if shape == listTokens { // the list is one prompt, whose tokens are counted below
			continue
		}
		if maxPrompts := limitOrInfinite(p.limits.Answers); n > maxPrompts { // each prompt has at least one answer
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
	if shape == listTokens { // the whole list is one prompt
		count, refusal := p.countTokens(key, v)
		if refusal != nil {
			return refusal
		}
		tokens = count
	}
	if len(prompts) > 1 { // a single prompt stays in the body
		p.req.Prompts = prompts
	}
	p.hasPrompt = true
	p.req.PromptBytes, p.req.PromptTokens = len(v), tokens
	return nil
}

// listShapeOf returns the shape of a prompt that is a list with this element; listUnknown: a prompt list must not have such an element.
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

// promptShapes describes a correct prompt in error messages.
const promptShapes = "a string, a list of strings, a list of token ids, or a list of such lists"

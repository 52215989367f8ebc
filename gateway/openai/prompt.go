package openai

import (
	"encoding/json"
	"fmt"

	"evenkeel/internal/rawjson"
)

// messages checks the messages of a chat as far as evenkeel acts on them: their media.
func (p *parser) messages(key string, v json.RawMessage) *Error {
	if !isArray(v) {
		return wrong(key, v, isArray, "a list of messages")
	}
	n := 0
	for message := range rawjson.Elements(v) {
		if !isObject(message) {
			return wrong(fmt.Sprintf("%s[%d]", key, n), message, isObject, "a message object")
		}
		for field, content := range rawjson.Members(message) {
			if field != "content" { // a repeated key is checked each time, because a parser may take any of them
				continue
			}
			if e := p.content(content); e != nil {
				return e.within(fmt.Sprintf("%s[%d].content", key, n))
			}
		}
		n++
	}
	if n == 0 {
		return bad(CodeInvalidValue, key, "%q is empty; send at least one message", key)
	}
	p.hasPrompt = true
	p.req.PromptBytes += len(v)
	return nil
}

// Shapes of a completion's prompt besides one string.
const (
	listUnknown = iota
	listStrings
	listTokens
	listTokenLists
)

// prompt accepts a string, strings, token ids and lists of token ids. A list
// of several prompts is split: an engine hands off only its first.
func (p *parser) prompt(key string, v json.RawMessage) *Error {
	const want = "a string, a list of strings, a list of token ids, or a list of such lists"
	if isString(v) {
		p.hasPrompt = true
		p.req.PromptBytes = len(v)
		return nil
	}
	if !isArray(v) {
		return wrong(key, v, isArray, want)
	}
	shape, n, tokens := listUnknown, 0, 0
	var prompts []json.RawMessage
	for item := range rawjson.Elements(v) {
		is := listTokens
		switch {
		case isString(item):
			is = listStrings
		case isArray(item):
			is = listTokenLists
		case !isNumber(item):
			return wrong(fmt.Sprintf("%s[%d]", key, n), item, isNumber, "a string, a token id or a list of token ids")
		}
		if shape == listUnknown {
			shape = is
		}
		if is != shape {
			return bad(CodeInvalidType, key, "%q mixes strings, numbers and lists; it must be %s", key, want)
		}
		if n++; shape == listTokens {
			continue
		}
		if most := unbounded(p.lim.Answers); n > most { // each prompt has at least one answer
			return bad(CodeInvalidValue, key, "%q has more than %d prompts", key, most)
		}
		prompts = append(prompts, item)
		if shape == listTokenLists {
			count, e := p.tokens(fmt.Sprintf("%s[%d]", key, n-1), item)
			if e != nil {
				return e
			}
			if count == 0 {
				return bad(CodeInvalidValue, fmt.Sprintf("%s[%d]", key, n-1), "a prompt of token ids is empty")
			}
			tokens += count
		}
	}
	if n == 0 {
		return bad(CodeInvalidValue, key, "%q is empty; send at least one prompt", key)
	}
	if shape == listTokens {
		count, e := p.tokens(key, v)
		if e != nil {
			return e
		}
		tokens = count
	}
	if len(prompts) > 1 {
		p.req.Prompts = prompts
	}
	p.hasPrompt = true
	p.req.PromptBytes, p.req.PromptTokens = len(v), tokens
	return nil
}

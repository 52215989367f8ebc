package openai

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// messagesRules are for /v1/messages, by Anthropic's keys.
var messagesRules = map[string]rule{
	"model":          setModel,
	"messages":       (*parser).checkMessages,
	"system":         optional((*parser).checkSystem),
	"stream":         flag(func(p *parser, on bool) { p.req.Stream = on }),
	"max_tokens":     integers(1, math.MaxInt32, func(p *parser, n int) { p.maxTokens = n }),
	"thinking":       optional(checkThinking),
	"stop_sequences": stopStrings(false),
	"top_k":          integers(-1, math.MaxInt32, nil),

	"chat_template_kwargs": chatTemplateArgs,
}

// minThinkingTokens is as in Anthropic's API and vLLM.
const minThinkingTokens = 1024

// maxThinkingKeys is far above the three in Anthropic's API.
const maxThinkingKeys = 64

func (p *parser) checkMessageKeys() *Error {
	switch {
	case p.maxTokens == 0: // not given
		return badRequest(CodeMissing, "max_tokens", "the request has no \"max_tokens\"; set how long the answer may be")
	case p.thinkingBudget >= p.maxTokens: // the decode engine would refuse it, after a whole prefill
		return badRequest(CodeInvalidValue, "thinking.budget_tokens",
			"\"thinking.budget_tokens\" is %d; it must be below \"max_tokens\", which is %d",
			p.thinkingBudget, p.maxTokens)
	}
	return nil
}

// The prompt may depend on the keys of thinking, and both engines must read the same value, so none
// may be repeated.
func checkThinking(p *parser, key string, v json.RawMessage) *Error {
	if !isObject(v) {
		return wrongValue(key, v, isObject, "an object")
	}
	seenKeys := map[string]bool{}
	for inner, v := range rawjson.Members(v) {
		if len(seenKeys) == maxThinkingKeys {
			return badRequest(CodeInvalidValue, key, "%q has more than %d keys", key, maxThinkingKeys)
		}
		path := key + "." + inner
		if seenKeys[inner] {
			return badRequest(CodeDuplicateKey, shorten(path), "the key %q appears more than once; send it once", shorten(path))
		}
		seenKeys[inner] = true
		if inner != "budget_tokens" { // only for the engines
			continue
		}
		budget, ok := parseInteger(v, minThinkingTokens, math.MaxInt32)
		if !ok {
			return wrongValue(path, v, isInteger, fmt.Sprintf("an integer of %d or more", minThinkingTokens))
		}
		// Not every engine accepts 5000.0 or 5.0e3 as an integer. A text that is too short for the
		// digits, such as 1e9, stays as it is.
		overwriteWithDigits(v, budget)
		p.thinkingBudget = int(budget)
	}
	return nil
}

func (p *parser) checkSystem(key string, v json.RawMessage) *Error {
	if !isString(v) && !isArray(v) {
		return wrongValue(key, v, isString, "a text or a list of blocks")
	}
	if refusal := p.checkContent(v); refusal != nil {
		return refusal.prefixParam(key)
	}
	p.req.PromptBytes += len(v)
	return nil
}

// Other types are refused, because a later version of an engine may do more with them, such as
// fetch a URL.
var blockTypes = []string{
	"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking", "tool_addition", "tool_removal",
}

// A medium is under source, and the result of a tool is a list of blocks.
func (p *parser) checkBlock(block json.RawMessage) *Error {
	kind := ""
	// The type is checked first, so that the error names an unknown one.
	for key, v := range rawjson.Members(block) {
		if key != "type" { // a parser may take any of repeated keys
			continue
		}
		if !isString(v) {
			return wrongValue(key, v, isString, "a string")
		}
		if kind = rawjson.Unquote(v); !slices.Contains(blockTypes, kind) {
			return badRequest(CodeUnsupported, key, "a block of type %q is not supported", shorten(kind))
		}
	}
	if kind == "" {
		return badRequest(CodeMissing, "type", "the block has no \"type\"")
	}
	for key, v := range rawjson.Members(block) {
		var refusal *Error
		switch key {
		case "source":
			refusal = p.checkSource(v)
		case "content":
			refusal = p.checkToolResult(v)
		}
		if refusal != nil {
			return refusal.prefixMember(key)
		}
	}
	return nil
}

// Other blocks in a tool's result need no check, because engines leave out types that they do not
// know.
func (p *parser) checkToolResult(list json.RawMessage) *Error {
	n := 0
	for block := range rawjson.Elements(list) {
		for key, v := range rawjson.Members(block) {
			if key != "source" {
				continue
			}
			if refusal := p.checkSource(v); refusal != nil {
				return refusal.prefixMember(key).prefixParam(fmt.Sprintf("[%d].", n))
			}
		}
		n++
	}
	return nil
}

// checkSource checks where a medium comes from. A parser may take any of repeated keys.
func (p *parser) checkSource(v json.RawMessage) *Error {
	for key, inner := range rawjson.Members(v) {
		switch {
		case key == "data":
			p.mediaBytes += len(inner)
		case key != "url" || isNull(inner): // no URL to check
		case !isString(inner):
			return wrongValue(key, inner, isString, "a URL")
		default:
			if refusal := p.checkMediaURL(key, inner); refusal != nil {
				return refusal
			}
		}
	}
	return nil
}

// countRules are for requests that count the tokens of a message, which one engine alone answers.
var countRules = map[string]rule{
	"model":    setModel,
	"messages": (*parser).checkMessages,
	"system":   optional((*parser).checkSystem),
	"thinking": optional(checkThinking),
	// Not searched for media: a tool's parameter may have the name of a media key.
	"tools":                nil,
	"chat_template":        chatTemplate,
	"chat_template_kwargs": chatTemplateArgs,
}

// ParseCount reads a request that counts the tokens of a message, for one engine.
func ParseCount(raw []byte, limits Limits) (*Request, *Error) {
	return parsePassed(raw, limits, mooncake.Messages, countRules)
}

// BodyFor returns the error in the shape of the path's API. At a path of Anthropic's, an engine's
// own error is returned unchanged only if it has that shape: vLLM answers in OpenAI's to a body of
// wrong types, and an engine without the endpoint in neither.
func (e *Error) BodyFor(path string) []byte {
	if !IsAnthropicPath(path) {
		return e.JSON()
	}
	if _, hasItsShape := engineMessage(e.Raw); hasItsShape {
		return e.Raw
	}
	var inner struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	}
	inner.Type, inner.Message = e.TypeFor(path), e.Text()
	body, _ := json.Marshal(struct { // cannot fail
		Type  string `json:"type"`
		Error any    `json:"error"`
	}{"error", inner})
	return body
}

// BodyAndTypeFor adds to BodyFor the content type.
func (e *Error) BodyAndTypeFor(path string) (body []byte, contentType string) {
	body = e.BodyFor(path)
	if e.ContentType != "" && bytes.Equal(body, e.Raw) {
		return body, e.ContentType
	}
	return body, "application/json"
}

// Text is the engine's message if there is one, with the key at fault.
func (e *Error) Text() string {
	message := e.Message
	if fromEngine, _ := engineMessage(e.Raw); fromEngine != "" {
		message = fromEngine
	}
	if e.Param != "" && !strings.Contains(message, e.Param) {
		message = e.Param + ": " + message
	}
	if message == "" {
		message = fmt.Sprintf("an engine refused the request with status %d", e.Status)
	}
	return message
}

// The message is empty if raw is not JSON, or has none.
func engineMessage(raw []byte) (message string, isAnthropic bool) {
	var answer struct {
		Type  string
		Error struct{ Type, Message string }
	}
	_ = json.Unmarshal(raw, &answer)
	return answer.Error.Message, answer.Type == "error" && answer.Error.Type != "" && answer.Error.Message != ""
}

// CountPath of Anthropic's API counts the tokens of a message.
const CountPath = "/v1/messages/count_tokens"

// IsAnthropicPath says whether a path is one of Anthropic's API.
func IsAnthropicPath(path string) bool { return path == mooncake.Messages.Path() || path == CountPath }

// TypeFor is the error's type by the names of the path's API.
func (e *Error) TypeFor(path string) string {
	if !IsAnthropicPath(path) {
		return cmp.Or(e.Type, typeOfStatus(e.Status))
	}
	switch e.Status {
	case http.StatusUnauthorized:
		return "authentication_error"
	case http.StatusForbidden:
		return "permission_error"
	case http.StatusNotFound:
		return "not_found_error"
	case http.StatusRequestEntityTooLarge:
		return "request_too_large"
	case http.StatusTooManyRequests:
		return "rate_limit_error"
	case http.StatusServiceUnavailable:
		return "overloaded_error"
	case http.StatusGatewayTimeout:
		return "timeout_error"
	}
	if e.Status >= 500 {
		return "api_error"
	}
	return "invalid_request_error"
}

package openai

import (
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// CannotResume says whether another engine could not continue the answer. For some keys, the engine
// keeps a state that neither the text nor the token ids of the answer so far contain.
func CannotResume(body *mooncake.Body, endpoint mooncake.Endpoint) bool {
	if !endpoint.CanResume() {
		return true // events number the parts of the answer, or the last one repeats it all
	}
	for key, v := range body.All() {
		if isNull(v) {
			continue
		}
		switch key {
		case "structured_outputs", "thinking_token_budget", "continue_final_message":
			// The engine keeps a grammar, a budget or the continued message.
			if string(v) != "false" {
				return true
			}
		case "response_format": // all formats but plain text have a grammar
			for inner, kind := range rawjson.Members(v) {
				if inner == "type" && string(kind) != `"text"` {
					return true
				}
			}
		// At /generate, these set a grammar or a state.
		case "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor", "session_params":
			if endpoint == mooncake.Generate {
				return true
			}
		case "echo": // the answer would begin with the last message once more
			if endpoint == mooncake.Chat && string(v) == "true" {
				return true
			}
		case "stop": // may begin before the interruption
			if string(v) != "[]" {
				return true
			}
		case "messages": // token ids do not contain media
			if HasMedia(body, endpoint) {
				return true
			}
		case "content_parts", "trace_decode_token_ids":
			// The engine replaces media by other tokens, and a trace begins with the first token.
			return true
		default:
			if strings.HasPrefix(key, "guided_") { // a grammar
				return true
			}
		}
	}
	return false
}

// HasTools says whether a chat offers tools. Templates then render an assistant's message
// differently than it was generated, and engines parse tool calls in a whole text differently than
// in a stream: if max_tokens cuts a call off, vLLM streams its beginning, but returns it as text in
// an answer in one piece (0.32, 0.33).
func HasTools(body *mooncake.Body) bool {
	v, ok := body.Get("tools")
	return ok && !isNull(v) && string(v) != "[]"
}

// asksForExtras says whether a request asks for more than tokens, such as return_meta_info or
// return_routed_experts. In a stream, engines return only some of these, and SGLang refuses some
// (0.5.23, entrypoints/openai/serving_chat.py). Token ids are in both forms.
func asksForExtras(body *mooncake.Body) bool {
	for key, v := range body.All() {
		isOn := !isNull(v) && string(v) != "false"
		if isOn && strings.HasPrefix(key, "return_") && key != "return_token_ids" && key != "return_tokens_as_token_ids" {
			return true
		}
	}
	return false
}

// HasLogprobs says whether a request asks for the probabilities of its answer's tokens.
func HasLogprobs(body *mooncake.Body) bool {
	v, ok := body.Get("logprobs")
	return ok && !isNull(v) && string(v) != "false"
}

// Echoes says whether the answer begins with the prompt.
func Echoes(body *mooncake.Body) bool {
	v, _ := body.Get("echo")
	return string(v) == "true"
}

// HasMedia says whether a chat has a part that is not text, or whether media belong to token ids.
func HasMedia(body *mooncake.Body, endpoint mooncake.Endpoint) bool {
	if endpoint == mooncake.Tokens {
		parts, ok := body.Get("content_parts")
		return ok && !isNull(parts)
	}
	messages, ok := body.Get("messages")
	if !ok || endpoint != mooncake.Chat {
		return false
	}
	for message := range rawjson.Elements(messages) {
		for field, content := range rawjson.Members(message) {
			if field != "content" || !isArray(content) {
				continue
			}
			for part := range rawjson.Elements(content) {
				isText := false
				for key, kind := range rawjson.Members(part) {
					isText = isText || key == "type" && string(kind) == `"text"`
				}
				if !isText && !isString(part) { // a string is text
					return true
				}
			}
		}
	}
	return false
}

package openai

import (
	"strings"

	"evenkeel/internal/rawjson"
	"evenkeel/mooncake"
)

// CannotResume says whether another engine could not continue the answer to this request after an interruption. It depends on the endpoint,
// and on keys for which the engine keeps a state that neither the text nor the token ids of the answer so far contain.
func CannotResume(body *mooncake.Body, endpoint mooncake.Endpoint) bool {
	if !endpoint.CanResume() {
		return true // at these endpoints, events number the parts of the answer, or the last event repeats the whole answer
	}
	for key, v := range body.All() {
		if isNull(v) { // as if the key were absent
			continue
		}
		switch key {
		case "structured_outputs", "thinking_token_budget", "continue_final_message": // the engine keeps a grammar, budget or continued message
			if string(v) != "false" {
				return true
			}
		case "response_format": // for all formats but plain text, the engine keeps a grammar
			for inner, kind := range rawjson.Members(v) {
				if inner == "type" && string(kind) != `"text"` {
					return true
				}
			}
		// At /generate, these keys set a grammar, or make the engine keep a state.
		case "json_schema", "regex", "ebnf", "structural_tag", "custom_logit_processor", "session_params":
			if endpoint == mooncake.Generate {
				return true
			}
		case "echo": // the answer to a chat would begin with the last message once more
			if endpoint == mooncake.Chat && string(v) == "true" {
				return true
			}
		case "stop": // a stop string may begin before the interruption
			if string(v) != "[]" {
				return true
			}
		case "messages": // token ids do not contain media
			if HasMedia(body, endpoint) {
				return true
			}
		case "content_parts", "trace_decode_token_ids": // the engine replaces media by other tokens; a trace begins with the first token
			return true
		default:
			if strings.HasPrefix(key, "guided_") { // the engine keeps a grammar
				return true
			}
		}
	}
	return false
}

// HasTools says whether a chat offers tools. If so, templates render an assistant's message differently than it was generated. Engines also
// parse tool calls in a whole text differently than in a stream: if max_tokens cuts a call off, vLLM streams the beginning of the call,
// but returns it as text in an answer in one piece (0.32, 0.33).
func HasTools(body *mooncake.Body) bool {
	v, ok := body.Get("tools")
	return ok && !isNull(v) && string(v) != "[]"
}

// asksForExtras says whether a request asks for more than the tokens of its answer, such as return_meta_info or return_routed_experts.
// Engines return all such values in an answer in one piece, but only some in a stream, and SGLang refuses some in a stream (0.5.23,
// entrypoints/openai/serving_chat.py). Token ids are in both, so a request for them does not count.
func asksForExtras(body *mooncake.Body) bool {
	for key, v := range body.All() {
		isOn := !isNull(v) && string(v) != "false"
		if isOn && strings.HasPrefix(key, "return_") && key != "return_token_ids" && key != "return_tokens_as_token_ids" {
			return true
		}
	}
	return false
}

// HasLogprobs says whether a request asks for the probabilities of the tokens of its answer. null and false do not ask for them.
func HasLogprobs(body *mooncake.Body) bool {
	v, ok := body.Get("logprobs")
	return ok && !isNull(v) && string(v) != "false"
}

// Echoes says whether the answer begins with the prompt, because the request has echo: true.
func Echoes(body *mooncake.Body) bool {
	v, _ := body.Get("echo")
	return string(v) == "true"
}

// HasMedia says whether a message of a chat has a part that is not text, or whether media belong to token ids.
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
				if !isText && !isString(part) { // a part that is a string is a text, too
					return true
				}
			}
		}
	}
	return false
}

package mooncake

import (
	"bytes"
	"encoding/json"
	"iter"
)

// Elements yields the elements of an array, nothing for any other value. The
// value must come out of a scanned Body: it is not validated again.
func Elements(value json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		if len(value) == 0 || value[0] != '[' {
			return
		}
		for i := skipSpace(value, 1); value[i] != ']'; {
			end := skip(value, i)
			if !yield(value[i:end:end]) {
				return
			}
			i = skipComma(value, end)
		}
	}
}

// Members yields keys and values of an object, repeated keys included, nothing
// for any other value. The value must come out of a scanned Body.
func Members(value json.RawMessage) iter.Seq2[string, json.RawMessage] {
	return func(yield func(string, json.RawMessage) bool) {
		if len(value) == 0 || value[0] != '{' {
			return
		}
		for i := skipSpace(value, 1); value[i] != '}'; {
			keyEnd := skip(value, i)
			val := skipSpace(value, skipSpace(value, keyEnd)+1) // over the ':'
			end := skip(value, val)
			if !yield(keyOf(value[i:keyEnd]), value[val:end:end]) {
				return
			}
			i = skipComma(value, end)
		}
	}
}

// Blank writes spaces over the members of an object whose key drop reports, in
// the text that the object stands in. What is left is the same object without
// them, as long as it was. The value must come out of a scanned Body.
func Blank(value json.RawMessage, drop func(key string) bool) {
	if len(value) == 0 || value[0] != '{' {
		return
	}
	from := -1 // the comma behind the last member that was kept
	for i := skipSpace(value, 1); value[i] != '}'; {
		keyEnd := skip(value, i)
		end := skip(value, skipSpace(value, skipSpace(value, keyEnd)+1))
		next := skipComma(value, end)
		switch {
		case !drop(keyOf(value[i:keyEnd])):
			if from = -1; value[next] != '}' {
				from = end + bytes.IndexByte(value[end:next], ',')
			}
		case value[next] != '}': // with the comma behind it
			blank(value[i:next])
		default: // the last: with the comma before it
			blank(value[i:next])
			if from >= 0 {
				value[from] = ' '
			}
		}
		i = next
	}
}

func blank(text []byte) {
	for i := range text {
		text[i] = ' '
	}
}

func skipSpace(data []byte, i int) int {
	for class[data[i]] == classSpace {
		i++
	}
	return i
}

// skipComma moves from the end of an element to the next one, or to the
// closing bracket.
func skipComma(data []byte, i int) int {
	i = skipSpace(data, i)
	if data[i] == ',' {
		i = skipSpace(data, i+1)
	}
	return i
}

// skip returns the end of the valid value that starts at i.
func skip(data []byte, i int) int {
	depth := 0
	for i < len(data) {
		switch class[data[i]] {
		case classQuote:
			i = skipString(data, i)
		case classOpen:
			depth++
			i++
		case classClose:
			depth--
			i++
		case classNumber, classLiteral:
			for i < len(data) && data[i] != ',' && class[data[i]] != classClose && class[data[i]] != classSpace {
				i++
			}
		default: // space, ',' and ':' between the parts of a container
			i++
			continue
		}
		if depth == 0 {
			return i
		}
	}
	return i
}

func skipString(data []byte, i int) int {
	for i++; ; {
		end := i + bytes.IndexByte(data[i:], '"')
		slashes := 0
		for data[end-1-slashes] == '\\' {
			slashes++
		}
		i = end + 1
		if slashes%2 == 0 {
			return i
		}
	}
}

// keyOf returns the text of a quoted key. Keys that chat and completion
// requests commonly have are not allocated.
func keyOf(quoted []byte) string {
	text := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(text, '\\') >= 0 {
		var s string
		_ = json.Unmarshal(quoted, &s) // the scanner has validated it
		return s
	}
	if known, ok := commonKeys[string(text)]; ok {
		return known
	}
	return string(text)
}

var commonKeys = func() map[string]string {
	keys := map[string]string{}
	for _, k := range []string{
		"model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
		"temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs",
		"presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "tools", "tool_choice",
		"parallel_tool_calls", "response_format", "user", "metadata", "echo", "suffix", "ignore_eos", "chat_template_kwargs",
		"reasoning_effort", "return_token_ids", "kv_transfer_params", "priority", "cache_salt",
		"role", "content", "name", "type", "text", "image_url", "url", "detail", "tool_calls", "tool_call_id", "function",
		"arguments", "id", "object", "created", "choices", "usage", "index", "message", "finish_reason", "stop_reason",
		"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "cached_tokens", "prompt_token_ids",
		"include_usage", "continuous_usage_stats",
	} {
		keys[k] = k
	}
	return keys
}()

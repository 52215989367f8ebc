package rawjson

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// Int reads the non-negative integer from i to end. ok is false if there is no digit, another byte,
// or more than 18 digits.
func Int(b []byte, i, end int) (n int, ok bool) {
	const maxDigits = 18 // any such number fits into 64 bits
	if end-i > maxDigits || end <= i {
		return 0, false
	}
	for ; i < end; i++ {
		digit := b[i] - '0'
		if digit > 9 { // a byte below '0' wraps around to a large value
			return 0, false
		}
		n = n*10 + int(digit)
	}
	return n, true
}

// IsNull says whether the value is null. In valid JSON, only null starts with an n.
func IsNull(value []byte) bool { return len(value) > 0 && value[0] == 'n' }

const hexDigits = "0123456789abcdef"

// AppendString appends s as a JSON string, with its quotes. Bytes that are not UTF-8 become U+FFFD.
func AppendString[T string | []byte](dst []byte, s T) []byte {
	return append(AppendEscaped(append(dst, '"'), s), '"')
}

// AppendEscaped appends s as the inside of a JSON string, without quotes.
func AppendEscaped[T string | []byte](dst []byte, s T) []byte {
	for _, r := range string(s) {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r < ' ':
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[r>>4], hexDigits[r&15])
		default: // an invalid byte is U+FFFD here, because range decodes it so
			dst = utf8.AppendRune(dst, r)
		}
	}
	return dst
}

// Unquote returns the text of a JSON string, which must have its quotes.
func Unquote(quoted []byte) string {
	inside := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inside, '\\') < 0 {
		return string(inside)
	}
	return string(AppendUnescaped(nil, inside))
}

// AppendUnescaped appends the text of a JSON string, given without its quotes. An escape that JSON
// does not have becomes U+FFFD, because the text of an engine may not have been validated yet.
func AppendUnescaped(dst, inside []byte) []byte {
	for {
		i := bytes.IndexByte(inside, '\\')
		if i < 0 {
			return append(dst, inside...)
		}
		if i == len(inside)-1 { // the text ends with a backslash that escapes nothing
			return utf8.AppendRune(append(dst, inside[:i]...), utf8.RuneError)
		}
		dst, inside = append(dst, inside[:i]...), inside[i:]
		if c := Escaped(inside[1]); c != 0 {
			dst, inside = append(dst, c), inside[2:]
			continue
		}
		r, size := CodePoint(inside) // a \u escape, or one that JSON does not have
		dst, inside = utf8.AppendRune(dst, r), inside[size:]
	}
}

// Escaped returns the byte that a backslash followed by c means; 0: c is 'u', or there is no such
// escape.
func Escaped(c byte) byte { return escapes[c] }

var escapes = [256]byte{'n': '\n', 't': '\t', 'r': '\r', 'b': '\b', 'f': '\f', '"': '"', '\\': '\\', '/': '/'}

// CodePoint returns the rune of the \u escape at the start of text, and the length of the escape in
// bytes: 12 for a surrogate pair. Half a pair, or an invalid escape, gives U+FFFD.
func CodePoint(text []byte) (r rune, n int) {
	r = unit(text)
	if r < 0 { // no valid \u escape: the backslash and the byte after it are replaced
		return utf8.RuneError, min(2, len(text))
	}
	if utf16.IsSurrogate(r) { // a surrogate is half of a pair, so the other half must follow
		r = utf16.DecodeRune(r, unit(text[6:])) // U+FFFD if no other half follows
		if r != utf8.RuneError {
			return r, 12
		}
	}
	return r, 6
}

// unit returns -1 if there is no such escape, or a digit is not hexadecimal.
func unit(text []byte) (r rune) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return -1
	}
	for _, c := range text[2:6] {
		var digit byte
		switch {
		case c >= '0' && c <= '9':
			digit = c - '0'
		case c >= 'a' && c <= 'f':
			digit = c - 'a' + 10
		case c >= 'A' && c <= 'F':
			digit = c - 'A' + 10
		default:
			return -1
		}
		r = r<<4 | rune(digit)
	}
	return r
}

// KeyText copies only a key with escapes.
func KeyText(inside []byte) []byte {
	if bytes.IndexByte(inside, '\\') >= 0 {
		return AppendUnescaped(nil, inside)
	}
	return inside
}

// Key does not allocate for keys that are common in requests, answers and hand-offs.
func Key(inside []byte) string {
	inside = KeyText(inside)
	if known, ok := commonKeys[string(inside)]; ok {
		return known
	}
	return string(inside)
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
		"include_usage", "continuous_usage_stats", "service_tier", "system_fingerprint", "refusal", "annotations", "audio", "function_call",
		"reasoning", "token_ids", "routed_experts", "prompt_logprobs", "prompt_text", "ec_transfer_params", "metrics",
		"completion_tokens_details",
		"created_cache_tokens", "multimodal_tokens", "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
		"remote_request_id", "remote_host", "remote_port", "remote_pcp_size", "remote_dcp_size", "remote_ptp_size", "remote_block_size",
		"remote_num_tokens", "tp_size", "last_token_id", "num_prompt_blocks", "remote_multi_nodes_meta_mapping", "host", "engine_id",
		"handshake_port",
	} {
		keys[k] = k
	}
	return keys
}()

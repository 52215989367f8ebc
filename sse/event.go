package sse

import (
	"slices"
	"strconv"

	"evenkeel/internal/rawjson"
)

// BlankLine ends an event, even one that was cut off in the middle of a line.
const BlankLine = "\n\n"

// Done is the last event of a stream of OpenAI's API. It says that the stream is complete, or that
// an error event came before it.
const Done = "data: [DONE]\n\n"

// Usage has the token counts of one answer.
type Usage struct {
	Prompt, Completion, Total int
	Cached                    int // prompt tokens that prefill found in its prefix cache; -1: not known
}

// UsageEvent appends the event that has no choices and carries a stream's usage. It is for a stream
// that evenkeel puts together itself. details are the counts of prompt_tokens_details; its
// cached_tokens is ignored, because u.Cached has it.
func UsageEvent(dst, id, model []byte, created int64, chat bool, u Usage, details map[string]int) []byte {
	dst = rawjson.AppendString(append(dst, `data: {"id":`...), id)
	if chat {
		dst = append(dst, `,"object":"chat.completion.chunk","created":`...)
	} else {
		dst = append(dst, `,"object":"text_completion","created":`...)
	}
	dst = strconv.AppendInt(dst, created, 10)
	dst = rawjson.AppendString(append(dst, `,"model":`...), model)
	dst = append(dst, `,"choices":[],"usage":`...)
	return append(u.appendJSON(dst, details), "}\n\n"...)
}

// appendJSON appends the usage as an object. Its prompt_tokens_details have u.Cached, if it is
// known, and the counts in details except cached_tokens; without any count they are left out.
func (u Usage) appendJSON(dst []byte, details map[string]int) []byte {
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Prompt), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Total), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.Completion), 10)
	before := `,"prompt_tokens_details":{` // what comes before the next count: this or, once the object is open, a comma
	if u.Cached >= 0 {
		dst = strconv.AppendInt(append(append(dst, before...), `"cached_tokens":`...), int64(u.Cached), 10)
		before = ","
	}
	keys := make([]string, 0, len(details))
	for key := range details {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		if key != "cached_tokens" {
			dst = append(rawjson.AppendString(append(dst, before...), key), ':')
			dst, before = strconv.AppendInt(dst, int64(details[key]), 10), ","
		}
	}
	if before == "," { // the object prompt_tokens_details is open
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

// ErrorEvent appends the event that tells a client that its stream failed after it began. typ and
// code are the error's type and code as OpenAI's API names them; an empty code becomes null. The
// caller must append Done after it.
func ErrorEvent(dst []byte, message, typ, code string) []byte {
	dst = rawjson.AppendString(append(dst, `data: {"error":{"message":`...), message)
	dst = rawjson.AppendString(append(dst, `,"type":`...), typ)
	dst = append(dst, `,"param":null,"code":`...)
	if code == "" {
		dst = append(dst, "null"...)
	} else {
		dst = rawjson.AppendString(dst, code)
	}
	return append(dst, "}}\n\n"...)
}

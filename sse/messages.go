package sse

import (
	"bytes"
	"strconv"

	"evenkeel/internal/rawjson"
)

// The events of Anthropic's API come in this order: message_start; content blocks, whose deltas
// carry text, thinking and the arguments of tools; message_delta with the stop_reason and the
// usage; message_stop.

const messageStop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"

// noReason is the error of an answer that the engine ended without a stop_reason, as vLLM ends an
// aborted answer.
const noReason = `{"error":"the decode engine ended the answer without a stop_reason"}`

// readMessage reads an event of /v1/messages, or an answer in one piece, and collects in s.edits
// how the client's copy must differ. cached is Options.Cached: the number of cached prompt tokens
// that the client is to see, unknownCached, or OwnCached for the engine's own number.
func readMessage(b []byte, cached int) (s formFacts) {
	var kind string
	s.errorText = b // used only if the event turns out to be an error
	at := rawjson.Space(b, 0)
	o := rawjson.ObjectAt(b, at)
	for o.NextValue() {
		switch string(o.Key) {
		case "type":
			kind = text(o.Value())
		case "error":
			s.failed = s.failed || !rawjson.IsNull(o.Value())
		case "message":
			if b[o.Val] == '{' { // if the key is repeated, each value is read, because a client may take any of them
				s.readAnswer(rawjson.ObjectAt(b, o.Val), cached)
			}
		case "usage":
			s.readMessageUsage(&o, cached)
		case "delta":
			if b[o.Val] == '{' {
				s.readDelta(rawjson.ObjectAt(b, o.Val))
			}
		}
	}
	if s.readable = isWhole(&o); s.readable { // otherwise what was read is not used
		s.noteMessageKind(kind)
		if kind == "message" { // an answer in one piece: b itself is the message
			// The loop has added the edits of its usage already. appendEdited skips the second ones, because
			// their place is replaced by then.
			s.readAnswer(rawjson.ObjectAt(b, at), cached)
		}
	}
	s.sortEdits() // appendEdited needs them in the order of their places
	return s
}

// noteMessageKind stores what the type of an event, kind, says of it. The stop_reason of the event
// was read before.
func (s *formFacts) noteMessageKind(kind string) {
	switch kind {
	case "error":
		s.failed = true
	case "message": // an answer in one piece
		s.hasFinalUsage, s.endsStream = true, true
	case "message_delta":
		s.hasFinalUsage = true
		if s.finishReason == "" && !s.failed { // vLLM ends an aborted answer in this way; see noReason
			s.failed, s.errorText = true, []byte(noReason)
		}
	case "message_stop":
		s.endsStream = true
	case "ping":
		s.isPing = true
	}
}

// readAnswer reads a message: its stop_reason and its usage. It adds edits for the members that
// clients must not get, and for the counts of cached tokens. cached is the number of cached prompt
// tokens that the client is to see; negative: unknownCached or OwnCached.
func (s *formFacts) readAnswer(o rawjson.Object, cached int) {
	keptBefore := false // true once a member before the current one stays in the client's copy
	for o.NextValue() {
		key := rawjson.Key(o.Key)
		if isEngineOnlyKey(key) {
			s.edits = append(s.edits, removalOf(&o, keptBefore)) // with the comma before it, or after it if no member before it stays
			continue
		}
		keptBefore = true
		switch key {
		case "stop_reason":
			s.readReason(o.Value())
		case "usage":
			s.readMessageUsage(&o, cached)
		case "model":
			s.modelAt = edit{from: o.Val, to: o.Pos}
		}
	}
}

// adaptMessage has the client read the model's name that it gave.
func adaptMessage(f *Filter, s *formFacts, data []byte) {
	if len(f.model) == 0 || s.modelAt.to == 0 || bytes.Equal(data[s.modelAt.from:s.modelAt.to], f.model) {
		return
	}
	s.modelAt.replacement = string(f.model)
	s.edits = append(s.edits, s.modelAt)
	s.sortEdits()
}

// readDelta reads the delta of an event: whether it has generated tokens, and the stop_reason if it
// has one.
func (s *formFacts) readDelta(o rawjson.Object) {
	for o.NextValue() {
		switch string(o.Key) {
		case "type":
			switch string(o.Value()) {
			case `"text_delta"`, `"thinking_delta"`, `"input_json_delta"`:
				s.hasTokens = true
			}
		case "stop_reason":
			s.readReason(o.Value())
		}
	}
}

// readReason stores a stop_reason as the finish_reason, and whether a stop text of the request
// ended the answer.
func (s *formFacts) readReason(v []byte) {
	s.finishReason, s.endedByStopText = stopReason(v), string(v) == `"stop_sequence"`
}

// stopReason translates a stop_reason into a finish_reason; empty: v is not a string.
func stopReason(v []byte) string {
	switch string(v) {
	case `"end_turn"`, `"stop_sequence"`:
		return "stop"
	case `"max_tokens"`:
		return "length"
	case `"tool_use"`:
		return "tool_calls"
	}
	return text(v)
}

// readMessageUsage reads a usage, the current member of an object, whose input_tokens do not
// include cached tokens. It adds edits that show the client the number cached (see Options.Cached),
// because a decode engine counts the KV that it pulled as cached.
func (s *formFacts) readMessageUsage(usage *rawjson.Object, cached int) {
	if usage.Text[usage.Val] != '{' { // such as null
		return
	}
	var input, cacheRead, cacheCreated, output int
	var inputEdits, readEdits []edit // one edit per value, because a key may be repeated, and a client may read any of its values
	for o := rawjson.ObjectAt(usage.Text, usage.Val); o.NextValue(); {
		switch n, value := countOf(&o), (edit{from: o.Val, to: o.Pos}); string(o.Key) {
		case "input_tokens":
			input, inputEdits = n, append(inputEdits, value)
		case "cache_read_input_tokens":
			cacheRead, readEdits = n, append(readEdits, value)
		case "cache_creation_input_tokens":
			cacheCreated = n
		case "output_tokens":
			output = n
		}
	}
	prompt := input + cacheRead + cacheCreated
	s.usage = Usage{Prompt: prompt, Completion: output, Total: prompt + output, Cached: cacheRead}
	if cached == OwnCached || len(readEdits) == 0 { // the engine's own count is right, or there is none to replace
		return
	}
	cached = min(max(0, cached), input+cacheRead) // a client adds up the three counts, so their sum must not change
	for i := range inputEdits {
		inputEdits[i].replacement = strconv.Itoa(input + cacheRead - cached)
	}
	for i := range readEdits {
		readEdits[i].replacement = strconv.Itoa(cached)
	}
	s.edits = append(append(s.edits, inputEdits...), readEdits...)
}

// failedMessage appends the error event of /v1/messages. This event has no place for the other two
// arguments, the event number and the code.
func failedMessage(dst []byte, _ int, message, typ, _ string) []byte {
	dst = rawjson.AppendString(append(dst, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":"...), typ)
	return append(rawjson.AppendString(append(dst, `,"message":`...), message), "}}\n\n"...)
}

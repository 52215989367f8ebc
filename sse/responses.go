package sse

import (
	"strconv"

	"evenkeel/internal/rawjson"
)

// readResponse reads an event of /v1/responses, or an answer in one piece. cached is Options.Cached: the number of
// cached prompt tokens that the client is to see.
func readResponse(b []byte, cached int) (s formFacts) {
	var kind, object string
	s.failure = b
	at := rawjson.Space(b, 0)
	o := rawjson.ObjectAt(b, at)
	for o.NextValue() {
		switch string(o.Key) {
		case "type":
			kind = text(o.Value())
		case "object":
			object = text(o.Value())
		case "error":
			s.failed = s.failed || !rawjson.IsNull(o.Value())
		case "response":
			if b[o.Val] == '{' { // if the key is repeated, each value is read, because a client may take any of them
				s.readResponse(rawjson.ObjectAt(b, o.Val), cached)
			}
		}
	}
	s.readable = o.Pos > 0 && rawjson.Space(b, o.Pos) == len(b)
	switch {
	case !s.readable: // what was read is not used
	case object == "response": // b is an answer in one piece, not an event
		s.hasFinalUsage = true
		s.readResponse(rawjson.ObjectAt(b, at), cached)
		s.sortEdits()
	case kind == "response.completed", kind == "response.incomplete": // the loop has read the usage in its member response
		s.hasFinalUsage = true
	case kind == "response.failed", kind == "error", object == "error":
		s.failed = true
	case kind == "response.created", kind == "response.in_progress", kind == "response.queued":
		s.announces = true
	default: // events with generated tokens have types such as response.output_text.delta
		s.hasTokens = len(kind) > len(".delta") && kind[len(kind)-len(".delta"):] == ".delta"
	}
	s.endsStream = s.hasFinalUsage
	return s
}

// readResponse reads a response object: its status, error and usage. It adds edits for members that clients must not get, and for the
// count of cached tokens in its usage. cached is Options.Cached.
func (s *formFacts) readResponse(o rawjson.Object, cached int) {
	keptBefore := false // true once a member before the current one stays in the client's copy
	for o.NextValue() {
		key, v := rawjson.Key(o.Key), o.Value()
		if isEngineOnlyKey(key) {
			s.edits = append(s.edits, removalOf(&o, keptBefore))
			continue
		}
		keptBefore = true
		switch key {
		case "status":
			switch string(v) {
			case `"completed"`:
				s.finishReason = "stop"
			case `"incomplete"`:
				s.finishReason = "length"
			case `"failed"`, `"cancelled"`:
				s.failed = true
			}
		case "error":
			if !rawjson.IsNull(v) { // the error alone becomes the argument for ReadFailure
				s.failure = append(append([]byte(`{"error":`), v...), '}')
			}
		case "usage":
			if v[0] == '{' {
				s.readUsage(rawjson.ObjectAt(o.Text, o.Val), cached)
			}
		}
	}
}

// readUsage reads the usage of a response, and adds the edits that replace the engine's own count of cached tokens by cached, which is
// Options.Cached; OwnCached: there are no such edits.
func (s *formFacts) readUsage(o rawjson.Object, cached int) {
	shown := strconv.Itoa(max(0, cached)) // clients expect a number, even if the count is not known
	for o.NextValue() {
		switch string(o.Key) {
		case "input_tokens":
			s.usage.Prompt = countOf(&o)
		case "output_tokens":
			s.usage.Completion = countOf(&o)
		case "total_tokens":
			s.usage.Total = countOf(&o)
		case "input_tokens_details":
			if o.Text[o.Val] != '{' { // null: there are no details
				continue
			}
			for d := rawjson.ObjectAt(o.Text, o.Val); d.NextValue(); {
				switch listed := d.Text[d.Val] == '[' && len(d.Value()) > len("[]"); { // listed: the value is a list that is not empty
				case string(d.Key) == "cached_tokens":
					if s.usage.Cached = countOf(&d); cached != OwnCached {
						s.edits = append(s.edits, edit{d.Val, d.Pos, shown})
					}
				case string(d.Key) == "cached_tokens_per_turn" && listed && cached != OwnCached:
					s.edits = append(s.edits, edit{d.Val, d.Pos, "[" + shown + "]"})
				}
			}
		}
	}
}
